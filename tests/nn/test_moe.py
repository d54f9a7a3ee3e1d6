"""Layers with experts in training: what balances them, what is counted and dropped, and that adversarial routing is
exact at any ep."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.engine.build import State, build, write_slot
from phalanx.engine.step import accumulate, evaluate_step, reduce_step_totals, update
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.nn.moe import TALLIED
from phalanx.observe.routing import routing_text, routing_values
from tests.harness.parity import SEQ, assemble, base_run, parts_of, random_weights, step_batches


def routed(rank: int, world: int, run: Run, undecided: bool = False) -> dict:
    """One step: gradients, routing and the state that follows the load. `undecided`: routers are zero, so low
    numbers win for every token."""
    mesh = Mesh(make_plan(run, world).grid, rank)
    state = build(make_plan(run, world), mesh)
    random_weights(state.model)
    if undecided:
        clear_routers(state)
    state.model.train()
    tokens = accumulate(state, step_batches(run, mesh, 0, False))
    grads = parts_of(state, "grad")
    result = update(state, tokens, lr=1e-2)
    state.buffers.ready()
    return {
        "routing": result.routing.numpy(),
        "grads": grads,
        "weights": parts_of(state, "master"),
        "tokens": tokens.item(),
    }


def clear_routers(state: State) -> None:
    for flat in state.buffers.flat:
        for slot in flat.bucket.slots:
            if slot.spec.name.endswith("gate.weight"):
                write_slot(flat, slot, torch.zeros(slot.spec.shape, dtype=flat.master.dtype))


def variant(**model) -> Run:
    run = base_run("mixtral", global_batch=4)
    return replace(run, model=replace(run.model, **model))


@pytest.mark.parametrize("dispatch", ["alltoall", "allgather", "push"])
@pytest.mark.parametrize("ep, etp, tp", [(2, 1, 1), (4, 1, 2), (2, 2, 1), (8, 1, 2)])
def test_all_tokens_to_the_same_experts(ranks, ep, etp, tp, dispatch):
    """Truth: one process. With equal logits every token goes to experts 0 and 1, on one rank; all other experts have
    none."""
    run, world = variant(), max(ep * etp, 2 * tp)
    (truth,) = ranks.run("tests.nn.test_moe:routed", 1, run, True)
    room = {"expert_room": math.inf} if dispatch != "alltoall" else {}
    layout = LayoutConfig(ep=ep, etp=etp, tp=tp, dispatch=dispatch, **room)
    results = ranks.run("tests.nn.test_moe:routed", world, replace(run, layout=layout), True)
    load = truth["routing"][:, : -len(TALLIED)]
    assert (load[:, :2] == 4 * SEQ).all() and (load[:, 2:] == 0).all()
    expected, found = assemble([truth["grads"]]), assemble([r["grads"] for r in results])
    largest = max(np.abs(g).max() for g in expected.values())
    for name, right in expected.items():
        assert np.abs(found[name] - right).max() <= 1e-9 * max(np.abs(right).max(), 1e-6 * largest), name
        if ".experts." in name and ".experts.0." not in name and ".experts.1." not in name:
            assert not right.any() and not found[name].any()
    for r in results:
        np.testing.assert_allclose(r["routing"], truth["routing"], rtol=1e-10)


def dispatched(rank: int, world: int, run: Run) -> tuple[dict[int, int], np.ndarray]:
    """By layer the rows that this rank's experts multiplied, and the routing of the step. Of an expert cut over etp
    one rank counts."""
    mesh = Mesh(make_plan(run, world).grid, rank)
    state, rows = build(make_plan(run, world), mesh), {}
    random_weights(state.model)
    state.model.train()
    for layer in state.model.routed:
        rows[layer.layer] = 0

        def count(module, args, number=layer.layer):
            rows[number] += int(args[1][-1]) * (mesh.model.etp.index == 0)

        layer.experts.register_forward_pre_hook(count)
    accumulate(state, step_batches(run, mesh, 0, False))
    return rows, reduce_step_totals(state.model).routing.numpy()


@pytest.mark.parametrize(
    "layout",
    [
        dict(),
        dict(ep=4, tp=2),
        dict(pp=2, ep=2),
        dict(tp=4, etp=2),
        dict(ep=4, dispatch="push", expert_room=math.inf),
        dict(ep=2, etp=2, dispatch="push", expert_room=math.inf),
        dict(ep=2, tp=2, dispatch="allgather", expert_room=math.inf),
    ],
    ids=str,
)
def test_dispatched_and_dropped_are_all(ranks, layout):
    """Truth: tokens x k. The rows that experts multiplied, of all ranks, and those dropped; no expert keeps more
    than its room in a sequence."""
    run = variant(expert_capacity_factor=0.75)
    results = ranks.run("tests.nn.test_moe:dispatched", 4 if layout else 1, replace(run, layout=LayoutConfig(**layout)))
    routing = results[0][1]
    values = dict(zip(TALLIED, routing[:, -len(TALLIED) :].T))
    room = 4 * 8 * 3  # sequences x experts x ceil(0.75 * 16 * 2 / 8)
    assert (values["tokens"] == 4 * SEQ).all() and (routing[:, : -len(TALLIED)].sum(1) == 4 * SEQ * 2).all()
    for layer, dropped in enumerate(values["dropped"]):
        kept = sum(rows.get(layer, 0) for rows, _ in results)
        assert kept + dropped == 4 * SEQ * 2 and 0 < dropped and kept <= room


@pytest.mark.parametrize(
    "layout, world", [(dict(), 1), (dict(ep=2, tp=2), 2), (dict(ep=4), 4), (dict(pp=2, ep=2), 4)], ids=str
)
@pytest.mark.parametrize("scope", ["micro_batch", "sequence", "global_batch"])
def test_balance_loss_is_its_formula(ranks, scope, layout, world):
    """Truth: E sum f P and the mean squared log-sum-exp by hand, from what the layer was given; autograd makes their
    gradient."""
    run = variant(router_aux_loss_coef=0.05, router_aux_loss_scope=scope, num_hidden_layers=1, router_z_loss_coef=0.02)
    plain = replace(run, model=replace(run.model, router_aux_loss_coef=0.0, router_z_loss_coef=0.0))
    spread = LayoutConfig(**layout)
    with_loss, without = (ranks.run("tests.nn.test_moe:routed", world, replace(r, layout=spread)) for r in (run, plain))
    name = "model.layers.0.block_sparse_moe.gate.weight"
    got = assemble([r["grads"] for r in with_loss])[name] - assemble([r["grads"] for r in without])[name]
    sums, expected = by_hand(run, scope)
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-8, atol=1e-9 * np.abs(expected.numpy()).max())
    tallied = dict(zip(TALLIED, with_loss[0]["routing"][0, -len(TALLIED) :]))
    assert (tallied["balance"], tallied["z"]) == pytest.approx(sums, rel=1e-10)


def by_hand(run: Run, scope: str) -> tuple[tuple[float, float], torch.Tensor]:
    """The balancing losses of a step, before their coefficients and summed over tokens; and the gradient to the only
    router of the losses, each micro-batch weighted as a step weighs it."""
    state = build(make_plan(run, 1), Mesh(make_plan(run, 1).grid))
    random_weights(state.model)
    layer, seen = state.model.routed[0], []
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    batches = step_batches(run, state.mesh, 0, False)
    state.model.train()
    accumulate(state, batches)
    weight = layer.gate.detach().clone().requires_grad_()
    total = sum((b.labels >= 0).sum() for b in batches)
    loss, sums = torch.zeros((), dtype=torch.float64), [0.0, 0.0]
    for x, b in zip(seen, batches):
        logits = x @ weight.T
        p = logits.softmax(-1)
        chosen = torch.zeros_like(p).scatter_(1, p.topk(2, -1).indices, 1.0)
        if scope == "global_batch":
            chosen = layer.load.detach().expand_as(p)
        f, mean = chosen.sum(0) / chosen.sum(), p.mean(0)  # micro-batches of one sequence: both scopes are the same sum
        balance, z = 8 * (f * mean).sum(), torch.logsumexp(logits, -1).square().mean()
        sums = [sums[0] + SEQ * balance.item(), sums[1] + SEQ * z.item()]
        loss = loss + (b.labels >= 0).sum().double() / total * (0.05 * balance + 0.02 * z)
    loss.backward()
    return (sums[0], sums[1]), weight.grad


@pytest.mark.parametrize(
    "layout, world",
    [
        (dict(ep=4, dispatch="allgather"), 4),
        (dict(ep=4, dispatch="push"), 4),
        (dict(ep=4, tp=2, pp=2, dispatch="push"), 8),
    ],
    ids=str,
)
def test_too_little_room_is_the_same_step(ranks, layout, world):
    """Truth: one process. With no room to spare ranks lack rows in this step; it is done again, and says so."""
    run = variant(num_experts_per_tok=4)
    (truth,) = ranks.run("tests.nn.test_moe:routed", 1, run, True)
    run = replace(run, layout=LayoutConfig(expert_room=1.0, **layout))
    results = ranks.run("tests.nn.test_moe:routed", world, run, True)
    expected, found = assemble([truth["grads"]]), assemble([r["grads"] for r in results])
    largest = max(np.abs(g).max() for g in expected.values())
    for name, right in expected.items():
        assert np.abs(found[name] - right).max() <= 1e-9 * max(np.abs(right).max(), 1e-6 * largest), name
    missing = TALLIED.index("missing") - len(TALLIED)
    for r in results:
        assert r["routing"][:, missing].sum() > 0
        r["routing"][:, missing] = 0
        np.testing.assert_allclose(r["routing"], truth["routing"], rtol=1e-10)


def evaluated(rank: int, world: int, run: Run) -> float:
    """The loss of a step's tokens without training, every token at the same experts."""
    mesh = Mesh(make_plan(run, world).grid, rank)
    state = build(make_plan(run, world), mesh)
    random_weights(state.model)
    clear_routers(state)
    loss, tokens = evaluate_step(state.model, step_batches(run, mesh, 0, False))
    return (loss / tokens).item()


def test_evaluation_always_has_room(ranks):
    """Truth: one process. Without a backward there is no second try, so there must be room at once."""
    run = variant(num_experts_per_tok=4)
    (truth,) = ranks.run("tests.nn.test_moe:evaluated", 1, run)
    for dispatch in ("allgather", "push"):
        tight = replace(run, layout=LayoutConfig(ep=4, dispatch=dispatch, expert_room=1.0))
        assert ranks.run("tests.nn.test_moe:evaluated", 4, tight) == pytest.approx([truth] * 4, rel=1e-12)


def test_load_of_the_step_before(ranks):
    """After a step the state that the global-batch loss reads is that step's load, the same whoever counted."""
    run = variant(router_aux_loss_scope="global_batch")
    for layout, world in ((dict(), 1), (dict(ep=2, tp=2), 4)):
        results = ranks.run("tests.nn.test_moe:routed", world, replace(run, layout=LayoutConfig(**layout)))
        loads = assemble([r["weights"] for r in results])
        for number, row in enumerate(results[0]["routing"]):
            np.testing.assert_array_equal(
                loads[f"model.layers.{number}.block_sparse_moe.gate.load"], row[: -len(TALLIED)]
            )


def test_recompute_counts_once(ranks):
    run = variant()
    recomputed = replace(run, train=replace(run.train, recompute="full"))
    a, b = (ranks.run("tests.nn.test_moe:routed", 1, r)[0]["routing"] for r in (run, recomputed))
    np.testing.assert_array_equal(a, b)


def test_routing_in_words():
    """Truth: made-up counts. A dense layer has none."""
    rows = [
        [0.0] * (4 + len(TALLIED)),
        [10.0, 20.0, 30.0, 20.0, 40.0, 44.0, 8.0, 3.0, 0.0, 40.0],
        [20.0] * 4 + [20.0, 40.0, 4.0, 0.0, 5.0, 40.0],
    ]
    values = routing_values(rows)
    assert values["load_max"] == [None, 1.5, 1.0] and values["load_min"] == [None, 0.5, 1.0]
    assert (
        values["entropy"] == [None, 1.0, 0.5]
        and values["dropped"] == [None, 3.0, 0.0]
        and values["balance"] == [None, 1.1, 1.0]
    )
    assert routing_text(values) == " load=1.50@layer1 entropy=0.5@layer2 dropped=3 again=5"


def test_tally_starts_again(ranks):
    """What one step counted is not in the next."""
    run = variant()
    state = build(make_plan(run, 1), Mesh(make_plan(run, 1).grid))
    random_weights(state.model)
    state.model.train()
    for step in range(2):
        accumulate(state, step_batches(run, state.mesh, step, False))
        assert (reduce_step_totals(state.model).routing[:, -1] == 4 * SEQ).all()


def exchanged(rank: int, world: int, run: Run) -> dict[tuple[str, str], tuple[int, int]]:
    """(axis, op) -> (calls, bytes handed in) of one step's forward and backward."""
    mesh = Mesh(make_plan(run, world).grid, rank)
    state = build(make_plan(run, world), mesh)
    random_weights(state.model)
    state.model.train()
    mesh.watch.on = True
    accumulate(state, step_batches(run, mesh, 0, False))
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for site, (calls, nbytes) in mesh.watch.calls.items():
        before = found.get((site.axis, site.op), (0, 0))
        found[site.axis, site.op] = (before[0] + calls, before[1] + nbytes)
    return found


@pytest.mark.parametrize("tp", [1, 2])
def test_bytes_of_the_all_gather(ranks, tp):
    """Truth: the formula. Per layer and micro-batch each rank gathers tokens, their gradients, choices and weights
    of its T tokens, and scatters sums of outputs, of gradients and of the weights' gradients for all n T."""
    run = variant(router_aux_loss_coef=0.0)
    results = ranks.run(
        "tests.nn.test_moe:exchanged", 2, replace(run, layout=LayoutConfig(ep=2, tp=tp, dispatch="allgather"))
    )
    n, tokens, width, slots, number = 2, SEQ // tp, 32, 2, 8
    each = run.model.num_hidden_layers * 4 * tp // 2  # layers x micro-batches of a rank
    for found in results:
        assert found["ep x etp", "all_gather"] == (4 * each, each * tokens * number * (2 * width + 2 * slots))
        assert found["ep x etp", "reduce_scatter"] == (3 * each, each * n * tokens * number * (2 * width + slots))
        assert {op for axis, op in found if axis in ("ep", "etp")} == set()


def test_bytes_of_the_push(ranks):
    """Truth: the formula. Per layer and micro-batch four pushes of what a rank's T tokens could be (tests.ops.test_push
    counts what is), choices and weights gathered, the weights' gradients scattered."""
    run = variant(router_aux_loss_coef=0.0)
    results = ranks.run(
        "tests.nn.test_moe:exchanged", 4, replace(run, layout=LayoutConfig(ep=4, tp=2, dispatch="push"))
    )
    tokens, width, slots, number = SEQ // 2, 32, 2, 8
    each = run.model.num_hidden_layers * 2  # layers x micro-batches of a rank
    for found in results:
        assert found["ep x etp", "push"] == (4 * each, 4 * each * tokens * width * number)
        assert found["ep x etp", "all_gather"] == (2 * each, 2 * each * tokens * slots * number)
        assert found["ep x etp", "reduce_scatter"] == (each, each * 4 * tokens * slots * number)
        assert {op for axis, op in found if axis in ("ep", "etp")} == set()


def test_bytes_of_the_all_to_all(ranks):
    """Truth: the formula. Summed over ranks each (token, expert) pair travels four times, its way home in forward
    and backward included; the sizes are one number per expert and layer."""
    run = variant(router_aux_loss_coef=0.0)
    results = ranks.run("tests.nn.test_moe:exchanged", 4, replace(run, layout=LayoutConfig(ep=4, dispatch="alltoall")))
    width, slots, number, layers = 32, 2, 8, run.model.num_hidden_layers
    calls = {r["ep", "all_to_all"][0] for r in results}
    assert calls == {layers * 5}  # one micro-batch a rank: sizes, there and back, and both again in backward
    sizes = 4 * layers * 8 * 4  # ranks x layers x experts x int32
    assert sum(r["ep", "all_to_all"][1] for r in results) == layers * 4 * (4 * SEQ * slots * width * number) + sizes
    assert all(axis != "ep x etp" for r in results for axis, _ in r)

"""optim.in_backward: gradients that are applied and freed in the middle of backward, bucket by bucket."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.engine.build import State, build
from phalanx.engine.step import accumulate, train_step
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import rank_uses
from phalanx.layout.config import LayoutConfig
from phalanx.optim.adamw import AdamWConfig
from phalanx.schedule.actions import Apply, ScheduleError
from tests.harness import parity

NO_CLIPPING = AdamWConfig(clip_grad=0.0)


def run_of(model: str, world: int, in_backward: bool = True, optim: AdamWConfig = NO_CLIPPING, **layout) -> Run:
    made = LayoutConfig(bucket_mb=0, **layout)
    dp = world // (made.tp * made.cp)
    run = parity.base_run(model, global_batch=dp, micro_batch=1)
    return replace(run, layout=made, optim=replace(optim, in_backward=in_backward))


def steps_of(rank: int, world: int, run: Run, steps: int = 3) -> dict:
    """Losses, norms and the last masters as this rank's parts."""
    plan = make_plan(run, world)
    mesh = Mesh(plan.grid, rank)
    state = build(plan, mesh)
    parity.random_weights(state.model)
    state.model.train()
    losses, norms = [], []
    for step in range(steps):
        result = train_step(state, parity.step_batches(run, mesh, step, True), lr=1e-2)
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
    state.buffers.ready()
    return {
        "losses": losses,
        "norms": norms,
        "weights": parity.parts_of(state, "master"),
        "steps": state.optimizer.step.item(),
    }


LAYOUTS = [
    ("llama", 1, {}),
    ("gpt2", 1, {}),  # tied embeddings
    ("mixtral", 2, {"ep": 2, "dispatch": "alltoall", "sharding": 1}),
    ("qwen3", 2, {"tp": 2}),
    ("gpt2", 2, {"cp": 2, "sharding": 3}),
    *(("llama", 2, {"sharding": level}) for level in range(4)),
    ("gpt2", 4, {"sharding": 2, "shard_group": 2, "shard_across": "optimizer"}),
    ("qwen3", 4, {"tp": 2, "sharding": 3, "prefetch": 2}),
]


@pytest.mark.parametrize("model, world, layout", LAYOUTS, ids=str)
def test_the_same_steps_as_with_all_gradients(ranks, model, world, layout):
    """Without clipping, in float64: every loss, every norm and every master, to the bit."""
    now, truth = (
        ranks.run("tests.engine.test_in_backward:steps_of", world, run_of(model, world, flag, **layout))
        for flag in (True, False)
    )
    for a, b in zip(now, truth):
        assert a["losses"] == b["losses"] and a["steps"] == b["steps"] == 3
        assert a["norms"] == pytest.approx(b["norms"], rel=1e-12)
        for (name, *at, x), (other, *there, y) in zip(a["weights"], b["weights"], strict=True):
            assert (name, at) == (other, there) and ((x == y) | (x != x)).all(), name


def state_of(run: Run) -> State:
    plan = make_plan(run, 1)
    state = build(plan, Mesh(plan.grid, 0))
    parity.random_weights(state.model)
    state.model.train()
    return state


def opened(state: State) -> int:
    """Bytes of gradients."""
    tensors = [t for f in state.buffers.flat for t in (f.grad, f.grad_kept)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("sharding", [0, 1, 2, 3])
def test_gradients_take_a_bucket_at_a_time(ranks, sharding):
    """What is there after each instruction: never more than the plan says, and at some moment as much."""
    world = 2 if sharding else 1
    run = run_of("llama", world, sharding=sharding)
    for most, after, planned, whole in ranks.run("tests.engine.test_in_backward:most_opened", world, run):
        assert most == planned < (whole if sharding > 1 else whole / 2) and after == 0


def most_opened(rank: int, world: int, run: Run) -> tuple[int, int, int, int]:
    """Most bytes of gradients in a step and after it, by measure; most by the plan, also with in_backward=false."""
    plan = make_plan(run, world)
    state = build(plan, Mesh(plan.grid, rank))
    parity.random_weights(state.model)
    state.model.train()
    seen = [opened(state)]
    assert seen == [0]

    def noted(do):
        def run_and_look(instruction):
            do(instruction)
            seen.append(opened(state))

        return run_and_look

    state.model.handlers = {kind: noted(do) for kind, do in state.model.handlers.items()}
    train_step(state, parity.step_batches(run, state.mesh, 0, False), lr=1e-2)
    usual = replace(run, optim=replace(run.optim, in_backward=False))
    planned = [rank_uses(make_plan(each, world), 1)[0][0].memory["gradients"] for each in (run, usual)]
    return max(seen), seen[-1], *planned


def masters_of(state: State) -> list[torch.Tensor]:
    return [f.master.clone() for f in state.buffers.flat]


def test_each_bucket_is_clipped_by_its_own_norm():
    """Truth: the gradients of the same step that are kept. The rate is 1, and Adam's first step with a large epsilon is
    in proportion to the gradient, so what is added to each master says by what its gradient was multiplied."""
    optim = AdamWConfig(clip_grad=0.0, weight_decay=0.0, beta1=0.0, beta2=0.0, eps=1e9)
    kept = state_of(run_of("llama", 1, in_backward=False, optim=optim))
    batches = parity.step_batches(kept.plan.run, kept.mesh, 0, False)
    accumulate(kept, batches)
    limit = sorted(f.own_grad.norm().item() for f in kept.buffers.flat)[2]  # some are smaller
    state = state_of(run_of("llama", 1, optim=replace(optim, clip_grad=limit, clip_by="bucket")))
    before = masters_of(state)
    result = train_step(state, batches, lr=1e9)
    clipped = set()
    for f, old, new in zip(kept.buffers.flat, before, masters_of(state)):
        norm = f.own_grad.norm().item()
        factor = min(1.0, limit / (norm + 1e-6))
        clipped.add(factor < 1)
        torch.testing.assert_close(new - old, -factor * f.own_grad, rtol=1e-6, atol=1e-12)
    assert clipped == {True, False} and len(before) > 3
    torch.testing.assert_close(result.grad_norm, kept.buffers.grad_norm())


def test_a_bad_loss_changes_nothing_and_a_bad_gradient_only_what_came_before():
    run = run_of("llama", 1)
    state = state_of(run)
    batches = parity.step_batches(run, state.mesh, 0, False)
    layers = [f for f in state.buffers.flat if any("layers" in p.name for s in f.bucket.slots for p in s.spec.pieces)]
    before = masters_of(state)
    state.buffers.flat[-1].weight.fill_(torch.inf)  # the head: the loss is not finite
    result = train_step(state, batches, lr=1e-2)
    assert result.skipped == 1 and state.optimizer.step == 0
    assert all(torch.equal(a, b) for a, b in zip(before[:-1], masters_of(state)[:-1]))

    state = state_of(run)
    before = masters_of(state)
    first = layers[0].bucket.id
    apply = state.model.handlers[Apply]

    def spoilt(i: Apply) -> None:
        if i.bucket == first:
            state.buffers.flat[first].grad[3] = torch.nan
        apply(i)

    state.model.handlers = {**state.model.handlers, Apply: spoilt}
    result = train_step(state, batches, lr=1e-2)
    changed = [not torch.equal(a, b) for a, b in zip(before, masters_of(state))]
    assert result.skipped == 1 and not changed[first] and any(changed)
    order = [i.bucket for i in state.model.program(1) if isinstance(i, Apply)]
    skipped = order[order.index(first) :]
    assert len(skipped) > 1 and [b for b in order if not changed[b]] == skipped


def test_gradients_that_stay_are_not_to_be_had():
    state = state_of(run_of("llama", 1))
    with pytest.raises(RuntimeError, match=r"optim\.in_backward=false"):
        accumulate(state, parity.step_batches(state.plan.run, state.mesh, 0, False))
    with pytest.raises(ScheduleError, match="one micro-batch a step"):
        state.plan.proved_program(2)
    assert not any(isinstance(i, Apply) for i in state.plan.proved_program(2, backward=False).lists[0])


def test_with_masters_that_are_split_and_moments_in_8_bits():
    """In bf16: the same bits as with all gradients at once."""
    optim = AdamWConfig(clip_grad=0.0, masters="split", moments="8bit")
    found = []
    for flag in (True, False):
        run = run_of("llama", 1, flag, optim)
        run = replace(run, train=replace(run.train, precision="bf16"))
        state = state_of(run)
        for step in range(3):
            train_step(state, parity.step_batches(run, state.mesh, step, False), lr=1e-2)
        found.append([t for s in state.optimizer.shards for kind in s.kinds for t in [s.values(kind)]])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

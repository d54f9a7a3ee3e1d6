"""Experts' tokens that travel as codes (layout.dispatch=..._fp8): every bit of a step is that of the exchange in the
activations' dtype."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from phalanx.base.sizes import GIB
from phalanx.comm.axis import ModelAxes
from phalanx.comm.debug import Site
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.engine.build import build
from phalanx.engine.step import accumulate
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import rank_uses
from phalanx.forecast.text import sent_table
from phalanx.layout.config import LayoutConfig
from phalanx.layout.grid import Grid
from phalanx.ops.dense.activation import gated_rows
from phalanx.ops.dense.gate import SWIGLU
from phalanx.ops.experts.exchange import EXCHANGES, Casts
from phalanx.ops.experts.grouped import Later
from phalanx.ops.experts.permute import CodedRows, Gathered, plan_rows
from phalanx.ops.quantized.experts import low_grouped_matmul, low_grouped_mlp
from phalanx.ops.quantized.linear import DY, X
from tests import parity
from tests.pool import RanksFailed
from tests.sample import covering, features, rest_in_soak
from tests.test_low import low_run
from tests.test_low_experts import EXPERTS, NARROW, ONE_EACH, experts_of
from tests.test_low_kernels import some

CHOICE = torch.rand(30, 4, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :2]


@pytest.mark.parametrize("twin", ["triton", "plain"])
def test_codes_put_in_place_are_those_of_rows(twin):
    """Truth: the cast of the rows themselves: codes in both layouts, scales, the amax. What was lost is counted once
    for each token."""
    rows = plan_rows(
        torch.where(CHOICE == 2, 4, CHOICE), 0, 3, 48, "plain"
    )  # one expert has none, some tokens have none, some rows are nobody's
    there = ((CHOICE < 3) & (CHOICE != 2)).any(1)
    assert 0 < there.sum() < 30 and rows.ends_E[-1] < 44 and rows.ends_E.diff().eq(0).any()
    rows = replace(rows, ends_E=rows.ends_E[[0, 1, 1, 2]])  # and another one
    for which in (X, DY):
        for width in (144, 16):
            before, after = (experts_of("delayed", twin, True) for _ in range(2))
            tokens = some(30, width, torch.float32, seed=which)
            tokens[~there] = math.nan
            codes = before.sent(which, tokens, there)
            found = before.rows(which, CodedRows(codes, rows), rows.ends_E)
            truth = after.rows(which, Gathered(tokens, rows, twin), rows.ends_E)
            same_used(found, truth, rows.ends_E)
            seen = [low.amax if twin == "plain" else low.counts[..., -1].amax(1) for low in (before, after)]
            assert torch.equal(*seen) and seen[0].any()
            assert before.counts[which].sum(0)[2] == 30 * width and codes.dtype == torch.uint8


def same_used(found, truth, ends: Tensor) -> None:
    """What products read: rows before the last end, places of tiles that an expert has."""
    last, tiles = int(ends[-1]), int((ends.diff(prepend=ends.new_zeros(1)) > 0).sum())
    for a, b, used in zip(found, truth, (np.s_[:last], np.s_[:, : 128 * tiles])):
        assert a.codes.dtype == b.codes.dtype and a.block == b.block and torch.equal(a.scales, b.scales)
        assert torch.equal(a.codes.view(torch.uint8)[used], b.codes.view(torch.uint8)[used])


def experts_over(axes: ModelAxes, dispatch: str, twin: str, coded: bool, left_out: bool) -> list[Tensor]:
    """Four experts over the ranks of `axes.experts`, each with tokens of its own: outputs, gradients (tokens,
    weights, matrices), amaxes."""
    group, here = axes.experts, 4 // axes.ep.size
    choice = torch.where((CHOICE == 1) | (torch.arange(30) % 7 == 0).unsqueeze(1), 4, CHOICE) if left_out else CHOICE
    choice = choice.roll(group.index, 0)
    x, weights = (
        some(30, 64, torch.float32, seed=group.index).clamp(-4, 4),
        torch.rand(30, 2, generator=torch.Generator().manual_seed(1)),
    )
    x[choice.eq(4).all(1)] = 30.0  # larger than all others
    x, weights, stacks = x.requires_grad_(), weights.requires_grad_(), []
    for rows, columns in ((64, 64), (64, 32)):
        w = (
            (some(4 * rows, columns, torch.float32, seed=3) / 64)
            .clamp(-1, 1)
            .view(4, rows, columns)[axes.ep.index * here :][:here]
        )
        w = w.clone().requires_grad_()
        w.grad, w.low = torch.zeros_like(w), experts_of("delayed", twin, True)
        stacks.append(w)
    up, down = stacks

    def compute(rows: Tensor, ends: Tensor, of_rows: Tensor | None, later: Later | None, source: int) -> Tensor:
        if twin == "triton":
            return low_grouped_mlp(rows, up, down, ends, of_rows, SWIGLU, twin, later)
        hidden = gated_rows(low_grouped_matmul(rows, up, ends, up.low, later=later), ends, of_rows, SWIGLU, twin)
        return low_grouped_matmul(hidden, down, ends, down.low)

    exchange = EXCHANGES[dispatch](x, axes, casts=Casts(up.low, down.low, left_out) if coded else None)
    exchange.send(choice, 4, twin)
    y, _ = exchange(weights, compute, twin, up.low.nan(x) if coded or twin == "triton" else None)
    y.backward(some(30, 64, torch.float32, seed=7).clamp(-10, 10))
    amaxes = torch.stack([w.low.amax if twin == "plain" else w.low.counts[..., -1].amax(1).float() for w in stacks])
    return [y.detach(), x.grad, weights.grad, *(w.grad for w in stacks), group.all_reduce(amaxes, "max").wait()]


LONG = pytest.mark.soak  # Triton's interpreter takes its time


@pytest.mark.parametrize(
    "twin, left_out",
    [
        pytest.param("triton", False, marks=LONG),
        pytest.param("triton", True, marks=LONG),
        ("plain", False),
        ("plain", True),
    ],
)
@pytest.mark.parametrize("dispatch", ["allgather", "alltoall", "push"])
def test_an_exchange_of_codes_is_one_of_rows(dispatch, twin, left_out):
    """On one rank, with and without tokens that go nowhere: outputs, gradients and amaxes to the bit."""
    found = [experts_over(ModelAxes(), dispatch, twin, coded, left_out) for coded in (True, False)]
    assert all(torch.equal(a, b) for a, b in zip(*found)) and all(t.abs().sum() > 0 for t in found[0])


def both_ways(rank: int, world: int, dispatch: str, layout: dict) -> bool:
    mesh = Mesh(Grid(**layout), rank)
    mesh.prepare_experts()
    found = [experts_over(mesh.model, dispatch, "triton", coded, True) for coded in (True, False)]
    return all(torch.equal(a, b) for a, b in zip(*found)) and all(bool(t.abs().sum() > 0) for t in found[0])


TWO = dict(dp=2, ep=2)


@pytest.mark.parametrize(
    "dispatch, layout",
    [
        ("allgather", TWO),
        pytest.param("alltoall", TWO, marks=LONG),
        pytest.param("push", dict(dp=4, ep=2, etp=2), marks=LONG),
    ],
    ids=str,
)
def test_kernels_carry_codes_between_ranks(ranks, dispatch, layout):
    assert all(ranks.run("tests.test_code_exchange:both_ways", layout["dp"], dispatch, layout))


# ---- layouts -------------------------------------------------------------------------------------

parity.MODELS["low-mixtral-capacity"] = replace(NARROW, expert_capacity_factor=0.75)
parity.MODELS["low-mixtral-deep"] = replace(NARROW, num_hidden_layers=3)
parity.MODELS["low-deepseek"] = replace(
    parity.MODELS["deepseek_v3"],
    hidden_size=64,
    intermediate_size=64,
    moe_intermediate_size=16,
    num_experts_per_tok=2,
    router_aux_loss_coef=0.0,
)
FP8 = dict(EXPERTS, history=2)


def case(
    world: int, dispatch: str, model: str = "low-mixtral", train: dict | None = None, fp8: dict | None = None, **layout
) -> tuple[int, Run]:
    return world, low_run("delayed", model, train, fp8 or FP8, dispatch=dispatch, **layout)


LAYOUTS = {
    "ep2, all-gather": case(2, "allgather", ep=2),
    "ep2, all-gather in memory, pp2": case(4, "allgather", ep=2, pp=2, ep_overlap="on"),
    "ep4 over tp2 dp2, push, full recompute": case(4, "push", train=dict(ONE_EACH, recompute="full"), tp=2, ep=4),
    "ep2 x etp2 in tp4, all-to-all": case(4, "alltoall", tp=4, ep=2, etp=2),
    "ep4, all-gather, capacity, experts again": case(
        4,
        "allgather",
        "low-mixtral-capacity",
        dict(global_batch=4, micro_batch=1, recompute_ops=["experts"]),
        ep=4,
        sharding=2,
    ),
    "ep2, push, activation again, level 3": case(2, "push", train=dict(recompute="pointwise"), ep=2, sharding=3),
    "ep4 over tp2 dp2, gpt-oss, all-to-all": case(4, "alltoall", "low-gpt-oss", ONE_EACH, tp=2, ep=4),
    "etp2 in tp2, push": case(2, "push", tp=2, etp=2),
    "ep2, all-gather, shared experts, a dense layer": case(2, "allgather", "low-deepseek", ep=2),
    "ep2, all-to-all, experts of a layer and gates of another left out": case(
        2, "alltoall", "low-mixtral-deep", fp8=dict(FP8, exclude=["*.self_attn.*", "*.0.*", "*.1.*.w[13].*"]), ep=2
    ),
}
STEPS = 3


def as_codes(run: Run) -> Run:
    return replace(run, layout=replace(run.layout, dispatch=f"{run.layout.dispatch}_fp8"))


def same_bits(found: list[dict], truth: list[dict]) -> None:
    for a, b in zip(found, truth):
        assert a["losses"] == b["losses"] and a["norms"] == b["norms"]
        for x, y in zip((*a["grads"], a["weights"]), (*b["grads"], b["weights"])):
            for (name, *_, ours), (_, *_, theirs) in zip(x, y):
                assert np.array_equal(ours, theirs, equal_nan=True), name


PACKED = ("ep2, all-gather", "ep2 x etp2 in tp4, all-to-all")  # some of their tokens are padding
STEP_CASES = [*((name, False) for name in LAYOUTS), *((name, "packed") for name in PACKED)]
CHOSEN = covering({name: features(run) for name, (_, run) in LAYOUTS.items()})


@pytest.mark.parametrize(
    "at", rest_in_soak(STEP_CASES, [*((name, False) for name in CHOSEN), (PACKED[0], "packed")]), ids=str
)
def test_steps_have_the_same_bits(ranks, at):
    """Truth: the same layout with rows in their own dtype, which tests/test_low_experts.py compares with one
    process. In the third step scales come from the amaxes of both steps before."""
    name, documents = at
    world, run = LAYOUTS[name]
    found, truth = (ranks.run("tests.parity:run_layout", world, r, STEPS, documents) for r in (as_codes(run), run))
    same_bits(found, truth)
    assert truth[0]["losses"][0] != truth[0]["losses"][1]


EACH = ("ep2 x etp2 in tp4, all-to-all", "ep2, all-gather", "etp2 in tp2, push")


@pytest.mark.parametrize("name", rest_in_soak(EACH, EACH[1:]))
def test_each_collective_matters(ranks, name):
    """Each collective that the exchange calls, found by tracing, is dropped once: the comparison must fail."""
    world, run = LAYOUTS[name]
    run = as_codes(replace(run, train=replace(run.train, global_batch=2 * run.layout.pp, micro_batch=1)))
    truth = ranks.run("tests.parity:run_layout", world, run, 1, False, None, True)
    sites = {site for r in truth for site in map(Site._make, r["sites"]) if site.file == "ops/experts/exchange.py"}
    assert {site.axis for site in sites} <= {"ep", "etp", "ep x etp"} and len(sites) > 3
    for site in sites:
        with pytest.raises((AssertionError, RanksFailed)):
            same_bits(ranks.run("tests.parity:run_layout", world, run, 1, False, site, timeout=60.0), truth)


def exchanged(rank: int, world: int, run: Run) -> dict[tuple[str, str], tuple[int, int]]:
    """(axis, op) -> (calls, bytes handed in) of forward and backward of the second step: the first is done once
    more, to find scales."""
    mesh = Mesh(make_plan(run, world).grid, rank)
    state = build(make_plan(run, world), mesh)
    parity.random_weights(state)
    state.train()
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for step in range(2):
        mesh.watch.on = step > 0
        accumulate(state, parity.step_batches(run, mesh, step, False))
    for site, (calls, nbytes) in mesh.watch.calls.items():
        before = found.get((site.axis, site.op), (0, 0))
        found[site.axis, site.op] = (before[0] + calls, before[1] + nbytes)
    return found


def test_bytes_of_the_all_gather(ranks):
    """Truth: the formula. As tests/test_moe.py has it, but that tokens and their gradients are a byte an element.
    Calls are the same."""
    world, run = LAYOUTS["ep2, all-gather"]
    tokens, width, slots, number, each = 16, 64, 2, 8, 2 * 2  # float64; layers x micro-batches of a rank
    run = replace(run, train=replace(run.train, micro_batch=1, global_batch=4))
    for found in ranks.run("tests.test_code_exchange:exchanged", world, as_codes(run)):
        assert found["ep x etp", "all_gather"] == (4 * each, each * tokens * (2 * width + number * 2 * slots))
        assert found["ep x etp", "reduce_scatter"] == (3 * each, each * 2 * tokens * number * (2 * width + slots))


def test_what_the_plan_says_is_sent(ranks):
    """Truth: what was handed in, by the ring formulas; the plan counts no other exchange of experts."""
    world, run = LAYOUTS["ep2, all-gather"]
    plan = make_plan(as_codes(run), world)
    (use,), _ = rank_uses(plan, plan.num_micro_batches(run.train.global_batch))
    for found in ranks.run("tests.test_code_exchange:exchanged", world, plan.run):
        handed_in = {op: nbytes for (axis, op), (_, nbytes) in found.items() if axis == "ep x etp"}
        assert (
            use.sent["ep"] == handed_in["all_gather"] * (world - 1) + handed_in["reduce_scatter"] * (world - 1) / world
        )
    assert "tokens to their experts as codes and back" in plan_text(plan.run, world) and " as codes" not in plan_text(
        run, world
    )


def plan_text(run: Run, world: int) -> str:
    plan = make_plan(run, world)
    return sent_table(plan, rank_uses(plan, plan.num_micro_batches(run.train.global_batch))[0], GIB)


def test_bytes_of_the_push(ranks):
    world, run = LAYOUTS["etp2 in tp2, push"]
    tokens, width, number, each = 16 // 2, 64, 8, 2 * 4
    run = replace(run, train=replace(run.train, micro_batch=1, global_batch=4))
    for found in ranks.run("tests.test_code_exchange:exchanged", world, as_codes(run)):
        assert found["ep x etp", "push"] == (4 * each, 2 * each * tokens * width * (1 + number))


def test_bytes_of_the_all_to_all(ranks):
    """Summed over ranks each (token, expert) pair travels twice as codes and comes home twice as it is; sizes are
    one number per expert and layer."""
    _, run = LAYOUTS["ep4 over tp2 dp2, gpt-oss, all-to-all"]
    run = replace(run, layout=LayoutConfig(ep=4, dispatch="alltoall"), train=replace(run.train, global_batch=4))
    results = ranks.run("tests.test_code_exchange:exchanged", 4, as_codes(run))
    layers, width, slots, number = run.model.num_hidden_layers, 64, run.model.num_experts_per_tok, 8
    assert {r["ep", "all_to_all"][0] for r in results} == {layers * 5}
    sizes = 4 * layers * 8 * 4
    assert (
        sum(r["ep", "all_to_all"][1] for r in results) == layers * 2 * (4 * 16 * slots * width * (1 + number)) + sizes
    )


@pytest.mark.parametrize(
    "name, train",
    [
        ("ep2 x etp2 in tp4, all-to-all", {}),
        ("ep2, all-gather", dict(recompute_ops=["experts"])),
        ("ep2, all-gather", dict(recompute_ops=["activation"], offload_layers=1)),
    ],
    ids=str,
)
def test_graphs_and_activations_on_the_host_change_no_bit(ranks, name, train):
    """Truth: without graphs, without the exchange of codes; tests/test_graphs.py says what stands for a GPU here."""
    world, run = LAYOUTS[name]
    run = replace(run, train=replace(run.train, **train))
    plain = ranks.run("tests.test_graphs:trained", world, run, False, False)
    for (expected, *_), (found, parts, *_) in zip(
        plain, ranks.run("tests.test_graphs:trained", world, as_codes(run), False, True)
    ):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert max(parts) > 1

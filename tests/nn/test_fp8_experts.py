"""Experts in low precision (train.fp8): casts and products against torch expert by expert, kernels against their
reference implementations to the bit, layouts against one process."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.base.registry import BUILT_IN
from phalanx.comm.axis import ModelAxes
from phalanx.comm.debug import Site
from phalanx.models.mixtral import MixtralConfig
from phalanx.ops.dense.activation import GatedRows, GatedRowsGrad, gated_rows, parts_of_sums
from phalanx.ops.dense.activation import gated_backward as plain_backward
from phalanx.ops.dense.gate import CLAMPED_SWIGLU, SWIGLU
from phalanx.ops.dense.gated_kernel import gated_backward, gated_forward
from phalanx.ops.experts.exchange import EXCHANGES
from phalanx.ops.experts.grouped import Later, grouped_matmul
from phalanx.ops.experts.permute import PERMUTE, Gathered
from phalanx.ops.experts.rows import ExpertRows
from phalanx.ops.lazy_tensor import LazyTensor
from phalanx.ops.quantized.expert_quantizer import PLACE, ExpertQuantizer, PaddedRows, tiles_for, values
from phalanx.ops.quantized.experts import quantized_grouped_matmul, quantized_grouped_mlp, use_quantized_grouped_mlp
from phalanx.ops.quantized.quantizer import DY, X
from phalanx.ops.quantized.recipes import (
    COUNTS,
    SLOTS,
    Recipe,
    Scaled,
    block_amax,
    dequantize,
    find_recipe,
    multipliers,
    quantize,
)
from tests.harness import parity
from tests.harness.pool import RanksFailed
from tests.harness.sample import covering, features, rest_in_soak
from tests.harness.weights import make_weight
from tests.nn.test_fp8 import low_run
from tests.ops.test_fp8_kernels import same, some

GPU_RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise")
ENDS = torch.tensor([37, 37, 165, 200], dtype=torch.int32)  # one has none, one more than a tile; 12 rows are nobody's
ROWS, OUT, IN = 212, 144, 272


def experts_of(recipe: str, implementation: str, given: bool = False) -> ExpertQuantizer:
    low = ExpertQuantizer(find_recipe(recipe), "w", 0, ModelAxes(), implementation)  # type: ignore[arg-type]
    low.counts, low.amax = torch.zeros(3, SLOTS, COUNTS, dtype=torch.int64), torch.zeros(3)
    if given:
        low.multiplier = torch.tensor([3.0, 40.0, 0.01])
    return low


def rows_of(count: int = ROWS, width: int = IN, seed: int = 0) -> Tensor:
    x = some(count, width, seed=seed)
    x[int(ENDS[-1]) :] = math.nan  # never read
    return x


def stack(seed: int = 1, outer: int = OUT, experts: int = 4) -> Tensor:
    return some(experts * outer, IN, seed=seed).view(experts, outer, IN)


@pytest.mark.parametrize("recipe", rest_in_soak(GPU_RECIPES, ("delayed",)))
def test_weights_are_cast_where_they_were(recipe):
    outer = 256 if recipe == "blockwise" else OUT
    low, plain = (experts_of(recipe, implementation, recipe == "delayed") for implementation in ("triton", "plain"))
    low.refresh(stack(1, outer, 2))
    before = [(q.quantized.data_ptr(), q.scales.data_ptr()) for q in low.quantized(torch.empty(0))]
    low.refresh(stack(2, outer, 2))
    plain.refresh(stack(2, outer, 2))
    for q, truth, where in zip(low.quantized(torch.empty(0)), plain.quantized(torch.empty(0)), before):
        same(q, truth)
        assert (q.quantized.data_ptr(), q.scales.data_ptr()) == where


@pytest.mark.parametrize("recipe", BUILT_IN["fp8_recipe"])
def test_each_expert_is_cast_by_itself(recipe):
    """Truth: ops.quantized.recipes of each expert's rows alone; where one number is for all rows, with that."""
    r, low = find_recipe(recipe), experts_of(recipe, "plain")
    clean = torch.where((torch.arange(ROWS) < ENDS[-1]).unsqueeze(1), rows_of(), 0)
    forward, by_places = low.rows(X, rows_of(), ENDS)
    at, first = PaddedRows.of(ENDS, ROWS, tiles_for(ROWS, 4)), 0
    found, laid = values(forward, at.group_R, torch.float32), values(by_places.transposed(), at.group_P, torch.float32)
    whole = low.mixed(at.lay(clean))
    for a, b in zip([0, *ENDS.tolist()], ENDS.tolist()):
        if b > a:
            same_values(found[a:b], clean[a:b], r.tokens, r, clean)
            alone = low.mixed(F.pad(clean[a:b], (0, 0, 0, (a - b) % 16)))
            same_values(laid[first : first + len(alone)], alone, r.tokens[::-1], r, whole)
        first += -(-(b - a) // PLACE) * PLACE
    weight = stack(outer=256)
    low.refresh(weight)
    whole = values(low.quantized(weight)[1].transposed(), torch.arange(4).repeat_interleave(256), torch.float32).view(
        4, 256, IN
    )
    for e in range(4):
        same_values(whole[e], weight[e], r.weight[::-1], r, weight[e])


def same_values(found: Tensor, x: Tensor, block: tuple[int, int], r: Recipe, whole: Tensor) -> None:
    """x in blocks of its own; `whole`: what a scale of everything is of."""
    amax, top = block_amax(whole if block == (0, 0) else x, block), whole.float().abs().max()
    truth = quantize(x, block, r.forward, multipliers(amax, r.forward, r.scale, top))
    torch.testing.assert_close(found, dequantize(truth, torch.float32), rtol=1e-6, atol=0)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("recipe", BUILT_IN["fp8_recipe"])
def test_products_are_near_those_of_values(recipe, biased):
    """Truth: the grouped matmul in fp32; as near as the formats are fine (rounding at random has twice the variance
    of rounding to the nearest)."""
    torch.manual_seed(1)
    outer = 256 if recipe == "blockwise" else OUT
    x, weight, bias, dy = (torch.randn(*s) for s in ((ROWS, IN), (4, outer, IN), (4, outer), (ROWS, outer)))
    found = []
    for low in (experts_of(recipe, "plain"), None):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        more = leaves[2] if biased else None
        y = (
            grouped_matmul(leaves[0], leaves[1], ENDS, "plain", more)
            if low is None
            else quantized_grouped_matmul(leaves[0], leaves[1], ENDS, low, more)
        )
        y.backward(dy)
        found.append([y.detach(), *(t.grad for t in leaves[: 2 + biased])])
    for ours, truth in zip(*found):
        off = ((ours - truth).norm() / truth.norm()).item()
        assert off < {
            "nvfp4": 0.25,
            "tensorwise": 0.08,
            "delayed": 0.08,
        }.get(recipe, 0.06)
        assert off > 1e-3 or ours.shape == bias.shape  # the bias has no codes


PRODUCTS = [f"{recipe} {fast}" for recipe in GPU_RECIPES for fast in (False, True)]


@pytest.mark.parametrize(
    "name",
    rest_in_soak(PRODUCTS, ("blockwise True",)),
)
def test_products_are_those_of_the_plain_twin(name):
    """Same codes, sums in another order; gradients come on top of what is there; rows that are nobody's are not
    read."""
    recipe, fast = name.split()[0], name.endswith("True")
    outer = 256 if recipe == "blockwise" else OUT
    inner = 384 if recipe == "blockwise" else IN
    found = []
    for implementation in ("triton", "plain"):
        low = experts_of(recipe, implementation)
        if recipe == "delayed":
            low.multiplier = torch.tensor([90.0, 100.0, 10000.0])
        low.fast_forward = low.fast_backward = fast
        torch.manual_seed(3)
        x, weight, bias, dy = (torch.randn(*s) for s in ((ROWS, inner), (4, outer, inner), (4, outer), (ROWS, outer)))
        x[200:], dy[200:] = math.nan, math.nan
        x, weight, bias = (t.requires_grad_() for t in (x, weight, bias))
        weight.grad = torch.full_like(weight, 3.0)
        y = quantized_grouped_matmul(x, weight, ENDS, low, bias)
        y.backward(dy)
        found.append([y.detach()[:200], x.grad[:200], weight.grad, bias.grad])
    for ours, truth in zip(*found):
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("implementation, rows", [("triton", 5), ("triton", 0), ("plain", 5), ("plain", 0)])
def test_no_rows_at_all(implementation, rows):
    for recipe in GPU_RECIPES if implementation == "plain" else ("tensorwise", "blockwise"):
        low, ends = experts_of(recipe, implementation), torch.zeros(2, dtype=torch.int32)
        weight = torch.randn(2, 128, 128).requires_grad_()
        weight.grad = torch.full_like(weight, 3.0)
        x = torch.randn(rows, 128).requires_grad_()
        quantized_grouped_matmul(x, weight, ends, low).sum().backward()
        assert (weight.grad == 3.0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("implementation", ["triton", "plain"])
def test_what_is_no_number_reaches_the_product(bad, implementation):
    every = implementation == "plain"  # Triton's interpreter takes its time: two recipes see NaN, two infinity
    for recipe in GPU_RECIPES if every else GPU_RECIPES[math.isinf(bad) :: 2]:
        low, x = experts_of(recipe, implementation, recipe == "delayed"), torch.randn(ROWS, 256)
        x[50, 7] = bad
        forward, by_places = low.rows(X, x, ENDS)
        at = PaddedRows.of(ENDS, ROWS, tiles_for(ROWS, 4))
        assert not values(forward, at.group_R, torch.float32)[50, 7].isfinite(), recipe
        assert not values(by_places.transposed(), at.group_P, torch.float32)[PLACE + 13, 7].isfinite(), (
            recipe
        )  # the second tile's 50 - 37


def test_weight_gradients_can_wait():
    low, later = experts_of("rowwise", "plain"), []
    weight = torch.randn(4, OUT, IN).requires_grad_()
    weight.grad = torch.zeros_like(weight)
    x = torch.randn(ROWS, IN).requires_grad_()
    quantized_grouped_matmul(x, weight, ENDS, low, later=later).sum().backward()  # type: ignore[arg-type]
    assert x.grad is not None and not weight.grad.any() and len(later) == 1
    later.pop()()
    assert weight.grad.any()


FEW = torch.tensor([9, 9, 44], dtype=torch.int32)  # of 48 rows: in Triton's interpreter each takes its time


@pytest.mark.parametrize("recipe", rest_in_soak(GPU_RECIPES, ("blockwise",)))
def test_what_experts_make_is_cast_as_it_is_made(recipe):
    """Truth: each made by its own kernel, then cast: codes, scales, counts to the bit. Rows past the last end
    hold NaN and are not read."""
    gate, inner = replace(CLAMPED_SWIGLU, interleaved=False), 128 if recipe == "blockwise" else 48
    x, dy, tokens = (
        some(n, w, torch.float32, seed=w).clamp(-50, 50) for n, w in ((48, 2 * inner), (48, inner), (10, 144))
    )
    weights, sums, last = (
        some(48, 1, torch.float32, seed=2)[:, 0].clamp(-4, 4),
        torch.zeros(parts_of_sums(inner), 48),
        FEW[-1],
    )
    x[44:], dy[44:], weights[44:] = math.nan, math.nan, math.nan
    rows = ExpertRows((torch.arange(48) % 10).int(), *4 * (last,))
    sources = {
        "activation": (X, GatedRows(x, weights, last, gate, "triton"), gated_forward(x, gate, weights, last)),
        "gradient": (
            DY,
            GatedRowsGrad(x, weights, last, gate, "triton", dy=dy, sums=sums),
            gated_backward(dy, x, gate, weights, last)[0],
        ),
        "gathered": (X, Gathered(tokens, rows, PERMUTE.choose("triton", tokens)), tokens[rows.source_R]),
    }
    for which, source, truth in sources.values():
        fused, separate = (experts_of(recipe, "triton", recipe == "delayed") for _ in range(2))
        assert source.shape == truth.shape
        same_rows(fused.rows(which, source, FEW), separate.rows(which, truth, FEW))
        assert torch.equal(fused.counts[..., -1].amax(1), separate.counts[..., -1].amax(1)) and fused.counts.any()
        assert torch.equal(fused.counts[..., :-1].sum(1), separate.counts[..., :-1].sum(1))
    torch.testing.assert_close(
        sums.sum(0)[:44], plain_backward(dy, x, gate, weights, last)[1][:44], rtol=1e-4, atol=1e-3
    )


def same_rows(made: tuple[Scaled, Scaled], truth: tuple[Scaled, Scaled]) -> None:
    """Of FEW's rows that are somebody's, in two tiles, and of experts that have any."""
    of_places = [0, 1] if made[1].block == (1, PLACE) else [0, -1]  # tiles, or experts (or the one scale)
    for (a, b), codes, scales in zip(zip(made, truth), (np.s_[:44], np.s_[:, :256]), (np.s_[:44], np.s_[:, of_places])):
        same(
            Scaled(a.quantized[codes], a.scales[scales], a.block), Scaled(b.quantized[codes], b.scales[scales], b.block)
        )


def test_gate_and_up_side_by_side_are_made_first():
    x, last = some(48, 96, torch.float32), FEW[-1]
    separate = gated_forward(x, CLAMPED_SWIGLU, None, last)
    made, truth = (
        experts_of("rowwise", "triton").rows(X, s, FEW)
        for s in (GatedRows(x, None, last, CLAMPED_SWIGLU, "triton"), separate)
    )
    same_rows(made, truth)


def test_experts_as_one_op_are_their_parts():
    """Truth: the three ops one after another: outputs and gradients to the bit, in fp32; the weights of rows near
    them."""
    found, later = [], Later()
    for whole in (True, False):
        x, weights = (
            some(48, 64, torch.float32).div(8).clamp(-4, 4),
            some(48, 1, torch.float32, seed=9)[:, 0].clamp(-4, 4),
        )
        x, weights, stacks = x.requires_grad_(), weights.requires_grad_(), []
        for rows, columns in ((64, 64), (64, 32)):
            values = (some(3 * rows, columns, torch.float32, seed=3) / 64).clamp(-1, 1).view(3, rows, columns)
            quantizer, grad = experts_of("delayed", "triton", True), torch.ones(3, rows, columns)
            stacks.append(make_weight(values, quantizer, grad))
        quantizers = tuple(w.quantizer for w in stacks)
        assert use_quantized_grouped_mlp(quantizers, "triton", x)
        if whole:
            y = quantized_grouped_mlp(x, *stacks, FEW, weights, SWIGLU, "triton", later, quantizers=quantizers)
        else:
            hidden = gated_rows(
                quantized_grouped_matmul(x, stacks[0], FEW, stacks[0].quantizer), FEW, weights, SWIGLU, "triton"
            )
            y = quantized_grouped_matmul(hidden, stacks[1], FEW, stacks[1].quantizer)
        y.backward(some(48, 64, torch.float32, seed=7).clamp(-10, 10))
        assert not whole or (len(later) == 1 and (stacks[0].grad == 1).all())
        while later:
            later.pop()()
        found.append(
            (
                y.detach()[:44],
                x.grad[:44],
                *(w.grad for w in stacks),
                *(w.quantizer.counts.sum(1)[:, :-1] for w in stacks),
                weights.grad[:44],
            )
        )
    assert all(torch.equal(a, b) for a, b in zip(*(f[:-1] for f in found))) and all(t.abs().sum() > 0 for t in found[0])
    torch.testing.assert_close(found[0][-1], found[1][-1], rtol=1e-4, atol=1e-4)


@pytest.mark.soak
@pytest.mark.parametrize("dispatch", ["allgather", "alltoall"])  # push is as all-gather after the exchange
def test_rows_that_are_never_in_memory(dispatch):
    """Truth: the same exchange of rows that are made. Rows and the gradient of rows reach the experts as sources."""
    found, seen = [], []
    choice = torch.rand(20, 4, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :2]
    for lazy in (True, False):
        x, weights, stacks = (
            some(20, 64, torch.float32).clamp(-4, 4),
            torch.rand(20, 2, generator=torch.Generator().manual_seed(1)),
            [],
        )
        x, weights = x.requires_grad_(), weights.requires_grad_()
        for rows, columns in ((64, 64), (64, 32)):
            values = (some(4 * rows, columns, torch.float32, seed=3) / 64).clamp(-1, 1).view(4, rows, columns)
            quantizer, grad = experts_of("delayed", "triton", True), torch.zeros(4, rows, columns)
            stacks.append(make_weight(values, quantizer, grad))

        def compute(
            rows: Tensor, ends: Tensor, of_rows: Tensor | None, later: Later | None, source: int, stacks=stacks
        ) -> Tensor:
            seen.append(isinstance(rows, LazyTensor))
            quantizers = tuple(w.quantizer for w in stacks)
            return quantized_grouped_mlp(rows, *stacks, ends, of_rows, SWIGLU, "triton", later, quantizers=quantizers)

        exchange = EXCHANGES[dispatch](x, ModelAxes())
        exchange.send(choice, 4, "triton")
        y, _ = exchange(weights, compute, "triton", lazy)
        y.backward(some(20, 64, torch.float32, seed=7).clamp(-10, 10))
        found.append(
            (y.detach(), x.grad, weights.grad, *(w.grad for w in stacks), *(w.quantizer.counts.sum(1) for w in stacks))
        )
    assert all(torch.equal(a, b) for a, b in zip(*found)) and all(t.abs().sum() > 0 for t in found[0])
    assert seen == [True, False]


# ---- layouts -------------------------------------------------------------------------------------

STEPS = 2
NARROW = MixtralConfig(
    vocab_size=131,
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=8,
    num_experts_per_tok=2,
    router_aux_loss_coef=0.0,
)
parity.MODELS["low-mixtral"] = NARROW
parity.MODELS["low-mixtral-wide"] = replace(NARROW, hidden_size=128, intermediate_size=128, num_local_experts=4)
parity.MODELS["low-gpt-oss"] = replace(
    parity.MODELS["gpt_oss"],
    hidden_size=64,
    intermediate_size=32,
    head_dim=16,
    router_aux_loss_coef=0.0,
    router_z_loss_coef=0.0,
)
EXPERTS = dict(exclude=["*.self_attn.*"])  # in the recipe experts alone


def case(
    world: int,
    recipe: str,
    model: str = "low-mixtral",
    fp8: dict | None = None,
    train: dict | None = None,
    together: int = 1,
    **layout,
):
    """`together`: micro-batches of so many ranks go through experts at once; one process has them in one."""
    size = dict(global_batch=4, micro_batch=2 // together) | (train or {})
    run = low_run(recipe, model, size, fp8, **layout)
    alone = replace(run, train=replace(run.train, micro_batch=size["micro_batch"] * together))
    return world, run, alone


ONE_EACH = dict(
    global_batch=2, micro_batch=1
)  # on two data-parallel ranks: what goes through experts at once is the whole batch
LAYOUTS = {  # no block of a scale is cut or joined in these: the same codes as on one process
    "tensorwise, ep2 in tp2": case(2, "tensorwise", tp=2, ep=2, dispatch="allgather"),
    "tensorwise, tp2, all experts on each rank": case(2, "tensorwise", tp=2),
    "tensorwise, ep2, cp2 tp2": case(4, "tensorwise", tp=2, cp=2, ep=2),
    "tensorwise, ep2 x etp2 in tp4, pp2": case(
        8, "tensorwise", fp8=EXPERTS, tp=4, pp=2, ep=2, etp=2, dispatch="alltoall"
    ),
    "tensorwise, ep2 over dp2": case(2, "tensorwise", fp8=EXPERTS, together=2, train=ONE_EACH, ep=2, dispatch="push"),
    "tensorwise, ep4 over tp2 dp2, full recompute": case(
        4,
        "tensorwise",
        fp8=EXPERTS,
        together=2,
        train=dict(ONE_EACH, recompute="full"),
        tp=2,
        ep=4,
        dispatch="alltoall",
    ),
    "delayed, ep2 over dp2, level 3": case(
        2, "delayed", fp8=dict(EXPERTS, history=2), together=2, train=ONE_EACH, ep=2, sharding=3
    ),
    "delayed, ep2 x etp2 over dp2 tp2, pp2": case(
        8, "delayed", fp8=dict(EXPERTS, history=2), together=2, train=ONE_EACH, tp=2, ep=2, etp=2, pp=2, dispatch="push"
    ),
    "delayed, gpt-oss, ep4 over tp2 dp2, level 2": case(
        4, "delayed", "low-gpt-oss", EXPERTS, ONE_EACH, together=2, tp=2, ep=4, sharding=2, dispatch="push"
    ),
    "rowwise, ep2 x etp2 in tp4": case(4, "rowwise", fp8=EXPERTS, tp=4, ep=2, etp=2, dispatch="push"),
    "rowwise, etp2 in tp2, dp2, experts again": case(4, "rowwise", train=dict(recompute_ops=["experts"]), tp=2, etp=2),
    "blockwise, ep2 in tp2": case(
        2, "blockwise", "low-mixtral-wide", EXPERTS, dict(global_batch=16, micro_batch=16), tp=2, ep=2
    ),
    "mxfp8, ep2 in tp2": case(2, "mxfp8", fp8=EXPERTS, train=dict(micro_batch=4), tp=2, ep=2, dispatch="alltoall"),
    "nvfp4, etp2 in tp2": case(2, "nvfp4", fp8=EXPERTS, tp=2, etp=2),
}


@pytest.mark.parametrize(
    "name", rest_in_soak(LAYOUTS, covering({name: features(run) for name, (_, run, _) in LAYOUTS.items()}))
)
def test_layouts_agree_with_one_process(ranks, name):
    """Emulated in float64: a code that differs anywhere would show as a difference of 1e-2, far more than the bound
    of 1e-9."""
    world, run, alone = LAYOUTS[name]
    truth = parity.truth_of(ranks, alone, STEPS, False)
    plain = parity.truth_of(ranks, replace(alone, train=replace(alone.train, fp8=None)), STEPS, False)
    assert 1e-6 < abs(truth["losses"][1][0] / plain["losses"][1][0] - 1) < 0.1  # it does round
    parity.compare(ranks.run("tests.harness.parity:run_layout", world, run, STEPS), truth, STEPS)


@pytest.mark.parametrize("recipe, layout", [("rowwise", dict(tp=2)), ("mxfp8", dict(ep=2))], ids=str)
def test_cut_and_joined_rows_stay_near(ranks, recipe, layout):
    """An expert's rows are cut over ranks, or those of two micro-batches go together: the scales of weights'
    gradients differ. All other codes are the same, and so the losses of the first step; the gradients are as near to
    the run without train.fp8 as those of one process."""
    _, run, _ = case(2, recipe, fp8=EXPERTS, train=dict(micro_batch=2, global_batch=4), **layout)
    plain = parity.truth_of(ranks, replace(run, train=replace(run.train, fp8=None)), 1, False)
    alone = parity.truth_of(ranks, run, 1, False)
    found = ranks.run("tests.harness.parity:run_layout", 2, run, 1)
    np.testing.assert_allclose(found[0]["losses"], alone["losses"], rtol=1e-10)
    grads = parity.assemble([r["grads"][0] for r in found])
    differing = 0
    for name, exact in plain["grads"][0].items():
        if ".experts." in name:
            near = [np.linalg.norm(g[name] - exact) / np.linalg.norm(exact) for g in (grads, alone["grads"][0])]
            assert near[0] <= 1.5 * near[1] + 0.02, (name, near)
            differing += bool(np.abs(grads[name] - alone["grads"][0][name]).max() > 1e-6 * np.abs(exact).max())
    assert differing


def test_each_collective_matters(ranks):
    """Each all-reduce of an amax, found by tracing, is dropped once: the comparison must fail."""
    homes: dict[Site, list[str]] = {}
    names = ("tensorwise, ep2 in tp2", "tensorwise, ep2, cp2 tp2", "rowwise, ep2 x etp2 in tp4", "nvfp4, etp2 in tp2")
    for name in names:
        world, run, _ = LAYOUTS[name]
        for result in ranks.run("tests.harness.parity:run_layout", world, run, 1, False, None, True):
            for site in map(Site._make, result["sites"]):
                if site.file == "ops/quantized/expert_quantizer.py":
                    homes.setdefault(site, [])
                    homes[site] += [name] if name not in homes[site] else []
    assert {site.axis for site in homes} == {"tp", "tp x cp", "etp"}
    for site, found in homes.items():
        world, run, alone = LAYOUTS[random.Random(1).choice(found)]
        truth = parity.truth_of(ranks, alone, 1, False)
        with pytest.raises((AssertionError, RanksFailed)):
            parity.compare(
                ranks.run("tests.harness.parity:run_layout", world, run, 1, False, site, timeout=60.0), truth, 1
            )

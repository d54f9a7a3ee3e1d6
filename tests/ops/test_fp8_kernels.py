"""Triton casts and products of low precision against their reference implementations, in Triton's interpreter: every
code, scale and count to the bit.

The interpreter does not round to 8 bits as a GPU does, so the kernels round before; tests/gpu compares the GPU's own
rounding.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phalanx.comm.axis import Axis, ModelAxes
from phalanx.nn.fp8 import FP8
from phalanx.ops.dense.activation import Gated, GatedGrad, swiglu
from phalanx.ops.dense.norm import Normed, add_rms_norm
from phalanx.ops.dense.rope import ROPE, RopeGrad, rope, rotary_table
from phalanx.ops.lazy_tensor import LazyTensor
from phalanx.ops.quantized import cublaslt, gemm_kernel, quantize_tile
from phalanx.ops.quantized import quantize_kernel as kernels
from phalanx.ops.quantized.casts import GIVEN, CastSpec
from phalanx.ops.quantized.linear import quantized_gated_mlp, use_quantized_gated_mlp
from phalanx.ops.quantized.quantizer import DY, W, WeightQuantizer, X
from phalanx.ops.quantized.recipes import (
    COUNTS,
    E4M3,
    E5M2,
    SLOTS,
    Scaled,
    block_amax,
    cast,
    find_recipe,
    multipliers,
    quantize,
    scaled_product,
)
from tests.harness.sample import pairs_in_test, rest_in_soak
from tests.harness.weights import make_weight

CAST = ["tensorwise", "delayed", "rowwise", "blockwise"]


def some(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Of many sizes, some zero."""
    g = torch.Generator().manual_seed(rows * columns + seed)
    x = torch.randn(rows, columns, generator=g) * torch.exp(4 * torch.randn(rows, columns, generator=g))
    return torch.where(torch.rand(rows, columns, generator=g) < 0.1, 0.0, x).to(dtype)


def weight_of(recipe: str, kernels: str, given: bool) -> WeightQuantizer:
    low = WeightQuantizer(find_recipe(recipe), "w", 0, ModelAxes(), kernels)  # type: ignore[arg-type]
    low.counts, low.amax = torch.zeros(3, SLOTS, COUNTS, dtype=torch.int64), torch.zeros(3)
    if given:  # too large for some, too small for others
        low.multiplier = torch.tensor([3.0, 40.0, 0.01])
    return low


def same(a: Scaled, b: Scaled) -> None:
    assert (
        a.block == b.block
        and a.quantized.dtype == b.quantized.dtype
        and a.quantized.shape == b.quantized.shape
        and a.scales.shape == b.scales.shape
    )
    assert torch.equal(a.quantized.view(torch.uint8), b.quantized.view(torch.uint8))
    assert torch.equal(a.scales, b.scales)


@pytest.mark.parametrize("recipe", CAST)
def test_weights_are_cast_where_they_were(recipe):
    low = weight_of(recipe, "triton", recipe == "delayed")
    low.refresh(some(144, 272, seed=1))
    before = [(q.quantized.data_ptr(), q.scales.data_ptr()) for q in low.quantized(torch.empty(0))]
    low.refresh(some(144, 272, seed=2))
    fresh = weight_of(recipe, "plain", recipe == "delayed").both(W, some(144, 272, seed=2), 0, True)
    for q, truth, where in zip(low.quantized(torch.empty(0)), fresh, before):
        same(q, truth)
        assert (q.quantized.data_ptr(), q.scales.data_ptr()) == where


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda f: f.name)
def test_every_bf16_number_is_cast_as_by_the_plain_twin(format):
    """All 65,536, NaN and inf too; the given multiplier is 1."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(256, 256)
    made, _ = kernels.cast_both(x, CastSpec(format, GIVEN, torch.ones(1)), False)
    truth = cast(x.float(), format)
    nan = truth.float().isnan()
    assert nan.sum() == 2 * 128 and made.quantized.float()[nan].isnan().all()
    assert torch.equal(made.quantized.view(torch.uint8)[~nan], truth.view(torch.uint8)[~nan])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_reaches_the_product(bad):
    x = some(16, 16).index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(bad, dtype=torch.bfloat16))
    for recipe in ("tensorwise", "rowwise", "blockwise", "delayed"):
        q, _ = weight_of(recipe, "triton", recipe == "delayed").both(X, x, 0, True)
        assert not scaled_product(q, q, torch.float32)[3].isfinite().any(), recipe


def test_transposed():
    x = torch.arange(40 * 136, dtype=torch.int32).to(torch.uint8).view(40, 136).view(torch.float8_e5m2)
    assert torch.equal(kernels.transposed(x).view(torch.uint8), x.view(torch.uint8).t())


@pytest.mark.parametrize(
    "shape, recipe, add",
    pairs_in_test(
        [(48, 272, 384), (144, 16, 144)], ["tensorwise", "blockwise weight", "blockwise tokens"], [False, True]
    ),
    ids=str,
)
def test_product_is_that_of_the_plain_twin(shape, recipe, add):
    m, n, k = shape
    kind, _, second = recipe.partition(" ")
    r = find_recipe(kind)
    a, b = (torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)) for rows in (m, n))
    blocks = (r.tokens, r.weight if second == "weight" else r.tokens)
    formats = (E5M2, E4M3) if kind == "tensorwise" else (E4M3, E4M3)
    qa, qb = (
        quantize(x, block, f, multipliers(block_amax(x, block), f)) for x, block, f in zip((a, b), blocks, formats)
    )
    out = torch.full((m, n), 3.0)
    gemm_kernel.product(out, qa, qb, add)
    torch.testing.assert_close(out, scaled_product(qa, qb, torch.float32) + 3.0 * add, rtol=1e-5, atol=1e-4)


def test_losses_of_large_tensors_are_counted_in_some_tiles(monkeypatch):
    """Truth: the plain counts of those tiles alone: every second of a row of tiles, from row to row one further."""
    monkeypatch.setattr(quantize_tile, "LARGE", 6)
    monkeypatch.setattr(quantize_tile, "SAMPLED", 2)
    x, tile = some(272, 144), kernels.tiles_of(some(272, 144), kernels.GIVEN)
    low, plain = weight_of("delayed", "triton", True), weight_of("delayed", "plain", True)
    low.both(X, x, 0, True)
    parts = {
        (i, j): x[i * tile.rows :, j * tile.columns :][: tile.rows, : tile.columns]
        for i in range(-(-272 // tile.rows))
        for j in range(2)
    }
    for (i, j), part in parts.items():
        if (i + j) % 2 == 0:
            plain.both(X, part, 0, True)
    assert (
        torch.equal(low.counts[X, :, :-1].sum(0), plain.counts[X, :, :-1].sum(0))
        and sum(map(torch.numel, parts.values())) == x.numel()
    )
    assert low.counts[X, :, -1].max().int().view(torch.float32) == x.abs().max()


@pytest.mark.parametrize(
    "shape, recipe, turn", pairs_in_test([(48, 80), (80, 128), (16, 256)], CAST, [True, False]), ids=str
)
def test_what_swiglu_makes_is_cast_as_if_it_were_in_memory(shape, recipe, turn):
    """Truth: SwiGLU's own kernels in fp32, rounded (which Triton's interpreter does not do) and cast: codes, scales,
    amaxes and counts to the bit."""
    rows, inner = shape
    x, dy = some(rows, 2 * inner), some(rows, inner, seed=1)
    wide, dy_wide = x.float(), dy.float()
    gradient, exact = GatedGrad(dy, x, "triton"), GatedGrad(dy_wide, wide, "triton")
    for which, source, truth in ((X, Gated(x, "triton"), Gated(wide, "triton")), (DY, gradient, exact)):
        separate = (
            recipe == "blockwise" and inner % 128 and which == DY
        )  # a block would be of gate and of up: it is made first
        made = source.tensor() if separate else truth.tensor().bfloat16()
        if separate:  # the interpreter reads bf16's smallest number as zero
            made = torch.where(made.abs() < 2.0**-132, made * 0.0, made)
        same_casts(which, source, made, recipe, turn)


def same_casts(which, source, truth: Tensor, recipe, turn) -> None:
    """Of a source that is not in memory, and of what is known to be its tensor, by the reference implementation."""
    fused, plain = weight_of(recipe, "triton", recipe == "delayed"), weight_of(recipe, "plain", recipe == "delayed")
    for made, expected in zip(fused.both(which, source, 1, turn), plain.both(which, truth, 1, turn)):
        same(made, expected)
    assert torch.equal(fused.counts.sum(1)[:, :-1], plain.counts.sum(1)[:, :-1]) and fused.counts[which].sum() > 0
    assert torch.equal(fused.counts[..., -1].amax(1).int().view(torch.float32), plain.amax)


@pytest.mark.parametrize("shape, recipe, turn", pairs_in_test([(48, 80), (80, 144)], CAST, [True, False]), ids=str)
def test_a_norm_is_cast_as_if_it_were_in_memory(shape, recipe, turn):
    """Truth: the plain formula, in torch."""
    x, weight = some(*shape), some(1, shape[1], seed=1)[0].clamp(-4, 4)
    scale = torch.rsqrt(x.float().square().mean(-1) + 1e-5)
    truth = (x.float() * scale[:, None]).bfloat16() * weight
    assert torch.equal(Normed(x, scale, weight).tensor(), truth)
    same_casts(X, Normed(x, scale, weight), truth, recipe, turn)


@pytest.mark.parametrize(
    "case, table",
    pairs_in_test([(16, "tensorwise"), (16, "delayed"), (32, "rowwise"), (128, "blockwise")], [True, False]),
    ids=str,
)
def test_the_gradient_of_rope_is_cast_as_if_it_were_in_memory(case, table):
    """Truth: turned back in fp32, rounded once. Two sequences of 40, 3 and 2 heads, as they may lie after attention."""
    width, recipe = case
    heads = [some(2 * 40 * n, width, seed=n).view(2, 40, n, width).transpose(1, 2).clamp(-1e4, 1e4) for n in (3, 2)]
    heads.append(some(2 * 2 * 40, width, seed=9).view(2, 2, 40, width))
    angles = rotary_table(torch.arange(80) % 40, 1e4 ** (-torch.arange(width // 2) * 2 / width), torch.bfloat16)
    cos, sin = (t.float().view(2, 1, 40, width // 2) for t in (angles.cos, angles.sin))

    def back(t: Tensor) -> Tensor:
        a, b = t.float().chunk(2, -1)
        return torch.cat((a * cos + b * sin, b * cos - a * sin), -1).bfloat16()

    transposed = [back(heads[0]), back(heads[1]), heads[2]] if table else heads
    truth = torch.cat(transposed, 1).transpose(1, 2).reshape(80, -1)
    same_casts(DY, RopeGrad(*heads, angles if table else None, ROPE.choose("triton", heads[0])), truth, recipe, True)


@pytest.mark.parametrize("recipe", rest_in_soak(CAST, ["delayed", "blockwise"]))
def test_what_linears_cast_need_not_be_in_memory(recipe):
    """Truth: the same with the norm and the gradient of rope written. A norm, a linear to 2 + 2 heads of 32, rope:
    all to the bit, in fp32."""
    found = []
    for lazy in (True, False):
        x, delta = (some(32, 64, torch.float32, seed=n).clamp(-8, 8).requires_grad_() for n in (1, 2))
        norm = some(1, 64, torch.float32, seed=3)[0].clamp(-2, 2).requires_grad_()
        quantizer = weight_of(recipe, "triton", recipe == "delayed")
        w = make_weight((some(128, 64, torch.float32, seed=4) / 16).clamp(-1, 1), quantizer, torch.ones(128, 64))
        assert FP8.reads_lazy(w, x)
        total, normed = add_rms_norm(x, delta, norm, 1e-5, "triton", lazy)
        assert isinstance(normed, LazyTensor) == lazy
        table = rotary_table(torch.arange(32), 1e4 ** (-torch.arange(16) / 16), torch.float32)
        q, k, v = rope(FP8.gather_matmul(normed, w, Axis("tp")), 2, 1, 1, table, "triton", lazy)
        (q * 0.5 + k * v).float().square().sum().add(total.sum()).backward()
        found.append(
            [
                q.detach(),
                k.detach(),
                x.grad,
                delta.grad,
                norm.grad,
                w.grad,
                quantizer.counts.sum(1)[:, :-1],
                quantizer.counts[..., -1].amax(1),
            ]
        )
    assert all(torch.equal(a, b) for a, b in zip(*found)) and all(t.abs().sum() > 0 for t in found[0])


def test_who_takes_a_lazy_tensor():
    w = make_weight(some(16, 32))
    assert not FP8.reads_lazy(w, w)
    for twin, dtype, expected in (
        ("plain", torch.bfloat16, False),
        ("triton", torch.float64, False),
        ("triton", torch.bfloat16, True),
    ):
        w.quantizer = weight_of("delayed", twin, True)
        assert FP8.reads_lazy(w, w.to(dtype)) == expected


@pytest.mark.parametrize("recipe", rest_in_soak(CAST, ["tensorwise", "blockwise"]))
def test_a_gated_mlp_as_one_op_is_its_parts(recipe):
    """Truth: the three ops one after another: outputs, gradients, counts to the bit, in fp32. 80 tokens, 48 features
    in, 128 inner."""
    found = []
    for whole in (True, False):
        x = some(80, 48, torch.float32).div(8).clamp(-4, 4).requires_grad_()
        weights = []
        for rows, columns in ((256, 48), (48, 128)):
            values = (some(rows, columns, torch.float32, seed=3) / 64).clamp(-1, 1)
            quantizer = weight_of(recipe, "triton", recipe == "delayed")
            weights.append(make_weight(values, quantizer, torch.ones(rows, columns)))
        tp = Axis("tp")
        quantizers = tuple(w.quantizer for w in weights)
        assert use_quantized_gated_mlp(quantizers, "triton", x)
        if whole:
            y = quantized_gated_mlp(x, *weights, tp, quantizers, "triton")
        else:
            y = FP8.matmul_scatter(swiglu(FP8.gather_matmul(x, weights[0], tp), "triton"), weights[1], tp)
        y.backward(some(80, 48, torch.float32, seed=7).clamp(-10, 10))
        told = [
            t for w in weights for t in (w.grad, w.quantizer.counts.sum(1)[:, :-1], w.quantizer.counts[..., -1].amax(1))
        ]
        found.append([y.detach(), x.grad, *told])
    assert all(torch.equal(a, b) for a, b in zip(*found)) and all(t.abs().sum() > 0 for t in found[0])


def test_what_is_asked_of_cublaslt():
    """Truth: cuBLAS's list of 8-bit operands. The calls themselves need a GPU (tests/gpu/low.py)."""
    e4, e5, wide, bf = torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.bfloat16
    good = cublaslt.Gemm(256, 512, 1024, (e5, e4, wide), ((0, 0), (0, 0)), False, True, (256, 256, 128))
    squares = replace(good, dtypes=(e4, e4, bf), blocks=((1, 128), (128, 128)))
    assert all(
        map(
            cublaslt.fits,
            (
                good,
                replace(good, blocks=((1, 0), (1, 0)), m=17),
                squares,
                replace(squares, blocks=((1, 128), (1, 128))),
            ),
        )
    )
    bad = dict(dtypes=(e5, e5, wide), k=1032, n=8, aligned=(256, 8, 256), blocks=((1, 0), (0, 0)), m=0)
    assert not any(cublaslt.fits(replace(good, **{key: value})) for key, value in bad.items())
    bad = dict(k=1024 + 128, m=192, n=192, blocks=((128, 128), (128, 128)))
    assert not any(cublaslt.fits(replace(squares, **{key: value})) for key, value in bad.items())


def test_scales_lie_as_cublaslt_reads_them():
    for block in ((1, 128), (128, 128)):
        x = some(256, 512)
        q = quantize(x, block, E4M3, multipliers(block_amax(x, block), E4M3))
        at = cublaslt.scales_in_order(q)
        assert at.is_contiguous() and torch.equal(at, q.scales.t() if block[0] == 1 else q.scales)
    assert cublaslt._alignment(torch.empty(64)[1:]) == 4

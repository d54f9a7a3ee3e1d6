"""Random rounding and the Hadamard transform of NVFP4: closed forms, means over many draws, and gradients of
linears."""

from __future__ import annotations

import itertools

import pytest
import torch

from phalanx.base.rng import MASK, key_of, rounds
from phalanx.comm.axis import ModelAxes
from phalanx.ops.quantized.expert_quantizer import ExpertQuantizer
from phalanx.ops.quantized.experts import quantized_grouped_matmul
from phalanx.ops.quantized.linear import quantized_gather_matmul
from phalanx.ops.quantized.quantizer import DY, W, WeightQuantizer, X
from phalanx.ops.quantized.recipes import (
    E2M1,
    Scaled,
    block_amax,
    cast_scaled,
    dequantize,
    find_recipe,
    spread,
)
from phalanx.ops.quantized.rounding import FACTORS, GRID, mixed, noise_for, signs_of

VALUES = torch.tensor([-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NVFP4 = find_recipe("nvfp4")


def randn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ---- the transform -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 16, 32])
def test_the_transform_is_that_of_sylvester(size):
    """Truth: entry (i, j) of his matrix is -1 to the number of bits that i and j share; here over the root of the
    size, columns negated."""
    signs = signs_of(3, size)
    matrix = mixed(torch.eye(size, dtype=torch.float64), size, signs)
    truth = torch.tensor(
        [[(-1.0) ** ((i & j).bit_count() + (signs >> j & 1)) for j in range(size)] for i in range(size)],
        dtype=torch.float64,
    )
    torch.testing.assert_close(matrix, truth * size**-0.5, rtol=1e-15, atol=0)
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-15)


def test_sums_over_tokens_stay():
    """Without rounding it changes no weight's gradient; each run of 16 tokens is by itself."""
    dy, x, signs = randn(64, 5), randn(64, 7, seed=2), signs_of(1, 16)
    torch.testing.assert_close(mixed(dy, 16, signs).t() @ mixed(x, 16, signs), dy.t() @ x, rtol=1e-13, atol=1e-13)
    assert torch.equal(mixed(x, 16, signs)[16:32], mixed(x[16:32], 16, signs))
    assert (mixed(x, 16, signs).t() @ x - x.t() @ x).abs().max() > 1  # it is not nothing
    assert mixed(x.bfloat16(), 16, signs).dtype == torch.float32
    with pytest.raises(ValueError, match="40 tokens are no whole blocks of 16"):
        mixed(randn(40, 3), 16, signs)


def test_an_outlier_is_spread():
    x = torch.zeros(16, 1, dtype=torch.float64)
    x[5] = 8.0
    assert torch.equal(mixed(x, 16, signs_of(0, 16)).abs(), torch.full((16, 1), 2.0, dtype=torch.float64))


def test_signs_are_those_of_the_run():
    assert len({signs_of(seed, 16) for seed in range(50)}) > 45 and all(
        0 <= signs_of(seed, 16) < 2**16 for seed in range(50)
    )
    one, other = (WeightQuantizer(NVFP4, name, 0, ModelAxes(), seed=7) for name in "ab")
    assert one.signs == other.signs == signs_of(7, 16) and len({*one.keys, *other.keys}) == 4


# ---- random rounding -----------------------------------------------------------------------------


def drawn(x: torch.Tensor, draws: int) -> torch.Tensor:
    """(draws, ...) what x, blocks of 16 in a row, becomes with as many keys."""
    return torch.stack([cast_scaled(x, (1, 16), E2M1, key_of(draw, "test")).to(x.dtype) for draw in range(draws)])


def test_rounded_values_are_neighbours_and_right_on_average():
    """A value on its way p from a neighbour to the next, d further, has mean x and variance p (1 - p) d**2: the mean
    of 4000 draws of each of 640 values is within 5 of its standard deviations (by chance none of 640 is beyond in
    2,700 of 2,701 cases, and the keys are fixed)."""
    draws = 4000
    x = torch.cat(
        [
            VALUES.double(),
            6.2 * (2 * torch.rand(625, generator=torch.Generator().manual_seed(5), dtype=torch.float64) - 1),
        ]
    ).view(40, 16)
    found = drawn(x, draws)
    kept = x.clamp(-6, 6)
    above = torch.searchsorted(VALUES.double(), kept).clamp_max(14)
    high, low = VALUES.double()[above], VALUES.double()[(above - 1).clamp_min(0)]
    assert ((found == low) | (found == high)).all()
    exact = torch.isin(kept, VALUES.double())
    assert (found == kept)[:, exact].all()
    p = (kept - low) / (high - low)
    deviation = (p * (1 - p)).sqrt() * (high - low) / draws**0.5
    assert ((found.mean(0) - kept).abs()[~exact] < 5 * deviation[~exact]).all()
    even = (p > 0.3) & (p < 0.7)
    errors = (found - kept)[:, even] / (deviation * draws**0.5)[even]
    correlation = errors.t() @ errors / draws
    assert (
        correlation.fill_diagonal_(0).abs().max() < 6.5 / draws**0.5
    )  # of 4e4 pairs of values: those of a block too know nothing of each other


def test_numbers_are_those_of_philox_of_the_contents():
    """Truth: the same from Python's integers, block by block, along features and along tokens."""
    x, key = randn(3, 32) * 2, key_of(1, "x")
    found = noise_for(x, (1, 16), key)
    assert torch.equal(noise_for(x.t(), (16, 1), key).t(), found)
    for row, block in itertools.product(range(3), range(2)):
        values = [round(v * GRID) for v in x[row, 16 * block : 16 * block + 16].tolist()]
        hashes = [sum(v * pow(factor, i, 2**32) for i, v in enumerate(values, 1)) & MASK for factor in FACTORS]
        for lane in range(16):
            words = rounds(tuple(torch.tensor([c]) for c in (*hashes, lane // 4, 0)), key)
            assert found[row, 16 * block + lane].item() == (words[lane % 4].item() >> 8) / 2**24


def test_numbers_know_the_block_and_nothing_else():
    """Where a block lies, and what is beside it, changes nothing; nor does what the order of a sum in float64
    changes. Other contents, another key or the other direction: other numbers. All of them are spread evenly: 64
    bins, chi-squared within 5 deviations."""
    x, key = randn(512, 64), key_of(1, "x")
    u = noise_for(x, (1, 16), key)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(3))
    assert torch.equal(noise_for(x[order], (1, 16), key), u[order]) and torch.equal(
        noise_for(x[:, 16:48], (1, 16), key), u[:, 16:48]
    )
    assert torch.equal(noise_for(x * (1 + 1e-14), (1, 16), key), u)
    nudged = x.clone()
    nudged[:, 3] += 2 / GRID
    same = (noise_for(nudged, (1, 16), key) == u).double().mean(0)
    assert same[:16].max() < 0.01 and (same[16:] == 1).all()
    assert (noise_for(x, (1, 16), key_of(2, "x")) == u).double().mean() < 0.01 and (
        noise_for(x, (16, 1), key) == u
    ).double().mean() < 0.01
    assert 0 <= u.min() and u.max() < 1
    counts = torch.histc(u, 64, 0, 1)
    chi = ((counts - u.numel() / 64) ** 2 / (u.numel() / 64)).sum()
    assert abs(chi - 63) < 5 * (2 * 63) ** 0.5


def test_what_is_no_number_stays_so():
    x = torch.full((1, 16), 2.3)
    x[0, 3], x[0, 5] = float("nan"), float("inf")
    found = cast_scaled(x, (1, 16), E2M1, (1, 2)).float()
    assert found[0, [3, 5]].isnan().all() and found.isfinite().sum() == 14


# ---- linears -------------------------------------------------------------------------------------


def test_gradients_alone_are_rounded_at_random():
    x = randn(32, 32)
    a, b = (WeightQuantizer(NVFP4, "w", 0, ModelAxes(), seed=seed) for seed in (1, 2))
    b.signs = a.signs
    for which, random in ((X, False), (W, False), (DY, True)):
        for ours, theirs, recomputed in zip(*(low.both(which, x, 0, turn=True) for low in (a, b, a))):
            assert torch.equal(ours.quantized.float(), recomputed.quantized.float()) and torch.equal(
                ours.scales, theirs.scales
            )
            assert torch.equal(ours.quantized.float(), theirs.quantized.float()) != random
    assert a.key(X, True) is a.key(W, False) is None and a.key(DY, False) != a.key(
        DY, True
    )  # the directions know nothing of each other either
    straight, transposed = a.both(X, x, 0, turn=False)
    off = [
        (dequantize(q, torch.float64) - truth).norm() / x.norm()
        for q, truth in ((straight, x), (transposed, mixed(x, 16, a.signs)))
    ]
    assert max(off) < 0.12
    assert torch.equal(
        a.both(W, x, 0, turn=False)[0].quantized.float(), a.both(W, x, 0, turn=False)[1].quantized.float()
    )


def cut(x: torch.Tensor, q: Scaled) -> torch.Tensor:
    most = 6 * spread(q.scales, q.block, x.shape)
    return x.clamp(-most, most)


@pytest.mark.parametrize("experts", [False, True])
def test_gradients_are_right_on_average(experts):
    """Truth: with dy as it is, dx = dy W and dW = dy^T x of the codes of W and x. Over seeds, each its own numbers,
    the mean of either comes as near as the deviations of single ones say. (A block's largest value is cut where its
    scale was rounded down: so is the truth's.)"""
    seeds, sizes = 300, (48, 32, 48)
    x, w, dy = (
        randn(*sizes[:2], dtype=torch.float64),
        randn(sizes[2], sizes[1], seed=2) / 6,
        randn(sizes[0], sizes[2], seed=3) ** 3,
    )
    ends = torch.tensor([32, 48], dtype=torch.int32)

    def grads(seed: int) -> list[torch.Tensor]:
        weight = (torch.stack((w, w)) if experts else w.clone()).requires_grad_()
        low = (ExpertQuantizer if experts else WeightQuantizer)(NVFP4, "w", 0, ModelAxes(), seed=seed)
        low.signs = 0x35A1
        given = x.clone().requires_grad_()
        made = (
            quantized_grouped_matmul(given, weight, ends, low)
            if experts
            else quantized_gather_matmul(given, weight, low.axes.tp, None, low)
        )
        made.backward(dy)
        return [given.grad, weight.grad]

    low = WeightQuantizer(NVFP4, "w", 0, ModelAxes())
    low.signs = 0x35A1
    w_codes, x_codes = (
        dequantize(low.both(W, w, 0, False)[0], torch.float64),
        dequantize(low.both(X, x, 0, False)[1], torch.float64),
    )
    straight, transposed = (cut(t, q) for t, q in zip((dy, mixed(dy, 16, low.signs)), low.both(DY, dy, 0, False)))
    parts = (slice(0, 32), slice(32, 48)) if experts else (slice(0, 48),)
    dw = torch.stack([transposed[p].t() @ x_codes[p] for p in parts])
    truths = [straight @ w_codes, dw if experts else dw[0]]
    found = [torch.stack(g) for g in zip(*(grads(seed) for seed in range(seeds)))]
    for truth, many in zip(truths, found):
        deviation = many.std(0) / seeds**0.5
        off = ((many.mean(0) - truth) / deviation.clamp_min(1e-12)).abs()
        assert off.max() < 5 and 0.8 < off.square().mean().sqrt() < 1.2


def test_amax_of_codes_is_that_of_mixed_tokens():
    """The second level of scales, too, is for what is cast: the largest code is used in both directions."""
    x = randn(64, 32)
    for q in WeightQuantizer(NVFP4, "w", 0, ModelAxes()).both(X, x, 0, turn=False):
        assert block_amax(q.quantized.float(), q.block).min() >= 4 and q.quantized.float().abs().max() == 6


# ---- the kernels, in Triton's interpreter --------------------------------------------------------


def some(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Of many sizes, some zero."""
    g = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(rows, columns, generator=g) * torch.exp(2 * torch.randn(rows, columns, generator=g))
    return torch.where(torch.rand(rows, columns, generator=g) < 0.1, 0.0, x).to(dtype)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_kernels_keep_what_is_no_number(recipe):
    for bad in (float("nan"), float("inf")):
        x = some(32, 64, torch.float32)
        x[3, 5] = bad
        straight, by_tokens = WeightQuantizer(find_recipe(recipe), "w", 0, ModelAxes(), "triton").both(
            DY, x, 0, turn=False
        )
        assert (
            not dequantize(straight, torch.float32)[3].sum().isfinite()
            and not dequantize(by_tokens, torch.float32)[:, 5].sum().isfinite()
        )
    with pytest.raises(ValueError, match="40 tokens are no whole blocks of 16"):
        WeightQuantizer(NVFP4, "w", 0, ModelAxes(), "triton").both(DY, torch.zeros(40, 16), 0, turn=False)

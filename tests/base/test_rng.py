"""Random numbers against published vectors, against statistics, and against themselves: a box has the bits of the
whole's slice."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from phalanx.base import rng
from phalanx.base.rng import fill_normal_, keep_mask, philox

# Random123 1.14, tests/kat_vectors: philox4x32-10
KNOWN = [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_philox_known_answers(counter, key, words):
    """Truth: the known-answer vectors of Random123, alone and inside a tensor."""
    assert " ".join(f"{w.item():08x}" for w in philox(counter, key)) == words
    many = philox(tuple(torch.tensor([1, c]) for c in counter), key)
    assert " ".join(f"{w[1].item():08x}" for w in many) == words


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_philox_of_tensors_and_of_arrays(counter, key, words):
    """The arithmetic of GPUs, and that of CPUs."""
    for make in (torch.tensor, np.array):
        assert " ".join(f"{int(w[0]):08x}" for w in rng.rounds(tuple(make([c]) for c in counter), key)) == words


def whole(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 5, name: str = "w") -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype)
    fill_normal_(out, 1.0, shape, (0,) * len(shape), seed, name)
    return out


def test_normals_are_normal():
    """Truth: moments of the normal distribution within 5 standard errors, and the Kolmogorov-Smirnov distance to its
    CDF."""
    x = whole((400_000,))
    n = len(x)
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(x.pow(power).mean().item() - moment) < 5 * math.sqrt(variance / n), power
    cdf = 0.5 * (1 + torch.erf(x.sort().values / math.sqrt(2)))
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    assert max((cdf - steps[:-1]).max(), (steps[1:] - cdf).max()) < 1.95 / math.sqrt(n)  # p = 0.001
    for lag in (1, 2, 3):  # the two of a pair, and neighbours
        assert abs((x[:-lag] * x[lag:]).mean().item()) < 5 / math.sqrt(n), lag
    assert x.unique().numel() == n


def test_normals_by_the_formula():
    """Truth: Box-Muller in plain Python over the words of counter i, elements beyond 2**32 pairs too."""
    key = rng.key_of(3, "init", "w")
    for element in (0, 1, 10, 2**33 + 7, 2**40):
        w0, w1, w2, w3 = (w.item() for w in philox((element // 2 & rng.MASK, element // 2 >> 32, 0, 0), key))
        radius = math.sqrt(-2 * math.log(((w0 << 21) + (w1 >> 11) + 1) * 2.0**-53))
        angle = 2 * math.pi * ((w2 << 21) + (w3 >> 11)) * 2.0**-53
        out = torch.empty(1, dtype=torch.float64)
        fill_normal_(out, 2.0, (2**41,), (element,), 3, "w")
        assert out.item() == pytest.approx(
            2 * radius * (math.sin(angle) if element % 2 else math.cos(angle)), rel=1e-13
        )


def test_seeds_and_names_are_independent():
    a, b, c = whole((20_000,)), whole((20_000,), seed=6), whole((20_000,), name="v")
    for x, y in ((a, b), (a, c), (b, c)):
        assert abs((x * y).mean().item()) < 5 / math.sqrt(20_000)


def random_box(pick: random.Random, dims: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    shape = tuple(pick.choice([1, 2, 3, 7, 12, 31]) * (29 if dims == 1 else 1) for _ in range(dims))
    start = tuple(pick.choice([0, pick.randrange(n)]) for n in shape)
    return shape, start, tuple(pick.choice([n, pick.randint(a + 1, n)]) for a, n in zip(start, shape))


@pytest.mark.parametrize("number", range(60))
def test_boxes_are_slices_of_the_whole(number, monkeypatch):
    """Truth: the same tensor made at once; chunks of another size, transposed and strided storage change no bit."""
    pick = random.Random(number)
    shape, start, stop = random_box(pick, number % 3 + 1)
    dtype = pick.choice([torch.float64, torch.float32, torch.bfloat16])
    expected = whole(shape, dtype)[tuple(map(slice, start, stop))]
    size = tuple(b - a for a, b in zip(start, stop))
    out = (
        torch.empty(size[::-1], dtype=dtype).permute(*range(len(size) - 1, -1, -1))
        if pick.random() < 0.5
        else torch.empty(size, dtype=dtype)
    )
    monkeypatch.setattr(rng, "CHUNK", (pick.choice([1, 2, 5, 16, 1000]),) * 2)
    fill_normal_(out, 1.0, shape, start, 5, "w")
    assert torch.equal(out, expected)


def test_boxes_across_chunk_borders():
    """The same at the real chunk size: rows longer than a chunk, and a box that starts at odd elements."""
    n = rng.CHUNK[0] + 4097
    all_rows, part = whole((3, n)), torch.empty(2, n - 11, dtype=torch.float64)
    fill_normal_(part, 1.0, (3, n), (1, 7), 5, "w")
    assert torch.equal(part, all_rows[1:, 7:-4])


def test_nothing_and_scalars():
    fill_normal_(torch.empty(0, 4), 1.0, (8, 4), (8, 0), 5, "w")
    out = torch.empty((), dtype=torch.float64)
    fill_normal_(out, 1.0, (), (), 5, "w")
    assert out == whole((1,))[0]


def mask(
    columns: int = 64, p: float = 0.3, seed: int = 1, layer: int = 2, site: int = 3, extra: int = 0, rows: int = 500
) -> torch.Tensor:
    samples, positions = torch.arange(rows) // 7 + 2**33, torch.arange(rows) % 7
    return keep_mask(p, seed, layer, site, (samples, positions), columns, extra)


def test_dropout_keeps_the_right_share():
    """Truth: the binomial distribution, overall, per row and per column."""
    for p in (0.0, 0.01, 0.3, 0.9):
        kept = mask(p=p).double()
        assert abs(kept.mean().item() - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / kept.numel())
        for dim in (0, 1):
            assert (kept.mean(dim) - (1 - p)).abs().max() <= 5 * math.sqrt(p * (1 - p) / kept.shape[dim])


def test_dropout_depends_on_nothing_but_its_key():
    """Truth: a mask made at once. Rows may come in any order or shape, and fewer columns are a prefix."""
    samples, positions = torch.arange(40) * 3, torch.arange(40) % 9
    full = keep_mask(0.4, 7, 1, 2, (samples, positions), 30)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(keep_mask(0.4, 7, 1, 2, (samples[order], positions[order]), 30), full[order])
    assert torch.equal(keep_mask(0.4, 7, 1, 2, (samples.view(5, 8), positions.view(5, 8)), 30), full.view(5, 8, 30))
    assert torch.equal(keep_mask(0.4, torch.tensor(7), 1, 2, (samples, positions), 13), full[:, :13])


def test_dropout_rows_and_columns_are_independent():
    """Truth: independent bits agree half of the time, whatever the two rows (or columns) share: sample, position or
    nothing."""
    bits = mask(p=0.5, columns=200, rows=70).double() * 2 - 1
    for m in (bits, bits.t()):
        agreement = m @ m.t() / m.shape[1]
        assert (agreement - torch.eye(len(m))).abs().max() < 5.5 / math.sqrt(m.shape[1])


@pytest.mark.parametrize("other", [dict(seed=2), dict(layer=3), dict(site=4), dict(extra=1)], ids=str)
def test_dropout_masks_of_other_sites_are_independent(other):
    """Truth: independent bits agree with probability p^2 + (1 - p)^2."""
    a, b = mask(p=0.5), mask(p=0.5, **other)
    assert abs((a == b).double().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(a.numel())

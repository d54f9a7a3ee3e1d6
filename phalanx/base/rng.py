"""Counter-based random numbers: a value is a pure function of (seed, purpose, position), so no layout can change it.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in int64 arithmetic of plain
PyTorch, and of numpy on the CPU.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

MASK = 0xFFFFFFFF
CHUNK = (1 << 15, 1 << 22)  # elements generated at once (CPU, GPU): temporaries fit in the cache, or fill the GPU


def philox(counter: tuple[Tensor | int, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Four 32-bit words (int64 tensors in [0, 2**32)) for counters c0..c3 (broadcastable; ints are moved to the
    tensors' device) and a 64-bit key."""
    device = next((c.device for c in counter if isinstance(c, Tensor)), torch.device("cpu"))
    # torch.tensor would copy from the host
    words = tuple(c if isinstance(c, Tensor) else torch.full((), c, device=device) for c in counter)
    if device.type != "cpu":
        return rounds(words, key)
    # numpy calls cost half of torch's
    return tuple(torch.from_numpy(w) for w in rounds(tuple(np.atleast_1d(c.numpy()) for c in words), key))


def rounds(counter: tuple, key: tuple[int, int], count: int = 10) -> tuple:
    """Philox of tensors, or of arrays with at least one dim (numpy's scalars warn when they wrap)."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(count):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps modulo 2**64: the low and high words below are still exact
        c0, c2 = ((p1 >> 32) ^ c1 ^ k0) & MASK, ((p0 >> 32) ^ c3 ^ k1) & MASK
        c1, c3 = p1, p0  # only their low words count: they are masked wherever they are used
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1 & MASK, c2, c3 & MASK


def key_of(seed: int, *what: str | int) -> tuple[int, int]:
    """A 64-bit key from a seed and the purpose of the numbers."""
    digest = hashlib.blake2b("/".join(map(str, (seed, *what))).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def normal_runs(first: Tensor, length: int, key: tuple[int, int]) -> Tensor:
    """Standard normal float64 (R, length) for elements first[r], first[r] + 1, ...: elements 2i and 2i + 1 are a
    Box-Muller pair.

    Both are computed from the four words of counter i, so their bits are a function of the element number alone.
    """
    pair = (first // 2).unsqueeze(1) + torch.arange(length // 2 + 1, device=first.device)
    w0, w1, w2, w3 = philox((pair & MASK, pair >> 32, 0, 0), key)
    u1 = ((w0 << 21) + (w1 >> 11) + 1).double() * 2.0**-53  # in (0, 1]
    u2 = ((w2 << 21) + (w3 >> 11)).double() * 2.0**-53  # in [0, 1)
    radius, angle = torch.sqrt(-2.0 * torch.log(u1)), (2.0 * math.pi) * u2
    both = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), -1).flatten(1)
    return torch.where((first % 2 == 1).unsqueeze(1), both[:, 1 : length + 1], both[:, :length])


def uniform_runs(first: Tensor, length: int, key: tuple[int, int]) -> Tensor:
    """Uniform float64 (R, length) in [0, 1) of elements first[r], first[r] + 1, ...: 53 bits of the words of counter
    e."""
    number = first.unsqueeze(1) + torch.arange(length, device=first.device)
    w0, w1, _, _ = philox((number & MASK, number >> 32, 0, 0), key)
    return ((w0 << 21) + (w1 >> 11)).double() * 2.0**-53


Runs = Callable[[Tensor, int, tuple[int, int]], Tensor]


def fill_normal_(out: Tensor, std: float, shape: tuple[int, ...], start: tuple[int, ...], seed: int, name: str) -> None:
    """Fill `out`, the box at `start` of the global tensor `name` of `shape`, with its part of normal(0, std).

    Element e of the row-major global tensor has the same bits whichever rank generates it.
    """
    _fill_runs_(out, lambda *run: normal_runs(*run) * std, shape, start, key_of(seed, "init", name))


def fill_uniform_(
    out: Tensor, bound: float, shape: tuple[int, ...], start: tuple[int, ...], seed: int, name: str
) -> None:
    """As fill_normal_, with its part of uniform [-bound, bound)."""
    key = key_of(seed, "init", name)
    _fill_runs_(out, lambda *run: (uniform_runs(*run) * 2 - 1) * bound, shape, start, key)


def _fill_runs_(
    out: Tensor, values: Runs, shape: tuple[int, ...], start: tuple[int, ...], key: tuple[int, int]
) -> None:
    """`values`: of runs of elements of the global tensor."""
    if out.numel() == 0:
        return
    chunk = CHUNK[out.device.type == "cuda"]
    flat = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    first = run_starts(shape, start, tuple(out.shape)).to(out.device)
    runs = flat.view(len(first), -1)
    length, together = runs.shape[1], max(1, chunk // max(1, runs.shape[1]))
    for r in range(0, len(first), together):
        for a in range(0, length, chunk):
            part = runs[r : r + together, a : a + chunk]
            part.copy_(values(first[r : r + together] + a, part.shape[1], key))
    if flat is not out:
        out.copy_(flat)


def run_starts(shape: tuple[int, ...], start: tuple[int, ...], box: tuple[int, ...]) -> Tensor:
    """The first element number of each contiguous range that makes up the box of size `box` at `start`, in order
    (int64, on the CPU)."""
    # dims from `whole` on are covered completely; together with the dim before them they form contiguous ranges
    whole = len(shape)
    while whole > 1 and box[whole - 1] == shape[whole - 1]:
        whole -= 1
    first = torch.zeros(1, dtype=torch.int64)
    for d, (at, size) in enumerate(zip(start, box)):
        count = size if d < whole - 1 else 1
        first = (first.unsqueeze(1) + torch.arange(at, at + count) * math.prod(shape[d + 1 :])).flatten()
    return first


def keep_mask(
    p: float, seed: Tensor | int, layer: int, site: int, rows: tuple[Tensor, Tensor], columns: int, extra: int = 0
) -> Tensor:
    """Dropout's decision for (rows, columns): True = keep, with probability 1 - p.

    rows = (sample ids, positions), int64 of one shape R; the result has shape (*R, columns). The key is (seed, layer,
    site, extra), the counter (column, position, sample): the same bits in every layout and from every implementation of
    an op.
    """
    word = (layer << 20) | (site << 16) | extra
    return keep_columns(p, key_of(int(seed), "dropout"), rows, range(columns), word)


def keep_columns(p: float, key: tuple[int, int], rows: tuple[Tensor, Tensor], columns: range, word: int = 0) -> Tensor:
    """The same of some neighbouring columns, by a key and the last word of the counter."""
    samples, positions = rows
    lanes = torch.arange(columns.start // 4, (columns.stop + 3) // 4, device=samples.device)
    words = philox((lanes, positions.unsqueeze(-1), samples.unsqueeze(-1) & MASK, word), key)
    first = columns.start % 4
    flat = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(-2)[..., first : first + len(columns)]
    return flat >= threshold(p)


def threshold(p: float) -> int:
    """32-bit words below it drop what they are drawn for."""
    return int(p * 2.0**32)

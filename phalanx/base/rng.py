"""Counter-based random numbers: a value is a pure function of (seed, what it is for, position), so no layout can change it.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in int64 arithmetic of plain PyTorch.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
CHUNK = 1 << 22  # elements generated at once: bounds the int64 temporaries


def philox(counter: tuple[Tensor | int, ...], key: tuple[int, int], rounds: int = 10) -> tuple[Tensor, ...]:
    """Four 32-bit words (int64 tensors in [0, 2**32)) for counters c0..c3 (broadcastable) and a 64-bit key."""
    c0, c1, c2, c3 = (c if isinstance(c, Tensor) else torch.tensor(c) for c in counter)
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps modulo 2**64: the low and high words below are still exact
        c0, c1, c2, c3 = ((p1 >> 32) & MASK) ^ c1 ^ k0, p1 & MASK, ((p0 >> 32) & MASK) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def key_of(seed: int, *what: str | int) -> tuple[int, int]:
    """A 64-bit key from a seed and what the numbers are for."""
    digest = hashlib.blake2b("/".join(map(str, (seed, *what))).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def normal_at(index: Tensor, key: tuple[int, int]) -> Tensor:
    """Standard normal float64 for each int64 element number: Box-Muller over the four words of counter index // 2."""
    pair = index // 2
    w0, w1, w2, w3 = philox((pair & MASK, pair >> 32, 0, 0), key)
    u1 = ((w0 << 21) + (w1 >> 11) + 1).double() * 2.0**-53  # in (0, 1]
    u2 = ((w2 << 21) + (w3 >> 11)).double() * 2.0**-53  # in [0, 1)
    radius, angle = torch.sqrt(-2.0 * torch.log(u1)), (2.0 * math.pi) * u2
    return radius * torch.where(index % 2 == 0, torch.cos(angle), torch.sin(angle))


def fill_normal_(out: Tensor, std: float, shape: tuple[int, ...], start: tuple[int, ...], seed: int, name: str) -> None:
    """Fill `out`, the box at `start` of the global tensor `name` of `shape`, with its part of normal(0, std).

    Element e of the row-major global tensor has the same bits wherever it is made.
    """
    key = key_of(seed, "init", name)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    rows = out.shape[0] if out.dim() else 1
    per_chunk = max(1, CHUNK // max(1, out.numel() // max(rows, 1)))
    for lo in range(0, rows, per_chunk):
        part = out[lo : lo + per_chunk]
        index = torch.zeros((), dtype=torch.int64, device=out.device)
        for d, (first, stride) in enumerate(zip(start, strides)):
            base = first + (lo if d == 0 else 0)
            along = torch.arange(base, base + part.shape[d], device=out.device) * stride
            index = index + along.view(-1, *(1,) * (len(shape) - 1 - d))
        part.copy_(normal_at(index.contiguous(), key) * std)


def keep_mask(p: float, seed: Tensor | int, layer: int, site: int, rows: tuple[Tensor, Tensor], columns: int, extra: int = 0) -> Tensor:
    """Dropout's decision for (rows, columns): True = keep, with probability 1 - p.

    rows = (sample ids, positions), int64 of one shape R; the result has shape (*R, columns). The key is (seed, layer, site,
    extra), the counter (column, position, sample): the same bits in every layout and from every twin of an op.
    """
    samples, positions = rows
    key = key_of(int(seed), "dropout")
    lanes = torch.arange((columns + 3) // 4, device=samples.device)
    site_word = (layer << 20) | (site << 16) | extra
    words = philox((lanes, positions.unsqueeze(-1), samples.unsqueeze(-1) & MASK, torch.tensor(site_word, device=samples.device)), key)
    flat = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(-2)[..., :columns]
    return flat >= int(p * 2.0**32)

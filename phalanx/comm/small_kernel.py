"""The kernels of comm/small.py. A program is a channel: BLOCK elements of one rank's values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 4


@triton.jit
def _place(data, rank, source, turn, like, SIZE: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Where `source` pushes this channel's values on `rank`."""
    start = tl.multiple_of(tl.load(data + rank).to(tl.pointer_type(like.dtype.element_ty)), 16)
    return start + ((turn * SIZE + source) * CHANNELS + tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _flag(flags, rank, source, CHANNELS: tl.constexpr):
    """The flag that `source` raises for this channel on `rank`."""
    return tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + source * CHANNELS + tl.program_id(0)


@triton.jit
def _meet(flags, count, INDEX: tl.constexpr, SIZE: tl.constexpr, CHANNELS: tl.constexpr):
    """What this channel's programs on all ranks pushed before is visible to all of them afterwards. Counts may wrap."""
    tl.debug_barrier()  # all threads have pushed
    for k in tl.static_range(1, SIZE):
        tl.atomic_xchg(_flag(flags, (INDEX + k) % SIZE, INDEX, CHANNELS), count, sem="release", scope="sys")
    for k in tl.static_range(1, SIZE):
        own = _flag(flags, INDEX, (INDEX + k) % SIZE, CHANNELS)
        while tl.atomic_add(own, 0, sem="acquire", scope="sys") - count < 0:
            pass
    tl.debug_barrier()


@triton.jit
def _gather(
    x, out, data, flags, counts, n, INDEX: tl.constexpr, SIZE: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    count = tl.load(counts + tl.program_id(0)) + 1
    turn = count & 1
    values = tl.load(x + at, mask=here)
    for k in tl.static_range(1, SIZE):
        tl.store(_place(data, (INDEX + k) % SIZE, INDEX, turn, x, SIZE, CHANNELS, BLOCK), values, mask=here)
    tl.store(out + INDEX * n + at, values, mask=here)
    _meet(flags, count, INDEX, SIZE, CHANNELS)
    for k in tl.static_range(1, SIZE):
        source = (INDEX + k) % SIZE
        pushed = _place(data, INDEX, source, turn, x, SIZE, CHANNELS, BLOCK)
        # volatile: this multiprocessor may have read the place before others wrote it
        tl.store(out + source * n + at, tl.load(pushed, mask=here, volatile=True), mask=here)
    tl.store(counts + tl.program_id(0), count)


@triton.jit
def _scatter(
    x,
    out,
    data,
    flags,
    counts,
    n,
    WIDE: tl.constexpr,
    INDEX: tl.constexpr,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    count = tl.load(counts + tl.program_id(0)) + 1
    turn = count & 1
    for k in tl.static_range(1, SIZE):
        rank = (INDEX + k) % SIZE
        values = tl.load(x + rank * n + at, mask=here)
        tl.store(_place(data, rank, INDEX, turn, x, SIZE, CHANNELS, BLOCK), values, mask=here)
    _meet(flags, count, INDEX, SIZE, CHANNELS)
    total = tl.zeros((BLOCK,), WIDE)
    for source in tl.static_range(SIZE):  # in rank order, on every rank
        if source == INDEX:
            total += tl.load(x + INDEX * n + at, mask=here, other=0.0).to(WIDE)
        else:
            pushed = _place(data, INDEX, source, turn, x, SIZE, CHANNELS, BLOCK)
            total += tl.load(pushed, mask=here, other=0.0, volatile=True).to(WIDE)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=here)
    tl.store(counts + tl.program_id(0), count)


def gather(x: Tensor, out: Tensor, places: Sequence[Tensor], **sizes: int) -> None:
    """x (n, ...) contiguous, of each rank -> out (size * n, ...). places: where data and flags begin on each rank
    (int64 addresses), and this rank's counts."""
    n = x.numel()
    if n:
        _gather[(triton.cdiv(n, sizes["BLOCK"]),)](x, out, *places, n, **sizes, num_warps=WARPS)


def scatter(x: Tensor, out: Tensor, places: Sequence[Tensor], **sizes: int) -> None:
    """x (size * n, ...) contiguous, of each rank -> out (n, ...): this rank's rows of the sum."""
    n = out.numel()
    wide = tl.float64 if x.dtype == torch.float64 else tl.float32
    if n:
        _scatter[(triton.cdiv(n, sizes["BLOCK"]),)](x, out, *places, n, WIDE=wide, **sizes, num_warps=WARPS)

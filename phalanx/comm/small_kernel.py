"""The kernels of comm/small.py. A program is a channel: WORDS words of 4 bytes of one rank's values. A word travels
with the number of its exchange in one store of 8 bytes, so whoever reads the number has the word: no flag follows the
values, and nothing waits until they are written (NCCL's protocol LL)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 4


@triton.jit
def _place(addresses, rank, source, turn, SIZE: tl.constexpr, CHANNELS: tl.constexpr, WORDS: tl.constexpr):
    """Where `source` pushes this channel's words on `rank`."""
    start = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int64)), 16)
    return start + ((turn * SIZE + source) * CHANNELS + tl.program_id(0)) * WORDS + tl.arange(0, WORDS)


@triton.jit
def _numbered(words, count):
    return (count.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _received(place, here, count):
    """The words of exchange number `count`, once all are there."""
    found = tl.load(place, mask=here, other=0, volatile=True)
    while tl.max((((found >> 32).to(tl.int32) != count) & here).to(tl.int32), 0) != 0:
        found = tl.load(place, mask=here, other=0, volatile=True)
    return found.to(tl.int32)


@triton.jit
def _gather(
    x,
    out,
    addresses,
    counts,
    n,
    INDEX: tl.constexpr,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    WORDS: tl.constexpr,
):
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    here = at < n
    count = tl.load(counts + tl.program_id(0)) + 1
    turn = count & 1
    words = tl.load(x + at, mask=here, other=0)
    for k in tl.static_range(1, SIZE):
        tl.store(
            _place(addresses, (INDEX + k) % SIZE, INDEX, turn, SIZE, CHANNELS, WORDS),
            _numbered(words, count),
            mask=here,
        )
    tl.store(out + INDEX * n + at, words, mask=here)
    for k in tl.static_range(1, SIZE):
        source = (INDEX + k) % SIZE
        place = _place(addresses, INDEX, source, turn, SIZE, CHANNELS, WORDS)
        tl.store(out + source * n + at, _received(place, here, count), mask=here)
    tl.store(counts + tl.program_id(0), count)


@triton.jit
def _scatter(
    x,
    words_in,
    received,
    words_received,
    out,
    addresses,
    counts,
    n,
    VALUES: tl.constexpr,
    WIDE: tl.constexpr,
    INDEX: tl.constexpr,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """words_in, words_received: x and `received` as words. n: words of a rank's rows, each of VALUES / WORDS values."""
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    here = at < n
    count = tl.load(counts + tl.program_id(0)) + 1
    turn = count & 1
    for k in tl.static_range(1, SIZE):
        rank = (INDEX + k) % SIZE
        words = tl.load(words_in + rank * n + at, mask=here, other=0)
        tl.store(
            _place(addresses, rank, INDEX, turn, SIZE, CHANNELS, WORDS),
            _numbered(words, count),
            mask=here,
        )
    for k in tl.static_range(1, SIZE):
        source = (INDEX + k) % SIZE
        place = _place(addresses, INDEX, source, turn, SIZE, CHANNELS, WORDS)
        tl.store(words_received + source * n + at, _received(place, here, count), mask=here)
    tl.debug_barrier()  # from here on as values, which other threads have stored
    rows = n * VALUES // WORDS
    i = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    inside = i < rows
    total = tl.zeros((VALUES,), WIDE)
    for source in tl.static_range(SIZE):  # in rank order, on every rank
        if source == INDEX:
            total += tl.load(x + INDEX * rows + i, mask=inside, other=0.0).to(WIDE)
        else:
            total += tl.load(received + source * rows + i, mask=inside, other=0.0).to(WIDE)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=inside)
    tl.store(counts + tl.program_id(0), count)


def gather(x: Tensor, out: Tensor, memory: Sequence[Tensor], **sizes: int) -> None:
    """x (n, ...) contiguous, of each rank -> out (size * n, ...). memory: where it begins on each rank (int64
    addresses), and this rank's counts."""
    n = x.nbytes // 4
    if n:
        _gather[(triton.cdiv(n, sizes["WORDS"]),)](_words(x), _words(out), *memory, n, **sizes, num_warps=WARPS)


def scatter(x: Tensor, out: Tensor, memory: Sequence[Tensor], **sizes: int) -> None:
    """x (size * n, ...) contiguous, of each rank -> out (n, ...): this rank's rows of the sum."""
    n = out.nbytes // 4
    if n:
        received = torch.empty_like(x)
        _scatter[(triton.cdiv(n, sizes["WORDS"]),)](
            x,
            _words(x),
            received,
            _words(received),
            out,
            *memory,
            n,
            VALUES=4 * sizes["WORDS"] // x.element_size(),
            WIDE=tl.float64 if x.dtype == torch.float64 else tl.float32,
            **sizes,
            num_warps=WARPS,
        )


def _words(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.int32)

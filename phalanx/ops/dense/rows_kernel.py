"""The gradient of a lookup in Triton: tokens in the order of their rows, in chunks. What a chunk sums of a row that no
other chunk has is added at once; of a row that reaches over chunks each adds its part to a scratch, and the chunk in
which the row begins sums the parts, in order. So equal inputs give equal bits, and a row of which there are very many
(the mask token, a position, a type of token) takes no longer than others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.kernel_tools import triton_wide, wide_of

CHUNK, BLOCK = 64, 256


@triton.jit
def _chunks(order, rows, dy, gradient, parts, T, D, CHUNK: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """order: places of tokens by row; rows: theirs, ascending. parts (chunks, 2, D): sums of a row that began in an
    earlier chunk, and of one that begins here and goes on."""
    chunk = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < D
    first, stop = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, T)
    before = tl.load(rows + first - 1, mask=first > 0, other=-1)
    after = tl.load(rows + stop, mask=stop < T, other=-1)
    row = tl.load(rows + first)
    total = tl.zeros((BLOCK,), WIDE)
    for at in range(first, stop):
        here = tl.load(rows + at)
        if here != row:
            if row == before:  # only of the first row
                tl.store(parts + (chunk * 2) * D + cols, total, mask=mask)
            else:
                own = tl.load(gradient + row * D + cols, mask=mask, other=0.0)
                tl.store(gradient + row * D + cols, own + total, mask=mask)
            row = here
            total = tl.zeros((BLOCK,), WIDE)
        total += tl.load(dy + tl.load(order + at) * D + cols, mask=mask, other=0.0).to(WIDE)
    if row == before:
        tl.store(parts + (chunk * 2) * D + cols, total, mask=mask)
    elif row == after:
        tl.store(parts + (chunk * 2 + 1) * D + cols, total, mask=mask)
    else:
        own = tl.load(gradient + row * D + cols, mask=mask, other=0.0)
        tl.store(gradient + row * D + cols, own + total, mask=mask)


@triton.jit
def _rows_over_chunks(rows, ends, gradient, parts, T, D, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """The program of the chunk in which such a row begins sums its parts. ends: for each chunk, where its last row
    ends."""
    chunk = tl.program_id(0).to(tl.int64)
    first, stop = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, T)
    row = tl.load(rows + stop - 1)
    before = tl.load(rows + first - 1, mask=first > 0, other=-1)
    more = tl.where(row == before, 0, tl.cdiv(tl.load(ends + chunk), CHUNK) - chunk - 1)  # chunks after this one
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (cols < D) & (more > 0)
    total = tl.load(parts + (chunk * 2 + 1) * D + cols, mask=mask, other=0.0)
    for at in range(1, more + 1):
        total += tl.load(parts + ((chunk + at) * 2) * D + cols, mask=mask, other=0.0)
    own = tl.load(gradient + row * D + cols, mask=mask, other=0.0)
    tl.store(gradient + row * D + cols, own + total, mask=mask)


def add_rows_(gradient: Tensor, rows: Tensor, dy: Tensor) -> None:
    """gradient (V, D), in fp32 or fp64, += dy (T, D) at rows (T,), in the order of T."""
    tokens, width = dy.shape
    if not dy.numel():
        return
    rows, order = rows.sort(stable=True)
    chunks = triton.cdiv(tokens, CHUNK)
    grid = (chunks, triton.cdiv(width, BLOCK))
    parts = torch.empty(chunks, 2, width, dtype=wide_of(gradient.dtype), device=dy.device)
    _chunks[grid](
        order,
        rows,
        dy.contiguous(),
        gradient,
        parts,
        tokens,
        width,
        CHUNK=CHUNK,
        BLOCK=BLOCK,
        WIDE=triton_wide(gradient.dtype),
    )
    last = torch.arange(1, chunks + 1, device=dy.device).mul_(CHUNK).clamp_(max=tokens) - 1
    ends = torch.searchsorted(rows, rows[last], right=True)
    _rows_over_chunks[grid](rows, ends, gradient, parts, tokens, width, CHUNK=CHUNK, BLOCK=BLOCK)

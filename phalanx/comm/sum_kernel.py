"""Sums of what other ranks pushed here, in one pass over memory (torch's own sum over a short first dim runs at half
the speed)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _sum(parts, out, n, distance, COUNT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), WIDE)
    for part in tl.static_range(COUNT):
        total += tl.load(parts + part * distance + i, mask=i < n, other=0.0).to(WIDE)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=i < n)


def sum_parts(parts: Tensor) -> Tensor:
    """parts (count, rows, width), each part contiguous -> their sum, added in order in at least fp32."""
    out = torch.empty(parts.shape[1:], dtype=parts.dtype, device=parts.device)
    n = out.numel()
    if n:
        wide = tl.float64 if parts.dtype == torch.float64 else tl.float32
        _sum[(triton.cdiv(n, BLOCK),)](
            parts, out, n, parts.stride(0), COUNT=parts.shape[0], WIDE=wide, BLOCK=BLOCK, num_warps=8
        )
    return out


@triton.jit
def _add(
    out, own, received, n, distance, INDEX: tl.constexpr, SIZE: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < n
    total = tl.load(own + i, mask=here) if INDEX == 0 else tl.load(received + i, mask=here)
    for rank in tl.static_range(1, SIZE):
        if rank == INDEX:
            total += tl.load(own + i, mask=here)
        else:
            total += tl.load(received + (rank - (rank > INDEX)) * distance + i, mask=here)
    if ADD:
        total = tl.load(out + i, mask=here) + total
    tl.store(out + i, total, mask=here)


def add_pieces_(out: Tensor, own: Tensor, received: Tensor, index: int, add: bool) -> None:
    """As overlap.add_pieces, in one pass over memory: out (n,), own (n,), received (size - 1, n) of one dtype, its rows
    contiguous."""
    n = out.numel()
    if n:
        size = len(received) + 1
        _add[(triton.cdiv(n, BLOCK),)](
            out, own, received, n, received.stride(0), INDEX=index, SIZE=size, ADD=add, BLOCK=BLOCK, num_warps=8
        )

"""Rows by expert: a counting sort of the (token, slot) pairs, and the moves between tokens and rows, in one pass over
memory each.

Every move is organized by token: a program handles one token and finds its rows through `row_TK`. So sums over slots
are in order, and no two programs write to the same place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.kernel_tools import triton_wide, warps_for, wide_of

if TYPE_CHECKING:
    from phalanx.ops.experts.rows import ExpertRows

MATRIX = 8192  # pairs x experts of a program of the sort, which it holds in registers
WIDTH = 4096  # columns of a program that copies or adds


@triton.jit
def _local_expert(experts, pair, pairs, first, COUNT: tl.constexpr):
    """Number of each pair's expert among those held here, COUNT for experts on other ranks."""
    e = tl.load(experts + pair, mask=pair < pairs, other=-1) - first
    return tl.where((e >= 0) & (e < COUNT), e, COUNT).to(tl.int32)


@triton.jit
def _count(experts, counts, pairs, first, COUNT: tl.constexpr, COUNT_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """counts[e, block]: number of pairs of this block with expert e."""
    block = tl.program_id(0)
    e = _local_expert(experts, block * BLOCK + tl.arange(0, BLOCK), pairs, first, COUNT)
    each = tl.arange(0, COUNT_BLOCK)
    found = tl.sum((e[:, None] == each[None, :]).to(tl.int32), 0)
    tl.store(counts + each * tl.num_programs(0) + block, found, mask=each < COUNT)


@triton.jit
def _place(
    experts,
    counts,
    sums,
    source,
    slot,
    row,
    ends,
    pairs,
    first,
    rows,
    slots,
    COUNT: tl.constexpr,
    COUNT_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each pair's row number: pairs of lower experts, plus pairs of its expert in earlier blocks, plus those before it
    in this block.

    `sums` are the running sums of `counts`. The programs also share the work of zeroing the padding and writing the
    ends.
    """
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    e = _local_expert(experts, pair, pairs, first, COUNT)
    each = tl.arange(0, COUNT_BLOCK)
    here = each < COUNT
    before = tl.load(sums + each * blocks + block, mask=here, other=0) - tl.load(
        counts + each * blocks + block, mask=here, other=0
    )
    mine = (e[:, None] == each[None, :]).to(tl.int32)
    at = tl.sum(mine * (before[None, :] + tl.cumsum(mine, 0) - 1), 1)
    held = (e < COUNT) & (at < rows)
    tl.store(slot + at, pair, mask=held)
    tl.store(source + at, pair // slots, mask=held)
    tl.store(row + pair, tl.where(held, at, -1), mask=pair < pairs)
    wanted = tl.load(sums + COUNT * blocks - 1)
    for r in range(wanted // BLOCK * BLOCK + block * BLOCK, rows, blocks * BLOCK):
        padding = r + tl.arange(0, BLOCK)
        mask = (padding >= wanted) & (padding < rows)
        tl.store(slot + padding, 0, mask=mask)
        tl.store(source + padding, 0, mask=mask)
    if block == 0:
        stops = tl.load(sums + each * blocks + blocks - 1, mask=here, other=0)
        tl.store(ends + each, tl.minimum(stops, rows), mask=here)


@triton.jit
def _gather(x, y, row, D, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a token to each of its rows."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + token * D + cols, mask=cols < D)
    for k in tl.static_range(SLOTS):
        r = tl.load(row + token * SLOTS + k).to(tl.int64)
        tl.store(y + r * D + cols, value, mask=(cols < D) & (r >= 0))


@triton.jit
def _sum(y, weights, out, row, D, SLOTS: tl.constexpr, WEIGH: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Add up a token's rows."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), WIDE)
    for k in tl.static_range(SLOTS):
        r = tl.load(row + token * SLOTS + k).to(tl.int64)
        part = tl.load(y + r * D + cols, mask=(cols < D) & (r >= 0), other=0.0).to(WIDE)
        if WEIGH:
            part = part * tl.load(weights + token * SLOTS + k).to(WIDE)
        total += part
    tl.store(out + token * D + cols, total.to(out.dtype.element_ty), mask=cols < D)


@triton.jit
def _weighted_backward(
    dout, y, weights, dy, dweights, row, D, SLOTS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """dy of a token's rows, and the gradient of their weights."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    d = tl.load(dout + token * D + cols, mask=cols < D, other=0.0).to(WIDE)
    for k in tl.static_range(SLOTS):
        r = tl.load(row + token * SLOTS + k).to(tl.int64)
        mask = (cols < D) & (r >= 0)
        weight = tl.load(weights + token * SLOTS + k).to(WIDE)
        product = tl.sum(d * tl.load(y + r * D + cols, mask=mask, other=0.0).to(WIDE), 0)
        tl.store(dy + r * D + cols, (d * weight).to(dy.dtype.element_ty), mask=mask)
        tl.store(dweights + token * SLOTS + k, product.to(dweights.dtype.element_ty))


def plan_forward(experts_TK: Tensor, first: int, count: int, rows: int) -> tuple[Tensor, ...]:
    """The fields of ops.experts.permute.ExpertRows, in their order."""
    experts, slots = experts_TK.contiguous(), experts_TK.shape[1]
    pairs, device = experts.numel(), experts.device
    count_block = triton.next_power_of_2(count)
    block = max(32, min(256, MATRIX // count_block))
    blocks = max(1, triton.cdiv(pairs, block))
    source, slot = torch.empty(2, rows, dtype=torch.int32, device=device)
    row = torch.empty(experts.shape, dtype=torch.int32, device=device)
    ends = torch.empty(count, dtype=torch.int32, device=device)
    counts = torch.empty(count * blocks, dtype=torch.int32, device=device)
    sizes = dict(COUNT=count, COUNT_BLOCK=count_block, BLOCK=block)
    _count[(blocks,)](experts, counts, pairs, first, **sizes)
    sums = torch.cumsum(counts, 0, dtype=torch.int32)
    _place[(blocks,)](experts, counts, sums, source, slot, row, ends, pairs, first, rows, slots, **sizes)
    return source, slot, row, ends, sums[-1]


def _grid(tokens: int, width: int) -> tuple[tuple[int, int], int]:
    block = min(WIDTH, triton.next_power_of_2(width))
    return (tokens, triton.cdiv(width, block)), block


def gather_forward(x: Tensor, rows: ExpertRows) -> Tensor:
    """x (T, D) -> (R, D): the token of each row; padding rows are left unchanged."""
    (tokens, width), slots = x.shape, rows.row_TK.shape[1]
    x, y = x.contiguous(), x.new_empty(len(rows.source_R), width)
    grid, block = _grid(tokens, width)
    if x.numel() and y.numel():
        _gather[grid](x, y, rows.row_TK, width, SLOTS=slots, BLOCK=block, num_warps=warps_for(block))
    return y


def sum_forward(y: Tensor, weights: Tensor | None, rows: ExpertRows, out: Tensor | None = None) -> Tensor:
    """y (R, D) -> (T, D): the sum of each token's rows, times `weights` (T, K)."""
    (tokens, slots), width = rows.row_TK.shape, y.shape[1]
    y, out = y.contiguous(), y.new_empty(tokens, width) if out is None else out
    grid, block = _grid(tokens, width)
    if out.numel():
        weights = None if weights is None else weights.contiguous()
        _sum[grid](
            y,
            weights,
            out,
            rows.row_TK,
            width,
            SLOTS=slots,
            WEIGH=weights is not None,
            WIDE=triton_wide(wide_of(y.dtype)),
            BLOCK=block,
            num_warps=warps_for(block),
        )
    return out


def weighted_backward(dout: Tensor, y: Tensor, weights: Tensor, rows: ExpertRows) -> tuple[Tensor, Tensor]:
    """Gradients of y (R, D) and of the weights (T, K) from dout (T, D); padding rows are left unchanged."""
    (tokens, slots), width = rows.row_TK.shape, y.shape[1]
    dout, y, weights = dout.contiguous(), y.contiguous(), weights.contiguous()
    dy, dweights = torch.empty_like(y), torch.empty_like(weights)
    block = triton.next_power_of_2(width)
    if tokens and width:
        _weighted_backward[(tokens,)](
            dout,
            y,
            weights,
            dy,
            dweights,
            rows.row_TK,
            width,
            SLOTS=slots,
            WIDE=triton_wide(wide_of(y.dtype)),
            BLOCK=block,
            num_warps=warps_for(block),
        )
    return dy, dweights

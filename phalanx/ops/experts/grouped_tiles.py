"""Tiles of the experts' matmuls, in bf16 (grouped_kernel.py) or FP8 (quantized/grouped_gemm_kernel.py): which tile of
which expert a program computes, and how tiles are stored.

Which expert a row belongs to is read from `ends` on the device, so nothing waits for the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.ops.kernel_tools import grouped_order


@triton.jit
def rows_of_experts(ends, E, E_BLOCK: tl.constexpr):
    """For each expert: its number, its first row, and one past its last row."""
    experts = tl.arange(0, E_BLOCK)
    stops = tl.load(ends + experts, mask=experts < E, other=0)
    starts = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    return experts, starts, stops


@triton.jit
def tiles_of_experts(starts, stops, N, BM: tl.constexpr, BN: tl.constexpr):
    """For each expert: the number of tiles in its product, rows `starts` .. `stops` by N columns; and the running sum
    of these."""
    tiles_n = tl.cdiv(N, BN)
    counts = tl.cdiv(stops - starts, BM) * tiles_n
    return counts, tl.cumsum(counts, 0)


@triton.jit
def tile_of_experts(
    tile, experts, starts, stops, counts, lasts, N, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """(the expert, one past its last row, first row, first column) of tile number `tile` among all experts'
    products."""
    e = tl.sum((lasts <= tile).to(tl.int32), 0)
    start = tl.sum(tl.where(experts == e, starts, 0), 0)
    stop = tl.sum(tl.where(experts == e, stops, 0), 0)
    at = tile - tl.sum(tl.where(experts == e, lasts - counts, 0), 0)
    down, along = grouped_order(at, stop - start, tl.cdiv(N, BN), GROUP, BM)
    return e, stop, start + down * BM, along * BN


@triton.jit
def tile_of_gradients(M, N, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """(the expert, first row, first column) of this program's tile among the experts' weight gradients (E, M, N)."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    e = tl.program_id(0) // (tiles_m * tiles_n)
    down, along = grouped_order(tl.program_id(0) % (tiles_m * tiles_n), M, tiles_n, GROUP, BM)
    return e, down * BM, along * BN


@triton.jit
def halves(tile):
    """The left and the right half of a tile's columns."""
    return tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def _store_part(y, part, bias, row, stop, col, N, BIAS: tl.constexpr):
    """Store a tile at (row, col) of y (.., N), only rows before `stop`, with the bias added."""
    rows = row + tl.arange(0, part.shape[0])
    cols = col + tl.arange(0, part.shape[1])
    if BIAS:
        part += tl.load(bias + cols, mask=cols < N, other=0.0).to(part.dtype)[None, :]
    inside = (rows < stop)[:, None] & (cols < N)[None, :]
    tl.store(y + rows.to(tl.int64)[:, None] * N + cols[None, :], part.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _add_part(dw, part, row, col, M, N):
    """Add a tile at (row, col) of dw (M, N)."""
    rows = row + tl.arange(0, part.shape[0])
    cols = col + tl.arange(0, part.shape[1])
    where = dw + rows.to(tl.int64)[:, None] * N + cols[None, :]
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    total = tl.load(where, mask=inside, other=0.0).to(part.dtype) + part
    tl.store(where, total.to(dw.dtype.element_ty), mask=inside)


@triton.jit
def store_halves(y, left, right, bias, row, stop, col, N, BIAS: tl.constexpr):
    """Store the tile made of these halves at (row, col) of y (.., N), only rows before `stop`, with the bias added: one
    half at a time, to save registers."""
    _store_part(y, left, bias, row, stop, col, N, BIAS)
    _store_part(y, right, bias, row, stop, col + left.shape[1], N, BIAS)


@triton.jit
def add_halves(dw, e, left, right, row, col, M, N):
    """Add the tile made of these halves at (row, col) of dw[e] (M, N): a quarter at a time, to save registers."""
    q0, q1 = halves(left)
    q2, q3 = halves(right)
    dw += e.to(tl.int64) * M * N
    width: tl.constexpr = q0.shape[1]
    _add_part(dw, q0, row, col, M, N)
    _add_part(dw, q1, row, col + width, M, N)
    _add_part(dw, q2, row, col + width * 2, M, N)
    _add_part(dw, q3, row, col + width * 3, M, N)

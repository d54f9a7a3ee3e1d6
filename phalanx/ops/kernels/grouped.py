"""The matmul of many experts on tensor cores: forward and input gradient in one kernel, weight gradient added to its buffer in another.

Which rows are whose is read from `ends` on the device, so nothing waits for the host. Tiles are loaded by TMA descriptors where
the strides are multiples of 16 bytes, by masked pointers otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from phalanx.ops.kernels.common import num_programs, triton_wide


@dataclass(frozen=True)
class Tiles:
    """Sizes of a program's tile of the output (m, n) and of its step along the sum (k), and how it runs."""

    m: int
    n: int
    k: int
    stages: int
    warps: int
    group: int = 8
    """Tiles along m that go together over all n, so that what they read stays in the L2 cache."""
    flatten: bool = False
    """Whether the loops over tiles and over k are one pipeline."""
    per_processor: int = 1


def tiles_of(dtype: torch.dtype) -> Tiles:
    return {8: Tiles(32, 32, 16, 2, 4), 4: Tiles(64, 64, 32, 2, 4)}.get(dtype.itemsize, Tiles(128, 256, 64, 3, 8))


@triton.jit
def _rows_tile(x, row, col, rows, cols, TMA: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Tile (BR, BC) at (row, col) of a row-major matrix; zeros outside."""
    if TMA:
        tile = x.load([row, col])
    else:
        r = row + tl.arange(0, BR)[:, None]
        c = col + tl.arange(0, BC)[None, :]
        tile = tl.load(x + r.to(tl.int64) * cols + c, mask=(r < rows) & (c < cols), other=0.0)
    return tile


@triton.jit
def _expert_tile(w, e, row, col, rows, cols, TMA: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """The same of matrix e of a stack."""
    if TMA:
        tile = w.load([e, row, col]).reshape(BR, BC)
    else:
        r = row + tl.arange(0, BR)[:, None]
        c = col + tl.arange(0, BC)[None, :]
        tile = tl.load(w + (e.to(tl.int64) * rows + r) * cols + c, mask=(r < rows) & (c < cols), other=0.0)
    return tile


@triton.jit
def _halves(tile):
    """The left and the right half of a tile's columns."""
    return tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def _store_part(y, part, bias, row, stop, col, N, BIAS: tl.constexpr):
    """Store a tile at (row, col) of y (.., N), the rows before `stop`, with the bias added."""
    rows = row + tl.arange(0, part.shape[0])
    cols = col + tl.arange(0, part.shape[1])
    if BIAS:
        part += tl.load(bias + cols, mask=cols < N, other=0.0).to(part.dtype)[None, :]
    inside = (rows < stop)[:, None] & (cols < N)[None, :]
    tl.store(y + rows.to(tl.int64)[:, None] * N + cols[None, :], part.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _add_part(dw, part, row, col, M, N):
    """Add a tile to that at (row, col) of dw (M, N)."""
    rows = row + tl.arange(0, part.shape[0])
    cols = col + tl.arange(0, part.shape[1])
    where = dw + rows.to(tl.int64)[:, None] * N + cols[None, :]
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    total = tl.load(where, mask=inside, other=0.0).to(part.dtype) + part
    tl.store(where, total.to(dw.dtype.element_ty), mask=inside)


@triton.jit
def _grouped_gemm(x, weight, bias, y, ends, R, N, K, E, TURNED: tl.constexpr, BIAS: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr,
                  E_BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
                  FLATTEN: tl.constexpr):  # fmt: skip
    """Rows of x (R, K) times their expert's matrix: stored (K, N), or (N, K) where TURNED. A program goes through every n-th tile."""
    experts = tl.arange(0, E_BLOCK)
    stops = tl.load(ends + experts, mask=experts < E, other=0)
    starts = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    tiles_n = tl.cdiv(N, BN)
    counts = tl.cdiv(stops - starts, BM) * tiles_n  # tiles of each expert
    lasts = tl.cumsum(counts, 0)
    for tile in tl.range(tl.program_id(0), tl.sum(counts, 0), tl.num_programs(0), flatten=FLATTEN):
        e = tl.sum((lasts <= tile).to(tl.int32), 0)
        start = tl.sum(tl.where(experts == e, starts, 0), 0)
        stop = tl.sum(tl.where(experts == e, stops, 0), 0)
        at = tile - tl.sum(tl.where(experts == e, lasts - counts, 0), 0)
        first = at // (GROUP * tiles_n) * GROUP
        together = tl.minimum(tl.cdiv(stop - start, BM) - first, GROUP)
        row = start + (first + at % (GROUP * tiles_n) % together) * BM
        col = at % (GROUP * tiles_n) // together * BN
        acc = tl.zeros((BM, BN), WIDE)
        for k in range(0, K, BK):
            a = _rows_tile(x, row, k, R, K, TMA, BM, BK)
            if TURNED:
                b = _expert_tile(weight, e, col, k, N, K, TMA, BN, BK).T
            else:
                b = _expert_tile(weight, e, k, col, K, N, TMA, BK, BN)
            acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=WIDE)
        left, right = _halves(acc)  # half of the tile at a time, for want of registers
        of_e = bias + e.to(tl.int64) * N if BIAS else bias
        _store_part(y, left, of_e, row, stop, col, N, BIAS)
        _store_part(y, right, of_e, row, stop, col + BN // 2, N, BIAS)


@triton.jit
def _grouped_gemm_dw(dy, x, dw, ends, R, M, N, TMA: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                     GROUP: tl.constexpr):  # fmt: skip
    """A tile of dw[e] (M, N) += dy^T x over the rows of e; dy (R, M), x (R, N)."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    e = tl.program_id(0) // (tiles_m * tiles_n)
    at = tl.program_id(0) % (tiles_m * tiles_n)
    first = at // (GROUP * tiles_n) * GROUP
    together = tl.minimum(tiles_m - first, GROUP)
    row = (first + at % (GROUP * tiles_n) % together) * BM
    col = at % (GROUP * tiles_n) // together * BN
    stop = tl.load(ends + e)
    start = tl.load(ends + e - 1, mask=e > 0, other=0)
    if start == stop:
        return
    whole = start + (stop - start) // BK * BK
    acc = tl.zeros((BM, BN), WIDE)
    for r in range(start, whole, BK):
        a = _rows_tile(dy, r, row, R, M, TMA, BK, BM)
        b = _rows_tile(x, r, col, R, N, TMA, BK, BN)
        acc = tl.dot(a.T, b, acc, input_precision="ieee", out_dtype=WIDE)
    if whole < stop:  # what follows belongs to another expert, or to nobody and may be anything
        mine = (whole + tl.arange(0, BK) < stop)[:, None]
        a = tl.where(mine, _rows_tile(dy, whole, row, R, M, TMA, BK, BM), 0.0).to(x.dtype if TMA else x.dtype.element_ty)
        b = tl.where(mine, _rows_tile(x, whole, col, R, N, TMA, BK, BN), 0.0).to(x.dtype if TMA else x.dtype.element_ty)
        acc = tl.dot(a.T, b, acc, input_precision="ieee", out_dtype=WIDE)
    left, right = _halves(acc)  # a quarter of the tile at a time, for want of registers
    q0, q1 = _halves(left)
    q2, q3 = _halves(right)
    of_e = dw + e.to(tl.int64) * M * N
    _add_part(of_e, q0, row, col, M, N)
    _add_part(of_e, q1, row, col + BN // 4, M, N)
    _add_part(of_e, q2, row, col + BN // 2, M, N)
    _add_part(of_e, q3, row, col + BN // 4 * 3, M, N)


@triton.jit
def _grouped_sum(dy, db, ends, N, WIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """db[e] += the sum of e's rows of dy, some columns of it."""
    e = tl.program_id(0)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    stop = tl.load(ends + e)
    start = tl.load(ends + e - 1, mask=e > 0, other=0)
    acc = tl.zeros((BR, BC), WIDE)
    for r in range(start, stop, BR):
        rows = r + tl.arange(0, BR)
        mask = (rows < stop)[:, None] & (cols < N)[None, :]
        acc += tl.load(dy + rows.to(tl.int64)[:, None] * N + cols[None, :], mask=mask, other=0.0).to(WIDE)
    where = db + e.to(tl.int64) * N + cols
    total = tl.load(where, mask=cols < N, other=0.0).to(WIDE) + tl.sum(acc, 0)
    tl.store(where, total.to(db.dtype.element_ty), mask=cols < N)


def _descriptors(*tiles: tuple[Tensor, list[int]]) -> tuple[bool, list[Any]]:
    """(whether TMA is to load all of these by tiles of their shapes, what the kernel is given for each). fp64 goes by pointers."""
    takes = all(t.shape[-1] * t.element_size() % 16 == 0 and t.element_size() <= 4 and t.data_ptr() % 16 == 0 and t.numel() for t, _ in tiles)
    return takes, [TensorDescriptor.from_tensor(t, shape) if takes else t for t, shape in tiles]


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None, tiles: Tiles | None = None) -> Tensor:
    """Rows (R, K) of expert e times weight[e] (K, N), which may be a transposed view, plus bias[e]; padding rows are left as they were."""
    x, c = x.contiguous(), tiles or tiles_of(x.dtype)
    experts, inner, width = weight.shape
    turned = not weight.is_contiguous()
    stored = (weight.transpose(1, 2) if turned else weight).contiguous()
    y = x.new_empty(len(x), width)
    if not y.numel():
        return y
    tma, (x_in, w_in) = _descriptors((x, [c.m, c.k]), (stored, [1, c.n, c.k] if turned else [1, c.k, c.n]))
    most = (triton.cdiv(len(x), c.m) + experts) * triton.cdiv(width, c.n)
    _grouped_gemm[(min(most, num_programs(x, c.per_processor)),)](
        x_in, w_in, bias, y, ends, len(x), width, inner, experts, TURNED=turned, BIAS=bias is not None, TMA=tma, WIDE=triton_wide(x.dtype),
        E_BLOCK=triton.next_power_of_2(experts), BM=c.m, BN=c.n, BK=c.k, GROUP=c.group, FLATTEN=c.flatten, num_stages=c.stages, num_warps=c.warps,
    )  # fmt: skip
    return y


def add_grouped_product_(buffer: Tensor, dy: Tensor, x: Tensor, ends: Tensor, tiles: Tiles | None = None) -> None:
    """buffer[e] (M, N) += dy^T x over the rows of e, dy (R, M) and x (R, N), added up in fp32 or wider."""
    dy, x, c = dy.contiguous(), x.contiguous(), tiles or tiles_of(x.dtype)
    experts, height, width = buffer.shape
    if not x.numel() or not buffer.numel():
        return
    tma, (dy_in, x_in) = _descriptors((dy, [c.k, c.m]), (x, [c.k, c.n]))
    _grouped_gemm_dw[(experts * triton.cdiv(height, c.m) * triton.cdiv(width, c.n),)](
        dy_in, x_in, buffer, ends, len(x), height, width, TMA=tma, WIDE=triton_wide(x.dtype), BM=c.m, BN=c.n, BK=c.k, GROUP=c.group,
        num_stages=c.stages, num_warps=c.warps,
    )  # fmt: skip


def add_grouped_sum_(buffer: Tensor, dy: Tensor, ends: Tensor) -> None:
    """buffer[e] (N,) += the sum of the rows of e of dy (R, N)."""
    experts, width = buffer.shape
    if dy.numel():
        _grouped_sum[(experts, triton.cdiv(width, 64))](dy.contiguous(), buffer, ends, width, WIDE=triton_wide(dy.dtype), BR=64, BC=64)

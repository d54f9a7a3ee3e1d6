"""The matmul of many experts on tensor cores: forward and input gradient in one kernel; the weight gradient, added to
its buffer, in another.

Which expert a row belongs to is read from `ends` on the device, so nothing waits for the host. Tiles are loaded by TMA
descriptors where the strides are multiples of 16 bytes, and by masked pointers otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from phalanx.base.dataclass import dataclass
from phalanx.ops.experts.grouped_tiles import (
    add_halves,
    halves,
    rows_of_experts,
    store_halves,
    tile_of_experts,
    tile_of_gradients,
    tiles_of_experts,
)
from phalanx.ops.kernel_tools import num_programs, triton_wide


@dataclass(frozen=True)
class GroupedTiles:
    """Tile sizes of a program: of the output (m, n), of its step along the sum (k), and how it runs."""

    m: int
    n: int
    k: int
    stages: int
    warps: int
    group: int = 8
    """Tiles along m that are computed together over all n, so that their operands stay in the L2 cache."""
    flatten: bool = False
    """Whether the loops over tiles and over k form one pipeline."""
    per_processor: int = 1


def tiles_of(dtype: torch.dtype) -> GroupedTiles:
    return {8: GroupedTiles(32, 32, 16, 2, 4), 4: GroupedTiles(64, 64, 32, 2, 4)}.get(
        dtype.itemsize, GroupedTiles(128, 256, 64, 3, 8)
    )


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
def _grouped_gemm(
    x,
    weight,
    bias,
    y,
    ends,
    R,
    N,
    K,
    E,
    TRANSPOSED: tl.constexpr,
    BIAS: tl.constexpr,
    TMA: tl.constexpr,
    WIDE: tl.constexpr,
    E_BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Rows of x (R, K) times their expert's matrix, stored (K, N), or (N, K) if TRANSPOSED. A program handles every
    n-th tile."""
    experts, starts, stops = rows_of_experts(ends, E, E_BLOCK)
    counts, lasts = tiles_of_experts(starts, stops, N, BM, BN)
    for tile in tl.range(tl.program_id(0), tl.sum(counts, 0), tl.num_programs(0), flatten=FLATTEN):
        e, stop, row, col = tile_of_experts(tile, experts, starts, stops, counts, lasts, N, GROUP, BM, BN)
        acc = tl.zeros((BM, BN), WIDE)
        for k in range(0, K, BK):
            a = _rows_tile(x, row, k, R, K, TMA, BM, BK)
            if TRANSPOSED:
                b = _expert_tile(weight, e, col, k, N, K, TMA, BN, BK).T
            else:
                b = _expert_tile(weight, e, k, col, K, N, TMA, BK, BN)
            acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=WIDE)
        left, right = halves(acc)
        store_halves(y, left, right, bias + e.to(tl.int64) * N if BIAS else bias, row, stop, col, N, BIAS)


@triton.jit
def _grouped_gemm_dw(
    dy,
    x,
    dw,
    ends,
    R,
    M,
    N,
    TMA: tl.constexpr,
    WIDE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A tile of dw[e] (M, N) += dy^T x over the rows of e; dy (R, M), x (R, N)."""
    e, row, col = tile_of_gradients(M, N, GROUP, BM, BN)
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
    if whole < stop:  # the rows after it belong to another expert, or are padding and may hold anything
        mine = (whole + tl.arange(0, BK) < stop)[:, None]
        a = tl.where(mine, _rows_tile(dy, whole, row, R, M, TMA, BK, BM), 0.0).to(
            x.dtype if TMA else x.dtype.element_ty
        )
        b = tl.where(mine, _rows_tile(x, whole, col, R, N, TMA, BK, BN), 0.0).to(x.dtype if TMA else x.dtype.element_ty)
        acc = tl.dot(a.T, b, acc, input_precision="ieee", out_dtype=WIDE)
    left, right = halves(acc)
    add_halves(dw, e, left, right, row, col, M, N)


@triton.jit
def _grouped_sum(dy, db, ends, N, WIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """db[e] += the sum of e's rows of dy, over a slice of its columns."""
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
    """(whether TMA can load all of these by tiles of their shapes, the kernel argument for each). fp64 uses
    pointers."""
    takes = all(
        t.shape[-1] * t.element_size() % 16 == 0 and t.element_size() <= 4 and t.data_ptr() % 16 == 0 and t.numel()
        for t, _ in tiles
    )
    return takes, [TensorDescriptor.from_tensor(t, shape) if takes else t for t, shape in tiles]


def grouped_product(
    x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None, tiles: GroupedTiles | None = None
) -> Tensor:
    """Rows (R, K) of expert e times weight[e] (K, N), which may be a transposed view, plus bias[e]; padding rows are
    left unchanged."""
    x, c = x.contiguous(), tiles or tiles_of(x.dtype)
    experts, inner, width = weight.shape
    transposed = not weight.is_contiguous()
    stored = (weight.transpose(1, 2) if transposed else weight).contiguous()
    y = x.new_empty(len(x), width)
    if not y.numel():
        return y
    tma, (x_in, w_in) = _descriptors((x, [c.m, c.k]), (stored, [1, c.n, c.k] if transposed else [1, c.k, c.n]))
    most = (triton.cdiv(len(x), c.m) + experts) * triton.cdiv(width, c.n)
    _grouped_gemm[(min(most, num_programs(x, c.per_processor)),)](
        x_in,
        w_in,
        bias,
        y,
        ends,
        len(x),
        width,
        inner,
        experts,
        TRANSPOSED=transposed,
        BIAS=bias is not None,
        TMA=tma,
        WIDE=triton_wide(x.dtype),
        E_BLOCK=triton.next_power_of_2(experts),
        BM=c.m,
        BN=c.n,
        BK=c.k,
        GROUP=c.group,
        FLATTEN=c.flatten,
        num_stages=c.stages,
        num_warps=c.warps,
    )
    return y


def add_grouped_product_(
    buffer: Tensor, dy: Tensor, x: Tensor, ends: Tensor, tiles: GroupedTiles | None = None
) -> None:
    """buffer[e] (M, N) += dy^T x over the rows of e, for dy (R, M) and x (R, N), summed in fp32 or wider."""
    dy, x, c = dy.contiguous(), x.contiguous(), tiles or tiles_of(x.dtype)
    experts, height, width = buffer.shape
    if not x.numel() or not buffer.numel():
        return
    tma, (dy_in, x_in) = _descriptors((dy, [c.k, c.m]), (x, [c.k, c.n]))
    _grouped_gemm_dw[(experts * triton.cdiv(height, c.m) * triton.cdiv(width, c.n),)](
        dy_in,
        x_in,
        buffer,
        ends,
        len(x),
        height,
        width,
        TMA=tma,
        WIDE=triton_wide(x.dtype),
        BM=c.m,
        BN=c.n,
        BK=c.k,
        GROUP=c.group,
        num_stages=c.stages,
        num_warps=c.warps,
    )


def add_grouped_sum_(buffer: Tensor, dy: Tensor, ends: Tensor) -> None:
    """buffer[e] (N,) += the sum of the rows of e of dy (R, N)."""
    experts, width = buffer.shape
    if dy.numel():
        _grouped_sum[(experts, triton.cdiv(width, 64))](
            dy.contiguous(), buffer, ends, width, WIDE=triton_wide(dy.dtype), BR=64, BC=64
        )

"""Matmuls of quantized rows, sorted by expert (quantize_grouped_kernel.py makes them), with experts' matrices;
ops/quantized/expert_quantizer.py defines them.

Which expert a row belongs to is read from `ends` on the device. The summed dim is contiguous in both operands.
"""

from __future__ import annotations

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
from phalanx.ops.kernel_tools import num_programs, uniform
from phalanx.ops.quantized.casts import TILE
from phalanx.ops.quantized.recipes import Scaled


@dataclass(frozen=True)
class GroupedGemmTiles:
    """How a matmul is divided among programs.

    m, n                      sizes of an output tile
    stages, warps             loads in flight; warps of a program
    group                     tiles along m that are computed together over all n, so that their operands stay in L2
    flatten                   whether loads of the next tile begin before a tile is written
    per_processor, registers  programs at work on a processor at once, and the registers of a thread that leave room for
                              them
    halves                    whether the left and the right half of a tile are summed in turn: half the registers for
                              what is not yet added
    """

    m: int = 128
    n: int = 256
    stages: int = 4
    warps: int = 8
    group: int = 8
    flatten: bool = False
    per_processor: int = 1
    registers: int | None = None
    halves: bool = False


# The best of benchmarks/low_grouped.py on an H200. Sums in fp32 every TILE terms need registers for two sums, and the
# tensor cores wait for additions: with two programs on a processor, one multiplies while the other adds. BY_BLOCK: with
# scales that change along the sum.
FAST, CAREFUL, BY_BLOCK = (
    GroupedGemmTiles(flatten=True),
    GroupedGemmTiles(n=128, stages=3, per_processor=2, registers=128, halves=True),
    GroupedGemmTiles(n=128),
)


@triton.jit
def _scales(scales, lines, last, stride, EACH: tl.constexpr):
    """The scale of each of `lines` before `last`, or the one that they share."""
    if EACH:
        return tl.load(scales + lines * stride, mask=lines < last, other=0.0)
    else:
        return tl.load(scales)


@triton.jit
def _add(acc, left, right, m, n, PER_STEP: tl.constexpr, FAST: tl.constexpr):
    """acc plus left right^T. PER_STEP: multiplied by the scales m of rows and n of columns. FAST: otherwise, whether
    the tensor cores keep the sum."""
    if PER_STEP:
        return acc + tl.dot(left, right.T) * m * n
    elif FAST:
        return tl.dot(left, right.T, acc)
    else:
        return acc + tl.dot(left, right.T)


@triton.jit
def _gemm(
    a,
    b,
    bias,
    y,
    ends,
    a_scales,
    b_scales,
    R,
    N,
    K,
    E,
    b_rows,
    b_cols,
    a_row,
    a_col,
    b_expert,
    b_row,
    b_col,
    PER_STEP: tl.constexpr,
    BY_ROW: tl.constexpr,
    BY_COL: tl.constexpr,
    FAST: tl.constexpr,
    RUN: tl.constexpr,
    BIAS: tl.constexpr,
    E_BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    HALVES: tl.constexpr,
):
    """y (R, N): rows of a (R, K) times the b of their expert, (N, K), which starts at row e b_rows and column e b_cols.

    Scales: of row r and step k at a_row r + a_col k (BY_ROW, otherwise one); of expert e, row n of b and step k at e
    b_expert + n // RUN b_row + b_col k (BY_COL, otherwise one for each expert). PER_STEP: they change along the sum.
    FAST: otherwise, whether the tensor cores keep the sum. HALVES: b comes in tiles of BN / 2 rows. A program handles
    every n-th tile.
    """
    experts, starts, stops = rows_of_experts(ends, E, E_BLOCK)
    counts, lasts = tiles_of_experts(starts, stops, N, BM, BN)
    for tile in tl.range(tl.program_id(0), tl.sum(counts, 0), tl.num_programs(0), flatten=FLATTEN):
        e, stop, row, col = tile_of_experts(tile, experts, starts, stops, counts, lasts, N, GROUP, BM, BN)
        rows = (row + tl.arange(0, BM))[:, None]
        low_cols = (col + tl.arange(0, BN // 2))[None, :]
        high_cols = low_cols + BN // 2
        of_e = b_scales + e * b_expert
        if HALVES:
            low = tl.zeros((BM, BN // 2), tl.float32)
            high = tl.zeros((BM, BN // 2), tl.float32)
            for k in range(0, tl.cdiv(K, BK)):
                left = a.load([row, k * BK])
                lower = b.load([e * b_rows + col, e * b_cols + k * BK])
                higher = b.load([e * b_rows + col + BN // 2, e * b_cols + k * BK])
                m, n_low, n_high = 1.0, 1.0, 1.0
                if PER_STEP:
                    m = _scales(a_scales + k * a_col, rows, stop, a_row, BY_ROW)
                    n_low = _scales(of_e + k * b_col, low_cols // RUN, tl.cdiv(N, RUN), b_row, BY_COL)
                    n_high = _scales(of_e + k * b_col, high_cols // RUN, tl.cdiv(N, RUN), b_row, BY_COL)
                low = _add(low, left, lower, m, n_low, PER_STEP, FAST)
                high = _add(high, left, higher, m, n_high, PER_STEP, FAST)
        else:
            cols = (col + tl.arange(0, BN))[None, :]
            acc = tl.zeros((BM, BN), tl.float32)
            for k in range(0, tl.cdiv(K, BK)):
                left = a.load([row, k * BK])
                right = b.load([e * b_rows + col, e * b_cols + k * BK])
                m, n = 1.0, 1.0
                if PER_STEP:
                    m = _scales(a_scales + k * a_col, rows, stop, a_row, BY_ROW)
                    n = _scales(of_e + k * b_col, cols // RUN, tl.cdiv(N, RUN), b_row, BY_COL)
                acc = _add(acc, left, right, m, n, PER_STEP, FAST)
            low, high = halves(acc)
        if not PER_STEP:
            m = _scales(a_scales, rows, stop, a_row, BY_ROW)
            low = low * (m * _scales(of_e, low_cols, N, b_row, BY_COL))
            high = high * (m * _scales(of_e, high_cols, N, b_row, BY_COL))
        store_halves(y, low, high, bias + e.to(tl.int64) * N if BIAS else bias, row, stop, col, N, BIAS)


@triton.jit
def _gemm_dw(
    dy,
    x,
    dw,
    ends,
    dy_scales,
    x_scales,
    M,
    N,
    E,
    dy_row,
    dy_group,
    x_row,
    x_group,
    PER_STEP: tl.constexpr,
    BY_LINE: tl.constexpr,
    FAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    E_BLOCK: tl.constexpr,
    HALVES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A tile of dw[e] (M, N) += dy x^T over the places of e; dy (M, P), x (N, P).

    Scales of feature f at f *_row + g *_group (BY_LINE, otherwise one): g is the group of BK places (PER_STEP) or the
    expert. HALVES: as in _gemm.
    """
    e, row, col = tile_of_gradients(M, N, GROUP, BM, BN)
    experts, starts, stops = rows_of_experts(ends, E, E_BLOCK)
    runs = tl.cdiv(stops - starts, BK)
    begin = uniform(tl.sum(tl.where(experts < e, runs, 0), 0), INTERPRETED)
    end = uniform(begin + tl.sum(tl.where(experts == e, runs, 0), 0), INTERPRETED)
    if begin == end:
        return
    rows = (row + tl.arange(0, BM))[:, None]
    low_cols = (col + tl.arange(0, BN // 2))[None, :]
    high_cols = low_cols + BN // 2
    if HALVES:
        low = tl.zeros((BM, BN // 2), tl.float32)
        high = tl.zeros((BM, BN // 2), tl.float32)
        for t in range(begin, end):
            left = dy.load([row, t * BK])
            lower = x.load([col, t * BK])
            higher = x.load([col + BN // 2, t * BK])
            m, n_low, n_high = 1.0, 1.0, 1.0
            if PER_STEP:
                m = _scales(dy_scales + t * dy_group, rows, M, dy_row, BY_LINE)
                n_low = _scales(x_scales + t * x_group, low_cols, N, x_row, BY_LINE)
                n_high = _scales(x_scales + t * x_group, high_cols, N, x_row, BY_LINE)
            low = _add(low, left, lower, m, n_low, PER_STEP, FAST)
            high = _add(high, left, higher, m, n_high, PER_STEP, FAST)
    else:
        cols = (col + tl.arange(0, BN))[None, :]
        acc = tl.zeros((BM, BN), tl.float32)
        for t in range(begin, end):
            left = dy.load([row, t * BK])
            right = x.load([col, t * BK])
            m, n = 1.0, 1.0
            if PER_STEP:
                m = _scales(dy_scales + t * dy_group, rows, M, dy_row, BY_LINE)
                n = _scales(x_scales + t * x_group, cols, N, x_row, BY_LINE)
            acc = _add(acc, left, right, m, n, PER_STEP, FAST)
        low, high = halves(acc)
    if not PER_STEP:
        m = _scales(dy_scales + e * dy_group, rows, M, dy_row, BY_LINE)
        low = low * (m * _scales(x_scales + e * x_group, low_cols, N, x_row, BY_LINE))
        high = high * (m * _scales(x_scales + e * x_group, high_cols, N, x_row, BY_LINE))
    add_halves(dw, e, low, high, row, col, M, N)


def product(
    a: Scaled,
    b: Scaled,
    ends: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None,
    fast: bool,
    tiles: GroupedGemmTiles | None = None,
) -> Tensor:
    """Rows a (R, K) times b (E N, K), of which each expert has N rows, transposed -> (R, N) in `dtype`, plus bias (E,
    N); padding is left unchanged."""
    width = len(b.quantized) // len(ends)
    rows = {0: int(len(b.scales) > 1), 1: width}.get(b.block[0], width // TILE) * b.scales.stride(0)
    strides = rows, b.scales.stride(0) if b.block[0] else 0, b.scales.stride(1)
    return _product(a, b, ends, dtype, bias, fast, tiles, width, (width, 0), strides)


def product_of_padded(
    a: Scaled, b: Scaled, ends: Tensor, dtype: torch.dtype, fast: bool, tiles: GroupedGemmTiles | None = None
) -> Tensor:
    """The same with b (N, P), in which every expert has the same number of places."""
    width, padded = len(b.quantized), b.quantized.shape[1] // len(ends)
    groups = b.scales.shape[1] // len(ends)  # 0: one number for all
    strides = groups * b.scales.stride(1), b.scales.stride(0) if b.block[0] else 0, b.scales.stride(1)
    return _product(a, b, ends, dtype, None, fast, tiles, width, (0, padded), strides)


def _product(
    a: Scaled,
    b: Scaled,
    ends: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None,
    fast: bool,
    tiles: GroupedGemmTiles | None,
    width: int,
    steps: tuple[int, int],
    strides: tuple[int, int, int],
) -> Tensor:
    (rows, inner), count, per_step = a.quantized.shape, len(ends), a.block[1] == TILE
    y = torch.empty(rows, width, dtype=dtype, device=a.quantized.device)
    if not rows:
        return y
    c = tiles or (BY_BLOCK if per_step else FAST if fast else CAREFUL)
    most = (triton.cdiv(rows, c.m) + count) * triton.cdiv(width, c.n)
    _gemm[(min(most, num_programs(y, c.per_processor)),)](
        TensorDescriptor.from_tensor(a.quantized, [c.m, TILE]),
        TensorDescriptor.from_tensor(b.quantized, [c.n >> c.halves, TILE]),
        bias,
        y,
        ends,
        a.scales,
        b.scales,
        rows,
        width,
        inner,
        count,
        *steps,
        *a.scales.stride(),
        *strides,
        PER_STEP=per_step,
        BY_ROW=a.block[0] == 1,
        BY_COL=b.block != (0, 0),
        FAST=fast,
        RUN=TILE if b.block[0] == TILE else 1,
        BIAS=bias is not None,
        E_BLOCK=triton.next_power_of_2(count),
        BM=c.m,
        BN=c.n,
        BK=TILE,
        GROUP=c.group,
        FLATTEN=c.flatten,
        HALVES=c.halves,
        num_stages=c.stages,
        num_warps=c.warps,
        maxnreg=c.registers,
    )
    return y


def add_product_(
    buffer: Tensor, dy: Scaled, x: Scaled, ends: Tensor, fast: bool, tiles: GroupedGemmTiles | None = None
) -> None:
    """buffer[e] (M, N) += dy x^T over the places of e, dy (M, P) and x (N, P)."""
    count, height, width = buffer.shape
    per_step = dy.block[1] == TILE
    c = tiles or (BY_BLOCK if per_step else FAST if fast else CAREFUL)
    strides = [
        s
        for q in (dy, x)
        for s in ((q.scales.stride(0) if q.block[0] else 0), (q.scales.stride(1) if q.scales.shape[1] > 1 else 0))
    ]
    _gemm_dw[(count * triton.cdiv(height, c.m) * triton.cdiv(width, c.n),)](
        TensorDescriptor.from_tensor(dy.quantized, [c.m, TILE]),
        TensorDescriptor.from_tensor(x.quantized, [c.n >> c.halves, TILE]),
        buffer,
        ends,
        dy.scales,
        x.scales,
        height,
        width,
        count,
        *strides,
        PER_STEP=per_step,
        BY_LINE=dy.block != (0, 0),
        FAST=fast,
        BM=c.m,
        BN=c.n,
        BK=TILE,
        GROUP=c.group,
        E_BLOCK=triton.next_power_of_2(count),
        HALVES=c.halves,
        INTERPRETED=not buffer.is_cuda,
        num_stages=c.stages,
        num_warps=c.warps,
        maxnreg=c.registers,
    )

"""Casts to 8 bits of rows sorted by expert, and products of their codes with experts' matrices; ops/low_grouped.py defines both.

Which rows are whose is read from `ends` on the device. A program of a cast does TILE rows of one expert by some features: tile t of them
all goes to the places t TILE ... of the transposed codes, so the number of places used is the number of tiles. A stack of matrices is
cast likewise, as rows of which every expert has as many. Products have the summed dim contiguous in both operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from phalanx.ops.kernels.common import num_programs
from phalanx.ops.kernels.grouped import _add_part, _halves, _store_part
from phalanx.ops.kernels.quant import BLOCKS, GIVEN, LARGE, LINES, SAMPLED, SQUARES, WHOLE, _bits, _inverse, _multiplier, _note, _put
from phalanx.ops.quant import FLOOR, SLOTS, Scaled

if TYPE_CHECKING:
    from phalanx.ops.quant import Format

__all__ = ["BLOCKS", "GIVEN", "LINES", "SQUARES", "WHOLE", "add_product_", "amax", "amax_lines", "cast_both", "product", "product_by_places"]

TILE = 128


@dataclass(frozen=True)
class Tiles:
    """How a product is cut.

    m, n                      a tile of the output
    stages, warps             loads under way; warps of a program
    group                     tiles along m that go together over all n, so that what they read stays in the L2 cache
    flatten                   whether loads of the next tile begin before a tile is written
    per_processor, registers  programs at work on a processor at once, and the registers of a thread that leave room for them
    halves                    whether the left and the right half of a tile are summed in turn: half the registers for what is not yet added
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


FAST, CAREFUL = Tiles(), Tiles(n=128)  # sums in fp32 every TILE terms need registers for two sums


@triton.jit
def _stops(ends, E, E_BLOCK: tl.constexpr):
    """Of each expert: its number, its first row, one past its last."""
    experts = tl.arange(0, E_BLOCK)
    stops = tl.load(ends + experts, mask=experts < E, other=0)
    starts = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    return experts, starts, stops


@triton.jit
def _rows_of(t, ends, E, TILE: tl.constexpr, E_BLOCK: tl.constexpr):
    """(whether there is a tile t, its expert, its first row, one past its expert's last row)"""
    experts, starts, stops = _stops(ends, E, E_BLOCK)
    counts = tl.cdiv(stops - starts, TILE)
    lasts = tl.cumsum(counts, 0)
    e = tl.sum((lasts <= t).to(tl.int32), 0)
    start = tl.sum(tl.where(experts == e, starts - (lasts - counts) * TILE, 0), 0)
    stop = tl.sum(tl.where(experts == e, stops, 0), 0)
    return t < tl.sum(counts, 0), e, start + t * TILE, stop


@triton.jit
def _load_rows(x, row, stop, col, C, TILE: tl.constexpr, COLS: tl.constexpr):
    rows = row + tl.arange(0, TILE)
    cols = col + tl.arange(0, COLS)
    mask = (rows < stop)[:, None] & (cols < C)[None, :]
    return rows, cols, mask, tl.load(x + rows.to(tl.int64)[:, None] * C + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _amax(x, ends, whole, rows_out, cols_out, C, E, LINES: tl.constexpr, APART: tl.constexpr, TILE: tl.constexpr, COLS: tl.constexpr,
          E_BLOCK: tl.constexpr):  # fmt: skip
    """Bits of the largest |x| of all rows (or of each expert's, APART), or of each row and of each expert's columns, out (E, C)."""
    across = tl.cdiv(C, COLS)
    there, e, row, stop = _rows_of(tl.program_id(0) // across, ends, E, TILE, E_BLOCK)
    if there:
        rows, cols, mask, v = _load_rows(x, row, stop, tl.program_id(0) % across * COLS, C, TILE, COLS)
        bits = _bits(v)
        if LINES:
            tl.atomic_max(rows_out + rows, tl.max(bits, 1), mask=rows < stop)
            tl.atomic_max(cols_out + e.to(tl.int64) * C + cols, tl.max(bits, 0), mask=cols < C)
        else:
            tl.atomic_max(whole + e * APART, tl.max(tl.max(bits, 1), 0))


@triton.jit
def _cast(x, ends, row_amax, col_amax, out, other, row_scales, col_scales, counts, R, C, P, E, MODE: tl.constexpr, APART: tl.constexpr,
          NOTE: tl.constexpr, MAX: tl.constexpr, LEAST: tl.constexpr, WIDE_RANGE: tl.constexpr, ROUND: tl.constexpr, FLOOR: tl.constexpr,
          EVERY: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr, COLS: tl.constexpr, E_BLOCK: tl.constexpr):  # fmt: skip
    """out (R, C), other (C, P). row_scales: one, or one of each expert (APART); (R,); (columns of tiles, R); (tiles, columns of tiles).
    col_scales: (E, C) or (tiles, C). Amaxes are bits, as modes want them; of GIVEN a multiplier."""
    across = tl.cdiv(C, COLS)
    t = tl.program_id(0) // across
    along = tl.program_id(0) % across
    there, e, row, stop = _rows_of(t, ends, E, TILE, E_BLOCK)
    if there:
        rows, cols, mask, v = _load_rows(x, row, stop, along * COLS, C, TILE, COLS)
        if MODE == 0 or MODE == 1:
            m = tl.load(row_amax) if MODE == 1 else _multiplier(tl.load(row_amax + e * APART), MAX, FLOOR)
            by_row = v * m
            by_col = by_row
            tl.store(row_scales + e * APART, _inverse(m))  # the same from all
        elif MODE == 2:
            m_r = _multiplier(tl.load(row_amax + rows, mask=rows < stop, other=0), MAX, FLOOR)
            m_c = _multiplier(tl.load(col_amax + e.to(tl.int64) * C + cols, mask=cols < C, other=0), MAX, FLOOR)
            by_row = v * m_r[:, None]
            by_col = v * m_c[None, :]
            tl.store(row_scales + rows, _inverse(m_r), mask=rows < stop)
            tl.store(col_scales + e.to(tl.int64) * C + cols, _inverse(m_c), mask=cols < C)
        elif MODE == 3:
            m_r = _multiplier(tl.max(_bits(v), 1), MAX, FLOOR)
            m_c = _multiplier(tl.max(_bits(v), 0), MAX, FLOOR)
            by_row = v * m_r[:, None]
            by_col = v * m_c[None, :]
            tl.store(row_scales + along.to(tl.int64) * R + rows, _inverse(m_r), mask=rows < stop)
            tl.store(col_scales + t.to(tl.int64) * C + cols, _inverse(m_c), mask=cols < C)
        else:
            m = _multiplier(tl.max(tl.max(_bits(v), 1), 0), MAX, FLOOR)
            by_row = v * m
            by_col = by_row
            tl.store(row_scales + t * across + along, _inverse(m))
        _put(by_row, out, C, rows, cols, mask, False, MAX, WIDE_RANGE, ROUND)
        places = t * TILE + tl.arange(0, TILE)
        _put(by_col, other, P, places, cols, (places < P)[:, None] & (cols < C)[None, :], True, MAX, WIDE_RANGE, ROUND)
        if NOTE:
            if MODE == 0:
                largest = tl.load(row_amax + e * APART)
            else:
                largest = tl.max(tl.max(_bits(v), 1), 0)
            _note(v, by_row, mask, counts, largest, EVERY, SLOTS, MAX, LEAST)


@triton.jit
def _scales(scales, lines, last, stride, EACH: tl.constexpr):
    """Of each of `lines` before `last`, or the one of all of them."""
    if EACH:
        return tl.load(scales + lines * stride, mask=lines < last, other=0.0)
    else:
        return tl.load(scales)


@triton.jit
def _add(acc, left, right, m, n, PER_STEP: tl.constexpr, FAST: tl.constexpr):
    """acc plus left right^T; PER_STEP: times the scales m of rows and n of columns. FAST: else, whether the tensor cores add."""
    if PER_STEP:
        return acc + tl.dot(left, right.T) * m * n
    elif FAST:
        return tl.dot(left, right.T, acc)
    else:
        return acc + tl.dot(left, right.T)


@triton.jit
def _gemm(a, b, bias, y, ends, a_scales, b_scales, R, N, K, E, b_rows, b_cols, a_row, a_col, b_expert, b_row, b_col,
          PER_STEP: tl.constexpr, BY_ROW: tl.constexpr, BY_COL: tl.constexpr, FAST: tl.constexpr, RUN: tl.constexpr, BIAS: tl.constexpr,
          E_BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, FLATTEN: tl.constexpr,
          HALVES: tl.constexpr):  # fmt: skip
    """y (R, N): rows of a (R, K) times b of their expert, (N, K) from its row e b_rows and its column e b_cols on.

    Scales: of row r and step k at a_row r + a_col k (BY_ROW, or one); of expert e, row n of b and step k at e b_expert + n // RUN b_row + b_col k
    (BY_COL, or one of an expert). PER_STEP: they change along the sum. FAST: else, whether the tensor cores sum by themselves. HALVES: b comes in
    tiles of BN / 2 rows. A program goes through every n-th tile.
    """
    experts, starts, stops = _stops(ends, E, E_BLOCK)
    tiles_n = tl.cdiv(N, BN)
    counts = tl.cdiv(stops - starts, BM) * tiles_n
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
            low, high = _halves(acc)  # half of the tile at a time, for want of registers
        if not PER_STEP:
            m = _scales(a_scales, rows, stop, a_row, BY_ROW)
            low = low * (m * _scales(of_e, low_cols, N, b_row, BY_COL))
            high = high * (m * _scales(of_e, high_cols, N, b_row, BY_COL))
        its_bias = bias + e.to(tl.int64) * N if BIAS else bias
        _store_part(y, low, its_bias, row, stop, col, N, BIAS)
        _store_part(y, high, its_bias, row, stop, col + BN // 2, N, BIAS)


@triton.jit
def _gemm_dw(dy, x, dw, ends, dy_scales, x_scales, M, N, E, dy_row, dy_group, x_row, x_group, PER_STEP: tl.constexpr, BY_LINE: tl.constexpr,
             FAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, E_BLOCK: tl.constexpr,
             HALVES: tl.constexpr):  # fmt: skip
    """A tile of dw[e] (M, N) += dy x^T over the places of e; dy (M, P), x (N, P).

    Scales of feature f at f *_row + g *_group (BY_LINE, or one): g is the run of BK places (PER_STEP) or the expert. HALVES: as of _gemm."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    e = tl.program_id(0) // (tiles_m * tiles_n)
    at = tl.program_id(0) % (tiles_m * tiles_n)
    first = at // (GROUP * tiles_n) * GROUP
    together = tl.minimum(tiles_m - first, GROUP)
    row = (first + at % (GROUP * tiles_n) % together) * BM
    col = at % (GROUP * tiles_n) // together * BN
    experts, starts, stops = _stops(ends, E, E_BLOCK)
    runs = tl.cdiv(stops - starts, BK)
    begin = tl.sum(tl.where(experts < e, runs, 0), 0)
    end = begin + tl.sum(tl.where(experts == e, runs, 0), 0)
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
        low, high = _halves(acc)
    if not PER_STEP:
        m = _scales(dy_scales + e * dy_group, rows, M, dy_row, BY_LINE)
        low = low * (m * _scales(x_scales + e * x_group, low_cols, N, x_row, BY_LINE))
        high = high * (m * _scales(x_scales + e * x_group, high_cols, N, x_row, BY_LINE))
    q0, q1 = _halves(low)  # a quarter of the tile at a time, for want of registers
    q2, q3 = _halves(high)
    of_e = dw + e.to(tl.int64) * M * N
    _add_part(of_e, q0, row, col, M, N)
    _add_part(of_e, q1, row, col + BN // 4, M, N)
    _add_part(of_e, q2, row, col + BN // 2, M, N)
    _add_part(of_e, q3, row, col + BN // 4 * 3, M, N)


def _width(mode: int) -> tuple[int, int]:
    """Features and warps of a program of a cast: no more than 32 values a thread, and whole blocks where they have a scale."""
    return (TILE, 16) if mode in (BLOCKS, SQUARES) else (64, 8)


AMAX = _width(WHOLE)


def amax(x: Tensor, ends: Tensor, tiles: int, apart: bool) -> Tensor:
    """Bits of the largest |x| of rows (R, C) in all, (1, 1), or of each expert's, (E, 1); int32."""
    x, count = x.contiguous(), len(ends)
    out = torch.zeros(count if apart else 1, 1, dtype=torch.int32, device=x.device)
    _amax[(tiles * triton.cdiv(x.shape[1], AMAX[0]),)](
        x, ends, out, None, None, x.shape[1], count, LINES=False, APART=int(apart), TILE=TILE, COLS=AMAX[0], E_BLOCK=triton.next_power_of_2(count),
        num_warps=AMAX[1],
    )  # fmt: skip
    return out


def amax_lines(x: Tensor, ends: Tensor, tiles: int) -> tuple[Tensor, Tensor]:
    """Bits of the largest |x| of each row (R,), of each feature over each expert's rows (E, C); int32."""
    x, (rows, columns), count = x.contiguous(), x.shape, len(ends)
    both = torch.zeros(rows + count * columns, dtype=torch.int32, device=x.device)
    of_rows, of_columns = both.split((rows, count * columns))
    _amax[(tiles * triton.cdiv(columns, AMAX[0]),)](
        x, ends, None, of_rows, of_columns, columns, count, LINES=True, APART=0, TILE=TILE, COLS=AMAX[0], E_BLOCK=triton.next_power_of_2(count),
        num_warps=AMAX[1],
    )  # fmt: skip
    return of_rows, of_columns.view(count, columns)


def cast_both(x: Tensor, ends: Tensor, tiles: int, format: Format, mode: int, first: Tensor | None, second: Tensor | None,
              counts: Tensor | None = None, into: tuple[Scaled, Scaled] | None = None) -> tuple[Scaled, Scaled]:  # fmt: skip
    """Codes of rows x (R, C) as they lie, and transposed by places, (C, tiles * TILE).

    first, second  bits of amaxes as `mode` wants them: WHOLE all rows' or (E, 1) each expert's, GIVEN the multiplier (fp32), LINES of rows (R,)
                   and of features (E, C)
    counts, into   as kernels.quant.cast_both has them
    """
    x, (rows, columns), count, (width, warps) = x.contiguous(), x.shape, len(ends), _width(mode)
    across = triton.cdiv(columns, width)
    device, apart = x.device, mode == WHOLE and first is not None and first.numel() == count and count > 1
    if into is None:
        out = torch.empty(rows, columns, dtype=format.dtype, device=device)
        other = torch.empty(columns, tiles * TILE, dtype=format.dtype, device=device)
        shapes = {LINES: ((rows, 1), (count, columns)), BLOCKS: ((across, rows), (tiles, columns)), SQUARES: ((tiles, across), (1, 1))}
        row_scales, col_scales = (torch.empty(s, device=device) for s in shapes.get(mode, ((count if apart else 1, 1), (1, 1))))
        into = _scaled(out, other, row_scales, col_scales, mode)
    else:
        out, other, row_scales, col_scales = into[0].codes, into[1].codes, into[0].scales, into[1].scales.t()
    every, wide = SAMPLED if rows * columns >= LARGE else 1, format.dtype == torch.float8_e5m2
    _cast[(tiles * across,)](
        x, ends, first, second, out, other, row_scales, col_scales, counts, rows, columns, tiles * TILE, count, MODE=mode, APART=int(apart),
        NOTE=counts is not None, MAX=format.max, LEAST=2.0**-17 if wide else 2.0**-10, WIDE_RANGE=wide, ROUND=not x.is_cuda, FLOOR=FLOOR,
        EVERY=every, SLOTS=SLOTS, TILE=TILE, COLS=width, E_BLOCK=triton.next_power_of_2(count), num_warps=warps,
    )  # fmt: skip
    return into


def _scaled(out: Tensor, other: Tensor, row_scales: Tensor, col_scales: Tensor, mode: int) -> tuple[Scaled, Scaled]:
    if mode == LINES:
        return Scaled(out, row_scales, (1, 0)), Scaled(other, col_scales.t(), (1, 0))
    if mode == BLOCKS:
        return Scaled(out, row_scales.t(), (1, TILE)), Scaled(other, col_scales.t(), (1, TILE))
    block = (TILE, TILE) if mode == SQUARES else (0, 0)
    return Scaled(out, row_scales, block), Scaled(other, row_scales.t(), block)


def product(a: Scaled, b: Scaled, ends: Tensor, dtype: torch.dtype, bias: Tensor | None, fast: bool, tiles: Tiles | None = None) -> Tensor:
    """Rows a (R, K) times b (E N, K), their expert's N rows of it, transposed -> (R, N) in `dtype`, plus bias (E, N); padding is left as it was."""
    width = len(b.codes) // len(ends)
    rows = {0: int(len(b.scales) > 1), 1: width}.get(b.block[0], width // TILE) * b.scales.stride(0)
    strides = rows, b.scales.stride(0) if b.block[0] else 0, b.scales.stride(1)
    return _product(a, b, ends, dtype, bias, fast, tiles, width, (width, 0), strides)


def product_by_places(a: Scaled, b: Scaled, ends: Tensor, dtype: torch.dtype, fast: bool, tiles: Tiles | None = None) -> Tensor:
    """The same with b (N, P), whose places of each expert are as many."""
    width, places = len(b.codes), b.codes.shape[1] // len(ends)
    groups = b.scales.shape[1] // len(ends)  # 0: one number for all
    strides = groups * b.scales.stride(1), b.scales.stride(0) if b.block[0] else 0, b.scales.stride(1)
    return _product(a, b, ends, dtype, None, fast, tiles, width, (0, places), strides)


def _product(a: Scaled, b: Scaled, ends: Tensor, dtype: torch.dtype, bias: Tensor | None, fast: bool, tiles: Tiles | None, width: int,
             steps: tuple[int, int], strides: tuple[int, int, int]) -> Tensor:  # fmt: skip
    (rows, inner), count, per_step = a.codes.shape, len(ends), a.block[1] == TILE
    y = torch.empty(rows, width, dtype=dtype, device=a.codes.device)
    if not rows:
        return y
    c = tiles or (FAST if fast and not per_step else CAREFUL)
    most = (triton.cdiv(rows, c.m) + count) * triton.cdiv(width, c.n)
    _gemm[(min(most, num_programs(y, c.per_processor)),)](
        TensorDescriptor.from_tensor(a.codes, [c.m, TILE]), TensorDescriptor.from_tensor(b.codes, [c.n >> c.halves, TILE]), bias, y, ends, a.scales,
        b.scales, rows, width, inner, count, *steps, *a.scales.stride(), *strides, PER_STEP=per_step, BY_ROW=a.block[0] == 1,
        BY_COL=b.block != (0, 0), FAST=fast, RUN=TILE if b.block[0] == TILE else 1, BIAS=bias is not None, E_BLOCK=triton.next_power_of_2(count),
        BM=c.m, BN=c.n, BK=TILE, GROUP=c.group, FLATTEN=c.flatten, HALVES=c.halves, num_stages=c.stages, num_warps=c.warps, maxnreg=c.registers,
    )  # fmt: skip
    return y


def add_product_(buffer: Tensor, dy: Scaled, x: Scaled, ends: Tensor, fast: bool, tiles: Tiles | None = None) -> None:
    """buffer[e] (M, N) += dy x^T over the places of e, dy (M, P) and x (N, P)."""
    count, height, width = buffer.shape
    per_step = dy.block[1] == TILE
    c = tiles or (FAST if fast and not per_step else CAREFUL)
    strides = [s for q in (dy, x) for s in ((q.scales.stride(0) if q.block[0] else 0), (q.scales.stride(1) if q.scales.shape[1] > 1 else 0))]
    _gemm_dw[(count * triton.cdiv(height, c.m) * triton.cdiv(width, c.n),)](
        TensorDescriptor.from_tensor(dy.codes, [c.m, TILE]), TensorDescriptor.from_tensor(x.codes, [c.n >> c.halves, TILE]), buffer, ends,
        dy.scales, x.scales, height, width, count, *strides, PER_STEP=per_step, BY_LINE=dy.block != (0, 0), FAST=fast, BM=c.m, BN=c.n, BK=TILE,
        GROUP=c.group, E_BLOCK=triton.next_power_of_2(count), HALVES=c.halves, num_stages=c.stages, num_warps=c.warps, maxnreg=c.registers,
    )  # fmt: skip

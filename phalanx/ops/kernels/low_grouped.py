"""Casts to 8 bits of rows sorted by expert, and products of their codes with experts' matrices; ops/low_grouped.py defines both.

Which rows are whose is read from `ends` on the device. A program of a cast does TILE rows of one expert by some features: tile t of them
all goes to the places t TILE ... of the transposed codes, so the number of places used is the number of tiles. A stack of matrices is
cast likewise, as rows of which every expert has as many. Products have the summed dim contiguous in both operands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from phalanx.ops.activation import SUMMED, GatedRows, GatedRowsGrad
from phalanx.ops.kernels import quant
from phalanx.ops.kernels.common import num_programs, uniform
from phalanx.ops.kernels.gated import clamped, gated, gated_slopes, sigmoid
from phalanx.ops.kernels.grouped import _add_part, _halves, _store_part
from phalanx.ops.kernels.quant import (
    BLOCKS,
    GIVEN,
    LARGE,
    LARGEST,
    LARGEST_LINES,
    LINES,
    SAMPLED,
    SQUARES,
    WHOLE,
    _bits,
    _count_rows,
    _inverse,
    _largest,
    _multiplier,
    _note_largest,
    _place,
    _read,
    _rounded,
    _row,
    _row_multiplier,
    _shared_multiplier,
    _word,
)
from phalanx.ops.permute import Gathered
from phalanx.ops.quant import FLOOR, SLOTS, Scaled

if TYPE_CHECKING:
    from phalanx.ops.quant import Format

__all__ = ["BLOCKS", "GIVEN", "LINES", "SQUARES", "WHOLE", "add_product_", "amax", "amax_lines", "cast_both", "product", "product_by_places"]

Source = Tensor | Gathered | GatedRows  # and GatedRowsGrad
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


# The best of benchmarks/low_grouped.py on an H200. Sums in fp32 every TILE terms need registers for two sums, and the tensor cores wait for
# additions: with two programs on a processor one multiplies while the other adds. BY_BLOCK: with scales that change along the sum.
FAST, CAREFUL, BY_BLOCK = Tiles(flatten=True), Tiles(n=128, stages=3, per_processor=2, registers=128, halves=True), Tiles(n=128)


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
def _read_gathered(x, source, rows, cols, stop, C):
    """Of rows `rows` before `stop` the tokens x (T, C) that they are of, in fp32."""
    there = rows < stop
    token = tl.load(source + rows, mask=there, other=0).to(tl.int64)
    return tl.load(x + token[:, None] * C + cols[None, :], mask=there[:, None] & (cols < C)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _weighed(gate, up, weights, rows, stop, x, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, CLAMP: tl.constexpr,
             WEIGH: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    """What the activation makes of gate and up, as kernels.gated does."""
    gate, up = clamped(gate, up, LIMIT, SHIFT, CLAMP)
    y = gated(gate, up, ALPHA)
    if WEIGH:
        y = y * tl.load(weights + rows, mask=rows < stop, other=0.0)[:, None]
    return _rounded(y, x, INTERPRETED)


@triton.jit
def _slopes(d, raw_gate, raw_up, weights, sums, rows, stop, x, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, CLAMP: tl.constexpr,
            WEIGH: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    """Gradients of gate and up, likewise; this tile's part of the weights' goes to `sums`."""
    gate, up = clamped(raw_gate, raw_up, LIMIT, SHIFT, CLAMP)
    s = sigmoid(gate, ALPHA)
    if WEIGH:
        there = rows < stop
        tl.store(sums + rows, tl.sum(d * gate * s * up, 1), mask=there)
        d = d * tl.load(weights + rows, mask=there, other=0.0)[:, None]
    dgate, dup = gated_slopes(d, gate, up, s, raw_gate, raw_up, ALPHA, LIMIT, CLAMP)
    return _rounded(dgate, x, INTERPRETED), _rounded(dup, x, INTERPRETED)


@triton.jit
def _cast(x, dy, source, weights, sums, ends, row_amax, col_amax, out, other, row_scales, col_scales, counts, R, C, P, E, SOURCE: tl.constexpr,
          ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, CLAMP: tl.constexpr, WEIGH: tl.constexpr, MODE: tl.constexpr,
          APART: tl.constexpr, NOTE: tl.constexpr, MAX: tl.constexpr, LEAST: tl.constexpr, WIDE_RANGE: tl.constexpr, ROUND: tl.constexpr,
          FLOOR: tl.constexpr, EVERY: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr,
          E_BLOCK: tl.constexpr):  # fmt: skip
    """Codes of rows sorted by expert. SOURCE: 0 x (R, C); 1 the tokens x (T, C) that rows are of, by number `source` (R,); 2 the activation (R, C)
    of x (R, 2C), times `weights` (R,) if WEIGH; 3 its gradient (R, 2C) from dy (R, C), and `sums` (N, R): parts of the weights', as many as columns
    of tiles.

    A program has ROWS of the rows that tile `t` has room for, all of expert e."""
    counting, down, along, places, cols = _place(P, C, NOTE, EVERY, ROWS, COLS)
    t = down * ROWS // TILE
    there, e, first, stop = _rows_of(t, ends, E, TILE, E_BLOCK)
    begin = first + down * ROWS % TILE
    if there:
        rows = begin + 4 * tl.arange(0, ROWS // 4)
        there_cols = cols < C
        if SOURCE == 0:
            v = _read(x, rows, cols, C, stop, C)
        elif SOURCE == 1:
            v = (
                _read_gathered(x, source, rows, cols, stop, C),
                _read_gathered(x, source, rows + 1, cols, stop, C),
                _read_gathered(x, source, rows + 2, cols, stop, C),
                _read_gathered(x, source, rows + 3, cols, stop, C),
            )
        else:
            g, u = _read(x, rows, cols, 2 * C, stop, C), _read(x + C, rows, cols, 2 * C, stop, C)
            if SOURCE == 2:
                v = (
                    _weighed(g[0], u[0], weights, rows, stop, x, ALPHA, LIMIT, SHIFT, CLAMP, WEIGH, ROUND),
                    _weighed(g[1], u[1], weights, rows + 1, stop, x, ALPHA, LIMIT, SHIFT, CLAMP, WEIGH, ROUND),
                    _weighed(g[2], u[2], weights, rows + 2, stop, x, ALPHA, LIMIT, SHIFT, CLAMP, WEIGH, ROUND),
                    _weighed(g[3], u[3], weights, rows + 3, stop, x, ALPHA, LIMIT, SHIFT, CLAMP, WEIGH, ROUND),
                )
            else:
                d = _read(dy, rows, cols, C, stop, C)
                if WEIGH:
                    sums += along.to(tl.int64) * R
                g0, u0 = _slopes(d[0], g[0], u[0], weights, sums, rows, stop, x, ALPHA, LIMIT, SHIFT, CLAMP, WEIGH, ROUND)
                g1, u1 = _slopes(d[1], g[1], u[1], weights, sums, rows + 1, stop, x, ALPHA, LIMIT, SHIFT, CLAMP, WEIGH, ROUND)
                g2, u2 = _slopes(d[2], g[2], u[2], weights, sums, rows + 2, stop, x, ALPHA, LIMIT, SHIFT, CLAMP, WEIGH, ROUND)
                g3, u3 = _slopes(d[3], g[3], u[3], weights, sums, rows + 3, stop, x, ALPHA, LIMIT, SHIFT, CLAMP, WEIGH, ROUND)
                _emit((g0, g1, g2, g3), counting, down, t, e, along, begin, stop, cols, there_cols, row_amax, col_amax, out, other, row_scales,
                      col_scales, counts, R, 2 * C, P, MODE, APART, NOTE, MAX, LEAST, WIDE_RANGE, ROUND, FLOOR, SLOTS)  # fmt: skip
                v = (u0, u1, u2, u3)
                along += tl.cdiv(C, COLS)
                cols += C
                C *= 2
        _emit(v, counting, down, t, e, along, begin, stop, cols, there_cols, row_amax, col_amax, out, other, row_scales, col_scales, counts, R, C, P,
              MODE, APART, NOTE, MAX, LEAST, WIDE_RANGE, ROUND, FLOOR, SLOTS)  # fmt: skip


@triton.jit
def _emit(v, counting, down, t, e, along, begin, stop, cols, there, row_amax, col_amax, out, other, row_scales, col_scales, counts, R, C, P,
          MODE: tl.constexpr, APART: tl.constexpr, NOTE: tl.constexpr, MAX: tl.constexpr, LEAST: tl.constexpr, WIDE_RANGE: tl.constexpr,
          ROUND: tl.constexpr, FLOOR: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Cast v, four tiles, of columns `cols` and rows `begin` .. `stop`. Of LARGEST and LARGEST_LINES, only note its amaxes."""
    rows = begin + 4 * tl.arange(0, v[0].shape[0])
    if APART:
        row_amax += e
    if MODE == 5:
        tl.atomic_max(row_amax, tl.max(_bits(_largest(v))), sem="relaxed")
    elif MODE == 6:
        for i in tl.static_range(4):
            tl.atomic_max(row_amax + rows + i, tl.max(_bits(v[i]), 1), mask=rows + i < stop, sem="relaxed")
        tl.atomic_max(col_amax + e.to(tl.int64) * C + cols, tl.max(_bits(_largest(v)), 0), mask=there, sem="relaxed")
    elif NOTE:
        if counting:
            _count_rows(v, rows, there, row_amax, counts, stop, MODE, SLOTS, MAX, LEAST, FLOOR, ROUND)
        else:
            if MODE != 0:
                _note_largest(tl.max(_bits(_largest(v))), counts, SLOTS)
            elif along == 0:
                _note_largest(tl.load(row_amax), counts, SLOTS)
            _write(v, down, t, e, along, begin, stop, cols, there, row_amax, col_amax, out, other, row_scales, col_scales, R, C, P, MODE, APART, MAX,
                   WIDE_RANGE, ROUND, FLOOR)  # fmt: skip
    else:
        _write(v, down, t, e, along, begin, stop, cols, there, row_amax, col_amax, out, other, row_scales, col_scales, R, C, P, MODE, APART, MAX,
               WIDE_RANGE, ROUND, FLOOR)  # fmt: skip


@triton.jit
def _write(v, down, t, e, along, begin, stop, cols, there, row_amax, col_amax, out, other, row_scales, col_scales, R, C, P, MODE: tl.constexpr,
           APART: tl.constexpr, MAX: tl.constexpr, WIDE_RANGE: tl.constexpr, ROUND: tl.constexpr, FLOOR: tl.constexpr):  # fmt: skip
    """out (R, C), other (C, P) as words of four. row_scales: one, or one of each expert (APART); (R,); (columns of tiles, R); (tiles, columns of
    tiles). col_scales: (E, C) or (tiles, C). Amaxes are bits, as modes want them; of GIVEN a multiplier."""
    rows = begin + 4 * tl.arange(0, v[0].shape[0])
    shared = _shared_multiplier(v, row_amax, MODE, MAX, FLOOR)
    m0 = _row_multiplier(v[0], rows, row_amax, shared, stop, MODE, MAX, FLOOR, ROUND)
    m1 = _row_multiplier(v[1], rows + 1, row_amax, shared, stop, MODE, MAX, FLOOR, ROUND)
    m2 = _row_multiplier(v[2], rows + 2, row_amax, shared, stop, MODE, MAX, FLOOR, ROUND)
    m3 = _row_multiplier(v[3], rows + 3, row_amax, shared, stop, MODE, MAX, FLOOR, ROUND)
    by_col = shared
    if MODE == 2:
        by_col = _multiplier(tl.load(col_amax + e.to(tl.int64) * C + cols, mask=there, other=0), MAX, FLOOR)
    elif MODE == 3:
        by_col = _multiplier(tl.max(_bits(_largest(v)), 0), MAX, FLOOR)
    turned = (
        _row(v[0], m0, by_col, rows, cols, there, out, other, stop, C, MODE, True, True, MAX, WIDE_RANGE, ROUND),
        _row(v[1], m1, by_col, rows + 1, cols, there, out, other, stop, C, MODE, True, True, MAX, WIDE_RANGE, ROUND),
        _row(v[2], m2, by_col, rows + 2, cols, there, out, other, stop, C, MODE, True, True, MAX, WIDE_RANGE, ROUND),
        _row(v[3], m3, by_col, rows + 3, cols, there, out, other, stop, C, MODE, True, True, MAX, WIDE_RANGE, ROUND),
    )
    words = _word(turned, MAX, WIDE_RANGE, ROUND)
    fours = down * words.shape[0] + tl.arange(0, words.shape[0])
    tl.store(other + cols.to(tl.int64)[:, None] * (P // 4) + fours[None, :], words.T, mask=there[:, None] & (fours < P // 4)[None, :])
    if MODE == 0 or MODE == 1:
        tl.store(row_scales + e * APART, _inverse(shared))  # the same from all
    elif MODE == 4:
        tl.store(row_scales + t * tl.cdiv(C, 128) + along, _inverse(shared))
    else:
        m = tl.reshape(tl.join(tl.join(m0, m2), tl.join(m1, m3)), (4 * m0.shape[0],))  # of all rows, in their order
        each = begin + tl.arange(0, 4 * m0.shape[0])
        if MODE == 2:
            tl.store(row_scales + each, _inverse(m), mask=(each < stop) & (along == 0))
            tl.store(col_scales + e.to(tl.int64) * C + cols, _inverse(by_col), mask=there)
        else:
            tl.store(row_scales + along.to(tl.int64) * R + each, _inverse(m), mask=each < stop)
            tl.store(col_scales + t.to(tl.int64) * C + cols, _inverse(by_col), mask=there)


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
             HALVES: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
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


def takes(x: Source, block: tuple[int, int]) -> bool:
    """Whether x can be cast as it is made: gate and up of a feature do not lie side by side, and no block of columns is of both."""
    whole = not isinstance(x, GatedRowsGrad) or block[1] < 2 or x.inner % block[1] == 0
    return whole and not (isinstance(x, GatedRows) and x.gate.interleaved)


def tiles_of(x: Source, mode: int) -> quant.Tiles:
    """The best of benchmarks/low_grouped.py on an H200. Rows of a tile of PLACE are divided into whole programs."""
    if mode in (BLOCKS, SQUARES):
        return quant.Tiles(TILE, TILE, 16)
    if isinstance(x, GatedRowsGrad):
        return quant.Tiles(64, SUMMED, 4)
    return quant.Tiles(32, TILE, 4) if isinstance(x, GatedRows) and mode != LARGEST_LINES else quant.Tiles(64, TILE, 8)


def sources(x: Source) -> tuple[tuple[Tensor | None, ...], int, dict[str, Any]]:
    """What the kernel reads (x, dy, source, weights, sums), columns that its tiles cover, constants."""
    if isinstance(x, GatedRows):
        gate, kind = x.gate, 3 if isinstance(x, GatedRowsGrad) else 2
        more = dict(SOURCE=kind, ALPHA=gate.alpha, LIMIT=gate.limit, SHIFT=gate.shift, CLAMP=math.isfinite(gate.limit), WEIGH=x.weights is not None)
        dy, sums = (x.dy.contiguous(), x.sums) if isinstance(x, GatedRowsGrad) else (None, None)
        weights = None if x.weights is None else x.weights.contiguous()
        return (x.x.contiguous(), dy, None, weights, sums), x.inner, more
    none = dict(ALPHA=1.0, LIMIT=0.0, SHIFT=0.0, CLAMP=False, WEIGH=False)
    if isinstance(x, Gathered):
        return (x.x.contiguous(), None, x.rows.source_R, None, None), x.shape[1], dict(SOURCE=1, **none)
    return (x.contiguous(), None, None, None, None), x.shape[1], dict(SOURCE=0, **none)


def _launch(x: Source, ends: Tensor, tiles: int, mode: int, first: Tensor | None, second: Tensor | None, out: Tensor | None = None,
            other: Tensor | None = None, scales: tuple[Tensor | None, Tensor | None] = (None, None), counts: Tensor | None = None,
            format: Format | None = None, apart: bool = False, cut: quant.Tiles | None = None) -> None:  # fmt: skip
    read, columns, more = sources(x)
    c, count, places = cut or tiles_of(x, mode), len(ends), tiles * TILE
    across, down = triton.cdiv(columns, c.columns), places // c.rows
    every = min(SAMPLED, across) if x.shape[0] * columns >= LARGE else 1
    wide = format is not None and format.dtype == torch.float8_e5m2
    counting = 0 if counts is None else down * triton.cdiv(across, every)
    _cast[(down * across + counting,)](
        *read, ends, first, second, out, other, *scales, counts, x.shape[0], columns, places, count, MODE=mode, APART=int(apart),
        NOTE=counts is not None, MAX=448.0 if format is None else format.max, LEAST=2.0**-17 if wide else 2.0**-10, WIDE_RANGE=wide,
        ROUND=x.device.type != "cuda", FLOOR=FLOOR, EVERY=every, SLOTS=SLOTS, ROWS=c.rows, COLS=c.columns, TILE=TILE,
        E_BLOCK=triton.next_power_of_2(count), num_warps=c.warps, **more,
    )  # fmt: skip


def amax(x: Source, ends: Tensor, tiles: int, apart: bool) -> Tensor:
    """Bits of the largest |x| of rows (R, C) in all, (1, 1), or of each expert's, (E, 1); int32."""
    out = torch.zeros(len(ends) if apart else 1, 1, dtype=torch.int32, device=x.device)
    _launch(x, ends, tiles, LARGEST, out, None, apart=apart)
    return out


def amax_lines(x: Source, ends: Tensor, tiles: int) -> tuple[Tensor, Tensor]:
    """Bits of the largest |x| of each row (R,), of each feature over each expert's rows (E, C); int32."""
    (rows, columns), count = x.shape, len(ends)
    both = torch.zeros(rows + count * columns, dtype=torch.int32, device=x.device)
    of_rows, of_columns = both.split((rows, count * columns))
    _launch(x, ends, tiles, LARGEST_LINES, of_rows, of_columns)
    return of_rows, of_columns.view(count, columns)


def cast_both(x: Source, ends: Tensor, tiles: int, format: Format, mode: int, first: Tensor | None, second: Tensor | None,
              counts: Tensor | None = None, into: tuple[Scaled, Scaled] | None = None,
              cut: quant.Tiles | None = None) -> tuple[Scaled, Scaled]:  # fmt: skip
    """Codes of rows x (R, C) as they lie, and transposed by places, (C, tiles * TILE).

    first, second  bits of amaxes as `mode` wants them: WHOLE all rows' or (E, 1) each expert's, GIVEN the multiplier (fp32), LINES of rows (R,)
                   and of features (E, C)
    counts, into   as kernels.quant.cast_both has them; cut: for benchmarks
    """
    (rows, columns), count, device = x.shape, len(ends), x.device
    across, apart = triton.cdiv(columns, TILE), mode == WHOLE and first is not None and first.numel() == count and count > 1
    if into is None:
        out = torch.empty(rows, columns, dtype=format.dtype, device=device)
        other = torch.empty(columns, tiles * TILE, dtype=format.dtype, device=device)
        shapes = {LINES: ((rows, 1), (count, columns)), BLOCKS: ((across, rows), (tiles, columns)), SQUARES: ((tiles, across), (1, 1))}
        row_scales, col_scales = (torch.empty(s, device=device) for s in shapes.get(mode, ((count if apart else 1, 1), (1, 1))))
        into = _scaled(out, other, row_scales, col_scales, mode)
    else:
        out, other, row_scales, col_scales = into[0].codes, into[1].codes, into[0].scales, into[1].scales.t()
    _launch(x, ends, tiles, mode, first, second, out, other.view(torch.int32), (row_scales, col_scales), counts, format, apart, cut)
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
    c = tiles or (BY_BLOCK if per_step else FAST if fast else CAREFUL)
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
    c = tiles or (BY_BLOCK if per_step else FAST if fast else CAREFUL)
    strides = [s for q in (dy, x) for s in ((q.scales.stride(0) if q.block[0] else 0), (q.scales.stride(1) if q.scales.shape[1] > 1 else 0))]
    _gemm_dw[(count * triton.cdiv(height, c.m) * triton.cdiv(width, c.n),)](
        TensorDescriptor.from_tensor(dy.codes, [c.m, TILE]), TensorDescriptor.from_tensor(x.codes, [c.n >> c.halves, TILE]), buffer, ends,
        dy.scales, x.scales, height, width, count, *strides, PER_STEP=per_step, BY_LINE=dy.block != (0, 0), FAST=fast, BM=c.m, BN=c.n, BK=TILE,
        GROUP=c.group, E_BLOCK=triton.next_power_of_2(count), HALVES=c.halves, INTERPRETED=not buffer.is_cuda, num_stages=c.stages, num_warps=c.warps,
        maxnreg=c.registers,
    )  # fmt: skip

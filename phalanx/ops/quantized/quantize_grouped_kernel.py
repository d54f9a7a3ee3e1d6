"""Casts to FP8 of rows sorted by expert, in one pass over memory. quantize_tile.py casts a tile;
ops/quantized/expert_quantizer.py defines the results.

Which expert a row belongs to is read from `ends` on the device. A program handles TILE rows of one expert and some of
the features. Tile t, counted over all experts, goes to places t TILE and following of the transposed values, so as many
groups of places are used as there are tiles. A stack of matrices is cast in the same way, as rows of which every expert
has the same number.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.dense.activation import SUMMED, GatedRows, GatedRowsGrad
from phalanx.ops.dense.gated_kernel import clamped, gated, gated_slopes, sigmoid
from phalanx.ops.experts.grouped_tiles import rows_of_experts
from phalanx.ops.experts.permute import Gathered
from phalanx.ops.quantized.casts import (
    BLOCKS,
    GIVEN,
    LARGEST,
    LARGEST_LINES,
    LINES,
    SQUARES,
    TILE,
    WHOLE,
    CastSpec,
    cast_rows_memory,
    rows_amax,
    rows_amaxes,
)
from phalanx.ops.quantized.casts import rows_fit as takes
from phalanx.ops.quantized.quantize_tile import (
    _GIVEN,
    _LARGEST,
    _LARGEST_LINES,
    _LINES,
    _SQUARES,
    _WHOLE,
    NOTHING,
    CastTiles,
    count_losses_of_four,
    note_amaxes,
    note_tile,
    place,
    plan,
    read_four,
    reciprocal,
    rounded,
    write_quantized,
)
from phalanx.ops.quantized.recipes import Scaled

if TYPE_CHECKING:
    from phalanx.ops.quantized.recipes import Format

__all__ = [
    "BLOCKS",
    "GIVEN",
    "LINES",
    "SQUARES",
    "TILE",
    "WHOLE",
    "CastTiles",
    "amax",
    "amax_lines",
    "cast_both",
    "sources",
    "takes",
    "tiles_of",
]

Source = Tensor | Gathered | GatedRows  # and GatedRowsGrad


@triton.jit
def _rows_of(t, ends, E, TILE: tl.constexpr, E_BLOCK: tl.constexpr):
    """(whether there is a tile t, its expert, its first row, one past its expert's last row)"""
    experts, starts, stops = rows_of_experts(ends, E, E_BLOCK)
    counts = tl.cdiv(stops - starts, TILE)
    lasts = tl.cumsum(counts, 0)
    e = tl.sum((lasts <= t).to(tl.int32), 0)
    start = tl.sum(tl.where(experts == e, starts - (lasts - counts) * TILE, 0), 0)
    stop = tl.sum(tl.where(experts == e, stops, 0), 0)
    return t < tl.sum(counts, 0), e, start + t * TILE, stop


@triton.jit
def _read_gathered(x, source, rows, cols, stop, C):
    """The tokens of x (T, C) that rows `rows` before `stop` hold, in fp32."""
    there = rows < stop
    token = tl.load(source + rows, mask=there, other=0).to(tl.int64)
    return tl.load(x + token[:, None] * C + cols[None, :], mask=there[:, None] & (cols < C)[None, :], other=0.0).to(
        tl.float32
    )


@triton.jit
def _weighed(
    gate,
    up,
    weights,
    rows,
    stop,
    x,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    CLAMP: tl.constexpr,
    WEIGH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The activation of gate and up, as in gated_kernel."""
    gate, up = clamped(gate, up, LIMIT, SHIFT, CLAMP)
    y = gated(gate, up, ALPHA, INTERPRETED)
    if WEIGH:
        y = y * tl.load(weights + rows, mask=rows < stop, other=0.0)[:, None]
    return rounded(y, x, INTERPRETED)


@triton.jit
def _slopes(
    d,
    raw_gate,
    raw_up,
    weights,
    sums,
    rows,
    stop,
    x,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    CLAMP: tl.constexpr,
    WEIGH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Gradients of gate and up, as in gated_kernel; this tile's part of the gradient of the rows' weights goes to
    `sums`."""
    gate, up = clamped(raw_gate, raw_up, LIMIT, SHIFT, CLAMP)
    s = sigmoid(gate, ALPHA, INTERPRETED)
    if WEIGH:
        there = rows < stop
        tl.store(sums + rows, tl.sum(d * gate * s * up, 1), mask=there)
        d = d * tl.load(weights + rows, mask=there, other=0.0)[:, None]
    dgate, dup = gated_slopes(d, gate, up, s, raw_gate, raw_up, ALPHA, LIMIT, CLAMP)
    return rounded(dgate, x, INTERPRETED), rounded(dup, x, INTERPRETED)


@triton.jit
def _cast(
    x,
    dy,
    source,
    weights,
    sums,
    ends,
    row_amax,
    col_amax,
    out,
    other,
    row_scales,
    col_scales,
    counts,
    R,
    C,
    P,
    E,
    SOURCE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    CLAMP: tl.constexpr,
    WEIGH: tl.constexpr,
    HOW: tl.constexpr,
    TILE: tl.constexpr,
    E_BLOCK: tl.constexpr,
):
    """Quantize rows sorted by expert. SOURCE: 0 x (R, C); 1 the tokens of x (T, C) with the numbers `source` (R,); 2
    the activation (R, C) of x (R, 2C), times `weights` (R,) if WEIGH; 3 its gradient (R, 2C) from dy (R, C), with
    partial sums for the gradient of the weights in `sums` (N, R), one for each column of tiles.

    A program handles ROWS of the rows in tile `t`, all of expert e.
    """
    counting, down, along, padded, cols = place(P, C, HOW)
    to = (row_amax, col_amax, out, other, row_scales, col_scales, counts)
    t = down * HOW.rows // TILE
    there, e, first, stop = _rows_of(t, ends, E, TILE, E_BLOCK)
    begin = first + down * HOW.rows % TILE
    if there:
        rows = begin + 4 * tl.arange(0, HOW.rows // 4)
        there_cols = cols < C
        if SOURCE == 0:
            v = read_four(x, rows, cols, C, stop, C)
        elif SOURCE == 1:
            v = (
                _read_gathered(x, source, rows, cols, stop, C),
                _read_gathered(x, source, rows + 1, cols, stop, C),
                _read_gathered(x, source, rows + 2, cols, stop, C),
                _read_gathered(x, source, rows + 3, cols, stop, C),
            )
        else:
            g, u = read_four(x, rows, cols, 2 * C, stop, C), read_four(x + C, rows, cols, 2 * C, stop, C)
            if SOURCE == 2:
                v = (
                    _weighed(g[0], u[0], weights, rows, stop, x, ALPHA, LIMIT, SHIFT, CLAMP, WEIGH, HOW.round),
                    _weighed(g[1], u[1], weights, rows + 1, stop, x, ALPHA, LIMIT, SHIFT, CLAMP, WEIGH, HOW.round),
                    _weighed(g[2], u[2], weights, rows + 2, stop, x, ALPHA, LIMIT, SHIFT, CLAMP, WEIGH, HOW.round),
                    _weighed(g[3], u[3], weights, rows + 3, stop, x, ALPHA, LIMIT, SHIFT, CLAMP, WEIGH, HOW.round),
                )
            else:
                d = read_four(dy, rows, cols, C, stop, C)
                if WEIGH:
                    sums += along.to(tl.int64) * R
                g0, u0 = _slopes(
                    d[0], g[0], u[0], weights, sums, rows, stop, x, ALPHA, LIMIT, SHIFT, CLAMP, WEIGH, HOW.round
                )
                g1, u1 = _slopes(
                    d[1], g[1], u[1], weights, sums, rows + 1, stop, x, ALPHA, LIMIT, SHIFT, CLAMP, WEIGH, HOW.round
                )
                g2, u2 = _slopes(
                    d[2], g[2], u[2], weights, sums, rows + 2, stop, x, ALPHA, LIMIT, SHIFT, CLAMP, WEIGH, HOW.round
                )
                g3, u3 = _slopes(
                    d[3], g[3], u[3], weights, sums, rows + 3, stop, x, ALPHA, LIMIT, SHIFT, CLAMP, WEIGH, HOW.round
                )
                at = (counting, down, t, e, along, begin, stop, cols, there_cols)
                _emit((g0, g1, g2, g3), at, to, R, 2 * C, P, HOW)
                v = (u0, u1, u2, u3)
                along += tl.cdiv(C, HOW.columns)
                cols += C
                C *= 2
        at = (counting, down, t, e, along, begin, stop, cols, there_cols)
        _emit(v, at, to, R, C, P, HOW)


@triton.jit
def _emit(v, at, to, R, C, P, HOW: tl.constexpr):
    """Cast v, four tiles, into out (R, C) and other (C, P). at: whether to count losses only; the tile's number down,
    its number among the tiles of all experts, its expert, its number along; its rows `begin` .. `stop`, its columns,
    which of them exist. to: see quantize_kernel._emit. With LARGEST and LARGEST_LINES, only record its amaxes: of rows
    (R,), of columns (E, C), of everything or, with per_expert, (E,)."""
    counting, down, t, e, along, begin, stop, cols, there = at
    row_amax, col_amax, out, other, row_scales, col_scales, counts = to
    rows = begin + 4 * tl.arange(0, v[0].shape[0])
    if HOW.per_expert:
        row_amax += e
    if HOW.mode == _LINES or HOW.mode == _LARGEST_LINES:
        col_amax += e.to(tl.int64) * C
    to = (row_amax, col_amax, out, other, row_scales, col_scales, counts)
    if HOW.mode == _LARGEST or HOW.mode == _LARGEST_LINES:
        note_amaxes(v, rows, stop, cols, there, row_amax, col_amax, HOW)
    elif HOW.note:
        if counting:
            count_losses_of_four(v, rows, stop, there, row_amax, counts, HOW)
        else:
            note_tile(v, along == 0, row_amax, counts, HOW)
            _write(v, at, to, rows, R, C, P, HOW)
    else:
        _write(v, at, to, rows, R, C, P, HOW)


@triton.jit
def _write(v, at, to, rows, R, C, P, HOW: tl.constexpr):
    """Store quantized values and scales. row_scales: one, or one for each expert (per_expert); with LINES (R,); with
    BLOCKS (columns of tiles, R); with SQUARES (tiles, columns of tiles). col_scales: (E, C) or (tiles, C)."""
    _, down, t, e, along, begin, stop, cols, there = at
    _, _, _, _, row_scales, col_scales, _ = to
    by_row, by_col = write_quantized(v, down, rows, stop, cols, there, to, C, P, HOW)
    if HOW.mode == _WHOLE or HOW.mode == _GIVEN:
        tl.store(row_scales + e * HOW.per_expert, reciprocal(by_row))  # every program stores the same value
    elif HOW.mode == _SQUARES:
        tl.store(row_scales + t * tl.cdiv(C, 128) + along, reciprocal(by_row))
    else:
        each = begin + tl.arange(0, by_row.shape[0])
        if HOW.mode == _LINES:
            tl.store(row_scales + each, by_row, mask=(each < stop) & (along == 0))
            tl.store(col_scales + e.to(tl.int64) * C + cols, by_col, mask=there)
        else:
            tl.store(row_scales + along.to(tl.int64) * R + each, by_row, mask=each < stop)
            tl.store(col_scales + t.to(tl.int64) * C + cols, by_col, mask=there)


def tiles_of(x: Source, mode: int) -> CastTiles:
    """The best tiles of benchmarks/low_grouped.py on an H200. The rows of a tile of PLACE are divided into whole
    programs."""
    if mode in (BLOCKS, SQUARES):
        return CastTiles(TILE, TILE, 16)
    if isinstance(x, GatedRowsGrad):
        return CastTiles(64, SUMMED, 4)
    return CastTiles(32, TILE, 4) if isinstance(x, GatedRows) and mode != LARGEST_LINES else CastTiles(64, TILE, 8)


def sources(x: Source) -> tuple[tuple[Tensor | None, ...], int, dict[str, Any]]:
    """What the kernel reads (x, dy, source, weights, sums), the columns that its tiles cover, and constants."""
    if isinstance(x, GatedRows):
        gate, kind = x.gate, 3 if isinstance(x, GatedRowsGrad) else 2
        if gate.cubic:
            raise TypeError("experts in FP8 have SwiGLU's gates: the cast does not compute GELU")
        more = dict(
            SOURCE=kind,
            ALPHA=gate.alpha,
            LIMIT=gate.limit,
            SHIFT=gate.shift,
            CLAMP=math.isfinite(gate.limit),
            WEIGH=x.weights is not None,
        )
        dy, sums = (x.dy.contiguous(), x.sums) if isinstance(x, GatedRowsGrad) else (None, None)
        weights = None if x.weights is None else x.weights.contiguous()
        return (x.x.contiguous(), dy, None, weights, sums), x.inner, more
    none = dict(ALPHA=1.0, LIMIT=0.0, SHIFT=0.0, CLAMP=False, WEIGH=False)
    if isinstance(x, Gathered):
        return (x.x.contiguous(), None, x.rows.source_R, None, None), x.shape[1], dict(SOURCE=1, **none)
    return (x.contiguous(), None, None, None, None), x.shape[1], dict(SOURCE=0, **none)


def _launch(
    rows: tuple[Source, Tensor, int],
    mode: int,
    to: tuple[Tensor | None, ...],
    format: Format | None = None,
    per_expert: bool = False,
    cut: CastTiles | None = None,
) -> None:
    """rows: x, ends and tiles, as in `cast_both`. to: see quantize_kernel._emit."""
    x, ends, tiles = rows
    (read, columns, more), count, padded = sources(x), len(ends), tiles * TILE
    cut = cut or tiles_of(x, mode)
    programs, constants = plan(x, (padded, columns), mode, format, to[-1], cut)
    more |= dict(HOW=replace(constants, per_expert=int(per_expert)), num_warps=cut.warps)
    sizes, experts = (x.shape[0], columns, padded, count), triton.next_power_of_2(count)
    _cast[(programs,)](*read, ends, *to, *sizes, TILE=TILE, E_BLOCK=experts, **more)


def amax(x: Source, ends: Tensor, tiles: int, per_expert: bool) -> Tensor:
    """Bits of the largest |x| over all rows (R, C), (1, 1), or over each expert's rows, (E, 1); int32."""
    out = rows_amax(x, ends, per_expert)
    _launch((x, ends, tiles), LARGEST, (out, *NOTHING), per_expert=per_expert)
    return out


def amax_lines(x: Source, ends: Tensor, tiles: int) -> tuple[Tensor, Tensor]:
    """Bits of the largest |x| of each row (R,) and of each feature over each expert's rows (E, C); int32."""
    of_rows, of_columns = rows_amaxes(x, ends)
    _launch((x, ends, tiles), LARGEST_LINES, (of_rows, of_columns, *NOTHING[1:]))
    return of_rows, of_columns


def cast_both(
    x: Source,
    ends: Tensor,
    tiles: int,
    cast: CastSpec,
    into: tuple[Scaled, Scaled] | None = None,
    cut: CastTiles | None = None,
) -> tuple[Scaled, Scaled]:
    """Quantized rows x (R, C) in their own order, and transposed by places, (C, tiles * TILE). `into`: as in
    quantize_kernel.cast_both; cut: for benchmarks."""
    if into is None:
        into = cast_rows_memory(x, len(ends), tiles, cast)
    out, other, row_scales, col_scales = into[0].quantized, into[1].quantized, into[0].scales, into[1].scales.t()
    to = (cast.first, cast.second, out, other.view(torch.int32), row_scales, col_scales, cast.counts)
    _launch((x, ends, tiles), cast.mode, to, cast.format, cast.per_expert(len(ends)), cut)
    return into

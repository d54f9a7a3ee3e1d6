"""Casts to 8 bits, one pass over memory for all that a linear needs of a tensor: codes as it lies, codes of its transpose, both scales,
and counts of what was lost. What SwiGLU makes, and its gradient, are cast as they are made and are in memory as codes alone.

A program does a tile, which lies inside one block of 128 or holds whole rows' parts. Largest values are compared as the bits of |x| in
int32: the order of what runs first changes nothing, and NaN is above all numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.activation import Gated, GatedGrad
from phalanx.ops.kernels.gated import clamped, gated, gated_slopes, sigmoid
from phalanx.ops.quant import FLOOR, SLOTS, Scaled

if TYPE_CHECKING:
    from phalanx.ops.quant import Format

Source = Tensor | Gated | GatedGrad
TILE = 128
ALL = 4096  # elements that a program of `_amax` looks at in a step
LARGE, SAMPLED = 1024, 16  # from so many tiles on, losses are counted in every so-manieth of a row of tiles
# Whose scale: the tensor's amax, a given number, lines, 1 x 128 (128 x 1), 128 x 128. The last two only find amaxes, of the whole and of lines
WHOLE, GIVEN, LINES, BLOCKS, SQUARES, LARGEST, LARGEST_LINES = range(7)


@dataclass(frozen=True)
class Tiles:
    """What a program does: rows, columns (of gate and up each), by so many warps. 16 or 32 values a thread: more leave too few threads."""

    rows: int
    columns: int
    warps: int


@triton.jit
def _bits(x):
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def _amax(x, out, n, steps, BLOCK: tl.constexpr):
    """out () int32 >= the bits of the largest |x| of (n,)."""
    first = tl.program_id(0).to(tl.int64) * steps * BLOCK
    largest = tl.zeros((BLOCK,), tl.int32)
    for step in range(steps):
        i = first + step * BLOCK + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, _bits(tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)))
    tl.atomic_max(out, tl.max(largest, 0))


@triton.jit
def _place(R, C, NOTE: tl.constexpr, EVERY: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """(whether this program only counts, its tile's number down and along, its rows, its columns). Programs past those of all tiles count
    losses, in every EVERY-th of a row of tiles, from row to row one further: which needs no registers of those that cast."""
    across = tl.cdiv(C, COLS)
    more = tl.program_id(0) - across * tl.cdiv(R, ROWS)
    down = tl.program_id(0) // across
    along = tl.program_id(0) % across
    if NOTE:
        if more >= 0:
            down = more // tl.cdiv(across, EVERY)
            along = more % tl.cdiv(across, EVERY) * EVERY + (EVERY - down % EVERY) % EVERY
    return more >= 0, down, along, down * ROWS + tl.arange(0, ROWS), along * COLS + tl.arange(0, COLS)


@triton.jit
def _read(x, rows, cols, stride, R, C):
    mask = (rows < R)[:, None] & (cols < C)[None, :]
    return _wide(tl.load(x + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=mask, other=0.0))


@triton.jit
def _wide(x):
    """x in fp32. The way of bf16's bits through an integer's number comes to one shift; a plain widening Triton would do after it has brought
    values, not codes, into the order of the transpose: casting all of them twice, of twice the bytes."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.float32).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _multiplier(bits, MAX: tl.constexpr, FLOOR: tl.constexpr):
    """As quant.multipliers."""
    amax = bits.to(tl.float32, bitcast=True)
    return tl.div_rn(MAX + tl.zeros_like(amax), tl.where(amax < FLOOR, FLOOR, amax))


@triton.jit
def _inverse(m):
    return tl.div_rn(tl.zeros_like(m) + 1.0, m)


@triton.jit
def _code(v, MAX: tl.constexpr, WIDE_RANGE: tl.constexpr, ROUND: tl.constexpr):
    """As quant.cast, up to the cast itself, which saturates on a GPU. WIDE_RANGE: E5M2. ROUND: to the format's numbers, for the interpreter,
    whose cast neither rounds to the nearest nor saturates."""
    finite = tl.abs(v) < float("inf")
    if ROUND:
        v = tl.minimum(tl.maximum(v, -MAX), MAX)
        drop: tl.constexpr = 21 if WIDE_RANGE else 20
        least: tl.constexpr = 2.0**-14 if WIDE_RANGE else 2.0**-6  # of the numbers with a full mantissa
        magic: tl.constexpr = 1.5 * (2.0**7 if WIDE_RANGE else 2.0**14)
        bits = v.to(tl.int32, bitcast=True)
        full = ((bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)) & (-1 << drop)).to(tl.float32, bitcast=True)
        small = (((tl.abs(v) + magic) - magic).to(tl.int32, bitcast=True) | (bits & (-1 << 31))).to(tl.float32, bitcast=True)
        v = tl.where(tl.abs(v) < least, small, full)
    return tl.where(finite, v, float("nan"))


@triton.jit
def _put(v, where, stride, rows, cols, mask, TURNED: tl.constexpr, MAX: tl.constexpr, WIDE_RANGE: tl.constexpr, ROUND: tl.constexpr):
    codes = _code(v, MAX, WIDE_RANGE, ROUND).to(where.dtype.element_ty)
    if ROUND:  # nor does it cast NaN
        codes = tl.where(tl.abs(v) < float("inf"), codes.to(tl.uint8, bitcast=True), 0x7F).to(tl.uint8).to(where.dtype.element_ty, bitcast=True)
    if TURNED:
        tl.store(where + cols.to(tl.int64)[:, None] * stride + rows[None, :], codes.T, mask=mask.T)
    else:
        tl.store(where + rows.to(tl.int64)[:, None] * stride + cols[None, :], codes, mask=mask)


@triton.jit
def _note(v, scaled, mask, counts, largest, EVERY: tl.constexpr, SLOTS: tl.constexpr, MAX: tl.constexpr, LEAST: tl.constexpr):
    """Note the bits of the largest |v|; in every EVERY-th program count losses."""
    _note_largest(largest, counts, SLOTS)
    if tl.program_id(0) % EVERY == 0:
        _count(v, scaled, mask, counts, SLOTS, MAX, LEAST)


@triton.jit
def _note_largest(largest, counts, SLOTS: tl.constexpr):
    tl.atomic_max(counts + tl.program_id(0) % SLOTS * 4 + 3, largest.to(tl.int64), sem="relaxed")


@triton.jit
def _count(v, scaled, mask, counts, SLOTS: tl.constexpr, MAX: tl.constexpr, LEAST: tl.constexpr):
    """Values that became zero, that were cut, and all."""
    place = counts + tl.program_id(0) % SLOTS * 4
    size = tl.abs(scaled)
    tl.atomic_add(place, tl.sum(((size <= LEAST) & (v != 0.0) & mask).to(tl.int32)).to(tl.int64), sem="relaxed")
    tl.atomic_add(place + 1, tl.sum(((size > MAX * (1 + 2.0**-20)) & mask).to(tl.int32)).to(tl.int64), sem="relaxed")
    tl.atomic_add(place + 2, tl.sum(mask.to(tl.int32)).to(tl.int64), sem="relaxed")


@triton.jit
def _row_multiplier(v, rows, there, row_amax, MODE: tl.constexpr, MAX: tl.constexpr, FLOOR: tl.constexpr):
    """What rows of the tile v are multiplied by: (rows, 1), or one number."""
    if MODE == 0:
        m = _multiplier(tl.load(row_amax), MAX, FLOOR)
    elif MODE == 1:
        m = tl.load(row_amax)
    elif MODE == 2:
        m = _multiplier(tl.load(row_amax + rows, mask=there, other=0), MAX, FLOOR)[:, None]
    elif MODE == 3:
        m = _multiplier(tl.max(_bits(v), 1), MAX, FLOOR)[:, None]
    else:
        m = _multiplier(tl.max(_bits(v)), MAX, FLOOR)
    return m


@triton.jit
def _emit(v, counting, down, along, rows, cols, rows_there, cols_there, row_amax, col_amax, out, other, row_scales, col_scales, counts, one, R, C,
          MODE: tl.constexpr, OTHER: tl.constexpr, TURNED: tl.constexpr, NOTE: tl.constexpr, MAX: tl.constexpr, LEAST: tl.constexpr,
          WIDE_RANGE: tl.constexpr, ROUND: tl.constexpr, FLOOR: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Cast the tile v, number (down, along), of a tensor (R, C). Of LARGEST and LARGEST_LINES, only note its amaxes."""
    if MODE == 5:
        tl.atomic_max(row_amax, tl.max(_bits(v)), sem="relaxed")
    elif MODE == 6:
        tl.atomic_max(row_amax + rows, tl.max(_bits(v), 1), mask=rows_there, sem="relaxed")
        tl.atomic_max(col_amax + cols, tl.max(_bits(v), 0), mask=cols_there, sem="relaxed")
    elif NOTE:
        if counting:
            by_row = v * _row_multiplier(v, rows, rows_there, row_amax, MODE, MAX, FLOOR)
            _count(v, by_row, rows_there[:, None] & cols_there[None, :], counts, SLOTS, MAX, LEAST)
        else:
            if MODE != 0:
                _note_largest(tl.max(_bits(v)), counts, SLOTS)
            elif (down == 0) & (along == 0):
                _note_largest(tl.load(row_amax), counts, SLOTS)
            _write(v, down, along, rows, cols, rows_there, cols_there, row_amax, col_amax, out, other, row_scales, col_scales, one, R, C, MODE, OTHER,
                   TURNED, MAX, WIDE_RANGE, ROUND, FLOOR)  # fmt: skip
    else:
        _write(v, down, along, rows, cols, rows_there, cols_there, row_amax, col_amax, out, other, row_scales, col_scales, one, R, C, MODE, OTHER,
               TURNED, MAX, WIDE_RANGE, ROUND, FLOOR)  # fmt: skip


@triton.jit
def _write(v, down, along, rows, cols, rows_there, cols_there, row_amax, col_amax, out, other, row_scales, col_scales, one, R, C, MODE: tl.constexpr,
           OTHER: tl.constexpr, TURNED: tl.constexpr, MAX: tl.constexpr, WIDE_RANGE: tl.constexpr, ROUND: tl.constexpr,
           FLOOR: tl.constexpr):  # fmt: skip
    """out (R, C): codes with scales shared along a row (or the whole). other: (R, C) or, TURNED, (C, R): with scales shared along a column.

    row_scales (columns of tiles, R) and col_scales (rows of tiles, C); of WHOLE and GIVEN one number. Amaxes are bits, of GIVEN a multiplier.
    `one`: 1.0, not known to the compiler, so that the two are cast apart where they share a scale. Of one cast, stored both as it lies and
    byte by byte for the transpose, ptxas 12.8 makes code for sm_90 that reads registers before they are set.
    """
    m_r = _row_multiplier(v, rows, rows_there, row_amax, MODE, MAX, FLOOR)
    by_row = v * m_r
    by_col = by_row
    if MODE != 2 and MODE != 3:
        by_col = v * (m_r * one)
    if MODE == 0 or MODE == 1:
        if (down == 0) & (along == 0):
            tl.store(row_scales, _inverse(m_r))
    elif MODE == 2:
        m_c = _multiplier(tl.load(col_amax + cols, mask=cols_there, other=0), MAX, FLOOR)
        by_col = v * m_c[None, :]
        if along == 0:
            tl.store(row_scales + rows[:, None], _inverse(m_r), mask=rows_there[:, None])
        if down == 0:
            tl.store(col_scales + cols, _inverse(m_c), mask=cols_there)
    elif MODE == 3:
        m_c = _multiplier(tl.max(_bits(v), 0), MAX, FLOOR)
        by_col = v * m_c[None, :]
        tl.store(row_scales + along.to(tl.int64) * R + rows[:, None], _inverse(m_r), mask=rows_there[:, None])
        tl.store(col_scales + down.to(tl.int64) * C + cols, _inverse(m_c), mask=cols_there)
    else:
        tl.store(row_scales + down * tl.cdiv(C, 128) + along, _inverse(m_r))
    mask = rows_there[:, None] & cols_there[None, :]
    _put(by_row, out, C, rows, cols, mask, False, MAX, WIDE_RANGE, ROUND)
    if OTHER:
        _put(by_col, other, R if TURNED else C, rows, cols, mask, TURNED, MAX, WIDE_RANGE, ROUND)


@triton.jit
def _cast(x, row_amax, col_amax, out, other, row_scales, col_scales, counts, one, R, C, MODE: tl.constexpr,
          OTHER: tl.constexpr, TURNED: tl.constexpr, NOTE: tl.constexpr, MAX: tl.constexpr, LEAST: tl.constexpr, WIDE_RANGE: tl.constexpr,
          ROUND: tl.constexpr, FLOOR: tl.constexpr, EVERY: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Of x (R, C)."""
    counting, down, along, rows, cols = _place(R, C, NOTE, EVERY, ROWS, COLS)
    v = _read(x, rows, cols, C, R, C)
    _emit(v, counting, down, along, rows, cols, rows < R, cols < C, row_amax, col_amax, out, other, row_scales, col_scales,
          counts, one, R, C, MODE, OTHER, TURNED, NOTE, MAX, LEAST, WIDE_RANGE, ROUND, FLOOR, SLOTS)  # fmt: skip


@triton.jit
def _cast_gated(x, row_amax, col_amax, out, other, row_scales, col_scales, counts, one, R, C, MODE: tl.constexpr,
                OTHER: tl.constexpr, TURNED: tl.constexpr, NOTE: tl.constexpr, MAX: tl.constexpr, LEAST: tl.constexpr,
                WIDE_RANGE: tl.constexpr, ROUND: tl.constexpr, FLOOR: tl.constexpr, EVERY: tl.constexpr, SLOTS: tl.constexpr,
                ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Of silu(gate) up (R, C), of x = [gate, up] (R, 2C), rounded to x's dtype as if it were in memory."""
    counting, down, along, rows, cols = _place(R, C, NOTE, EVERY, ROWS, COLS)
    gate, up = clamped(_read(x, rows, cols, 2 * C, R, C), _read(x + C, rows, cols, 2 * C, R, C), 0.0, 0.0, False)
    v = _wide(gated(gate, up, 1.0).to(x.dtype.element_ty))
    _emit(v, counting, down, along, rows, cols, rows < R, cols < C, row_amax, col_amax, out, other, row_scales, col_scales,
          counts, one, R, C, MODE, OTHER, TURNED, NOTE, MAX, LEAST, WIDE_RANGE, ROUND, FLOOR, SLOTS)  # fmt: skip


@triton.jit
def _cast_gated_grad(dy, x, row_amax, col_amax, out, other, row_scales, col_scales, counts, one, R, C, MODE: tl.constexpr,
                     OTHER: tl.constexpr, TURNED: tl.constexpr, NOTE: tl.constexpr, MAX: tl.constexpr, LEAST: tl.constexpr,
                     WIDE_RANGE: tl.constexpr, ROUND: tl.constexpr, FLOOR: tl.constexpr, EVERY: tl.constexpr, SLOTS: tl.constexpr,
                ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Of the gradient (R, 2C) of x = [gate, up] from dy (R, C), rounded likewise. Of BLOCKS, C is whole blocks."""
    counting, down, along, rows, cols = _place(R, C, NOTE, EVERY, ROWS, COLS)
    d = _read(dy, rows, cols, C, R, C)
    gate, up = clamped(_read(x, rows, cols, 2 * C, R, C), _read(x + C, rows, cols, 2 * C, R, C), 0.0, 0.0, False)
    dgate, dup = gated_slopes(d, gate, up, sigmoid(gate, 1.0), gate, up, 1.0, 0.0, False)
    v = _wide(dgate.to(x.dtype.element_ty))
    _emit(v, counting, down, along, rows, cols, rows < R, cols < C, row_amax, col_amax, out, other, row_scales, col_scales,
          counts, one, R, 2 * C, MODE, OTHER, TURNED, NOTE, MAX, LEAST, WIDE_RANGE, ROUND, FLOOR, SLOTS)  # fmt: skip
    v = _wide(dup.to(x.dtype.element_ty))
    along += tl.cdiv(C, COLS)
    _emit(v, counting, down, along, rows, C + cols, rows < R, cols < C, row_amax, col_amax, out, other, row_scales, col_scales,
          counts, one, R, 2 * C, MODE, OTHER, TURNED, NOTE, MAX, LEAST, WIDE_RANGE, ROUND, FLOOR, SLOTS)  # fmt: skip


@triton.jit
def _turn(x, out, R, C, TILE: tl.constexpr):
    across = tl.cdiv(C, TILE)
    rows = tl.program_id(0) // across * TILE + tl.arange(0, TILE)
    cols = tl.program_id(0) % across * TILE + tl.arange(0, TILE)
    mask = (rows < R)[:, None] & (cols < C)[None, :]
    v = tl.load(x + rows.to(tl.int64)[:, None] * C + cols[None, :], mask=mask, other=0)
    tl.store(out + cols.to(tl.int64)[:, None] * R + rows[None, :], v.T, mask=mask.T)


def transposed(codes: Tensor, out: Tensor | None = None) -> Tensor:
    """(R, C) of 8-bit codes -> (C, R), contiguous, in `out` if given."""
    rows, columns = codes.shape
    out = torch.empty(columns, rows, dtype=codes.dtype, device=codes.device) if out is None else out
    grid = (triton.cdiv(rows, TILE) * triton.cdiv(columns, TILE),)
    _turn[grid](codes.contiguous().view(torch.uint8), out.view(torch.uint8), rows, columns, TILE=TILE, num_warps=8)
    return out


def amax(x: Source) -> Tensor:
    """Bits of the largest |x|, (1,) int32."""
    out = torch.zeros(1, dtype=torch.int32, device=x.device)
    if isinstance(x, Tensor):
        steps = 8 if x.is_cuda else 2
        _amax[(triton.cdiv(x.numel(), ALL * steps),)](x.contiguous(), out, x.numel(), steps, BLOCK=ALL, num_warps=8)
    else:
        _launch(x, LARGEST, out, None)
    return out


def amax_lines(x: Source) -> tuple[Tensor, Tensor]:
    """Bits of the largest |x| of each row (R,) and each column (C,), int32."""
    both = torch.zeros(sum(x.shape), dtype=torch.int32, device=x.device)
    rows, columns = both.split(tuple(x.shape))
    _launch(x, LARGEST_LINES, rows, columns)
    return rows, columns


def tiles_of(x: Source, mode: int) -> Tiles:
    """Blocks ask for a tile of their size."""
    if mode in (BLOCKS, SQUARES):
        return Tiles(TILE, TILE, 16)
    if isinstance(x, GatedGrad):
        return Tiles(64, 64, 8)
    return Tiles(TILE, TILE, 8) if mode == LARGEST_LINES else Tiles(64, 128, 8)  # fewer, larger tiles: fewer atomics


def _launch(x: Source, mode: int, first: Tensor | None, second: Tensor | None, out: Tensor | None = None, other: Tensor | None = None,
            scales: tuple[Tensor | None, Tensor | None] = (None, None), counts: Tensor | None = None, turn: bool = False,
            format: Format | None = None, tiles: Tiles | None = None) -> None:  # fmt: skip
    """One of the kernels above over all of x."""
    kernel: Any
    sources: tuple[Tensor, ...]
    if isinstance(x, GatedGrad):
        kernel, sources, (rows, columns) = _cast_gated_grad, (x.dy.contiguous(), x.x.contiguous()), x.dy.shape
    elif isinstance(x, Gated):
        kernel, sources, (rows, columns) = _cast_gated, (x.x.contiguous(),), x.shape
    else:
        kernel, sources, (rows, columns) = _cast, (x.contiguous(),), x.shape
    t = tiles or tiles_of(x, mode)
    across, down = triton.cdiv(columns, t.columns), triton.cdiv(rows, t.rows)
    every = min(SAMPLED, across) if down * across >= LARGE else 1
    wide = format is not None and format.dtype == torch.float8_e5m2
    counting = 0 if counts is None else down * triton.cdiv(across, every)
    kernel[(down * across + counting,)](
        *sources, first, second, out, other, *scales, counts, 1.0, rows, columns, MODE=mode, OTHER=other is not None, TURNED=turn,
        NOTE=counts is not None, MAX=448.0 if format is None else format.max, LEAST=2.0**-17 if wide else 2.0**-10, WIDE_RANGE=wide,
        ROUND=x.device.type != "cuda", FLOOR=FLOOR, EVERY=every, SLOTS=SLOTS, ROWS=t.rows, COLS=t.columns, num_warps=t.warps,
    )  # fmt: skip


def cast_both(x: Source, format: Format, mode: int, first: Tensor | None, second: Tensor | None, turn: bool, both: bool = True,
              counts: Tensor | None = None, into: tuple[Scaled, Scaled] | None = None,
              tiles: Tiles | None = None) -> tuple[Scaled, Scaled]:  # fmt: skip
    """Codes of x (R, C) with scales for sums along its columns, and for sums along its rows: the latter transposed, (C, R), if `turn`.

    first, second  bits of amaxes as `mode` wants them: WHOLE the tensor's, GIVEN the multiplier (fp32), LINES of rows and of columns
    both           whether the second is wanted
    counts         (SLOTS, COUNTS) int64 to note amax and losses in, of large tensors the losses of some tiles
    into           where to write instead of new memory, as an earlier call returned it
    tiles          for benchmarks
    """
    rows, columns = x.shape
    device, whole, squares = x.device, mode in (WHOLE, GIVEN), mode == SQUARES
    down, across = triton.cdiv(rows, TILE), triton.cdiv(columns, TILE)
    shared = whole or squares
    wanted = both and (turn or not shared)
    if into is not None:
        out, other = into[0].codes, into[1].codes if wanted else None
    else:
        out = torch.empty(rows, columns, dtype=format.dtype, device=device)
        other = torch.empty((columns, rows) if turn else (rows, columns), dtype=format.dtype, device=device) if wanted else None
    sizes = {LINES: (rows, columns), BLOCKS: (across * rows, down * columns), SQUARES: (down * across, 1)}.get(mode, (1, 1))
    row_scales, col_scales = (torch.empty(n, device=device) for n in sizes)
    _launch(x, mode, first, second, out, other, (row_scales, col_scales), counts, turn, format, tiles)
    if into is not None:
        _copy_scales(into, row_scales, col_scales, mode, turn)
        return into
    if whole:
        q = Scaled(out, row_scales.view(1, 1), (0, 0))
        return q, q if other is None else Scaled(other, q.scales, (0, 0))
    if squares:
        q = Scaled(out, row_scales.view(down, across), (TILE, TILE))
        return q, q if other is None else Scaled(other, q.scales.t().contiguous(), (TILE, TILE))
    block = (1, 0) if mode == LINES else (1, TILE)
    q = Scaled(out, row_scales.view(-1, rows).t(), block)
    if other is None:
        return q, q
    by_column = col_scales.view(-1, columns)
    return q, Scaled(other, by_column.t(), block) if turn else Scaled(other, by_column, block[::-1])


def _copy_scales(into: tuple[Scaled, Scaled], row_scales: Tensor, col_scales: Tensor, mode: int, turn: bool) -> None:
    first, second = (q.scales for q in into)
    if mode in (LINES, BLOCKS):
        first.t().copy_(row_scales.view(first.t().shape))
        (second.t() if turn else second).copy_(col_scales.view((second.t() if turn else second).shape))
    else:
        first.copy_(row_scales.view(first.shape))
        if second is not first and mode == SQUARES:
            second.copy_(first.t())

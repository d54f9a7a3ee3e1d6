"""Casts to 8 bits, one pass over memory for all that a linear needs of a tensor: codes as it lies, codes of its transpose, both scales,
and counts of what was lost. A program does a tile of TILE x TILE, which lies inside one block of 128 or holds whole rows' parts.

Largest values are compared as the bits of |x| in int32: the order of what runs first changes nothing, and NaN is above all numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.quant import FLOOR, SLOTS, Scaled

if TYPE_CHECKING:
    from phalanx.ops.quant import Format

TILE = 128
ALL = 4096  # elements that a program of `_amax` looks at in a step
LARGE, SAMPLED = 1024, 16  # from so many tiles on, losses are counted in every so-manieth
WHOLE, GIVEN, LINES, BLOCKS, SQUARES = range(5)  # whose scale: the tensor's amax, a given number, lines, 1 x 128 (128 x 1), 128 x 128


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
def _amax_lines(x, rows_out, cols_out, R, C, TILE: tl.constexpr):
    """The same of each row, out (R,), and each column, out (C,)."""
    rows, cols, mask, v = _tile(x, R, C, TILE)
    bits = _bits(v)
    tl.atomic_max(rows_out + rows, tl.max(bits, 1), mask=rows < R)
    tl.atomic_max(cols_out + cols, tl.max(bits, 0), mask=cols < C)


@triton.jit
def _tile(x, R, C, TILE: tl.constexpr):
    across = tl.cdiv(C, TILE)
    rows = tl.program_id(0) // across * TILE + tl.arange(0, TILE)
    cols = tl.program_id(0) % across * TILE + tl.arange(0, TILE)
    mask = (rows < R)[:, None] & (cols < C)[None, :]
    return rows, cols, mask, tl.load(x + rows.to(tl.int64)[:, None] * C + cols[None, :], mask=mask, other=0.0).to(tl.float32)


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
    """As quant.cast. WIDE_RANGE: E5M2. ROUND: to the format's numbers before the cast, for the interpreter, which does not round to the nearest."""
    finite = tl.abs(v) < float("inf")
    v = tl.minimum(tl.maximum(v, -MAX), MAX)
    if ROUND:
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
    """Note the bits of the largest |v|; in every EVERY-th tile count values that became zero, that were cut, and all."""
    place = counts + tl.program_id(0) % SLOTS * 4
    tl.atomic_max(place + 3, largest.to(tl.int64))
    if tl.program_id(0) % EVERY == 0:
        place = counts + tl.program_id(0) // EVERY % SLOTS * 4
        size = tl.abs(scaled)
        zeros = tl.sum(tl.sum(((size <= LEAST) & (v != 0.0) & mask).to(tl.int32), 1), 0)
        cut = tl.sum(tl.sum(((size > MAX * (1 + 2.0**-20)) & mask).to(tl.int32), 1), 0)
        tl.atomic_add(place, zeros.to(tl.int64))
        tl.atomic_add(place + 1, cut.to(tl.int64))
        tl.atomic_add(place + 2, tl.sum(tl.sum(mask.to(tl.int32), 1), 0).to(tl.int64))


@triton.jit
def _cast(x, row_amax, col_amax, out, other, row_scales, col_scales, counts, R, C, MODE: tl.constexpr, OUT: tl.constexpr,
          OTHER: tl.constexpr, TURNED: tl.constexpr, NOTE: tl.constexpr,
          MAX: tl.constexpr, LEAST: tl.constexpr, WIDE_RANGE: tl.constexpr, ROUND: tl.constexpr,
          FLOOR: tl.constexpr, EVERY: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """out (R, C): codes with scales shared along a row (or the whole). other: (R, C) or, TURNED, (C, R): with scales shared along a column.

    row_scales (columns of tiles, R) and col_scales (rows of tiles, C); of WHOLE and GIVEN one number. Amaxes are bits, of GIVEN a multiplier.
    """
    rows, cols, mask, v = _tile(x, R, C, TILE)
    across = tl.cdiv(C, TILE)
    down = tl.program_id(0) // across
    along = tl.program_id(0) % across
    if MODE == 0 or MODE == 1:
        m = tl.load(row_amax) if MODE == 1 else _multiplier(tl.load(row_amax), MAX, FLOOR)
        by_row = v * m
        by_col = by_row
        if tl.program_id(0) == 0:
            tl.store(row_scales, _inverse(m))
    elif MODE == 2:
        m_r = _multiplier(tl.load(row_amax + rows, mask=rows < R, other=0), MAX, FLOOR)
        m_c = _multiplier(tl.load(col_amax + cols, mask=cols < C, other=0), MAX, FLOOR)
        by_row = v * m_r[:, None]
        by_col = v * m_c[None, :]
        if along == 0:
            tl.store(row_scales + rows, _inverse(m_r), mask=rows < R)
        if down == 0:
            tl.store(col_scales + cols, _inverse(m_c), mask=cols < C)
    elif MODE == 3:
        m_r = _multiplier(tl.max(_bits(v), 1), MAX, FLOOR)
        m_c = _multiplier(tl.max(_bits(v), 0), MAX, FLOOR)
        by_row = v * m_r[:, None]
        by_col = v * m_c[None, :]
        tl.store(row_scales + along.to(tl.int64) * R + rows, _inverse(m_r), mask=rows < R)
        tl.store(col_scales + down.to(tl.int64) * C + cols, _inverse(m_c), mask=cols < C)
    else:
        m = _multiplier(tl.max(tl.max(_bits(v), 1), 0), MAX, FLOOR)
        by_row = v * m
        by_col = by_row
        tl.store(row_scales + down * across + along, _inverse(m))
    if OUT:
        _put(by_row, out, C, rows, cols, mask, False, MAX, WIDE_RANGE, ROUND)
    if OTHER:
        _put(by_col, other, R if TURNED else C, rows, cols, mask, TURNED, MAX, WIDE_RANGE, ROUND)
    if NOTE:
        if MODE == 0:
            largest = tl.load(row_amax)  # of the whole tensor: the same from all
        else:
            largest = tl.max(tl.max(_bits(v), 1), 0)
        _note(v, by_row, mask, counts, largest, EVERY, SLOTS, MAX, LEAST)


@triton.jit
def _turn(x, out, R, C, TILE: tl.constexpr):
    across = tl.cdiv(C, TILE)
    rows = tl.program_id(0) // across * TILE + tl.arange(0, TILE)
    cols = tl.program_id(0) % across * TILE + tl.arange(0, TILE)
    mask = (rows < R)[:, None] & (cols < C)[None, :]
    v = tl.load(x + rows.to(tl.int64)[:, None] * C + cols[None, :], mask=mask, other=0)
    tl.store(out + cols.to(tl.int64)[:, None] * R + rows[None, :], v.T, mask=mask.T)


def tiles(x: Tensor) -> int:
    return triton.cdiv(x.shape[0], TILE) * triton.cdiv(x.shape[1], TILE)


def transposed(codes: Tensor) -> Tensor:
    """(R, C) of 8-bit codes -> (C, R), contiguous."""
    rows, columns = codes.shape
    out = torch.empty(columns, rows, dtype=torch.uint8, device=codes.device)
    _turn[(tiles(codes),)](codes.contiguous().view(torch.uint8), out, rows, columns, TILE=TILE, num_warps=8)
    return out.view(codes.dtype)


def amax(x: Tensor) -> Tensor:
    """Bits of the largest |x|, (1,) int32."""
    out = torch.zeros(1, dtype=torch.int32, device=x.device)
    steps = 8 if x.is_cuda else 2
    _amax[(triton.cdiv(x.numel(), ALL * steps),)](x, out, x.numel(), steps, BLOCK=ALL, num_warps=8)
    return out


def amax_lines(x: Tensor) -> tuple[Tensor, Tensor]:
    """Bits of the largest |x| of each row (R,) and each column (C,), int32."""
    both = torch.zeros(sum(x.shape), dtype=torch.int32, device=x.device)
    rows, columns = both.split(x.shape)
    _amax_lines[(tiles(x),)](x, rows, columns, *x.shape, TILE=TILE, num_warps=8)
    return rows, columns


def cast_both(x: Tensor, format: Format, mode: int, first: Tensor | None, second: Tensor | None, turn: bool, both: bool = True,
              counts: Tensor | None = None, into: tuple[Scaled, Scaled] | None = None) -> tuple[Scaled, Scaled]:  # fmt: skip
    """Codes of x (R, C) with scales for sums along its columns, and for sums along its rows: the latter transposed, (C, R), if `turn`.

    first, second  bits of amaxes as `mode` wants them: WHOLE the tensor's, GIVEN the multiplier (fp32), LINES of rows and of columns
    both           whether the second is wanted; counts: (SLOTS, COUNTS) int64 to note amax and losses in, of large tensors the losses
                   of some tiles; into: where to write instead of
    new memory, as an earlier call returned it
    """
    x = x.contiguous()
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
    every = SAMPLED if down * across >= LARGE else 1
    wide = format.dtype == torch.float8_e5m2
    _cast[(down * across,)](
        x, first, second, out, other, row_scales, col_scales, counts, rows, columns, MODE=mode, OUT=True, OTHER=other is not None,
        TURNED=turn, NOTE=counts is not None, MAX=format.max, LEAST=2.0**-17 if wide else 2.0**-10, WIDE_RANGE=wide, ROUND=not x.is_cuda, FLOOR=FLOOR,
        EVERY=every, SLOTS=SLOTS, TILE=TILE, num_warps=8,
    )  # fmt: skip
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

"""Casts to 8 bits, one pass over memory for all that a linear needs of a tensor: codes as it lies, codes of its transpose, both scales,
and counts of what was lost. What SwiGLU and RMSNorm make, and the gradients of SwiGLU and of the rotation of queries and keys, are cast as
they are made and are in memory as codes alone.

A program reads its tile as four: of every fourth row, of those after them, and so on. A thread so has four values that follow each other in the
transposed matrix, casts them into one word and transposes words. That is half the instructions of transposing bytes, and such kernels wait for
instructions more than for memory. A tile lies inside one block of 128 or holds parts of whole rows. Largest values are compared as the bits of
|x| in int32: the order of what runs first changes nothing, and NaN is above all numbers.
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
from phalanx.ops.norm import Normed
from phalanx.ops.quant import FLOOR, SLOTS, Scaled
from phalanx.ops.rope import RopeGrad

if TYPE_CHECKING:
    from phalanx.ops.quant import Format

Source = Tensor | Gated | GatedGrad | Normed | RopeGrad
TILE = 128
ALL = 4096  # elements that a program of `_amax` looks at in a step
LARGE, SAMPLED = 2**23, 16  # of tensors of so many elements, losses are counted in every so-manieth of a row of tiles
# Whose scale: the tensor's amax, a given number, lines, 1 x 128 (128 x 1), 128 x 128. The last two only find amaxes, of the whole and of lines
WHOLE, GIVEN, LINES, BLOCKS, SQUARES, LARGEST, LARGEST_LINES = range(7)


@dataclass(frozen=True)
class Tiles:
    """What a program does: rows, columns (of gate and up each), by so many warps. 32 values a thread are four reads of 16 bytes of bf16."""

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
    """(whether this program only counts, its tile's number down and along, every fourth of its rows, its columns). Programs past those of all
    tiles count losses, in every EVERY-th of a row of tiles, from row to row one further: which needs no registers of those that cast."""
    across = tl.cdiv(C, COLS)
    more = tl.program_id(0) - across * tl.cdiv(R, ROWS)
    down = tl.program_id(0) // across
    along = tl.program_id(0) % across
    if NOTE:
        if more >= 0:
            down = more // tl.cdiv(across, EVERY)
            along = more % tl.cdiv(across, EVERY) * EVERY + (EVERY - down % EVERY) % EVERY
    return more >= 0, down, along, down * ROWS + 4 * tl.arange(0, ROWS // 4), along * COLS + tl.arange(0, COLS)


@triton.jit
def _read(x, rows, cols, stride, R, C):
    """Four tiles in fp32: of rows `rows`, of those after them, and so on."""
    return (
        _read_rows(x, rows, cols, stride, R, C),
        _read_rows(x, rows + 1, cols, stride, R, C),
        _read_rows(x, rows + 2, cols, stride, R, C),
        _read_rows(x, rows + 3, cols, stride, R, C),
    )


@triton.jit
def _read_rows(x, rows, cols, stride, R, C):
    mask = (rows < R)[:, None] & (cols < C)[None, :]
    return tl.load(x + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)


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
    if ROUND:
        finite = tl.abs(v) < float("inf")
        v = tl.minimum(tl.maximum(v, -MAX), MAX)
        drop: tl.constexpr = 21 if WIDE_RANGE else 20
        least: tl.constexpr = 2.0**-14 if WIDE_RANGE else 2.0**-6  # of the numbers with a full mantissa
        magic: tl.constexpr = 1.5 * (2.0**7 if WIDE_RANGE else 2.0**14)
        bits = v.to(tl.int32, bitcast=True)
        full = ((bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)) & (-1 << drop)).to(tl.float32, bitcast=True)
        small = (((tl.abs(v) + magic) - magic).to(tl.int32, bitcast=True) | (bits & (-1 << 31))).to(tl.float32, bitcast=True)
        return tl.where(finite, tl.where(tl.abs(v) < least, small, full), float("nan"))
    else:
        return tl.fma(v, 0.0, v)  # v, or NaN where v is not finite


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
def _largest(v):
    """|v| of four tiles, the largest of each four; NaN if one is."""
    first = tl.maximum(tl.abs(v[0]), tl.abs(v[1]), propagate_nan=tl.PropagateNan.ALL)
    second = tl.maximum(tl.abs(v[2]), tl.abs(v[3]), propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _word(v, MAX: tl.constexpr, WIDE_RANGE: tl.constexpr, ROUND: tl.constexpr):
    """Codes of four tiles, those of four rows of a column in a word: what lies side by side in the transposed matrix."""
    if ROUND:
        word = _byte(v[0], MAX, WIDE_RANGE) | (_byte(v[1], MAX, WIDE_RANGE) << 8)
        return word | (_byte(v[2], MAX, WIDE_RANGE) << 16) | (_byte(v[3], MAX, WIDE_RANGE) << 24)
    else:
        a, b = _code(v[0], MAX, WIDE_RANGE, False), _code(v[1], MAX, WIDE_RANGE, False)
        c, d = _code(v[2], MAX, WIDE_RANGE, False), _code(v[3], MAX, WIDE_RANGE, False)
        if WIDE_RANGE:
            return tl.inline_asm_elementwise(
                "{.reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; cvt.rn.satfinite.e5m2x2.f32 high, $4, $3; mov.b32 $0, {low, high};}",
                "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                "{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high};}",
                "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)  # fmt: skip


@triton.jit
def _byte(v, MAX: tl.constexpr, WIDE_RANGE: tl.constexpr):
    """The code of v, for the interpreter."""
    code = _code(v, MAX, WIDE_RANGE, True).to(tl.float8e5 if WIDE_RANGE else tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(tl.abs(v) < float("inf"), code, 0x7F).to(tl.int32)


@triton.jit
def _row_multiplier(v, rows, row_amax, shared, R, MODE: tl.constexpr, MAX: tl.constexpr, FLOOR: tl.constexpr, ROUND: tl.constexpr):
    """What rows of a tile are multiplied by, (rows,), or `shared` where all of it is by one number."""
    if MODE == 2:
        return _multiplier(tl.load(row_amax + rows, mask=rows < R, other=0), MAX, FLOOR)
    elif MODE == 3:
        return _multiplier(tl.max(_bits(v), 1), MAX, FLOOR)
    else:
        return shared


@triton.jit
def _row(v, m, by_col, rows, cols, cols_there, out, other, R, C, MODE: tl.constexpr, OTHER: tl.constexpr, TURNED: tl.constexpr, MAX: tl.constexpr,
         WIDE_RANGE: tl.constexpr, ROUND: tl.constexpr):  # fmt: skip
    """Write codes of a tile whose rows are `rows` (R, C), multiplied by m. Returns what the transposed codes are cast from: multiplied by by_col."""
    mask = (rows < R)[:, None] & cols_there[None, :]
    if MODE == 2 or MODE == 3:
        _put(v * m[:, None], out, C, rows, cols, mask, False, MAX, WIDE_RANGE, ROUND)
        scaled = v * by_col[None, :]
        if OTHER and not TURNED:
            _put(scaled, other, C, rows, cols, mask, False, MAX, WIDE_RANGE, ROUND)
    else:
        scaled = v * m
        _put(scaled, out, C, rows, cols, mask, False, MAX, WIDE_RANGE, ROUND)
    return scaled


@triton.jit
def _emit(v, counting, down, along, rows, cols, cols_there, row_amax, col_amax, out, other, row_scales, col_scales, counts, R, C,
          MODE: tl.constexpr, OTHER: tl.constexpr, TURNED: tl.constexpr, NOTE: tl.constexpr, MAX: tl.constexpr, LEAST: tl.constexpr,
          WIDE_RANGE: tl.constexpr, ROUND: tl.constexpr, FLOOR: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Cast the tile v, number (down, along), of a tensor (R, C). Of LARGEST and LARGEST_LINES, only note its amaxes."""
    if MODE == 5:
        tl.atomic_max(row_amax, tl.max(_bits(_largest(v))), sem="relaxed")
    elif MODE == 6:
        tl.atomic_max(row_amax + rows, tl.max(_bits(v[0]), 1), mask=rows < R, sem="relaxed")
        tl.atomic_max(row_amax + rows + 1, tl.max(_bits(v[1]), 1), mask=rows + 1 < R, sem="relaxed")
        tl.atomic_max(row_amax + rows + 2, tl.max(_bits(v[2]), 1), mask=rows + 2 < R, sem="relaxed")
        tl.atomic_max(row_amax + rows + 3, tl.max(_bits(v[3]), 1), mask=rows + 3 < R, sem="relaxed")
        tl.atomic_max(col_amax + cols, tl.max(_bits(_largest(v)), 0), mask=cols_there, sem="relaxed")
    elif NOTE:
        if counting:
            _count_rows(v, rows, cols_there, row_amax, counts, R, MODE, SLOTS, MAX, LEAST, FLOOR, ROUND)
        else:
            if MODE != 0:
                _note_largest(tl.max(_bits(_largest(v))), counts, SLOTS)
            elif (down == 0) & (along == 0):
                _note_largest(tl.load(row_amax), counts, SLOTS)
            _write(v, down, along, rows, cols, cols_there, row_amax, col_amax, out, other, row_scales, col_scales, R, C, MODE, OTHER, TURNED, MAX,
                   WIDE_RANGE, ROUND, FLOOR)  # fmt: skip
    else:
        _write(v, down, along, rows, cols, cols_there, row_amax, col_amax, out, other, row_scales, col_scales, R, C, MODE, OTHER, TURNED, MAX,
               WIDE_RANGE, ROUND, FLOOR)  # fmt: skip


@triton.jit
def _shared_multiplier(v, row_amax, MODE: tl.constexpr, MAX: tl.constexpr, FLOOR: tl.constexpr):
    """What the whole tile is multiplied by, of modes where it is one number; else 1."""
    if MODE == 0:
        return _multiplier(tl.load(row_amax), MAX, FLOOR)
    elif MODE == 1:
        return tl.load(row_amax)
    elif MODE == 4:
        return _multiplier(tl.max(_bits(_largest(v))), MAX, FLOOR)
    else:
        return 1.0


@triton.jit
def _count_rows(v, rows, cols_there, row_amax, counts, R, MODE: tl.constexpr, SLOTS: tl.constexpr, MAX: tl.constexpr, LEAST: tl.constexpr,
                FLOOR: tl.constexpr, ROUND: tl.constexpr):  # fmt: skip
    shared = _shared_multiplier(v, row_amax, MODE, MAX, FLOOR)
    for i in tl.static_range(4):
        m = _row_multiplier(v[i], rows + i, row_amax, shared, R, MODE, MAX, FLOOR, ROUND)
        scaled = v[i] * (m[:, None] if MODE == 2 or MODE == 3 else m)
        _count(v[i], scaled, (rows + i < R)[:, None] & cols_there[None, :], counts, SLOTS, MAX, LEAST)


@triton.jit
def _write(v, down, along, rows, cols, cols_there, row_amax, col_amax, out, other, row_scales, col_scales, R, C, MODE: tl.constexpr,
           OTHER: tl.constexpr, TURNED: tl.constexpr, MAX: tl.constexpr, WIDE_RANGE: tl.constexpr, ROUND: tl.constexpr,
           FLOOR: tl.constexpr):  # fmt: skip
    """out (R, C): codes with scales shared along a row (or the whole). other: with scales shared along a column: (R, C) codes or, TURNED, (C, R)
    codes as words of four, R whole fours.

    row_scales (columns of tiles, R) and col_scales (rows of tiles, C); of WHOLE and GIVEN one number. Amaxes are bits, of GIVEN a multiplier.
    What is stored in both orders is cast twice, each time with its neighbours: bytes of one cast, taken apart and put together anew, cost
    three times the instructions, and ptxas 12.8 made code of it for sm_90 that read registers before they were set.
    """
    shared = _shared_multiplier(v, row_amax, MODE, MAX, FLOOR)
    m0 = _row_multiplier(v[0], rows, row_amax, shared, R, MODE, MAX, FLOOR, ROUND)
    m1 = _row_multiplier(v[1], rows + 1, row_amax, shared, R, MODE, MAX, FLOOR, ROUND)
    m2 = _row_multiplier(v[2], rows + 2, row_amax, shared, R, MODE, MAX, FLOOR, ROUND)
    m3 = _row_multiplier(v[3], rows + 3, row_amax, shared, R, MODE, MAX, FLOOR, ROUND)
    by_col = shared
    if MODE == 2:
        by_col = _multiplier(tl.load(col_amax + cols, mask=cols_there, other=0), MAX, FLOOR)
    elif MODE == 3:
        by_col = _multiplier(tl.max(_bits(_largest(v)), 0), MAX, FLOOR)
    turned = (
        _row(v[0], m0, by_col, rows, cols, cols_there, out, other, R, C, MODE, OTHER, TURNED, MAX, WIDE_RANGE, ROUND),
        _row(v[1], m1, by_col, rows + 1, cols, cols_there, out, other, R, C, MODE, OTHER, TURNED, MAX, WIDE_RANGE, ROUND),
        _row(v[2], m2, by_col, rows + 2, cols, cols_there, out, other, R, C, MODE, OTHER, TURNED, MAX, WIDE_RANGE, ROUND),
        _row(v[3], m3, by_col, rows + 3, cols, cols_there, out, other, R, C, MODE, OTHER, TURNED, MAX, WIDE_RANGE, ROUND),
    )
    if OTHER and TURNED:
        words = _word(turned, MAX, WIDE_RANGE, ROUND)
        fours = down * words.shape[0] + tl.arange(0, words.shape[0])  # rows // 4, but known to be consecutive
        tl.store(other + cols.to(tl.int64)[:, None] * (R // 4) + fours[None, :], words.T, mask=cols_there[:, None] & (fours < R // 4)[None, :])
    if MODE == 0 or MODE == 1:
        if (down == 0) & (along == 0):
            tl.store(row_scales, _inverse(shared))
    elif MODE == 4:
        tl.store(row_scales + down * tl.cdiv(C, 128) + along, _inverse(shared))
    else:
        m = tl.reshape(tl.join(tl.join(m0, m2), tl.join(m1, m3)), (4 * m0.shape[0],))  # of all rows, in their order
        each = down * m.shape[0] + tl.arange(0, m.shape[0])
        if MODE == 2:
            tl.store(row_scales + each, _inverse(m), mask=(each < R) & (along == 0))
            tl.store(col_scales + cols, _inverse(by_col), mask=cols_there & (down == 0))
        else:
            tl.store(row_scales + along.to(tl.int64) * R + each, _inverse(m), mask=each < R)
            tl.store(col_scales + down.to(tl.int64) * C + cols, _inverse(by_col), mask=cols_there)


@triton.jit
def _cast(x, row_amax, col_amax, out, other, row_scales, col_scales, counts, R, C, MODE: tl.constexpr,
          OTHER: tl.constexpr, TURNED: tl.constexpr, NOTE: tl.constexpr, MAX: tl.constexpr, LEAST: tl.constexpr, WIDE_RANGE: tl.constexpr,
          ROUND: tl.constexpr, FLOOR: tl.constexpr, EVERY: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Of x (R, C)."""
    counting, down, along, rows, cols = _place(R, C, NOTE, EVERY, ROWS, COLS)
    v = _read(x, rows, cols, C, R, C)
    _emit(v, counting, down, along, rows, cols, cols < C, row_amax, col_amax, out, other, row_scales, col_scales, counts, R, C, MODE, OTHER, TURNED,
          NOTE, MAX, LEAST, WIDE_RANGE, ROUND, FLOOR, SLOTS)  # fmt: skip


@triton.jit
def _rounded(v, x, INTERPRETED: tl.constexpr):
    """v (fp32) rounded to the dtype of x, to the nearest. Written out for bf16: Triton's way there takes a slow instruction for each number, and
    its interpreter's only cuts bits off."""
    if x.dtype.element_ty != tl.bfloat16:
        return v.to(x.dtype.element_ty).to(tl.float32)
    elif INTERPRETED:
        bits = v.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & (-1 << 16)).to(tl.float32, bitcast=True)
        return tl.where(tl.abs(v) < float("inf"), nearest, v)
    else:
        return tl.inline_asm_elementwise(
            "{.reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000;}",
            "=f,=f,f,f", [v], dtype=tl.float32, is_pure=True, pack=2)  # fmt: skip


@triton.jit
def _gated(gate, up, x, INTERPRETED: tl.constexpr):
    gate, up = clamped(gate, up, 0.0, 0.0, False)
    return _rounded(gated(gate, up, 1.0), x, INTERPRETED)


@triton.jit
def _cast_gated(x, row_amax, col_amax, out, other, row_scales, col_scales, counts, R, C, MODE: tl.constexpr,
                OTHER: tl.constexpr, TURNED: tl.constexpr, NOTE: tl.constexpr, MAX: tl.constexpr, LEAST: tl.constexpr,
                WIDE_RANGE: tl.constexpr, ROUND: tl.constexpr, FLOOR: tl.constexpr, EVERY: tl.constexpr, SLOTS: tl.constexpr,
                ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Of silu(gate) up (R, C), of x = [gate, up] (R, 2C), rounded to x's dtype as if it were in memory."""
    counting, down, along, rows, cols = _place(R, C, NOTE, EVERY, ROWS, COLS)
    g, u = _read(x, rows, cols, 2 * C, R, C), _read(x + C, rows, cols, 2 * C, R, C)
    v = (_gated(g[0], u[0], x, ROUND), _gated(g[1], u[1], x, ROUND), _gated(g[2], u[2], x, ROUND), _gated(g[3], u[3], x, ROUND))
    _emit(v, counting, down, along, rows, cols, cols < C, row_amax, col_amax, out, other, row_scales, col_scales, counts, R, C, MODE, OTHER, TURNED,
          NOTE, MAX, LEAST, WIDE_RANGE, ROUND, FLOOR, SLOTS)  # fmt: skip


@triton.jit
def _slopes(d, gate, up, x, INTERPRETED: tl.constexpr):
    gate, up = clamped(gate, up, 0.0, 0.0, False)
    dgate, dup = gated_slopes(d, gate, up, sigmoid(gate, 1.0), gate, up, 1.0, 0.0, False)
    return _rounded(dgate, x, INTERPRETED), _rounded(dup, x, INTERPRETED)


@triton.jit
def _cast_gated_grad(dy, x, row_amax, col_amax, out, other, row_scales, col_scales, counts, R, C, MODE: tl.constexpr,
                     OTHER: tl.constexpr, TURNED: tl.constexpr, NOTE: tl.constexpr, MAX: tl.constexpr, LEAST: tl.constexpr,
                     WIDE_RANGE: tl.constexpr, ROUND: tl.constexpr, FLOOR: tl.constexpr, EVERY: tl.constexpr, SLOTS: tl.constexpr,
                     ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Of the gradient (R, 2C) of x = [gate, up] from dy (R, C), rounded likewise. Of BLOCKS, C is whole blocks."""
    counting, down, along, rows, cols = _place(R, C, NOTE, EVERY, ROWS, COLS)
    d = _read(dy, rows, cols, C, R, C)
    g, u = _read(x, rows, cols, 2 * C, R, C), _read(x + C, rows, cols, 2 * C, R, C)
    dg0, du0 = _slopes(d[0], g[0], u[0], x, ROUND)
    dg1, du1 = _slopes(d[1], g[1], u[1], x, ROUND)
    dg2, du2 = _slopes(d[2], g[2], u[2], x, ROUND)
    dg3, du3 = _slopes(d[3], g[3], u[3], x, ROUND)
    _emit((dg0, dg1, dg2, dg3), counting, down, along, rows, cols, cols < C, row_amax, col_amax, out, other, row_scales, col_scales, counts, R, 2 * C,
          MODE, OTHER, TURNED, NOTE, MAX, LEAST, WIDE_RANGE, ROUND, FLOOR, SLOTS)  # fmt: skip
    along += tl.cdiv(C, COLS)
    _emit((du0, du1, du2, du3), counting, down, along, rows, C + cols, cols < C, row_amax, col_amax, out, other, row_scales, col_scales, counts, R,
          2 * C, MODE, OTHER, TURNED, NOTE, MAX, LEAST, WIDE_RANGE, ROUND, FLOOR, SLOTS)  # fmt: skip


@triton.jit
def _normed(x, scale, w, rows, cols, R, C, INTERPRETED: tl.constexpr):
    v = _read_rows(x, rows, cols, C, R, C) * tl.load(scale + rows, mask=rows < R, other=0.0)[:, None]
    return _rounded(_rounded(v, x, INTERPRETED) * w, x, INTERPRETED)


@triton.jit
def _cast_normed(x, scale, weight, row_amax, col_amax, out, other, row_scales, col_scales, counts, R, C, MODE: tl.constexpr,
                OTHER: tl.constexpr, TURNED: tl.constexpr, NOTE: tl.constexpr, MAX: tl.constexpr, LEAST: tl.constexpr,
                WIDE_RANGE: tl.constexpr, ROUND: tl.constexpr, FLOOR: tl.constexpr, EVERY: tl.constexpr, SLOTS: tl.constexpr,
                ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Of RMSNorm's output (R, C), from x, the scale of each row (fp32) and the weight (C,), rounded as kernels.norm does."""
    counting, down, along, rows, cols = _place(R, C, NOTE, EVERY, ROWS, COLS)
    w = tl.load(weight + cols, mask=cols < C, other=0.0).to(tl.float32)[None, :]
    v = (
        _normed(x, scale, w, rows, cols, R, C, ROUND),
        _normed(x, scale, w, rows + 1, cols, R, C, ROUND),
        _normed(x, scale, w, rows + 2, cols, R, C, ROUND),
        _normed(x, scale, w, rows + 3, cols, R, C, ROUND),
    )
    _emit(v, counting, down, along, rows, cols, cols < C, row_amax, col_amax, out, other, row_scales, col_scales, counts, R, C, MODE, OTHER, TURNED,
          NOTE, MAX, LEAST, WIDE_RANGE, ROUND, FLOOR, SLOTS)  # fmt: skip


@triton.jit
def _turned_back(x, cos, sin, rows, i, length, s_seq, s_tok, R, turned, ROTATE: tl.constexpr, K: tl.constexpr, INTERPRETED: tl.constexpr):
    """Features i of tokens `rows` of one head, turned back if `turned` and ROTATE. Products of two bf16 numbers are exact in fp32."""
    there = (rows < R)[:, None]
    at = (rows // length).to(tl.int64) * s_seq + (rows % length).to(tl.int64) * s_tok
    v = tl.load(x + at[:, None] + i[None, :], mask=there, other=0.0).to(tl.float32)
    if ROTATE:
        if turned:
            pair = tl.load(x + at[:, None] + ((i + K // 2) % K)[None, :], mask=there, other=0.0).to(tl.float32)
            angle = rows[:, None] * (K // 2) + (i % (K // 2))[None, :]
            c = tl.load(cos + angle, mask=there, other=0.0).to(tl.float32)
            s = tl.load(sin + angle, mask=there, other=0.0).to(tl.float32)
            v = _rounded(v * c + tl.where(i < K // 2, 1.0, -1.0)[None, :] * (pair * s), x, INTERPRETED)
    return v


@triton.jit
def _cast_rope_grad(q, k, v, cos, sin, length, q_seq, q_head, q_tok, k_seq, k_head, k_tok, v_seq, v_head, v_tok, row_amax, col_amax, out, other,
                    row_scales, col_scales, counts, R, C, Q: tl.constexpr, KV: tl.constexpr, ROTATE: tl.constexpr, MODE: tl.constexpr,
                    OTHER: tl.constexpr, TURNED: tl.constexpr, NOTE: tl.constexpr, MAX: tl.constexpr, LEAST: tl.constexpr,
                    WIDE_RANGE: tl.constexpr, ROUND: tl.constexpr, FLOOR: tl.constexpr, EVERY: tl.constexpr, SLOTS: tl.constexpr,
                    ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Of the gradient of the packed qkv (R, C) from those of q, k and v wherever they lie: a tile is of one head."""
    counting, down, along, rows, cols = _place(R, C, NOTE, EVERY, ROWS, COLS)
    i, none, head, turned = tl.arange(0, COLS), tl.zeros((), tl.int64), along.to(tl.int64), along < Q + KV
    if along < Q:
        x, s_seq, s_tok = q + head * q_head, none + q_seq, none + q_tok
    elif along < Q + KV:
        x, s_seq, s_tok = k + (head - Q) * k_head, none + k_seq, none + k_tok
    else:
        x, s_seq, s_tok = v + (head - Q - KV) * v_head, none + v_seq, none + v_tok
    d = (
        _turned_back(x, cos, sin, rows, i, length, s_seq, s_tok, R, turned, ROTATE, COLS, ROUND),
        _turned_back(x, cos, sin, rows + 1, i, length, s_seq, s_tok, R, turned, ROTATE, COLS, ROUND),
        _turned_back(x, cos, sin, rows + 2, i, length, s_seq, s_tok, R, turned, ROTATE, COLS, ROUND),
        _turned_back(x, cos, sin, rows + 3, i, length, s_seq, s_tok, R, turned, ROTATE, COLS, ROUND),
    )
    _emit(d, counting, down, along, rows, cols, cols < C, row_amax, col_amax, out, other, row_scales, col_scales, counts, R, C, MODE, OTHER, TURNED,
          NOTE, MAX, LEAST, WIDE_RANGE, ROUND, FLOOR, SLOTS)  # fmt: skip


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


def takes(x: Source, block: tuple[int, int]) -> bool:
    """Whether x can be cast as it is made: no tile, and no block of columns, is of gate and of up or of two heads."""
    if isinstance(x, GatedGrad):
        return block[1] < 2 or x.dy.shape[1] % block[1] == 0
    if isinstance(x, RopeGrad):
        width = x.dq.shape[-1]
        return width >= 16 and width == triton.next_power_of_2(width) and (block[1] < 2 or width == block[1])
    return True


def tiles_of(x: Source, mode: int) -> Tiles:
    """The best of benchmarks/low_ops.py --only casts --sweep on an H200. Blocks ask for a tile of their size, heads for one of
    their width. More lines for amaxes of columns: fewer atomics."""
    if mode in (BLOCKS, SQUARES):
        return Tiles(TILE, TILE, 16)
    columns = x.dq.shape[-1] if isinstance(x, RopeGrad) else TILE
    if isinstance(x, GatedGrad) or mode in (LARGEST, LARGEST_LINES):
        return Tiles(64, columns, 8)
    return Tiles(32, columns, 4)


def _kernel_of(x: Source) -> tuple[Any, tuple[Any, ...], tuple[int, int], dict[str, Any]]:
    """The kernel, what it reads, rows and columns that its tiles cover, constants."""
    if isinstance(x, GatedGrad):
        return _cast_gated_grad, (x.dy.contiguous(), x.x.contiguous()), (x.dy.shape[0], x.dy.shape[1]), {}
    if isinstance(x, Gated):
        return _cast_gated, (x.x.contiguous(),), x.shape, {}
    if isinstance(x, Normed):
        return _cast_normed, (x.x, x.scale, x.weight), x.shape, {}
    if isinstance(x, RopeGrad):
        parts = [t if t.stride(-1) == 1 else t.contiguous() for t in (x.dq, x.dk, x.dv)]
        cos, sin = x.table or (parts[0], parts[0])
        strides = [t.stride(d) for t in parts for d in (0, 1, 2)]
        heads = dict(Q=x.dq.shape[1], KV=x.dk.shape[1], ROTATE=x.table is not None)
        return _cast_rope_grad, (*parts, cos, sin, x.dq.shape[2], *strides), x.shape, heads
    return _cast, (x.contiguous(),), (x.shape[0], x.shape[1]), {}


def _launch(x: Source, mode: int, first: Tensor | None, second: Tensor | None, out: Tensor | None = None, other: Tensor | None = None,
            scales: tuple[Tensor | None, Tensor | None] = (None, None), counts: Tensor | None = None, turn: bool = False,
            format: Format | None = None, tiles: Tiles | None = None) -> None:  # fmt: skip
    """One of the kernels above over all of x."""
    kernel, sources, (rows, columns), more = _kernel_of(x)
    t = tiles or tiles_of(x, mode)
    across, down = triton.cdiv(columns, t.columns), triton.cdiv(rows, t.rows)
    every = min(SAMPLED, across) if rows * columns >= LARGE else 1
    wide = format is not None and format.dtype == torch.float8_e5m2
    counting = 0 if counts is None else down * triton.cdiv(across, every)
    kernel[(down * across + counting,)](
        *sources, first, second, out, other, *scales, counts, rows, columns, MODE=mode, OTHER=other is not None, TURNED=turn,
        NOTE=counts is not None, MAX=448.0 if format is None else format.max, LEAST=2.0**-17 if wide else 2.0**-10, WIDE_RANGE=wide,
        ROUND=x.device.type != "cuda", FLOOR=FLOOR, EVERY=every, SLOTS=SLOTS, ROWS=t.rows, COLS=t.columns, num_warps=t.warps, **more,
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
    if turn and rows % 4:
        raise ValueError(f"{rows} rows: codes of the transposed matrix are written in words of four")
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
    written = other.view(torch.int32) if turn and other is not None else other
    _launch(x, mode, first, second, out, written, (row_scales, col_scales), counts, turn, format, tiles)
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

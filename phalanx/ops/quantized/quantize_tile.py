"""How a program casts a tile to FP8: amaxes, multipliers, quantized values as the tile lies and transposed, counts of
losses.

The kernels of whole matrices (quantize_kernel.py) and of rows sorted by expert (quantize_grouped_kernel.py) decide
which tile of what it is; ops/quantized/recipes.py defines the numbers.

A program reads its tile as four: the first consists of every fourth row, the second of the rows after those, and so on.
So a thread has four values that are neighbours in the transposed matrix, casts them into one word and transposes words.
That takes half the instructions of transposing bytes, and these kernels are bound by instructions more than by memory.
A tile lies inside one block of 128 or holds parts of whole rows. Largest values are compared as the bits of |x| in
int32: the order of programs changes nothing, and NaN is above all numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.ops.quantized.recipes import FLOOR, SLOTS

if TYPE_CHECKING:
    from phalanx.ops.quantized.recipes import Format

LARGE, SAMPLED = 2**23, 64  # for larger tensors, losses are counted in one of so many tiles of a row of tiles
_WHOLE, _GIVEN, _LINES, _BLOCKS, _SQUARES, _LARGEST, _LARGEST_LINES = (
    tl.constexpr(mode) for mode in range(7)
)  # those of casts.py, for kernels


NOTHING = (None,) * 6  # of a cast that only finds one amax: amaxes of columns, codes twice, scales twice, counts


@dataclass(frozen=True)
class CastTiles:
    """The tile of a program: rows, columns (of gate and up each), and warps. 32 values a thread are four 16-byte reads
    of bf16."""

    rows: int
    columns: int
    warps: int


@dataclass(frozen=True)
class CastConstants:
    """Compile-time constants of the kernels that cast tiles.

    mode        how scales are shared, one of the modes above
    note        whether amaxes and losses are counted; every: of large tensors, in every so-many-th tile of a row
    rows        of a tile; columns
    largest     number of the format; least: numbers up to it round to zero; wide_range: E5M2
    round       whether to round explicitly, for the interpreter
    other       whether there is a second output, with scales shared along columns; transposed: it is (C, R)
    per_expert  with WHOLE: each expert has an amax of its own
    """

    mode: int
    note: bool
    every: int
    rows: int
    columns: int
    largest: float
    least: float
    wide_range: bool
    round: bool
    other: bool = True
    transposed: bool = True
    per_expert: int = 0
    floor: float = FLOOR
    slots: int = SLOTS


def format_constants(format: Format | None, x: Tensor | Any) -> dict[str, Any]:
    """Constants of kernels that cast x to a format; None: E4M3. ROUND: in the interpreter, whose casts differ from the
    hardware's."""
    wide = format is not None and format.dtype == torch.float8_e5m2
    return dict(
        MAX=448.0 if format is None else format.max,
        LEAST=2.0**-17 if wide else 2.0**-10,
        WIDE_RANGE=wide,
        ROUND=x.device.type != "cuda",
        SLOTS=SLOTS,
    )


def plan(
    x: Any, size: tuple[int, int], mode: int, format: Format | None, counts: Tensor | None, t: CastTiles
) -> tuple[int, CastConstants]:
    """(programs that cast tiles t of x, and programs that only count losses; constants of their kernel). Tiles cover
    `size`, rows and columns."""
    across, down = triton.cdiv(size[1], t.columns), triton.cdiv(size[0], t.rows)
    every = min(SAMPLED, across) if x.shape[0] * size[1] >= LARGE else 1
    counting = 0 if counts is None else down * triton.cdiv(across, every)
    made = format_constants(format, x)
    casts = (made["MAX"], made["LEAST"], made["WIDE_RANGE"], made["ROUND"])
    return down * across + counting, CastConstants(mode, counts is not None, every, t.rows, t.columns, *casts)


@triton.jit
def abs_bits(x):
    """The bits of |x|, int32."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def place(R, C, HOW: tl.constexpr):
    """(whether this program only counts, its tile's number down and along, every fourth of its rows, its columns).
    Programs beyond those of all tiles count losses, in every `every`-th tile of a row of tiles, shifted by one from row
    to row. This takes no registers from the programs that cast."""
    ROWS: tl.constexpr = HOW.rows
    COLS: tl.constexpr = HOW.columns
    EVERY: tl.constexpr = HOW.every
    across = tl.cdiv(C, COLS)
    more = tl.program_id(0) - across * tl.cdiv(R, ROWS)
    down = tl.program_id(0) // across
    along = tl.program_id(0) % across
    if HOW.note:
        if more >= 0:
            down = more // tl.cdiv(across, EVERY)
            along = more % tl.cdiv(across, EVERY) * EVERY + (EVERY - down % EVERY) % EVERY
    return more >= 0, down, along, down * ROWS + 4 * tl.arange(0, ROWS // 4), along * COLS + tl.arange(0, COLS)


@triton.jit
def read_four(x, rows, cols, stride, R, C):
    """Four tiles in fp32: rows `rows`, the rows after those, and so on."""
    return (
        read_rows(x, rows, cols, stride, R, C),
        read_rows(x, rows + 1, cols, stride, R, C),
        read_rows(x, rows + 2, cols, stride, R, C),
        read_rows(x, rows + 3, cols, stride, R, C),
    )


@triton.jit
def read_rows(x, rows, cols, stride, R, C):
    """Rows `rows` before R and columns `cols` before C of x, in fp32; zeros outside."""
    mask = (rows < R)[:, None] & (cols < C)[None, :]
    return tl.load(x + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def multiplier_of(bits, MAX: tl.constexpr, FLOOR: tl.constexpr):
    """As recipes.multipliers."""
    amax = bits.to(tl.float32, bitcast=True)
    return tl.div_rn(MAX + tl.zeros_like(amax), tl.where(amax < FLOOR, FLOOR, amax))


@triton.jit
def scales_of(bits, MAX: tl.constexpr, FLOOR: tl.constexpr, ROUND: tl.constexpr):
    """`multiplier_of` and its `reciprocal`, for many numbers. A division takes a function call and its registers, and
    every thread needs the scales of its rows and columns. Newton steps from the hardware's 1 / x and from amax / MAX
    end at the same bits for every fp32 amax, even if 1 / x is wrong by up to two units in the last place. Multiplying
    by powers of two keeps 1 / x a normal number."""
    if ROUND:
        m = multiplier_of(bits, MAX, FLOOR)
        return m, reciprocal(m)
    else:
        amax = tl.maximum(bits.to(tl.float32, bitcast=True), FLOOR, propagate_nan=tl.PropagateNan.ALL)
        part, top = amax * 0.0625, MAX * 0.0625  # signs are chosen so that none needs an instruction to flip
        y = tl.inline_asm_elementwise(
            "{.reg .f32 x; neg.f32 x, $1; rcp.approx.ftz.f32 $0, x;}",
            "=f,f",
            [part],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        y = tl.fma(tl.fma(part, y, 1.0), y, y)
        m = y * top
        m = tl.fma(tl.fma(part, m, top), y, m)
        scale = amax * (1.0 / MAX)
        scale = tl.fma(tl.fma(m, scale, 1.0), scale, scale)
        scale = tl.fma(tl.fma(m, scale, 1.0), scale, scale)
        return tl.where(amax == float("inf"), 0.0, tl.abs(m)), tl.where(amax == float("inf"), amax, scale)


@triton.jit
def reciprocal(m):
    """1 / m, rounded to the nearest."""
    return tl.div_rn(tl.zeros_like(m) + 1.0, m)


@triton.jit
def _code(v, MAX: tl.constexpr, WIDE_RANGE: tl.constexpr, ROUND: tl.constexpr, OWN: tl.constexpr = False):
    """As recipes.cast, up to the cast itself, which saturates on a GPU. WIDE_RANGE: E5M2. ROUND: round to the format's
    numbers, for the interpreter, whose cast neither rounds to the nearest nor saturates. OWN: v was multiplied by a
    scale from its own amax, so none is infinite: inf * 0 is NaN."""
    if ROUND:
        finite = tl.abs(v) < float("inf")
        v = tl.minimum(tl.maximum(v, -MAX), MAX)
        drop: tl.constexpr = 21 if WIDE_RANGE else 20
        least: tl.constexpr = 2.0**-14 if WIDE_RANGE else 2.0**-6  # the smallest normal number
        magic: tl.constexpr = 1.5 * (2.0**7 if WIDE_RANGE else 2.0**14)
        bits = v.to(tl.int32, bitcast=True)
        full = ((bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)) & (-1 << drop)).to(tl.float32, bitcast=True)
        small = (((tl.abs(v) + magic) - magic).to(tl.int32, bitcast=True) | (bits & (-1 << 31))).to(
            tl.float32, bitcast=True
        )
        return tl.where(finite, tl.where(tl.abs(v) < least, small, full), float("nan"))
    elif OWN:
        return v
    else:
        return tl.fma(v, 0.0, v)  # v, or NaN where v is not finite


@triton.jit
def store_quantized(
    v,
    where,
    stride,
    rows,
    cols,
    mask,
    MAX: tl.constexpr,
    WIDE_RANGE: tl.constexpr,
    ROUND: tl.constexpr,
    TRANSPOSED: tl.constexpr = False,
    OWN: tl.constexpr = False,
):
    """Store quantized v at `rows` and `cols` of `where`. TRANSPOSED: at columns `rows`. OWN: as in `_code`."""
    quantized = _code(v, MAX, WIDE_RANGE, ROUND, OWN).to(where.dtype.element_ty)
    if ROUND:  # the interpreter does not cast NaN either
        quantized = (
            tl.where(tl.abs(v) < float("inf"), quantized.to(tl.uint8, bitcast=True), 0x7F)
            .to(tl.uint8)
            .to(where.dtype.element_ty, bitcast=True)
        )
    if TRANSPOSED:
        tl.store(where + cols.to(tl.int64)[:, None] * stride + rows[None, :], quantized.T, mask=mask.T)
    else:
        tl.store(where + rows.to(tl.int64)[:, None] * stride + cols[None, :], quantized, mask=mask)


@triton.jit
def note_largest(largest, counts, SLOTS: tl.constexpr):
    """Raise the amax in this program's slot to at least `largest`, given as bits."""
    tl.atomic_max(counts + tl.program_id(0) % SLOTS * 4 + 3, largest.to(tl.int64), sem="relaxed")


@triton.jit
def count_losses(v, scaled, mask, counts, SLOTS: tl.constexpr, MAX: tl.constexpr, LEAST: tl.constexpr):
    """Count values that became zero, values that were clamped, and all values."""
    place = counts + tl.program_id(0) % SLOTS * 4
    size = tl.abs(scaled)
    tl.atomic_add(place, tl.sum(((size <= LEAST) & (v != 0.0) & mask).to(tl.int32)).to(tl.int64), sem="relaxed")
    tl.atomic_add(place + 1, tl.sum(((size > MAX * (1 + 2.0**-20)) & mask).to(tl.int32)).to(tl.int64), sem="relaxed")
    tl.atomic_add(place + 2, tl.sum(mask.to(tl.int32)).to(tl.int64), sem="relaxed")


@triton.jit
def largest_of_four(v):
    """The elementwise maximum of |v| over four tiles; NaN if one is NaN."""
    first = tl.maximum(tl.abs(v[0]), tl.abs(v[1]), propagate_nan=tl.PropagateNan.ALL)
    second = tl.maximum(tl.abs(v[2]), tl.abs(v[3]), propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _packed(v, MAX: tl.constexpr, WIDE_RANGE: tl.constexpr, ROUND: tl.constexpr, OWN: tl.constexpr):
    """Quantized values of four tiles, those of four rows of a column in one word, as they are adjacent in the
    transposed matrix."""
    if ROUND:
        word = _byte(v[0], MAX, WIDE_RANGE) | (_byte(v[1], MAX, WIDE_RANGE) << 8)
        return word | (_byte(v[2], MAX, WIDE_RANGE) << 16) | (_byte(v[3], MAX, WIDE_RANGE) << 24)
    else:
        a, b = _code(v[0], MAX, WIDE_RANGE, False, OWN), _code(v[1], MAX, WIDE_RANGE, False, OWN)
        c, d = _code(v[2], MAX, WIDE_RANGE, False, OWN), _code(v[3], MAX, WIDE_RANGE, False, OWN)
        if WIDE_RANGE:
            return tl.inline_asm_elementwise(
                "{.reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; cvt.rn.satfinite.e5m2x2.f32 "
                "high, $4, $3; mov.b32 $0, {low, high};}",
                "=r,f,f,f,f",
                [a, b, c, d],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
        else:
            return tl.inline_asm_elementwise(
                "{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 "
                "high, $4, $3; mov.b32 $0, {low, high};}",
                "=r,f,f,f,f",
                [a, b, c, d],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )


@triton.jit
def _byte(v, MAX: tl.constexpr, WIDE_RANGE: tl.constexpr):
    """The quantized value of v as a byte, for the interpreter."""
    code = _code(v, MAX, WIDE_RANGE, True).to(tl.float8e5 if WIDE_RANGE else tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(tl.abs(v) < float("inf"), code, 0x7F).to(tl.int32)


@triton.jit
def _shared_multiplier(v, row_amax, HOW: tl.constexpr):
    """The multiplier of the whole tile in modes where there is only one; otherwise 1."""
    if HOW.mode == _WHOLE:
        return multiplier_of(tl.load(row_amax), HOW.largest, HOW.floor)
    elif HOW.mode == _GIVEN:
        return tl.load(row_amax)
    elif HOW.mode == _SQUARES:
        return multiplier_of(tl.max(abs_bits(largest_of_four(v))), HOW.largest, HOW.floor)
    else:
        return 1.0


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest_along(v, axis: tl.constexpr, ROUND: tl.constexpr):
    """The bits of the largest |v| along an axis. Compared as floats, |v| costs no instruction; in the interpreter, bits
    are faster."""
    if ROUND:
        return tl.max(abs_bits(v), axis)
    else:
        return abs_bits(tl.reduce(tl.abs(v), axis, _larger))


@triton.jit
def _row_bits(v, rows, row_amax, R, HOW: tl.constexpr):
    """Bits of the amaxes from which the scales of a tile's rows are computed, (rows,); none in modes with one shared
    scale."""
    if HOW.mode == _LINES:
        return tl.load(row_amax + rows, mask=rows < R, other=0)
    elif HOW.mode == _BLOCKS:
        return _largest_along(v, 1, HOW.round)
    else:
        return 0


@triton.jit
def _column_bits(v, cols, there, col_amax, HOW: tl.constexpr):
    """The same for columns, over four tiles."""
    if HOW.mode == _LINES:
        return tl.load(col_amax + cols, mask=there, other=0)
    elif HOW.mode == _BLOCKS:
        return _largest_along(largest_of_four(v), 0, HOW.round)
    else:
        return 0


@triton.jit
def _scales(bits, shared, HOW: tl.constexpr):
    """Multipliers and scales of lines whose amaxes have these bits; or `shared`, twice."""
    if HOW.mode == _LINES or HOW.mode == _BLOCKS:
        return scales_of(bits, HOW.largest, HOW.floor, HOW.round)
    else:
        return shared, shared


@triton.jit
def note_amaxes(v, rows, R, cols, there, row_amax, col_amax, HOW: tl.constexpr):
    """LARGEST: raise the bits at row_amax to at least those of the tile's largest |v|. LARGEST_LINES: the same for its
    rows and columns."""
    if HOW.mode == _LARGEST:
        tl.atomic_max(row_amax, tl.max(abs_bits(largest_of_four(v))), sem="relaxed")
    else:
        for i in tl.static_range(4):
            tl.atomic_max(row_amax + rows + i, tl.max(abs_bits(v[i]), 1), mask=rows + i < R, sem="relaxed")
        tl.atomic_max(col_amax + cols, tl.max(abs_bits(largest_of_four(v)), 0), mask=there, sem="relaxed")


@triton.jit
def note_tile(v, first, row_amax, counts, HOW: tl.constexpr):
    """Record the tile's amax or, with WHOLE, the tensor's if this program is the `first`."""
    if HOW.mode != _WHOLE:
        note_largest(tl.max(abs_bits(largest_of_four(v))), counts, HOW.slots)
    elif first:
        note_largest(tl.load(row_amax), counts, HOW.slots)


@triton.jit
def count_losses_of_four(
    v,
    rows,
    R,
    there,
    row_amax,
    counts,
    HOW: tl.constexpr,
):
    shared = _shared_multiplier(v, row_amax, HOW)
    for i in tl.static_range(4):
        m, _ = _scales(_row_bits(v[i], rows + i, row_amax, R, HOW), shared, HOW)
        scaled = v[i] * (m[:, None] if HOW.mode == _LINES or HOW.mode == _BLOCKS else m)
        count_losses(v[i], scaled, (rows + i < R)[:, None] & there[None, :], counts, HOW.slots, HOW.largest, HOW.least)


@triton.jit
def _write_rows(
    v,
    m,
    by_col,
    rows,
    R,
    cols,
    there,
    out,
    other,
    C,
    HOW: tl.constexpr,
):
    """Store the quantized values of a tile with rows `rows` of (R, C), multiplied by m. Returns the values from which
    the transposed ones are cast: multiplied by by_col."""
    mask, own = (rows < R)[:, None] & there[None, :], HOW.mode != _GIVEN
    if HOW.mode == _LINES or HOW.mode == _BLOCKS:
        store_quantized(v * m[:, None], out, C, rows, cols, mask, HOW.largest, HOW.wide_range, HOW.round, OWN=own)
        scaled = v * by_col[None, :]
        if HOW.other and not HOW.transposed:
            store_quantized(scaled, other, C, rows, cols, mask, HOW.largest, HOW.wide_range, HOW.round, OWN=own)
    else:
        scaled = v * m
        store_quantized(scaled, out, C, rows, cols, mask, HOW.largest, HOW.wide_range, HOW.round, OWN=own)
    return scaled


@triton.jit
def write_quantized(
    v,
    down,
    rows,
    R,
    cols,
    there,
    to,
    C,
    P,
    HOW: tl.constexpr,
):
    """out (.., C): quantized v, four tiles, of `rows` before R, with scales shared along a row (or the whole tensor).
    other: with scales shared along a column: (.., C) or, if TRANSPOSED, (C, P) as words of four values, of which this
    is tile `down`; P is a multiple of four. Amaxes are given as bits, with GIVEN a multiplier. Returns the scales of
    the tile's rows, in order, and of its columns; in modes where all share one, the multiplier twice.

    Values stored in both orders are cast twice, each time together with their neighbours. Casting once and regrouping
    the bytes takes three times the instructions, and ptxas 12.8 compiled it for sm_90 into code that read registers
    before they were set.
    """
    row_amax, col_amax, out, other, _, _, _ = to
    shared = _shared_multiplier(v, row_amax, HOW)
    m0, s0 = _scales(_row_bits(v[0], rows, row_amax, R, HOW), shared, HOW)
    m1, s1 = _scales(_row_bits(v[1], rows + 1, row_amax, R, HOW), shared, HOW)
    m2, s2 = _scales(_row_bits(v[2], rows + 2, row_amax, R, HOW), shared, HOW)
    m3, s3 = _scales(_row_bits(v[3], rows + 3, row_amax, R, HOW), shared, HOW)
    by_col, col_scales = _scales(_column_bits(v, cols, there, col_amax, HOW), shared, HOW)
    transposed = (
        _write_rows(v[0], m0, by_col, rows, R, cols, there, out, other, C, HOW),
        _write_rows(v[1], m1, by_col, rows + 1, R, cols, there, out, other, C, HOW),
        _write_rows(v[2], m2, by_col, rows + 2, R, cols, there, out, other, C, HOW),
        _write_rows(v[3], m3, by_col, rows + 3, R, cols, there, out, other, C, HOW),
    )
    if HOW.other and HOW.transposed:
        words = _packed(transposed, HOW.largest, HOW.wide_range, HOW.round, HOW.mode != _GIVEN)
        fours = down * words.shape[0] + tl.arange(0, words.shape[0])  # rows // 4, but known to be consecutive
        tl.store(
            other + cols.to(tl.int64)[:, None] * (P // 4) + fours[None, :],
            words.T,
            mask=there[:, None] & (fours < P // 4)[None, :],
        )
    if HOW.mode == _LINES or HOW.mode == _BLOCKS:
        return tl.reshape(tl.join(tl.join(s0, s2), tl.join(s1, s3)), (4 * s0.shape[0],)), col_scales
    else:
        return shared, shared


@triton.jit
def rounded(v, x, INTERPRETED: tl.constexpr):
    """v (fp32) rounded to the nearest in the dtype of x. Written out for bf16, because Triton's conversion takes a slow
    instruction for each number, and its interpreter only truncates bits."""
    if x.dtype.element_ty != tl.bfloat16:
        return v.to(x.dtype.element_ty).to(tl.float32)
    elif INTERPRETED:
        bits = v.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & (-1 << 16)).to(tl.float32, bitcast=True)
        return tl.where(tl.abs(v) < float("inf"), nearest, v)
    else:
        return tl.inline_asm_elementwise(
            "{.reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000;}",
            "=f,=f,f,f",
            [v],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )

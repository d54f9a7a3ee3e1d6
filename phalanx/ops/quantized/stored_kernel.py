"""Largest values and casts for any range of a flat buffer; ops/quantized/stored.py defines them.

Elements are processed in groups of 64 that lie in one scaling block each: shards of buckets, and parameters in them,
begin at multiples of 64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.quantized.quantize_kernel import transposed
from phalanx.ops.quantized.quantize_tile import abs_bits, count_losses, format_constants, store_quantized

if TYPE_CHECKING:
    from phalanx.ops.quantized.recipes import Format
    from phalanx.ops.quantized.scale_blocks import Blocks

GROUP = 64
GROUPS, WARPS = 64, 8  # groups that a program handles, and its warps
LARGE, SAMPLED = 1024, 16  # with more programs than LARGE, losses are counted in one of SAMPLED


@triton.jit
def _blocks_of(at, columns, high, wide, across, LINES: tl.constexpr):
    """The block of group number `at` of a matrix, with all sizes in groups: `columns` of a row, `wide` of a block's
    row, `across` blocks in a row, `high` rows of a block; with LINES, where blocks are whole rows, `high` groups of a
    block."""
    if LINES:
        return at // high
    else:
        return at // columns // high * across + at % columns // wide


@triton.jit
def _values(x, i, n, DTYPE: tl.constexpr):
    """Elements i in fp32, rounded to DTYPE; zeros past n. Rounding to bf16 is written out, because the interpreter's
    cast does not round to the nearest."""
    v = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
    if DTYPE == tl.bfloat16:
        bits = v.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        return tl.where(v == v, rounded, v)
    else:
        return v.to(DTYPE).to(tl.float32)


@triton.jit
def _largest(
    x,
    bits,
    first,
    n,
    columns,
    high,
    wide,
    across,
    LINES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """first: position of x in its matrix, in groups; n: elements of x."""
    groups = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    i = groups.to(tl.int64)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    _note(
        _values(x, i, n, DTYPE),
        bits,
        _blocks_of(first + groups, columns, high, wide, across, LINES),
        groups < n // GROUP,
    )


@triton.jit
def _note(v, bits, blocks, there):
    """Raise the bits of each group's block to at least those of its largest |v|; in one operation where all groups lie
    in one block."""
    found = tl.max(abs_bits(v), 1)
    one = tl.min(tl.where(there, blocks, 2147483647), 0)
    if one == tl.max(tl.where(there, blocks, 0), 0):
        tl.atomic_max(bits + one, tl.max(found, 0), sem="relaxed")
    else:
        tl.atomic_max(bits + blocks, found, mask=there, sem="relaxed")


@triton.jit
def _cast_run(
    x,
    quantized,
    multiplier,
    counts,
    bits,
    first,
    n,
    columns,
    high,
    wide,
    across,
    LINES: tl.constexpr,
    NOTE: tl.constexpr,
    LARGEST: tl.constexpr,
    MAX: tl.constexpr,
    LEAST: tl.constexpr,
    WIDE_RANGE: tl.constexpr,
    ROUND: tl.constexpr,
    EVERY: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    groups = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    there = groups < n // GROUP
    i = groups.to(tl.int64)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    v = _values(x, i, n, DTYPE)
    blocks = _blocks_of(first + groups, columns, high, wide, across, LINES)
    m = tl.load(multiplier + blocks, mask=there, other=1.0)
    scaled = v * m[:, None]
    mask = i < n
    store_quantized(scaled, quantized, GROUP, groups, tl.arange(0, GROUP), mask, MAX, WIDE_RANGE, ROUND)
    if LARGEST:
        _note(v, bits, blocks, there)
    if NOTE:
        if tl.program_id(0) % EVERY == 0:
            count_losses(v, scaled, mask, counts, SLOTS, MAX, LEAST)


def note_largest_(bits: Tensor, x: Tensor, first: int, blocks: Blocks, dtype: torch.dtype) -> None:
    if not len(x):
        return
    sizes, lines = _sizes(first, x, blocks)
    _largest[(_programs(x),)](
        x, bits, *sizes, LINES=lines, GROUP=GROUP, GROUPS=GROUPS, DTYPE=_triton_of(dtype), num_warps=WARPS
    )


def cast_run_(
    quantized: Tensor,
    x: Tensor,
    first: int,
    blocks: Blocks,
    multiplier: Tensor,
    format: Format,
    dtype: torch.dtype,
    counts: Tensor | None,
    bits: Tensor | None,
) -> None:
    if not len(x):
        return
    programs = _programs(x)
    sizes, lines = _sizes(first, x, blocks)
    _cast_run[(programs,)](
        x,
        quantized.view(format.dtype),
        multiplier,
        counts,
        bits,
        *sizes,
        LINES=lines,
        NOTE=counts is not None,
        LARGEST=bits is not None,
        EVERY=SAMPLED if programs >= LARGE else 1,
        GROUP=GROUP,
        GROUPS=GROUPS,
        DTYPE=_triton_of(dtype),
        num_warps=WARPS,
        **format_constants(format, x),
    )


def turn_(out: Tensor, quantized: Tensor) -> None:
    transposed(quantized, out)


def _programs(x: Tensor) -> int:
    return triton.cdiv(len(x), GROUP * GROUPS)


def _sizes(first: int, x: Tensor, blocks: Blocks) -> tuple[tuple[int, ...], bool]:
    """The kernels' arguments for the range and its matrix. ValueError if a group would lie in two blocks."""
    (high, wide), columns, lines = blocks.block, blocks.columns, blocks.block[1] == blocks.columns
    whole = (high * wide) % GROUP == 0 if lines else wide % GROUP == 0 and columns % GROUP == 0
    if first % GROUP or len(x) % GROUP or not whole:
        raise ValueError(
            f"{len(x)} elements from {first} on of blocks of {high} x {wide} are no whole groups of {GROUP}"
        )
    return (
        first // GROUP,
        len(x),
        columns // GROUP,
        high * wide // GROUP if lines else high,
        wide // GROUP,
        blocks.shape[1],
    ), lines


def _triton_of(dtype: torch.dtype) -> tl.dtype:
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]

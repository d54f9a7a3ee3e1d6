"""Casts of emulated recipes: largest values of blocks, and quantized values for given multipliers of the blocks, as
ops/quantized/recipes.py and ops/quantized/rounding.py define them.

A tile is read as lines in the direction along which blocks extend: the features of a token, or the tokens of a feature,
which are first transformed (rounding.mixed) where the recipe says so. The step between the two kernels, scales from
largest values, is plain torch on one number for each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.quantized.quantize_tile import abs_bits, store_quantized
from phalanx.ops.quantized.recipes import E2M1, SLOTS, Scaled
from phalanx.ops.quantized.rounding import FACTORS, GRID

if TYPE_CHECKING:
    from phalanx.ops.quantized.recipes import Block, Format
    from phalanx.ops.quantized.rounding import Key

TILE = (32, 64)  # lines of tokens by features, or transposed for blocks along tokens; 16 values a thread
WARPS = 4


@triton.jit
def _lines(
    x, N, K, across, C, TOKENS: tl.constexpr, MIX: tl.constexpr, signs, LINES: tl.constexpr, LENGTH: tl.constexpr
):
    """This program's lines, the positions along them, which of these exist, and the values (LINES, LENGTH): features of
    tokens, or tokens of features."""
    lines = tl.program_id(0) // across * LINES + tl.arange(0, LINES)
    along = tl.program_id(0) % across * LENGTH + tl.arange(0, LENGTH)
    mask = (lines < N)[:, None] & (along < K)[None, :]
    if TOKENS:
        where = along.to(tl.int64)[None, :] * C + lines[:, None]
    else:
        where = lines.to(tl.int64)[:, None] * C + along[None, :]
    v = tl.load(x + where, mask=mask, other=0.0).to(tl.float32)
    if MIX:
        v = _mixed(v, signs, MIX, LINES, LENGTH)
    return lines, along, mask, v


@triton.jit
def _mixed(v, signs, LOG: tl.constexpr, LINES: tl.constexpr, LENGTH: tl.constexpr):
    """As rounding.mixed, along the last dim, in groups of 2**LOG."""
    SIZE: tl.constexpr = 1 << LOG
    runs: tl.constexpr = LINES * LENGTH // SIZE
    sign = (1 - 2 * ((signs >> tl.arange(0, SIZE)) & 1)).to(tl.float32)
    v = tl.reshape(v, (runs, SIZE)) * sign[None, :]
    for _ in tl.static_range(LOG):
        a, b = tl.split(tl.permute(tl.reshape(v, (runs, 2, SIZE // 2)), (0, 2, 1)))
        v = tl.reshape(tl.join(a + b, a - b), (runs, SIZE))
    return tl.reshape(v * SIZE**-0.5, (LINES, LENGTH))


@triton.jit(do_not_specialize=["signs"])
def _block_amax(
    x,
    out,
    N,
    K,
    across,
    C,
    signs,
    TOKENS: tl.constexpr,
    MIX: tl.constexpr,
    SIZE: tl.constexpr,
    LINES: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """out: the bits of the largest |x| of each block, (R, C / SIZE) or (R / SIZE, C) int32."""
    lines, along, mask, v = _lines(x, N, K, across, C, TOKENS, MIX, signs, LINES, LENGTH)
    blocks: tl.constexpr = LENGTH // SIZE
    largest = tl.max(tl.reshape(abs_bits(v), (LINES, blocks, SIZE)), 2)
    _, where, there = _of_blocks(lines, N, K, C, across, TOKENS, SIZE, LENGTH)
    tl.store(out + where, largest, mask=there)


@triton.jit
def _of_blocks(lines, N, K, C, across, TOKENS: tl.constexpr, SIZE: tl.constexpr, LENGTH: tl.constexpr):
    """The number of each block along the lines, where its value is stored, and which blocks exist."""
    block = tl.program_id(0) % across * (LENGTH // SIZE) + tl.arange(0, LENGTH // SIZE)
    if TOKENS:
        where = block.to(tl.int64)[None, :] * C + lines[:, None]
    else:
        where = lines.to(tl.int64)[:, None] * tl.cdiv(C, SIZE) + block[None, :]
    return block, where, (lines < N)[:, None] & (block < tl.cdiv(K, SIZE))[None, :]


@triton.jit(do_not_specialize=["signs", "k0", "k1"])
def _cast(
    x,
    multiplier,
    out,
    counts,
    N,
    K,
    across,
    C,
    signs,
    k0,
    k1,
    TOKENS: tl.constexpr,
    MIX: tl.constexpr,
    SIZE: tl.constexpr,
    FOUR_BITS: tl.constexpr,
    RANDOM: tl.constexpr,
    NOTE: tl.constexpr,
    MAX: tl.constexpr,
    GRID: tl.constexpr,
    F0: tl.constexpr,
    F1: tl.constexpr,
    SLOTS: tl.constexpr,
    ROUND: tl.constexpr,
    LINES: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """out (R, C): quantized values; counts: of losses, as recipes.COUNTED."""
    lines, along, mask, v = _lines(x, N, K, across, C, TOKENS, MIX, signs, LINES, LENGTH)
    _, where, there = _of_blocks(lines, N, K, C, across, TOKENS, SIZE, LENGTH)
    blocks: tl.constexpr = LENGTH // SIZE
    m = tl.load(multiplier + where, mask=there, other=0.0)
    scaled = tl.reshape(tl.reshape(v, (LINES, blocks, SIZE)) * m[:, :, None], (LINES, LENGTH))
    code = scaled
    if FOUR_BITS:
        kept = tl.minimum(tl.maximum(scaled, -MAX), MAX)
        kept = tl.where(scaled == scaled, kept, 0.0)
        if RANDOM:
            u = tl.reshape(
                _noise(tl.reshape(kept, (LINES, blocks, SIZE)), k0, k1, GRID, F0, F1, LINES, blocks, SIZE),
                (LINES, LENGTH),
            )
        else:
            u = kept
        code = tl.where(tl.abs(scaled) < float("inf"), _to_e2m1(kept, u, RANDOM), scaled)
    if NOTE:
        _count(v, code, scaled, mask, counts, FOUR_BITS, SLOTS, MAX)
    store_quantized(code, out, C, lines, along, mask, 448.0, False, ROUND, TOKENS)


@triton.jit
def _nearest(v):
    """The nearest integer for |v| < 2**22, ties to even."""
    return (v + 1.5 * 2.0**23) - 1.5 * 2.0**23


@triton.jit
def _to_e2m1(x, u, RANDOM: tl.constexpr):
    """As recipes._to_e2m1."""
    size = tl.abs(x)
    step = tl.where(size < 2.0, 0.5, tl.where(size < 4.0, 1.0, 2.0))
    steps = size * tl.where(size < 2.0, 2.0, tl.where(size < 4.0, 1.0, 0.5))
    if RANDOM:
        low = tl.floor(steps)
        whole = low + (steps - low > u).to(tl.float32)
    else:
        whole = _nearest(steps)
    bits = (whole * step).to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & (-1 << 31))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _noise(
    x,
    k0,
    k1,
    GRID: tl.constexpr,
    F0: tl.constexpr,
    F1: tl.constexpr,
    LINES: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """As four_bits.noise_for: x (LINES, BLOCKS, SIZE)."""
    steps = _nearest(x * GRID).to(tl.int32).to(tl.uint32, bitcast=True)
    h0 = tl.sum(steps * _powers(F0, SIZE)[None, None, :], 2).to(tl.uint32)[:, :, None]
    h1 = tl.sum(steps * _powers(F1, SIZE)[None, None, :], 2).to(tl.uint32)[:, :, None]
    none = tl.zeros((LINES, BLOCKS, SIZE // 4), tl.uint32)
    lane = none + tl.arange(0, SIZE // 4).to(tl.uint32)[None, None, :]
    a, b, c, d = tl.random.philox_impl(h0 + none, h1 + none, lane, none, k0.to(tl.uint32), k1.to(tl.uint32))
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (LINES, BLOCKS, SIZE))
    return (words >> 8).to(tl.float32) * 2.0**-24


@triton.jit
def _powers(factor: tl.constexpr, SIZE: tl.constexpr):
    """(SIZE,) powers of a factor from the first on, modulo 2**32."""
    i = tl.arange(0, SIZE) + 1
    made = tl.full((SIZE,), 1, tl.uint32)
    square = tl.full((SIZE,), factor, tl.uint32)
    for bit in tl.static_range(6):
        made = tl.where(((i >> bit) & 1) == 1, made * square, made)
        square = square * square
    return made


@triton.jit
def _count(v, code, scaled, mask, counts, FOUR_BITS: tl.constexpr, SLOTS: tl.constexpr, MAX: tl.constexpr):
    """Values that became zero, values that were clamped, and all values. Which values E4M3 turns into zero is
    determined before the cast."""
    place = counts + tl.program_id(0) % SLOTS * 4
    least: tl.constexpr = 0.0 if FOUR_BITS else 2.0**-10
    tl.atomic_add(place, tl.sum(((tl.abs(code) <= least) & (v != 0.0) & mask).to(tl.int32)).to(tl.int64), sem="relaxed")
    tl.atomic_add(
        place + 1, tl.sum(((tl.abs(scaled) > MAX * (1 + 2.0**-20)) & mask).to(tl.int32)).to(tl.int64), sem="relaxed"
    )
    tl.atomic_add(place + 2, tl.sum(mask.to(tl.int32)).to(tl.int64), sem="relaxed")


def _over(x: Tensor, block: Block, mix: int, signs: int) -> tuple[tuple[int, ...], Sequence[int], dict[str, int]]:
    """Grid, numbers and constants for either kernel. ValueError if the tokens are not whole groups of the transform."""
    (rows, columns), tokens = x.shape, block[1] == 1
    if mix and rows % mix:
        raise ValueError(f"{rows} tokens are no whole blocks of {mix}")
    lines, length = TILE[::-1] if tokens else TILE
    n, k = (columns, rows) if tokens else (rows, columns)
    across = triton.cdiv(k, length)
    constants = dict(
        TOKENS=tokens, MIX=max(0, mix.bit_length() - 1), SIZE=max(block), LINES=lines, LENGTH=length, num_warps=WARPS
    )
    return (triton.cdiv(n, lines) * across,), (n, k, across, columns, signs), constants


def block_amax(x: Tensor, block: Block, mix: int = 0, signs: int = 0) -> Tensor:
    """recipes.block_amax of x (R, C), after rounding.mixed of `mix` tokens if it is not 0; blocks (1, n) or (n, 1)."""
    grid, numbers, constants = _over(x, block, mix, signs)
    out = torch.empty(*(-(-length // size) for length, size in zip(x.shape, block)), dtype=torch.int32, device=x.device)
    _block_amax[grid](x.contiguous(), out, *numbers, **constants)
    return out.view(torch.float32)


def quantize(
    x: Tensor,
    block: Block,
    format: Format,
    multiplier: Tensor,
    key: Key | None = None,
    mix: int = 0,
    signs: int = 0,
    counts: Tensor | None = None,
) -> Scaled:
    """recipes.quantize of the same. counts (SLOTS, COUNTS) int64: losses are added to it."""
    grid, numbers, constants = _over(x, block, mix, signs)
    out = torch.empty(x.shape, dtype=format.dtype, device=x.device)
    words = (word - (word >> 31 << 32) for word in key or (0, 0))  # as int32
    _cast[grid](
        x.contiguous(),
        multiplier.contiguous(),
        out,
        counts,
        *numbers,
        *words,
        FOUR_BITS=format is E2M1,
        RANDOM=key is not None,
        NOTE=counts is not None,
        MAX=format.max,
        GRID=GRID,
        F0=FACTORS[0],
        F1=FACTORS[1],
        SLOTS=SLOTS,
        ROUND=x.device.type != "cuda",
        **constants,
    )
    return Scaled(out, 1.0 / multiplier, block)

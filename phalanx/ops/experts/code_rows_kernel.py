"""Codes of tokens put where the products of their experts read them: as rows sorted by expert, and transposed by
places. ops/quantized/experts.py defines what comes out (LowExperts.rows).

Bytes are moved in words of four, and turned in squares of four words: nothing is converted, so no bit of a code is
looked at.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.quantized.quantize_grouped_kernel import _rows_of
from phalanx.ops.quantized.quantize_tile import TILE, reciprocal

WARPS = 4


@triton.jit
def _read(x, source, rows, words, stop, W):
    """Words of the tokens x (T, W) that rows `rows` before `stop` are of; zeros of others."""
    there = rows < stop
    token = tl.load(source + rows, mask=there, other=0).to(tl.int64)
    return tl.load(x + token[:, None] * W + words[None, :], mask=there[:, None] & (words < W)[None, :], other=0)


@triton.jit
def _store_row(v, out, rows, words, stop, W):
    tl.store(
        out + rows.to(tl.int64)[:, None] * W + words[None, :], v, mask=(rows < stop)[:, None] & (words < W)[None, :]
    )


@triton.jit
def _store_turned(v0, v1, v2, v3, byte: tl.constexpr, other, fours, words, P, W):
    """Byte number `byte` of words of four rows, a word of their own: four places of feature 4 w + byte."""
    low = ((v0 >> (8 * byte)) & 0xFF) | (((v1 >> (8 * byte)) & 0xFF) << 8)
    both = low | (((v2 >> (8 * byte)) & 0xFF) << 16) | (((v3 >> (8 * byte)) & 0xFF) << 24)
    features = 4 * words.to(tl.int64) + byte
    tl.store(
        other + features[:, None] * (P // 4) + fours[None, :],
        both.T,
        mask=(words < W)[:, None] & (fours < P // 4)[None, :],
    )


@triton.jit
def _place(x, source, ends, multiplier, out, other, scale, W, P, E, TILE: tl.constexpr, E_BLOCK: tl.constexpr):
    """out (R, W): words of x (T, W) of each row's token `source` (R,). other (4 W, P / 4): their bytes transposed,
    places by TILE for each expert, zeros between. scale (): 1 / multiplier. A program has the rows that tile t has
    room for, all of expert e, by TILE features."""
    across = tl.cdiv(4 * W, TILE)
    t = tl.program_id(0) // across
    words = tl.program_id(0) % across * (TILE // 4) + tl.arange(0, TILE // 4)
    if tl.program_id(0) == 0:
        tl.store(scale, reciprocal(tl.load(multiplier)))
    there, e, begin, stop = _rows_of(t, ends, E, TILE, E_BLOCK)
    if there:
        rows = begin + 4 * tl.arange(0, TILE // 4)
        v0, v1 = _read(x, source, rows, words, stop, W), _read(x, source, rows + 1, words, stop, W)
        v2, v3 = _read(x, source, rows + 2, words, stop, W), _read(x, source, rows + 3, words, stop, W)
        _store_row(v0, out, rows, words, stop, W)
        _store_row(v1, out, rows + 1, words, stop, W)
        _store_row(v2, out, rows + 2, words, stop, W)
        _store_row(v3, out, rows + 3, words, stop, W)
        fours = t * (TILE // 4) + tl.arange(0, TILE // 4)
        _store_turned(v0, v1, v2, v3, 0, other, fours, words, P, W)
        _store_turned(v0, v1, v2, v3, 1, other, fours, words, P, W)
        _store_turned(v0, v1, v2, v3, 2, other, fours, words, P, W)
        _store_turned(v0, v1, v2, v3, 3, other, fours, words, P, W)


def placed(
    codes: Tensor, source_R: Tensor, ends: Tensor, tiles: int, multiplier: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """codes (T, C) of 8 bits, C in fours -> their rows (R, C), the same transposed by places, (C, tiles * TILE),
    both bytes; and 1 / multiplier, (1, 1) fp32.

    Rows past the last end, and places past the last tile, are left as they were."""
    rows, columns = len(source_R), codes.shape[1]
    if columns % 4:
        raise ValueError(f"{columns} features: codes are moved in words of four")
    out = torch.empty(rows, columns, dtype=torch.uint8, device=codes.device)
    other = torch.empty(columns, tiles * TILE, dtype=torch.uint8, device=codes.device)
    scale = torch.empty(1, 1, device=codes.device)
    _place[(tiles * triton.cdiv(columns, TILE),)](
        codes.contiguous().view(torch.int32),
        source_R,
        ends,
        multiplier,
        out.view(torch.int32),
        other.view(torch.int32),
        scale,
        columns // 4,
        tiles * TILE,
        len(ends),
        TILE=TILE,
        E_BLOCK=triton.next_power_of_2(len(ends)),
        num_warps=WARPS,
    )
    return out, other, scale

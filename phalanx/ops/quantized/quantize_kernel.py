"""Casts of matrices to FP8, in one pass over memory for everything a linear needs of a tensor: quantized values, those
of its transpose, both sets of scales, and counts of losses. The outputs of SwiGLU and RMSNorm, and the gradients of
SwiGLU and of the rotation of queries and keys, are quantized as they are computed and exist in memory only in FP8.
quantize_tile.py casts a tile."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.dense.activation import Gated, GatedGrad
from phalanx.ops.dense.gated_kernel import clamped, gated, gated_slopes, sigmoid
from phalanx.ops.dense.norm import Normed
from phalanx.ops.dense.rope import RopeGrad
from phalanx.ops.quantized.casts import (
    BLOCKS,
    GIVEN,
    LARGEST,
    LARGEST_LINES,
    LINES,
    SQUARES,
    TILE,
    WHOLE,
    CastMatrix,
    CastSpec,
    matrix_amax,
    matrix_amaxes,
)
from phalanx.ops.quantized.casts import MatrixSource as Source
from phalanx.ops.quantized.casts import matrix_fits as takes
from phalanx.ops.quantized.quantize_tile import (
    _GIVEN,
    _LARGEST,
    _LARGEST_LINES,
    _LINES,
    _SQUARES,
    _WHOLE,
    NOTHING,
    CastTiles,
    abs_bits,
    count_losses_of_four,
    note_amaxes,
    note_tile,
    place,
    plan,
    read_four,
    read_rows,
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
    "takes",
    "tiles_of",
    "transposed",
]

ALL = 4096  # elements that a program of `_amax` handles in a step


@triton.jit
def _amax(x, out, n, steps, BLOCK: tl.constexpr):
    """out () int32 >= the bits of the largest |x| of (n,)."""
    first = tl.program_id(0).to(tl.int64) * steps * BLOCK
    largest = tl.zeros((BLOCK,), tl.int32)
    for step in range(steps):
        i = first + step * BLOCK + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, abs_bits(tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)))
    tl.atomic_max(out, tl.max(largest, 0))


@triton.jit
def _emit(v, at, to, R, C, HOW: tl.constexpr):
    """Cast the tile v of a tensor (R, C). at: whether to count losses only; the tile's number down and along, its rows,
    its columns, which of them exist. to: row_amax, col_amax, out, other, row_scales, col_scales, counts. With LARGEST
    and LARGEST_LINES, only record its amaxes."""
    counting, down, along, rows, cols, there = at
    if HOW.mode == _LARGEST or HOW.mode == _LARGEST_LINES:
        note_amaxes(v, rows, R, cols, there, to[0], to[1], HOW)
    elif HOW.note:
        if counting:
            count_losses_of_four(v, rows, R, there, to[0], to[6], HOW)
        else:
            note_tile(v, (down == 0) & (along == 0), to[0], to[6], HOW)
            _write(v, at, to, R, C, HOW)
    else:
        _write(v, at, to, R, C, HOW)


@triton.jit
def _write(v, at, to, R, C, HOW: tl.constexpr):
    """Store quantized values and scales. row_scales: one; with LINES (R,); with BLOCKS (columns of tiles, R); with
    SQUARES (rows of tiles, columns of tiles). col_scales: (C,) or (rows of tiles, C)."""
    _, down, along, rows, cols, there = at
    _, _, _, _, row_scales, col_scales, _ = to
    by_row, by_col = write_quantized(v, down, rows, R, cols, there, to, C, R, HOW)
    if HOW.mode == _WHOLE or HOW.mode == _GIVEN:
        if (down == 0) & (along == 0):
            tl.store(row_scales, reciprocal(by_row))
    elif HOW.mode == _SQUARES:
        tl.store(row_scales + down * tl.cdiv(C, 128) + along, reciprocal(by_row))
    else:
        each = down * by_row.shape[0] + tl.arange(0, by_row.shape[0])
        if HOW.mode == _LINES:
            tl.store(row_scales + each, by_row, mask=(each < R) & (along == 0))
            tl.store(col_scales + cols, by_col, mask=there & (down == 0))
        else:
            tl.store(row_scales + along.to(tl.int64) * R + each, by_row, mask=each < R)
            tl.store(col_scales + down.to(tl.int64) * C + cols, by_col, mask=there)


@triton.jit
def _cast(
    x,
    row_amax,
    col_amax,
    out,
    other,
    row_scales,
    col_scales,
    counts,
    R,
    C,
    HOW: tl.constexpr,
):
    """Quantize x (R, C)."""
    counting, down, along, rows, cols = place(R, C, HOW)
    v = read_four(x, rows, cols, C, R, C)
    to = (row_amax, col_amax, out, other, row_scales, col_scales, counts)
    _emit(v, (counting, down, along, rows, cols, cols < C), to, R, C, HOW)


@triton.jit
def _gated(gate, up, x, INTERPRETED: tl.constexpr):
    gate, up = clamped(gate, up, 0.0, 0.0, False)
    return rounded(gated(gate, up, 1.0, INTERPRETED), x, INTERPRETED)


@triton.jit
def _cast_gated(
    x,
    row_amax,
    col_amax,
    out,
    other,
    row_scales,
    col_scales,
    counts,
    R,
    C,
    HOW: tl.constexpr,
):
    """Quantize silu(gate) up (R, C) from x = [gate, up] (R, 2C), rounded to x's dtype as if it were stored in
    memory."""
    counting, down, along, rows, cols = place(R, C, HOW)
    g, u = read_four(x, rows, cols, 2 * C, R, C), read_four(x + C, rows, cols, 2 * C, R, C)
    v = (
        _gated(g[0], u[0], x, HOW.round),
        _gated(g[1], u[1], x, HOW.round),
        _gated(g[2], u[2], x, HOW.round),
        _gated(g[3], u[3], x, HOW.round),
    )
    to = (row_amax, col_amax, out, other, row_scales, col_scales, counts)
    _emit(v, (counting, down, along, rows, cols, cols < C), to, R, C, HOW)


@triton.jit
def _slopes(d, gate, up, x, INTERPRETED: tl.constexpr):
    gate, up = clamped(gate, up, 0.0, 0.0, False)
    dgate, dup = gated_slopes(d, gate, up, sigmoid(gate, 1.0, INTERPRETED), gate, up, 1.0, 0.0, False)
    return rounded(dgate, x, INTERPRETED), rounded(dup, x, INTERPRETED)


@triton.jit
def _gate_slopes(dy, x, rows, cols, R, C, INTERPRETED: tl.constexpr):
    """Gradients of gate, for four tiles."""
    d, g, u = (
        read_four(dy, rows, cols, C, R, C),
        read_four(x, rows, cols, 2 * C, R, C),
        read_four(x + C, rows, cols, 2 * C, R, C),
    )
    d0, _ = _slopes(d[0], g[0], u[0], x, INTERPRETED)
    d1, _ = _slopes(d[1], g[1], u[1], x, INTERPRETED)
    d2, _ = _slopes(d[2], g[2], u[2], x, INTERPRETED)
    d3, _ = _slopes(d[3], g[3], u[3], x, INTERPRETED)
    return d0, d1, d2, d3


@triton.jit
def _up_slopes(dy, x, rows, cols, R, C, INTERPRETED: tl.constexpr):
    """Gradients of up (up itself is not needed)."""
    d, g = read_four(dy, rows, cols, C, R, C), read_four(x, rows, cols, 2 * C, R, C)
    _, d0 = _slopes(d[0], g[0], 0.0, x, INTERPRETED)
    _, d1 = _slopes(d[1], g[1], 0.0, x, INTERPRETED)
    _, d2 = _slopes(d[2], g[2], 0.0, x, INTERPRETED)
    _, d3 = _slopes(d[3], g[3], 0.0, x, INTERPRETED)
    return d0, d1, d2, d3


@triton.jit
def _cast_half_gated_grad(
    dy,
    x,
    row_amax,
    col_amax,
    out,
    other,
    row_scales,
    col_scales,
    counts,
    R,
    C,
    HOW: tl.constexpr,
):
    """As _cast_gated_grad, for C (R, 2C) with C whole tiles: a tile belongs to gate or to up. What both read comes from
    the L2 cache the second time, and two programs fit on a processor; tiles with 128 x 128 blocks of both gate and up
    would be too large."""
    counting, down, along, rows, cols = place(R, C, HOW)
    if 2 * along * HOW.columns < C:
        d0, d1, d2, d3 = _gate_slopes(dy, x, rows, cols, R, C // 2, HOW.round)
    else:
        d0, d1, d2, d3 = _up_slopes(dy, x, rows, cols - C // 2, R, C // 2, HOW.round)
    to = (row_amax, col_amax, out, other, row_scales, col_scales, counts)
    _emit((d0, d1, d2, d3), (counting, down, along, rows, cols, cols < C), to, R, C, HOW)


@triton.jit
def _cast_gated_grad(
    dy,
    x,
    row_amax,
    col_amax,
    out,
    other,
    row_scales,
    col_scales,
    counts,
    R,
    C,
    HOW: tl.constexpr,
):
    """Quantize the gradient (R, 2C) of x = [gate, up] from dy (R, C), rounded in the same way."""
    counting, down, along, rows, cols = place(R, C, HOW)
    d = read_four(dy, rows, cols, C, R, C)
    g, u = read_four(x, rows, cols, 2 * C, R, C), read_four(x + C, rows, cols, 2 * C, R, C)
    dg0, du0 = _slopes(d[0], g[0], u[0], x, HOW.round)
    dg1, du1 = _slopes(d[1], g[1], u[1], x, HOW.round)
    dg2, du2 = _slopes(d[2], g[2], u[2], x, HOW.round)
    dg3, du3 = _slopes(d[3], g[3], u[3], x, HOW.round)
    to = (row_amax, col_amax, out, other, row_scales, col_scales, counts)
    _emit((dg0, dg1, dg2, dg3), (counting, down, along, rows, cols, cols < C), to, R, 2 * C, HOW)
    along += tl.cdiv(C, HOW.columns)
    _emit((du0, du1, du2, du3), (counting, down, along, rows, C + cols, cols < C), to, R, 2 * C, HOW)


@triton.jit
def _normed(x, scale, weight, w, rows, cols, R, C, INTERPRETED: tl.constexpr):
    v = read_rows(x, rows, cols, C, R, C) * tl.load(scale + rows, mask=rows < R, other=0.0)[:, None]
    return rounded(rounded(v, weight, INTERPRETED) * w, x, INTERPRETED)


@triton.jit
def _cast_normed(
    x,
    scale,
    weight,
    row_amax,
    col_amax,
    out,
    other,
    row_scales,
    col_scales,
    counts,
    R,
    C,
    HOW: tl.constexpr,
):
    """Quantize RMSNorm's output (R, C), from x, the scale of each row (fp32) and the weight (C,), rounded as in
    norm_kernel."""
    counting, down, along, rows, cols = place(R, C, HOW)
    w = tl.load(weight + cols, mask=cols < C, other=0.0).to(tl.float32)[None, :]
    v = (
        _normed(x, scale, weight, w, rows, cols, R, C, HOW.round),
        _normed(x, scale, weight, w, rows + 1, cols, R, C, HOW.round),
        _normed(x, scale, weight, w, rows + 2, cols, R, C, HOW.round),
        _normed(x, scale, weight, w, rows + 3, cols, R, C, HOW.round),
    )
    to = (row_amax, col_amax, out, other, row_scales, col_scales, counts)
    _emit(v, (counting, down, along, rows, cols, cols < C), to, R, C, HOW)


@triton.jit
def _rotated_back(
    x,
    cos,
    sin,
    rows,
    i,
    length,
    s_seq,
    s_tok,
    R,
    transposed,
    ROTATE: tl.constexpr,
    K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Features i of tokens `rows` of one head, rotated back if `transposed` and ROTATE. Products of two bf16 numbers
    are exact in fp32."""
    there = (rows < R)[:, None]
    at = (rows // length).to(tl.int64) * s_seq + (rows % length).to(tl.int64) * s_tok
    v = tl.load(x + at[:, None] + i[None, :], mask=there, other=0.0).to(tl.float32)
    if ROTATE:
        if transposed:
            pair = tl.load(x + at[:, None] + ((i + K // 2) % K)[None, :], mask=there, other=0.0).to(tl.float32)
            angle = rows[:, None] * (K // 2) + (i % (K // 2))[None, :]
            c = tl.load(cos + angle, mask=there, other=0.0).to(tl.float32)
            s = tl.load(sin + angle, mask=there, other=0.0).to(tl.float32)
            v = rounded(v * c + tl.where(i < K // 2, 1.0, -1.0)[None, :] * (pair * s), x, INTERPRETED)
    return v


@triton.jit
def _cast_rope_grad(
    q,
    k,
    v,
    cos,
    sin,
    length,
    q_seq,
    q_head,
    q_tok,
    k_seq,
    k_head,
    k_tok,
    v_seq,
    v_head,
    v_tok,
    row_amax,
    col_amax,
    out,
    other,
    row_scales,
    col_scales,
    counts,
    R,
    C,
    Q: tl.constexpr,
    KV: tl.constexpr,
    ROTATE: tl.constexpr,
    HOW: tl.constexpr,
):
    """Quantize the gradient of the packed qkv (R, C) from those of q, k and v, wherever they are in memory: a tile
    belongs to one head."""
    counting, down, along, rows, cols = place(R, C, HOW)
    i, none, head, transposed = tl.arange(0, HOW.columns), tl.zeros((), tl.int64), along.to(tl.int64), along < Q + KV
    if along < Q:
        x, s_seq, s_tok = q + head * q_head, none + q_seq, none + q_tok
    elif along < Q + KV:
        x, s_seq, s_tok = k + (head - Q) * k_head, none + k_seq, none + k_tok
    else:
        x, s_seq, s_tok = v + (head - Q - KV) * v_head, none + v_seq, none + v_tok
    d = (
        _rotated_back(x, cos, sin, rows, i, length, s_seq, s_tok, R, transposed, ROTATE, HOW.columns, HOW.round),
        _rotated_back(x, cos, sin, rows + 1, i, length, s_seq, s_tok, R, transposed, ROTATE, HOW.columns, HOW.round),
        _rotated_back(x, cos, sin, rows + 2, i, length, s_seq, s_tok, R, transposed, ROTATE, HOW.columns, HOW.round),
        _rotated_back(x, cos, sin, rows + 3, i, length, s_seq, s_tok, R, transposed, ROTATE, HOW.columns, HOW.round),
    )
    to = (row_amax, col_amax, out, other, row_scales, col_scales, counts)
    _emit(d, (counting, down, along, rows, cols, cols < C), to, R, C, HOW)


@triton.jit
def _turn(x, out, R, C, TILE: tl.constexpr):
    across = tl.cdiv(C, TILE)
    rows = tl.program_id(0) // across * TILE + tl.arange(0, TILE)
    cols = tl.program_id(0) % across * TILE + tl.arange(0, TILE)
    mask = (rows < R)[:, None] & (cols < C)[None, :]
    v = tl.load(x + rows.to(tl.int64)[:, None] * C + cols[None, :], mask=mask, other=0)
    tl.store(out + cols.to(tl.int64)[:, None] * R + rows[None, :], v.T, mask=mask.T)


def transposed(quantized: Tensor, out: Tensor | None = None) -> Tensor:
    """(R, C) of FP8 bytes -> (C, R), contiguous, in `out` if given."""
    rows, columns = quantized.shape
    out = torch.empty(columns, rows, dtype=quantized.dtype, device=quantized.device) if out is None else out
    grid = (triton.cdiv(rows, TILE) * triton.cdiv(columns, TILE),)
    _turn[grid](quantized.contiguous().view(torch.uint8), out.view(torch.uint8), rows, columns, TILE=TILE, num_warps=8)
    return out


def amax(x: Source) -> Tensor:
    """Bits of the largest |x|, (1,) int32."""
    out = matrix_amax(x)
    if isinstance(x, Tensor):
        steps = 8 if x.is_cuda else 2
        _amax[(triton.cdiv(x.numel(), ALL * steps),)](x.contiguous(), out, x.numel(), steps, BLOCK=ALL, num_warps=8)
    else:
        _launch(x, LARGEST, (out, *NOTHING))
    return out


def amax_lines(x: Source) -> tuple[Tensor, Tensor]:
    """Bits of the largest |x| of each row (R,) and each column (C,), int32."""
    rows, columns = matrix_amaxes(x)
    _launch(x, LARGEST_LINES, (rows, columns, *NOTHING[1:]))
    return rows, columns


def tiles_of(x: Source, mode: int) -> CastTiles:
    """The best tiles of benchmarks/low_ops.py --only casts --sweep on an H200. Blocks need tiles of their own size, and
    heads tiles of their width. For amaxes of columns, more lines mean fewer atomics."""
    if mode in (
        BLOCKS,
        SQUARES,
    ):  # as few warps as leave registers for two programs on a processor: each warp pays the cost of a line's scale
        return CastTiles(TILE, TILE, 8)
    columns = x.dq.shape[-1] if isinstance(x, RopeGrad) else TILE
    if isinstance(x, GatedGrad) or mode in (LARGEST, LARGEST_LINES):
        return CastTiles(64, columns, 8)
    return CastTiles(32, columns, 4)


def _kernel_of(x: Source, mode: int) -> tuple[Any, tuple[Any, ...], tuple[int, int], dict[str, Any]]:
    """The kernel, its operands, the rows and columns that its tiles cover, and constants."""
    if isinstance(x, GatedGrad) and mode == BLOCKS:
        return _cast_half_gated_grad, (x.dy.contiguous(), x.x.contiguous()), x.shape, {}
    if isinstance(x, GatedGrad):
        return _cast_gated_grad, (x.dy.contiguous(), x.x.contiguous()), (x.dy.shape[0], x.dy.shape[1]), {}
    if isinstance(x, Gated):
        return _cast_gated, (x.x.contiguous(),), x.shape, {}
    if isinstance(x, Normed):
        return _cast_normed, (x.x, x.scale, x.weight), x.shape, {}
    if isinstance(x, RopeGrad):
        parts = [t if t.stride(-1) == 1 else t.contiguous() for t in (x.dq, x.dk, x.dv)]
        cos, sin = (parts[0], parts[0]) if x.table is None else (x.table.cos, x.table.sin)
        strides = [t.stride(d) for t in parts for d in (0, 1, 2)]
        heads = dict(Q=x.dq.shape[1], KV=x.dk.shape[1], ROTATE=x.table is not None)
        return _cast_rope_grad, (*parts, cos, sin, x.dq.shape[2], *strides), x.shape, heads
    return _cast, (x.contiguous(),), (x.shape[0], x.shape[1]), {}


def _launch(
    x: Source,
    mode: int,
    to: tuple[Tensor | None, ...],
    format: Format | None = None,
    turn: bool = False,
    tiles: CastTiles | None = None,
) -> None:
    """Launch one of the kernels above over all of x. to: see `_emit`."""
    kernel, sources, size, more = _kernel_of(x, mode)
    tiles = tiles or tiles_of(x, mode)
    programs, constants = plan(x, size, mode, format, to[-1], tiles)
    constants = replace(constants, other=to[3] is not None, transposed=turn)
    kernel[(programs,)](*sources, *to, *size, HOW=constants, num_warps=tiles.warps, **more)


def cast_both(
    x: Source,
    cast: CastSpec,
    turn: bool,
    into: tuple[Scaled, Scaled] | None = None,
    tiles: CastTiles | None = None,
) -> tuple[Scaled, Scaled]:
    """Quantized x (R, C) with scales for sums along its columns, and with scales for sums along its rows: the latter
    transposed, (C, R), if `turn`.

    into   where to write instead of new memory, as returned by an earlier call
    tiles  for benchmarks
    """
    to = CastMatrix.of(x, cast, turn, into)
    other = to.other.view(torch.int32) if turn and to.other is not None else to.other
    written = (cast.first, cast.second, to.out, other, to.row_scales, to.col_scales, cast.counts)
    _launch(x, cast.mode, written, cast.format, turn, tiles)
    return to.scaled(into)

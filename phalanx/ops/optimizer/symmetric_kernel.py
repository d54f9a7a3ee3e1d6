"""Triton kernel of ops.optimizer.symmetric: tiles on and below the diagonal are computed, each is stored twice."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from phalanx.ops.kernel_tools import num_programs, triton_wide
from phalanx.ops.optimizer.symmetric import SymmetricTerms, SymmetricTiles


@triton.jit
def _tile(x, matrix, row, col, M, K, TMA: tl.constexpr, ACROSS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):
    """Tile (ROWS, STEP) at (row, col) of a matrix of the stack x (B, M, K), or, ACROSS, (B, K, M); zeros outside."""
    if TMA:
        if ACROSS:
            tile = x.load([matrix, col, row]).reshape(STEP, ROWS).T
        else:
            tile = x.load([matrix, row, col]).reshape(ROWS, STEP)
    else:
        r = row + tl.arange(0, ROWS)[:, None]
        c = col + tl.arange(0, STEP)[None, :]
        first = x + matrix.to(tl.int64) * M * K
        at = c.to(tl.int64) * M + r if ACROSS else r.to(tl.int64) * K + c
        tile = tl.load(first + at, mask=(r < M) & (c < K), other=0.0)
    return tile


@triton.jit
def _product(
    a,
    b,
    c,
    out,
    matrix,
    row,
    col,
    mirrored_from,
    M,
    K,
    terms,
    ADD: tl.constexpr,
    TMA: tl.constexpr,
    ACROSS: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
    MIRROR: tl.constexpr = True,
):
    """The result's tile (ROWS, COLS) at (row, col), and with MIRROR the mirror image of its rows from `mirrored_from`
    on. terms: alpha, beta and what is added to the diagonal, if anything."""
    alpha, beta, diagonal = terms
    acc = tl.zeros((ROWS, COLS), WIDE)
    for k in range(0, K, STEP):
        x = _tile(a, matrix, row, k, M, K, TMA, ACROSS, ROWS, STEP)
        y = _tile(b, matrix, col, k, M, K, TMA, ACROSS, COLS, STEP)
        acc = tl.dot(x, y.T, acc, input_precision="ieee", out_dtype=WIDE)
    acc *= alpha
    r = row + tl.arange(0, ROWS)
    s = col + tl.arange(0, COLS)
    first = matrix.to(tl.int64) * M * M
    here = r.to(tl.int64)[:, None] * M + s[None, :]
    if diagonal is not None:
        acc += tl.where(r[:, None] == s[None, :], diagonal, 0.0)
    if ADD:
        inside = (r < M)[:, None] & (s < M)[None, :]
        acc += tl.load(c + first + here, mask=inside, other=0.0).to(WIDE) * beta
    tile = acc.to(out.dtype.element_ty)
    tl.store(out + first + here, tile, mask=(r < M)[:, None] & (s < M)[None, :])
    if MIRROR:
        beyond = (s < M)[:, None] & ((r < M) & (r >= mirrored_from))[None, :]
        tl.store(out + first + s.to(tl.int64)[:, None] * M + r[None, :], tile.T, mask=beyond)


@triton.jit
def _symmetric(
    a,
    a_side,
    b,
    c,
    out,
    M,
    K,
    alpha,
    beta,
    diagonal,
    ADD: tl.constexpr,
    TMA: tl.constexpr,
    ACROSS: tl.constexpr,
    WIDE: tl.constexpr,
    SIDE: tl.constexpr,
    DOWN: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program program_id(0) of matrix program_id(1). With DOWN 1, tiles (0, 0), (1, 0), (1, 1), (2, 0), ... of (SIDE,
    SIDE). With DOWN 2, of each band of 2 SIDE rows the tiles (2 SIDE, SIDE) until the one that the diagonal enters;
    what is left of a band is one tile (SIDE, SIDE) on the diagonal, and the last programs have two of those each, which
    are as much work. a_side: a, in tiles of SIDE rows as b."""
    at = tl.program_id(0)
    matrix = tl.program_id(1)
    terms = alpha, beta, diagonal
    if DOWN == 1:
        band = ((tl.sqrt(8.0 * at.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
        band = tl.where(band * (band + 1) // 2 > at, band - 1, band)  # the root may be rounded either way
        band = tl.where((band + 1) * (band + 2) // 2 <= at, band + 1, band)
        row, col = band * SIDE, (at - band * (band + 1) // 2) * SIDE
        start = tl.where(row > col, row, row + SIDE)
        _product(a, b, c, out, matrix, row, col, start, M, K, terms, ADD, TMA, ACROSS, WIDE, SIDE, SIDE, STEP)
    else:
        bands = tl.cdiv(M, 2 * SIDE)
        if at < bands * bands:
            band = tl.sqrt(at.to(tl.float32)).to(tl.int32)
            band = tl.where(band * band > at, band - 1, band)
            band = tl.where((band + 1) * (band + 1) <= at, band + 1, band)
            row, col = band * (2 * SIDE), (at - band * band) * SIDE
            start = tl.maximum(row, col + SIDE)
            _product(a, b, c, out, matrix, row, col, start, M, K, terms, ADD, TMA, ACROSS, WIDE, 2 * SIDE, SIDE, STEP)
        else:
            for half in range(2):
                row = (at - bands * bands) * (4 * SIDE) + half * (2 * SIDE) + SIDE
                if row < M:
                    _product(
                        a_side,
                        b,
                        c,
                        out,
                        matrix,
                        row,
                        row,
                        M,
                        M,
                        K,
                        terms,
                        ADD,
                        TMA,
                        ACROSS,
                        WIDE,
                        SIDE,
                        SIDE,
                        STEP,
                        MIRROR=False,
                    )


class SymmetricProducts:
    """The op, cut in this way."""

    def __init__(self, tiles: SymmetricTiles):
        self.tiles = tiles

    def matmul(self, a: Tensor, b: Tensor, c: Tensor | None, terms: SymmetricTerms) -> Tensor:
        count, side, inner = a.shape
        t, out = self.tiles, a.new_empty(count, side, side)
        bands = triton.cdiv(side, 2 * t.side)
        down = 2 if t.tall and c is None and count * bands**2 >= num_programs(a, 1) else 1
        across = not a.is_contiguous() and a.mT.is_contiguous() and b.mT.is_contiguous()
        tma, stacks = self._loaded(across, down, a, b)
        if down == 1:
            bands = triton.cdiv(side, t.side)
        programs = bands * (bands + 1) // 2 if down == 1 else bands * bands + triton.cdiv(bands, 2)
        _symmetric[(programs, count)](
            *stacks,
            None if c is None else c.contiguous(),
            out,
            side,
            inner,
            terms.alpha,
            terms.beta,
            terms.diagonal or None,
            ADD=c is not None,
            TMA=tma,
            ACROSS=across,
            WIDE=triton_wide(a.dtype),
            SIDE=t.side,
            DOWN=down,
            STEP=t.k,
            num_stages=t.tall if down == 2 else t.stages,
            num_warps=t.warps,
        )
        return out

    def _loaded(self, across: bool, down: int, a: Tensor, b: Tensor) -> tuple[bool, list[Any]]:
        """(whether TMA can load both by tiles, the kernel's arguments for a in both of its tiles, and b)"""
        t = self.tiles
        left, right = (x.mT if across else x.contiguous() for x in (a, b))
        takes = all(x.shape[-1] * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0 for x in (left, right))
        if not takes or a.element_size() > 4:
            return False, [left, left, right]
        sides, tall = ([1, t.k, rows] if across else [1, rows, t.k] for rows in (t.side, down * t.side))
        return True, [
            TensorDescriptor.from_tensor(x, tile) for x, tile in ((left, tall), (left, sides), (right, sides))
        ]

"""Triton kernel of ops.optimizer.symmetric: tiles on and below the diagonal are computed, each is stored twice."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from phalanx.ops.kernel_tools import triton_wide
from phalanx.ops.optimizer.symmetric import SymmetricTiles


@triton.jit
def _tile(x, matrix, row, col, M, K, TMA: tl.constexpr, SIDE: tl.constexpr, STEP: tl.constexpr):
    """Tile (SIDE, STEP) at (row, col) of a matrix of the stack x (B, M, K); zeros outside."""
    if TMA:
        tile = x.load([matrix, row, col]).reshape(SIDE, STEP)
    else:
        r = row + tl.arange(0, SIDE)[:, None]
        c = col + tl.arange(0, STEP)[None, :]
        tile = tl.load(x + (matrix.to(tl.int64) * M + r) * K + c, mask=(r < M) & (c < K), other=0.0)
    return tile


@triton.jit
def _symmetric(
    a,
    b,
    c,
    out,
    M,
    K,
    alpha,
    beta,
    ADD: tl.constexpr,
    TMA: tl.constexpr,
    WIDE: tl.constexpr,
    SIDE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Tile number program_id(0), in the order (0, 0), (1, 0), (1, 1), (2, 0), ..., of matrix number program_id(1)."""
    at = tl.program_id(0)
    matrix = tl.program_id(1)
    down = ((tl.sqrt(8.0 * at.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    down = tl.where(down * (down + 1) // 2 > at, down - 1, down)  # the root may be rounded either way
    down = tl.where((down + 1) * (down + 2) // 2 <= at, down + 1, down)
    row = down * SIDE
    col = (at - down * (down + 1) // 2) * SIDE
    acc = tl.zeros((SIDE, SIDE), WIDE)
    for k in range(0, K, STEP):
        x = _tile(a, matrix, row, k, M, K, TMA, SIDE, STEP)
        y = _tile(b, matrix, col, k, M, K, TMA, SIDE, STEP)
        acc = tl.dot(x, y.T, acc, input_precision="ieee", out_dtype=WIDE)
    acc *= alpha
    r = row + tl.arange(0, SIDE)
    s = col + tl.arange(0, SIDE)
    first = matrix.to(tl.int64) * M * M
    inside = (r < M)[:, None] & (s < M)[None, :]
    here = r.to(tl.int64)[:, None] * M + s[None, :]
    if ADD:
        acc += tl.load(c + first + here, mask=inside, other=0.0).to(WIDE) * beta
    tile = acc.to(out.dtype.element_ty)
    tl.store(out + first + here, tile, mask=inside)
    if row > col:
        mirrored = s.to(tl.int64)[:, None] * M + r[None, :]
        tl.store(out + first + mirrored, tile.T, mask=(s < M)[:, None] & (r < M)[None, :])


class SymmetricProducts:
    """The op, cut in this way."""

    def __init__(self, tiles: SymmetricTiles):
        self.tiles = tiles

    def matmul(self, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> Tensor:
        count, side, inner = a.shape
        t, out = self.tiles, a.new_empty(count, side, side)
        tma, (left, right) = self._loaded(a.contiguous(), b.contiguous())
        across = triton.cdiv(side, t.side)
        _symmetric[(across * (across + 1) // 2, count)](
            left,
            right,
            None if c is None else c.contiguous(),
            out,
            side,
            inner,
            alpha,
            beta,
            ADD=c is not None,
            TMA=tma,
            WIDE=triton_wide(a.dtype),
            SIDE=t.side,
            STEP=t.k,
            num_stages=t.stages,
            num_warps=t.warps,
        )
        return out

    def _loaded(self, *stacks: Tensor) -> tuple[bool, list[Any]]:
        """(whether TMA can load all of these by tiles, the kernel argument for each)"""
        takes = all(x.shape[-1] * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0 for x in stacks)
        takes = takes and stacks[0].element_size() <= 4
        shape = [1, self.tiles.side, self.tiles.k]
        return takes, [TensorDescriptor.from_tensor(x, shape) if takes else x for x in stacks]

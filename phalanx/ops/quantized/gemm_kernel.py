"""GEMM of FP8 values whose scales change every 128 terms of the sum (DeepSeek-V3's) or never, written or added to its
output.

The summed dim is contiguous in both operands, as Hopper's FP8 tensor cores require. A program handles every n-th tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from phalanx.base.dataclass import dataclass
from phalanx.ops.kernel_tools import grouped_order, num_programs
from phalanx.ops.quantized.recipes import Scaled

BK = 128


@dataclass(frozen=True)
class GemmTiles:
    """Sizes of an output tile, loads in flight, warps, and tiles along m that are computed together."""

    m: int = 128
    n: int = 256
    stages: int = 4
    warps: int = 8
    group: int = 8


WHOLE_TILES, BLOCK_TILES = GemmTiles(), GemmTiles(n=128, stages=4)


@triton.jit
def _load(x, row, k, rows, K, TMA: tl.constexpr, B: tl.constexpr, BK: tl.constexpr):
    if TMA:
        tile = x.load([row, k])
    else:
        r = row + tl.arange(0, B)[:, None]
        c = k + tl.arange(0, BK)[None, :]
        tile = tl.load(x + r.to(tl.int64) * K + c, mask=(r < rows) & (c < K), other=0.0)
    return tile


@triton.jit
def _scaled_gemm(
    a,
    b,
    out,
    a_scales,
    b_scales,
    M,
    N,
    K,
    a_row,
    a_col,
    b_row,
    b_col,
    A_KIND: tl.constexpr,
    B_KIND: tl.constexpr,
    ADD: tl.constexpr,
    TMA: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out (M, N) (+)= a (M, K) b^T with b (N, K). KIND: 0 one scale; 1 a scale for each row and 128 of K; 2 for each
    128 rows and 128 of K, with strides."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=False):
        down, along = grouped_order(tile, M, tiles_n, GROUP, BM)
        row, col = down * BM, along * BN
        rows = row + tl.arange(0, BM)
        cols = col + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, tl.cdiv(K, BK)):
            x = _load(a, row, k * BK, M, K, TMA, BM, BK)
            y = _load(b, col, k * BK, N, K, TMA, BN, BK)
            if A_KIND == 0:
                acc = tl.dot(x, y.T, acc)
            else:
                part = tl.dot(x, y.T)
                if A_KIND == 1:
                    part = part * tl.load(a_scales + rows * a_row + k * a_col, mask=rows < M, other=0.0)[:, None]
                else:
                    part = part * tl.load(a_scales + row // 128 * a_row + k * a_col)
                if B_KIND == 1:
                    part = part * tl.load(b_scales + cols * b_row + k * b_col, mask=cols < N, other=0.0)[None, :]
                else:
                    part = part * tl.load(b_scales + col // 128 * b_row + k * b_col)
                acc += part
        if A_KIND == 0:
            acc = acc * (tl.load(a_scales) * tl.load(b_scales))
        left, right = (
            acc.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
        )  # half of a tile at a time, to save registers
        _store(out, left, row, col, M, N, ADD)
        _store(out, right, row, col + BN // 2, M, N, ADD)


@triton.jit
def _store(out, part, row, col, M, N, ADD: tl.constexpr):
    rows = row + tl.arange(0, part.shape[0])
    cols = col + tl.arange(0, part.shape[1])
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    where = out + rows.to(tl.int64)[:, None] * N + cols[None, :]
    if ADD:
        part += tl.load(where, mask=inside, other=0.0).to(tl.float32)
    tl.store(where, part.to(out.dtype.element_ty), mask=inside)


def _kind(q: Scaled) -> int:
    return 0 if q.block == (0, 0) else 2 if q.block[0] == 128 else 1


def product(out: Tensor, a: Scaled, b: Scaled, add: bool, tiles: GemmTiles | None = None) -> None:
    """out (M, N), contiguous, (+)= a b^T with a (M, K), b (N, K). With one scale, the tensor cores keep the sum;
    otherwise it moves to fp32 every 128 terms."""
    (m, k), n = a.quantized.shape, b.quantized.shape[0]
    kinds = _kind(a), _kind(b)
    c = tiles or (WHOLE_TILES if kinds == (0, 0) else BLOCK_TILES)
    takes = k % 16 == 0 and a.quantized.is_contiguous() and b.quantized.is_contiguous()
    x = TensorDescriptor.from_tensor(a.quantized, [c.m, BK]) if takes else a.quantized.contiguous()
    y = TensorDescriptor.from_tensor(b.quantized, [c.n, BK]) if takes else b.quantized.contiguous()
    total = triton.cdiv(m, c.m) * triton.cdiv(n, c.n)
    _scaled_gemm[(min(total, num_programs(a.quantized, per_processor=1)),)](
        x,
        y,
        out,
        a.scales,
        b.scales,
        m,
        n,
        k,
        *a.scales.stride(),
        *b.scales.stride(),
        A_KIND=kinds[0],
        B_KIND=kinds[1],
        ADD=add,
        TMA=takes,
        BM=c.m,
        BN=c.n,
        BK=BK,
        GROUP=c.group,
        num_stages=c.stages,
        num_warps=c.warps,
    )

"""Batch-invariant matmul: every row of the output is added up in one order, whatever the number of rows.

The order is that of the features, in steps that the tensor cores take, with fp32 sums; tiles differ with the number of
rows, and the order of additions in an element does not. A contraction in several parts is added up part by part, and
the parts in one binary tree: by one program, or, where rows are few and programs are wanted, by several and a second
launch (InvariantTiles.together).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from phalanx.base.dataclass import dataclass
from phalanx.ops.dense.invariant import InvariantMatmuls
from phalanx.ops.kernel_tools import grouped_order, triton_wide, wide_of

PROGRAMS = 132
"""Tiles are halved where there would be fewer."""
JOINED = 1024  # elements of a program that joins parts


@dataclass(frozen=True)
class InvariantTiles:
    """Sizes of an output tile and of a step along the contraction, loads in flight, warps, whether a program adds up
    all parts of the contraction, and rows of tiles that are computed side by side."""

    m: int
    n: int
    k: int
    stages: int
    warps: int
    together: bool = False
    group: int = 8


def tiles_of(rows: int, outputs: int, inputs: int, parts: int, dtype: torch.dtype) -> InvariantTiles:
    """The fastest of benchmarks/invariant_matmul.py on an H200. All tiles of 16-bit numbers have 64 rows for each four
    warps, so that Hopper takes the same steps along the contraction for all, and an element has the same bits in
    each."""
    if dtype.itemsize > 2:
        return InvariantTiles(32, 64, 32, 2, 4, together=rows > 256)
    wide = triton.cdiv(outputs, 128)
    if rows <= 64:
        few = wide * parts < PROGRAMS
        return InvariantTiles(64, 64, 64, 5, 4) if few else InvariantTiles(64, 128, 64, 4, 4)
    if parts == 1:
        few = triton.cdiv(rows, 128) * wide < PROGRAMS
        return InvariantTiles(64, 128, 64, 4, 4) if few else InvariantTiles(128, 128, 64, 4, 8)
    if rows <= 256 and inputs // parts >= 1024:
        return InvariantTiles(128, 256, 64, 3, 8)
    few = triton.cdiv(rows, 64) * wide < 2 * PROGRAMS
    return InvariantTiles(64, 64, 64, 5, 4, together=True) if few else InvariantTiles(64, 128, 64, 4, 4, together=True)


@triton.jit
def _load(x, row, k, rows, stop, K, TMA: tl.constexpr, B: tl.constexpr, BK: tl.constexpr):
    if TMA:
        tile = x.load([row, k])
    else:
        r = row + tl.arange(0, B)[:, None]
        c = k + tl.arange(0, BK)[None, :]
        tile = tl.load(x + r.to(tl.int64) * K + c, mask=(r < rows) & (c < stop), other=0.0)
    return tile


@triton.jit
def _added(part, acc, pair, four, eight):
    """The sum of parts so far, and what waits for its other half: as a binary counter carries."""
    if part % 2 == 1:
        acc = pair + acc
    if part % 4 == 3:
        acc = four + acc
    if part % 8 == 7:
        acc = eight + acc
    if part % 2 == 0:
        pair = acc
    if part % 4 == 1:
        four = acc
    if part % 8 == 3:
        eight = acc
    return acc, pair, four, eight


@triton.jit(do_not_specialize=("M",))
def _matmul(
    x,
    weight,
    bias,
    out,
    M,
    N,
    K,
    length,
    BIAS: tl.constexpr,
    TOGETHER: tl.constexpr,
    TMA: tl.constexpr,
    INTERPRETED: tl.constexpr,
    WIDE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A tile of x (M, K) weight^T (N, K): the sum of TOGETHER parts of `length` features each. out (groups of parts, M,
    N)."""
    down, along = grouped_order(tl.program_id(0), M, tl.cdiv(N, BN), GROUP, BM)
    row, col = down * BM, along * BN
    group = tl.program_id(1)
    acc = tl.zeros((BM, BN), WIDE)
    pair = acc
    four = acc
    eight = acc
    for part in range(TOGETHER):
        start = (group * TOGETHER + part) * length
        acc = tl.zeros((BM, BN), WIDE)
        for k in range(0, tl.cdiv(length, BK)):
            a = _load(x, row, start + k * BK, M, start + length, K, TMA, BM, BK)
            b = _load(weight, col, start + k * BK, N, start + length, K, TMA, BN, BK)
            if INTERPRETED:
                acc = tl.dot(a.to(WIDE), b.to(WIDE).T, acc, input_precision="ieee", out_dtype=WIDE)
            else:
                acc = tl.dot(a, b.T, acc, input_precision="ieee", out_dtype=WIDE)
        acc, pair, four, eight = _added(part, acc, pair, four, eight)
    rows = row + tl.arange(0, BM)
    cols = col + tl.arange(0, BN)
    if BIAS:
        acc += tl.load(bias + cols, mask=cols < N, other=0.0).to(WIDE)[None, :]
    place = (group.to(tl.int64) * M + rows)[:, None] * N + cols[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])


@triton.jit
def _add_parts(sums, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """sums (PARTS, count) added up in one binary tree."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.load(sums + at, mask=at < count, other=0.0)
    pair = acc
    four = acc
    eight = acc
    for part in tl.static_range(1, PARTS):
        acc = tl.load(sums + part * count + at, mask=at < count, other=0.0)
        acc, pair, four, eight = _added(part, acc, pair, four, eight)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=at < count)


def product(
    x: Tensor, weight: Tensor, parts: int, dtype: torch.dtype | None = None, bias: Tensor | None = None
) -> Tensor:
    """As ops.dense.invariant.product."""
    x, weight = x.contiguous(), weight.contiguous()
    (rows, inner), outputs = x.shape, len(weight)
    wide = wide_of(x.dtype)
    out = x.new_empty(rows, outputs, dtype=dtype or wide)
    if not out.numel():
        return out
    c, length = tiles_of(rows, outputs, inner, parts, x.dtype), inner // parts
    together = parts if c.together else 1
    groups = parts // together
    direct = groups == 1
    sums = out if direct else x.new_empty(groups, rows, outputs, dtype=wide)
    takes = (parts == 1 or length % c.k == 0) and all(
        t.shape[1] * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0 for t in (x, weight)
    )
    _matmul[(triton.cdiv(rows, c.m) * triton.cdiv(outputs, c.n), groups)](
        TensorDescriptor.from_tensor(x, [c.m, c.k]) if takes else x,
        TensorDescriptor.from_tensor(weight, [c.n, c.k]) if takes else weight,
        bias,
        sums,
        rows,
        outputs,
        inner,
        length,
        BIAS=direct and bias is not None,
        TOGETHER=together,
        TMA=takes,
        INTERPRETED=not x.is_cuda,
        WIDE=triton_wide(x.dtype),
        BM=c.m,
        BN=c.n,
        BK=c.k,
        GROUP=c.group,
        num_stages=c.stages,
        num_warps=c.warps,
    )
    if not direct:
        _add_parts[(triton.cdiv(out.numel(), JOINED),)](sums, out, out.numel(), PARTS=groups, BLOCK=JOINED, num_warps=4)
    return out


class TritonMatmuls(InvariantMatmuls):
    """ops.dense.matmul.MATMUL by this kernel."""

    product = staticmethod(product)

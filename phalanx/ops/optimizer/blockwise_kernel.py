"""AdamW in one pass over memory with moments quantized block by block. ops/optimizer/blockwise.py says how they are
stored; adamw_kernel.py is the same with wide ones."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.kernel_tools import triton_wide
from phalanx.ops.optimizer.adamw import AdamOptions, AdamRange
from phalanx.ops.optimizer.blockwise import BLOCK, Blockwise, dynamic_map, midpoints
from phalanx.ops.optimizer.masters import SplitMaster
from phalanx.ops.optimizer.masters_kernel import joined, split

RUN = 1024


@triton.jit
def _wide(quantized, scales, values, i, blocks, mask, block_mask):
    """(blocks, BLOCK) fp32 from the stored moments. values: the map."""
    index = tl.load(quantized + i, mask=mask, other=0).to(tl.int32)
    return tl.load(values + index) * tl.load(scales + blocks, mask=block_mask, other=0.0)[:, None]


@triton.jit
def _keep(x, quantized, scales, values, middles, i, blocks, mask, block_mask, SIGNED: tl.constexpr):
    """As blockwise.Blockwise.store_, for (blocks, BLOCK) fp32 numbers. middles: the map's midpoints."""
    scale = tl.max(x, 1)
    if SIGNED:
        low = -tl.min(x, 1)
        scale = tl.where(low >= scale, tl.div_rn(low, -tl.load(values)), scale)
    scale = ((scale.to(tl.int32, bitcast=True) + 0x80) & ~0xFF).to(tl.float32, bitcast=True)
    relative = tl.div_rn(x, tl.where(scale > 0.0, scale, 1.0)[:, None])
    index = tl.zeros(x.shape, tl.int32)
    for bit in tl.static_range(8):  # how many midpoints are smaller: bit by bit, the highest first
        higher = index + (128 >> bit)
        index = tl.where(tl.load(middles + higher - 1) < relative, higher, index)
    if not SIGNED:
        index = tl.where((x > 0.0) & (index == 0), 1, index)
    tl.store(quantized + i, index.to(tl.uint8), mask=mask)
    tl.store(scales + blocks, scale, mask=block_mask)


@triton.jit
def _adamw(
    p,
    ties,
    g,
    m,
    m_scales,
    v,
    v_scales,
    out,
    scalars,
    signed_map,
    signed_middles,
    unsigned_map,
    unsigned_middles,
    n,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    COPY: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDE: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """p, ties, out, scalars as in adamw_kernel."""
    first = tl.program_id(0).to(tl.int64) * RUN
    blocks = first // BLOCK + tl.arange(0, RUN // BLOCK)
    i = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = i < n
    block_mask = blocks * BLOCK < n
    if tl.load(scalars + 4) == 0:
        grad = tl.load(g + i, mask=mask, other=0.0) * tl.load(scalars).to(WIDE)
        m1 = _wide(m, m_scales, signed_map, i, blocks, mask, block_mask).to(WIDE)
        m1 = BETA1 * m1 + (1.0 - BETA1) * grad
        v1 = _wide(v, v_scales, unsigned_map, i, blocks, mask, block_mask).to(WIDE)
        v1 = BETA2 * v1 + (1.0 - BETA2) * grad * grad
        if SPLIT:
            x = joined(out, p, ties, i, mask)
        else:
            x = tl.load(p + i, mask=mask, other=0.0)
        x = x * tl.load(scalars + 3).to(WIDE)
        x = x - tl.load(scalars + 1).to(WIDE) * m1 / (tl.sqrt(v1) * tl.load(scalars + 2).to(WIDE) + EPS)
        _keep(m1.to(tl.float32), m, m_scales, signed_map, signed_middles, i, blocks, mask, block_mask, True)
        _keep(v1.to(tl.float32), v, v_scales, unsigned_map, unsigned_middles, i, blocks, mask, block_mask, False)
        if SPLIT:
            split(x, out, p, ties, first, i, mask, n, RUN)
        else:
            tl.store(p + i, x, mask=mask)
        if COPY:
            tl.store(out + i, x.to(tl.float32).to(out.dtype.element_ty), mask=mask)
    tl.store(g + i, tl.zeros(i.shape, WIDE), mask=mask)


def adamw_blockwise_(part: AdamRange, m: Blockwise, v: Blockwise, scalars: Tensor, options: AdamOptions) -> None:
    """As adamw_kernel.adamw_flat_; m and v are the range's moments."""
    p, g = part.master, part.grad
    n = len(p)
    if n:
        divided = isinstance(p, SplitMaster)
        _adamw[(triton.cdiv(n, RUN),)](
            p.rest if isinstance(p, SplitMaster) else p,
            p.ties if isinstance(p, SplitMaster) else p,
            g,
            m.quantized,
            m.scales,
            v.quantized,
            v.scales,
            p.weights if isinstance(p, SplitMaster) else part.out,
            scalars,
            dynamic_map(True, g.device),
            midpoints(True, g.device),
            dynamic_map(False, g.device),
            midpoints(False, g.device),
            n,
            BETA1=options.beta1,
            BETA2=options.beta2,
            EPS=options.eps,
            COPY=part.out is not None and not divided,
            SPLIT=divided,
            WIDE=triton_wide(g.dtype),
            RUN=RUN,
            BLOCK=BLOCK,
            num_warps=4,
        )

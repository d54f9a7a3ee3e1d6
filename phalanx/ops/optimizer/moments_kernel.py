"""AdamW in one pass over memory with moments in FP8. ops/optimizer/moments.py says how they are stored; adamw_kernel.py
is the same with wide ones."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.kernel_tools import triton_wide
from phalanx.ops.optimizer.adamw import AdamOptions, AdamRange
from phalanx.ops.optimizer.masters import SplitMaster
from phalanx.ops.optimizer.masters_kernel import joined, split
from phalanx.ops.optimizer.moments import BLOCK, LEAST, MOST, Narrow

RUN = 1024


@triton.jit
def _wide(quantized, exponents, i, blocks, mask, block_mask):
    """(blocks, BLOCK) fp32 from the stored moments."""
    power = tl.load(exponents + blocks, mask=block_mask, other=0).to(tl.int32)
    return (
        tl.load(quantized + i, mask=mask, other=0.0).to(tl.float32)
        * ((127 + power) << 23).to(tl.float32, bitcast=True)[:, None]
    )


@triton.jit
def _keep(
    kept,
    quantized,
    exponents,
    i,
    blocks,
    mask,
    block_mask,
    step,
    ROOT: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
):
    """As moments.Narrow.store_, for (blocks, BLOCK) fp32 numbers."""
    largest = tl.max(tl.abs(kept), 1).to(tl.int32, bitcast=True)
    power = (largest >> 23) - 127 - 8 + ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)
    power = tl.minimum(tl.maximum(power, LEAST), MOST)
    bits = kept.to(tl.uint32, bitcast=True)
    x = bits ^ ((step * 2 + ROOT).to(tl.uint32) * 0x9E3779B9)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    noise = ((x ^ (x >> 16)) & 0xFFFFF).to(tl.int32)
    size = tl.abs(kept) * ((127 - power) << 23).to(tl.float32, bitcast=True)[:, None]
    full = ((size.to(tl.int32, bitcast=True) + noise) & (-1 << 20)).to(tl.float32, bitcast=True)
    small = tl.floor(size * 512.0 + noise.to(tl.float32) * (2.0**-20)) * (2.0**-9)
    size = tl.minimum(tl.where(size < 2.0**-6, small, full), 448.0)
    if ROOT:
        size = tl.where((kept > 0.0) & (size == 0.0), 2.0**-9, size)
    signed = tl.where(kept < 0.0, -size, size)
    tl.store(quantized + i, signed.to(quantized.dtype.element_ty), mask=mask)
    tl.store(exponents + blocks, power.to(tl.int8), mask=block_mask)


@triton.jit
def _adamw(
    p,
    ties,
    g,
    m,
    m_exponents,
    v,
    v_exponents,
    out,
    scalars,
    step,
    n,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    COPY: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDE: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """p, ties, out, scalars as in adamw_kernel; step () fp32."""
    first = tl.program_id(0).to(tl.int64) * RUN
    blocks = first // BLOCK + tl.arange(0, RUN // BLOCK)
    i = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = i < n
    block_mask = blocks * BLOCK < n
    if tl.load(scalars + 4) == 0:
        grad = tl.load(g + i, mask=mask, other=0.0) * tl.load(scalars).to(WIDE)
        root = _wide(v, v_exponents, i, blocks, mask, block_mask).to(WIDE)
        m1 = BETA1 * _wide(m, m_exponents, i, blocks, mask, block_mask).to(WIDE) + (1.0 - BETA1) * grad
        v1 = BETA2 * (root * root) + (1.0 - BETA2) * grad * grad
        if SPLIT:
            x = joined(out, p, ties, i, mask)
        else:
            x = tl.load(p + i, mask=mask, other=0.0)
        x = x * tl.load(scalars + 3).to(WIDE)
        x = x - tl.load(scalars + 1).to(WIDE) * m1 / (tl.sqrt(v1) * tl.load(scalars + 2).to(WIDE) + EPS)
        count = tl.load(step).to(tl.int32)
        _keep(m1.to(tl.float32), m, m_exponents, i, blocks, mask, block_mask, count, 0, LEAST, MOST)
        _keep(tl.sqrt_rn(v1.to(tl.float32)), v, v_exponents, i, blocks, mask, block_mask, count, 1, LEAST, MOST)
        if SPLIT:
            split(x, out, p, ties, first, i, mask, n, RUN)
        else:
            tl.store(p + i, x, mask=mask)
        if COPY:
            tl.store(out + i, x.to(tl.float32).to(out.dtype.element_ty), mask=mask)
    tl.store(g + i, tl.zeros(i.shape, WIDE), mask=mask)


def adamw_narrow_(part: AdamRange, m: Narrow, v: Narrow, scalars: Tensor, step: Tensor, options: AdamOptions) -> None:
    """As adamw_kernel.adamw_flat_; m and v are the range's moments in FP8, `step` () fp32."""
    p, g = part.master, part.grad
    n = len(p)
    if n:
        divided = isinstance(p, SplitMaster)
        _adamw[(triton.cdiv(n, RUN),)](
            p.rest if isinstance(p, SplitMaster) else p,
            p.ties if isinstance(p, SplitMaster) else p,
            g,
            m.quantized,
            m.exponents,
            v.quantized,
            v.exponents,
            p.weights if isinstance(p, SplitMaster) else part.out,
            scalars,
            step,
            n,
            BETA1=options.beta1,
            BETA2=options.beta2,
            EPS=options.eps,
            COPY=part.out is not None and not divided,
            SPLIT=divided,
            WIDE=triton_wide(g.dtype),
            LEAST=LEAST,
            MOST=MOST,
            RUN=RUN,
            BLOCK=BLOCK,
            num_warps=4,
        )

"""Masters that are split (ops/optimizer/masters.py) inside Triton kernels: joined in registers, and split again."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def joined(weights, rest, ties, i, mask):
    """The fp32 masters of elements i, in its shape."""
    upper = tl.load(weights + i, mask=mask, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
    tie = (tl.load(ties + i // 8, mask=mask, other=0).to(tl.int32) >> (i % 8).to(tl.int32)) & 1
    low = tl.load(rest + i, mask=mask, other=0).to(tl.int32)
    return (((upper + tie) << 16) + low).to(tl.float32, bitcast=True)


@triton.jit
def split(x, weights, rest, ties, first, i, mask, n, SIZE: tl.constexpr):
    """Store fp32 masters x of the elements i, which are SIZE neighbours from `first` on, a multiple of 8."""
    bits = x.to(tl.int32, bitcast=True)
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # as a GPU casts to bf16, also where the interpreter cuts off
    upper = tl.where(x == x, upper, 0x7FC0)
    difference = bits - (upper << 16)
    tie = (difference == 32768).to(tl.int32)
    tl.store(weights + i, upper.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
    tl.store(rest + i, (difference - (tie << 16)).to(tl.int16), mask=mask)
    eight = tl.sum(tl.reshape(tie, (SIZE // 8, 8)) << tl.arange(0, 8)[None, :], 1)
    k = first // 8 + tl.arange(0, SIZE // 8)
    tl.store(ties + k, eight.to(tl.uint8), mask=k * 8 < n)

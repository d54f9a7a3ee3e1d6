"""Dropout by counters (ops.dense.dropout), in one pass over memory: each program draws the Philox words of some tokens
and features and multiplies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.base.rng import threshold
from phalanx.ops.kernel_tools import triton_wide

if TYPE_CHECKING:
    from phalanx.ops.dense.dropout import TokenDropout

LANES = 256  # counters of a program, with a word for each of four features


@triton.jit(do_not_specialize=["key0", "key1", "least"])
def _drop(
    x,
    y,
    samples,
    positions,
    width,
    stride,
    first,
    key0,
    key1,
    least,
    SCALE: tl.constexpr,
    LANES: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = first // 4 + tl.program_id(1) * LANES + tl.arange(0, LANES)
    sample = tl.load(samples + row).to(tl.uint32)
    position = tl.load(positions + row).to(tl.uint32)
    c0 = lanes.to(tl.uint32)
    zero = tl.zeros_like(c0)
    key = key0.to(tl.uint32).to(tl.uint64) | (key1.to(tl.uint32).to(tl.uint64) << 32)
    w0, w1, w2, w3 = tl.philox(key, c0, zero + position, zero + sample, zero)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (4 * LANES,))  # in the order of the features
    cols = (first // 4 + tl.program_id(1) * LANES) * 4 + tl.arange(0, 4 * LANES) - first
    here = (cols >= 0) & (cols < width)
    factor = tl.where(words >= least.to(tl.uint32), tl.full((4 * LANES,), SCALE, WIDE), 0.0)
    value = tl.load(x + row * stride + cols, here, 0).to(WIDE)
    tl.store(y + row * width + cols, value * factor, here)


def drop(x: Tensor, how: TokenDropout) -> Tensor:
    width = x.shape[-1]
    rows, y = x.numel() // max(1, width), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x = x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous()
    lanes = (how.first + width + 3) // 4 - how.first // 4
    samples, positions = (t.contiguous() for t in (how.samples, how.positions))
    words = (signed(word) for word in (*how.key, threshold(how.p)))
    consts = dict(SCALE=1.0 / (1.0 - how.p), LANES=LANES, WIDE=triton_wide(x.dtype), num_warps=4)
    _drop[rows, triton.cdiv(lanes, LANES)](x, y, samples, positions, width, x.stride(0), how.first, *words, **consts)
    return y


def signed(word: int) -> int:
    """The int32 with the bits of a word of 32 bits: one kernel serves all keys."""
    return word - (1 << 32) if word >= 1 << 31 else word

"""Softmax statistics of a chunk of logits, and their gradient written over the logits: one row (token) for each
program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.dense.cross_entropy import Columns
from phalanx.ops.kernel_tools import triton_wide, wide_of

BLOCK = 2048
CHUNK_ELEMENTS = 1 << 30  # logits of a chunk, 2 GiB in bf16: each chunk reads and writes the whole weight gradient


@triton.jit
def _capped(x, CAP: tl.constexpr):
    """CAP * tanh(x / CAP), or x where CAP is 0. tanh comes from an exponential that never overflows."""
    if CAP == 0.0:
        return x
    else:
        shrunk = tl.exp(-2.0 / CAP * tl.abs(x))
        capped = CAP * (1.0 - shrunk) / (1.0 + shrunk)
        return tl.where(x < 0.0, -capped, capped)


@triton.jit
def _stats(
    logits,
    row_of_label,
    here,
    lse,
    label_logit,
    V,
    stride,
    CAP: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Log-sum-exp of the first V logits of a row, and the label's logit, in one pass."""
    t = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    lowest: tl.constexpr = -3.4028234663852886e38  # finite, so that -inf differs from it
    top = tl.full((BLOCK,), lowest, WIDE)
    total = tl.zeros((BLOCK,), WIDE)
    for start in range(0, V, BLOCK):
        x = tl.load(logits + t * stride + start + lanes, mask=start + lanes < V, other=float("-inf")).to(WIDE)
        if CAP != 0.0:
            x = tl.where(start + lanes < V, _capped(x, CAP), float("-inf"))
        shrunk = tl.exp(
            -tl.abs(x - top)
        )  # the smaller of the two relative to the larger: one exp instead of two, and exp is the bottleneck
        total = tl.where(x > top, total * shrunk + 1.0, total + shrunk)
        top = tl.maximum(top, x)
    highest = tl.max(top, 0)
    sum_all = tl.sum(total * tl.exp(top - highest), 0)
    tl.store(lse + t, tl.log(sum_all) + highest)
    held = tl.load(here + t)
    value = tl.load(logits + t * stride + tl.load(row_of_label + t), mask=held, other=0.0).to(WIDE)
    tl.store(label_logit + t, _capped(value, CAP))


@triton.jit
def _gradient(
    logits, row_of_label, here, lse, scale, V, stride, CAP: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """Replace logits by (softmax - one hot of the label) * scale, times the slope of the cap; 0 in the padding."""
    t = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    norm = tl.load(lse + t)
    factor = tl.load(scale + t).to(WIDE)
    label = tl.where(tl.load(here + t), tl.load(row_of_label + t), -1)
    for start in range(0, stride, BLOCK):
        cols = start + lanes
        x = tl.load(logits + t * stride + cols, mask=cols < V, other=float("-inf")).to(WIDE)
        if CAP != 0.0:
            x = _capped(x, CAP)
        d = tl.exp(x - norm)
        d = tl.where(cols == label, d - 1.0, d) * factor
        if CAP != 0.0:
            d = tl.where(cols < V, d * (1.0 - (x / CAP) * (x / CAP)), 0.0)
        tl.store(logits + t * stride + cols, d.to(logits.dtype.element_ty), mask=cols < stride)


def _constants(logits: Tensor, columns: Columns) -> dict[str, object]:
    return dict(CAP=columns.cap or 0.0, WIDE=triton_wide(logits.dtype), BLOCK=BLOCK, num_warps=8)


def softmax_stats(logits: Tensor, rows: Tensor, here: Tensor, columns: Columns) -> Tensor:
    """(2, T) in at least fp32: log-sum-exp over the columns of logits (T, V) that are ids; logit of column rows[t],
    0 where not `here`; of capped logits."""
    tokens, stride = logits.shape
    out = torch.empty(2, tokens, dtype=wide_of(logits.dtype), device=logits.device)
    if tokens:
        _stats[(tokens,)](logits, rows, here, out[0], out[1], columns.count, stride, **_constants(logits, columns))
    return out


def softmax_gradient_(
    logits: Tensor, rows: Tensor, here: Tensor, lse: Tensor, scale: Tensor, columns: Columns
) -> Tensor:
    """logits (T, V), contiguous, are replaced in place by (softmax - one hot) * scale[t], times the slope of the
    cap."""
    tokens, stride = logits.shape
    if tokens:
        _gradient[(tokens,)](logits, rows, here, lse, scale, columns.count, stride, **_constants(logits, columns))
    return logits

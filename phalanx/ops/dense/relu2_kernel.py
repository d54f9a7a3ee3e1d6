"""The square of ReLU, forward and backward, in one pass over memory each. Rows past the last one are not touched."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.dense.gated_kernel import block_of
from phalanx.ops.kernel_tools import triton_wide


@triton.jit
def _positive(x):
    """max(x, 0). NaN stays NaN, which tl.maximum would turn into 0."""
    return tl.where(x < 0.0, 0.0, x)


@triton.jit
def _forward(
    x,
    weights,
    last,
    y,
    F,
    WEIGH: tl.constexpr,
    SOME: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if SOME:
        if row >= tl.load(last):
            return
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < F
    positive = _positive(tl.load(x + row * F + cols, mask=mask, other=0.0).to(WIDE))
    out = positive * positive
    if WEIGH:
        out = out * tl.load(weights + row).to(WIDE)
    tl.store(y + row * F + cols, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    dy,
    x,
    weights,
    last,
    dx,
    dweights,
    F,
    WEIGH: tl.constexpr,
    SOME: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """A program handles BLOCKS blocks of a row: all of them where the weight's gradient is summed over the row."""
    row = tl.program_id(0).to(tl.int64)
    if SOME:
        if row >= tl.load(last):
            if WEIGH:
                tl.store(dweights + row, 0.0)
            return
    if WEIGH:
        weight = tl.load(weights + row).to(WIDE)
        sums = tl.zeros((BLOCK,), WIDE)
    for block in range(BLOCKS):
        cols = (tl.program_id(1) * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        mask = cols < F
        at = row * F + cols
        d = tl.load(dy + at, mask=mask, other=0.0).to(WIDE)
        positive = _positive(tl.load(x + at, mask=mask, other=0.0).to(WIDE))
        slope = 2.0 * positive * d
        if WEIGH:
            sums += positive * positive * d
            slope = slope * weight
        tl.store(dx + at, slope.to(dx.dtype.element_ty), mask=mask)
    if WEIGH:
        tl.store(dweights + row, tl.sum(sums, 0).to(dweights.dtype.element_ty))


def relu2_forward(x: Tensor, weights: Tensor | None = None, last: Tensor | None = None) -> Tensor:
    """max(x, 0)^2 (R, F), times `weights` (R,). Rows from row `last` () on keep their values."""
    x = x.contiguous()
    y = torch.empty_like(x)
    rows, inner = x.shape
    block = block_of(inner)
    how = dict(WEIGH=weights is not None, SOME=last is not None, WIDE=triton_wide(x.dtype), BLOCK=block)
    if y.numel():
        _forward[(rows, triton.cdiv(inner, block))](x, weights, last, y, inner, **how)
    return y


def relu2_backward(
    dy: Tensor, x: Tensor, weights: Tensor | None = None, last: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x (R, F) and of the weights (R,)."""
    dy, x = dy.contiguous(), x.contiguous()
    dx, dweights = torch.empty_like(x), None if weights is None else torch.empty_like(weights)
    rows, inner = x.shape
    block = block_of(inner)
    blocks = triton.cdiv(inner, block)
    together = 1 if weights is None else blocks
    how = dict(WEIGH=weights is not None, SOME=last is not None, WIDE=triton_wide(x.dtype), BLOCK=block)
    if dx.numel():
        _backward[(rows, blocks // together)](dy, x, weights, last, dx, dweights, inner, BLOCKS=together, **how)
    return dx, dweights

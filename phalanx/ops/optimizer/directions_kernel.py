"""The passes of ops.optimizer.directions on a GPU, each once over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.kernel_tools import triton_wide
from phalanx.ops.optimizer.directions import MatrixRange, MomentumOptions

BLOCK = 1024
LONG_BLOCK = 4096  # where few bytes of an element are moved


@triton.jit
def _directions(
    g,
    m,
    out,
    factor,
    skip,
    n,
    DECAY: tl.constexpr,
    NESTEROV: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    grad = tl.load(g + i, mask=mask, other=0.0) * tl.load(factor).to(WIDE)
    before = tl.load(m + i, mask=mask, other=0.0).to(WIDE)
    after = before + (1.0 - DECAY) * (grad - before)
    made = after
    if NESTEROV:
        made = grad + DECAY * (after - grad)
    tl.store(out + i, made.to(out.dtype.element_ty), mask=mask)
    tl.store(m + i, after.to(m.dtype.element_ty), mask=mask & (tl.load(skip) == 0))


@triton.jit
def _normalized(x, norms, out, n, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Of matrix program_id(1), n elements."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    matrix = tl.program_id(1).to(tl.int64)
    value = tl.load(x + matrix * n + i, mask=i < n, other=0.0).to(WIDE) / tl.load(norms + matrix).to(WIDE)
    tl.store(out + matrix * n + i, value.to(out.dtype.element_ty), mask=i < n)


@triton.jit
def _apply(p, u, w, skip, lr, kept, n, COPY: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """lr and kept, which is 1 - lr * decay, are () float64."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    x = tl.load(p + i, mask=mask, other=0.0)
    if tl.load(skip) == 0:
        x = x * tl.load(kept).to(WIDE)
        x -= tl.load(u + i, mask=mask, other=0.0).to(WIDE) * tl.load(lr).to(WIDE)
        tl.store(p + i, x, mask=mask)
    if COPY:
        tl.store(w + i, x.to(w.dtype.element_ty), mask=mask)


def directions(part: MatrixRange, to: Tensor, options: MomentumOptions, factor: Tensor, skip: Tensor) -> None:
    """As ops.optimizer.directions.directions."""
    if n := len(to):
        how = dict(DECAY=options.decay, NESTEROV=options.nesterov, WIDE=triton_wide(part.grad.dtype), BLOCK=BLOCK)
        _directions[(triton.cdiv(n, BLOCK),)](part.grad, part.momentum, to, factor, skip, n, **how, num_warps=4)


def apply(part: MatrixRange, update: Tensor, rates: tuple[float, float], skip: Tensor) -> None:
    """As ops.optimizer.directions.apply."""
    if n := len(update):
        (lr, decay), grad = rates, part.grad
        scalars = (torch.full((), x, dtype=torch.float64, device=grad.device) for x in (lr, 1 - lr * decay))
        how = dict(COPY=part.out is not None, WIDE=triton_wide(grad.dtype), BLOCK=BLOCK, num_warps=4)
        _apply[(triton.cdiv(n, BLOCK),)](part.master, update, part.out, skip, *scalars, n, **how)


def normalized(matrices: Tensor, norms: Tensor, dtype: torch.dtype) -> Tensor:
    """As ops.optimizer.directions.normalized."""
    across = not matrices.is_contiguous() and matrices.mT.is_contiguous()
    stored = matrices.mT if across else matrices.contiguous()
    out, n = torch.empty_like(stored, dtype=dtype), stored[0].numel()
    how = dict(WIDE=triton_wide(norms.dtype), BLOCK=LONG_BLOCK, num_warps=8)
    _normalized[(triton.cdiv(n, LONG_BLOCK), len(stored))](stored, norms, out, n, **how)
    return out.mT if across else out

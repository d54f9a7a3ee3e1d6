"""AdamW in one pass over memory: unscale and clip, moments, master, low-precision copy, and set the gradient to
zero."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.kernel_tools import triton_wide
from phalanx.ops.optimizer.adamw import AdamOptions, AdamRange
from phalanx.ops.optimizer.moments import Narrow
from phalanx.ops.optimizer.moments_kernel import adamw_narrow_

BLOCK = 1024


@triton.jit
def _adamw(
    p,
    g,
    m,
    v,
    out,
    scalars,
    n,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    COPY: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """scalars = [gradient factor, lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t), 1 - lr * decay, skip]."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    zero = tl.zeros((BLOCK,), WIDE)
    if tl.load(scalars + 4) == 0:
        grad = tl.load(g + i, mask=mask, other=0.0) * tl.load(scalars).to(WIDE)
        m1 = BETA1 * tl.load(m + i, mask=mask, other=0.0).to(WIDE) + (1.0 - BETA1) * grad
        v1 = BETA2 * tl.load(v + i, mask=mask, other=0.0).to(WIDE) + (1.0 - BETA2) * grad * grad
        x = tl.load(p + i, mask=mask, other=0.0) * tl.load(scalars + 3).to(WIDE)
        x = x - tl.load(scalars + 1).to(WIDE) * m1 / (tl.sqrt(v1) * tl.load(scalars + 2).to(WIDE) + EPS)
        tl.store(m + i, m1.to(m.dtype.element_ty), mask=mask)
        tl.store(v + i, v1.to(v.dtype.element_ty), mask=mask)
        tl.store(p + i, x, mask=mask)
        if COPY:
            tl.store(out + i, x.to(tl.float32).to(out.dtype.element_ty), mask=mask)
    tl.store(g + i, zero, mask=mask)


def update_(parts: list[AdamRange], step: Tensor, options: AdamOptions, factor: Tensor, skip: Tensor) -> None:
    """As ops.optimizer.adamw.update_."""
    o, t = options, step.double()
    kept = torch.full_like(t, 1 - o.lr * o.decay)
    scalars = torch.stack((factor.double(), o.lr / (1 - o.beta1**t), (1 - o.beta2**t).rsqrt(), kept, skip.double()))
    for p in parts:
        if isinstance(p.m, Narrow) and isinstance(p.v, Narrow):
            adamw_narrow_(p.master, p.grad, p.m, p.v, p.out, scalars, step, o.beta1, o.beta2, o.eps)
        else:
            adamw_flat_(p.master, p.grad, p.m, p.v, p.out, scalars, o.beta1, o.beta2, o.eps)  # type: ignore[arg-type]


def adamw_flat_(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    out: Tensor | None,
    scalars: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """All (n,) in the master dtype; m and v may be in bf16; `out` in the compute dtype or None; `scalars` (5,) float64,
    see `_adamw`."""
    n = p.numel()
    if n:
        _adamw[(triton.cdiv(n, BLOCK),)](
            p,
            g,
            m,
            v,
            out,
            scalars,
            n,
            BETA1=beta1,
            BETA2=beta2,
            EPS=eps,
            COPY=out is not None,
            WIDE=triton_wide(p.dtype),
            BLOCK=BLOCK,
            num_warps=4,
        )

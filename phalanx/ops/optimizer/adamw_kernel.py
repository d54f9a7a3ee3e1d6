"""AdamW in one pass over memory: unscale and clip, moments, master, low-precision copy, and set the gradient to
zero."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.kernel_tools import triton_wide
from phalanx.ops.optimizer.adamw import AdamOptions, AdamRange
from phalanx.ops.optimizer.blockwise import Blockwise
from phalanx.ops.optimizer.blockwise_kernel import adamw_blockwise_
from phalanx.ops.optimizer.masters import SplitMaster
from phalanx.ops.optimizer.masters_kernel import joined, split
from phalanx.ops.optimizer.moments import Narrow
from phalanx.ops.optimizer.moments_kernel import adamw_narrow_

BLOCK = 1024


@triton.jit
def _adamw(
    p,
    ties,
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
    SPLIT: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """scalars = [gradient factor, lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t), 1 - lr * decay, skip]. SPLIT: p is the
    rest of masters.SplitMaster, with its ties, and out are its weights; otherwise ties are not read."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = first + tl.arange(0, BLOCK)
    mask = i < n
    zero = tl.zeros((BLOCK,), WIDE)
    if tl.load(scalars + 4) == 0:
        grad = tl.load(g + i, mask=mask, other=0.0) * tl.load(scalars).to(WIDE)
        m1 = BETA1 * tl.load(m + i, mask=mask, other=0.0).to(WIDE) + (1.0 - BETA1) * grad
        v1 = BETA2 * tl.load(v + i, mask=mask, other=0.0).to(WIDE) + (1.0 - BETA2) * grad * grad
        if SPLIT:
            x = joined(out, p, ties, i, mask)
        else:
            x = tl.load(p + i, mask=mask, other=0.0)
        x = x * tl.load(scalars + 3).to(WIDE)
        x = x - tl.load(scalars + 1).to(WIDE) * m1 / (tl.sqrt(v1) * tl.load(scalars + 2).to(WIDE) + EPS)
        tl.store(m + i, m1.to(m.dtype.element_ty), mask=mask)
        tl.store(v + i, v1.to(v.dtype.element_ty), mask=mask)
        if SPLIT:
            split(x, out, p, ties, first, i, mask, n, BLOCK)
        else:
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
        if isinstance(p.m, Blockwise) and isinstance(p.v, Blockwise):
            adamw_blockwise_(p, p.m, p.v, scalars, o)
        elif isinstance(p.m, Narrow) and isinstance(p.v, Narrow):
            adamw_narrow_(p, p.m, p.v, scalars, step, o)
        else:
            adamw_flat_(p, scalars, o)


def adamw_flat_(part: AdamRange, scalars: Tensor, options: AdamOptions) -> None:
    """All (n,) in the master dtype, or masters split; m and v may be in bf16; `scalars` (5,) float64, see `_adamw`."""
    p = part.master
    n = len(p)
    if n:
        divided = isinstance(p, SplitMaster)
        _adamw[(triton.cdiv(n, BLOCK),)](
            p.rest if isinstance(p, SplitMaster) else p,
            p.ties if isinstance(p, SplitMaster) else p,
            part.grad,
            part.m,
            part.v,
            p.weights if isinstance(p, SplitMaster) else part.out,
            scalars,
            n,
            BETA1=options.beta1,
            BETA2=options.beta2,
            EPS=options.eps,
            COPY=part.out is not None and not divided,
            SPLIT=divided,
            WIDE=triton_wide(part.grad.dtype),
            BLOCK=BLOCK,
            num_warps=4,
        )

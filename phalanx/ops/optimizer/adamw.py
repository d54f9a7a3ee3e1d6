"""AdamW over flat tensors: on a GPU one pass over memory (kernels.adamw), elsewhere torch's fused kernel; and the
reference of both.

The same call scales and clips the gradient, writes the low-precision weights and sets the gradient back to zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.ops.op import Kernels, use_triton
from phalanx.ops.optimizer.moments import Narrow
from phalanx.ops.optimizer.shard import keep, widened


@dataclass(frozen=True)
class AdamRange:
    """A run of elements of one group: master, gradient, m and v (n,) in the master dtype, m and v perhaps in a
    narrower one or in 8 bits (rounded after each step); `out` (n,) the weights if they are apart."""

    master: Tensor
    grad: Tensor
    m: Tensor | Narrow
    v: Tensor | Narrow
    out: Tensor | None = None


@dataclass(frozen=True)
class AdamOptions:
    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float


def adamw_(
    parts: list[AdamRange], step: Tensor, options: AdamOptions, factor: Tensor, skip: Tensor, kernels: Kernels = "auto"
) -> None:
    """One step in place. `step` () float32 counts applied steps, this one included; where `skip` () float32 is 1
    only the gradients change.

    Loshchilov & Hutter, "Decoupled weight decay regularization", 2019: with g = factor * grad, p *= 1 - lr * decay;
    m, v moving averages of g, g^2; p -= lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps); out = p; grad =
    0.
    """
    if not parts:
        return
    o = options
    if use_triton(kernels, parts[0].master):
        from phalanx.ops.optimizer.adamw_kernel import adamw_flat_

        t = step.double()
        kept = torch.full_like(t, 1 - o.lr * o.decay)
        scalars = torch.stack((factor.double(), o.lr / (1 - o.beta1**t), (1 - o.beta2**t).rsqrt(), kept, skip.double()))
        for p in parts:
            if isinstance(p.m, Narrow) and isinstance(p.v, Narrow):
                from phalanx.ops.optimizer.moments_kernel import adamw_narrow_

                adamw_narrow_(p.master, p.grad, p.m, p.v, p.out, scalars, step, o.beta1, o.beta2, o.eps)
            else:
                adamw_flat_(p.master, p.grad, p.m, p.v, p.out, scalars, o.beta1, o.beta2, o.eps)  # type: ignore[arg-type]
        return
    ms, vs = (
        [widened(p.m, p.master.dtype) for p in parts],
        [widened(p.v, p.master.dtype) for p in parts],
    )  # themselves where they are as wide
    grads = [p.grad for p in parts]
    torch._foreach_mul_(grads, factor.to(grads[0].dtype))
    torch._fused_adamw_(
        [p.master for p in parts],
        grads,
        ms,
        vs,
        [],
        [step] * len(parts),
        lr=o.lr,
        beta1=o.beta1,
        beta2=o.beta2,
        weight_decay=o.decay,
        eps=o.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None,
        found_inf=skip,
    )
    for p, m, v in zip(parts, ms, vs):
        if p.m is not m:
            keep(p.m, m, step)
            keep(p.v, v, step)
        if p.out is not None:
            p.out.copy_(p.master)
        p.grad.zero_()


def adamw_reference_(parts: list[AdamRange], step: Tensor, options: AdamOptions, factor: Tensor, skip: Tensor) -> None:
    """The reference of `adamw_`."""
    o, t = options, step.item()
    for p in parts:
        g = p.grad * factor.to(p.grad.dtype)
        p.grad.zero_()
        if skip.item() == 1:
            continue
        p.master.mul_(1 - o.lr * o.decay)
        m, v = (
            widened(p.m, g.dtype).lerp(g, 1 - o.beta1),
            widened(p.v, g.dtype).mul(o.beta2).addcmul_(g, g, value=1 - o.beta2),
        )
        keep(p.m, m, step)
        keep(p.v, v, step)
        p.master.addcdiv_(m / (1 - o.beta1**t), (v / (1 - o.beta2**t)).sqrt_().add_(o.eps), value=-o.lr)
        if p.out is not None:
            p.out.copy_(p.master)

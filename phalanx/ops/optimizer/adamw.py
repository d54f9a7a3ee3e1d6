"""AdamW over flat tensors: the choice of implementation (one pass over memory on a GPU, adamw_kernel.py; torch's fused
kernel elsewhere), and the formula for both.

The same call scales and clips the gradient, writes the low-precision weights and sets the gradient back to zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.ops.op import Case, Kernels, Op, triton
from phalanx.ops.optimizer.masters import SplitMaster
from phalanx.ops.optimizer.packed import PackedTensor
from phalanx.ops.optimizer.shard import keep, widened


@dataclass(frozen=True)
class AdamRange:
    """A range of elements of one parameter group: master, gradient, m and v (n,) in the master dtype; m and v may be in
    a narrower dtype (rounded after each step), and all but the gradient packed; `out` (n,) the weights, if they are
    stored separately (packed masters store them too)."""

    master: Tensor | SplitMaster
    grad: Tensor
    m: Tensor | PackedTensor
    v: Tensor | PackedTensor
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
    """One step, in place. `step` () float32 counts applied steps, including this one. Where `skip` () float32 is 1,
    only the gradients change.

    Loshchilov & Hutter, "Decoupled weight decay regularization", 2019: with g = factor * grad, p *= 1 - lr * decay; m
    and v are moving averages of g and g^2; p -= lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps); out = p;
    grad = 0.
    """
    if parts:
        ADAMW.choose(kernels, parts[0].grad).update_(parts, step, options, factor, skip)


def update_(parts: list[AdamRange], step: Tensor, options: AdamOptions, factor: Tensor, skip: Tensor) -> None:
    """As `adamw_`, by torch's fused kernel."""
    o = options
    # the tensors themselves, unless they are narrower or packed
    masters, ms, vs = ([widened(getattr(p, name), p.grad.dtype) for p in parts] for name in ("master", "m", "v"))
    grads = [p.grad for p in parts]
    torch._foreach_mul_(grads, factor.to(grads[0].dtype))
    torch._fused_adamw_(
        masters,
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
    for p, *found in zip(parts, masters, ms, vs):
        for kept, values in zip((p.master, p.m, p.v), found):
            if kept is not values:
                keep(kept, values, step)
        if p.out is not None:
            p.out.copy_(found[0])
        p.grad.zero_()


def adamw_reference_(parts: list[AdamRange], step: Tensor, options: AdamOptions, factor: Tensor, skip: Tensor) -> None:
    """The formula of `adamw_`, for comparisons."""
    o, t = options, step.item()
    for p in parts:
        g = p.grad * factor.to(p.grad.dtype)
        p.grad.zero_()
        if skip.item() == 1:
            continue
        master = widened(p.master, g.dtype).mul(1 - o.lr * o.decay)
        m, v = (
            widened(p.m, g.dtype).lerp(g, 1 - o.beta1),
            widened(p.v, g.dtype).mul(o.beta2).addcmul_(g, g, value=1 - o.beta2),
        )
        master.addcdiv_(m / (1 - o.beta1**t), (v / (1 - o.beta2**t)).sqrt_().add_(o.eps), value=-o.lr)
        for kept, values in zip((p.master, p.m, p.v), (master, m, v)):
            keep(kept, values, step)
        if p.out is not None:
            p.out.copy_(master)


def _case(p: Tensor, g: Tensor, m: Tensor, v: Tensor, kernels: Kernels) -> Tensor:
    """Three steps; the gradient, zeroed, is returned as the fourth column."""
    p, g, m, v = (t.detach().clone() for t in (p, g, m, v.abs()))
    scalars = [torch.tensor(x, device=p.device) for x in (3.0, 0.3, 0.0)]
    for number in range(3):
        g.copy_(p + number)
        part = AdamRange(p, g, m, v)
        adamw_([part], scalars[0] + number, AdamOptions(0.01, 0.9, 0.95, 1e-8, 0.1), scalars[1], scalars[2], kernels)
    return torch.stack((p, m, v, g))


ADAMW = Op(
    "adamw",
    "AdamW over flat ranges",
    __name__,
    ("update_",),
    (triton("phalanx.ops.optimizer.adamw_kernel"),),
    cases=(Case("adamw", _case, ((2050,),) * 4, dtypes=(torch.float32, torch.float64)),),
)

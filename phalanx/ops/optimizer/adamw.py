"""AdamW over flat tensors: the choice of implementation (one pass over memory on a GPU, adamw_kernel.py; torch's fused
kernel elsewhere), and the formula for both.

The same call scales and clips the gradient, writes the low-precision weights and sets the gradient back to zero.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.ops.op import Case, Kernels, Op, triton
from phalanx.ops.optimizer.blockwise import Blockwise
from phalanx.ops.optimizer.masters import SplitMaster
from phalanx.ops.optimizer.moments import Narrow
from phalanx.ops.optimizer.packed import PackedTensor
from phalanx.ops.optimizer.shard import keep, widened

Moments = Literal["bf16", "fp8", "8bit"]


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
        op = next((op for kind, op in PACKED.items() if isinstance(parts[0].m, kind)), ADAMW)
        op.choose(kernels, parts[0].grad).update_(parts, step, options, factor, skip)


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


def _packed_case(moments: Moments, split: bool) -> Any:
    """One step from moments that are packed. What is stored of the new ones may differ by a rounding, which one bit of
    arithmetic decides: whether each is near to what the formula gives is returned, for both."""

    def call(p: Tensor, g: Tensor, m: Tensor, v: Tensor, kernels: Kernels) -> tuple[Tensor, ...]:
        p, g, m, v = (t.detach().clone() for t in (p, g, m, v.abs()))
        master = _split(p) if split else p
        first, second = (_moment(moments, x, number == 1) for number, x in enumerate((m, v)))
        step, factor, skip = (torch.tensor(x, device=p.device) for x in (3.0, 0.3, 0.0))
        o, scaled = AdamOptions(0.01, 0.9, 0.95, 1e-8, 0.1), g * factor
        wanted = (
            o.beta1 * widened(first, g.dtype) + (1 - o.beta1) * scaled,
            o.beta2 * widened(second, g.dtype) + (1 - o.beta2) * scaled.square(),
        )
        adamw_([AdamRange(master, g, first, second)], step, o, factor, skip, kernels)
        off = [(widened(kept, g.dtype) - x).abs() for kept, x in zip((first, second), wanted)]
        near = [(d <= 0.3 * x.abs() + 0.02 * x.abs().max()).to(g.dtype) for d, x in zip(off, wanted)]
        return widened(master, g.dtype), g, *near

    return call


def _split(p: Tensor) -> SplitMaster:
    master = SplitMaster.of(p.bfloat16())
    master.store_(p)
    return master


def _moment(moments: Moments, x: Tensor, root: bool) -> Tensor | PackedTensor:
    """x, stored; root: they are the second moments."""
    if moments == "bf16":
        return x.bfloat16()
    made = Narrow.zeros(len(x), x.device, root) if moments == "fp8" else Blockwise.zeros(len(x), x.device, not root)
    made.store_(x)
    return made


def _op(name: str, title: str, *cases: Case) -> Op:
    kernel = triton("phalanx.ops.optimizer.adamw_kernel")
    kernel = replace(kernel, capability=(8, 9)) if name == "adamw_fp8" else kernel
    return Op(name, title, __name__, ("update_",), (kernel,), switches=("adamw",), cases=cases)


def _packed_cases(moments: Moments) -> list[Case]:
    shapes, fp32 = ((2112,),) * 4, (torch.float32,)  # no whole number of the kernels' programs
    return [
        Case(f"adamw, {moments} moments{', split masters' * split}", _packed_case(moments, split), shapes, (), fp32)
        for split in (False, True)
    ]


ADAMW = _op(
    "adamw",
    "AdamW over flat ranges",
    Case("adamw", _case, ((2050,),) * 4, dtypes=(torch.float32, torch.float64)),
    *_packed_cases("bf16"),
)
ADAMW_FP8 = _op("adamw_fp8", "AdamW with moments in FP8", *_packed_cases("fp8"))
ADAMW_8BIT = _op("adamw_8bit", "AdamW with moments in 8 bits by blocks", *_packed_cases("8bit"))
PACKED: dict[type, Op] = {Narrow: ADAMW_FP8, Blockwise: ADAMW_8BIT}

"""RMSNorm by groups of what a gate has passed: y = x silu(z) / sqrt(mean over the group of its square + eps) * weight.

A group may be spread over tp ranks: the sums of squares, one number for each token and group, are then added over tp,
in forward and in backward. Saved for backward: the inputs and the factors. Dao & Gu, 2024, section 7.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.comm.axis import Axis
from phalanx.ops.dense.activation import widened
from phalanx.ops.dense.grads import add_grad
from phalanx.ops.in_order import sum_in_order
from phalanx.ops.op import Case, Kernels, Op, invariant


@dataclass(frozen=True)
class NormGroups:
    """How the features of a rank fall into groups: `here` groups of `width` features each on all ranks together. If a
    group is spread over ranks of tp, `here` is 1 and number `first` of the `count` groups that tp has. eps: added to
    mean squares."""

    here: int
    width: int
    eps: float
    first: int = 0
    count: int = 1
    spread: bool = False

    def summed(self, of_groups: Tensor, tp: Axis) -> Tensor:
        """(T, here) sums over this rank's features -> over all features of each group."""
        if not self.spread:
            return of_groups
        whole = of_groups.new_zeros(len(of_groups), self.count)
        whole[:, self.first : self.first + self.here] = of_groups
        return tp.all_reduce(whole).wait()[:, self.first : self.first + self.here]


def _product(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate), and its product with x, in at least fp32."""
    passed = torch.nn.functional.silu(widened(gate))
    return passed, widened(x) * passed


def norm_forward(x: Tensor, gate: Tensor, weight: Tensor, groups: NormGroups, tp: Axis) -> tuple[Tensor, Tensor]:
    """x, gate (T, D) and weight (D,) of this rank -> (T, D) in the dtype of x, and the factors (T, groups here)."""
    return _forward(x, gate, weight, groups, tp, lambda square: square.sum(-1))


def _forward(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    groups: NormGroups,
    tp: Axis,
    add: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    _, product = _product(x, gate)
    u = product.unflatten(-1, (groups.here, -1))
    scale = 1 / torch.sqrt(groups.summed(add(u * u), tp) / groups.width + groups.eps)
    normed = (u * scale.unsqueeze(-1)).flatten(1).to(x.dtype)
    return (normed * weight).to(x.dtype), scale


def norm_backward(
    dy: Tensor, saved: tuple[Tensor, Tensor, Tensor], weight: Tensor, groups: NormGroups, tp: Axis
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, of the gate and of the weight. saved: x, the gate and the factors s.

    With u = x silu(z), n = u s and g = dy * w: du = s * (g - n * mean(g * n)), dx = du silu(z), dz = du x silu'(z), dw
    = sum(dy * n).
    """
    x, gate, scale = saved
    passed, product = _product(x, gate)
    s, by_group = scale.unsqueeze(-1), (groups.here, -1)
    n = product.unflatten(-1, by_group) * s
    g = (widened(dy) * widened(weight)).unflatten(-1, by_group)
    mean = groups.summed((g * n).sum(-1), tp) / groups.width
    du = ((g - n * mean.unsqueeze(-1)) * s).flatten(1)
    z = widened(gate)
    sigmoid = torch.sigmoid(z)
    dgate = du * widened(x) * sigmoid * (1 + z * (1 - sigmoid))
    return (du * passed).to(x.dtype), dgate.to(gate.dtype), (widened(dy) * n.flatten(1)).sum(0)


class GatedNormInOrder:
    """Batch-invariant: sums over a group in one order."""

    @staticmethod
    def norm_forward(x: Tensor, gate: Tensor, weight: Tensor, groups: NormGroups, tp: Axis) -> tuple[Tensor, Tensor]:
        return _forward(x, gate, weight, groups, tp, sum_in_order)

    norm_backward = staticmethod(norm_backward)


class _GatedNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, groups: NormGroups, tp: Axis, by: Any) -> Tensor:  # type: ignore[override]
        out, scale = by.norm_forward(x, gate, weight.detach(), groups, tp)
        ctx.save_for_backward(x, gate, scale)
        ctx.weight, ctx.groups, ctx.tp, ctx.by = weight, groups, tp, by
        made: Tensor = out
        return made

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dx, dgate, dw = ctx.by.norm_backward(dy, ctx.saved_tensors, ctx.weight.detach(), ctx.groups, ctx.tp)
        dw_out = add_grad(ctx.weight, dw) if ctx.needs_input_grad[2] else None
        return dx, dgate, dw_out, None, None, None


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    groups: NormGroups,
    tp: Axis,
    kernels: Kernels = "auto",
) -> Tensor:
    """x (T, D) times silu(gate), normalized by groups and multiplied by weight (D,)."""
    made: Tensor = _GatedNorm.apply(x, gate, weight, groups, tp, GATED_NORM.choose(kernels, x))
    return made


def _case(groups: int) -> Callable[..., Tensor]:
    def call(x: Tensor, gate: Tensor, weight: Tensor, kernels: Kernels) -> Tensor:
        shard = NormGroups(groups, x.shape[1] // groups, 1e-3)
        return gated_norm(x, gate, weight, shard, Axis("tp"), kernels)

    return call


GATED_NORM = Op(
    "gated_norm",
    "RMSNorm by groups, of what a gate has passed",
    __name__,
    ("norm_forward", "norm_backward"),
    (invariant(f"{__name__}:GatedNormInOrder", "any"),),
    switches=("norm",),
    cases=(
        Case("gated_norm", _case(2), ((7, 12), (7, 12), (12,)), (2,)),
        Case("gated_norm, one group", _case(1), ((5, 13), (5, 13), (13,)), (2,)),
        Case("gated_norm of 8 groups", _case(8), ((1030, 8192), (1030, 8192), (8192,)), (2,), large=True),
    ),
)

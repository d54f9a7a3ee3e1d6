"""RMSNorm by groups beside a gate z, in either order; g(z) is silu or the sigmoid:

    gate first    y = u / sqrt(mean over the group of its square + eps) * weight         u = x g(z)
    norm first    y = x / sqrt(mean over the group of its square + eps) * weight * g(z)

A group may be spread over tp ranks: the sums of squares, one number for each token and group, are then added over tp,
in forward and in backward. Saved for backward: the inputs and the factors. Dao & Gu, 2024, section 7.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.comm.axis import Axis
from phalanx.ops.dense.activation import widened
from phalanx.ops.dense.grads import add_grad
from phalanx.ops.in_order import sum_in_order
from phalanx.ops.op import Case, Kernels, Op, invariant, triton

Order = Literal["gate first", "norm first"]
GateKind = Literal["silu", "sigmoid"]


@dataclass(frozen=True)
class NormGroups:
    """How the features of a rank fall into groups: `here` groups of `width` features each on all ranks together. If a
    group is spread over ranks of tp, `here` is 1 and number `first` of the `count` groups that tp has.

    eps    added to mean squares
    order  whether the gate comes before the norm
    gate   what of the gate is multiplied with
    """

    here: int
    width: int
    eps: float
    first: int = 0
    count: int = 1
    spread: bool = False
    order: Order = "gate first"
    gate: GateKind = "silu"

    def summed(self, of_groups: Tensor, tp: Axis) -> Tensor:
        """(T, here) sums over this rank's features -> over all features of each group."""
        if not self.spread:
            return of_groups
        whole = of_groups.new_zeros(len(of_groups), self.count)
        whole[:, self.first : self.first + self.here] = of_groups
        return tp.all_reduce(whole).wait()[:, self.first : self.first + self.here]

    def factors(self, squares: Tensor, tp: Axis) -> Tensor:
        """From sums of squares (T, here) over this rank's features."""
        return 1 / torch.sqrt(self.summed(squares, tp) / self.width + self.eps)

    def passed(self, gate: Tensor) -> Tensor:
        """g(z), in at least fp32."""
        return F.silu(widened(gate)) if self.gate == "silu" else torch.sigmoid(widened(gate))

    def slope(self, gate: Tensor) -> Tensor:
        """g'(z)."""
        z = widened(gate)
        s = torch.sigmoid(z)
        return s * (1 + z * (1 - s)) if self.gate == "silu" else s * (1 - s)

    def by_group(self, x: Tensor) -> Tensor:
        """(T, D) -> (T, here, D / here)."""
        return x.unflatten(-1, (self.here, -1))


def _weights(weight: Tensor, features: int) -> Tensor:
    """A weight (D,), or one of the features of a group that all groups share, as it is multiplied with (T, here,
    features of a group)."""
    return weight.view(-1, features)


def norm_forward(x: Tensor, gate: Tensor, weight: Tensor, groups: NormGroups, tp: Axis) -> tuple[Tensor, Tensor]:
    """x, gate (T, D) and weight (D,) or (features of a group,) of this rank -> (T, D) in the dtype of x, and the
    factors (T, groups here)."""
    return _forward(x, gate, weight, groups, tp, lambda square: square.sum(-1))


def _forward(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    groups: NormGroups,
    tp: Axis,
    add: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    passed, gate_first = groups.passed(gate), groups.order == "gate first"
    u = groups.by_group(widened(x) * passed if gate_first else widened(x))
    scale = groups.factors(add(u * u), tp)
    normed = (u * scale.unsqueeze(-1)).to(x.dtype)  # rounded before the weight, as Hugging Face does
    y = (normed * _weights(weight, u.shape[-1])).flatten(1)
    return (y if gate_first else widened(y) * passed).to(x.dtype), scale


def norm_backward(
    dy: Tensor, saved: tuple[Tensor, Tensor, Tensor], weight: Tensor, groups: NormGroups, tp: Axis
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, of the gate and of the weight. saved: x, the gate and the factors s.

    With u what is normalized, n = u s, d the gradient of n * w and g = d * w: du = s * (g - n * mean(g * n)) and dw =
    sum(d * n). Gate first: d = dy, dx = du g(z), dz = du x g'(z). Norm first: d = dy g(z), dx = du, dz = dy n w g'(z).
    """
    x, gate, scale = saved
    passed, gate_first, s = groups.passed(gate), groups.order == "gate first", scale.unsqueeze(-1)
    u = groups.by_group(widened(x) * passed if gate_first else widened(x))
    w = _weights(widened(weight), u.shape[-1])
    n, d = u * s, groups.by_group(widened(dy) if gate_first else widened(dy) * passed)
    g = d * w
    mean = groups.summed((g * n).sum(-1), tp) / groups.width
    du = ((g - n * mean.unsqueeze(-1)) * s).flatten(1)
    dx, dpassed = (du * passed, du * widened(x)) if gate_first else (du, widened(dy) * (n * w).flatten(1))
    dw = (d * n).sum(0).view(-1, weight.numel()).sum(0)
    return dx.to(x.dtype), (dpassed * groups.slope(gate)).to(gate.dtype), dw


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
    """x and gate (T, D), in the order that `groups` says -> (T, D). weight (D,), or that of the features of a group,
    which all groups share."""
    made: Tensor = _GatedNorm.apply(x, gate, weight, groups, tp, GATED_NORM.choose(kernels, x))
    return made


def _case(groups: int, order: Order = "gate first", gate_kind: GateKind = "silu") -> Callable[..., Tensor]:
    def call(x: Tensor, gate: Tensor, weight: Tensor, kernels: Kernels) -> Tensor:
        shard = NormGroups(groups, x.shape[1] // groups, 1e-3, order=order, gate=gate_kind)
        return gated_norm(x, gate, weight, shard, Axis("tp"), kernels)

    return call


GATED_NORM = Op(
    "gated_norm",
    "RMSNorm by groups beside a gate, in either order",
    __name__,
    ("norm_forward", "norm_backward"),
    (triton("phalanx.ops.scan.gated_norm_kernel"), invariant(f"{__name__}:GatedNormInOrder", "any")),
    switches=("norm",),
    cases=(
        Case("gated_norm", _case(2), ((7, 12), (7, 12), (12,)), (2,)),
        Case("gated_norm, one group", _case(1), ((5, 13), (5, 13), (13,)), (2,)),
        Case("gated_norm, norm first", _case(3, "norm first"), ((70, 15), (70, 15), (15,)), (2,)),
        Case(
            "gated_norm of heads that share a weight, sigmoid",
            _case(4, "norm first", "sigmoid"),
            ((9, 20), (9, 20), (5,)),
            (2,),
        ),
        Case("gated_norm of 8 groups", _case(8), ((1030, 8192), (1030, 8192), (8192,)), (2,), large=True),
        Case("gated_norm of 5120 features", _case(1), ((1030, 5120), (1030, 5120), (5120,)), (2,), large=True),
        Case(
            "gated_norm of 32 heads",
            _case(32, "norm first"),
            ((1030, 4096), (1030, 4096), (128,)),
            (2,),
            large=True,
        ),
    ),
)

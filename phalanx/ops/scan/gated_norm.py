"""RMSNorm by groups beside a gate z, in either order:

    gate first    y = u / sqrt(mean over the group of its square + eps) * weight            u = x silu(z)
    norm first    y = x / sqrt(mean over the group of its square + eps) * weight * silu(z)

A group may be spread over tp ranks: the sums of squares, one number for each token and group, are then added over tp,
in forward and in backward. Saved for backward: the inputs and the factors. Dao & Gu, 2024, section 7.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.base.dataclass import dataclass
from phalanx.comm.axis import Axis
from phalanx.ops.dense.activation import widened
from phalanx.ops.dense.grads import add_grad
from phalanx.ops.in_order import sum_in_order
from phalanx.ops.op import Case, Implementation, Kernels, Op, invariant, triton

Order = Literal["gate first", "norm first"]


@dataclass(frozen=True)
class NormGroups:
    """How the features of a rank fall into groups: `here` groups of `width` features each on all ranks together. If a
    group is spread over ranks of tp, `here` is 1 and number `first` of the `count` groups that tp has.

    eps    added to mean squares
    order  whether the gate comes before the norm
    """

    here: int
    width: int
    eps: float
    first: int = 0
    count: int = 1
    spread: bool = False
    order: Order = "gate first"

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

    def by_group(self, x: Tensor) -> Tensor:
        """(T, D) -> (T, here, D / here)."""
        return x.unflatten(-1, (self.here, -1))


def _slope(gate: Tensor) -> Tensor:
    """The derivative of silu, in at least fp32."""
    z = widened(gate)
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


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
    passed, gate_first = F.silu(widened(gate)), groups.order == "gate first"
    u = groups.by_group(widened(x) * passed if gate_first else widened(x))
    scale = groups.factors(add(u * u), tp)
    normed = (u * scale.unsqueeze(-1)).to(x.dtype)  # rounded before the weight, as Hugging Face does
    y = normed.flatten(1) * weight
    return (y if gate_first else widened(y) * passed).to(x.dtype), scale


def norm_backward(
    dy: Tensor, saved: tuple[Tensor, Tensor, Tensor], weight: Tensor, groups: NormGroups, tp: Axis
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, of the gate and of the weight. saved: x, the gate and the factors s.

    With u what is normalized, n = u s, d the gradient of n * w and g = d * w: du = s * (g - n * mean(g * n)) and dw =
    sum(d * n). Gate first: d = dy, dx = du silu(z), dz = du x silu'(z). Norm first: d = dy silu(z), dx = du, dz =
    dy n w silu'(z).
    """
    x, gate, scale = saved
    passed, gate_first, s = F.silu(widened(gate)), groups.order == "gate first", scale.unsqueeze(-1)
    u = groups.by_group(widened(x) * passed if gate_first else widened(x))
    w = groups.by_group(widened(weight))
    n, d = u * s, groups.by_group(widened(dy) if gate_first else widened(dy) * passed)
    g = d * w
    mean = groups.summed((g * n).sum(-1), tp) / groups.width
    du = ((g - n * mean.unsqueeze(-1)) * s).flatten(1)
    dx, dpassed = (du * passed, du * widened(x)) if gate_first else (du, widened(dy) * (n * w).flatten(1))
    return dx.to(x.dtype), (dpassed * _slope(gate)).to(gate.dtype), (d * n).sum(0).flatten()


class GatedNormInOrder:
    """Batch-invariant: sums over a group in one order."""

    @staticmethod
    def norm_forward(x: Tensor, gate: Tensor, weight: Tensor, groups: NormGroups, tp: Axis) -> tuple[Tensor, Tensor]:
        return _forward(x, gate, weight, groups, tp, sum_in_order)

    norm_backward = staticmethod(norm_backward)


class DryGatedNorm:
    """Without data: allocates what the fused implementation does."""

    @staticmethod
    def norm_forward(x: Tensor, gate: Tensor, weight: Tensor, groups: NormGroups, tp: Axis) -> tuple[Tensor, Tensor]:
        squares = x.new_empty(len(x), groups.here, dtype=widened(x[:0]).dtype)
        return torch.empty_like(x, memory_format=torch.contiguous_format), groups.factors(squares, tp)

    @staticmethod
    def norm_backward(
        dy: Tensor, saved: tuple[Tensor, Tensor, Tensor], weight: Tensor, groups: NormGroups, tp: Axis
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, gate, scale = saved
        groups.summed(torch.empty_like(scale), tp)  # sent over tp
        dx, dgate = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, gate))
        return dx, dgate, torch.empty_like(weight, dtype=scale.dtype)


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
    """x and gate (T, D), normalized by groups, in the order that they say, and multiplied by weight (D,)."""
    made: Tensor = _GatedNorm.apply(x, gate, weight, groups, tp, GATED_NORM.choose(kernels, x))
    return made


def _case(groups: int, order: Order = "gate first") -> Callable[..., Tensor]:
    def call(x: Tensor, gate: Tensor, weight: Tensor, kernels: Kernels) -> Tensor:
        shard = NormGroups(groups, x.shape[1] // groups, 1e-3, order=order)
        return gated_norm(x, gate, weight, shard, Axis("tp"), kernels)

    return call


GATED_NORM = Op(
    "gated_norm",
    "RMSNorm by groups beside a gate, in either order",
    __name__,
    ("norm_forward", "norm_backward"),
    (
        triton("phalanx.ops.scan.gated_norm_kernel"),
        Implementation("dry", f"{__name__}:DryGatedNorm", "meta"),
        invariant(f"{__name__}:GatedNormInOrder", "any"),
    ),
    switches=("norm",),
    cases=(
        Case("gated_norm", _case(2), ((7, 12), (7, 12), (12,)), (2,)),
        Case("gated_norm, one group", _case(1), ((5, 13), (5, 13), (13,)), (2,)),
        Case("gated_norm, norm first", _case(3, "norm first"), ((70, 15), (70, 15), (15,)), (2,)),
        Case("gated_norm of 8 groups", _case(8), ((1030, 8192), (1030, 8192), (8192,)), (2,), large=True),
        Case("gated_norm of 5120 features", _case(1), ((1030, 5120), (1030, 5120), (5120,)), (2,), large=True),
        Case(
            "gated_norm of 4 groups, norm first",
            _case(4, "norm first"),
            ((1030, 4096), (1030, 4096), (4096,)),
            (2,),
            large=True,
        ),
    ),
)

"""RMSNorm of each head, and then a gate: y = x / sqrt(mean over the head of its square + eps) * weight * act(z), with
SiLU or the sigmoid as act.

Mamba-2's order is the other one: there the gate comes first, and the norm is over a group (gated_norm). All heads share
the weight. Saved for backward: the inputs. Yang et al., "Gated delta networks", 2025; Kimi Team, "Kimi Linear", 2025.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.ops.dense.activation import widened
from phalanx.ops.dense.grads import add_grad
from phalanx.ops.op import Case, Kernels, Op, triton

HeadGate = Literal["silu", "sigmoid"]


def _normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x (..., K) divided by the root of its mean square, in at least fp32, and the factors (..., 1)."""
    wide = widened(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * scale, scale


def _passed(z: Tensor, gate: HeadGate) -> tuple[Tensor, Tensor]:
    """act(z) and its derivative, in at least fp32."""
    wide = widened(z)
    sigmoid = torch.sigmoid(wide)
    if gate == "sigmoid":
        return sigmoid, sigmoid * (1 - sigmoid)
    return wide * sigmoid, sigmoid * (1 + wide * (1 - sigmoid))


def forward(x: Tensor, z: Tensor, weight: Tensor, eps: float, gate: HeadGate) -> Tensor:
    """x, z (T, H, K), weight (K,) -> (T, H, K) in the dtype of x."""
    n = _normed(x, eps)[0].to(x.dtype)
    return (weight * n * _passed(z, gate)[0]).to(x.dtype)


def backward(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, eps: float, gate: HeadGate
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, z and the weight. With n the normalized x, s its factor, a = act(z) and g = dy * a * w:
    dx = s * (g - n * mean(g * n)), dz = dy * n * w * act'(z), dw = sum(dy * n * a)."""
    (n, scale), (a, slope), d, w = _normed(x, eps), _passed(z, gate), widened(dy), widened(weight)
    g = d * a * w
    dx = scale * (g - n * (g * n).mean(-1, keepdim=True))
    return dx.to(x.dtype), (d * n * w * slope).to(z.dtype), (d * n * a).sum((0, 1))


class _NormGate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, weight: Tensor, eps: float, gate: HeadGate, by: Any) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, z)
        ctx.weight, ctx.eps, ctx.gate, ctx.by = weight, eps, gate, by
        made: Tensor = by.forward(x, z, weight.detach(), eps, gate)
        return made

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dx, dz, dw = ctx.by.backward(dy, *ctx.saved_tensors, ctx.weight.detach(), ctx.eps, ctx.gate)
        dw_out = add_grad(ctx.weight, dw) if ctx.needs_input_grad[2] else None
        return dx, dz, dw_out, None, None, None


def norm_gate(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, gate: HeadGate = "silu", kernels: Kernels = "auto"
) -> Tensor:
    """x (T, H, K), each head divided by the root of its mean square, times weight (K,) and act(z), z (T, H, K)."""
    made: Tensor = _NormGate.apply(x, z, weight, eps, gate, NORM_GATE.choose(kernels, x))
    return made


def _case(gate: HeadGate) -> Callable[..., Tensor]:
    """The gate lies in rows with other features before it."""

    def call(x: Tensor, rows: Tensor, weight: Tensor, kernels: Kernels) -> Tensor:
        z = rows[:, 3:].unflatten(-1, x.shape[1:])
        return norm_gate(x, z, weight, 1e-3, gate, kernels)

    return call


NORM_GATE = Op(
    "norm_gate",
    "RMSNorm of each head, and then a gate",
    __name__,
    ("forward", "backward"),
    (triton("phalanx.ops.scan.norm_gate_kernel"),),
    switches=("norm",),
    cases=(
        Case("norm_gate", _case("silu"), ((7, 3, 6), (7, 21), (6,)), (2,)),
        Case("norm_gate, sigmoid", _case("sigmoid"), ((5, 2, 13), (5, 29), (13,)), (2,)),
        Case("norm_gate of 32 heads", _case("silu"), ((1030, 32, 128), (1030, 4099), (128,)), (2,), large=True),
    ),
)

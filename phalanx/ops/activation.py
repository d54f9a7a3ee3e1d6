"""Activations of MLPs: SwiGLU over stacked gate and up, and GELU's tanh form."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.ops.kernels import Kernels, use_triton


def swiglu_forward(x: Tensor) -> Tensor:
    """The plain twin of kernels.swiglu.swiglu_forward."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """The plain twin of kernels.swiglu.swiglu_backward. silu(a) = a s(a);  silu'(a) = s(a) (1 + a (1 - s(a)))."""
    gate, up = x.chunk(2, -1)
    s = torch.sigmoid(gate)
    return torch.cat((dy * up * s * (1 + gate * (1 - s)), dy * gate * s), -1)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, triton: bool) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.triton = triton
        forward = swiglu_forward
        if triton:
            from phalanx.ops.kernels.swiglu import swiglu_forward as forward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        backward = swiglu_backward
        if ctx.triton:
            from phalanx.ops.kernels.swiglu import swiglu_backward as backward
        return backward(dy, *ctx.saved_tensors), None


def swiglu(x: Tensor, kernels: Kernels = "auto") -> Tensor:
    """x = [gate, up] (T, 2F) -> silu(gate) * up (T, F). Shazeer, "GLU variants improve transformer", 2020."""
    return _SwiGLU.apply(x, use_triton(kernels, x))


def gelu(x: Tensor) -> Tensor:
    """GELU in the tanh form of GPT-2. Hendrycks & Gimpel, "Gaussian error linear units", 2016."""
    return F.gelu(x, approximate="tanh")

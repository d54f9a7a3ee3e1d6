"""Activations of MLPs: SwiGLU over stacked gate and up, and GELU's tanh form."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        # silu(a) = a s(a);  silu'(a) = s(a) (1 + a (1 - s(a)))
        gate, up = ctx.saved_tensors[0].chunk(2, -1)
        s = torch.sigmoid(gate)
        return torch.cat((dy * up * s * (1 + gate * (1 - s)), dy * gate * s), -1)


def swiglu(x: Tensor) -> Tensor:
    """x = [gate, up] (T, 2F) -> silu(gate) * up (T, F). Shazeer, "GLU variants improve transformer", 2020."""
    return _SwiGLU.apply(x)


def gelu(x: Tensor) -> Tensor:
    """GELU in the tanh form of GPT-2. Hendrycks & Gimpel, "Gaussian error linear units", 2016."""
    return F.gelu(x, approximate="tanh")

"""relu(x) ** 2 as an op of a package of somebody else's: the definition, implementations for CPUs and in Triton, cases.

hidden = squared_relu(up, env.kernels_for(SQUARED_RELU))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.ops.op import Case, Implementation, Kernels, Op, declare, triton


def forward(x: Tensor) -> Tensor:
    return torch.relu(x).square()


def backward(dy: Tensor, x: Tensor) -> Tensor:
    return 2 * dy * torch.relu(x)


class InPlace:
    """Two passes over memory instead of three."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clamp(min=0).mul_(x)

    @staticmethod
    def backward(dy: Tensor, x: Tensor) -> Tensor:
        return x.clamp(min=0).mul_(2).mul_(dy)


class _SquaredReLU(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.by = by
        return by.forward(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.by.backward(dy, *ctx.saved_tensors), None


def squared_relu(x: Tensor, kernels: Kernels = "auto") -> Tensor:
    return _SquaredReLU.apply(x, SQUARED_RELU.choose(kernels, x))


SQUARED_RELU = declare(
    Op(
        "squared_relu",
        "relu(x) ** 2",
        __name__,
        ("forward", "backward"),
        (triton(f"{__name__}_kernel"), Implementation("in-place", f"{__name__}:InPlace", "cpu")),
        cases=(Case("odd", squared_relu, ((5, 7),)), Case("several blocks", squared_relu, ((3, 1100),))),
    )
)

"""GELU of a matmul's output plus the linear's bias. One op, because the gradient of the bias is a sum over what the
backward of GELU writes: a kernel of both reads it once less."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.ops.dense.activation import gelu
from phalanx.ops.dense.grads import add_grad
from phalanx.ops.op import Case, Kernels, Op, triton


def gelu_forward(x: Tensor, bias: Tensor, exact: bool) -> Tensor:
    """gelu(x + bias) (T, F), x + bias in the dtype of x."""
    return gelu(x + bias, exact)


def gelu_backward(dy: Tensor, x: Tensor, bias: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    """The gradients of x, and of the bias in at least fp32."""
    dx = torch.ops.aten.gelu_backward(dy, x + bias, approximate="none" if exact else "tanh")
    return dx, dx.sum(0, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


class _BiasedGelu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, exact: bool, by: Any) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.bias, ctx.exact, ctx.by = bias, exact, by  # the slot of the bias: its values may move until backward
        y: Tensor = by.gelu_forward(x, bias, exact)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        dx, db = ctx.by.gelu_backward(dy, x, ctx.bias, ctx.exact)
        return dx, add_grad(ctx.bias, db) if ctx.needs_input_grad[1] else None, None, None


def biased_gelu(x: Tensor, bias: Tensor, kernels: Kernels = "auto", exact: bool = False) -> Tensor:
    """gelu(x + bias) (T, F) of x (T, F) and bias (F,), by default in GPT-2's tanh form."""
    return _BiasedGelu.apply(x, bias, exact, BIASED_GELU.choose(kernels, x))


BIASED_GELU = Op(
    "biased_gelu",
    "GELU of a matmul's output plus its bias",
    __name__,
    ("gelu_forward", "gelu_backward"),
    (triton("phalanx.ops.dense.biased_gelu_kernel"),),
    cases=(
        Case("gelu, tanh form", biased_gelu, ((5, 14), (14,)), params=(1,)),
        Case("gelu", partial(biased_gelu, exact=True), ((37, 300), (300,)), params=(1,)),
        Case("gelu, 4096 features", partial(biased_gelu, exact=True), ((4099, 4096), (4096,)), params=(1,), large=True),
    ),
)

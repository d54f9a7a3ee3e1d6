"""The matmul of many experts at once: each expert's rows times its own matrix, the row ends read on the device.

For y_r = W_e x_r + b_e: dx_r = W_e^T dy_r, dW_e = sum over the rows of e of dy_r x_r^T, db_e = sum of dy_r. The weight gradient goes
into the parameter's gradient buffer (ops.grads). Shapes: R rows sorted by expert, E experts held here, I in, O out. Padding rows
(those past the last end) are zero in the plain twins, left as they were in the fast ones, and never read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.ops.grads import add_grad
from phalanx.ops.kernels import Kernels


def _segments(ends: Tensor) -> list[slice]:
    """Rows of each expert, read on the host: on a GPU this waits for the device. On meta, where nothing is known, none."""
    if ends.is_meta:
        return []
    stops = ends.tolist()
    return [slice(a, b) for a, b in zip([0, *stops], stops)]


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """The plain twin of kernels.grouped.grouped_product: rows (R, I) of expert e times weight[e] (I, O), plus bias[e]."""
    y = x.new_zeros(x.shape[0], weight.shape[2])
    for e, rows in enumerate(_segments(ends)):
        torch.mm(x[rows], weight[e], out=y[rows])
        if bias is not None:
            y[rows] += bias[e]
    return y


def add_grouped_grad(param: Tensor, dy: Tensor, x: Tensor, ends: Tensor) -> Tensor | None:
    """Account for the gradient dy^T x (E, O, I) of `param`; what a backward must return for it. See ops.grads.add_product_grad."""
    buffer = torch.zeros_like(param) if param.grad is None else param.grad
    for e, rows in enumerate(_segments(ends)):
        buffer[e].addmm_(dy[rows].t().to(buffer.dtype), x[rows].to(buffer.dtype))
    return buffer if param.grad is None else None


def _sums(dy: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """(E, O) sums of each expert's rows."""
    out = dy.new_zeros(len(ends), dy.shape[1], dtype=dtype)
    for e, rows in enumerate(_segments(ends)):
        out[e] = dy[rows].sum(0, dtype=dtype)
    return out


class _GroupedMatmul(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, ends)
        ctx.weight, ctx.bias = weight, bias  # the slots, read in backward; not the values, which may move
        return grouped_product(x, weight.transpose(1, 2), ends, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x, ends), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        need_x, need_w, _, need_b = ctx.needs_input_grad
        dx = grouped_product(dy, weight, ends) if need_x else None
        dw = add_grouped_grad(weight, dy, x, ends) if need_w else None
        db = None
        if need_b:
            db = add_grad(bias, _sums(dy, ends, bias.dtype if bias.grad is None else bias.grad.dtype))
        return dx, dw, None, db


def grouped_matmul(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor, kernels: Kernels = "auto", bias_EO: Tensor | None = None) -> Tensor:
    """x (R, I) -> (R, O): row r of expert e times weight[e]^T, plus bias[e]; `ends_E` (E,) int32 on the device: one past each expert's last row."""
    return _GroupedMatmul.apply(x_RI, weight_EOI, ends_E, bias_EO)

"""The matmul of many experts at once: each expert's rows times its own matrix, with the row ends read on the device.

For y_r = W_e x_r + b_e: dx_r = W_e^T dy_r, dW_e = sum over the rows of e of dy_r x_r^T, db_e = sum of dy_r. The weight
gradient goes into the parameter's gradient buffer (ops.dense.grads). Shapes: R rows sorted by expert, E experts held
here, I in, O out. Padding rows (those past the last end) are zero in the reference implementations and unchanged in the
fast ones, and are never read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.ops.dense.grads import account, lasting
from phalanx.ops.op import Case, Kernels, Op, triton


def segments(ends: Tensor) -> list[slice]:
    """The rows of each expert, read on the host: on a GPU this waits for the device. On meta, where the ends are
    unknown, none."""
    if ends.is_meta:
        return []
    stops = ends.tolist()
    return [slice(a, b) for a, b in zip([0, *stops], stops)]


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rows (R, I) of expert e times weight[e] (I, O), plus bias[e]."""
    y = x.new_zeros(x.shape[0], weight.shape[2])
    if x.is_meta:
        return torch.mm(x, weight[0], out=y)  # the routing is unknown, but the work is the same
    for e, rows in enumerate(segments(ends)):
        torch.mm(x[rows], weight[e], out=y[rows])
        if bias is not None:
            y[rows] += bias[e]
    return y


def add_grouped_product_(buffer: Tensor, dy: Tensor, x: Tensor, ends: Tensor) -> None:
    """buffer[e] (O, I) += dy^T x over the rows of e, widened before multiplying."""
    for e, rows in enumerate(segments(ends)):
        buffer[e].addmm_(dy[rows].t().to(buffer.dtype), x[rows].to(buffer.dtype))


def add_grouped_sum_(buffer: Tensor, dy: Tensor, ends: Tensor) -> None:
    """buffer[e] (O,) += the sum of the rows of e."""
    for e, rows in enumerate(segments(ends)):
        buffer[e] += dy[rows].sum(0, dtype=buffer.dtype)


def _add_grouped_grad(param: Tensor, dy: Tensor, x: Tensor, ends: Tensor, by: Any) -> Tensor | None:
    """Account for the gradient dy^T x (E, O, I) of `param`; returns what a backward must return for it
    (ops.dense.grads)."""
    dy, x = lasting(param, dy, False), lasting(param, x, False)
    return account(param, lambda buffer: by.add_grouped_product_(buffer, dy, x, ends))


def add_sum_grad(param: Tensor, dy: Tensor, ends: Tensor, by: Any) -> Tensor | None:
    """The same for the bias (E, O), the sum of each expert's rows of dy. `by`: an implementation of GROUPED."""
    dy = lasting(param, dy, False)
    return account(param, lambda buffer: by.add_grouped_sum_(buffer, dy, ends))


class Later(list[Callable[[], Any]]):
    """Weight gradients that a backward may defer: whoever passes the list in runs them while something else is in
    flight."""


class _GroupedMatmul(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None, by: Any, later: Later | None
    ) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, ends)
        ctx.weight, ctx.bias = weight, bias  # slots, read again in backward: the values may move
        ctx.by, ctx.later = by, later
        y: Tensor = by.grouped_product(x, weight.transpose(1, 2), ends, bias)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x, ends), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        need_x, need_w, _, need_b, _, _ = ctx.needs_input_grad
        dx, dw = ctx.by.grouped_product(dy, weight, ends) if need_x else None, None
        if need_w and ctx.later is not None and weight.grad is not None:
            ctx.later.append(partial(_add_grouped_grad, weight, dy, x, ends, ctx.by))
        elif need_w:
            dw = _add_grouped_grad(weight, dy, x, ends, ctx.by)
        db = add_sum_grad(bias, dy, ends, ctx.by) if need_b else None
        return dx, dw, None, db, None, None


def grouped_matmul(
    x_RI: Tensor,
    weight_EOI: Tensor,
    ends_E: Tensor,
    kernels: Kernels = "auto",
    bias_EO: Tensor | None = None,
    later: Later | None = None,
) -> Tensor:
    """x (R, I) -> (R, O): row r of expert e times weight[e]^T, plus bias[e]; `ends_E` (E,) int32 on the device: one
    past each expert's last row.

    With `later`, the weight's gradient is deferred to it, provided that the weight has a gradient buffer.
    """
    return _GroupedMatmul.apply(x_RI, weight_EOI, ends_E, bias_EO, GROUPED.choose(kernels, x_RI), later)


def _case(x: Tensor, weight: Tensor, bias: Tensor, kernels: Kernels) -> Tensor:
    """Four experts, one without rows; the last seven rows are padding."""
    rows = len(x) - 7
    ends = torch.tensor([10, rows // 2, rows // 2, rows], dtype=torch.int32, device=x.device)
    x = torch.where(torch.arange(len(x), device=x.device).unsqueeze(1) < rows, x, 0)
    return grouped_matmul(x, weight, ends, kernels, bias)[:rows]


WIDE = (torch.float16, torch.float32, torch.float64)  # interpreted, tl.dot multiplies bf16 as integers
GROUPED = Op(
    "grouped",
    "the matmuls of many experts at once",
    __name__,
    ("grouped_product", "add_grouped_product_", "add_grouped_sum_"),
    (triton("phalanx.ops.experts.grouped_kernel"),),
    cases=(
        Case("grouped matmul", _case, ((300, 72), (4, 40, 72), (4, 40)), (1, 2), WIDE),
        Case("grouped matmul, odd widths", _case, ((120, 36), (4, 20, 36), (4, 20)), (1, 2), WIDE),
        Case("grouped matmul of 2048", _case, ((1030, 2048), (4, 768, 2048), (4, 768)), (1, 2), large=True),
    ),
)

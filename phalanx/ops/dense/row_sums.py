"""Sums over rows: the gradient of a bias that was added to each. A narrow sum over many rows is slow as torch has it,
and an encoder has six of them in a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.ops.dense.grads import add_grad, kernels_of
from phalanx.ops.op import Case, Kernels, Op, triton

MANY = 1 << 24  # numbers; for fewer the host takes longer to start two kernels than torch's one runs


def over_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (T, F) -> (F,), summed in a dtype that is at least as wide as that of x."""
    return x.sum(0, dtype=dtype)


class _RowSums(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Any) -> Tensor:  # type: ignore[override]
        ctx.like = x[:0]
        y: Tensor = by.over_rows(x, torch.float64 if x.dtype == torch.float64 else torch.float32)
        ctx.rows = len(x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return dy.to(ctx.like.dtype).expand(ctx.rows, -1), None


def row_sums(x: Tensor, kernels: Kernels = "auto") -> Tensor:
    """x (T, F) -> (F,), in at least fp32."""
    return _RowSums.apply(x, ROW_SUMS.choose(kernels, x))


def add_bias_grad(bias: Tensor, dy: Tensor) -> Tensor | None:
    """Account for the gradient of a bias (F,) that was added to every row of what dy (T, F) is the gradient of; as
    ops.dense.grads.add_grad."""
    wide = bias.dtype if bias.grad is None else bias.grad.dtype
    fast = ROW_SUMS.fast(kernels_of(bias), dy) if dy.numel() >= MANY else None
    by = fast or ROW_SUMS.reference
    return add_grad(bias, by.over_rows(dy, wide))


ROW_SUMS = Op(
    "row_sums",
    "sums over rows: gradients of biases",
    __name__,
    ("over_rows",),
    (triton("phalanx.ops.dense.row_sums_kernel"),),
    cases=(
        Case("a few rows", row_sums, ((5, 14),)),
        Case("many rows", row_sums, ((300, 520),)),
        Case("32768 rows of 1024", row_sums, ((32768, 1024),), large=True),
        Case("32768 rows of 3072", row_sums, ((32768, 3072),), large=True),
    ),
)

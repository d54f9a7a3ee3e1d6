"""Convolutions as matmuls over rows: the first layer of a vision tower, whose windows do not overlap, and Whisper's."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor
from torch.autograd import Function

from phalanx.ops.dense.grads import account, add_product_
from phalanx.ops.dense.row_sums import add_bias_grad


class _PatchEmbedding(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        x = values.to(weight.dtype)
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias = weight, bias
        y = x @ weight.flatten(1).t()
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        shape, (need_x, need_w, need_b) = (weight.shape[0], prod(weight.shape[1:])), ctx.needs_input_grad
        dx = dy @ weight.flatten(1) if need_x else None
        dw = account(weight, lambda buffer: add_product_(dy, x, buffer.view(shape))) if need_w else None
        db = add_bias_grad(bias, dy) if need_b else None
        return dx, dw, db


def patch_embedding(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """values (N, C * K...) rows of patches in the order of the weight's dims, weight (D, C, K...) of a convolution
    whose stride is its kernel, or windows of one that are laid out as rows -> (N, D) in the weight's dtype."""
    return _PatchEmbedding.apply(values, weight, bias)

"""The first layer of a vision tower: a convolution whose windows do not overlap, as a matmul over rows of patches."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor
from torch.autograd import Function

from phalanx.ops.dense.grads import account, add_grad, add_product_


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
        shape, (_, need_w, need_b) = (weight.shape[0], prod(weight.shape[1:])), ctx.needs_input_grad
        dw = account(weight, lambda buffer: add_product_(dy, x, buffer.view(shape))) if need_w else None
        db = add_grad(bias, dy.sum(0)) if need_b else None
        return None, dw, db


def patch_embedding(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """values (N, C * K...) rows of patches in the order of the weight's dims, weight (D, C, K...) of a convolution
    whose stride is its kernel -> (N, D) in the weight's dtype. Values have no gradient."""
    return _PatchEmbedding.apply(values, weight, bias)

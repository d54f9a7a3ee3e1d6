"""The square of ReLU, an activation of MLPs without a gate and of such experts. So et al., "Primer: searching for
efficient transformers for language modeling", 2021."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.ops.dense.activation import rows_before, some_rows, widened
from phalanx.ops.op import Case, Implementation, Kernels, Op, invariant, triton


def relu2_forward(x: Tensor, weights: Tensor | None = None, last: Tensor | None = None) -> Tensor:
    """max(x, 0)^2 (R, F), times `weights` (R,), zero from row `last` () on. Rounded once."""
    positive = F.relu(x)
    if weights is None:
        y = positive * positive
    else:
        y = (widened(positive).square() * weights.unsqueeze(-1)).to(x.dtype)
    return y if last is None else torch.where(rows_before(last, y), y, 0)


def relu2_backward(
    dy: Tensor, x: Tensor, weights: Tensor | None = None, last: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x (R, F) and of the weights (R,)."""
    positive, dweights = F.relu(x), None
    if weights is None:
        dx = 2 * positive * dy
    else:
        positive, dy = widened(positive), widened(dy)
        dx = (2 * positive * dy * weights.unsqueeze(-1)).to(x.dtype)
        dweights = (positive.square() * dy).sum(-1).to(weights.dtype)
    if last is not None:
        dx = torch.where(rows_before(last, dx), dx, 0)
        dweights = None if dweights is None else torch.where(rows_before(last, dweights), dweights, 0)
    return dx, dweights


class DryRelu2:
    """Without data: allocates what the kernels do, which is their outputs."""

    @staticmethod
    def relu2_forward(x: Tensor, weights: Tensor | None = None, last: Tensor | None = None) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def relu2_backward(
        dy: Tensor, x: Tensor, weights: Tensor | None = None, last: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return torch.empty_like(x), None if weights is None else torch.empty_like(weights)


class _Relu2(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None, last: Tensor | None, by: Any) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weights, last)
        ctx.by = by
        y: Tensor = by.relu2_forward(x, weights, last)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dx, dweights = ctx.by.relu2_backward(dy, *ctx.saved_tensors)
        return dx, dweights, None, None


def relu2(x: Tensor, kernels: Kernels = "auto") -> Tensor:
    """max(x, 0)^2 of x (T, F)."""
    return _Relu2.apply(x, None, None, RELU2.choose(kernels, x))


def relu2_rows(x_RF: Tensor, ends_E: Tensor, weights_R: Tensor | None = None, kernels: Kernels = "auto") -> Tensor:
    """The same of rows sorted by expert, times each row's weight. Rows past the last end are not read
    (ops.experts.permute)."""
    return _Relu2.apply(x_RF, weights_R, ends_E[-1], RELU2.choose(kernels, x_RF))


def _rows_without_weights(x: Tensor, kernels: Kernels) -> Tensor:
    ones = torch.ones(len(x), dtype=x.dtype, device=x.device)
    return some_rows(lambda x, ends, _, kernels: relu2_rows(x, ends, None, kernels), x, ones, kernels)


RELU2 = Op(
    "relu2",
    "the square of ReLU",
    __name__,
    ("relu2_forward", "relu2_backward"),
    (
        triton("phalanx.ops.dense.relu2_kernel", invariant=True),
        invariant(__name__, "any"),  # products and comparisons alone, element by element
        Implementation("dry", f"{__name__}:DryRelu2", "meta"),
    ),
    cases=(
        Case("odd", relu2, ((5, 7),)),
        Case("several blocks", relu2, ((3, 1100),)),
        Case("rows of experts, weighed", partial(some_rows, relu2_rows), ((5, 300), (5,))),
        Case("rows of experts", _rows_without_weights, ((5, 20),)),
        Case("of 21504 features", relu2, ((1030, 21504),), large=True),
    ),
)

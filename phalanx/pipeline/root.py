"""Where a backward begins: a tensor and its gradient, given to autograd without what `Tensor.backward(gradient)`
imports at first use."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


def backward_from(y: Tensor, dy: Tensor | None) -> None:
    """`y.backward(dy)`; dy like y, or None where y has one element (its gradient is 1).

    torch compares the shape of a given gradient by symbolic arithmetic, and imports sympy for it: half a second of
    every process' first step. A number needs no gradient to be given; what hands dy on lies behind it.
    """
    (y if dy is None else _Given.apply(y, dy)).backward()


class _Given(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, dy: Tensor) -> Tensor:  # type: ignore[override]
        ctx.dy = dy
        return y.new_empty(())  # nobody reads it

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.dy, None

"""Where a backward begins: a tensor and its gradient, given to autograd without what `Tensor.backward(gradient)`
imports at first use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function


def backward_from(ys: Sequence[Tensor], dys: Sequence[Tensor]) -> None:
    """Backward from all of `ys` at once, whose gradients are `dys`.

    torch compares the shape of a given gradient by symbolic arithmetic, and imports sympy for it: half a second of
    every process' first step. A number needs no gradient to be given; what hands dys on lies behind it.
    """
    _Given.apply(*ys, *dys).backward()


class _Given(Function):
    @staticmethod
    def forward(ctx: Any, *ys_and_dys: Tensor) -> Tensor:  # type: ignore[override]
        count = len(ys_and_dys) // 2
        ctx.dys = ys_and_dys[count:]
        return ys_and_dys[0].new_empty(())  # nobody reads it

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (*ctx.dys, *(None for _ in ctx.dys))

"""Run a function of tokens on a slice of them at a time, in forward and backward, so that its intermediate tensors
exist for one slice only.

The caller passes a function in which the output of each token depends on that token alone; it may communicate over any
axes. Forward stores the input. Backward runs the function again slice by slice and goes backward through each slice at
once. Weights receive the same gradients as from the whole, one slice at a time.

Chen et al., "Training deep nets with sublinear memory cost", 2016; over slices of a sequence: Snowflake, "Arctic long
sequence training", 2025 (tiled MLP).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

PIECES = 8  # at least
LARGEST = 2**15  # tokens in a slice, on this rank


def pieces_of(tokens: int) -> list[slice]:
    """Slices of about equal length. All ranks with the same number of tokens get the same slices."""
    count = max(1, min(max(PIECES, -(-tokens // LARGEST)), tokens))
    return [slice(tokens * i // count, tokens * (i + 1) // count) for i in range(count)]


class _InPieces(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, make: Callable[[Tensor], Tensor], ran: Callable[[], None], *params: Tensor
    ) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.make, ctx.ran = make, ran
        y = torch.empty_like(x)
        for rows in pieces_of(len(x)):
            y[rows] = make(x[rows])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,), need_x = ctx.saved_tensors, ctx.needs_input_grad[0]
        dx = torch.empty_like(x) if need_x else None
        for rows in pieces_of(len(x)):
            piece = x[rows].detach().requires_grad_(need_x)
            with torch.enable_grad():
                y = ctx.make(piece)
            torch.autograd.backward(y, dy[rows])
            if dx is not None:
                dx[rows] = piece.grad  # type: ignore[assignment]
        ctx.ran()
        return dx, None, None, *(None,) * (len(ctx.needs_input_grad) - 3)


def in_pieces(
    make: Callable[[Tensor], Tensor], x: Tensor, params: Sequence[Tensor], ran: Callable[[], None] = lambda: None
) -> Tensor:
    """make(x) with x (T, D) -> (T, D) of this rank's tokens; `params` are its weights. `ran` is called after make has
    run again in backward."""
    return _InPieces.apply(x, make, ran, *params)

"""The rows of tokens that have a label, gathered for a head that has nothing to say of the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.sequence.sample import IGNORE


class _Gathered(Function):
    """x (T, D), index (R,): rows of x, T for none -> (R, D). In backward each row of x has one gradient at most."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(index)
        ctx.tokens = len(x)
        return x.index_select(0, index.clamp(max=len(x) - 1))

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        dx = d.new_zeros(ctx.tokens + 1, d.shape[1])  # the last row is that of none, whoever writes it last
        return dx.index_copy_(0, index, d)[:-1], None


def labelled_rows(x: Tensor, labels: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """x (T, D), labels (T,), of which at most `rows` are not IGNORE -> (rows, D), (rows,): those that are not, in
    their order, then rows without a label. Nothing waits for the device."""
    has, tokens = labels != IGNORE, len(labels)
    place = torch.where(has, has.cumsum(0) - 1, rows)  # those without a label share one place more
    index = labels.new_full((rows + 1,), tokens)
    index.scatter_(0, place, torch.where(has, torch.arange(tokens, device=labels.device), tokens))
    index = index[:rows]
    chosen = torch.cat((labels, labels.new_full((1,), IGNORE))).index_select(0, index)
    gathered: Tensor = _Gathered.apply(x, index)
    return gathered, chosen

"""Vocabulary-parallel embedding lookup: each rank looks up the ids it holds; the sum over tp is scattered along
tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.comm.axis import Axis
from phalanx.ops.dense.grads import add_rows_grad


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, first: int, count: int, tp: Axis) -> Tensor:  # type: ignore[override]
        here = (ids >= first) & (ids < first + count)
        rows = torch.where(here, ids - first, 0)
        ctx.save_for_backward(rows, here)
        ctx.weight, ctx.tp = weight, tp
        x = weight[rows].masked_fill_(~here.unsqueeze(-1), 0)
        return tp.reduce_scatter(x).wait()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (rows, here), weight = ctx.saved_tensors, ctx.weight
        dx = ctx.tp.all_gather(dx).wait().masked_fill(~here.unsqueeze(-1), 0)
        # the zeros for ids held elsewhere are spread over many rows: additions to one row run one after the other
        spread = torch.arange(len(rows), device=rows.device) % len(weight)
        rows = torch.where(here, rows, spread)
        return None, add_rows_grad(weight, rows, dx), None, None, None


def embedding(ids: Tensor, weight: Tensor, first: int, count: int, tp: Axis) -> Tensor:
    """ids (T,), weight (rows, D) holding ids first..first+count-1 -> this rank's tokens (T / tp, D)."""
    return _Embedding.apply(ids, weight, first, count, tp)


class _Positions(Function):
    @staticmethod
    def forward(ctx: Any, positions: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(positions)
        ctx.weight = weight
        return weight[positions]

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (positions,), weight = ctx.saved_tensors, ctx.weight
        return None, add_rows_grad(weight, positions, dx)


def learned_positions(positions: Tensor, weight: Tensor) -> Tensor:
    """positions (T / tp,) of this rank's tokens, weight (max positions, D) -> (T / tp, D)."""
    return _Positions.apply(positions, weight)

"""Vocabulary-parallel embedding lookup: each rank looks up the ids it holds; the sum over tp is scattered along
tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.comm.axis import Axis
from phalanx.ops.dense.rows import add_rows_grad, lookup
from phalanx.ops.op import Kernels


class _Embedding(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, ids: Tensor, weight: Tensor, first: int, count: int, tp: Axis, kernels: Kernels
    ) -> Tensor:
        here = (ids >= first) & (ids < first + count)
        rows = torch.where(here, ids - first, 0)
        ctx.save_for_backward(rows, here)
        ctx.weight, ctx.tp, ctx.kernels = weight, tp, kernels
        x = weight[rows].masked_fill_(~here.unsqueeze(-1), 0)
        return tp.reduce_scatter(x).wait()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (rows, here), weight = ctx.saved_tensors, ctx.weight
        dx = ctx.tp.all_gather(dx).wait().masked_fill(~here.unsqueeze(-1), 0)
        # the zeros for ids held elsewhere are spread over many rows: additions to one row run one after the other
        spread = torch.arange(len(rows), device=rows.device) % len(weight)
        rows = torch.where(here, rows, spread)
        return None, add_rows_grad(weight, rows, dx, ctx.kernels), None, None, None, None


def embedding(ids: Tensor, weight: Tensor, first: int, count: int, tp: Axis, kernels: Kernels = "auto") -> Tensor:
    """ids (T,), weight (rows, D) holding ids first..first+count-1 -> this rank's tokens (T / tp, D)."""
    return _Embedding.apply(ids, weight, first, count, tp, kernels)


def learned_positions(positions: Tensor, weight: Tensor, kernels: Kernels = "auto") -> Tensor:
    """positions (T / tp,) of this rank's tokens, weight (max positions, D) -> (T / tp, D)."""
    return lookup(positions, weight, kernels)

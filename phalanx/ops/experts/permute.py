"""Tokens brought together by expert and summed back: the plan of rows, the gather into them and the weighted sum out
of them.

Knows the tokens of one rank and the experts it holds, nothing of other ranks. Nothing here waits for the device.
Everything sums in a fixed order, so equal inputs give equal bits. Shapes: T tokens, K experts a token, R rows, E
experts held here, D model.

A rows tensor has `rows` rows whatever the routing; those past the last end are padding. The reference implementations
keep them zero, the fast ones leave in them what was there, and no op here reads them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.ops.experts.rows import ExpertRows
from phalanx.ops.lazy_tensor import LazySource, LazyTensor
from phalanx.ops.op import Kernels, use_triton


def plan_rows(experts_TK: Tensor, first: int, count: int, rows: int, kernels: Kernels = "auto") -> ExpertRows:
    """Rows of the experts first .. first + count - 1 among the choices (T, K); others (dropped pairs too) get none."""
    if use_triton(kernels, experts_TK):
        from phalanx.ops.experts import permute_kernel

        return ExpertRows(*permute_kernel.plan_rows(experts_TK, first, count, rows))
    pairs, slots = experts_TK.flatten() - first, experts_TK.shape[1]
    pairs = torch.where((pairs >= 0) & (pairs < count), pairs, count)
    by_expert, order = pairs.sort(stable=True)
    wanted = torch.searchsorted(by_expert, torch.arange(count, device=pairs.device), right=True, out_int32=True)
    ends = wanted.clamp_max(rows)
    here = torch.arange(len(order), device=pairs.device) < ends[-1]
    row = torch.empty_like(order).scatter_(
        0, order, torch.where(here, torch.arange(len(order), device=pairs.device), -1)
    )
    slot = torch.zeros(rows, dtype=torch.int64, device=pairs.device)
    filled = min(rows, len(order))
    slot[:filled] = torch.where(here, order, 0)[:filled]
    return ExpertRows((slot // slots).int(), slot.int(), row.int().view_as(experts_TK), ends, wanted[-1])


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x[index]; of an empty x, of which nothing is valid, zeros."""
    return x.index_select(0, index) if len(x) else x.new_zeros(len(index), *x.shape[1:])


def gather_forward(x: Tensor, rows: ExpertRows) -> Tensor:
    """The reference implementation of kernels.permute.gather_forward."""
    return torch.where(rows.valid_R.unsqueeze(-1), _take(x, rows.source_R), 0)


def sum_forward(y: Tensor, weights: Tensor | None, rows: ExpertRows, out: Tensor | None = None) -> Tensor:
    """The reference implementation of kernels.permute.sum_forward: (T, D) sum over slots, in their order, of each
    pair's weight (or 1) times its row."""
    total = torch.zeros(len(rows.row_TK), y.shape[1], dtype=_wide(y), device=y.device)
    for k, row in enumerate(rows.row_TK.unbind(1)):
        part = _take(y, row.clamp_min(0)).to(total.dtype)
        part = part if weights is None else part * weights[:, k : k + 1]
        total = total + torch.where((row >= 0).unsqueeze(-1), part, 0)
    return total.to(y.dtype) if out is None else out.copy_(total)


def weighted_backward(dout: Tensor, y: Tensor, weights: Tensor, rows: ExpertRows) -> tuple[Tensor, Tensor]:
    """The reference implementation of kernels.permute.weighted_backward: dy (R, D) = weight * dout of the row's token,
    and dweights (T, K) = <y, dout>."""
    wide = _wide(y)
    dout_R = gather_forward(dout, rows).to(wide)
    weight_R = _take(weights.flatten(), rows.slot_R).to(wide)
    products = (dout_R * y.to(wide)).sum(-1)
    row = rows.row_TK
    dweights = torch.where(row >= 0, _take(products, row.clamp_min(0).flatten()).view_as(row), 0)
    return (dout_R * weight_R.unsqueeze(-1)).to(y.dtype), dweights.to(weights.dtype)


def twins(triton: bool) -> Any:
    """The module whose gather_forward, sum_forward and weighted_backward are to run."""
    if triton:
        from phalanx.ops.experts import permute_kernel

        return permute_kernel
    return sys.modules[__name__]


@dataclass(frozen=True)
class Gathered(LazySource):
    """The rows (R, D) of tokens x (T, D), not in memory: gathered by whoever casts them (kernels.quant_grouped), or
    by `tensor`."""

    x: Tensor
    rows: ExpertRows
    kernels: Kernels = "auto"

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows.source_R), self.x.shape[1]

    def tensor(self) -> Tensor:
        return twins(use_triton(self.kernels, self.x)).gather_forward(self.x, self.rows)


def gathered(x: Tensor, rows: ExpertRows, triton: bool, lazy: bool = False) -> Tensor:
    """The rows (R, D) of tokens x (T, D); with `lazy` a lazy tensor (ops.lazy_tensor)."""
    if lazy:
        return LazyTensor(Gathered(x, rows, "triton" if triton else "plain"))
    made: Tensor = twins(triton).gather_forward(x, rows)
    return made


class _GatherTokens(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: ExpertRows, triton: bool, lazy: bool) -> Tensor:  # type: ignore[override]
        ctx.rows, ctx.triton = rows, triton
        return gathered(x, rows, triton, lazy)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return twins(ctx.triton).sum_forward(dy, None, ctx.rows), None, None, None


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor | None, rows: ExpertRows, triton: bool, lazy: bool) -> Tensor:  # type: ignore[override]
        ctx.rows, ctx.triton, ctx.lazy = rows, triton, lazy
        if weights is not None:
            ctx.save_for_backward(y, weights)
        return twins(triton).sum_forward(y, weights, rows)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved, implementation = (
            ctx.saved_tensors,
            twins(ctx.triton),
        )  # read once: reading may compute again what recompute dropped
        if not saved:
            return gathered(dout, ctx.rows, ctx.triton, ctx.lazy), None, None, None, None
        return *implementation.weighted_backward(dout, *saved, ctx.rows), None, None, None


class _RowWeights(Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, rows: ExpertRows) -> Tensor:  # type: ignore[override]
        ctx.row = rows.row_TK
        return _take(weights.flatten(), rows.slot_R)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return torch.where(ctx.row >= 0, _take(dy, ctx.row.clamp_min(0).flatten()).view_as(ctx.row), 0), None


def row_weights(weights_TK: Tensor, rows: ExpertRows) -> Tensor:
    """(R,) what each row weighs, for activation.gated_rows; in the padding it means nothing."""
    return _RowWeights.apply(weights_TK, rows)


def gather_rows(x_TD: Tensor, rows: ExpertRows, kernels: Kernels = "auto", lazy: bool = False) -> Tensor:
    """x (T, D) -> (R, D): the token of each row. lazy: whether the one reader takes a lazy tensor
    (ops.lazy_tensor)."""
    return _GatherTokens.apply(x_TD, rows, use_triton(kernels, x_TD), lazy)


def combine_rows(
    y_RD: Tensor,
    weights_TK: Tensor | None,
    rows: ExpertRows,
    num_tokens: int,
    kernels: Kernels = "auto",
    lazy_grad: bool = False,
) -> Tensor:
    """y (R, D) -> (T, D): the sum of each token's rows times its weights (1 without), added in fp32 or wider and in
    the order of the slots.

    A token with no row gets zeros. `num_tokens` is that of the plan. lazy_grad: whether who made y takes a lazy
    tensor for its gradient; only without weights.
    """
    if num_tokens != len(rows.row_TK):
        raise ValueError(f"the rows were planned for {len(rows.row_TK)} tokens, not {num_tokens}")
    return _Combine.apply(y_RD, weights_TK, rows, use_triton(kernels, y_RD), lazy_grad)

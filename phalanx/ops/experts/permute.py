"""Tokens gathered by expert and summed back: the plan of rows, the gather into them and the weighted sum out of them.

Works on the tokens and experts of one rank and knows nothing of other ranks. Nothing here waits for the device. All
sums are in a fixed order, so equal inputs give equal bits. Shapes: T tokens, K experts a token, R rows, E experts held
here, D model.

A rows tensor has `rows` rows whatever the routing; those past the last end are padding. The reference implementations
keep padding zero, the fast ones leave it unwritten, and no op here reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.base.dataclass import dataclass
from phalanx.ops.experts.rows import ExpertRows
from phalanx.ops.lazy_tensor import LazySource, LazyTensor
from phalanx.ops.op import Case, Kernels, Op, triton


def plan_rows(experts_TK: Tensor, first: int, count: int, rows: int, kernels: Kernels = "auto") -> ExpertRows:
    """Rows for the experts first .. first + count - 1 among the choices (T, K); other experts' pairs (and dropped
    pairs) get none."""
    return ExpertRows(*PERMUTE.choose(kernels, experts_TK).plan_forward(experts_TK, first, count, rows))


def plan_forward(experts_TK: Tensor, first: int, count: int, rows: int) -> tuple[Tensor, ...]:
    """The fields of ExpertRows, in their order."""
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
    return (slot // slots).int(), slot.int(), row.int().view_as(experts_TK), ends, wanted[-1]


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x[index]; zeros if x is empty, since then no index is valid."""
    return x.index_select(0, index) if len(x) else x.new_zeros(len(index), *x.shape[1:])


def gather_forward(x: Tensor, rows: ExpertRows) -> Tensor:
    """(R, D): the token of each row; zeros in the padding."""
    return torch.where(rows.valid_R.unsqueeze(-1), _take(x, rows.source_R), 0)


def sum_forward(y: Tensor, weights: Tensor | None, rows: ExpertRows, out: Tensor | None = None) -> Tensor:
    """(T, D): for each token, the sum over its slots, in order, of each pair's weight (or 1) times its row."""
    total = torch.zeros(len(rows.row_TK), y.shape[1], dtype=_wide(y), device=y.device)
    for k, row in enumerate(rows.row_TK.unbind(1)):
        part = _take(y, row.clamp_min(0)).to(total.dtype)
        part = part if weights is None else part * weights[:, k : k + 1]
        total = total + torch.where((row >= 0).unsqueeze(-1), part, 0)
    return total.to(y.dtype) if out is None else out.copy_(total)


def weighted_backward(dout: Tensor, y: Tensor, weights: Tensor, rows: ExpertRows) -> tuple[Tensor, Tensor]:
    """dy (R, D) = weight * dout of the row's token, and dweights (T, K) = <y, dout>."""
    wide = _wide(y)
    dout_R = gather_forward(dout, rows).to(wide)
    weight_R = _take(weights.flatten(), rows.slot_R).to(wide)
    products = (dout_R * y.to(wide)).sum(-1)
    row = rows.row_TK
    dweights = torch.where(row >= 0, _take(products, row.clamp_min(0).flatten()).view_as(row), 0)
    return (dout_R * weight_R.unsqueeze(-1)).to(y.dtype), dweights.to(weights.dtype)


@dataclass(frozen=True)
class Gathered(LazySource):
    """The rows (R, D) of tokens x (T, D), not in memory: gathered by the kernel that quantizes them
    (quantize_grouped_kernel.py), or by `tensor`."""

    x: Tensor
    rows: ExpertRows
    by: Any

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows.source_R), self.x.shape[1]

    def tensor(self) -> Tensor:
        made: Tensor = self.by.gather_forward(self.x, self.rows)
        return made


def gathered(x: Tensor, rows: ExpertRows, by: Any, lazy: bool = False) -> Tensor:
    """The rows (R, D) of tokens x (T, D), by an implementation of PERMUTE; with `lazy`, as a lazy tensor
    (ops.lazy_tensor)."""
    source = Gathered(x, rows, by)
    return LazyTensor(source) if lazy else source.tensor()


class _GatherTokens(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: ExpertRows, by: Any, lazy: bool) -> Tensor:  # type: ignore[override]
        ctx.rows, ctx.by = rows, by
        return gathered(x, rows, by, lazy)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.by.sum_forward(dy, None, ctx.rows), None, None, None


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor | None, rows: ExpertRows, by: Any, lazy: bool) -> Tensor:  # type: ignore[override]
        ctx.rows, ctx.by, ctx.lazy = rows, by, lazy
        if weights is not None:
            ctx.save_for_backward(y, weights)
        total: Tensor = by.sum_forward(y, weights, rows)
        return total

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors  # read once: reading may trigger recomputation
        if not saved:
            return gathered(dout, ctx.rows, ctx.by, ctx.lazy), None, None, None, None
        return *ctx.by.weighted_backward(dout, *saved, ctx.rows), None, None, None


class _RowWeights(Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, rows: ExpertRows) -> Tensor:  # type: ignore[override]
        ctx.row = rows.row_TK
        return _take(weights.flatten(), rows.slot_R)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return torch.where(ctx.row >= 0, _take(dy, ctx.row.clamp_min(0).flatten()).view_as(ctx.row), 0), None


def row_weights(weights_TK: Tensor, rows: ExpertRows) -> Tensor:
    """(R,) the weight of each row, for activation.gated_rows; undefined in the padding."""
    return _RowWeights.apply(weights_TK, rows)


def gather_rows(x_TD: Tensor, rows: ExpertRows, kernels: Kernels = "auto", lazy: bool = False) -> Tensor:
    """x (T, D) -> (R, D): the token of each row. lazy: whether the only reader accepts a lazy tensor
    (ops.lazy_tensor)."""
    return _GatherTokens.apply(x_TD, rows, PERMUTE.choose(kernels, x_TD), lazy)


def combine_rows(
    y_RD: Tensor,
    weights_TK: Tensor | None,
    rows: ExpertRows,
    num_tokens: int,
    kernels: Kernels = "auto",
    lazy_grad: bool = False,
) -> Tensor:
    """y (R, D) -> (T, D): the sum of each token's rows times its weights (1 if None), added in fp32 or wider and in the
    order of the slots.

    A token without rows gets zeros. `num_tokens` must be that of the plan. lazy_grad: whether the op that produced y
    accepts a lazy tensor for its gradient; only without weights.
    """
    if num_tokens != len(rows.row_TK):
        raise ValueError(f"the rows were planned for {len(rows.row_TK)} tokens, not {num_tokens}")
    return _Combine.apply(y_RD, weights_TK, rows, PERMUTE.choose(kernels, y_RD), lazy_grad)


def _case(x: Tensor, weights: Tensor, kernels: Kernels, weigh: bool = True) -> Tensor:
    """Tokens to experts 1 .. 6 of 8 and back, with one pair dropped and too little room for the last."""
    tokens, slots = weights.shape
    pairs = torch.arange(tokens * slots, device=x.device).view(tokens, slots)
    experts = (pairs * 5 + pairs // 8) % 8
    experts[0, 0] = 8
    rows = plan_rows(experts, 1, 6, 3 * tokens * slots // 4 - 2, kernels)
    weights = weights if x.dtype == torch.float64 else weights.float()
    return combine_rows(gather_rows(x, rows, kernels), weights if weigh else None, rows, tokens, kernels)


PERMUTE = Op(
    "permute",
    "tokens gathered by expert, their rows summed back",
    __name__,
    ("plan_forward", "gather_forward", "sum_forward", "weighted_backward"),
    (triton("phalanx.ops.experts.permute_kernel"),),
    cases=(
        Case("rows weighed", _case, ((23, 12), (23, 3))),
        Case("rows wider than a program", _case, ((5, 4100), (5, 3))),
        Case("rows summed", lambda x, w, k: _case(x, w, k, weigh=False) + 0 * w.sum(), ((23, 12), (23, 3))),
        Case("rows of 2048", _case, ((1030, 2048), (1030, 4)), large=True),
    ),
)

"""The gradient of a lookup: rows of a table that many tokens took are given the sum of these tokens' gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.ops.dense.grads import account
from phalanx.ops.op import Case, Kernels, Op, triton


def add_rows_(gradient: Tensor, rows: Tensor, dy: Tensor) -> None:
    """gradient (V, D) += dy (T, D) at rows (T,), repeated rows included.

    On a GPU this sums in the order of a stable sort, so equal inputs give equal bits (atomics, or aten's embedding
    backward, do not), but the tokens of one row one after another.
    """
    gradient.index_put_((rows,), dy.to(gradient.dtype), accumulate=True)


def add_rows_grad(param: Tensor, rows: Tensor, dy: Tensor, kernels: Kernels) -> Tensor | None:
    """Account for the gradient of a lookup (grads.account): rows (T,) of the parameter, dy (T, D)."""
    by = ROWS.choose(kernels, dy)
    return account(param, lambda buffer: by.add_rows_(buffer, rows, dy))


class _Lookup(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, kernels: Kernels) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows)
        ctx.weight, ctx.kernels = weight, kernels
        return weight[rows]

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        return None, add_rows_grad(ctx.weight, rows, dx, ctx.kernels), None


def lookup(rows: Tensor, weight: Tensor, kernels: Kernels = "auto") -> Tensor:
    """rows (T,) of a whole table (V, D) -> (T, D)."""
    return _Lookup.apply(rows, weight, kernels)


def _often(tokens: int) -> torch.Tensor:
    """Rows of tokens: the fourth very often, over several chunks of the kernel and within one, others now and then."""
    places = torch.arange(tokens)
    return torch.where((places < tokens * 2 // 3) | (places % 5 == 0), 3, places * 7 % 11)


def _case(weight: Tensor, kernels: Kernels) -> Tensor:
    return lookup(_often(300).to(weight.device), weight, kernels)


def _case_of_one(weight: Tensor, kernels: Kernels) -> Tensor:
    """A table of token types, of which all tokens have the first."""
    return lookup(torch.zeros(200, dtype=torch.int64, device=weight.device), weight, kernels)


def _case_large(weight: Tensor, kernels: Kernels) -> Tensor:
    places = torch.arange(1 << 15, device=weight.device)
    return lookup(torch.where(places % 3 == 0, 4, places * 7919 % len(weight)), weight, kernels)


ROWS = Op(
    "rows",
    "the gradient of a lookup in a table",
    __name__,
    ("add_rows_",),
    (triton("phalanx.ops.dense.rows_kernel", cost="tokens of one row are added one after another"),),
    cases=(
        Case("rows that repeat", _case, ((11, 70),), (0,)),
        Case("one row of two", _case_of_one, ((2, 5),), (0,)),
        Case("32,768 tokens, a third of them masked", _case_large, ((30522, 1024),), (0,), large=True),
    ),
)

"""The two communicating matmuls of a sub-layer (ops/dense/matmul.py) with the low-rank terms of adapters in the same
pass: y = W x + scale B (A x), for a frozen W.

Whoever gathers x for W multiplies it with A too, and what B makes of A x is added before the sum over tp that W's
output needs anyway. So forward exchanges nothing for the adapters. In backward, with dh = scale B^T dy:

    gather_matmul (outputs cut)   dx = W^T dy + A^T dh is scattered as without adapters. dA needs this rank's tokens of
                                  the sum of dh over tp, (t, R): their one exchange, under the matmul of dx
    matmul_scatter (inputs cut)   dy is gathered as without adapters, so dh is whole on each rank

Where an adapter drops some of its input, or another method than the plain one multiplies with W, ops/dense/low_rank.py
adds the terms around that method.

T tokens inside the linear, t of them that this rank has between linears, r the rank of a term, R of all together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.base.dataclass import dataclass
from phalanx.comm.axis import Axis
from phalanx.ops.dense.grads import account, add_product_, add_product_grad, lasting
from phalanx.ops.dense.matmul import multiply
from phalanx.ops.dense.row_sums import add_bias_grad


@dataclass(frozen=True, eq=False)
class LowRankProduct:
    """scale * up (down x), which is added to the features `at`. down (r, in here), up (features here, r)."""

    down: Tensor
    up: Tensor
    at: slice
    scale: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]


class Products:
    """The terms of one linear, whose hidden features lie one after another in h (tokens, R). They keep slots of
    weights, which are read again in backward: the values may move."""

    def __init__(self, terms: Sequence[LowRankProduct]):
        self.terms = tuple(terms)
        ends = torch.tensor([0, *(term.rank for term in terms)]).cumsum(0).tolist()
        self.places = [slice(a, b) for a, b in zip(ends, ends[1:])]
        self.rank: int = ends[-1]

    @property
    def weights(self) -> list[Tensor]:
        return [weight for term in self.terms for weight in (term.down, term.up)]

    @property
    def down(self) -> Tensor:
        """(R, in): all A, one after another."""
        first, *others = (term.down for term in self.terms)
        return torch.cat((first, *others)) if others else first

    def add_onto(self, y: Tensor, h: Tensor) -> None:
        """y (tokens, out) += what the terms make of h (tokens, R)."""
        for term, place in zip(self.terms, self.places):
            y[:, term.at].addmm_(h[:, place], term.up.t(), alpha=term.scale)

    def hidden_grad(self, dy: Tensor, dh: Tensor) -> None:
        """dh (tokens, R) = scale up^T dy of each term."""
        for term, place in zip(self.terms, self.places):
            dh[:, place].addmm_(dy[:, term.at], term.up, beta=0, alpha=term.scale)

    def down_grads(self, dh: Tensor, x: Tensor) -> list[Tensor | None]:
        """Account for dh^T x of each term that is trained."""
        return [
            add_product_grad(term.down, dh[:, place], x) if term.down.requires_grad else None
            for term, place in zip(self.terms, self.places)
        ]

    def up_grads(self, dy: Tensor, h: Tensor) -> list[Tensor | None]:
        """Account for scale dy^T h."""
        return [
            _up_grad(term, dy[:, term.at], h[:, place]) if term.up.requires_grad else None
            for term, place in zip(self.terms, self.places)
        ]


def _up_grad(term: LowRankProduct, dy: Tensor, h: Tensor) -> Tensor | None:
    return account(term.up, lambda buffer: add_product_(dy, h * term.scale, buffer))


class _AdaptedGather(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, products: Products, *_: Tensor
    ) -> Tensor:
        y = x.new_empty(len(x) * tp.size, weight.shape[0])
        h, down = x.new_empty(len(y), products.rank), products.down
        for rows, part in tp.gather(x).parts():
            multiply(part, weight.t(), y[rows], bias)
            torch.mm(part, down.t(), out=h[rows])
        products.add_onto(y, h)
        ctx.save_for_backward(x, h)
        ctx.weight, ctx.bias, ctx.tp, ctx.products = weight, bias, tp, products
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x, h), weight, bias, tp, products = ctx.saved_tensors, ctx.weight, ctx.bias, ctx.tp, ctx.products
        need_x, _, need_b, *_ = ctx.needs_input_grad
        dh, dx = torch.empty_like(h), None
        products.hidden_grad(dy, dh)
        own = tp.reduce_scatter(dh, async_op=True)
        if need_x:
            scattering, down = tp.scatter(len(dy), weight.shape[1], dy), products.down
            for rows, out in scattering.parts():
                torch.mm(dy[rows], weight, out=out)
                out.addmm_(dh[rows], down)
            dx = scattering.wait()
        db = add_bias_grad(bias, dy) if need_b else None
        up = products.up_grads(dy, h)
        down_grads = products.down_grads(own.wait(), x)
        return dx, None, db, None, None, *(grad for pair in zip(down_grads, up) for grad in pair)


class _AdaptedScatter(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, products: Products, *_: Tensor
    ) -> Tensor:
        h = torch.mm(x, products.down.t())
        scattering = tp.scatter(len(x), weight.shape[0], x)
        for rows, out in scattering.parts():
            torch.mm(x[rows], weight.t(), out=out)
            products.add_onto(out, h[rows])
        y = scattering.wait()
        ctx.save_for_backward(x, h)
        ctx.weight, ctx.bias, ctx.tp, ctx.products = weight, bias, tp, products
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x, h), weight, bias, tp, products = ctx.saved_tensors, ctx.weight, ctx.bias, ctx.tp, ctx.products
        need_x, _, need_b, *_ = ctx.needs_input_grad
        db = add_bias_grad(bias, dy) if need_b else None
        gathering, dh = tp.gather(dy), torch.empty_like(h)
        dx = torch.empty_like(x) if need_x else None
        for rows, part in gathering.parts():
            products.hidden_grad(part, dh[rows])
            if dx is not None:
                torch.mm(part, weight, out=dx[rows])
        if dx is not None:
            dx.addmm_(dh, products.down)
        down = products.down_grads(dh, x)
        first = products.terms[0].up
        up = products.up_grads(lasting(first, gathering.wait(), tp.size == 1), h)
        return dx, None, db, None, None, *(grad for pair in zip(down, up) for grad in pair)


def adapted_gather_matmul(x: Tensor, weight: Tensor, tp: Axis, bias: Tensor | None, products: Products) -> Tensor:
    """As matmul.gather_matmul, with the terms of adapters; the weight has no gradient."""
    return _AdaptedGather.apply(x, weight, bias, tp, products, *products.weights)  # type: ignore[no-any-return]


def adapted_matmul_scatter(x: Tensor, weight: Tensor, tp: Axis, bias: Tensor | None, products: Products) -> Tensor:
    """As matmul.matmul_scatter, likewise. Gradients of `up` are parts of a sum over tp."""
    return _AdaptedScatter.apply(x, weight, bias, tp, products, *products.weights)  # type: ignore[no-any-return]

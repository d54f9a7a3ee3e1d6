"""A product of two small matrices added to a linear's output in its own memory, as LoRA adds it: y += scale B (A x).

Written out, autograd would write and read tensors as large as the output and the input several times. Here the last
matmul adds to y, and in backward the last matmul adds to the gradient of x that the linear itself makes:

    x -- enter_low_rank --> x, h = A x        x -- the linear --> y        y, h -- add_low_rank --> y + scale B h

Dropout of the adapter's input is a `drop` of x that only h sees; its mask is drawn again in backward.

Both take the axis over which h travels: of a matrix cut by inputs, enter_low_rank sums and scatters h; of one cut by
outputs, add_low_rank gathers it. T tokens inside the linear, t of them that this rank has between linears, r the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.comm.axis import Axis
from phalanx.ops.dense.grads import account, add_product_, add_product_grad, lasting

Drop = Callable[[Tensor], Tensor]
"""x (T, in) times a mask, the same mask at each call."""


class _Enter(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, axis: Axis, drop: Drop | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.weight, ctx.axis, ctx.drop = weight, axis, drop  # a slot, read again in backward: its values may move
        return x.view_as(x), _scattered(_dropped(x, drop), weight.t(), axis)

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dh: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,), weight, axis, drop = ctx.saved_tensors, ctx.weight, ctx.axis, ctx.drop
        need_x, need_w, *_ = ctx.needs_input_grad
        dh = axis.gather(dh).wait()
        if need_x:  # nobody else has dx: the linear has just made it
            dx = dx.addmm_(dh, weight) if drop is None else dx.add_(drop(dh @ weight))
        dw = _down_grad(weight, lasting(weight, dh, axis.size == 1), x, drop) if need_w else None
        return dx if need_x else None, dw, None, None


def _dropped(x: Tensor, drop: Drop | None) -> Tensor:
    return x if drop is None else drop(x)


def _down_grad(weight: Tensor, dh: Tensor, x: Tensor, drop: Drop | None) -> Tensor | None:
    """Account for dh^T drop(x). Where gradients wait (GradientQueue), x does, not what is dropped of it."""
    if drop is None:
        return add_product_grad(weight, dh, x)
    return account(weight, lambda buffer: add_product_(dh, drop(x), buffer))


class _Add(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, y: Tensor, h: Tensor, weight: Tensor, at: slice, scale: float, axis: Axis
    ) -> Tensor:
        ctx.save_for_backward(h)
        ctx.weight, ctx.at, ctx.scale, ctx.axis = weight, at, scale, axis
        ctx.mark_dirty(y)
        y[:, at].addmm_(axis.gather(h).wait(), weight.t(), alpha=scale)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (h,), weight, axis = ctx.saved_tensors, ctx.weight, ctx.axis
        _, need_h, need_w, *_ = ctx.needs_input_grad
        own = dy[:, ctx.at]
        dh = _scattered(own, weight, axis).mul_(ctx.scale) if need_h else None
        dw = add_product_grad(weight, own, axis.gather(h).wait() * ctx.scale) if need_w else None
        return dy, dh, dw, None, None, None


def _scattered(x: Tensor, weight: Tensor, axis: Axis) -> Tensor:
    """x (T, in) weight (in, out) -> (t, out): this rank's tokens of the sum over the axis."""
    scattering = axis.scatter(len(x), weight.shape[1], x)
    for rows, out in scattering.parts():
        torch.mm(x[rows], weight, out=out)
    return scattering.wait()


def enter_low_rank(x: Tensor, weight: Tensor, axis: Axis, drop: Drop | None = None) -> tuple[Tensor, Tensor]:
    """x (T, in), weight (r, in) -> x for the linear to read, and h (t, r) of drop(x). Whoever reads the first must be
    its only reader, and make a gradient of its own for it, to which that of h is added in place."""
    if not x.requires_grad:
        return x, _EnterAlone.apply(x, weight, axis, drop)
    return _Enter.apply(x, weight, axis, drop)  # type: ignore[no-any-return]


class _EnterAlone(Function):
    """Where x needs no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: Axis, drop: Drop | None) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.weight, ctx.axis, ctx.drop = weight, axis, drop
        return _scattered(_dropped(x, drop), weight.t(), axis)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,), weight, axis = ctx.saved_tensors, ctx.weight, ctx.axis
        dh = axis.gather(dh).wait()
        return None, _down_grad(weight, lasting(weight, dh, axis.size == 1), x, ctx.drop), None, None


def add_low_rank(y: Tensor, h: Tensor, weight: Tensor, at: slice, scale: float, axis: Axis) -> Tensor:
    """y (T, out), whose features `at` get scale times h (t, r) weight^T, in place; weight (features, r)."""
    return _Add.apply(y, h, weight, at, scale, axis)  # type: ignore[no-any-return]

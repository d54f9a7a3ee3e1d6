"""Where weight gradients go: every op accounts for those of its parameters here.

A parameter whose `.grad` exists (a view into the flat buffer, in its own dtype) gets its gradient added in place,
and autograd sees None: at once, or, while the parameter's GradientQueue is open (a split backward), when the queue's
work is run. Without a `.grad` (a user's plain loop before the first backward) the gradient is returned and autograd
stores it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

AddGradient = Callable[[Tensor], object]  # adds a gradient to a buffer of the parameter's shape, in the buffer's dtype


class PendingGradients:
    """The weight gradients that a backward left undone, in its order: what they need of it stays in memory until
    `run`."""

    def __init__(self) -> None:
        self._work: list[Callable[[], object]] = []

    def append(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def run(self) -> None:
        """Add them. Their buffers get the same sums in the same order as if they had been added at once."""
        work, self._work = self._work, []
        with torch.no_grad():
            for each in work:
                each()


class GradientQueue:
    """Of all parameters of a model on one rank. Closed, as it is unless somebody opens it, gradients are added at once.

    A split backward opens it for the backward of a block and micro-batch (I), and runs what is pending later (W).
    """

    def __init__(self) -> None:
        self.pending: PendingGradients | None = None

    @contextmanager
    def open(self) -> Iterator[PendingGradients]:
        """Inside, backward computes gradients of activations alone; those of weights wait for `run` of what this
        gives."""
        if self.pending is not None:
            raise RuntimeError("the queue of weight gradients is open already: close it before the next backward")
        self.pending = PendingGradients()
        try:
            yield self.pending
        finally:
            self.pending = None


def pending_of(param: Tensor) -> PendingGradients | None:
    """Where gradients of a parameter wait now; None: they are added at once."""
    queue: GradientQueue | None = getattr(param, "queue", None)  # only nn.parameter.Parameter has one
    return None if queue is None else queue.pending


def account(param: Tensor, add: AddGradient) -> Tensor | None:
    """Account for the gradient that `add` adds to a buffer; what a backward must return for this parameter. What `add`
    reads must stay as it is until it is called (`lasting`)."""
    buffer = param.grad
    if buffer is None:
        buffer = torch.zeros_like(param)
        add(buffer)
        return buffer
    pending = pending_of(param)
    if pending is None:
        add(buffer)
    else:
        pending.append(partial(add, buffer))
    return None


def lasting(param: Tensor, x: Tensor, own: bool) -> Tensor:
    """x, whose values stay until the gradient of this parameter is added: a copy if that waits and x is not the op's
    `own`, but lies in memory that ranks share and use again."""
    return x if own or pending_of(param) is None else x.clone()


def add_grad(param: Tensor, grad: Tensor) -> Tensor | None:
    """Account for `grad`, of the parameter's shape; what a backward must return for this parameter."""
    if not param.is_leaf or param.grad is None:
        return grad.to(param.dtype)
    return account(param, lambda buffer: buffer.add_(grad))


def add_product_grad(param: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """The same for grad = dy^T x, with dy (T, out) and x (T, in): the GEMM itself accumulates where it can."""
    if param.grad is None:
        return dy.t() @ x
    return account(param, partial(add_product_, dy, x))


def add_product_(dy: Tensor, x: Tensor, buffer: Tensor) -> None:
    """buffer += dy^T x.

    Low-precision operands on a GPU accumulate into fp32 inside the GEMM; on the CPU they are widened first, so that
    both add an unrounded product.
    """
    if buffer.dtype == x.dtype:
        buffer.addmm_(dy.t(), x)
    elif buffer.is_meta:
        pass  # the GEMM adds in place, so there is nothing to show; torch 2.11 has no such product on meta
    elif not buffer.is_cpu:
        torch.addmm(buffer, dy.t(), x, out_dtype=buffer.dtype, out=buffer)
    else:
        buffer.addmm_(dy.t().to(buffer.dtype), x.to(buffer.dtype))


def add_rows_grad(param: Tensor, rows: Tensor, dy: Tensor) -> Tensor | None:
    """The same for a lookup: dy (T, D) is added to rows (T,) of the parameter's gradient, repeated rows included.

    On a GPU this sums in the order of a stable sort, so equal inputs give equal bits (atomics, or aten's embedding
    backward, do not).
    """
    return account(param, lambda buffer: buffer.index_put_((rows,), dy.to(buffer.dtype), accumulate=True))

"""Where weight gradients go: every op accounts for the gradients of its parameters through these functions.

If a parameter has a `.grad` (a view into the flat buffer, in its own dtype), its gradient is added to it in place and
autograd receives None. It is added at once, or, while the parameter's GradientQueue is open (a split backward), when
the work in the queue is run. Without a `.grad` (the first backward of a user's own loop) the gradient is returned, and
autograd stores it. Gradients that plain torch ops give a parameter reach the queue through `queue_autograd`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from phalanx.ops.op import Kernels

AddGradient = Callable[[Tensor], object]  # adds a gradient to a buffer of the parameter's shape, in the buffer's dtype


class PendingGradients:
    """The weight gradients that a backward has deferred, in its order. The tensors they need stay in memory until
    `run`."""

    def __init__(self) -> None:
        self._work: list[Callable[[], object]] = []

    def append(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def run(self) -> None:
        """Add them. The buffers receive the same sums in the same order as if they had been added at once."""
        work, self._work = self._work, []
        with torch.no_grad():
            for each in work:
                each()


class GradientQueue:
    """The queue of all parameters of a model on one rank. It is normally closed, and gradients are added at once.

    A split backward opens it for the backward of a block and micro-batch (I) and runs what is pending later (W).

    kernels   of ops that compute gradients, as train.kernels has it
    """

    def __init__(self, kernels: Kernels = "auto") -> None:
        self.pending: PendingGradients | None = None
        self.kernels = kernels

    @contextmanager
    def open(self) -> Iterator[PendingGradients]:
        """Inside this context, backward computes gradients of activations only. Those of weights wait for `run` of the
        object that it yields."""
        if self.pending is not None:
            raise RuntimeError("the queue of weight gradients is open already: close it before the next backward")
        self.pending = PendingGradients()
        try:
            yield self.pending
        finally:
            self.pending = None


def pending_of(param: Tensor) -> PendingGradients | None:
    """Where gradients of a parameter are deferred to; None: they are added at once."""
    queue: GradientQueue | None = getattr(param, "queue", None)  # only nn.parameter.Parameter has one
    return None if queue is None else queue.pending


def kernels_of(param: Tensor) -> Kernels:
    """Those by which a parameter's gradient is computed."""
    queue: GradientQueue | None = getattr(param, "queue", None)
    return "auto" if queue is None else queue.kernels


def account(param: Tensor, add: AddGradient) -> Tensor | None:
    """Account for the gradient that `add` adds to a buffer; returns what a backward must return for this parameter. The
    tensors that `add` reads must not change until it is called (see `lasting`), and may not be weights, which may be
    freed by then."""
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


def queue_autograd(param: Tensor) -> None:
    """Let gradients that plain torch ops give a parameter wait while its queue is open, as those of our ops do."""
    buffers: list[Tensor] = []

    def before(grad: Tensor | None) -> None:
        if grad is not None and param.grad is not None and pending_of(param) is not None:
            buffers.append(param.grad)
            param.grad = None  # so that autograd leaves its gradient alone, and touches no buffer

    def after(param: Tensor) -> None:
        pending, grad = pending_of(param), param.grad
        if buffers and pending is not None and grad is not None:
            param.grad = buffer = buffers.pop()
            pending.append(partial(buffer.add_, grad))

    if param.requires_grad:
        param.register_hook(before)
        param.register_post_accumulate_grad_hook(after)


def lasting(param: Tensor, x: Tensor, own: bool) -> Tensor:
    """x, or a copy whose values last until the gradient of this parameter is added. It is copied if that is deferred, x
    is not the op's `own` tensor, and x lies in memory that ranks share and reuse."""
    return x if own or pending_of(param) is None else x.clone()


def add_grad(param: Tensor, grad: Tensor) -> Tensor | None:
    """Account for `grad`, of the parameter's shape; returns what a backward must return for this parameter."""
    if not param.is_leaf or param.grad is None:
        return grad.to(param.dtype)
    return account(param, lambda buffer: buffer.add_(grad))


def add_product_grad(param: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """The same for grad = dy^T x, with dy (T, out) and x (T, in); where possible, the GEMM itself accumulates."""
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

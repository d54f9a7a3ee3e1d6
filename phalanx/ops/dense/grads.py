"""Where weight gradients go: added to the parameter's flat gradient buffer by the op itself, or handed to autograd.

A parameter whose `.grad` exists (a view into the flat buffer, in its own dtype) gets its gradient added in place,
and autograd sees None. Without one (a user's plain loop before the first backward) the gradient is returned and
autograd stores it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_grad(param: Tensor, grad: Tensor) -> Tensor | None:
    """Account for `grad`, of the parameter's shape; what a backward must return for this parameter."""
    if not param.is_leaf or param.grad is None:
        return grad.to(param.dtype)
    param.grad.add_(grad)
    return None


def add_product_grad(param: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """The same for grad = dy^T x, with dy (T, out) and x (T, in): the GEMM itself accumulates where it can.

    Low-precision operands on a GPU accumulate into fp32 inside the GEMM; on the CPU they are widened first, so that
    both add an unrounded product.
    """
    buffer = param.grad
    if buffer is None:
        return dy.t() @ x
    if buffer.dtype == x.dtype:
        buffer.addmm_(dy.t(), x)
    elif buffer.is_meta:
        pass  # the GEMM adds in place, so there is nothing to show; torch 2.11 has no such product on meta
    elif not buffer.is_cpu:
        torch.addmm(buffer, dy.t(), x, out_dtype=buffer.dtype, out=buffer)
    else:
        buffer.addmm_(dy.t().to(buffer.dtype), x.to(buffer.dtype))
    return None


def add_rows_grad(param: Tensor, rows: Tensor, dy: Tensor) -> Tensor | None:
    """The same for a lookup: dy (T, D) is added to rows (T,) of the parameter's gradient, repeated rows included.

    On a GPU this sums in the order of a stable sort, so equal inputs give equal bits (atomics, or aten's embedding
    backward, do not).
    """
    buffer = torch.zeros_like(param) if param.grad is None else param.grad
    buffer.index_put_((rows,), dy.to(buffer.dtype), accumulate=True)
    return buffer if param.grad is None else None

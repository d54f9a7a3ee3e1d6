"""Weights for tests of ops, with what a layer would give them."""

from __future__ import annotations

from torch import Tensor

from phalanx.layout.param import ParamSpec
from phalanx.nn.parameter import Parameter, Quantizer


def make_weight(values: Tensor, quantizer: Quantizer | None = None, grad: Tensor | None = None) -> Parameter:
    """A parameter with these values that is no part of a model; `grad`: what its gradient is added to."""
    made = Parameter(values, ParamSpec(tuple(values.shape), ()))
    made.quantizer = quantizer
    if grad is not None:
        made.grad_dtype, made.grad = grad.dtype, grad
    return made

"""Weights for tests of ops, with what a layer would give them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.layout.param import ParamSpec
from phalanx.nn.parameter import Parameter, Quantizer


def make_weight(values: Tensor, quantizer: Quantizer | None = None, grad: Tensor | None = None) -> Parameter:
    """A parameter with these values that is no part of a model; `grad`: what its gradient is added to."""
    made = Parameter(values, ParamSpec(tuple(values.shape), ()))
    made.quantizer = quantizer
    if grad is not None:
        made.grad_dtype, made.grad = grad.dtype, grad
    return made


def with_memory(block: nn.Module) -> nn.Module:
    """The block with memory of its own on the CPU, without values; a model's parameters lie in flat buffers."""
    for p in list(block.parameters()):
        shape = p.shape
        p.to_empty(torch.device("cpu"))  # type: ignore[operator]
        p.data = torch.empty(shape, dtype=p.dtype)
    return block

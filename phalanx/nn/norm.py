"""Norms over this rank's tokens; their weights are whole on each tp rank."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.nn.env import Env
from phalanx.nn.initial import ONES, ZEROS
from phalanx.nn.module import Module
from phalanx.ops.dense.norm import (
    NORM,
    add_layer_norm,
    add_layer_norm_twice,
    add_rms_norm,
    layer_norm,
    plus_one,
    rms_norm,
)


class RMSNorm(Module):
    init = ONES

    def __init__(self, env: Env, name: str, width: int, eps: float):
        super().__init__(env)
        self.eps = eps
        self.weight = self.replicated(f"{name}.weight", width, self.init, "norm")

    @property
    def factor(self) -> Tensor:
        """What the normalized x is multiplied by."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.factor, self.eps, self.env.kernels_for(NORM))

    def add(self, x: Tensor, delta: Tensor | None = None, reader: Module | None = None) -> tuple[Tensor, Tensor]:
        """(x + delta, its norm): the residual stream and the input of the next sub-layer. `reader`: that sub-layer, if
        it is the only reader of the norm; the norm is then a lazy tensor if the reader accepts one."""
        lazy = reader is not None and reader.takes_lazy(x)
        x, normed = add_rms_norm(x, delta, self.factor, self.eps, self.env.kernels_for(NORM), lazy)
        self.env.recompute.output("norm", normed, self.forward, x)
        return x, normed


class OffsetRMSNorm(RMSNorm):
    """RMSNorm whose weight is stored as its distance from one, so that weight decay pulls it to one (Gemma)."""

    init = ZEROS

    @property
    def factor(self) -> Tensor:
        return plus_one(self.weight)


class LayerNorm(Module):
    """`bias`: whether it has one."""

    def __init__(self, env: Env, name: str, width: int, eps: float, bias: bool = True):
        super().__init__(env)
        self.eps = eps
        self.weight = self.replicated(f"{name}.weight", width, ONES, "norm")
        self.bias = self.replicated(f"{name}.bias", width, ZEROS) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self._shift(), self.eps, self.env.kernels_for(NORM))

    def _shift(self) -> Tensor:
        return torch.zeros_like(self.weight, requires_grad=False) if self.bias is None else self.bias

    def add(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(x + delta, its norm): the residual stream and the input of the next sub-layer."""
        x, normed = add_layer_norm(x, delta, self.weight, self._shift(), self.eps, self.env.kernels_for(NORM))
        self.env.recompute.output("norm", normed, self.forward, x)
        return x, normed

    def add_twice(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + delta for each of its two readers, where each sub-layer's output is normalized with what it
        is added to: the next sub-layer, and the sum after it."""
        kernels = self.env.kernels_for(NORM)
        total, normed, residual = add_layer_norm_twice(x, delta, self.weight, self._shift(), self.eps, kernels)
        self.env.recompute.output("norm", normed, self.forward, total)
        return normed, residual

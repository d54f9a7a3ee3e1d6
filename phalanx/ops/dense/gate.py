"""How the gate of a gated MLP is computed: SwiGLU, its clamped form, and GeGLU in both forms."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass

ROOT_HALF = math.sqrt(0.5)


@dataclass(frozen=True)
class Gate:
    """y = g s(g) (u + shift), with g = min(gate, limit), u = up clamped to +-limit, and s(g) the sigmoid of
    alpha (g + cubic g^3).

    interleaved  gate and up of a feature lie side by side, not all gates before all ups
    exact        s(g) is the normal distribution's (1 + erf(g / sqrt(2))) / 2, which the sigmoid is near: GELU itself
    """

    alpha: float = 1.0
    limit: float = math.inf
    shift: float = 0.0
    interleaved: bool = False
    cubic: float = 0.0
    exact: bool = False

    def factor(self, g: Tensor) -> Tensor:
        """s(g)."""
        return (1 + torch.erf(g * ROOT_HALF)) / 2 if self.exact else torch.sigmoid(self.inner(g))

    def inner(self, g: Any) -> Any:
        """What the sigmoid is of, of a tensor."""
        return self.alpha * (g + self.cubic * g * g * g) if self.cubic else self.alpha * g

    def backward(self, d: Tensor, g: Tensor, s: Tensor) -> Tensor:
        """The gradient of g from d, that of g s(g); d is overwritten, which saves a buffer of its size."""
        if self.exact:
            return d.mul_(s + g * torch.exp(-g * g / 2) / math.sqrt(2 * math.pi))
        steep = self.alpha * (g + 3 * self.cubic * g * g * g) if self.cubic else self.alpha * g
        return d.mul_(s).mul_(1 + steep * (1 - s))


SWIGLU = Gate()
"""Shazeer, "GLU variants improve transformer", 2020."""
CLAMPED_SWIGLU = Gate(1.702, 7.0, 1.0)
"""gpt-oss's (OpenAI, "gpt-oss-120b & gpt-oss-20b model card", 2025)."""
GEGLU = Gate(2 * math.sqrt(2 / math.pi), cubic=0.044715)
"""Shazeer, with the tanh form of GELU: x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)). Hendrycks & Gimpel, "Gaussian
error linear units", 2016."""
EXACT_GEGLU = Gate(exact=True)
"""Shazeer, with GELU itself, as in ModernBERT."""

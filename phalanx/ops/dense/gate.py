"""How the gate of a gated MLP is computed: SwiGLU, its clamped form, and GeGLU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gate:
    """y = g sigmoid(alpha (g + cubic g^3)) (u + shift), with g = min(gate, limit), u = up clamped to +-limit.

    interleaved: gate and up of a feature lie side by side, not all gates before all ups.
    """

    alpha: float = 1.0
    limit: float = math.inf
    shift: float = 0.0
    interleaved: bool = False
    cubic: float = 0.0

    def inner(self, g: Any) -> Any:
        """What the sigmoid is of, of a tensor."""
        return self.alpha * (g + self.cubic * g * g * g) if self.cubic else self.alpha * g

    def slope(self, g: Any) -> Any:
        """g times the derivative of `inner`."""
        return self.alpha * (g + 3 * self.cubic * g * g * g) if self.cubic else self.alpha * g


SWIGLU = Gate()
"""Shazeer, "GLU variants improve transformer", 2020."""
CLAMPED_SWIGLU = Gate(1.702, 7.0, 1.0)
"""gpt-oss's (OpenAI, "gpt-oss-120b & gpt-oss-20b model card", 2025)."""
GEGLU = Gate(2 * math.sqrt(2 / math.pi), cubic=0.044715)
"""Shazeer, with the tanh form of GELU: x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)). Hendrycks & Gimpel, "Gaussian
error linear units", 2016."""

"""How the gate of a gated MLP is computed: the shapes of SwiGLU."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Gate:
    """y = g sigmoid(alpha g) (u + shift), with g = min(gate, limit), u = up clamped to +-limit.

    interleaved: gate and up of a feature lie side by side, not all gates before all ups.
    """

    alpha: float = 1.0
    limit: float = math.inf
    shift: float = 0.0
    interleaved: bool = False


SWIGLU = Gate()
"""Shazeer, "GLU variants improve transformer", 2020."""
CLAMPED_SWIGLU = Gate(1.702, 7.0, 1.0)
"""gpt-oss's (OpenAI, "gpt-oss-120b & gpt-oss-20b model card", 2025)."""

"""Dynamic loss scaling for fp16 with a few device scalars, none of which the host reads during a step."""

from __future__ import annotations

import torch
from torch import Tensor


class LossScaler:
    """Halve the scale after `hysteresis` overflows, double it after `window` good steps; Micikevicius et al., "Mixed
    precision training", 2018.

    With `scale` 1 and `dynamic` false it is the identity, which is what fp32 and bf16 use.
    """

    def __init__(
        self,
        device: torch.device,
        scale: float = 1.0,
        window: int = 1000,
        hysteresis: int = 2,
        minimum: float = 1.0,
        dynamic: bool = False,
    ):
        self.window, self.hysteresis, self.minimum, self.dynamic = window, hysteresis, minimum, dynamic
        self.first = scale
        self.scale = torch.tensor(scale, dtype=torch.float32, device=device)
        self.good = torch.zeros((), dtype=torch.float32, device=device)  # good steps in a row
        self.left = torch.tensor(float(hysteresis), device=device)  # overflows left before the scale halves

    def update(self, skipped: Tensor) -> None:
        """`skipped` () float32 is 1 after an overflow, else 0."""
        if not self.dynamic:
            return
        bad = skipped.bool()
        left = torch.where(bad, self.left - 1, self.left)
        halve = bad & (left <= 0)
        good = torch.where(bad, 0.0, self.good + 1)
        grow = good >= self.window
        scale = torch.where(
            halve, (self.scale * 0.5).clamp_min(self.minimum), torch.where(grow, self.scale * 2.0, self.scale)
        )
        self.scale.copy_(scale)
        self.good.copy_(torch.where(grow, 0.0, good))
        self.left.copy_(torch.where(halve | grow, float(self.hysteresis), left))

    def reset(self) -> None:
        """Back to the initial state."""
        self.scale.fill_(self.first)
        self.good.zero_()
        self.left.fill_(float(self.hysteresis))

    def state(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good": self.good, "left": self.left}

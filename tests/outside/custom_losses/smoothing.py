"""Cross entropy with smoothed labels (Szegedy et al., "Rethinking the Inception architecture", 2016) and a z-loss
(Chowdhery et al., "PaLM", 2022), as a package of somebody else's has it.

    task: {name: "custom_losses.smoothing:Smoothing", smoothing: 0.1, z: 1.0e-4}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

import phalanx as px
from phalanx.base.errors import Problem
from phalanx.base.rules import within


@dataclass(frozen=True, kw_only=True)
class SmoothingConfig:
    smoothing: float = 0.1
    """Share of each token's target that is spread over the whole vocabulary."""
    z: float = 1e-4
    """Weight of the squared log-partition."""


@px.objective("smoothing")
class Smoothing(px.TokenObjective):
    Config = SmoothingConfig

    def token_loss(self, logits: px.LogitStats) -> Tensor:
        c = self.config
        target = (1 - c.smoothing) * logits.target + c.smoothing * logits.mean
        return logits.log_z - target + c.z * logits.log_z.square()

    def metrics(self, logits: px.LogitStats) -> dict[str, Tensor]:
        return {"nll": logits.log_z - logits.target, "log_z": logits.log_z}

    @classmethod
    def check(cls, config: Any) -> list[Problem]:
        return within("task", config, "smoothing", "[0, 1)")


class Weighted(Smoothing):
    """The same, where later tokens of a sequence count more."""

    def weights(self, batch: Any) -> Tensor:
        return 1 + 0.25 * (batch.places % 3)


class WeightedPretraining(px.TokenObjective):
    def token_loss(self, logits: px.LogitStats) -> Tensor:
        return logits.log_z - logits.target

    def weights(self, batch: Any) -> Tensor:
        return 1 + 0.25 * (batch.places % 3)


class Lossless(px.TokenObjective):
    pass


class TwoValues(px.TokenObjective):
    def token_loss(self, logits: px.LogitStats) -> Tensor:
        return logits.log_z.mean()

    def metrics(self, logits: px.LogitStats) -> dict[str, Tensor]:
        return {"mean": logits.log_z.mean()}

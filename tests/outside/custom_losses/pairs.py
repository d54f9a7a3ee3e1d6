"""A preference between two documents, chosen and rejected, without a reference model (after Meng et al.,
"SimPO", 2024), as a package of somebody else's has it.

    task: {name: "custom_losses.pairs:Preference", beta: 0.1}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import logsigmoid

import phalanx as px


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    beta: float = 0.1
    """How steep the preference is, per nat."""
    margin: float = 0.5
    """By how much a chosen document is to be more likely."""


@px.objective("preference")
class Preference(px.SequenceObjective):
    Config = PreferenceConfig
    sequences_per_sample = 2

    def loss(self, policy_P2: Tensor) -> Tensor:
        return -logsigmoid(self.config.beta * (policy_P2[:, 0] - policy_P2[:, 1]) - self.config.margin)

    def metrics(self, policy_P2: Tensor) -> dict[str, Tensor]:
        gap = policy_P2[:, 0] - policy_P2[:, 1]
        return {"accuracy": (gap > 0).double(), "gap": gap}


class Masked(Preference):
    """Every other token of a sequence does not count."""

    def weights(self, batch: Any) -> Tensor:
        return batch.places % 2


class Referred(Preference):
    needs_reference = True


class Lossless(px.SequenceObjective):
    pass

"""Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023), as a package of somebody else's has it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phalanx.ops.optimizer.state import Moment
from phalanx.optim.config import OptimConfig
from phalanx.optim.optimizer import Optimizer, ParamRange, optimizer


@dataclass(frozen=True, kw_only=True)
class LionConfig(OptimConfig):
    beta1: float = 0.9
    """Share of the momentum in the direction of a step."""
    beta2: float = 0.99
    """Decay of the momentum."""


@optimizer("lion")
class Lion(Optimizer):
    Config = LionConfig
    state = {"momentum": Moment()}

    def update(self, p: ParamRange) -> None:
        direction = torch.lerp(p.grad, p.momentum, self.config.beta1).sign()
        p.master.mul_(1 - p.lr * p.weight_decay).sub_(p.lr * direction)
        p.momentum.lerp_(p.grad, 1 - self.config.beta2)


class Unfinished(Optimizer):
    state = {"momentum": Moment()}


class Shadowing(Lion):
    state = {"grad": Moment()}


class Whole(Lion):
    owns = "matrix"

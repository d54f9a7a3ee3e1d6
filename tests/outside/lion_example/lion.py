"""Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023), as a package of somebody else's has it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import phalanx as px


@dataclass(frozen=True, kw_only=True)
class LionConfig(px.OptimConfig):
    beta1: float = 0.9
    """Share of the momentum in the direction of a step."""
    beta2: float = 0.99
    """Decay of the momentum."""


@px.optimizer("example_lion")
class Lion(px.Optimizer):
    Config = LionConfig
    state = {"momentum": px.Moment()}

    def update(self, p: px.ParamRange) -> None:
        direction = torch.lerp(p.grad, p.momentum, self.config.beta1).sign()
        p.master.mul_(1 - p.lr * p.weight_decay).sub_(p.lr * direction)
        p.momentum.lerp_(p.grad, 1 - self.config.beta2)


class Unfinished(px.Optimizer):
    state = {"momentum": px.Moment()}


class Shadowing(Lion):
    state = {"grad": px.Moment()}


class Whole(Lion):
    owns = "tensor"

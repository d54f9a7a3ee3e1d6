"""Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023): steps of one size, along the sign of a
momentum.

Torch is not imported here, so that a config can be read without it.
"""

from __future__ import annotations

from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import within
from phalanx.ops.optimizer.state import Moment
from phalanx.optim.config import OptimConfig
from phalanx.optim.optimizer import Optimizer, ParamRange, check_decays, optimizer


@dataclass(frozen=True, kw_only=True)
class LionConfig(OptimConfig):
    beta1: float = 0.9
    """How much of the momentum is in a step's direction, in [0, 1]; the rest is the gradient."""
    beta2: float = 0.99
    """Decay of the momentum, in [0, 1)."""


@optimizer("lion")
class Lion(Optimizer):
    Config = LionConfig
    state = {"momentum": Moment()}

    def update(self, p: ParamRange) -> None:
        c = self.config
        direction = p.momentum.mul(c.beta1).add_(p.grad, alpha=1 - c.beta1).sign_()
        p.master.mul_(1 - p.lr * p.weight_decay).add_(direction, alpha=-p.lr)
        p.momentum.lerp_(p.grad, 1 - c.beta2)

    @classmethod
    def check(cls, config: Any) -> list[Problem]:
        found = within("optim", config, "beta1", "[0, 1]") + within("optim", config, "beta2", "[0, 1)")
        return found + check_decays(config, "beta2")

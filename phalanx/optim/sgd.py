"""Gradient descent with momentum (Polyak, 1964; Nesterov, 1983), and decoupled weight decay.

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
class SGDConfig(OptimConfig):
    momentum: float = 0.9
    """How much of the last step's direction remains, in [0, 1)."""
    nesterov: bool = False
    """The gradient counts once more beside the momentum (as in torch.optim.SGD)."""


@optimizer("sgd")
class SGD(Optimizer):
    Config = SGDConfig
    state = {"velocity": Moment()}

    def update(self, p: ParamRange) -> None:
        c = self.config
        p.velocity.mul_(c.momentum).add_(p.grad)
        direction = p.grad.add(p.velocity, alpha=c.momentum) if c.nesterov else p.velocity
        p.master.mul_(1 - p.lr * p.weight_decay).add_(direction, alpha=-p.lr)

    @classmethod
    def check(cls, config: Any) -> list[Problem]:
        return within("optim", config, "momentum", "[0, 1)") + check_decays(config, "momentum")

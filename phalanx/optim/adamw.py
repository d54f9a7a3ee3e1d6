"""AdamW with decoupled weight decay (Loshchilov & Hutter, 2019): its options, their rules, and its update.

Torch is not imported here, so that a config can be read without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import within
from phalanx.ops.optimizer.state import Moment
from phalanx.optim.config import OptimConfig
from phalanx.optim.optimizer import FusedOptimizer, ParamRange, StepScalars, check_decays, optimizer

if TYPE_CHECKING:  # importing torch takes seconds
    from phalanx.ops.op import Kernels
    from phalanx.ops.optimizer.shard import StateRange


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimConfig):
    beta1: float = 0.9
    """Decay of Adam's first moment, in [0, 1)."""
    beta2: float = 0.95
    """Decay of Adam's second moment, in [0, 1)."""
    eps: float = 1e-8
    """Adam's epsilon, > 0."""


@optimizer("adamw")
class AdamW(FusedOptimizer):
    Config = AdamWConfig
    state = {"m": Moment(), "v": Moment(nonnegative=True)}
    op = "adamw"

    def update(self, p: ParamRange) -> None:
        c, step = self.config, p.step.double()
        p.m.lerp_(p.grad, 1 - c.beta1)
        p.v.mul_(c.beta2).addcmul_(p.grad, p.grad, value=1 - c.beta2)
        first = p.m / (1 - c.beta1**step).to(p.m.dtype)
        second = p.v / (1 - c.beta2**step).to(p.v.dtype)
        p.master.mul_(1 - p.lr * p.weight_decay).addcdiv_(first, second.sqrt_().add_(c.eps), value=-p.lr)

    def update_ranges(
        self, ranges: Sequence[StateRange], lr: float, weight_decay: float, scalars: StepScalars, kernels: Kernels
    ) -> None:
        from phalanx.ops.optimizer.adamw import AdamOptions, AdamRange, adamw_  # start-up time: it imports torch

        c = self.config
        adamw_(
            [AdamRange(r.master, r.grad, r.state["m"], r.state["v"], r.out) for r in ranges],
            scalars.step,
            AdamOptions(lr, c.beta1, c.beta2, c.eps, weight_decay),
            scalars.factor,
            scalars.skip,
            kernels,
        )

    @classmethod
    def check(cls, config: Any) -> list[Problem]:
        intervals = {"beta1": "[0, 1)", "beta2": "[0, 1)", "eps": "(0, inf)"}
        found = [p for name, interval in intervals.items() for p in within("optim", config, name, interval)]
        return found + check_decays(config, "beta1", "beta2")

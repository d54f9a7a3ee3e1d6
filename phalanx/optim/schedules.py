"""Learning rates as pure functions of the step: linear warm-up, which all schedules share, and what follows it.

Torch is not imported here, so that a config that names a schedule can be read without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.registry import NotFound, find, register
from phalanx.optim.config import OptimConfig

SEAM = "lr_schedule"
Read = Literal["min_lr", "decay_steps", "wsd_decay_steps"]
READABLE: tuple[Read, ...] = ("min_lr", "decay_steps", "wsd_decay_steps")
"""Fields of optim that only some schedules read."""


@dataclass(frozen=True)
class LRPoint:
    """A step after warm-up. step: counted from 1, so it is > config.warmup_steps; end: the step at which the decay ends
    (optim.decay_steps, or else the run's last)."""

    config: OptimConfig
    step: int
    end: int

    @property
    def done(self) -> float:
        """Progress from the end of warm-up to `end`, from 0 to 1."""
        warmup = self.config.warmup_steps
        return min(1.0, (self.step - warmup) / max(1, self.end - warmup))

    def decayed(self, done: float) -> float:
        """The rate at this progress along a straight line from lr to min_lr."""
        return self.config.lr + (self.config.min_lr - self.config.lr) * done


@dataclass(frozen=True)
class LRSchedule:
    """Learning rates after warm-up. reads: which fields of READABLE it uses; the others are refused with it."""

    rate: Callable[[LRPoint], float]
    reads: tuple[Read, ...] = ()


def lr_schedule(name: str, reads: tuple[Read, ...] = ()) -> Callable[[Callable[[LRPoint], float]], LRSchedule]:
    """Make a learning-rate schedule from a function: `optim.schedule` may be this name wherever its module has been
    imported, and `module:FUNCTION` anywhere."""

    def named(rate: Callable[[LRPoint], float]) -> LRSchedule:
        made = LRSchedule(rate, reads)
        register(SEAM, name, made, f"{rate.__module__}:{rate.__qualname__}")
        return made

    return named


@lr_schedule("constant")
def constant(at: LRPoint) -> float:
    return at.config.lr


@lr_schedule("inverse_sqrt", reads=("min_lr",))
def inverse_sqrt(at: LRPoint) -> float:
    first = max(at.config.warmup_steps, 1)
    return max(at.config.min_lr, at.config.lr * math.sqrt(first / max(at.step, first)))


@lr_schedule("linear", reads=("min_lr", "decay_steps"))
def linear(at: LRPoint) -> float:
    return at.decayed(at.done)


@lr_schedule("cosine", reads=("min_lr", "decay_steps"))
def cosine(at: LRPoint) -> float:
    c = at.config
    return c.min_lr + (c.lr - c.min_lr) * 0.5 * (1 + math.cos(math.pi * at.done))


@lr_schedule("wsd", reads=("min_lr", "decay_steps", "wsd_decay_steps"))
def wsd(at: LRPoint) -> float:
    """Constant, then linear over the last wsd_decay_steps (Hu et al., "MiniCPM", 2024)."""
    length = at.config.wsd_decay_steps or max(1, at.end // 10)
    return at.decayed(min(1.0, max(0.0, (at.step - (at.end - length)) / length)))


def find_schedule(name: str) -> LRSchedule:
    """The schedule that `optim.schedule` refers to. NotFound says what is wrong with it."""
    found = find(SEAM, name)
    if not isinstance(found, LRSchedule):
        raise NotFound("is no learning-rate schedule: put @px.lr_schedule(NAME) above its function")
    return found


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """The rate of step 1, 2, ...: linear warm-up from 0 to lr over warmup_steps, then the schedule down to min_lr at
    decay_steps.

    The last warm-up step has the rate lr; step decay_steps and later steps have min_lr (constant and inverse_sqrt: no
    end).
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    return find_schedule(config.schedule).rate(LRPoint(config, step, config.decay_steps or total_steps))

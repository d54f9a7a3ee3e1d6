"""Rules of the `optim` section: ranges, and the learning-rate schedule against the length of the run."""

from __future__ import annotations

import math
from dataclasses import replace

from phalanx.base.errors import Problem
from phalanx.base.registry import NotFound
from phalanx.base.rules import at_least, default_of, no_effect, problem, within
from phalanx.layout.param import ROLES
from phalanx.optim.config import OptimConfig
from phalanx.optim.optimizer import find_optimizer, roles_left
from phalanx.optim.schedules import READABLE, find_schedule, learning_rate


def check(config: OptimConfig, *, steps: int) -> list[Problem]:
    found = check_ranges(config)
    if steps >= 1 and not any(p.field.endswith("_steps") for p in found):
        found += check_schedule(config, steps)
    return found


def check_ranges(config: OptimConfig) -> list[Problem]:
    found = check_own(config, "optim")
    found += within("optim", config, "min_lr", "[0, inf)")
    if not (math.isfinite(config.clip_grad) and config.clip_grad >= 0):
        found.append(
            problem("optim", config, "clip_grad", "must be a number in [0, inf); 0 turns clipping off", {}, (1.0, 0.0))
        )
    if not (math.isfinite(config.qk_clip) and config.qk_clip >= 0):
        rule = "must be a number in [0, inf); 0 turns QK-clip off"
        found.append(problem("optim", config, "qk_clip", rule, {}, (100.0, 0.0)))
    if not found and config.min_lr > config.lr:
        found.append(
            problem("optim", config, "min_lr", "must be <= lr", {"optim.lr": config.lr}, (config.lr, config.lr / 10))
        )
    found += check_fallback(config)
    found += at_least("optim", config, 0, "warmup_steps")
    return found + at_least("optim", config, 1, "decay_steps", "wsd_decay_steps")


def check_own(config: OptimConfig, section: str) -> list[Problem]:
    """Rules of each optimizer's own fields, also of a fallback."""
    found = within(section, config, "lr", "[0, inf)") + within(section, config, "weight_decay", "[0, inf)")
    found += [p if section == "optim" else _moved(p, section) for p in find_optimizer(config.name).check(config)]
    for pattern, scale in config.lr_scale.items():
        if not (math.isfinite(scale) and scale >= 0):
            found.append(Problem(f"{section}.lr_scale.{pattern}", scale, "must be a number in [0, inf)", {}, (1.0,)))
    return found


def _moved(found: Problem, section: str) -> Problem:
    """A problem with an optimizer's own fields, which its check calls `optim.`, moved to another section."""
    because = {key.replace("optim.", f"{section}.", 1): value for key, value in found.because.items()}
    return replace(found, field=found.field.replace("optim.", f"{section}.", 1), because=because)


SHARED = (
    "min_lr",
    "masters",
    "clip_grad",
    "clip_by",
    "qk_clip",
    "in_backward",
    "schedule",
    "warmup_steps",
    "decay_steps",
    "wsd_decay_steps",
    "restart",
    "fallback",
)
"""Fields of optim that also apply to its fallback."""


def check_fallback(config: OptimConfig) -> list[Problem]:
    own = config.fallback
    if own is None:
        return []
    section, name = "optim.fallback", {"optim.name": config.name}
    if not set(find_optimizer(config.name).roles) < set(ROLES):
        rule = "has no effect without an optimizer that leaves some roles to it"
        return [Problem(section, own.name, rule, name, (default_of(type(config), "fallback"),))]
    found = check_own(own, section) + roles_left(config)
    found += no_effect(section, own, SHARED, "an optimizer that reads it: that of optim holds for both", {})
    if config.lr == 0 and own.lr > 0:
        rule = "must be > 0 where optim.fallback.lr is: the fallback follows the schedule of optim.lr in proportion"
        found.append(problem("optim", config, "lr", rule, {"optim.fallback.lr": own.lr}, (own.lr,)))
    return found


def check_schedule(config: OptimConfig, steps: int) -> list[Problem]:
    found = []
    if config.warmup_steps >= steps:
        found.append(
            problem("optim", config, "warmup_steps", "must be < train.steps", {"train.steps": steps}, (steps - 1,))
        )
    try:
        schedule = find_schedule(config.schedule)
    except NotFound as error:
        return [*found, error.problem("optim.schedule", config.schedule)]
    because = {"optim.schedule": config.schedule}
    for name in (name for name in READABLE if name not in schedule.reads):
        ends = name == "wsd_decay_steps" and "decay_steps" in schedule.reads
        without = "optim.schedule=wsd" if ends else "a schedule that reads it"
        found += no_effect("optim", config, (name,), without, because)
    if "decay_steps" in schedule.reads and config.decay_steps is not None and config.decay_steps <= config.warmup_steps:
        valid = (config.warmup_steps + 1, None)
        warmup = {"optim.warmup_steps": config.warmup_steps}
        found.append(problem("optim", config, "decay_steps", "must be > warmup_steps", warmup, valid))
    longest = (config.decay_steps or steps) - config.warmup_steps
    given = config.wsd_decay_steps if "wsd_decay_steps" in schedule.reads else None
    if not found and given is not None and given > longest:
        rule = "must fit between warm-up and the end"
        found.append(
            problem("optim", config, "wsd_decay_steps", rule, {"decay_steps - warmup_steps": longest}, (longest, None))
        )
    return found or check_rates(config, steps)


def check_rates(config: OptimConfig, steps: int) -> list[Problem]:
    """Whether a schedule works: the rates of the first step after warm-up, of one in the middle and of the last."""
    for step in sorted({config.warmup_steps + 1, (config.warmup_steps + steps) // 2 + 1, steps}):
        try:
            rate = learning_rate(config, step, steps)
        except Exception as error:  # raised by code that is not ours
            said = f"raises {type(error).__name__}: {error}"
        else:
            if isinstance(rate, int | float) and math.isfinite(rate) and rate >= 0:
                continue
            said = f"gives {rate!r}"
        rule = "must give a learning rate, a number >= 0, at every step"
        return [Problem("optim.schedule", config.schedule, rule, {f"at step {step} it": said})]
    return []

"""Rules of the `optim` section: ranges, and the learning-rate schedule against the length of the run."""

from __future__ import annotations

import math

from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, no_effect, problem, within
from phalanx.optim.config import OptimConfig
from phalanx.optim.optimizer import find_optimizer


def check(config: OptimConfig, *, steps: int) -> list[Problem]:
    found = check_ranges(config)
    if steps >= 1 and not any(p.field.endswith("_steps") for p in found):
        found += check_schedule(config, steps)
    return found


def check_ranges(config: OptimConfig) -> list[Problem]:
    intervals = {
        "lr": "[0, inf)",
        "min_lr": "[0, inf)",
        "weight_decay": "[0, inf)",
    }
    found = [p for name, interval in intervals.items() for p in within("optim", config, name, interval)]
    if not (math.isfinite(config.clip_grad) and config.clip_grad >= 0):
        found.append(
            problem("optim", config, "clip_grad", "must be a number in [0, inf); 0 turns clipping off", {}, (1.0, 0.0))
        )
    found += find_optimizer(config.name).check(config)
    if not found and config.min_lr > config.lr:
        found.append(
            problem("optim", config, "min_lr", "must be <= lr", {"optim.lr": config.lr}, (config.lr, config.lr / 10))
        )
    for pattern, scale in config.lr_scale.items():
        if not (math.isfinite(scale) and scale >= 0):
            found.append(Problem(f"optim.lr_scale.{pattern}", scale, "must be a number in [0, inf)", {}, (1.0,)))
    found += at_least("optim", config, 0, "warmup_steps")
    return found + at_least("optim", config, 1, "decay_steps", "wsd_decay_steps")


def check_schedule(config: OptimConfig, steps: int) -> list[Problem]:
    found = []
    if config.warmup_steps >= steps:
        found.append(
            problem("optim", config, "warmup_steps", "must be < train.steps", {"train.steps": steps}, (steps - 1,))
        )
    if config.schedule in ("constant", "inverse_sqrt"):
        unread = (
            ("min_lr", "decay_steps", "wsd_decay_steps")
            if config.schedule == "constant"
            else ("decay_steps", "wsd_decay_steps")
        )
        return found + no_effect("optim", config, unread, "a schedule that reads it", _schedule(config))
    if config.decay_steps is not None and config.decay_steps <= config.warmup_steps:
        because = {"optim.warmup_steps": config.warmup_steps}
        valid = (config.warmup_steps + 1, None)
        found.append(problem("optim", config, "decay_steps", "must be > warmup_steps", because, valid))
    if config.schedule != "wsd":
        return found + no_effect("optim", config, ("wsd_decay_steps",), "optim.schedule=wsd", _schedule(config))
    longest = (config.decay_steps or steps) - config.warmup_steps
    if not found and config.wsd_decay_steps is not None and config.wsd_decay_steps > longest:
        because = {"decay_steps - warmup_steps": longest}
        found.append(
            problem(
                "optim", config, "wsd_decay_steps", "must fit between warm-up and the end", because, (longest, None)
            )
        )
    return found


def _schedule(config: OptimConfig) -> dict[str, str]:
    return {"optim.schedule": config.schedule}

"""Learning rates as pure functions of the step."""

from __future__ import annotations

import math

from phalanx.optim.config import OptimConfig


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """The rate of step 1, 2, ...: linear warm-up from 0 to lr over warmup_steps, then the schedule down to min_lr at
    decay_steps.

    The first step after warm-up's last has reached lr; step decay_steps and later have min_lr (constant and
    inverse_sqrt: no end). wsd: constant, then linear over the last wsd_decay_steps (Hu et al., "MiniCPM", 2024).
    """
    c = config
    if step <= c.warmup_steps:
        return c.lr * step / c.warmup_steps
    if c.schedule == "constant":
        return c.lr
    if c.schedule == "inverse_sqrt":
        first = max(c.warmup_steps, 1)
        return max(c.min_lr, c.lr * math.sqrt(first / max(step, first)))
    end = c.decay_steps or total_steps
    if c.schedule == "wsd":
        length = c.wsd_decay_steps or max(1, end // 10)
        done = min(1.0, max(0.0, (step - (end - length)) / length))
        return c.lr + (c.min_lr - c.lr) * done
    done = min(1.0, (step - c.warmup_steps) / max(1, end - c.warmup_steps))
    if c.schedule == "linear":
        return c.lr + (c.min_lr - c.lr) * done
    return c.min_lr + (c.lr - c.min_lr) * 0.5 * (1 + math.cos(math.pi * done))

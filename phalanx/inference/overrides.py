"""The overrides of a config that generation uses; others would have no effect, and are refused."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.base.errors import ConfigError, Problem

TAKEN = (
    "layout.",
    "train.precision",
    "train.device",
    "train.batch_invariant",
    "train.kernels",
    "train.plain_ops",
    "train.timeout_s",
)
"""With others it would do nothing."""


NOTHING_TO_LOSS = (
    "optim.",
    "checkpoint.",
    "train.steps",
    "train.tokens",
    "train.rampup",
    "train.eval_interval",
    "train.guard",
    "train.recompute",
    "train.freeze",
    "train.time_limit_s",
)
"""Keys of training alone, which an evaluation of loss does not read."""


def refuse_training(overrides: Sequence[str], where: str = "command line") -> None:
    """ConfigError for overrides that would do nothing to the loss of a checkpoint."""
    keys = [word.partition("=") for word in overrides]
    rule = "does nothing to an evaluation, which makes no steps: leave it out"
    wrong = [Problem(key, value, rule, {}, (), where) for key, _, value in keys if key.startswith(NOTHING_TO_LOSS)]
    if wrong:
        raise ConfigError(wrong)


def refuse_others(overrides: Sequence[str], where: str = "command line") -> None:
    """ConfigError for overrides that would do nothing."""
    rule = "does nothing to generation, which reads " + ", ".join(f"{key}*" if key[-1] == "." else key for key in TAKEN)
    keys = [word.partition("=") for word in overrides]
    wrong = [Problem(key, value, rule, {}, (), where) for key, _, value in keys if not key.startswith(TAKEN)]
    if wrong:
        raise ConfigError(wrong)

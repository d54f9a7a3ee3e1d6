"""The errors that users see: what was wrong, why, and what to do. Each kind has the exit code that scripts rely on."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

from phalanx.base.dataclass import dataclass

SHOWN = 400  # characters of a value shown in a message


def shortened(text: str) -> str:
    """The beginning of a long text, followed by its length."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]}... ({len(text):,} characters)"


class PhalanxError(Exception):
    """Base of all errors that a user can cause. The launcher prints them without a traceback and exits with
    `exit_code`."""

    exit_code = 1
    kind: str | None = None  # what the message begins with; None: the class name in words


@dataclass(frozen=True)
class Problem:
    """One broken rule of a config.

    `field` is the dotted path, `rule` continues a sentence that begins with the value ("must divide world_size"),
    `because` names the values it conflicts with, `valid` holds the nearest values that make this problem go away, and
    `where` says where the value was set.
    """

    field: str
    value: Any
    rule: str
    because: dict[str, Any] = dataclasses.field(default_factory=dict)
    valid: tuple[Any, ...] = ()
    where: str = ""

    def at(self, where: str) -> Problem:
        return replace(self, where=where)

    def __str__(self) -> str:
        text = f"config error: {shortened(self.field)}={shortened(repr(self.value))}: {self.rule}"
        if self.because:
            text += ", because " + ", ".join(f"{shortened(k)}={shortened(repr(v))}" for k, v in self.because.items())
        text += "."
        if self.valid:
            text += " Valid near it: " + ", ".join(shortened(str(v)) for v in self.valid) + "."
        if self.where:
            text += f" (set in {shortened(self.where)})"
        return text


class ConfigError(PhalanxError):
    """All problems of a config at once."""

    exit_code = 2

    def __init__(self, problems: list[Problem]):
        self.problems = list(problems)
        super().__init__("\n".join(str(p) for p in self.problems))


class DataError(PhalanxError):
    """Training data that is missing, damaged or does not fit the model."""

    exit_code = 3


class CheckpointError(PhalanxError):
    """A checkpoint that is missing, damaged, or of another model."""

    exit_code = 4


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose bytes are not those that were saved; an older one may still be intact."""

    kind = "checkpoint error: "


class NumericalStop(PhalanxError):
    """Training stopped because of bad numbers (too many NaN steps in a row, loss scale at its minimum). step: the bad
    step."""

    exit_code = 5

    def __init__(self, text: str, step: int | None = None):
        self.step = step
        super().__init__(text)


class PeerLost(PhalanxError):
    """Another rank died or did not answer in time."""

    exit_code = 6


class FolderInUse(PhalanxError):
    """Another run writes to this folder."""

    exit_code = 7


class BadNode(PhalanxError):
    """A preflight found a node on which the run should not start."""

    exit_code = 8
    kind = "preflight: "


class Preempted(PhalanxError):
    """The run was asked to stop (SIGTERM), saved its state and can be started again."""

    exit_code = 75

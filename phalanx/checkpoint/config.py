"""The `checkpoint` section: when to save, what to keep, where to start from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    interval: int | None = None
    """Save every so many steps; unset: only at the end and on SIGTERM."""
    keep_last: int = 2
    """Checkpoints to keep; 0 keeps all."""
    load: str | None = None
    """A checkpoint (or a run folder: its newest) to continue from; the run's own checkpoints, if any, go first."""
    resume: Literal["auto", "never"] = "auto"
    """auto: continue from the newest checkpoint of this run's folder; never: refuse to start where one exists."""

"""The `checkpoint` section: when to save, what to keep, where to start from."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from phalanx.base.dataclass import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    interval: int | None = None
    """Save every so many steps; unset: only at the end and on SIGTERM."""
    dir: str | None = None
    """Where checkpoints go: a folder, or s3://bucket/prefix (needs the extra phalanx[s3]); unset: checkpoints/ in
    the run's folder."""
    keep_last: int = 2
    """Newest good checkpoints to keep; 0 keeps all."""
    keep_every: int | None = None
    """Also keep checkpoints whose step is a multiple of this."""
    background: bool = True
    """Write from a copy in host memory while training goes on; false: the run waits until all is on disk."""
    on_error: Literal["stop", "continue"] = "stop"
    """What happens if a save fails (on a full disk): stop ends the run (exit 4), continue warns and goes on. The last
    save of a run always ends it."""
    load: str | None = None
    """A checkpoint (or a run folder: its newest) to continue from; the run's own checkpoints, if any, take
    precedence."""
    resume: Literal["auto", "never"] = "auto"
    """auto: continue from the newest checkpoint of this run's folder; never: refuse to start where one exists."""
    allow: list[str] = field(default_factory=list)
    """Keys (or sections, or globs) that may differ from the checkpoint although they must match, such as data."""
    fallback: bool = True
    """If the newest checkpoint is damaged, say so and continue from the newest good one; false: stop (exit 4)."""

"""The note of a run's last submission, launch.json in its folder, so that nobody submits a run twice and `phalanx
status RUN` knows its job."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from phalanx.base.dataclass import dataclass

NAME = "launch.json"


@dataclass(frozen=True)
class Submission:
    """scheduler: slurm, ray or k8s; job: its number there; script: what was submitted; time: when, in ISO 8601; server:
    where the scheduler answers, if there are several."""

    scheduler: str
    job: str
    script: str
    command: str
    time: str
    server: str = ""

    def note(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{NAME}.partial"
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(partial, folder / NAME)


def submission_of(folder: Path) -> Submission | None:
    """The last one; None if the run was not submitted, or its note cannot be read."""
    try:
        return Submission(**json.loads((folder / NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def logs_of(folder: Path) -> Path:
    """Where the logs of a run's jobs lie."""
    return folder / "logs"

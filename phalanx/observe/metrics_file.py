"""MetricsFile: the sink that every run has, metrics.jsonl in its folder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from phalanx.base.journal import Journal
from phalanx.base.records import Row, Sink, SinkStart


class MetricsFile(Sink):
    """metrics.jsonl: every row, unchanged. Rows of later steps, from an earlier attempt, are dropped."""

    def __init__(self, start: SinkStart, config: Any):
        super().__init__(start, config)
        self.path = start.folder / "metrics.jsonl"
        self._journal = Journal(self.path, start.log.warn)
        self.rewind(start.step)

    def rewind(self, step: int) -> None:
        self._journal.cut(end_of(self.path, step), lambda entry: step_of(entry) <= step)

    def write(self, row: Row) -> None:
        self._journal.write(json.dumps(row.plain()).encode() + b"\n")

    def close(self) -> None:
        self._journal.close()


def end_of(path: Path, step: int) -> int:
    """Bytes of a metrics.jsonl up to the first row after `step`. Truncating a file needs no room on the disk, and is
    atomic."""
    size = 0
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                if step_of(line) > step or not line.endswith(b"\n"):
                    break
                size += len(line)
    return size


def step_of(line: bytes) -> float:
    """The step of a row; a row that was cut short by a kill counts as later than all."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf

"""Trackers: where rank 0 writes the numbers of a run. metrics.jsonl always, TensorBoard and Weights & Biases when
asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from phalanx.base.journal import Journal
from phalanx.base.log import Log, describe
from phalanx.config.run import LogConfig


class Tracker(Protocol):
    """One way to write rows down. A row has `step` and numbers, texts or tables of them by name."""

    def write(self, values: dict[str, Any]) -> None: ...

    def rewind(self, step: int) -> None:
        """The run goes back to this step: later rows are no longer of it."""

    def close(self) -> None: ...


class MetricsFile:
    """metrics.jsonl: every row, as it is. Rows after `step`, of an earlier try, are dropped."""

    def __init__(self, path: Path, step: int, log: Log):
        self.path = path
        self._journal = Journal(path, log.warn)
        self.rewind(step)

    def rewind(self, step: int) -> None:
        self._journal.cut(end_of(self.path, step), lambda entry: step_of(entry) <= step)

    def write(self, values: dict[str, Any]) -> None:
        self._journal.write(json.dumps(values).encode() + b"\n")

    def close(self) -> None:
        self._journal.close()


def end_of(path: Path, step: int) -> int:
    """Bytes of a metrics.jsonl up to the first row after `step`. Cutting a file needs no room on the disk, and is
    done or not done."""
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


class Trackers:
    """All trackers of a run. One that fails is named once and gets nothing more; the run goes on."""

    def __init__(self, folder: Path, step: int, wanted: LogConfig, config: dict[str, Any], log: Log):
        self._log = log
        self._open: dict[str, Tracker] = {}
        self._start("metrics.jsonl", lambda: MetricsFile(folder / "metrics.jsonl", step, log))
        if wanted.tensorboard:
            self._start("TensorBoard", lambda: tensorboard_file(folder, step, log))
        if wanted.wandb is not None:
            self._start("Weights & Biases", lambda: wandb_run(folder, wanted, config, log))

    def write(self, values: dict[str, Any]) -> None:
        self._each(lambda tracker: tracker.write(values))

    def rewind(self, step: int) -> None:
        self._each(lambda tracker: tracker.rewind(step))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _start(self, name: str, start: Callable[[], Tracker]) -> None:
        try:
            self._open[name] = start()
        except Exception as error:  # a foreign package: whatever it raises must not end a run
            self._failed(name, error)

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                call(tracker)
            except Exception as error:  # as above
                del self._open[name]
                self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        rest = "the others go on" if name == "metrics.jsonl" else "metrics.jsonl has every number"
        self._log.warn(f"{name} failed and gets nothing more of this run, which goes on; {rest}: {describe(error)}")


def tensorboard_file(folder: Path, step: int, log: Log) -> Tracker:
    from phalanx.observe.tensorboard_file import TensorBoardFile  # an optional package

    return TensorBoardFile(folder / "tb", step, log)


def wandb_run(folder: Path, wanted: LogConfig, config: dict[str, Any], log: Log) -> Tracker:
    from phalanx.observe.wandb_run import WandbRun  # an optional package

    return WandbRun(folder, wanted, config, log)

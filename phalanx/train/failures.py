"""Failures: at which step a run stopped before, and with what, in its folder's failures.jsonl: does it stop it again? Starts nothing anew."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from phalanx.base.errors import CheckpointError, NumericalStop, Preempted
from phalanx.base.log import Log, describe

NAME = "failures.jsonl"


class Failures:
    """An error that leaves the context after a step began becomes a line of the file. Rank 0 reads, writes and speaks.

    A step that stopped the run before and stops it in the same way again has its cause in data, config or program; one that goes well
    now, from the same bits as before, was a fault of the machine. Either is said, and no more: whoever starts the run decides.
    """

    def __init__(self, folder: Path, log: Log, check: Callable[[], None] = lambda: None):
        """check: raises CheckpointError where the folder is no longer this run's."""
        self.path, self.log, self.check = folder / NAME, log, check
        self.step = 0  # that began last
        self._before = _read(self.path) if log.rank == 0 else []

    def began(self, step: int) -> None:
        """A step begins. The one before it is still being computed; what came before that is known to be good."""
        self.step = step
        if self._before and step > self._before[-1]["step"] + 1:
            self._passed()

    def _passed(self) -> None:
        last, self._before = self._before[-1], []
        self._write({"step": last["step"], "passed": True})
        self.log.info(f"step {last['step']}, where the run was stopped before, went well this time: what stopped it did not repeat ({last['error']})")

    def __enter__(self) -> Failures:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None and self._before and self.step >= self._before[-1]["step"]:
            self._passed()
        if isinstance(error, Exception) and not isinstance(error, Preempted) and self.step and self.log.rank == 0:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        step = error.step if isinstance(error, NumericalStop) and error.step is not None else self.step
        row = {"step": step, "kind": type(error).__name__, "error": describe(error).splitlines()[0], "time": time.strftime("%Y-%m-%d %H:%M:%S")}
        same = 1
        for before in reversed(self._before):
            if (before["step"], before["kind"]) != (row["step"], row["kind"]):
                break
            same += 1
        self._write(row)
        if same > 1:
            self.log.error(f"the run was stopped {same} times in a row at step {step} by the same kind of error: it repeats, and starting once more "
                           "will not help. Look at the data of that step, the config and the program rather than at the machine")  # fmt: skip

    def _write(self, row: dict[str, Any]) -> None:
        with suppress(OSError, CheckpointError):  # the folder may be what is wrong
            self.check()
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def _read(path: Path) -> list[dict[str, Any]]:
    """Failures since a step went well that had failed."""
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        with suppress(ValueError):  # cut short
            row = json.loads(line)
            rows = [] if "passed" in row else [*rows, row]
    return rows

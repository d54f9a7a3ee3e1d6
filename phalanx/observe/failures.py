"""Failures: at which steps a run was stopped before, and by what, in failures.jsonl in its folder, to see whether it
happens again. Restarts nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from traceback import format_exception
from types import TracebackType
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    FolderInUse,
    NumericalStop,
    PhalanxError,
    Preempted,
)
from phalanx.base.log import Log, describe

NAME = "failures.jsonl"
# refused before the first step, so nothing in the run changes
REFUSALS = (
    ConfigError,
    DataError,
    CheckpointError,
    FolderInUse,
)
TAIL = 20_000  # characters of a log among which its last words are


class Failures:
    """An error that leaves the context after a step began becomes a line of the file. Rank 0 reads, writes and reports.

    If a step that stopped the run before stops it again in the same way, the cause is in data, config or program. If it
    now succeeds from the same bits, the machine was at fault. Either is reported, and nothing else: whoever starts the
    run decides.
    """

    def __init__(self, folder: Path, log: Log, check: Callable[[], None] = lambda: None):
        """check: raises CheckpointError if the folder is no longer this run's."""
        self.path, self.log, self.check = folder / NAME, log, check
        self.step = 0  # the step that began last
        self._before = _read(self.path) if log.rank == 0 else []

    def began(self, step: int) -> None:
        """A step begins. The one before it is still being computed; everything earlier is known to be good."""
        self.step = step
        if self._before and step > self._before[-1]["step"] + 1:
            self._passed()

    def _passed(self) -> None:
        last, self._before = self._before[-1], []
        self._write({"step": last["step"], "passed": True})
        self.log.info(
            f"step {last['step']}, where the run was stopped before, went well this time: what stopped it "
            f"did not repeat ({last['error']})"
        )

    def __enter__(self) -> Failures:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._before and self.step >= self._before[-1]["step"]:
            self._passed()
        if isinstance(error, Exception) and not isinstance(error, Preempted) and self.log.rank == 0:
            if self.step or not isinstance(error, REFUSALS):
                self.log.note(
                    describe(error) if isinstance(error, PhalanxError) else "".join(format_exception(error)).rstrip()
                )
            if self.step:
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        step = error.step if isinstance(error, NumericalStop) and error.step is not None else self.step
        row = {
            "step": step,
            "kind": type(error).__name__,
            "error": describe(error).splitlines()[0],
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        same = 1
        for before in reversed(self._before):
            if (before["step"], before["kind"]) != (row["step"], row["kind"]):
                break
            same += 1
        self._write(row)
        if same > 1:
            self.log.error(
                f"the run was stopped {same} times in a row at step {step} by the same kind of error: it "
                "repeats, and starting once more "
                "will not help. Look at the data of that step, the config and the program rather than at the machine"
            )

    def _write(self, row: dict[str, Any]) -> None:
        with suppress(OSError, CheckpointError):  # the folder may be what is wrong
            self.check()
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


@dataclass(frozen=True)
class Taken:
    """A run's folder as it was when this start took it over, with the size of its file of failures."""

    folder: str
    failures: int


def taken(folder: Path) -> Taken:
    path = folder / NAME
    return Taken(str(folder.absolute()), path.stat().st_size if path.is_file() else 0)


def note_end(run: Taken, kind: str, text: str, began: bool) -> None:
    """Record what a launcher knows about the end of a run and its rank 0 may not, since rank 0 may be the one that
    died. Writes to log.txt unless it is there already and, if training had begun, to failures.jsonl unless rank 0 has
    written it. A start that was refused leaves nothing."""
    if not began and kind in {refusal.__name__ for refusal in REFUSALS}:
        return
    folder = Path(run.folder)
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    with suppress(OSError):  # the folder may be what is wrong
        log = folder / "log.txt"
        if text not in log.read_text(encoding="utf-8", errors="replace")[-TAIL:]:
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{now} {text}\n")
        if began and taken(folder).failures == run.failures:
            row = {"step": _last_step(folder) + 1, "kind": kind, "error": text.splitlines()[0], "time": now}
            with (folder / NAME).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def _last_step(folder: Path) -> int:
    """The last step in the metrics; 0 if there is none."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    for line in reversed(lines):
        with suppress(ValueError, KeyError, TypeError):  # cut short
            return int(json.loads(line)["step"])
    return 0


def _read(path: Path) -> list[dict[str, Any]]:
    """Failures since the last time that a failed step succeeded."""
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        with suppress(ValueError):  # cut short
            row = json.loads(line)
            rows = [] if "passed" in row else [*rows, row]
    return rows

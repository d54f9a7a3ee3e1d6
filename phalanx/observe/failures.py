"""Failures: at which step a run stopped before, and with what, in its folder's failures.jsonl: does it stop it
again? Starts nothing anew."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from traceback import format_exception
from types import TracebackType
from typing import Any

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
# before the first step nothing of the run changes by them
REFUSALS = (
    ConfigError,
    DataError,
    CheckpointError,
    FolderInUse,
)
TAIL = 20_000  # characters of a log among which its last words are


class Failures:
    """An error that leaves the context after a step began becomes a line of the file. Rank 0 reads, writes and speaks.

    A step that stopped the run before and stops it in the same way again has its cause in data, config or program;
    one that goes well now, from the same bits as before, was a fault of the machine. Either is said, and no more:
    whoever starts the run decides.
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
    """A run's folder as it was when this start took it, with the size of its file of failures."""

    folder: str
    failures: int


def taken(folder: Path) -> Taken:
    path = folder / NAME
    return Taken(str(folder.absolute()), path.stat().st_size if path.is_file() else 0)


def note_end(run: Taken, kind: str, text: str, began: bool) -> None:
    """What a launcher knows of the end of a run and its rank 0 may not: rank 0 may be who died. Into log.txt, unless
    it is there already, and where training had begun into failures.jsonl, unless rank 0 wrote it. A start that was
    refused leaves nothing."""
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
    """That was written of; 0 if none was."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    for line in reversed(lines):
        with suppress(ValueError, KeyError, TypeError):  # cut short
            return int(json.loads(line)["step"])
    return 0


def _read(path: Path) -> list[dict[str, Any]]:
    """Failures since a step went well that had failed."""
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        with suppress(ValueError):  # cut short
            row = json.loads(line)
            rows = [] if "passed" in row else [*rows, row]
    return rows

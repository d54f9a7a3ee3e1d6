"""A progress bar below the step lines, on a terminal only; anywhere else it is nothing."""

from __future__ import annotations

import sys

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class ProgressBar:
    """Rank 0's bar over the run's steps. Lines printed meanwhile appear above it."""

    def __init__(self, total_steps: int, done: int, wanted: bool = True):
        self._progress: Progress | None = None
        if wanted and sys.stdout.isatty():
            loss = TextColumn("{task.fields[loss]}")
            columns = (TextColumn("train"), BarColumn(), MofNCompleteColumn(), loss, TimeElapsedColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, transient=True)
            self._task = self._progress.add_task("train", total=total_steps, completed=done, loss="")
            self._progress.start()

    def show(self, step: int, loss: float) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=step, loss=f"loss {loss:.3f}")

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

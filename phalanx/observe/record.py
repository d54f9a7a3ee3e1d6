"""What a run records of its own steps: those of train.profile as traces in its folder, and one early step for the time
budget."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from phalanx.config.run import BUDGET_AT, profiled_steps

if TYPE_CHECKING:  # config checks read this module's rules, and need nothing of a run
    from phalanx.base.log import Log
    from phalanx.config.run import Run
    from phalanx.engine.build import State
    from phalanx.observe.profile import Recording

BUDGET_FROM_STEPS = 100  # shorter runs are not slowed down by a recording that nobody requested


def wants_budget(run: Run, device: str) -> bool:
    if run.log.budget is None:
        return device == "cuda" and run.train.last_step >= BUDGET_FROM_STEPS
    return run.log.budget


class Recorder:
    """One rank's recordings. `first`: the first step that this process runs."""

    def __init__(self, state: State, first: int, log: Log):
        self.state, self.log = state, log
        run, mesh = state.plan.run, state.mesh
        mine = mesh.rank == 0 or (run.train.profile or "").endswith(":all")
        steps = profiled_steps(run.train.profile) if mine else None
        self.traced = range(max(first, steps.start), steps.stop) if steps else range(0)
        budget = first + BUDGET_AT - 2
        wanted = mesh.rank == 0 and wants_budget(run, mesh.device.type) and not set(self.traced) & {budget, budget + 1}
        self.budget = range(budget, budget + 2) if wanted else range(0)
        self._recording: Recording | None = None
        self._scratch = ExitStack()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A recording still in progress at the end of the run was meant to be longer; it is written only if it is one
        of train.profile."""
        if self._recording is not None:
            if kind is None and self._recording.path.suffix == ".gz":
                self._stop(None)
            else:
                self._recording.abandon()
        self._scratch.close()

    @contextmanager
    def around(self, step: int, last_s: float | None) -> Iterator[None]:
        """Around a step; `last_s`: seconds of the last one that was finished."""
        if step not in self.traced and step not in self.budget:
            yield
            return
        if self._recording is None:
            self._start(step)
        try:
            if step in self.traced or step == self.budget[-1]:
                with self._recording.step(step):  # type: ignore[union-attr]
                    yield
            else:
                yield
        except BaseException:
            self._recording.abandon()  # type: ignore[union-attr]
            self._recording = None
            raise
        if step == (self.traced if step in self.traced else self.budget)[-1]:
            self._stop(last_s)

    def _start(self, step: int) -> None:
        from phalanx.observe.profile import Recording

        if step in self.traced:
            name = f"steps-{self.traced[0]}-{self.traced[-1]}-rank-{self.state.mesh.rank}.json.gz"
            path = Path(self.state.plan.run.dir) / "traces" / name
        else:
            path = Path(self._scratch.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-"))) / "budget.json"
        self._recording = Recording(self.state, path)
        self._recording.start()

    def _stop(self, last_s: float | None) -> None:
        """Write the recording, and report what it shows, on rank 0."""
        from phalanx.observe.step_budget import advice, read_budget

        recording, self._recording = self._recording, None
        recording.stop()  # type: ignore[union-attr]
        path = recording.path  # type: ignore[union-attr]
        if path.suffix == ".gz":
            self.log.info(f"trace {path} (open it in https://ui.perfetto.dev)")
        if self.log.rank == 0:
            budget = read_budget(path, last_s)
            self.log.info("\n".join([*budget.lines(), advice(budget, self.state.plan.run)]))

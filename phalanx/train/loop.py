"""The training loop: data in, steps, and what happens every so often: log, evaluate, save, stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phalanx.base.batch import Batch
from phalanx.base.errors import NumericalStop, Preempted
from phalanx.data.loader import Loader, Prefetcher
from phalanx.optim.schedules import learning_rate
from phalanx.train.build import State
from phalanx.train.evaluate import evaluate
from phalanx.train.metrics import Counters, Pending, Reporter
from phalanx.train.order import global_batch_at, micro_batches
from phalanx.train.record import Recorder
from phalanx.train.saves import Saves
from phalanx.train.step import train_step


@dataclass
class Loop:
    """One rank's training from where `counters` stand to the end of the run.

    saves   saves checkpoints of finished steps
    asked   whether this process was asked to stop (SIGTERM); all ranks then stop after the same step
    """

    state: State
    loader: Loader
    valid: dict[str, Loader]
    reporter: Reporter
    counters: Counters
    saves: Saves
    asked: Callable[[], bool]

    def run(self) -> None:
        run, mesh = self.state.plan.run, self.state.mesh
        self.state.train()
        samples = micro_batches(run, self.counters.consumed_samples, self.counters.step, mesh.dp.size, mesh.dp.index)
        pending: tuple[Pending, int] | None = None
        self.reporter.restart_clock()
        consumed, saved = self.counters.consumed_samples, self.counters.step
        recorder = Recorder(self.state, self.counters.step + 1, self.reporter.log)
        with recorder, Prefetcher(self.loader, samples, depth=8, pin_memory=mesh.device.type == "cuda") as batches:
            for step in range(self.counters.step + 1, run.train.steps + 1):
                size = global_batch_at(run, consumed)
                micro = size // (run.train.micro_batch * mesh.dp.size)
                lr = learning_rate(run.optim, step, run.train.steps)
                with recorder.around(step, self.reporter.last_s):
                    result = train_step(self.state, [self._next(batches) for _ in range(micro)], lr, self.asked())
                consumed += size
                stop = self._finish(pending)
                self.saves.check()
                pending = (Pending(step, lr, result), size)
                if stop or self._due(step):
                    stop = self._finish(pending) or stop
                    pending = None
                    self._periodic(step, stop, saved)
                    saved = step if stop or self._save_due(step) else saved
        self._finish(pending)
        if saved != self.counters.step:
            self.saves.save(last=True)
        self.saves.check(wait=True, last=True)

    def _next(self, batches: Prefetcher) -> Batch:
        return next(batches).to(self.state.mesh.device)

    def _finish(self, pending: tuple[Pending, int] | None) -> bool:
        """Read a step's results; whether to stop. Too many bad steps in a row end the run."""
        if pending is None:
            return False
        stop = self.reporter.finished(*pending)
        limit = self.state.plan.run.train.max_skipped
        if self.counters.skipped_in_a_row >= limit:
            self.saves.check(wait=True)  # what is being saved is good
            what = f"the gradient norm of {limit} steps in a row was not finite (train.max_skipped={limit})"
            raise NumericalStop(f"stopped at step {self.counters.step}: {what}")
        return stop

    def _due(self, step: int) -> bool:
        return self._save_due(step) or self._eval_due(step)

    def _save_due(self, step: int) -> bool:
        interval = self.state.plan.run.checkpoint.interval
        return interval is not None and step % interval == 0

    def _eval_due(self, step: int) -> bool:
        train = self.state.plan.run.train
        return bool(self.valid) and train.eval_interval is not None and (step % train.eval_interval == 0 or step == train.steps)

    def _periodic(self, step: int, stop: bool, saved: int) -> None:
        if self._eval_due(step):
            losses = evaluate(self.state, self.valid)
            self.reporter.log.info(" ".join([f"valid step={step}", *(f"{name}={loss:.4f}" for name, loss in losses.items())]))
            if self.reporter.trackers is not None:
                self.reporter.trackers.write({"step": step, **{f"valid/{name}": loss for name, loss in losses.items()}})
        if stop or self._save_due(step):
            self.saves.save(last=stop)
        if stop:
            raise Preempted(f"asked to stop: saved step {step}; start the same command again to continue")
        self.reporter.restart_clock()

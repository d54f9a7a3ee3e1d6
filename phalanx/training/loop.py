"""The training loop: data in, steps, and what happens at intervals: log, evaluate, save, stop."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import field
from math import isfinite
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import NumericalStop, Preempted, shortened
from phalanx.data.loader import Loader, Prefetcher
from phalanx.engine.build import State
from phalanx.engine.evaluate import evaluate
from phalanx.engine.fp8_state import shadow_text, unsafe
from phalanx.engine.guard import NOT_FINITE, REASONS
from phalanx.engine.overflow import overflow_of
from phalanx.engine.replicas import check_replicas
from phalanx.engine.step import StepResult, accumulate, end_step, train_step, update
from phalanx.observe.metrics import Counters, Pending, Reporter
from phalanx.observe.record import Recorder
from phalanx.observe.run_records import FP8_FELL_BACK, SAMPLES, task_score, valid_loss
from phalanx.optim.schedules import learning_rate
from phalanx.planning.order import global_batch_at, micro_batches
from phalanx.sequence.batch import Batch
from phalanx.training.callbacks import Callback
from phalanx.training.saves import Saves

if TYPE_CHECKING:
    from phalanx.training.samples import TrainingSamples

LOOKED_EVERY = 10  # on a GPU, steps between two whose waits for other ranks are timed


class BadStep(Exception):
    """A step that the guard refused, after which the run is to roll back."""

    def __init__(self, step: int, text: str):
        self.step, self.text = step, text
        super().__init__(text)


class ScoresTasks(Protocol):
    """Scores the model that trains on tasks. Collective: scores on rank 0, elsewhere nothing."""

    def score(self) -> dict[tuple[str, str], float]:
        """(task, metric) -> score."""


@dataclass
class Loop:
    """One rank's training from where `counters` are to the end of the run.

    saves   saves checkpoints of finished steps
    asked   whether this process was asked to stop (SIGTERM); all ranks then stop after the same step
    go_back loads an earlier checkpoint (before a given step, the n-th newest) and returns its counters
    began   called with the number of each step that begins
    samples the prompts of train.samples, if there are any
    tasks   scores train.eval_tasks, if there are any
    step    the step whose micro-batches `steps` yielded last
    """

    state: State
    loader: Loader
    valid: dict[str, Loader]
    reporter: Reporter
    counters: Counters
    saves: Saves
    asked: Callable[[], bool]
    go_back: Callable[[int, int], dict[str, Any]]
    began: Callable[[int], None] = lambda step: None
    callbacks: Sequence[Callback] = ()
    samples: TrainingSamples | None = None
    tasks: ScoresTasks | None = None
    step: int = 0
    _recorder: Recorder = field(init=False, repr=False)
    _size: int = 0
    _made: Pending | None = None
    _over: bool = True
    _stop: bool = False
    _pending: tuple[Pending, int] | None = None
    _tokens: Tensor | None = None
    _bad: BadStep | None = None
    _saved: int | None = None
    _given: dict[int, list[Batch]] = field(default_factory=dict, repr=False)

    def run(self) -> None:
        """Raises NumericalStop, Preempted or CheckpointError; a save in progress is then still completed."""
        for batches in self.steps():
            self.train_step(batches)
        self.finish()

    def steps(self, periodic: bool = True) -> Generator[list[Batch], None, None]:
        """Yields this rank's micro-batches of each remaining step, on the device. The caller makes the step with
        `train_step`, or with `accumulate` and `apply`.

        After a rollback, steps continue from the checkpoint that was loaded. A stop request saves, and raises
        Preempted. `periodic`: evaluate and save as often as the config says.
        """
        bad_step = tries = 0
        try:
            while True:
                try:
                    return (yield from self._until_done(periodic))
                except BadStep as bad:
                    tries = tries + 1 if bad.step <= bad_step else 1
                    bad_step = max(bad.step, bad_step)
                    self._roll_back(bad, tries)
        except NumericalStop:
            self.saves.check(wait=True)
            raise

    def finish(self) -> None:
        """Save the last finished step unless it is saved, and wait for it."""
        self.flush()
        if self._saved not in (None, self.counters.step):
            self.saves.save(last=True)
        self.saves.check(wait=True, last=True)

    def _roll_back(self, bad: BadStep, tries: int) -> None:
        """Load weights, state and step of an earlier checkpoint, and continue with the data after the bad step."""
        if tries > self.state.plan.run.train.guard.max_rollbacks:
            raise NumericalStop(
                f"{bad.text}, after {tries - 1} rollbacks (train.guard.max_rollbacks)", bad.step
            ) from bad
        self.saves.check(wait=True)
        self._made = self._pending = self._bad = self._saved = None
        self._over = True
        c, scalars = self.counters, self.go_back(bad.step, tries)
        c.step, c.tokens, c.skipped, c.skipped_in_a_row = (
            scalars[n] for n in ("step", "tokens", "skipped", "skipped_in_a_row")
        )
        c.rollbacks += 1
        self.saves.parent = c.step
        if self.reporter.sinks is not None:
            self.reporter.sinks.rewind(c.step)

    def _until_done(self, periodic: bool) -> Iterator[list[Batch]]:
        run, mesh = self.state.plan.run, self.state.mesh
        self.state.model.train()
        if self._made is not None:  # by an earlier user of this generator, who took no more batches
            self._step_is_over()
        self._read()
        self._saved = self.counters.step if self._saved is None else self._saved
        consumed = self.counters.consumed_samples
        samples = micro_batches(run, self.loader, consumed, self.counters.step, mesh.dp.size, mesh.dp.index)
        self.reporter.restart_clock()
        recorder = Recorder(self.state, self.counters.step + 1, self.reporter.log)
        with (
            recorder,
            Prefetcher(self.loader, samples, depth=8, pin_memory=mesh.device.type == "cuda", part=mesh.part) as batches,
        ):
            for step in range(self.counters.step + 1, run.train.last_step + 1):
                self.began(step)
                self._switch_fp8(step)
                self.step, self._size = step, global_batch_at(run, consumed)
                self._recorder, self._made, self._over, self._stop = recorder, None, False, False
                micro = self._size // (run.train.micro_batch * mesh.dp.size)
                mesh.watch.waits.on = mesh.device.type == "cpu" or step % LOOKED_EVERY == 0
                given = [self._next(batches) for _ in range(micro)]
                if run.model.scans:  # results are read a step late; a state that overflows is then looked for
                    self._given = {n: each for n, each in self._given.items() if n == step - 1} | {step: given}
                yield given
                consumed += self._size
                self._step_is_over()
                due = self._save_due(step) or self._eval_due(step) or self._samples_due(step) or self._tasks_due(step)
                if self._stop or (periodic and due):
                    self._read()
                    self._periodic(step, periodic)
            self._read()

    def train_step(self, batches: Sequence[Batch], lr: float | None = None) -> StepResult:
        """Forward, backward and update. lr: instead of the schedule's."""
        lr = self._lr(lr)
        with self._recorder.around(self.step, self.reporter.last_s):
            result = train_step(self.state, batches, lr, self.asked(), self._shadow_due(self.step))
        self._made = Pending(self.step, lr, result, self.state.mesh.watch.waits.take())
        return result

    def accumulate(self, batches: Sequence[Batch]) -> Tensor:
        """Forward and backward: gradients of the mean loss, times the loss scale, summed over ranks. Returns the number
        of tokens with a loss."""
        self._tokens = accumulate(self.state, batches)
        return self._tokens

    def apply(self, lr: float | None = None) -> StepResult:
        """Clip and update, after `accumulate`."""
        if self._tokens is None:
            raise RuntimeError(f"step {self.step}: apply() comes after accumulate()")
        lr = self._lr(lr)
        result = update(self.state, self._tokens, lr, self.asked())
        self._made, self._tokens = Pending(self.step, lr, result, self.state.mesh.watch.waits.take()), None
        return result

    def _updated_by_others(self, tokens: Tensor) -> None:
        """Gradients were accumulated but not applied here, so the caller's own optimizer has changed the weights."""
        if self.state.plan.run.layout.sharding or self.state.buffers.separate_masters:
            raise RuntimeError(
                f"step {self.step}: accumulate() without apply() is for an optimizer of your own, which needs "
                "layout.sharding=0 and train.precision=fp32: here weights are made of other numbers"
            )
        if self.state.qk_clip is not None:
            raise RuntimeError(
                f"step {self.step}: accumulate() without apply() is for an optimizer of your own, and optim.qk_clip is "
                "part of apply(): set it to 0"
            )
        zero = self.state.buffers.zero_grads  # as our optimizer does in its pass
        result = end_step(self.state, tokens, self.asked(), lambda skip, factor: zero())
        self._made, self._tokens = Pending(self.step, self._lr(None), result, self.state.mesh.watch.waits.take()), None

    def _lr(self, lr: float | None) -> float:
        run = self.state.plan.run
        return learning_rate(run.optim, self.step, run.train.last_step) if lr is None else lr

    def _step_is_over(self) -> None:
        """Read the results of the previous step, which are complete by now."""
        if self._over:
            return
        if self._made is None and self._tokens is not None:
            self._updated_by_others(self._tokens)
        if self._made is None:
            raise RuntimeError(
                f"step {self.step}: its batches were taken, but neither train_step() nor accumulate() called"
            )
        self._read()
        self._pending, self._over = (self._made, self._size), True
        self.saves.check()
        if self._replicas_due(self.step):
            check_replicas(self.state)

    def flush(self) -> None:
        """Wait for the last step, so that counters and checkpoints include it. A bad one is reported by the next
        `steps`."""
        try:
            if self._made is not None:
                self._step_is_over()
            self._read()
        except BadStep as bad:
            self._bad = bad

    def save(self) -> None:
        """Save the last step; does nothing if the run is about to roll back."""
        self.flush()
        if self._bad is None and self.saves.save():
            self._saved = self.counters.step

    def _next(self, batches: Prefetcher) -> Batch:
        return next(batches).to(self.state.mesh.device)

    def _read(self) -> None:
        """Read the results of the step in progress, unless they were read. Too many bad steps in a row end the run."""
        if self._bad is not None:
            raise self._bad
        if self._pending is None:
            return
        pending, size = self._pending
        self._pending = None
        self._stop |= self.reporter.finished(pending, size)
        self._judge(pending)
        self._watch_fp8(pending)
        limit = self.state.plan.run.train.max_skipped
        if self.counters.skipped_in_a_row >= limit:
            what = (
                f"{limit} steps in a row had a loss or a gradient norm that could not be applied "
                f"(train.max_skipped={limit})"
            )
            raise NumericalStop(f"stopped at step {self.counters.step}: {what}", self.counters.step)

    def _judge(self, pending: Pending) -> None:
        """Apply train.guard.policy to a step that was not applied. Overflows of an adaptive loss scale do not count."""
        loss, norm, why, _, _ = pending.read()
        if not why or (self.state.scaler.dynamic and why == NOT_FINITE and isfinite(loss)):
            return
        text = f"step {pending.step} is bad: {REASONS[why]} (loss={loss:.6g} grad_norm={norm:.6g})"
        if why == NOT_FINITE and pending.step in self._given:
            overflow = overflow_of(self.state.model, self._given[pending.step])
            text += "" if overflow is None else f"; {overflow}"
        bad = BadStep(pending.step, text)
        policy = self.state.plan.run.train.guard.policy
        if policy == "rollback":
            raise bad
        if policy == "stop":
            raise NumericalStop(f"{bad.text}; it was not applied (train.guard.policy=stop)", bad.step)
        if self.reporter.log.rank == 0:
            self.reporter.log.warn(f"{bad.text}; it was skipped")

    def _shadow_due(self, step: int) -> bool:
        config, fp8 = self.state.plan.run.train.fp8, self.state.model.fp8
        if config is None or config.shadow_interval is None or fp8 is None or fp8.over:
            return False
        return step in (1, self._last_fp8_step) or step % config.shadow_interval == 0

    @property
    def _last_fp8_step(self) -> int:
        train = self.state.plan.run.train
        return train.last_step - (train.fp8.last_steps if train.fp8 is not None else 0)

    def _switch_fp8(self, step: int) -> None:
        """Switch to train.precision for the last steps, if the config says so."""
        fp8 = self.state.model.fp8
        if fp8 is None or fp8.config is None or not fp8.turn(step > self._last_fp8_step):
            return
        self.state.model.stages.runner.forget()
        what = self.state.plan.run.train.precision if fp8.over else fp8.config.recipe
        self.reporter.log.info(
            f"from step {step} on all linears are in {what} (train.fp8.last_steps={fp8.config.last_steps})"
        )

    def _watch_fp8(self, pending: Pending) -> None:
        """Report how far the gradients differ from those of a shadow step. Linears that lost too much fall back to
        train.precision. All ranks know the same numbers, so they decide alike."""
        fp8, tally, gradient_distance = self.state.model.fp8, pending.fp8(), pending.gradient_distance()
        if fp8 is None or fp8.config is None or tally is None:
            return
        log, precision = self.reporter.log, self.state.plan.run.train.precision
        if gradient_distance is not None:
            for line in shadow_text(fp8.names, gradient_distance):
                log.info(f"step={pending.step} {line}")
        bad = {
            name: why
            for name, why in unsafe(fp8.names, fp8.config, tally, gradient_distance).items()
            if fp8.is_on(name)
        }
        if not bad:
            return
        fp8.fall_back(bad)
        self.state.model.stages.runner.forget()
        for name, why in bad.items():
            if log.rank == 0:
                log.warn(f"step {pending.step}: {name} goes on in {precision}: {why}")
        self.reporter.record(pending.step, {FP8_FELL_BACK: bad})

    def _replicas_due(self, step: int) -> bool:
        interval = self.state.plan.run.train.guard.replicas_interval
        return interval is not None and step % interval == 0

    def _save_due(self, step: int) -> bool:
        interval = self.state.plan.run.checkpoint.interval
        return interval is not None and step % interval == 0

    def _eval_due(self, step: int) -> bool:
        train = self.state.plan.run.train
        return (
            bool(self.valid)
            and train.eval_interval is not None
            and (step % train.eval_interval == 0 or step == train.last_step)
        )

    def _tasks_due(self, step: int) -> bool:
        train = self.state.plan.run.train
        interval = train.eval_interval if train.eval_tasks else None
        return interval is not None and (step % interval == 0 or step == train.last_step)

    def _samples_due(self, step: int) -> bool:
        train = self.state.plan.run.train
        return train.samples_interval is not None and (step % train.samples_interval == 0 or step == train.last_step)

    def _periodic(self, step: int, periodic: bool) -> None:
        if periodic and self._eval_due(step):
            self.evaluate()
        if periodic and self._tasks_due(step):
            self.score_tasks()
        if periodic and self._samples_due(step):
            self.make_samples()
        if self._stop or (periodic and self._save_due(step)):
            last = self._stop or step == self.state.plan.run.train.last_step
            if self._saved == step:  # the caller saved it, perhaps in the background
                self.saves.check(wait=last, last=last)
            elif self.saves.save(last):
                self._saved = step
        if self._stop:
            raise Preempted(f"asked to stop: saved step {step}; start the same command again to continue")
        self.reporter.restart_clock()

    def make_samples(self, say: bool = True) -> dict[str, str]:
        """Number of a prompt of train.samples -> the prompt with its continuation by the weights as they are; on rank
        0, elsewhere nothing. Written to metrics, and logged if `say`."""
        self.flush()
        step, found = self.counters.step, {} if self.samples is None else self.samples.make()
        for number, text in found.items():
            if say:
                self.reporter.log.info(f"sample step={step} prompt={number} text={shortened(repr(text))}")
        if found:
            self.reporter.record(step, {SAMPLES: found})
        self.reporter.restart_clock()
        return found

    def score_tasks(self, say: bool = True) -> dict[tuple[str, str], float]:
        """(task, metric) -> score of the weights as they are on train.eval_tasks; on rank 0, elsewhere nothing. Written
        to metrics, and logged if `say`."""
        self.flush()
        step, found = self.counters.step, {} if self.tasks is None else self.tasks.score()
        if found:
            if say:
                text = " ".join(f"{task}/{metric}={value:.4f}" for (task, metric), value in found.items())
                self.reporter.log.info(f"tasks step={step} {text}")
            self.reporter.record(step, {task_score(*name): value for name, value in found.items()})
        self.reporter.restart_clock()
        return found

    def evaluate(self, say: bool = True) -> dict[str, float]:
        """Set name -> mean loss per token over the validation sets; written to metrics, and logged if `say`."""
        self.flush()
        step, losses = self.counters.step, evaluate(self.state.model, self.valid)
        if losses:
            if say:
                text = " ".join(f"{name}={loss:.4f}" for name, loss in losses.items())
                self.reporter.log.info(f"valid step={step} {text}")
            self.reporter.record(step, {valid_loss(name): loss for name, loss in losses.items()})
            for callback in self.callbacks:
                callback.on_evaluation(step, losses)
        self.reporter.restart_clock()
        return losses

"""Session: a training run with the caller's own loop. Data, checkpoints, evaluation, logs and stop requests are those
of `train`."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from phalanx.base.placement import Placement
from phalanx.base.records import Record
from phalanx.config.run import Run
from phalanx.engine.build import State
from phalanx.engine.step import StepResult
from phalanx.observe.sinks import STEP_LINE
from phalanx.optim.schedules import learning_rate
from phalanx.sequence.batch import Batch
from phalanx.training.callbacks import Callback
from phalanx.training.loop import Loop
from phalanx.training.machine import check_here, fit_here
from phalanx.training.main import opened


class Session:
    """One rank of a run, at the step where it begins or continues. Every rank makes the same calls in the same
    order."""

    def __init__(self, loop: Loop):
        self._loop = loop
        self._steps: Generator[list[Batch], None, None] | None = None
        if self.run.log.interval is None and loop.reporter.sinks is not None:
            loop.reporter.sinks.drop(STEP_LINE)  # the caller's `log` says what a person is to read

    @property
    def run(self) -> Run:
        """The config."""
        return self.state.plan.run

    @property
    def state(self) -> State:
        """Blocks, flat buffers, optimizer, mesh and plan of this rank."""
        return self._loop.state

    @property
    def model(self) -> nn.ModuleList:
        """This rank's blocks, in the order of the model. Parameters are autograd leaves; in `accumulate` their `grad`
        is a view into a flat buffer."""
        return self.state.model.modules

    @property
    def step(self) -> int:
        """The step whose batches were taken last; before that, the one after which the run begins or continues."""
        return self._loop.step or self._loop.counters.step

    @property
    def lr(self) -> float:
        """The schedule's learning rate of this step."""
        return learning_rate(self.run.optim, self.step, self.run.train.last_step)

    def batches(self) -> Iterator[list[Batch]]:
        """Yields this rank's micro-batches of each remaining step, on the device, until train.steps.

        Each must be followed by train_step(), or by accumulate() and an update. After a rollback of the guard they
        continue from the checkpoint that was loaded. If the process was asked to stop, raises Preempted once a step is
        saved. When called again, they continue after the last step that was made.
        """
        self.end_batches()
        self._steps = self._loop.steps(periodic=False)
        return self._steps

    def train_step(self, batches: Sequence[Batch], lr: float | None = None) -> StepResult:
        """Forward, backward, update. lr: instead of the schedule's. The result is on the device: reading a number
        waits for it."""
        return self._loop.train_step(batches, lr)

    def accumulate(self, batches: Sequence[Batch]) -> Tensor:
        """Forward and backward of all micro-batches, for an update of your own: gradients of the mean loss, times the
        loss scale, reduced over ranks, in `p.grad`. Returns the number of tokens with a loss, () float64.

        With layout.sharding=0 and train.precision=fp32, any torch optimizer over `model.parameters()` may replace
        `apply`; saving its state is then up to the caller.
        """
        return self._loop.accumulate(batches)

    def apply(self, lr: float | None = None) -> StepResult:
        """Clip and update with the run's optimizer, after `accumulate`."""
        return self._loop.apply(lr)

    def evaluate(self) -> dict[str, float]:
        """Validation set -> mean loss per token, over data.valid's sets; empty without any. Also in metrics.jsonl."""
        return self._loop.evaluate(say=False)

    def make_samples(self) -> dict[str, str]:
        """Number of a prompt of train.samples -> the prompt and how the model continues it now; on rank 0, elsewhere
        empty, as without train.samples. Also in metrics.jsonl."""
        return self._loop.make_samples(say=False)

    def score_tasks(self) -> dict[tuple[str, str], float]:
        """(task, metric) -> score on train.eval_tasks; on rank 0, elsewhere empty, as without tasks. Also in
        metrics.jsonl."""
        return self._loop.score_tasks(say=False)

    def save(self) -> None:
        """Save a checkpoint of the last step, in the background where the config allows it."""
        self._loop.save()

    def log(self, result: StepResult | Mapping[str, Any] | None = None, **more: Any) -> None:
        """Print a line on rank 0: a step's loss and norm or the numbers of a mapping, and whatever else is given.
        `more` also goes to metrics.jsonl and the other sinks; every step's own numbers are there in any case."""
        fields: dict[str, Any] = {"step": self.step}
        if isinstance(result, StepResult):
            fields |= {"loss": result.loss.item(), "grad_norm": result.grad_norm.item()}
        elif result is not None:
            fields |= result
        reporter = self._loop.reporter
        reporter.log.info(" ".join(f"{key}={_word(value)}" for key, value in {**fields, **more}.items()))
        if more:
            reporter.record(self.step, {Record(name): value for name, value in more.items()})

    def close(self) -> None:
        """Save what is unsaved. Called at the end of `session` if nothing was raised."""
        if self._steps is not None:
            self.end_batches()
            self._loop.finish()

    def end_batches(self) -> None:
        """End what prepares batches: after an exception the interpreter would do so too late to be able to."""
        if self._steps is not None:
            self._steps.close()


def _word(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def session(run: Run, placement: Placement, command: str = "", callbacks: Sequence[Callback] = ()) -> Iterator[Session]:
    """Set up process groups, then load the newest checkpoint or initialise the weights; the same checks as `train`.

    A clean end saves what is unsaved; an exception saves nothing.
    """
    check_here(run, placement)
    fit = fit_here(run, placement.world_size, placement)
    with opened(run, fit.placement or placement, command, fit.warning, callbacks) as loop:
        s = Session(loop)
        try:
            yield s
            s.close()
        finally:
            s.end_batches()

"""How the global batch grows and which samples each step takes, as pure functions of the number of consumed samples."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.config.run import Run
from phalanx.data.loader import Loader, Work, micro_batch_samples


def global_batch_at(run: Run, consumed: int) -> int:
    """Sequences in the step that starts after `consumed` samples: grows in equal increments during the ramp, then stays
    at global_batch."""
    train, ramp = run.train, run.train.rampup
    if ramp is None or consumed >= ramp.samples:
        return train.global_batch
    increments = (train.global_batch - ramp.start) // ramp.increment
    return min(train.global_batch, ramp.start + ramp.increment * (consumed * (increments + 1) // ramp.samples))


def total_samples(run: Run, consumed: int = 0, step: int = 0, stop: int | None = None) -> int:
    """Samples consumed by the end of step `stop` (default: the last step) in a run that has finished `step` steps and
    consumed `consumed` samples."""
    ramp, stop = run.train.rampup, run.train.last_step if stop is None else stop
    while ramp is not None and step < stop and consumed < ramp.samples:
        consumed += global_batch_at(run, consumed)
        step += 1
    return consumed + (stop - step) * run.train.global_batch


def eval_samples(run: Run, loader: Loader) -> int:
    """Samples in one evaluation of a validation set. A set with fewer than train.eval_samples is read once."""
    return min(run.train.eval_samples, loader.num_samples or run.train.eval_samples)


def work_of(run: Run, loader: Loader) -> Work | None:
    """What the micro-batches of a step are balanced by over data-parallel ranks; None: they keep the order of their
    samples."""
    return loader.pairs if run.layout.cp_degree == "dynamic" else None


def micro_batches(run: Run, loader: Loader, consumed: int, step: int, dp: int, dp_rank: int) -> Iterator[list[int]]:
    """Sample numbers of every micro-batch of this data-parallel rank, from `step` to the end of the run."""
    for _ in range(step, run.train.last_step):
        batch = global_batch_at(run, consumed)
        yield from micro_batch_samples(consumed, batch, run.train.micro_batch, dp, dp_rank, work_of(run, loader))
        consumed += batch

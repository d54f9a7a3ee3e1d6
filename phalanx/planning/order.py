"""How the global batch grows and which samples each step takes, as pure functions of the number of consumed samples."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.config.run import Run
from phalanx.data.loader import Loader, Work, micro_batch_samples

MOST_RANKS = 64
"""The most ranks that compute each other's images unless a config asks for more. Each is connected to all others and
reads the lengths of all their texts; images are already even over so many ranks."""


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
    """Sample numbers of every micro-batch of this data-parallel rank, from `step` to the end of the run, as
    `step_samples` has them."""
    for _ in range(step, run.train.last_step):
        yield from step_samples(run, loader, consumed, dp, dp_rank)
        consumed += global_batch_at(run, consumed)


def step_samples(run: Run, loader: Loader, consumed: int, dp: int, dp_rank: int) -> list[list[int]]:
    """Sample numbers of each micro-batch of this data-parallel rank in the step that starts after `consumed` samples;
    with layout.media_group, and those of its neighbours' micro-batches of the same time, in the order of ranks (as
    Loader.read takes them)."""
    size, work = run.train.micro_batch, work_of(run, loader)
    count = global_batch_at(run, consumed)
    each = [micro_batch_samples(consumed, count, size, dp, rank, work) for rank in media_group_of(run, dp, dp_rank)]
    return [[number for some in together for number in some] for together in zip(*each)]


def media_group_of(run: Run, dp: int, dp_rank: int) -> range:
    """The data-parallel ranks that compute each other's images, this one among them."""
    group = media_group(run, dp)
    first = dp_rank // group * group
    return range(first, first + group)


def media_group(run: Run, dp: int) -> int:
    """How many neighbouring data-parallel ranks compute each other's images: layout.media_group."""
    layout, spec = run.layout, run.model.media
    if layout.media_group is not None:
        return layout.media_group
    if spec is None or spec.token is None or run.data.source is not None:  # as in config.units_check
        return 1
    most = max(1, MOST_RANKS // (layout.cp * layout.tp))
    return max(n for n in range(1, dp + 1) if dp % n == 0 and n <= most)

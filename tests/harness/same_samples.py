"""Whether a task's samples are a function of their numbers alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from phalanx.data.loader import Loader, micro_batch_samples
from phalanx.sequence.batch import Batch

GLOBAL, MICRO = 8, 2


def same_at_any_size_and_after_resume(make: Callable[[], Loader]) -> dict[int, list[Any]]:
    """AssertionError unless the second step's samples are equal on 1, 2 and 4 data-parallel ranks, each with a loader
    of its own that begins there, and as one loader finds them that begins with the first step. These samples."""
    from_start, truth = make(), dict[int, list[Any]]()
    for numbers in micro_batch_samples(0, 2 * GLOBAL, MICRO, 1, 0):
        truth |= rows_of(from_start.batch(numbers), numbers)
    wanted = {number: row for number, row in truth.items() if number >= GLOBAL}
    for dp in (1, 2, 4):
        found = dict[int, list[Any]]()
        for rank in range(dp):
            loader = make()
            for numbers in micro_batch_samples(GLOBAL, GLOBAL, MICRO, dp, rank):
                found |= rows_of(loader.batch(numbers), numbers)
        assert found == wanted, f"dp={dp}"
    assert len(set(map(repr, wanted.values()))) > 1
    return wanted


def rows_of(batch: Batch, numbers: list[int]) -> dict[int, list[Any]]:
    """What each sample has in each stream. A stream of images has as many rows as the micro-batch happens to have:
    those of the sample."""
    found = {number: list[Any]() for number in numbers}
    for name in sorted(batch.beside):
        stream = batch.beside[name]
        if stream.units is None:
            continue
        for number in numbers:
            here = (stream.samples == number) & (
                torch.ones_like(stream.samples) if stream.real is None else stream.real
            ).bool()
            found[number] += [name, stream.values[here].tolist(), stream.coordinates[here].tolist()]
    texts = [batch, *(s for _, s in sorted(batch.beside.items()) if s.units is None)]
    for stream in texts:
        for field in ("tokens", "labels", "positions", "real", "prefix", "segments", "pair_labels"):
            rows = getattr(stream, field)
            if rows is not None:
                for number, row in zip(numbers, rows.view(len(numbers), -1).tolist(), strict=True):
                    found[number] += [field, row]
    return found

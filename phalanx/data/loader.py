"""The loader: from global sample numbers to micro-batches. Which sample is what is `sources` and `mixture`; devices are the caller's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType

import numpy as np
import torch

from phalanx.base.batch import IGNORE, Batch
from phalanx.base.errors import DataError
from phalanx.data.config import DataConfig
from phalanx.data.mixture import Blend, parse_split
from phalanx.data.sources import Source, SourceUse, check_epochs, open_part, open_whole, use_of_sources


def micro_batch_samples(consumed: int, global_batch: int, micro_batch: int, dp: int, dp_rank: int) -> list[list[int]]:
    """Sample numbers of each micro-batch of one data-parallel rank, for the step that starts after `consumed` samples.

    The step's samples are consumed .. consumed + global_batch - 1 whatever dp is. They are cut into runs of `micro_batch`, and
    rank r takes the r-th block of consecutive runs: a binary tree over all runs has the ranks' own trees as its lower levels.
    ValueError unless micro_batch * dp divides global_batch.
    """
    if global_batch % (micro_batch * dp):
        raise ValueError(f"global_batch {global_batch} is not a multiple of micro_batch {micro_batch} x dp {dp}")
    runs = range(consumed, consumed + global_batch, micro_batch)
    each = len(runs) // dp
    return [list(range(first, first + micro_batch)) for first in runs[dp_rank * each : (dp_rank + 1) * each]]


class Loader:
    """Micro-batches of a blend of sources; holds no position, so any sample can be asked for at any time, from any thread."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[float], *, seq_length: int, document_attention: bool = False):
        """DataError for weights that make no blend (wrong number of them, negative, all zero, too small)."""
        if len(weights) != len(sources):
            raise DataError(f"data.weights has {len(weights)} entries for {len(sources)} sources: {', '.join(s.name for s in sources)}")
        self.sources, self.seq_length, self.document_attention = list(sources), seq_length, document_attention
        try:
            self.blend = Blend(weights)
        except ValueError as error:
            raise DataError(f"data.weights={list(weights)}: {error}") from None

    def batch(self, samples: Sequence[int]) -> Batch:
        """The micro-batch of these global sample numbers, on the CPU (see `base.batch.Batch`).

        Labels are the next tokens. With document attention positions restart at each document, `documents` counts documents
        through the micro-batch, and the last token of a document has no loss: what comes next is not its continuation.
        """
        count, length = len(samples), self.seq_length
        tokens = np.empty((count, length + 1), np.int64)
        starts = np.zeros((count, length + 1), bool)  # a document starts here; a sequence counts as a start
        starts[:, 0] = True
        for row, (source, number) in enumerate(self.blend.locate(samples)):
            tokens[row], places = self.sources[source].sample(number)
            starts[row, places] = self.document_attention
        labels = np.where(starts[:, 1:], IGNORE, tokens[:, 1:])
        begins = starts[:, :-1]
        steps = np.arange(length)
        positions = steps - np.maximum.accumulate(np.where(begins, steps, 0), axis=1)
        documents = np.cumsum(begins.reshape(-1)) - 1
        return Batch(
            tokens=_flat(tokens[:, :-1]),
            labels=_flat(labels),
            positions=_flat(positions),
            samples=_flat(np.repeat(np.asarray(samples, np.int64), length)),
            num_sequences=count,
            seq_length=length,
            documents=_flat(documents) if self.document_attention else None,
        )

    def use(self, samples: int) -> list[SourceUse]:
        """The table of sources for a run of `samples` samples: tokens available and used, epochs."""
        return use_of_sources(self.sources, self.blend, samples, self.seq_length)


def train_loader(config: DataConfig, *, seq_length: int, seed: int, vocab_size: int, samples: int) -> Loader:
    """The loader of a run of `samples` samples. DataError for files that are missing, damaged or too small for it."""
    sources, weights = open_part(config, 0, seq_length=seq_length, seed=seed, vocab_size=vocab_size)
    loader = Loader(sources, weights, seq_length=seq_length, document_attention=config.document_attention)
    check_epochs(loader.use(samples), config.max_epochs)
    return loader


def valid_loaders(config: DataConfig, *, seq_length: int, seed: int, vocab_size: int) -> dict[str, Loader]:
    """Validation sets by name, each with samples 0, 1, ... in a fixed order: `valid`, the validation part of the training
    corpora, unless that part of data.split is 0; then the sets of data.valid, used whole."""
    parts = {}
    if config.mock or (config.paths and parse_split(config.split)[1] > 0):
        parts["valid"] = open_part(config, 1, seq_length=seq_length, seed=seed, vocab_size=vocab_size)
    for name, prefixes in config.valid.items():
        parts[name] = open_whole(prefixes, seq_length=seq_length, vocab_size=vocab_size)
    attention = config.document_attention
    return {name: Loader(*part, seq_length=seq_length, document_attention=attention) for name, part in parts.items()}


class Prefetcher:
    """Iterates over the batches of some lists of samples, made ahead of time by a thread; a context manager.

    At most `depth` batches wait. An error in the thread is raised here, in its place among the batches. With `pin_memory` the
    batches lie in page-locked memory, which lets `Batch.to(gpu)` run beside the computation.
    """

    def __init__(self, loader: Loader, sample_lists: Iterable[Sequence[int]], depth: int = 4, pin_memory: bool = False):
        self._loader, self._sample_lists, self._depth, self._pin_memory = loader, sample_lists, depth, pin_memory
        self._ready: deque[Batch] = deque()
        self._change = threading.Condition()
        self._finished, self._closed = False, False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="phalanx-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        with self._change:
            self._change.wait_for(lambda: self._ready or self._finished or self._closed)
            if self._closed:
                raise StopIteration
            if self._ready:
                self._change.notify_all()
                return self._ready.popleft()
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        """Stop the thread and wait for it; what was made ahead is dropped."""
        with self._change:
            self._closed = True
            self._ready.clear()
            self._change.notify_all()
        self._thread.join()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            for samples in self._sample_lists:
                batch = self._loader.batch(samples)
                if not self._hand_over(_pinned(batch) if self._pin_memory else batch):
                    return
        except BaseException as caught:  # whatever it is, the training thread must hear of it
            error = caught
        finally:
            with self._change:
                self._finished, self._error = True, error
                self._change.notify_all()

    def _hand_over(self, batch: Batch) -> bool:
        """Queue a batch when there is room; False when nobody wants it any more."""
        with self._change:
            self._change.wait_for(lambda: len(self._ready) < self._depth or self._closed)
            if not self._closed:
                self._ready.append(batch)
                self._change.notify_all()
            return not self._closed


def _flat(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64).reshape(-1))


def _pinned(batch: Batch) -> Batch:
    tensors = {name: value.pin_memory() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    return Batch(**{**vars(batch), **tensors})

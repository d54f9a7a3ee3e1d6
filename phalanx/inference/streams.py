"""What a model reads beside the text in a step of generation: the texts of an encoder, patches of images, and
positions that consist of several numbers.

An encoder reads a sequence's source, and a tower an image, in one step alone: that in which the sequence begins, or
which has the image's tokens. In all other steps these streams are padding, and the blocks that work on them are idle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from phalanx.inference.load import InferenceModel
from phalanx.inference.memory import MemoryLimits
from phalanx.inference.scheduler import LiveSequence, Step
from phalanx.sequence.batch import ENCODER, IGNORE, PADDING_RUN, Batch, room_for_documents
from phalanx.sequence.paged import PagedSpans, SourceSpans
from phalanx.sequence.patches import PATCHES
from phalanx.sequence.shard import SequenceShard

if TYPE_CHECKING:
    from phalanx.inference.recordings import SoundReader


class StepStreams:
    """Of one rank. to_device: copies what the host has made."""

    def __init__(self, model: InferenceModel, limits: MemoryLimits, to_device: Callable[[np.ndarray], Tensor]):
        self._model, self._limits, self._to_device = model, limits, to_device
        mesh, config = model.mesh, model.plan.run.model
        self._tp, self._cp = mesh.grid.tp, mesh.cp
        self._encodes, self._pictures, self._sound = bool(config.reads_beside), model.pictures, model.sound
        self._part = SequenceShard(mesh.cp.index, mesh.cp.size, rank=mesh.at.tp, ranks=mesh.grid.tp)
        self._decodes = mesh.at.pp == 0  # the first block reads patches
        # by row, how much a token's position in time is beyond its place, after the prompt
        self._shifts = np.zeros(limits.most_sequences, np.int64)
        self._prompts: dict[int, np.ndarray] = {}  # by row, positions of a prompt's tokens
        self._idle: dict[str, Batch] = {}

    @property
    def _has_grids(self) -> bool:
        return self._pictures is not None and self._pictures.spec.grid_positions

    def begin(self, row: int, sequence: LiveSequence) -> None:
        """A sequence has a row."""
        if self._pictures is not None and self._has_grids:
            places = self._pictures.positions(sequence.request)
            self._prompts[row] = places
            self._shifts[row] = int(places.max(initial=-1)) + 1 - len(places)

    def added_to(self, batch: Batch, step: Step, tokens: int) -> Batch:
        """The batch of a step, of `tokens` tokens on all ranks of cp together, with what is read beside them."""
        if batch.paged is None or not (self._encodes or self._pictures is not None):
            return batch
        if self._encodes and self._sound is not None:
            beside = {self._sound.spec.stream.name: self._heard(self._sound, step)}
            return replace(batch, beside=beside, paged=replace(batch.paged, source=self._source(step)))
        if self._encodes:
            texts = [step.sequences[i].request.source for i in step.admitted]
            encoder, paged = self._encoder(texts), replace(batch.paged, source=self._source(step))
            return replace(batch, beside={ENCODER: encoder}, paged=paged)
        coordinates = self._to_device(self._positions(step, tokens)) if self._has_grids else None
        own = None if coordinates is None else self._cp.own_rows(coordinates)
        return replace(batch, beside={PATCHES: self._patches(step, tokens)}, coordinates=own)

    def _patches(self, step: Step, tokens: int) -> Batch:
        if self._pictures is None:
            raise TypeError("the model reads no images")
        device = self._model.mesh.device
        if not step.images:
            if PATCHES not in self._idle:
                self._idle[PATCHES] = self._pictures.batch([], None, self._part, self._decodes).to(device)
            return self._idle[PATCHES]
        numbers = np.full(tokens, -1, np.int64)
        numbers[: len(step.tokens)] = step.feature_numbers
        mine = self._cp.own_rows(torch.from_numpy(numbers))
        return self._pictures.batch(step.images, mine, self._part, self._decodes).to(device)

    def _positions(self, step: Step, tokens: int) -> np.ndarray:
        """(tokens, 3)."""
        found = np.zeros((tokens, 3), np.int64)
        rows = np.repeat(step.rows, step.counts)
        found[: len(rows)] = (step.positions + self._shifts[rows])[:, None]
        for row, first, count, start in zip(step.rows, step.firsts, step.counts, step.starts):
            places = self._prompts[int(row)][first : first + count]
            found[start : start + len(places)] = places
        return found

    def _encoder(self, texts: Sequence[Sequence[int]]) -> Batch:
        device = self._model.mesh.device
        if texts:
            return encoder_batch(texts, self._tp).to(device)
        if ENCODER not in self._idle:
            self._idle[ENCODER] = encoder_batch([], self._tp).to(device)
        return self._idle[ENCODER]

    def _heard(self, reader: SoundReader, step: Step) -> Batch:
        """The recordings of sequences that begin."""
        requests = [step.sequences[i].request for i in step.admitted]
        sounds = [request.sound for request in requests if request.sound is not None]
        made, device = partial(reader.batch, multiple=self._tp, decodes=self._decodes), self._model.mesh.device
        if sounds:
            return made(sounds).to(device)
        name = reader.spec.stream.name
        if name not in self._idle:
            self._idle[name] = made([]).to(device)
        return self._idle[name]

    def _source(self, step: Step) -> SourceSpans:
        """Where cross-attention finds what it reads, and where it is written."""
        sources, limits = step.sources, self._limits
        if sources is None:
            raise TypeError("the scheduler has no pages for sources")
        written = [sources.slots(int(step.rows[i])) for i in step.admitted]
        count = sum(map(len, written))
        slots = np.zeros(self._tp * max(1, -(-count // self._tp)), np.int64)
        slots[:count] = np.concatenate([np.empty(0, np.int64), *written])
        rows = np.repeat(step.rows, step.counts)
        lengths, most = sources.lengths[rows], int(sources.lengths[step.rows].max(initial=1))
        spans = PagedSpans(
            starts=self._to_device(np.arange(len(rows) + 1, dtype=np.int32)),
            lengths=self._to_device(lengths.astype(np.int32)),
            table=self._to_device(sources.table[rows, : limits.pages_of(most)]),
            page_size=limits.own_page_size,
            most_queries=1,
            most_keys=most,
        )
        return SourceSpans(spans, self._to_device(slots))


def encoder_batch(texts: Sequence[Sequence[int]], multiple: int) -> Batch:
    """Texts one after another, each a document, and padding up to a multiple. Without any it is padding alone."""
    sizes = [len(text) for text in texts]
    filled = sum(sizes)
    rows = multiple * max(1, -(-filled // multiple))
    padding = [min(PADDING_RUN, rows - first) for first in range(filled, rows, PADDING_RUN)]
    every = [*sizes, *padding]
    documents = np.repeat(np.arange(len(every)), every)
    starts = np.cumsum([0, *every])[:-1]
    ids = np.zeros(rows, np.int64)
    ids[:filled] = [token for text in texts for token in text]
    return Batch(
        tokens=torch.from_numpy(ids),
        labels=torch.full((rows,), IGNORE, dtype=torch.int64),
        positions=torch.from_numpy(np.arange(rows) - starts[documents]),
        samples=torch.zeros(rows, dtype=torch.int64),
        num_sequences=1,
        seq_length=rows,
        documents=torch.from_numpy(documents),
        real=torch.from_numpy((np.arange(rows) < filled).astype(np.int64)),
        most_documents=room_for_documents(len(every), rows),
        longest_document=max(every),
        idle=not texts,
    )

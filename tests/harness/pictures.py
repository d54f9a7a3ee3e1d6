"""Batches with images for tests: patches of random images, and a text with a token for each feature."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from phalanx.config.run import Run
from phalanx.data.media import UnitSize, homes_of, shared_units
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.sequence.patches import PatchForm, PictureSpec, grid_positions
from phalanx.sequence.sample import UnitRoom, Units
from phalanx.sequence.shard import SequenceShard
from phalanx.sequence.units import shared_unit_batch, unit_batch


def pixels_of(number: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(number).normal(size=(3, height, width)).astype(np.float32)


def images_of(sample: int, form: PatchForm, sizes: list[tuple[int, int]], most: int) -> Units:
    """Sample 0, 4, ... has no image, others have one or two, as far as the text has room for them."""
    found, tokens = list[Units](), 0
    for number in range((sample % 4 + 1) // 2):
        size = sizes[(sample + number) % len(sizes)]
        tokens += form.tokens(*size)
        if tokens <= most:
            found.append(form.units(pixels_of(10 * sample + number, *size), f"image {number} of sample {sample}"))
    return Units.together(found, form.stream)


def with_images(batch: Batch, ids: list[int], spec: PictureSpec) -> Batch:
    """The batch with images in some samples: a run of tokens for each."""
    length, token, form = batch.seq_length, spec.token, spec.form
    tokens = batch.tokens.where(batch.tokens != token, token - 1).view(len(ids), length).clone()
    found, coordinates = list[Units](), list[np.ndarray]()
    documents = (torch.zeros_like(batch.tokens) if batch.documents is None else batch.documents).view(len(ids), length)
    for row, sample in enumerate(ids):
        units = images_of(sample, form, sizes_of(spec), length - 4)
        at = 1 + sample % 2
        for first, size in spans(units):
            count = int(((units.features >= first) & (units.features < first + size)).sum())
            tokens[row, at : at + count] = token
            at += count + 1
        found.append(units)
        starts = [0, *(np.flatnonzero(np.diff(documents[row].numpy())) + 1).tolist(), length]
        coordinates.append(grid_positions(tokens[row].numpy(), list(zip(starts, starts[1:])), units, spec))
    flat = tokens.flatten()
    stream = unit_batch(found, ids, UnitRoom(form.stream, 10_000, "data.room.patches"))
    own = torch.from_numpy(np.concatenate(coordinates)) if spec.grid_positions else None
    labels = batch.labels.where(flat != token, IGNORE)
    beside = {**batch.beside, form.stream.name: stream}
    return replace(batch, tokens=flat, labels=labels, beside=beside, coordinates=own)


def shared_among(batch: Batch, ids: list[list[int]], spec: PictureSpec, part: SequenceShard) -> Batch:
    """The batch of one replica with the images that a rank computes. ids: of the samples of all replicas that compute
    each other's images, in order."""
    most = batch.seq_length - 4
    every = [(sample, one) for each in ids for sample in each for one in units_of(sample, spec, most).singly]
    units = [
        [UnitSize(len(one.values), len(one.features)) for one in units_of(sample, spec, most).singly]
        for each in ids
        for sample in each
    ]
    own = [pair for pair, home in zip(every, homes_of(units, part)) if home == part.here]
    stream = shared_unit_batch(shared_units(units, own, spec.stream, part), spec.stream, part)
    return replace(batch, beside={**batch.beside, spec.stream.name: stream})


def units_of(sample: int, spec: PictureSpec, most: int) -> Units:
    return images_of(sample, spec.form, sizes_of(spec), most)


def spans(units: Units) -> list[tuple[int, int]]:
    starts = np.cumsum([0, *units.sizes])[:-1]
    return list(zip(starts.tolist(), units.sizes))


def picture_batch(run: Run, batch: Batch, ids: list[int]) -> Batch:
    assert run.model.media is not None
    return with_images(batch, ids, run.model.media)


def sizes_of(spec: PictureSpec) -> list[tuple[int, int]]:
    """Sizes of images that a small model of the tests reads."""
    n = spec.form.multiple
    return [spec.size] if spec.size else [(2 * n, 3 * n), (n, n), (4 * n, 2 * n), (3 * n, 3 * n)]

"""Batches with images for tests: patches of random images, and a text with a token for each feature."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from phalanx.config.run import Run
from phalanx.models.model_config import ModelConfig
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.sequence.patches import PatchForm
from phalanx.sequence.sample import UnitRoom, Units
from phalanx.sequence.units import unit_batch


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


def with_images(batch: Batch, ids: list[int], form: PatchForm, token: int, sizes: list[tuple[int, int]]) -> Batch:
    """The batch with images in some samples: a run of tokens for each, inside one document."""
    length = batch.seq_length
    tokens = batch.tokens.where(batch.tokens != token, token - 1).view(len(ids), length).clone()
    found = []
    for row, sample in enumerate(ids):
        units = images_of(sample, form, sizes, length - 4)
        counts = [int(((units.features >= a) & (units.features < a + n)).sum()) for a, n in spans(units)]
        at = 1 + sample % 2
        for count in counts:
            tokens[row, at : at + count] = token
            at += count + 1
        found.append(units)
    labels = batch.labels.where(tokens.flatten() != token, IGNORE)
    room = UnitRoom(form.stream, 10_000, "data.room.patches")
    stream = unit_batch(found, ids, room)
    return replace(batch, tokens=tokens.flatten(), labels=labels, beside={**batch.beside, form.stream.name: stream})


def spans(units: Units) -> list[tuple[int, int]]:
    starts = np.cumsum([0, *units.sizes])[:-1]
    return list(zip(starts.tolist(), units.sizes))


def form_of(model: ModelConfig) -> PatchForm:
    return model.patch_form  # type: ignore[attr-defined]


def picture_batch(run: Run, batch: Batch, ids: list[int]) -> Batch:
    model = run.model
    return with_images(batch, ids, form_of(model), model.image_token_id, sizes_of(model))  # type: ignore[attr-defined]


def sizes_of(model: ModelConfig) -> list[tuple[int, int]]:
    """Sizes of images that a small model of the tests reads."""
    vision = model.vision  # type: ignore[attr-defined]
    return [(vision.image_size, vision.image_size)]

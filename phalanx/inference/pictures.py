"""Images in prompts: read once when a request arrives, and decoded where the rows of their patches are computed.

    bytes ──image──▶ PromptImage: size, tokens, digest ──request, to all ranks──▶ scheduler ──step──▶ units of this rank

All ranks know how many rows and tokens an image has. Only the ranks of the first pipeline stage decode it, each the
images whose features it computes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.base.dataclass import dataclass
from phalanx.data.images import ImageSteps, open_image, processor_of
from phalanx.data.pictures import Pictures, steps_for, steps_of
from phalanx.inference.processor_files import check_found, processor_file
from phalanx.inference.request import Prompt, PromptImage, Request, RequestError
from phalanx.models.model_config import ModelConfig
from phalanx.sequence.balance import assign_whole
from phalanx.sequence.batch import Batch, UnitPlaces
from phalanx.sequence.patches import PictureSpec, positions_between
from phalanx.sequence.sample import UnitRoom, Units
from phalanx.sequence.shard import SequenceShard
from phalanx.sequence.units import unit_batch
from phalanx.text.tokenizer_files import read_json

DIGEST = 16  # bytes: two of 2**40 images have one with a probability of 2**-49
PROCESSOR = "processor_config.json"


@dataclass(frozen=True)
class PictureReader:
    """How a model reads images."""

    spec: PictureSpec
    steps: ImageSteps

    @staticmethod
    def of(model: ModelConfig, weights: Path | None = None, processor: str | None = None) -> PictureReader | None:
        """None for a model that reads none. processor: data.processor of the run that trained it; else what is beside
        the weights says how images become numbers, or the family. DataError for what does not fit the model."""
        spec = model.media
        if not isinstance(spec, PictureSpec):
            return None
        found = processor_file(weights, processor)
        if found is None and weights is not None:
            nested = read_json(weights / PROCESSOR).get("image_processor")
            if isinstance(nested, dict):
                where = str(weights / PROCESSOR)
                return PictureReader(spec, steps_of(spec, processor_of(nested, where), where))
        if found is None:
            check_found(weights, processor)
        return PictureReader(spec, steps_for(spec, found))

    @property
    def media(self) -> Pictures:
        """What reads them in training."""
        return Pictures(self.spec, self.steps)

    @property
    def most_tokens(self) -> int:
        """Of the largest image that its steps make."""
        form, steps = self.spec.form, self.steps
        if self.spec.size is not None:
            return form.tokens(*self.spec.size)
        return max(1, steps.size[1] // form.multiple**2)

    def image(self, data: bytes, name: str) -> PromptImage:
        """A file. BadImage for one that is not read."""
        pixels = self._pixels(data, name)
        size = pixels.shape[1], pixels.shape[2]
        sums = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=DIGEST)
        sums.update(pixels.tobytes())
        return PromptImage(data, name, sums.hexdigest(), size, self.spec.form.tokens(*size))

    def units(self, image: PromptImage) -> Units:
        """Its rows."""
        return self.spec.form.units(self._pixels(image.data, image.name), image.name)

    def prompt(self, ids: Sequence[int], images: Sequence[PromptImage]) -> Prompt:
        """ids: of a text with one token for each image. RequestError if there are more, or fewer."""
        count = sum(token == self.spec.token for token in ids)
        if count != len(images):
            rule = f"there are {len(images)} of them, and the text has {count} placeholders"
            raise RequestError("images", [image.name for image in images], rule)
        coming, found = iter(images), list[int]()
        for token in ids:
            found += [token] * (next(coming).tokens if token == self.spec.token else 1)
        return Prompt(tuple(found), tuple(images))

    def placed(self, prompt: Prompt) -> tuple[tuple[int, PromptImage], ...]:
        """The images with the position of each one's first token. RequestError unless each has its tokens, one after
        another, and there are no others."""
        tokens, found, at = np.asarray(prompt.tokens, np.int64), list[tuple[int, PromptImage]](), 0
        places = np.flatnonzero(tokens == self.spec.token)
        for image in prompt.images:
            mine = places[at : at + image.tokens]
            if len(mine) < image.tokens or mine[-1] - mine[0] >= image.tokens:
                rule = f"has {image.tokens} tokens, which must follow each other in the prompt"
                raise RequestError("images", image.name, rule)
            if self.spec.together and found and mine[0] == found[-1][0] + found[-1][1].tokens:
                rule = "must not follow another image at once: their tokens would read each other; put a token between"
                raise RequestError("images", image.name, rule)
            found.append((int(mine[0]), image))
            at += image.tokens
        if at < len(places):
            rule = f"must not have more tokens of images (token {self.spec.token}) than its images"
            raise RequestError("prompt", f"{len(places)} tokens of images", f"{rule}: these have {at}")
        return tuple(found)

    def positions(self, request: Request) -> NDArray[np.int64]:
        """(tokens of the prompt, 3) in time, rows and columns."""
        places = [np.arange(at, at + image.tokens) for at, image in request.images]
        grids = [[side // self.spec.form.multiple for side in image.size] for _, image in request.images]
        every, whole = np.concatenate([np.empty(0, np.int64), *places]), [(0, len(request.prompt))]
        return positions_between(len(request.prompt), whole, every, np.array(grids, np.int64).reshape(-1, 2))

    def batch(
        self, images: Sequence[PromptImage], numbers: torch.Tensor | None, part: SequenceShard, decodes: bool
    ) -> Batch:
        """The stream of these images, as far as a rank of tp x cp has them. numbers: (T,) of each of its tokens, which
        feature it stands for (UnitPlaces.numbers). decodes: whether it computes what patches become; else there are no
        values."""
        form = self.spec.form
        blanks = [form.blank(*image.size, image.name) for image in images]
        stream = form.stream if decodes else replace(form.stream, width=0)
        whole = Units.together(blanks, replace(stream, width=0))
        if decodes:
            values, at = np.zeros((len(whole.values), form.width), np.float32), 0
            homes = assign_whole(whole.sizes, part.count * part.ranks)
            for image, size, home in zip(images, whole.sizes, homes):
                if home == part.index * part.ranks + part.rank:
                    values[at : at + size] = self.units(image).values
                at += size
            whole = replace(whole, values=values)
        made: Batch = unit_batch([whole], [0], UnitRoom(stream, len(whole.values), "patches")).cut(part)
        places: UnitPlaces | None = made.units
        if places is None:
            raise TypeError("a stream of units has places")
        return replace(made, units=replace(places, numbers=numbers), idle=not images)

    def _pixels(self, data: bytes, name: str) -> NDArray[np.float32]:
        return self.steps.pixels(open_image(data, name))

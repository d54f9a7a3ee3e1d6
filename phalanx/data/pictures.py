"""Images of chats (data/media.py): decoded by data/images.py, and divided into patches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.data.images import ImageSteps, Processor, open_image, processor_of, read_processor, size_of
from phalanx.data.media import MediaReader
from phalanx.sequence.patches import PictureSpec
from phalanx.sequence.sample import Units


@dataclass(frozen=True)
class Pictures(MediaReader):
    """Reads images as `spec` and `steps` say."""

    article = "an image"
    plural = "images"
    spec: PictureSpec
    steps: ImageSteps

    @classmethod
    def made(cls, spec: PictureSpec, processor: str | None) -> Pictures:
        return Pictures(spec, steps_for(spec, processor))

    def sizes(self, data: bytes, name: str) -> tuple[int, int]:
        image, form = open_image(data, name), self.spec.form
        height, width = self.steps.size_after(image.height, image.width)
        return form.rows(height, width), form.tokens(height, width)

    def units(self, data: bytes, name: str, where: str) -> Units:
        image = open_image(data, name)
        shown = f"{name} ({image.width} x {image.height}) of {where}"
        return self.spec.form.units(self.steps.pixels(image), shown)

    def blank(self, data: bytes, name: str, where: str) -> Units:
        height, width = size_of(data, name)
        form = self.spec.form
        units = form.blank(*self.steps.size_after(height, width), f"{name} ({width} x {height}) of {where}")
        return replace(units, values=np.zeros((len(units.values), form.width), np.float32))

    def mock(self, number: int, rng: np.random.Generator) -> Units:
        form = self.spec.form
        height, width = self.spec.size or tuple((rng.integers(1, 4, 2) * form.multiple).tolist())
        pixels = rng.standard_normal((form.channels, height, width)).astype(np.float32)
        return form.units(pixels, f"made-up image {number}")


def steps_for(spec: PictureSpec, processor: str | None) -> ImageSteps:
    """How images become numbers for a model: as data.processor says, or else its family. DataError if its images would
    have another size than the model reads, or other patches."""
    found = processor_of(dict(spec.processor)) if processor is None else read_processor(Path(processor))
    return steps_of(spec, found, f"data.processor={processor}")


def steps_of(spec: PictureSpec, found: Processor, where: str) -> ImageSteps:
    """The same of a processor that is read already; where: it comes from, for messages."""
    form = spec.form
    asked = (found.patch, found.frames, found.side)
    if found.patch is not None and asked != (form.size, form.frames, form.side):
        raise DataError(
            f"{where}: patches of {asked[0]} pixels, {asked[1]} frames and {asked[2]} to a side; the model's are of "
            f"{form.size}, {form.frames} and {form.side}"
        )
    if spec.size is not None and (made := found.steps.size_after(480, 640)) != spec.size:
        raise DataError(f"{where}: makes images of {made[0]} x {made[1]} pixels, and the model reads {spec.size}")
    if spec.size is None and found.steps.multiple % form.multiple:
        raise DataError(f"{where}: sides of images must be multiples of {form.multiple} pixels")
    return found.steps

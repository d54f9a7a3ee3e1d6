"""Patches of images: how a processed image becomes rows (sequence.units) that a vision tower reads, and how many tokens
of the text stand for it. Pure numpy; which sizes images are given is up to data/images.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.base.dataclass import dataclass
from phalanx.sequence.media import MediaSpec
from phalanx.sequence.sample import Sample, Units, UnitStream

PATCHES = "patches"
ROW, COLUMN, ROWS, COLUMNS, WINDOW = range(5)
"""Columns of coordinates: where a patch is in its image, how many rows and columns of patches that has, and the window
of attention that it is in. A class token has row and column -1."""
AXES = 5


@dataclass(frozen=True)
class PatchForm:
    """How an image is divided.

    size      side of a patch, in pixels
    channels  colours
    frames    copies of each patch, one after another (Qwen2-VL reads a still image as two frames)
    side      squares of side x side patches become one feature; they are neighbours among the rows
    classed   a row for a class token comes first
    reads_class  the text has a place for the class token too
    window    side of the windows of attention in patches, a multiple of `side`; rows are sorted by window. None: there
              are no windows
    largest   patches of the largest image, for the plan
    """

    size: int
    channels: int = 3
    frames: int = 1
    side: int = 1
    classed: bool = False
    reads_class: bool = False
    window: int | None = None
    largest: int = 1

    @property
    def width(self) -> int:
        """Numbers in a row: a patch as a convolution's weight has it, (channels, frames, size, size)."""
        return self.channels * self.frames * self.size**2

    @property
    def joined(self) -> int:
        return self.side**2

    @property
    def stream(self) -> UnitStream:
        return UnitStream(PATCHES, self.width, AXES, self.joined, self.largest + self.classed)

    @property
    def multiple(self) -> int:
        """Heights and widths of images are multiples of so many pixels."""
        return self.size * self.side

    def rows(self, height: int, width: int) -> int:
        """Rows of an image of so many pixels."""
        return height // self.size * (width // self.size) + self.classed

    def tokens(self, height: int, width: int) -> int:
        """Tokens of the text that stand for it."""
        return height // self.multiple * (width // self.multiple) + self.reads_class

    def windows(self, rows: int) -> int:
        """An upper bound on the windows of an image of so many rows: those of one as narrow as can be, `side` patches.
        Of several images together there may be one more for each."""
        return 1 if self.window is None else -(-rows // (self.side * self.window))

    def units(self, pixels: NDArray[np.float32], name: str = "") -> Units:
        """The rows of one image, pixels (channels, height, width). What is beyond a multiple of `multiple` is left
        out, as by a convolution."""
        _, height, width = pixels.shape
        down, across, s, p = height // self.multiple, width // self.multiple, self.side, self.size
        used: NDArray[np.float32] = pixels[:, : down * s * p, : across * s * p]
        cut = used.reshape(self.channels, down, s, p, across, s, p).transpose(1, 4, 2, 5, 0, 3, 6)
        rows = np.repeat(cut.reshape(down * across, s * s, self.channels, 1, p, p), self.frames, axis=3)
        values = rows.reshape(down * across, s * s, self.width)[self._order(down, across)].reshape(-1, self.width)
        if self.classed:
            values = np.concatenate([np.zeros((1, self.width), values.dtype), values])
        return replace(self.blank(height, width, name), values=values)

    def blank(self, height: int, width: int, name: str = "") -> Units:
        """The same without values, for an image of so many pixels."""
        down, across = height // self.multiple, width // self.multiple
        order = self._order(down, across)
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order))
        coordinates = self._coordinates(down, across)[order].reshape(-1, AXES)
        features = places * self.joined
        if self.classed:
            first = np.array([[-1, -1, *coordinates[0, [ROWS, COLUMNS, WINDOW]]]], np.int64)
            coordinates = np.concatenate([first, coordinates])
            features = np.concatenate([[0] if self.reads_class else [], features + 1]).astype(np.int64)
        count = len(coordinates)
        return Units(np.empty((count, 0), np.float32), coordinates, (count,), features, self.joined, (name,))

    def _order(self, down: int, across: int) -> NDArray[np.int64]:
        """(squares,) which of the squares, in the order of reading, comes first among the rows, and so on."""
        return np.argsort(self._coordinates(down, across)[:, 0, WINDOW], kind="stable")

    def _coordinates(self, down: int, across: int) -> NDArray[np.int64]:
        """(squares, patches of one, AXES), squares in the order of reading."""
        s = self.side
        found = np.empty((down, across, s, s, AXES), np.int64)
        square_row, square_column, row, column = np.indices((down, across, s, s))
        found[..., ROW], found[..., COLUMN] = square_row * s + row, square_column * s + column
        found[..., ROWS], found[..., COLUMNS] = down * s, across * s
        found[..., WINDOW] = 0
        if self.window is not None:
            side = self.window // s
            found[..., WINDOW] = square_row // side * -(-across // side) + square_column // side
        return found.reshape(down * across, s * s, AXES)


def grid_positions(
    tokens: NDArray[np.int64], documents: Sequence[tuple[int, int]], units: Units, spec: PictureSpec
) -> NDArray[np.int64]:
    """(n, 3) positions of tokens in time, rows and columns: those of a text are all one number, which goes on after an
    image by its longer side; those of an image begin with one number, and rows and columns count on from it (Wang et
    al., "Qwen2-VL", 2024, M-RoPE). They begin anew with each document."""
    firsts = np.cumsum([0, *units.sizes])[:-1]
    grids = units.coordinates[firsts][:, [ROWS, COLUMNS]] // spec.form.side
    places = np.flatnonzero(tokens == spec.token)[: int(grids.prod(1).sum())]
    return positions_between(len(tokens), documents, places, grids)


def positions_between(
    length: int, documents: Sequence[tuple[int, int]], places: NDArray[np.int64], grids: NDArray[np.int64]
) -> NDArray[np.int64]:
    """grid_positions of so many tokens. places: of those that images have, one image after another; grids: (images, 2)
    rows and columns of each."""
    found = np.repeat(np.arange(length)[:, None], 3, 1)
    counts = grids.prod(1)
    image = np.repeat(np.arange(len(counts)), counts)[: len(places)]
    rows, columns = np.divmod(np.arange(len(places)) - (np.cumsum(counts) - counts)[image], grids[image, 1])
    for first, stop in documents:
        at, position = first, 0
        low, high = np.searchsorted(places, (first, stop))
        for number in np.unique(image[low:high]).tolist():
            mine = low + np.flatnonzero(image[low:high] == number)
            begin, end = int(places[mine[0]]), int(places[mine[-1]]) + 1
            found[at:begin] = position + np.arange(begin - at)[:, None]
            position += begin - at
            found[places[mine]] = position + np.stack([np.zeros_like(mine), rows[mine], columns[mine]], 1)
            at, position = end, position + int(grids[number].max())
        found[at:stop] = position + np.arange(stop - at)[:, None]
    return found


@dataclass(frozen=True)
class PictureSpec(MediaSpec):
    """What a model's family says about images in a text.

    form       how an image becomes rows
    size       (height, width) of all images in pixels; None: any, in multiples
    grid_positions  whether tokens of images have positions of their own, by row and column (Qwen2-VL's M-RoPE)
    together   whether the tokens of an image read each other, whatever their order (Gemma 3)
    """

    form: PatchForm
    token: int
    size: tuple[int, int] | None
    processor: Mapping[str, Any] = field(default_factory=dict, hash=False)
    rewrites: tuple[str, str] | None = None
    grid_positions: bool = False
    together: bool = False
    kind: str = "image"
    begins: int | None = None

    @property
    def stream(self) -> UnitStream:
        return self.form.stream

    def placed(self, sample: Sample, units: Units) -> Sample:
        made = super().placed(sample, units)
        if not self.grid_positions:
            return made
        tokens = np.array(sample.tokens, np.int64)
        return replace(made, coordinates=grid_positions(tokens, sample.documents, units, self))

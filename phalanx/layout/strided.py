"""Boxes of global tensors in a flat bucket: start and strides of each, in global orientation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.layout.box import Box, flat_range_boxes
from phalanx.layout.buckets import Bucket, Slot
from phalanx.layout.param import Piece


@dataclass(frozen=True)
class StridedBox:
    """`box` of a global tensor: it begins at element number `offset` of the bucket, with a `stride` for each dim."""

    piece: Piece
    box: Box
    offset: int
    stride: tuple[int, ...]

    def of(self, flat: Any, base: int) -> Any:
        """Its elements (box.shape) as a view of a tensor in which flat[0] is the bucket's element number `base`."""
        return flat.as_strided(self.box.shape, self.stride, flat.storage_offset() + self.offset - base)

    def rows(self, first: int, stop: int) -> StridedBox:
        """Rows first..stop of it, counted from its start."""
        return StridedBox(self.piece, self.box.rows(first, stop), self.offset + first * self.stride[0], self.stride)

    def matrices(self) -> Iterator[StridedBox]:
        """The same for each matrix (last two dims) of a stack."""
        start, stop, depth = self.box.start, self.box.stop, max(0, len(self.stride) - 2)
        for at in product(*(range(a, b) for a, b in zip(start[:depth], stop))):
            offset = self.offset + sum((i - a) * s for i, a, s in zip(at, start, self.stride))
            box = Box((*at, *start[depth:]), (*(i + 1 for i in at), *stop[depth:]))
            yield StridedBox(self.piece, box, offset, self.stride)


def boxes_in(bucket: Bucket, lo: int, hi: int, exported: bool = False) -> Iterator[StridedBox]:
    """The boxes within elements lo..hi of a bucket. Padding is in no box.

    exported: only tensors that Hugging Face checkpoints contain.
    """
    for slot in bucket.slots:
        if exported and not slot.spec.exported:
            continue
        first, stop = max(lo, slot.offset) - slot.offset, min(hi, slot.offset + slot.numel) - slot.offset
        for run in flat_range_boxes(slot.spec.shape, first, stop):
            for piece in slot.spec.pieces:
                found = _part(slot, piece, run)
                if not found.box.empty:
                    yield found


def _part(slot: Slot, piece: Piece, run: Box) -> StridedBox:
    """The part of a piece inside a box of its storage; steps in `piece.local` become strides of the view."""
    offset, start, size, stride = slot.offset, list[int](), list[int](), list[int]()
    for s, low, high, unit in zip(piece.slices, run.start, run.stop, _strides(slot.spec.shape)):
        step = s.step or 1
        count = -(-(s.stop - s.start) // step)
        a, b = max(0, -(-(low - s.start) // step)), min(count, -(-(high - s.start) // step))
        start.append(a)
        size.append(max(0, b - a))
        stride.append(step * unit)
        offset += (s.start + a * step) * unit
    empty = 0 in size
    kept = [d for d, s in enumerate(piece.local) if not isinstance(s, int)]
    start, size, stride = ([x[d] for d in kept] for x in (start, size, stride))
    if piece.transposed:
        start, size, stride = ([*x[:-2], x[-1], x[-2]] for x in (start, size, stride))
    corner = tuple(p + a for p, a in zip(piece.box.start, start))
    stop = corner if empty else tuple(c + n for c, n in zip(corner, size))
    return StridedBox(piece, Box(corner, stop), offset, tuple(stride))


def _strides(shape: tuple[int, ...]) -> list[int]:
    strides, unit = [], 1
    for n in reversed(shape):
        strides.append(unit)
        unit *= n
    return strides[::-1]

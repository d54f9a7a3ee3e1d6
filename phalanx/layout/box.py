"""Boxes: axis-aligned pieces of a global tensor, and the even division of a length into parts."""

from __future__ import annotations

from math import prod

from phalanx.base.dataclass import dataclass


def cut(length: int, parts: int) -> list[tuple[int, int]]:
    """Cut `length` into `parts` ranges (start, stop) whose lengths differ by at most one; the longer ones come
    first."""
    small, extra = divmod(length, parts)
    sizes = [small + (i < extra) for i in range(parts)]
    return [(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(parts)]


@dataclass(frozen=True, order=True)
class Box:
    """A box in a global tensor: `start[d] <= index[d] < stop[d]` for each dim d."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @staticmethod
    def full(shape: tuple[int, ...]) -> Box:
        return Box((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def empty(self) -> bool:
        return any(b <= a for a, b in zip(self.start, self.stop))

    def intersect(self, other: Box) -> Box:
        start = tuple(max(a, b) for a, b in zip(self.start, other.start))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop))
        return Box(start, tuple(max(a, b) for a, b in zip(start, stop)))

    def rows(self, first: int, stop: int) -> Box:
        """Rows first..stop of this box (of its first dim), counted from its start."""
        start = self.start[0]
        return Box((start + first, *self.start[1:]), (start + stop, *self.stop[1:]))

    def slices(self) -> tuple[slice, ...]:
        """Slices that select this box in the global tensor."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Slices that select this box in a tensor that holds `outer`."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, outer.start))


def flat_range_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The boxes that make up a contiguous range [start, stop) of a row-major tensor of `shape` (at most 2 * dims -
    1)."""
    if stop <= start:
        return []
    if len(shape) == 0:
        return [Box((), ())]
    if len(shape) == 1:
        return [Box((start,), (stop,))]
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:  # within one row
        inner = flat_range_boxes(shape[1:], start - last * row, stop - last * row)
        return [Box((last, *b.start), (last + 1, *b.stop)) for b in inner]
    head = flat_range_boxes(shape[1:], start - (first - 1) * row, row) if start < first * row else []
    boxes = [Box((first - 1, *b.start), (first, *b.stop)) for b in head]
    if last > first:
        boxes.append(Box((first, *(0,) * (len(shape) - 1)), (last, *shape[1:])))
    boxes += [Box((last, *b.start), (last + 1, *b.stop)) for b in flat_range_boxes(shape[1:], 0, stop - last * row)]
    return boxes

"""Buckets: which parameters share a flat buffer, where each lies in it, and which segments use it.

A stage's blocks are grouped into segments of about the bucket size; each segment's parameters are one bucket, so its
gradients can be reduced as soon as the segment's last backward is over. A parameter used by several segments (tied
embeddings) has a bucket of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from phalanx.base.align import ELEMENTS, room
from phalanx.layout.grid import Grid, SumAxis
from phalanx.layout.param import ParamSpec, Replica


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bucket: elements offset..offset+numel."""

    param: int
    offset: int
    numel: int
    spec: ParamSpec


@dataclass(frozen=True)
class Updater:
    """Who updates a parameter. number: 0 the optimizer of optim.name, 1 its fallback; matrix: each global matrix as a
    whole, on one rank of the stage (layout.homes), in place of any range of elements where it lies."""

    number: int = 0
    matrix: bool = False


@dataclass(frozen=True)
class Bucket:
    """`numel` is padded so that as many equal, aligned parts cover it as `axis` has ranks; `users` are (stage, segment)
    pairs; `coded`: weights are 8-bit codes (data_parallel.quantized); `updater`: of all its parameters, if they learn.

    How it is cut into them is in `layout.shards`.
    """

    id: int
    slots: tuple[Slot, ...]
    numel: int
    users: frozenset[tuple[int, int]]
    axis: SumAxis = "dp"
    trained: bool = True
    frozen: bool = False
    coded: bool = False
    updater: Updater = Updater()

    @property
    def learns(self) -> bool:
        """Whether its parameters get gradients."""
        return self.trained and not self.frozen

    def weight_bytes(self, weight: int, master: int) -> int:
        """Of an element of the weights where they are at work, given the bytes of those two dtypes: codes are there
        as they lie, and transposed."""
        return 2 if self.coded else weight if self.trained else master

    def sent_bytes(self, weight: int) -> int:
        """Of an element of the weights on its way to other ranks, and of a part that is kept, given the bytes of
        their dtype."""
        return 1 if self.coded else weight

    def shard(self, index: int, shards: int) -> tuple[int, int]:
        size = self.numel // shards
        return index * size, (index + 1) * size


def cut_segments(block_numels: list[int], limit: int) -> list[range]:
    """Group consecutive blocks into segments of at most `limit` parameters (a larger block is a segment alone)."""
    segments, start, size = [], 0, 0
    for i, numel in enumerate(block_numels):
        if i > start and size + numel > limit:
            segments.append(range(start, i))
            start, size = i, 0
        size += numel
    segments.append(range(start, len(block_numels)))
    return segments


Users = frozenset[tuple[int, int]]


def make_buckets(
    params: list[tuple[ParamSpec, Users]], grid: Grid, updater_of: Callable[[ParamSpec], Updater] = lambda _: Updater()
) -> list[Bucket]:
    """Buckets for parameters given with their users, in model order; those with equal users, kind, updater and pp
    replicas share one."""
    groups: dict[tuple[Users, SumAxis, bool, bool, bool, frozenset[Replica], Updater], list[int]] = {}
    for i, (spec, users) in enumerate(params):
        tied = frozenset(r for p in spec.pieces for r in p.replicas if r.axis == "pp")
        updater = updater_of(spec) if spec.learns else Updater()
        groups.setdefault((users, spec.summed_over, spec.trained, spec.frozen, spec.coded, tied, updater), []).append(i)
    buckets: list[Bucket] = []
    for (users, axis, trained, frozen, coded, _, updater), members in groups.items():
        offset, slots = 0, list[Slot]()
        for i in members:
            numel = prod(params[i][0].shape)
            slots.append(Slot(i, offset, numel, params[i][0]))
            offset += room(numel, ELEMENTS)
        numel = room(max(offset, 1), ELEMENTS * grid.sum_size(axis))
        buckets.append(Bucket(len(buckets), tuple(slots), numel, users, axis, trained, frozen, coded, updater))
    return buckets


def piece_ranges(slot: Slot) -> list[tuple[int, int]]:
    """Flat range (start, stop) in the bucket of each piece of the slot that is a run of whole leading rows; pieces
    that are not raise."""
    row = prod(slot.spec.shape[1:])
    ranges = []
    for piece in slot.spec.pieces:
        first, *others = piece.slices
        for dim, s in enumerate(others, 1):
            if (s.start, s.stop, s.step) not in ((0, slot.spec.shape[dim], None), (0, slot.spec.shape[dim], 1)):
                raise ValueError(f"{piece.name}: a replicated piece must be whole rows of its storage")
        ranges.append((slot.offset + first.start * row, slot.offset + first.stop * row))
    return ranges

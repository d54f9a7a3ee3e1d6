"""Buckets: which parameters share a flat buffer, where each is in it, and which segments use it.

A stage's blocks are grouped into segments of about the bucket size. The parameters of a segment form one bucket, so its
gradients can be reduced as soon as the segment's last backward is done. A parameter that several segments use (tied
embeddings) is in a separate bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from phalanx.base.align import ELEMENTS, room
from phalanx.base.dataclass import dataclass
from phalanx.layout.grid import Grid, SumAxis
from phalanx.layout.param import ParamSpec, Piece, Replica


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bucket: elements offset..offset+numel."""

    param: int
    offset: int
    numel: int
    spec: ParamSpec


@dataclass(frozen=True)
class Updater:
    """Which optimizer updates a parameter. number: 0 the optimizer of optim.name, 1 its fallback. matrix: it updates
    each global matrix as a whole, on one rank of the stage (layout.homes), rather than whatever range of elements a
    rank holds."""

    number: int = 0
    matrix: bool = False


@dataclass(frozen=True)
class Bucket:
    """One flat buffer.

    numel    padded, so that it divides into equal, aligned shards over the ranks of `axis`
    users    (stage, segment) pairs
    coded    weights are FP8 values (data_parallel.quantized)
    updater  of all its parameters, if they learn
    base_format  of frozen weights that are kept as quantized values, and decoded where a segment fetches them
             (data_parallel.base_storage)

    layout.shards says how it is sharded.
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
    base_format: str | None = None

    @property
    def learns(self) -> bool:
        """Whether its parameters have gradients."""
        return self.trained and not self.frozen

    def weight_bytes(self, weight: int, master: int) -> int:
        """Bytes of a weight element while it is in use, given the sizes of both dtypes. Quantized values are stored
        twice: as they are, and transposed."""
        return 2 if self.coded else weight if self.trained else master

    def sent_bytes(self, weight: int) -> int:
        """Bytes of a weight element sent to other ranks, or of a shard that is kept, given the size of its dtype."""
        return 1 if self.coded else weight

    def shard(self, index: int, shards: int) -> tuple[int, int]:
        size = self.numel // shards
        return index * size, (index + 1) * size


def cut_segments(block_numels: list[int], limit: int) -> list[range]:
    """Group consecutive blocks into segments of at most `limit` parameters (a larger block is a segment of its own)."""
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
    """Buckets for parameters given with their users, in model order. Those with equal users, kind, updater and pp
    replicas share one."""
    groups: dict[tuple[Users, SumAxis, bool, bool, bool, frozenset[Replica], Updater, str | None], list[int]] = {}
    for i, (spec, users) in enumerate(params):
        tied = frozenset(r for p in spec.pieces for r in p.replicas if r.axis == "pp")
        updater = updater_of(spec) if spec.learns else Updater()
        kind = (spec.trained, spec.frozen, spec.coded)
        groups.setdefault((users, spec.summed_over, *kind, tied, updater, spec.base_format), []).append(i)
    buckets: list[Bucket] = []
    for (users, axis, trained, frozen, coded, _, updater, base_format), members in groups.items():
        offset, slots = 0, list[Slot]()
        for i in members:
            numel = prod(params[i][0].shape)
            slots.append(Slot(i, offset, numel, params[i][0]))
            offset += room(numel, ELEMENTS)
        numel = room(max(offset, 1), ELEMENTS * grid.sum_size(axis))
        of_all = (users, axis, trained, frozen, coded, updater, base_format)
        buckets.append(Bucket(len(buckets), tuple(slots), numel, *of_all))
    return buckets


def piece_ranges(slot: Slot) -> list[tuple[int, int]]:
    """The flat range (start, stop) in the bucket of each piece of the slot that consists of whole leading rows; other
    pieces raise."""
    row = prod(slot.spec.shape[1:])
    ranges = []
    for piece in slot.spec.pieces:
        first, *others = piece.slices
        for dim, s in enumerate(others, 1):
            if (s.start, s.stop, s.step) not in ((0, slot.spec.shape[dim], None), (0, slot.spec.shape[dim], 1)):
                raise ValueError(f"{piece.name}: a replicated piece must be whole rows of its storage")
        ranges.append((slot.offset + first.start * row, slot.offset + first.stop * row))
    return ranges


def replica_ranges(slot: Slot) -> list[tuple[Piece, tuple[int, int]]]:
    """Flat ranges (start, stop) in the bucket that other ranks hold too, each with a piece that says which: all of a
    slot whose pieces say the same, or else that of each piece."""
    pieces = slot.spec.pieces
    if not any(p.replicas for p in pieces):
        return []
    if len(pieces) > 1 and len({p.replicas for p in pieces}) == 1:
        return [(pieces[0], (slot.offset, slot.offset + slot.numel))]
    return list(zip(pieces, piece_ranges(slot)))

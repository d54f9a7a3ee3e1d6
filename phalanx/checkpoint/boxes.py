"""Holdings: which boxes of which global tensors lie in a range of a flat bucket, as views. This is all that is known
of layouts here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phalanx.comm.mesh import Mesh
from phalanx.data_parallel.buffers import Buffers
from phalanx.layout.box import Box, flat_range_boxes
from phalanx.layout.buckets import Bucket, Slot
from phalanx.layout.param import Piece
from phalanx.ops.optimizer.shard import Shard


@dataclass(frozen=True)
class Item:
    """`box` of a global tensor of a piece; `view` (box.shape) is a strided view of the flat buffer, in global
    orientation.

    saved_as    the dtype in which it is written; None: that of the view
    """

    piece: Piece
    box: Box
    view: Tensor
    saved_as: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.saved_as or self.view.dtype

    @property
    def name(self) -> str:
        return self.piece.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.piece.shape


def items_in(bucket: Bucket, flat: Tensor, base: int, lo: int, hi: int, exported: bool = False) -> Iterator[Item]:
    """Items of elements lo..hi of a bucket. flat[0] is the bucket's element number `base`. Padding is in no item.

    exported: only tensors that Hugging Face checkpoints have.
    """
    for slot in bucket.slots:
        if exported and not slot.spec.exported:
            continue
        first, stop = max(lo, slot.offset) - slot.offset, min(hi, slot.offset + slot.numel) - slot.offset
        for run in flat_range_boxes(slot.spec.shape, first, stop):
            for piece in slot.spec.pieces:
                item = _part(slot, piece, run, flat, base)
                if not item.box.empty:
                    yield item


def _part(slot: Slot, piece: Piece, run: Box, flat: Tensor, base: int) -> Item:
    """The part of a piece inside a box of its storage; steps in `piece.local` are strides of the view."""
    strides = _strides(slot.spec.shape)
    offset = flat.storage_offset() + slot.offset - base
    start, size, stride = [], [], []
    for s, low, high, unit in zip(piece.slices, run.start, run.stop, strides):
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
    box = Box(corner, tuple(c + n for c, n in zip(corner, size)))
    if empty or box.empty:
        return Item(piece, Box(corner, corner), flat[:0])
    return Item(piece, box, flat.as_strided(size, stride, offset))


def _strides(shape: tuple[int, ...]) -> list[int]:
    strides, unit = [], 1
    for n in reversed(shape):
        strides.append(unit)
        unit *= n
    return strides[::-1]


def weights_to_save(buffers: Buffers, mesh: Mesh) -> list[Item]:
    """This rank's share of the compute-dtype weights: its data-parallel part of each bucket, without copies that
    others write."""
    found = []
    for f in buffers.flat:
        at, values = f.saved
        mine = [i for i in items_in(f.bucket, values, at, *f.own, exported=True) if i.piece.is_writer(mesh.at)]
        found += [replace(i, saved_as=f.weight.dtype) for i in mine]
    return found


def state_to_save(kinds: Sequence[str], shards: list[Shard], mesh: Mesh) -> dict[str, list[Item]]:
    """This rank's share of each kind of state. Where the state is whole on every data-parallel rank, each writes its
    part."""
    found: dict[str, list[Item]] = {kind: [] for kind in kinds}
    for s in shards:
        for kind in kinds:
            found[kind] += [i for i in items_in(s.bucket, s.values(kind), s.lo, *s.own) if i.piece.is_writer(mesh.at)]
    return found


def state_to_load(shards: list[Shard], values: dict[str, list[Tensor]]) -> dict[str, list[Item]]:
    """Everything that this rank's shards hold, copies included; `values`: of each kind and shard, where to."""
    return {
        kind: [i for s, x in zip(shards, whole) for i in items_in(s.bucket, x, s.lo, s.lo, s.hi)]
        for kind, whole in values.items()
    }


def kept_to_save(buffers: Buffers, mesh: Mesh) -> list[Item]:
    """This rank's share of what is frozen or not trained (it has no moments): of each bucket its part, whatever the
    sharding."""
    untrained = [f for f in buffers.flat if not f.bucket.learns]
    return [i for f in untrained for i in items_in(f.bucket, f.master, f.lo, *f.own) if i.piece.is_writer(mesh.at)]


def kept_to_load(buffers: Buffers) -> list[Item]:
    return [i for f in buffers.flat if not f.bucket.learns for i in items_in(f.bucket, f.master, f.lo, f.lo, f.hi)]


def masters_to_load(buffers: Buffers) -> list[Item]:
    """What a Hugging Face folder gives."""
    return [i for f in buffers.flat for i in items_in(f.bucket, f.master, f.lo, f.lo, f.hi, exported=True)]

"""Which boxes of which global tensors are in a range of a flat bucket, as views. Nothing else about layouts is known
here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.comm.mesh import Mesh
from phalanx.data_parallel.buffers import Buffers
from phalanx.data_parallel.flat import FlatBucket
from phalanx.data_parallel.homes import MatrixHome
from phalanx.layout.box import Box
from phalanx.layout.buckets import Bucket
from phalanx.layout.param import Piece
from phalanx.layout.strided import StridedBox, boxes_in
from phalanx.ops.optimizer.packed import PackedTensor
from phalanx.ops.optimizer.shard import MASTER, Shard


@dataclass(frozen=True)
class PackedView:
    """A box in a packed flat tensor, whose first element has number `base` in the bucket."""

    flat: PackedTensor
    base: int
    box: StridedBox

    @property
    def dtype(self) -> torch.dtype:
        return self.flat.dtype

    def numbers(self) -> Tensor:
        """(box.shape) in new memory: of the elements around the box, not of the whole bucket."""
        start = self.box.offset - self.base
        stop = start + 1 + sum((n - 1) * s for n, s in zip(self.box.box.shape, self.box.stride))
        first, flat = self.flat.around(start, stop)
        return self.box.of(flat, self.base + first)  # type: ignore[no-any-return]

    def rows(self, first: int, stop: int) -> PackedView:
        return replace(self, box=self.box.rows(first, stop))


@dataclass(frozen=True)
class Item:
    """`box` of a global tensor; `view` (box.shape) is a strided view of the flat buffer, in global orientation.

    stored      the view, or where it is packed
    saved_as    the dtype in which it is written; None: that of the view
    """

    piece: Piece
    box: Box
    stored: Tensor | PackedView
    saved_as: torch.dtype | None = None

    @property
    def view(self) -> Tensor:
        """Of what is packed, the numbers in new memory."""
        return self.stored.numbers() if isinstance(self.stored, PackedView) else self.stored

    @property
    def dtype(self) -> torch.dtype:
        return self.saved_as or self.stored.dtype

    @property
    def packed(self) -> bool:
        return isinstance(self.stored, PackedView)

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize

    def rows(self, first: int, stop: int) -> Item:
        """Rows first..stop of the box, counted from its start; what is packed stays so."""
        stored = self.stored.rows(first, stop) if isinstance(self.stored, PackedView) else self.stored[first:stop]
        return replace(self, box=self.box.rows(first, stop), stored=stored)

    @property
    def name(self) -> str:
        return self.piece.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.piece.shape


def items_in(
    bucket: Bucket, flat: Tensor | PackedTensor, base: int, lo: int, hi: int, exported: bool = False
) -> Iterator[Item]:
    """Items of elements lo..hi of a bucket. flat[0] is the bucket's element number `base`. Padding is in no item.

    exported: only tensors that Hugging Face checkpoints contain.
    """
    for found in boxes_in(bucket, lo, hi, exported):
        yield _item(found, flat, base)


def _item(box: StridedBox, flat: Tensor | PackedTensor, base: int) -> Item:
    stored = PackedView(flat, base, box) if isinstance(flat, PackedTensor) else box.of(flat, base)
    return Item(box.piece, box.box, stored)


def weights_to_save(buffers: Buffers, mesh: Mesh) -> list[Item]:
    """This rank's share of the compute-dtype weights: its data-parallel shard of each bucket, without copies that other
    ranks write."""
    found = []
    for f in buffers.flat:
        at, values = f.storage.saved
        mine = [
            i for i in items_in(f.bucket, values, at, *f.own, exported=True) if i.piece.is_writer(mesh.grid, mesh.at)
        ]
        found += [replace(i, saved_as=f.weight.dtype) for i in mine]
    return found


def whole_weights(buffers: Buffers) -> dict[str, Tensor]:
    """Those tensors of the weights, by name, of which this rank has every element in the dtype in which it is written:
    views in global orientation."""
    found = {}
    for f in buffers.flat:
        at, values = f.storage.saved
        if values.dtype == f.weight.dtype:
            for i in items_in(f.bucket, values, at, at, at + len(values), exported=True):
                if i.box == Box.full(i.shape):
                    found[i.name] = i.view
    return found


def adapters_to_save(buffers: Buffers, mesh: Mesh, exported: bool = False) -> list[Item]:
    """The same of adapters' weights, which no Hugging Face folder of the model has; exported: also of what is trained
    of those that it has."""
    found = []
    for f in (f for f in buffers.flat if f.bucket.trained):
        whole, own = exported and f.bucket.learns, _unexported(f.bucket)
        if not whole and not own:
            continue
        at, values = f.storage.saved
        mine = [i for i in items_in(f.bucket, values, at, *f.own) if i.piece.is_writer(mesh.grid, mesh.at)]
        found += [replace(i, saved_as=f.weight.dtype) for i in mine if whole or i.name in own]
    return found


Held = tuple[FlatBucket | MatrixHome, Tensor | PackedTensor]
"""A holder of masters, and these or where they are to be loaded."""


def adapters_to_load(held: Iterable[Held], exported: bool = False) -> list[Item]:
    """What their folder gives; exported: besides, the weights of the model itself that are trained (lora.also)."""
    items = [(f, i) for f, x in held if f.bucket.trained for i in items_in(f.bucket, x, f.lo, f.lo, f.hi)]
    return [i for f, i in items if i.name in _unexported(f.bucket) or (exported and f.bucket.learns)]


def _unexported(bucket: Bucket) -> frozenset[str]:
    """Names of the bucket's tensors that no Hugging Face folder of the model has."""
    return frozenset(p.name for slot in bucket.slots if not slot.spec.exported for p in slot.spec.pieces)


def state_to_save(shards: list[Shard], mesh: Mesh) -> list[dict[str, Item]]:
    """This rank's boxes, with master and state by kind for each. Where every data-parallel rank has the whole state,
    each writes its share."""
    found: list[dict[str, Item]] = []
    for s in shards:
        flat = {kind: s.stored(kind) for kind in s.kinds}
        boxes = [box for box in boxes_in(s.bucket, *s.own) if box.piece.is_writer(mesh.grid, mesh.at)]
        found += [{kind: _item(box, values, s.lo) for kind, values in flat.items()} for box in boxes]
    return found


def state_to_load(
    shards: Sequence[Shard], values: Sequence[Mapping[str, Tensor | PackedTensor]]
) -> dict[str, list[Item]]:
    """Everything that these shards hold, copies included, by kind; `values`: for each shard, where to load it."""
    found: dict[str, list[Item]] = {MASTER: []}
    for s, whole in zip(shards, values):
        for kind, x in whole.items():
            found.setdefault(kind, []).extend(items_in(s.bucket, x, s.lo, s.lo, s.hi))
    return found


def kept_to_save(buffers: Buffers, mesh: Mesh) -> list[Item]:
    """This rank's share of what is not trained (it has no moments): its shard of each bucket, whatever the sharding.
    Frozen weights are kept in the dtype that they are exported in, so `weights/` has every bit of them."""
    untrained = [f for f in buffers.flat if not f.bucket.learns and not f.bucket.frozen]
    return [
        i
        for f in untrained
        for i in items_in(f.bucket, f.master, f.lo, *f.own)
        if i.piece.is_writer(mesh.grid, mesh.at)
    ]


def frozen_names(buffers: Buffers) -> list[str]:
    """Names of this rank's tensors that are not in the state: the base has them (`weights/`, or the folder that the
    manifest names) or, of adapters', `adapter/`. Of those that are kept as quantized values, a checkpoint has
    nothing."""
    kept = [f for f in buffers.flat if f.bucket.frozen and f.bucket.base_format is None]
    frozen = [slot.spec for f in kept for slot in f.bucket.slots]
    return [piece.name for spec in frozen for piece in spec.pieces]


def kept_to_load(buffers: Buffers) -> list[Item]:
    return [i for f in buffers.flat if not f.bucket.learns for i in items_in(f.bucket, f.master, f.lo, f.lo, f.hi)]


def masters_to_load(held: Iterable[Held]) -> list[Item]:
    """What a Hugging Face folder supplies."""
    return [i for f, x in held for i in items_in(f.bucket, x, f.lo, f.lo, f.hi, exported=True)]

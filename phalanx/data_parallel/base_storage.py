"""Frozen weights that are kept as quantized values and decoded for each use (lora.base): QLoRA.

At ZeRO-3 a rank keeps an equal share of the bytes of a bucket, and the bytes are what travels; below, it keeps all of
them. In both cases the weights themselves have memory from `ready` to `free` only:

kept (bytes) -- fetch --> coming (bytes of all shards) -- ready --> decoded (weights) -- free --> kept
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from phalanx.base.dtypes import Precision
from phalanx.base.errors import CheckpointError
from phalanx.data_parallel.storage import (
    BucketShare,
    FullPrecision,
    StorageFormat,
    allocate,
    let_go,
    memory_at,
    write_range,
)
from phalanx.layout.buckets import Slot
from phalanx.layout.shards import Range
from phalanx.ops.op import Kernels
from phalanx.ops.quantized.base_bucket import BaseMatrix, encoded_bucket, stored_bytes
from phalanx.ops.quantized.base_weights import BASE_DECODE, EncodedMatrices, NotFinite, decode_, encode


class BaseStorage(StorageFormat):
    """The weights of a bucket with a base_format. kernels: of BASE_DECODE (ops.op).

    matrices   what is to be encoded, one after the other, while weights are drawn or loaded
    kept       (bytes,) uint8: this rank's share of the quantized values, from byte number `first` on
    whole      (bytes,) uint8: those of all shards; at ZeRO-3 without memory unless they are coming, below it `kept`
    """

    def __init__(self, share: BucketShare, precision: Precision, place: Tensor | None, kernels: Kernels = "auto"):
        super().__init__(share, place)
        self.lo = self.hi = 0
        encoded, shards = encoded_bucket(share.bucket), share.cut.inner if share.cut.cuts_weights else 1
        self.matrices, self._decoded = encoded.matrices, encoded.decoded
        self.weight_comes = place is None
        self.weight = memory_at(place, share.bucket.numel, precision.compute, share.device)
        self.master: Tensor = torch.zeros(0, dtype=precision.compute, device=share.device)
        total = stored_bytes(share.bucket, shards)
        part, index = total // shards, share.groups.inner.index if shards > 1 else 0
        self.first, self._kernels = part * index, kernels
        if shards > 1:
            self.kept = share.staying(part, torch.uint8)
            self.whole = torch.zeros(total, dtype=torch.uint8, device=share.device)
            let_go(self.whole)
        else:
            self.kept = self.whole = torch.zeros(total, dtype=torch.uint8, device=share.device)
        covered = sum(m.placed.encoded.box.size[0] * m.placed.encoded.box.size[1] for m in self.matrices)
        self._padded = covered < sum(slot.numel for slot in share.bucket.slots)
        self._coming = False

    # ---- what is stored on this rank: nothing in the weights' dtype

    @property
    def own(self) -> Range:
        return 0, 0

    @property
    def weight_at(self) -> int:
        return 0

    @property
    def weight_kept(self) -> Tensor:
        return self.weight.new_zeros(0)

    @property
    def saved(self) -> tuple[int, Tensor]:
        return 0, self.weight_kept

    @property
    def resident(self) -> tuple[int, Tensor]:
        return self.first, self.kept

    def resident_of(self, slot: Slot) -> Tensor:
        mine = [m.placed for m in self.matrices if m.slot is slot]
        ends = min(m.at for m in mine) - self.first, max(m.at + m.encoded.nbytes for m in mine) - self.first
        return self.kept[max(0, ends[0]) : max(0, ends[1])]

    @property
    def out(self) -> Tensor | None:
        return None

    @property
    def separate_masters(self) -> bool:
        return False

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weight, self.whole, self.kept]

    def write(self, first: int, values: Tensor) -> None:
        raise TypeError("a frozen weight of lora.base is encoded matrix by matrix, from the whole global tensor")

    def wants(self, matrix: BaseMatrix) -> bool:
        """Whether this rank keeps any of its bytes."""
        at, stop = matrix.placed.at, matrix.placed.at + matrix.placed.encoded.nbytes
        return at < self.first + len(self.kept) and stop > self.first

    @torch.no_grad()
    def encode(self, matrix: BaseMatrix, values: Tensor) -> None:
        """Keep this rank's share of a matrix. values: of `matrix.source`. CheckpointError if they are not finite."""
        write_range(self.kept, self.first, matrix.placed.at, encoded_of(matrix, values))

    def values(self) -> tuple[int, Tensor]:
        """All weights of the bucket, in new memory."""
        self.fetch()
        self.ready()
        found = self.weight.clone()
        self.free()
        return 0, found

    # ---- exchange

    def gather_groups(self) -> None:
        """Frozen: nothing changes."""

    def gather_parts(self) -> None:
        """Frozen: nothing changes."""

    def fetch(self) -> None:
        self._coming = True
        if self.whole is not self.kept:
            allocate(self.whole)
            self._gathering = self.share.groups.gather.all_gather_to(self.whole, self.kept, async_op=True)

    @torch.no_grad()
    def ready(self) -> None:
        """Wait until quantized values have arrived, and decode them."""
        super().ready()
        if not self._coming:
            return
        self._coming = False
        if self.weight_comes:
            allocate(self.weight)
        if self._padded:
            self.weight.zero_()
        self.decode()
        if self.whole is not self.kept:
            let_go(self.whole)

    def decode(self) -> None:
        BASE_DECODE.choose(self._kernels, self.weight).decode_(self.weight, self.whole, self._decoded)

    def free(self) -> None:
        if self.weight_comes:
            let_go(self.weight)


class RoundedBase(FullPrecision):
    """For inference: the values that quantized weights stand for, in the compute dtype, so that a model generates with
    the base that its adapters were trained on."""

    def __init__(self, share: BucketShare, precision: Precision, place: Tensor | None):
        super().__init__(share, precision, place)
        self.lo = self.hi = 0
        self.matrices, self.master = encoded_bucket(share.bucket).matrices, self.weight[:0]

    @property
    def own(self) -> Range:
        return 0, 0

    @property
    def out(self) -> Tensor | None:
        return None

    def wants(self, matrix: BaseMatrix) -> bool:
        """As BaseStorage.wants."""
        return True

    @torch.no_grad()
    def encode(self, matrix: BaseMatrix, values: Tensor) -> None:
        """As BaseStorage.encode."""
        placed = replace(matrix.placed, at=0)
        what = EncodedMatrices(placed.encoded.format, (placed,))
        decode_(self.weight, encoded_of(matrix, values), what)


def encoded_of(matrix: BaseMatrix, values: Tensor) -> Tensor:
    """The bytes of a matrix, from the values of its `source`."""
    encoded = matrix.placed.encoded
    try:
        return encode(values.reshape(encoded.source.size), encoded)
    except NotFinite as error:
        rule = f"lora.base={encoded.format.name} cannot store it; lora.base=bf16 can"
        raise CheckpointError(f"{matrix.piece.name} holds {error}: {rule}") from error

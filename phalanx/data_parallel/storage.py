"""StorageFormat: how a bucket's weights are stored, sent to other ranks and brought back; FullPrecision, the plain one.

ZeRO-3, for each use:  kept -- fetch --> coming -- ready --> here -- free --> kept
below ZeRO-3:          here -- (update of masters) -- gather_groups, gather_parts --> coming -- ready --> here
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.dtypes import Precision
from phalanx.comm.axis import Work
from phalanx.comm.mesh import Groups
from phalanx.layout.buckets import Bucket, Slot
from phalanx.layout.shards import Cut, Range
from phalanx.nn.parameter import Parameter
from phalanx.ops.optimizer.masters import SplitMaster


def allocate(x: Tensor) -> None:
    """Allocate the memory of x and all views of its storage again; its contents are undefined."""
    x.untyped_storage().resize_(x.numel() * x.element_size())


def let_go(x: Tensor) -> None:
    """Free the memory of x and of all views of its storage; they keep their shapes."""
    x.untyped_storage().resize_(0)


def memory_at(place: Tensor | None, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(numel,) in a memory slot, or in newly allocated zeroed memory."""
    return torch.zeros(numel, dtype=dtype, device=device) if place is None else place[:numel]


@dataclass(frozen=True)
class BucketShare:
    """This rank's share of a bucket. part: elements that it keeps of its group's bucket; own: those that only this rank
    counts; updated: those whose masters it has or, where these are `homed` (data_parallel.homes), whose weights it
    receives."""

    bucket: Bucket
    cut: Cut
    groups: Groups
    device: torch.device
    homed: bool

    @property
    def part(self) -> Range:
        return self.cut.part(self.groups.inner.index)

    @property
    def own(self) -> Range:
        return self.cut.own(self.groups.inner.index, self.groups.outer.index)

    @property
    def updated(self) -> Range:
        return self.cut.updated(self.groups.inner.index, self.groups.outer.index)

    @property
    def shared_parts(self) -> Any:
        """Memory from which neighbours pull weights, if ranks share any."""
        shared = self.groups.inner.shared
        return None if shared is None else shared.parts

    def staying(self, numel: int, dtype: torch.dtype) -> Tensor:
        """(numel,) zeros: memory for weights that stay on this rank, from which others pull if ranks share memory."""
        parts = self.shared_parts
        return torch.zeros(numel, dtype=dtype, device=self.device) if parts is None else parts.place(numel, dtype)

    def kept_of(self, whole: Tensor) -> tuple[int, Tensor]:
        """The weights that always stay on this rank: number of the first element, and values."""
        if not self.cut.cuts_weights:
            return 0, whole
        return self.part[0], self.staying(self.part[1] - self.part[0], whole.dtype)


class StorageFormat(ABC):
    """The weights of one bucket on one rank.

    weight   (numel,) in the compute dtype, of which the parameters are views
    master   (hi - lo,) of the elements that this rank updates; they may be split (optim.masters)
    place    memory slot that fetched weights always use, and other buckets use in between; None: memory is allocated
             and freed each time
    """

    weight: Tensor
    master: Tensor | SplitMaster

    def __init__(self, share: BucketShare, place: Tensor | None):
        self.share, self.lo, self.hi = share, *share.updated
        self.weight_comes = share.cut.cuts_weights and place is None
        self._gathering: Work | None = None
        self._moved = False  # whether this rank's shard came from other ranks since its neighbours received it

    def attach(self, params: Sequence[Parameter]) -> None:
        """The parameters of all buckets have become views of their weights."""
        self.free()

    # ---- what is stored on this rank

    @property
    def own(self) -> Range:
        """Elements of weights that only this rank counts, and writes to checkpoints."""
        return self.share.own

    def values(self) -> tuple[int, Tensor | SplitMaster]:
        """Number of the first element, and values of what this rank updates, or of what it keeps for others. Where
        quantized values stand for them, these are gathered: to be called on all ranks that hold shards."""
        return self.lo, self.master

    @property
    @abstractmethod
    def weight_at(self) -> int:
        """Element number of the first of `weight_kept`."""

    @property
    @abstractmethod
    def weight_kept(self) -> Tensor:
        """The weights that always stay on this rank; below ZeRO-3 all of them, if they are stored as weights."""

    @property
    @abstractmethod
    def saved(self) -> tuple[int, Tensor]:
        """Number of the first element, and values here that are the weights once cast to the weights' dtype."""

    @property
    @abstractmethod
    def resident(self) -> tuple[int, Tensor]:
        """Number of the first element, and the stored form of weights that always stays here: the same on ranks that
        keep the same elements."""

    def resident_of(self, slot: Slot) -> Tensor:
        """The part of `resident` that belongs to a parameter."""
        first, values = self.resident
        return values[max(slot.offset - first, 0) : max(slot.offset + slot.numel - first, 0)]

    @property
    @abstractmethod
    def out(self) -> Tensor | None:
        """The weights of this rank's masters, which an update writes; None: there are none besides the masters."""

    @property
    @abstractmethod
    def separate_masters(self) -> bool:
        """Whether masters are not the weights themselves."""

    @property
    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Everything that holds weights, besides the masters."""

    @abstractmethod
    def write(self, first: int, values: Tensor) -> None:
        """Set what this rank keeps of elements `first` .. in weights and masters, from values in the master dtype."""

    # ---- exchange

    @abstractmethod
    def gather_groups(self) -> None:
        """Start gathering this rank's shard from the groups, each of which has updated a part of it."""

    @abstractmethod
    def gather_parts(self) -> None:
        """Start gathering the weights of all shards, where they are kept whole."""

    @abstractmethod
    def fetch(self) -> None:
        """Allocate the weights and start gathering all shards into them."""

    @abstractmethod
    def free(self) -> None:
        """Free what `fetch` allocated."""

    def write_back(self) -> None:
        """Set the weights of this rank's shard from its masters."""
        if self.out is not None and isinstance(self.master, Tensor):
            self.out.copy_(self.master)

    def replaced(self) -> None:
        """This rank's shard has come from elsewhere, after `Buffers.open`: neighbours wait until all have theirs."""
        self._moved = True

    def arrive(self) -> None:
        """Wait until this rank's shard has come from other groups, so that neighbours may have it."""
        self._wait()
        if self._moved and self.share.shared_parts is not None:
            self.share.shared_parts.changed()
        self._moved = False

    def ready(self) -> None:
        """Wait until the weights have arrived."""
        self._wait()

    def _wait(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None


class FullPrecision(StorageFormat):
    """Weights in the compute dtype, as they are used: without memory (or with that of a slot) while the bucket is not
    gathered (ZeRO-3). If that is the master dtype, or masters are elsewhere (homed), they are their own masters."""

    def __init__(self, share: BucketShare, precision: Precision, place: Tensor | None):
        super().__init__(share, place)
        numel, dtype, cut = share.bucket.numel, precision.compute, share.cut
        self.weight = memory_at(place, numel, dtype, share.device) if cut.cuts_weights else share.staying(numel, dtype)
        self._kept = share.kept_of(self.weight)
        own = self._own
        alone = share.homed or precision.compute == precision.master
        self.master = own if alone else torch.zeros(len(own), dtype=precision.master, device=own.device)

    @property
    def weight_at(self) -> int:
        return self._kept[0]

    @property
    def weight_kept(self) -> Tensor:
        return self._kept[1]

    @property
    def _own(self) -> Tensor:
        """The weights that this rank updates."""
        return self.weight_kept[self.lo - self.weight_at : self.hi - self.weight_at]

    @property
    def saved(self) -> tuple[int, Tensor]:
        return self._kept

    @property
    def resident(self) -> tuple[int, Tensor]:
        return self._kept

    @property
    def out(self) -> Tensor | None:
        alone = isinstance(self.master, Tensor) and self._own.data_ptr() == self.master.data_ptr()
        return None if alone else self._own

    @property
    def separate_masters(self) -> bool:
        return self.out is not None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weight, self.weight_kept]

    def write(self, first: int, values: Tensor) -> None:
        for kept, at in ((self.weight_kept, self.weight_at), (self.master, self.lo)):
            write_range(kept, at, first, values)

    def gather_groups(self) -> None:
        if self.share.cut.outside:
            first, stop = self.share.part
            part = self.weight_kept[first - self.weight_at : stop - self.weight_at]
            self._gathering, self._moved = self.share.groups.outer.all_gather_into(part, async_op=True), True

    def gather_parts(self) -> None:
        if self.share.cut.level > 0 and not self.share.cut.cuts_weights:
            self.arrive()
            self._gathering = self.share.groups.inner.all_gather_into(self.weight, async_op=True)

    def fetch(self) -> None:
        self.arrive()
        if self.weight_comes:
            allocate(self.weight)
        self._gathering = self.share.groups.gather.all_gather_to(self.weight, self.weight_kept, async_op=True)

    def free(self) -> None:
        if self.weight_comes:
            let_go(self.weight)


class SplitPrecision(FullPrecision):
    """The same with masters that are stored as the weights and the bits that these lack (optim.masters=split): whoever
    changes a master changes the weight. Weights in the master dtype are still their own masters."""

    def __init__(self, share: BucketShare, precision: Precision, place: Tensor | None):
        super().__init__(share, replace(precision, master=precision.compute), place)
        if precision.compute != precision.master and not share.homed:
            self.master = SplitMaster.of(self._own)

    @property
    def out(self) -> Tensor | None:
        return None

    @property
    def separate_masters(self) -> bool:
        return isinstance(self.master, SplitMaster)


def write_range(kept: Tensor | SplitMaster, at: int, first: int, values: Tensor) -> None:
    """kept[0] is element number `at`; values[0] is number `first`."""
    a, b = max(at, first), min(at + len(kept), first + len(values))
    if a < b:
        part, new = kept[a - at : b - at], values[a - first : b - first]
        if isinstance(part, SplitMaster):
            part.store_(new)
        else:
            part.copy_(new)

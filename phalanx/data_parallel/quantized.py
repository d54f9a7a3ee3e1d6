"""Weights that are stored as FP8 values: the rank that updates masters quantizes them, and quantized values are what is
sent and kept.

A scale belongs to a block of a matrix, which may be split between shards of a bucket. The largest value of each block
is compared over the ranks that hold shards, so the quantized values are bit for bit those of the whole weight cast at
once. After they have arrived, each matrix is transposed, for the gradient of the input. ops.quantized.quantizer and
ops.quantized.expert_quantizer define how a linear scales its weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.dtypes import Precision
from phalanx.data_parallel.storage import BucketShare, StorageFormat, allocate, let_go, write_range
from phalanx.layout.buckets import Slot
from phalanx.nn.parameter import Parameter, Quantizer
from phalanx.ops.quantized.quantizer import WeightQuantizer
from phalanx.ops.quantized.recipes import COUNTS, SLOTS, multipliers
from phalanx.ops.quantized.scale_blocks import Blocks


@dataclass(frozen=True)
class Matrix:
    """A weight in a bucket: its quantized values (rows, columns), and their transpose."""

    slot: Slot
    quantizer: WeightQuantizer
    blocks: Blocks
    straight: Tensor
    transposed: Tensor


@dataclass(frozen=True)
class Numbers:
    """For a matrix's blocks: bits of their amaxes, int32, and multipliers, (blocks.count,); counts of what its cast
    lost."""

    bits: Tensor
    multiplier: Tensor
    counts: Tensor


class QuantizedStorage(StorageFormat):
    """Weights stored as quantized values, in buckets whose parameters have WeightQuantizers.

    weight        has memory only while `whole_values`: for matmuls in the compute dtype
    both          (2, numel) uint8: quantized values as they are, and each matrix transposed; at ZeRO-3 without memory
                  (or with that of a slot) while the bucket is not gathered
    quantized_kept    the quantized values that are always here, from element number `quantized_at` on; below ZeRO-3 all
    changed       whether masters have changed since they were quantized
    """

    master: Tensor

    def __init__(self, share: BucketShare, precision: Precision, place: Tensor | None):
        super().__init__(share, place)
        device, numel = share.device, share.bucket.numel
        self.weight = torch.zeros(numel, dtype=precision.compute, device=device)
        self.master = torch.zeros(self.hi - self.lo, dtype=precision.master, device=device)
        if not share.cut.cuts_weights:
            memory = share.staying(2 * numel, torch.uint8)
        else:
            memory = (
                torch.zeros(2 * numel, dtype=torch.uint8, device=device) if place is None else place.view(torch.uint8)
            )
        self.both = memory[: 2 * numel].view(2, numel)
        self.quantized_at, self.quantized_kept = share.kept_of(self.both[0])
        self.whole_values, self.changed, self._came = False, True, False

    def attach(self, params: Sequence[Parameter]) -> None:
        self.matrices = [self._matrix(slot, params[slot.param].quantizer) for slot in self.share.bucket.slots]
        super().attach(params)
        let_go(self.weight)

    def _matrix(self, slot: Slot, quantizer: Quantizer | None) -> Matrix:
        if not isinstance(quantizer, WeightQuantizer):
            raise TypeError(f"{slot.spec.name} is stored as quantized values but has no WeightQuantizer")
        columns = slot.spec.shape[-1]
        straight, transposed = (x[slot.offset : slot.offset + slot.numel] for x in self.both)
        return Matrix(
            slot, quantizer, quantizer.blocks(slot.spec.shape), straight.view(-1, columns), transposed.view(columns, -1)
        )

    # ---- what FullPrecision does with weights

    @property
    def weight_at(self) -> int:
        return self.lo

    @property
    def weight_kept(self) -> Tensor:
        """(hi - lo,) this rank's masters as weights, in new memory."""
        return self.master.to(self.weight.dtype, copy=True)

    @property
    def saved(self) -> tuple[int, Tensor]:
        return self.lo, self.master

    @property
    def separate_masters(self) -> bool:
        return True

    @property
    def resident(self) -> tuple[int, Tensor]:
        return self.quantized_at, self.quantized_kept

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weight, self.both, self.quantized_kept]

    @property
    def out(self) -> Tensor | None:
        return None

    def write(self, first: int, values: Tensor) -> None:
        write_range(self.master, self.lo, first, values)
        self.changed = True

    # ---- quantized values

    @property
    def by(self) -> Any:
        """The implementation of STORED (ops.quantized.stored)."""
        return self.matrices[0].quantizer.stored_by(self.weight)

    def own_part(self, matrix: Matrix) -> tuple[Tensor, Tensor, int]:
        """The masters of a matrix that this rank updates, where their quantized values go, and the number of the first
        element in the matrix."""
        slot = matrix.slot
        a, b = max(slot.offset, self.lo), max(min(slot.offset + slot.numel, self.hi), max(slot.offset, self.lo))
        return (
            self.master[a - self.lo : b - self.lo],
            self.quantized_kept[a - self.quantized_at : b - self.quantized_at],
            a - slot.offset,
        )

    def note_largest(self, matrix: Matrix, numbers: Numbers) -> None:
        x, _, first = self.own_part(matrix)
        self.by.note_largest_(numbers.bits, x, first, matrix.blocks, self.weight.dtype)

    def cast(self, matrix: Matrix, numbers: Numbers, note: bool) -> None:
        """`note`: record the amaxes too."""
        x, quantized, first = self.own_part(matrix)
        bits = numbers.bits if note else None
        self.by.cast_run_(
            quantized,
            x,
            first,
            matrix.blocks,
            numbers.multiplier,
            matrix.quantizer.format,
            self.weight.dtype,
            numbers.counts,
            bits,
        )

    def send(self) -> None:
        """Start sending quantized values to all ranks that keep them."""
        self.changed = False
        inner, outer, cut = self.share.groups.inner, self.share.groups.outer, self.share.cut
        if cut.outside:
            first, stop = self.share.part
            part = self.quantized_kept[first - self.quantized_at : stop - self.quantized_at]
            self._gathering, self._moved = outer.all_gather_into(part, async_op=True), True
        if cut.level > 0 and not cut.cuts_weights:
            self.arrive()
            self._gathering = inner.all_gather_into(self.both[0], async_op=True)
        self._came = not cut.cuts_weights
        if self.whole_values and not cut.cuts_weights:
            self._fill_values()

    def gather_groups(self) -> None:
        self.changed = True

    def gather_parts(self) -> None:
        """Gathered when they are next needed."""

    def fetch(self) -> None:
        self.arrive()
        if self.weight_comes:
            allocate(self.both)
        self._gathering = self.share.groups.gather.all_gather_to(self.both[0], self.quantized_kept, async_op=True)
        self._came = True
        if self.whole_values:
            self._fill_values()

    def ready(self) -> None:
        """Wait until quantized values have arrived, and transpose them."""
        super().ready()
        if self._came:
            self._came = False
            for m in self.matrices:
                self.by.turn_(m.transposed, m.straight)

    def free(self) -> None:
        if self.weight_comes:
            let_go(self.both)
            let_go(self.weight)

    # ---- values

    def keep_values(self, wanted: bool) -> None:
        """Whether the weights themselves are also needed whenever quantized values are here."""
        if wanted == self.whole_values:
            return
        self.whole_values = wanted
        if not wanted:
            let_go(self.weight)
        elif not self.share.cut.cuts_weights:
            self._fill_values()

    def _fill_values(self) -> None:
        """Weights from all ranks' masters."""
        if not self.weight.untyped_storage().nbytes():
            allocate(self.weight)
        share = self.share
        part = torch.empty_like(self.weight[slice(*share.part)])
        part[self.lo - share.part[0] : self.hi - share.part[0]] = self.master
        if share.cut.outside:
            share.groups.outer.all_gather_into(part).wait()
        if share.cut.level > 0:
            share.groups.inner.all_gather_to(self.weight, part).wait()
        else:
            self.weight.copy_(part)


class CastGroup:
    """The quantized buckets of a rank that are sharded over the same ranks, with what it takes to quantize them again,
    comparing amaxes in one call.

    counts (L, SLOTS, COUNTS), seen (L,) fp32: for each linear's weight, what the last cast lost, and its amax on this
    tp rank. `numbers`: of linears, by name
    """

    def __init__(self, buckets: Sequence[QuantizedStorage], numbers: dict[str, int]):
        pairs, device = [(f, m) for f in buckets for m in f.matrices], buckets[0].share.device
        self.buckets, self.seen = buckets, torch.zeros(len(numbers), device=device)
        self.counts = torch.zeros(len(numbers), SLOTS, COUNTS, dtype=torch.int64, device=device)
        self.rooms = sizes = [m.blocks.room for _, m in pairs]
        which = [numbers[m.quantizer.name] for _, m in pairs]
        self.bits = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.multiplier, self.scales, self.transposed_scales = (torch.ones(sum(sizes), device=device) for _ in range(3))
        self.linear_of_block = torch.tensor(which, device=device).repeat_interleave(torch.tensor(sizes, device=device))
        numbers_of = (self.bits, self.multiplier, self.scales, self.transposed_scales)
        bits, multiplier, scales, transposed = (
            [room[: m.blocks.count] for room, (_, m) in zip(t.split(sizes), pairs)] for t in numbers_of
        )
        numbered = map(Numbers, bits, multiplier, (self.counts[i] for i in which))
        self.all = [(f, m, n) for (f, m), n in zip(pairs, numbered)]
        self.by_matrix = [
            (a.view(m.blocks.shape), b.view(m.blocks.shape[::-1])) for (_, m), a, b in zip(pairs, scales, transposed)
        ]
        for (_, m), both in zip(pairs, self.by_matrix):
            straight, other = (quantized.view(m.quantizer.format.dtype) for quantized in (m.straight, m.transposed))
            m.quantizer.hold(straight, other, *both)
        self._current = False  # whether scales came from the current weights, whatever the recipe is

    @property
    def quantizer(self) -> WeightQuantizer:
        """Any of them: they share one recipe."""
        return self.all[0][1].quantizer

    @torch.no_grad()
    def renew(self) -> None:
        """Quantize the masters if they, or what scales them, have changed since the last time, and start sending the
        result."""
        if not any(f.changed for f in self.buckets) and self._current == self.quantizer.current:
            return
        self._current = self.quantizer.current
        if self.buckets[0].share.shared_parts is not None:
            self.buckets[0].share.shared_parts.open()
        given = [scale for _, m, _ in self.all if (scale := m.quantizer.given_scale()) is not None]
        known = len(given) == len(self.all)
        self.bits.zero_()
        self.counts.zero_()
        if known:
            self._scale_by([scale.expand(room) for scale, room in zip(given, self.rooms)])
        else:
            self._find_scales()
        for f, m, n in self.all:
            f.cast(m, n, note=known)
        for f in self.buckets:
            f.send()
        if known:
            self._compare()

    def _find_scales(self) -> None:
        for f, m, n in self.all:
            f.note_largest(m, n)
        self._compare()
        if self.quantizer.shared is not None:
            self.quantizer.shared.all_reduce(self.bits, "max").wait()
        self._scale_by([multipliers(self.bits.view(torch.float32), self.quantizer.format, self.quantizer.recipe.scale)])

    def _compare(self) -> None:
        """Compare the amaxes of all shards of the weights."""
        share = self.buckets[0].share
        share.groups.inner.all_reduce(self.bits, "max").wait()
        if share.cut.outside:
            share.groups.outer.all_reduce(self.bits, "max").wait()
        self.seen.zero_().view(torch.int32).scatter_reduce_(0, self.linear_of_block, self.bits, "amax")

    def _scale_by(self, multiplier: list[Tensor]) -> None:
        torch.cat(multiplier, out=self.multiplier)
        torch.reciprocal(self.multiplier, out=self.scales)
        for scales, transposed in self.by_matrix:
            transposed.copy_(scales.t())


def cast_groups(buckets: Sequence[QuantizedStorage], numbers: dict[str, int]) -> list[CastGroup]:
    """The groups of a rank's quantized buckets, in an order that is the same on all ranks over which they are
    sharded."""
    found: dict[tuple[str, bool], list[QuantizedStorage]] = {}
    for f in buckets:
        found.setdefault((f.share.bucket.axis, f.share.cut.inner > 1), []).append(f)
    return [CastGroup(members, numbers) for members in found.values()]

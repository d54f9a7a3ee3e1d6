"""Buffers: all flat buckets of one rank, and the operations on all of them at once: masters to weights, gradients to a
norm.

Single buckets are handled in `flat`, and in `quantized` if their weights are FP8 values; whole matrices are at their
`homes` during an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.base.dtypes import Precision
from phalanx.comm.mesh import Mesh, Mode
from phalanx.data_parallel.base_storage import BaseStorage, RoundedBase
from phalanx.data_parallel.fixed_order import sum_of_squares
from phalanx.data_parallel.flat import BufferRules, FlatBucket
from phalanx.data_parallel.homes import MatrixHome
from phalanx.data_parallel.quantized import QuantizedStorage
from phalanx.data_parallel.storage import BucketShare, FullPrecision, SplitPrecision, StorageFormat
from phalanx.layout.buckets import Bucket
from phalanx.layout.grid import SumAxis
from phalanx.layout.param import ParamSpec
from phalanx.layout.shards import Sharding
from phalanx.nn.dry_run import pulled_bytes, summed_bytes
from phalanx.nn.parameter import Parameter
from phalanx.ops.optimizer.shard import Shard, zero_state
from phalanx.ops.optimizer.state import Moment
from phalanx.ops.quantized.base_bucket import BaseMatrix
from phalanx.schedule.actions import Close, Free, Gather, Open, Ready, Reduce
from phalanx.schedule.memory_slots import MemorySlots


def _memory_of(
    slots: MemorySlots | None, precision: Precision, device: torch.device
) -> Callable[[int], tuple[Tensor | None, Tensor | None]]:
    """The memory slots of a bucket's weights and gradients; None if it has none."""
    if slots is None:
        return lambda bucket: (None, None)
    weights = [torch.zeros(n, dtype=precision.compute, device=device) for n in slots.weight_sizes]
    grads = [torch.zeros(n, dtype=precision.master, device=device) for n in slots.gradient_sizes]

    def of(bucket: int) -> tuple[Tensor | None, Tensor | None]:
        weight, grad = slots.weights.get(bucket), slots.gradients.get(bucket)
        return None if weight is None else weights[weight], None if grad is None else grads[grad]

    return of


def share_memory(
    buckets: list[Bucket], mesh: Mesh, precision: Precision, sharding: Sharding, mode: Mode
) -> dict[SumAxis, str]:
    """Open the memory through which ranks of one host exchange shards, for the buckets of each axis; returns the
    outcome, as Mesh.share. mode: layout.dp_copies."""
    found: dict[SumAxis, str] = {}
    for axis in sorted({b.axis for b in buckets}):
        cuts = [(b, sharding.cut(b, mesh.grid)) for b in buckets if b.axis == axis]
        parts = sum(pulled_bytes(b, cut, precision.compute.itemsize) for b, cut in cuts)
        found[axis] = mesh.share(
            axis, mode, parts, max(summed_bytes(b, cut, precision.master.itemsize) for b, cut in cuts)
        )
    return found


def storage_of(bucket: Bucket, rules: BufferRules) -> Callable[[BucketShare, Precision, Tensor | None], StorageFormat]:
    """How the weights of a bucket are stored."""
    if bucket.base_format is not None:
        return partial(BaseStorage, kernels=rules.decoding) if rules.training else RoundedBase
    if bucket.coded and rules.training:
        return QuantizedStorage
    return SplitPrecision if rules.split and rules.training else FullPrecision


class Buffers:
    """All buckets of one rank."""

    def __init__(
        self,
        buckets: list[Bucket],
        params: list[Parameter],
        mesh: Mesh,
        rules: BufferRules,
        slots: MemorySlots | None = None,
    ):
        """Uses the memory that `share_memory` has opened."""
        self.mesh, self.in_order = mesh, rules.leaves > 0
        self.flat: list[FlatBucket] = []
        self.homes: dict[int, MatrixHome] = {}
        self.sends_early = False
        self._leaving: list[FlatBucket] = []
        self._precision = rules.precision
        memory = _memory_of(slots, rules.precision, mesh.device)
        for bucket in buckets:  # one after the other: with ZeRO-2 and ZeRO-3 no two are ever whole at the same time
            flat = FlatBucket(bucket, mesh, rules, memory(bucket.id), storage_of(bucket, rules))
            flat.attach(params)
            self.flat.append(flat)

    def open(self) -> None:
        """To be called before shards of weights that neighbours read are changed: waits until all have read them."""
        shared = [f.groups.inner.shared for f in self.flat]
        for parts in {id(s.parts): s.parts for s in shared if s is not None and s.parts is not None}.values():
            parts.open()

    def settle(self, bucket: int) -> FlatBucket:
        """Complete the gradients of a bucket that is applied in backward; returns it, ready to be updated."""
        self.flat[bucket].finish()
        self.open()
        return self.flat[bucket]

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """What the executor does for instructions on buckets."""
        flat = self.flat
        return {
            Gather: self._fetch,
            Ready: self._ready,
            Free: lambda i: flat[i.bucket].storage.free(),
            Open: lambda i: flat[i.bucket].open(),
            Reduce: lambda i: flat[i.bucket].reduce(),
            Close: self._close,
        }

    def _fetch(self, i: Gather) -> None:
        for home in self.homes.values():
            home.fetched(i.bucket)
        self.flat[i.bucket].storage.fetch()

    def _ready(self, i: Ready) -> None:
        for home in self.homes.values():
            home.reached(i.bucket)
        self.flat[i.bucket].storage.ready()

    def _close(self, i: Close) -> None:
        flat = self.flat[i.bucket]
        flat.close(i.last)
        if i.last and flat.homed and self.sends_early and not flat.between_stages:
            self._leaving.append(flat)
            self._leave(1 if flat.summing else 0)

    def _leave(self, but: int = 0) -> None:
        """Start sending gradients to homes, of all buckets that are due but the last `but`: a sum over groups that has
        just begun is given until the next bucket is due."""
        while len(self._leaving) > but:
            flat = self._leaving.pop(0)
            flat.wait_sum()
            self.homes[flat.bucket.updater.number].leave(flat.bucket.id)

    @contextmanager
    def sending_early(self) -> Iterator[None]:
        """Inside, gradients of whole matrices are sent to their homes in backward, as soon as those of a bucket are
        complete: nobody changes gradients between backward and the update."""
        self._leaving.clear()
        self.sends_early = True
        try:
            yield
        finally:
            self.sends_early = False

    def make_home(self, updater: int, matrices: Sequence[ParamSpec], cost: Callable[[ParamSpec], float]) -> None:
        """Assign homes on this stage's ranks to the whole matrices that this optimizer takes, by the cost of updating
        them; called on all ranks alike."""
        flat = [f for f in self.flat if f.homed and f.bucket.updater.number == updater]
        self.homes[updater] = MatrixHome(matrices, flat, self.mesh, self._precision, cost)

    @property
    def holders(self) -> list[FlatBucket | MatrixHome]:
        """Everything that holds weights or masters."""
        return [*self.flat, *self.homes.values()]

    @property
    def encoded(self) -> list[tuple[BaseStorage | RoundedBase, BaseMatrix]]:
        """Frozen matrices of lora.base of which this rank keeps anything, each with what keeps it."""
        base = [f.storage for f in self.flat if isinstance(f.storage, BaseStorage | RoundedBase)]
        return [(storage, m) for storage in base for m in storage.matrices if storage.wants(m)]

    @property
    def separate_masters(self) -> bool:
        """Whether any master is not the weight itself."""
        return bool(self.homes) or any(f.storage.separate_masters for f in self.flat)

    @property
    def masters(self) -> list[FlatBucket | MatrixHome]:
        """The holders whose `master` is authoritative."""
        return [*(f for f in self.flat if not f.homed), *self.homes.values()]

    def shards(self, updater: int, state: Mapping[str, Moment], dtype: torch.dtype | None = None) -> list[Shard]:
        """What an optimizer (layout.buckets.Updater) updates, with its state in `dtype`; None: that of the masters."""
        flat = [f for f in self.flat if f.bucket.learns and not f.homed and f.bucket.updater.number == updater]
        homes = [self.homes[updater]] if updater in self.homes else []
        return [
            Shard(f.bucket, f.lo, f.hi, f.own, f.master, f.own_grad, zero_state(state, f.master, dtype), f.storage.out)
            for f in flat
        ] + [
            Shard(h.bucket, h.lo, h.hi, h.own, h.master, h.master[:0], zero_state(state, h.master, dtype), home=h)
            for h in homes
        ]

    def begin(self, micro_batches: int) -> None:
        """A step begins that has `micro_batches` micro-batches on this rank."""
        for f in self.flat:
            if f.tree is not None:
                f.tree.begin(micro_batches)

    def done_with(self, stage: int, segment: int) -> None:
        """A segment's backward of one micro-batch is done."""
        for f in self.flat:
            if f.tree is not None:
                f.tree.done_with((stage, segment))

    def zero_grads(self) -> None:
        for f in (f for f in self.flat if not f.applied):
            f.grad_kept.zero_()

    def zero_rest(self) -> None:
        for f in (f for f in self.flat if not f.applied):
            f.zero_rest()

    def finish(self) -> None:
        """Complete all reductions. Those shared between stages come last, by name, so in the same order on each of
        their ranks."""
        for f in (f for f in self.flat if not f.applied):  # these were complete when they were applied
            f.finish()
        self._leave()
        for f in sorted((f for f in self.flat if f.between_stages), key=lambda f: f.bucket.slots[0].spec.name):
            f.sum_stages()

    def grad_norm(self) -> Tensor:
        """() float64: the norm of the whole model's gradient, each global element counted once, the same on all ranks.

        Summed in float64, so that in practice it does not depend on how elements are placed in buckets.
        """
        views = [v for f in self.flat for v in f.counted()]
        if self.in_order:
            return sum_of_squares(views, self.mesh.world, self.mesh.device).sqrt()
        norms = torch._foreach_norm(views, 2, dtype=torch.float64) if views else []
        squares = [n.square() for n in norms]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        return self.mesh.world.all_reduce(total).wait().sqrt()

    def gather(self) -> None:
        """Start sending what ranks have updated to all that keep it: last what comes from homes, which is on its way
        (MatrixHome.send_weights), and of which the last bucket arrives in the next forward."""
        others = [f for f in self.flat if not f.homed]
        for f in others:
            f.storage.gather_groups()
        for f in others:
            f.storage.gather_parts()
        for home in self.homes.values():
            home.gather()

    def publish(self) -> None:
        """Write the masters back to the weights and start gathering them; the optimizer's update has already done the
        former. Unlike after an update, what comes from homes has arrived."""
        self.open()
        for f in self.flat:
            f.storage.write_back()
        for home in self.homes.values():
            for bucket in home.order:
                home.send_weights(bucket)
        self.gather()
        for home in self.homes.values():
            home.finish()

    def ready(self) -> None:
        """Wait until all weights have arrived, for those who read them outside a program."""
        for home in self.homes.values():
            home.finish()
        for f in self.flat:
            f.storage.ready()

"""Flat buffers of weights and gradients, and the one state machine that reduces, shards and gathers them.

Level 0: gradients are summed over dp (those of experts over edp), each rank updates everything. Level 1: each rank gets the sum
of its shard, updates it and all ranks gather the weights again, asynchronously, bucket by bucket, until the next forward needs
them (Rajbhandari et al., "ZeRO", 2020). A bucket goes through: accumulating -> reducing -> reduced -> (update) -> gathering -> ready.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.base.dtypes import Precision
from phalanx.comm.axis import Axis, Work
from phalanx.comm.mesh import Mesh
from phalanx.data_parallel.fixed_order import GradientTree, sum_of_squares, sum_over, sum_replicas
from phalanx.layout.buckets import Bucket, piece_ranges
from phalanx.layout.param import Replica
from phalanx.ops.shard import Shard


class FlatBucket:
    """One bucket on one rank: `weight` (numel,) in the compute dtype, `grad` (numel,) in the master dtype.

    Without training there are no gradients, and the weights are their own masters. So it is with parameters that are not trained:
    they are whole on every rank, in the master dtype. `leaves`: most micro-batches of a step, whose gradients are then added up in
    a fixed order; 0: in whatever order is fastest.
    """

    def __init__(self, bucket: Bucket, mesh: Mesh, precision: Precision, level: int, training: bool = True, leaves: int = 0):
        if not bucket.trained:
            precision = Precision(precision.master, precision.master)
        elif not training:
            precision = Precision(precision.compute, precision.compute)
        training = training and bucket.trained
        self.bucket, self.mesh, self.level, self.training = bucket, mesh, level if training else 0, training
        device, level = mesh.device, self.level
        self.weight = torch.zeros(bucket.numel, dtype=precision.compute, device=device)
        self.grad = torch.zeros(bucket.numel if training else 0, dtype=precision.master, device=device)
        self.axis = mesh.along(bucket.axis)
        self.own = bucket.shard(self.axis.index, self.axis.size)
        self.lo, self.hi = self.own if level >= 1 else (0, bucket.numel)
        own = self.weight[self.lo : self.hi]
        self.master = own if precision.compute == precision.master else torch.zeros(len(own), dtype=precision.master, device=device)
        self.sums = self._sums() if training else []
        self.tree = GradientTree(self.grad, leaves) if training and leaves else None
        self.deferred = any(r.axis == "pp" for r in self._replicas())
        self._reducing: Work | None = None
        self._gathering: Work | None = None

    def _replicas(self) -> list[Replica]:
        return [r for slot in self.bucket.slots for p in slot.spec.pieces for r in p.replicas]

    def _sums(self) -> list[tuple[Axis, list[Tensor]]]:
        """Gradient ranges to be summed over a replica's ranks, per sub-axis, beside the sum over dp."""
        parts: dict[Replica, list[Tensor]] = {}
        for slot in self.bucket.slots:
            if any(p.replicas for p in slot.spec.pieces):
                for piece, (a, b) in zip(slot.spec.pieces, piece_ranges(slot)):
                    for replica in piece.replicas:
                        parts.setdefault(replica, []).append(self.grad[a:b])
        order = sorted(parts, key=lambda r: (r.axis, r.members))
        return [(self.mesh.sub(r), parts[r]) for r in order]

    def attach(self, params: list[nn.Parameter]) -> None:
        """Make the parameters of this bucket views of the flat weights, their `.grad` views of the flat gradients."""
        for slot in self.bucket.slots:
            p = params[slot.param]
            view = slice(slot.offset, slot.offset + slot.numel)
            p.data = self.weight[view].view(slot.spec.shape)
            if self.training:
                p.grad_dtype = self.grad.dtype  # type: ignore[attr-defined]
                p.grad = self.grad[view].view(slot.spec.shape)

    def reduce(self) -> None:
        """Start summing the gradients. Sums between stages wait for `finish`: their ranks get here at different times."""
        if self.training and not self.deferred:
            self._start_reduce()

    def _start_reduce(self) -> None:
        if self.tree is not None:
            self._reducing = self._sum_in_order()
            return
        for axis, views in self.sums:
            packed = views[0] if len(views) == 1 else torch.cat(views)
            axis.all_reduce(packed).wait()
            if len(views) > 1:
                for view, part in zip(views, packed.split([len(v) for v in views])):
                    view.copy_(part)
        reduce = self.axis.reduce_scatter_within if self.level >= 1 else self.axis.all_reduce
        self._reducing = reduce(self.grad, async_op=True)

    def _sum_in_order(self) -> Work:
        """First over the bucket's axis, so that the tree over micro-batches is whole before replicas are added up."""
        sum_over(self.axis, self.grad, whole=self.level == 0, inner=self.mesh.grid.cp)
        for axis, views in self.sums:
            for view in (own for v in views if len(own := self._within(v))):
                view.copy_(sum_replicas(axis, view))
        return Work(self.grad[self.lo : self.hi])

    def _within(self, view: Tensor) -> Tensor:
        """The elements of a view of `grad` that this rank updates."""
        at = view.storage_offset()
        return view[max(0, self.lo - at) : max(0, self.hi - at)]

    def finish(self) -> None:
        """Wait until the sum over the bucket's axis is there (in `grad[lo:hi]`)."""
        if not self.training:
            return
        if self._reducing is None:
            self._start_reduce()
        self._reducing.wait()  # type: ignore[union-attr]
        self._reducing = None

    def counted(self) -> list[Tensor]:
        """The gradient elements that this rank counts in the norm: its part, without replicas that another rank counts."""
        if not self.training:
            return []
        lo, hi = self.own
        views, at = [], lo
        skipped = sorted(r for slot in self.bucket.slots if any(p.replicas for p in slot.spec.pieces)
                         for p, r in zip(slot.spec.pieces, piece_ranges(slot)) if not p.is_writer(self.mesh.at))  # fmt: skip
        for a, b in [*skipped, (hi, hi)]:
            if min(a, hi) > at:
                views.append(self.grad[at : min(a, hi)])
            at = max(at, b)
        return views

    @property
    def out(self) -> Tensor | None:
        """The weights of this rank's masters, where they are not the masters themselves."""
        own = self.weight[self.lo : self.hi]
        return None if own.data_ptr() == self.master.data_ptr() else own

    def write_back(self) -> None:
        """Weights of this rank's part from its masters."""
        if self.out is not None:
            self.out.copy_(self.master)

    def gather(self) -> None:
        """Start gathering the weights of all parts."""
        if self.level >= 1:
            self._gathering = self.axis.all_gather_into(self.weight, async_op=True)

    def ready(self) -> None:
        """Wait until the weights have arrived."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None


class Buffers:
    """All buckets of one rank."""

    def __init__(self, buckets: list[Bucket], params: list[nn.Parameter], mesh: Mesh, precision: Precision, level: int, training: bool = True,
                 leaves: int = 0):  # fmt: skip
        self.mesh, self.in_order = mesh, leaves > 0
        self.flat = [FlatBucket(b, mesh, precision, level, training, leaves) for b in buckets]
        for f in self.flat:
            f.attach(params)

    def shards(self) -> list[Shard]:
        """What the optimizer updates; moments start at zero."""
        made = []
        for f in self.flat:
            if not f.bucket.trained:
                continue
            grad = f.grad[f.lo : f.hi]
            made.append(Shard(f.bucket, f.lo, f.hi, f.master, grad, torch.zeros_like(f.master), torch.zeros_like(f.master), f.out))
        return made

    def masters_from_weights(self) -> None:
        """Start (or load weights): the masters take the weights' values."""
        for f in self.flat:
            f.master.copy_(f.weight[f.lo : f.hi])

    def begin(self, micro_batches: int) -> None:
        """A step of so many micro-batches on this rank begins."""
        for f in self.flat:
            if f.tree is not None:
                f.tree.begin(micro_batches)

    def done_with(self, stage: int, run: int) -> None:
        """A run's backward of one micro-batch is over; of the runs that share a bucket, the first of the model is the last in backward."""
        for f in self.flat:
            if f.tree is not None and min(f.bucket.users) == (stage, run):
                f.tree.leaf()

    def zero_grads(self) -> None:
        for f in self.flat:
            f.grad.zero_()

    def zero_rest(self) -> None:
        """Zero the gradients that are not this rank's to update (the optimizer leaves its own at zero)."""
        for f in self.flat:
            f.grad[: f.lo].zero_()
            f.grad[f.hi :].zero_()

    def finish(self) -> None:
        """Complete all reductions; those shared between stages last, by name: in the same order on each of their ranks."""
        for f in sorted(self.flat, key=lambda f: (f.deferred, f.bucket.slots[0].spec.name if f.deferred else "")):
            f.finish()

    def grad_norm(self) -> Tensor:
        """() float64: the norm of the whole model's gradient, each global element counted once, the same on all ranks.

        Summed in float64, so that in practice it does not depend on how the elements lie in buckets.
        """
        views = [v for f in self.flat for v in f.counted()]
        if self.in_order:
            return sum_of_squares(views, self.mesh.world, self.mesh.device).sqrt()
        norms = torch._foreach_norm(views, 2, dtype=torch.float64) if views else []
        squares = [n.square() for n in norms]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        return self.mesh.world.all_reduce(total).wait().sqrt()

    def gather(self) -> None:
        for f in self.flat:
            f.gather()

    def publish(self) -> None:
        """Write the masters back to the weights and start gathering them; the optimizer's update has done the first already."""
        for f in self.flat:
            f.write_back()
        self.gather()

    def ready(self) -> None:
        for f in self.flat:
            f.ready()

"""FlatBucket: flat buffers of one bucket's weights and gradients, and the one state machine that reduces, shards and
gathers them.

The ranks that sum a bucket's gradients form groups (layout.shards). Within a group the bucket is sharded by ZeRO stage
(Rajbhandari et al., "ZeRO", 2020); all groups hold the same:

ZeRO stage  optimizer state    gradients                            weights
0           whole              whole, all-reduced                   whole
1           this rank's shard  whole, reduce-scattered              whole, gathered after the update
2           this rank's shard  its shard; whole from open to close  as 1
3           this rank's shard  as 2                                 its shard; whole from fetch to free

A bucket goes through: (open ->) accumulating -> reducing -> closed, once per micro-batch at ZeRO-2 and ZeRO-3 and once
per step below; then -> summed over groups and over stages -> (update) -> gathering -> ready. Quantized values of the
weights may be gathered instead (data_parallel.quantized). Nothing here waits for the device: `wait` of a collective
makes the current stream wait, and memory is freed only after that, in the order of this stream.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.dtypes import Precision
from phalanx.comm.axis import Axis, Work
from phalanx.comm.mesh import Groups, Mesh
from phalanx.data_parallel.fixed_order import GradientTrees, sum_replicas, sum_users
from phalanx.data_parallel.storage import BucketShare, FullPrecision, StorageFormat, allocate, let_go, memory_at
from phalanx.layout.buckets import Bucket, replica_ranges
from phalanx.layout.param import Replica
from phalanx.layout.shards import Sharding
from phalanx.nn.parameter import Parameter
from phalanx.ops.op import Kernels


@dataclass(frozen=True)
class BufferRules:
    """How the buckets of a model are stored and reduced.

    precision  dtypes of weights and masters
    sharding   which of weights, gradients and state are sharded across data-parallel ranks
    training   False: weights alone, which are their own masters
    leaves     the largest number of micro-batches in a step, if their gradients are added up in a fixed order, and stay
               whole at every ZeRO stage; 0: in whatever order is fastest
    sources    how many micro-batches experts process at once (ops.experts.exchange); the gradients of all but the first
               are in `FlatBucket.further`
    together   the largest number of users of a weight on one of the stages that share it
    split      whether masters are stored as the bits that the weights lack (optim.masters=split)
    decoding   which implementation decodes frozen weights of lora.base
    """

    precision: Precision
    sharding: Sharding
    training: bool = True
    leaves: int = 0
    sources: int = 0
    together: int = 1
    split: bool = False
    decoding: Kernels = "auto"


class FlatBucket:
    """One bucket on one rank.

    storage        how the weights are stored (data_parallel.storage); weight, master: from it
    grad           (numel,) in the master dtype, of which the parameters' `.grad` are views; without memory (or with
                   that of a slot, which another bucket may use) while the bucket is not open (ZeRO-2 and ZeRO-3)
    grad_kept      the gradients that are always on this rank, from element number `grad_at` on; below ZeRO-2 all of
                   `grad`
    part           elements that this rank keeps of its group's bucket; lo, hi: those that it updates; own: those that
                   only this rank counts
    applied        whether gradients are applied in backward (optim.in_backward): neither `grad` nor `grad_kept` has
                   memory before `open` and after `forget`
    homed          whether masters are at the homes of whole matrices instead (data_parallel.homes): `master` is then
                   what arrives from there, the weights themselves
    values_dtype   that of masters, in which initial values are generated
    tree           where gradients are added up in a fixed order (BufferRules.leaves)
    slots          memory slots that weights and gradients always use, and other buckets use when they are not here;
                   None: memory is allocated and freed each time

    Without training there are no gradients, and the weights are their own masters. The same applies to frozen
    parameters and to those that are not trained; the latter are whole on every rank, in the master dtype.
    """

    def __init__(
        self,
        bucket: Bucket,
        mesh: Mesh,
        rules: BufferRules,
        slots: tuple[Tensor | None, Tensor | None] = (None, None),
        storage: Callable[[BucketShare, Precision, Tensor | None], StorageFormat] = FullPrecision,
    ):
        precision = rules.precision
        if not bucket.trained:
            precision = Precision(precision.master, precision.master)
        elif bucket.frozen or not rules.training:
            precision = Precision(precision.compute, precision.compute)
        self.bucket, self.mesh, self.training, device = bucket, mesh, rules.training and bucket.learns, mesh.device
        self.homed, self.values_dtype = self.training and bucket.updater.matrix, precision.master
        self.axis, self.cut = mesh.along(bucket.axis), rules.sharding.cut(bucket, mesh.grid, rules.training)
        self.groups = mesh.groups(bucket.axis) if self.cut.inner > 1 else Groups(mesh.alone, self.axis, mesh.alone)
        share = BucketShare(bucket, self.cut, self.groups, device, self.homed)
        self.level, self.part = self.cut.level, share.part
        self.applied = self.cut.applied and self.training
        self.grad_comes = (self.cut.cuts_gradients or self.applied) and slots[1] is None
        self.storage = storage(share, precision, slots[0])
        self.weight, self.master = self.storage.weight, self.storage.master
        self.lo, self.hi, self.own = self.storage.lo, self.storage.hi, self.storage.own
        self.grad = memory_at(slots[1], bucket.numel if self.training else 0, precision.master, device)
        self.grad_at, self.grad_kept = (
            (self.part[0], torch.zeros_like(self.grad[slice(*self.part)]))
            if self.cut.cuts_gradients
            else (0, self.grad)
        )
        self._own_grad = self._grads(self.lo, self.hi)
        self.sums = self._sums() if self.training else []
        grid, self.together = mesh.grid, rules.together
        # ranks with parts of a micro-batch
        self.shared_by = grid.cp if bucket.axis == "dp" else max(1, grid.tp * grid.cp // (grid.ep * grid.etp))
        separate_masters = rules.sources - 1 if bucket.axis == "edp" and self.training else 0
        self.further = [torch.zeros_like(self.grad) for _ in range(separate_masters)]
        self.tree = (
            GradientTrees([self.grad, *self.further], sorted(bucket.users), rules.leaves)
            if self.training and rules.leaves
            else None
        )
        self._reduced = False  # since the last `finish`
        self._reducing: Work | None = None
        self._broadcasting: Work | None = None

    def _sums(self) -> list[tuple[Axis, list[Tensor]]]:
        """Gradient ranges to be summed over the ranks of a stage that hold a replica, by sub-axis, in addition to the
        sum over dp."""
        return [
            (self.mesh.sub(r), [self.grad[a:b] for a, b in ranges]) for r, ranges in self._replicas() if r.axis != "pp"
        ]

    def _replicas(self) -> list[tuple[Replica, list[tuple[int, int]]]]:
        """Ranges of the bucket by replica axis."""
        found: dict[Replica, list[tuple[int, int]]] = {}
        for slot in self.bucket.slots:
            for piece, elements in replica_ranges(slot):
                for replica in piece.replicas:
                    found.setdefault(replica, []).append(elements)
        return sorted(found.items(), key=lambda item: (item[0].axis, item[0].members))

    @property
    def between_stages(self) -> bool:
        """Whether other stages also hold some of these parameters."""
        return any(r.axis == "pp" for r, _ in self._replicas())

    def attach(self, params: list[Parameter]) -> None:
        """Make the parameters of this bucket views of the flat weights, their `.grad` views of the flat gradients."""
        for slot in self.bucket.slots:
            p = params[slot.param]
            view = slice(slot.offset, slot.offset + slot.numel)
            p.data = self.weight[view].view(slot.spec.shape)
            if self.training:
                p.grad_dtype = self.grad.dtype
                p.grad = self.grad[view].view(slot.spec.shape)
            for i, extra in enumerate(p.extra_grads):
                extra.data = p.data
                if self.training:
                    extra.grad_dtype = self.grad.dtype
                    extra.grad = self.further[i][view].view(slot.spec.shape)
        if self.grad_comes:
            let_go(self.grad)
        if self.applied:
            let_go(self.grad_kept)  # its views stay, but no others can be made until it is open
        self.storage.attach(params)

    def write(self, first: int, values: Tensor) -> None:
        """As StorageFormat.write."""
        self.storage.write(first, values)

    # ---- gradients

    def open(self) -> None:
        """Give the gradients memory, zero."""
        if self.grad_comes:
            allocate(self.grad)
        self.grad.zero_()
        if self.applied and self.cut.cuts_gradients:
            allocate(self.grad_kept)
            self.grad_kept.zero_()

    def reduce(self) -> None:
        """Start summing the gradients over the group."""
        if not self.training:
            return
        self._reduced = True
        if self.tree is not None:
            self._sum_in_order()
            return
        for axis, views in self.sums:
            sum_together(axis, views)
        if self.level == 0:
            self._share()
        else:
            onto = self.grad_kept if self.cut.cuts_gradients else None
            self._reducing = self.groups.inner.reduce_scatter_within(self.grad, async_op=True, onto=onto)

    def _sum_in_order(self) -> None:
        """Sum over the bucket's axis first, so that the tree over micro-batches is complete before replicas are added
        up."""
        self.tree.sum_over(self.groups.inner, self.groups.outer, not self.cut.outside, self.shared_by)  # type: ignore[union-attr]
        self.tree.join_users()  # type: ignore[union-attr]
        for axis, views in self.sums:
            for view in (own for v in views if len(own := self._within(v))):
                view.copy_(sum_replicas(axis, view))

    def _within(self, view: Tensor) -> Tensor:
        """The elements of a view of `grad` that this rank updates."""
        at = view.storage_offset()
        return view[max(0, self.lo - at) : max(0, self.hi - at)]

    def close(self, last: bool) -> None:
        """Wait for the group's sum and keep this rank's shard; after the `last` micro-batch of the step, start the sum
        over groups. Where `reduce` itself is the whole sum, there is nothing left to do."""
        if self._reducing is None:
            return
        summed = self._reducing.wait()
        self._reducing = None
        if self.cut.cuts_gradients and summed is not self.grad_kept:
            self.grad_kept.add_(summed)
        if self.grad_comes and self.cut.cuts_gradients:
            let_go(self.grad)
        if last:
            self._share()

    def _share(self) -> None:
        part = self.grad_kept[self.part[0] - self.grad_at : self.part[1] - self.grad_at]
        share = self.groups.outer.reduce_scatter_within if self.cut.outside else self.groups.outer.all_reduce
        self._broadcasting = share(part, async_op=True)

    def finish(self) -> None:
        """Wait until the sum over the bucket's axis is complete (in `own_grad`). In a loop without a schedule nothing
        has started it."""
        if not self._reduced:
            self.reduce()
        self._reduced = False
        self.close(last=True)
        self.wait_sum()

    @property
    def summing(self) -> bool:
        """Whether a sum over groups has begun that takes time, and is not waited for."""
        return self._broadcasting is not None and self.groups.outer.size > 1

    def wait_sum(self) -> None:
        """Wait for the sum over groups, if it has begun."""
        if self._broadcasting is not None:
            self._broadcasting.wait()
            self._broadcasting = None

    def forget(self) -> None:
        """Free gradients that have been applied."""
        let_go(self.grad)
        let_go(self.grad_kept)

    def sum_stages(self) -> None:
        """Add up the gradients that stages hold for the same parameters. Their buckets of these are alike, and so are
        the shards of their ranks."""
        for replica, ranges in self._replicas() if self.training else ():
            views = [self._grads(max(a, self.lo), min(b, self.hi)) for a, b in ranges]
            if replica.axis == "pp" and self.tree is None:
                sum_together(self.mesh.sub(replica), views)
            elif replica.axis == "pp":
                for view in (v for v in views if len(v)):
                    at = view.storage_offset()
                    mine = [first[at : at + len(view)] for first, *_ in self.tree.sums]  # type: ignore[union-attr]
                    view.copy_(sum_users(self.mesh.sub(replica), mine, self.together))

    def _grads(self, a: int, b: int) -> Tensor:
        """Elements a..b of the kept gradients; none if b <= a."""
        return self.grad_kept[a - self.grad_at : max(a, b) - self.grad_at]

    @property
    def own_grad(self) -> Tensor:
        """(hi - lo,) the gradients that the optimizer reads."""
        return self._own_grad if self.applied else self._grads(self.lo, self.hi)

    def zero_rest(self) -> None:
        """Zero the gradients that are not this rank's to update (the optimizer leaves its own at zero)."""
        if self.training:
            self.grad_kept[: self.lo - self.grad_at].zero_()
            self.grad_kept[self.hi - self.grad_at :].zero_()

    def counted(self) -> list[Tensor]:
        """The gradient elements that this rank counts in the norm: its shard, without replicas that another rank
        counts."""
        if not self.training:
            return []
        lo, hi = self.own
        views, at = [], lo
        skipped = sorted(
            r
            for slot in self.bucket.slots
            for p, r in replica_ranges(slot)
            if not p.is_writer(self.mesh.grid, self.mesh.at)
        )
        for a, b in [*skipped, (hi, hi)]:
            if min(a, hi) > at:
                views.append(self._grads(at, min(a, hi)))
            at = max(at, b)
        return views


def sum_together(axis: Axis, views: list[Tensor]) -> None:
    """Sum contiguous tensors over an axis, in one call."""
    views = [v for v in views if len(v)]
    if not views:
        return
    packed = views[0] if len(views) == 1 else torch.cat(views)
    axis.all_reduce(packed).wait()
    if len(views) > 1:
        for view, part in zip(views, packed.split([len(v) for v in views])):
            view.copy_(part)

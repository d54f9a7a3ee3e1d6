"""How a bucket is sharded over the ranks that sum its gradients: groups of neighbours hold its shards, and several
groups hold copies.

Knows sizes and ranges only. The mesh says who communicates with whom; the state machine (data_parallel) says what is
held when.
"""

from __future__ import annotations

from phalanx.base.dataclass import dataclass
from phalanx.layout.buckets import Bucket
from phalanx.layout.config import LayoutConfig
from phalanx.layout.grid import Grid, SumAxis

Range = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """The sharding of one bucket of `numel` elements: `inner` neighbouring ranks hold its shards, and `outer` such
    groups hold copies.

    level    ZeRO stage. 0: everything on each rank; 1: optimizer state sharded; 2: gradients too; 3: weights too
    outside  the optimizer state of a shard is sharded further, over the groups. So are always the gradients of matrices
             that are updated as a whole: one rank sends each element to its home (layout.homes)
    in_order gradients are summed over micro-batches before ranks, whatever the level, so they stay whole
    learns   whether there are gradients
    applied  gradients are applied in backward, and have memory only until then
    """

    numel: int
    level: int
    inner: int
    outer: int
    outside: bool = False
    in_order: bool = False
    learns: bool = True
    applied: bool = False

    @property
    def cuts_gradients(self) -> bool:
        return self.level >= 2 and self.learns and not self.in_order

    @property
    def chained(self) -> bool:
        """Whether gradients are summed within a group first, and then over groups."""
        return self.level >= 1 and self.outer > 1 and self.learns and not self.in_order

    @property
    def cuts_weights(self) -> bool:
        return self.level >= 3

    def part(self, inner: int) -> Range:
        """Elements that rank number `inner` of a group keeps."""
        size = self.numel // self.inner
        return inner * size, (inner + 1) * size

    def own(self, inner: int, outer: int) -> Range:
        """Elements that only this rank counts in norms and writes to checkpoints."""
        size = self.numel // (self.inner * self.outer)
        first = (inner * self.outer + outer) * size
        return first, first + size

    def updated(self, inner: int, outer: int) -> Range:
        """Elements whose optimizer state this rank holds."""
        return self.own(inner, outer) if self.outside else self.part(inner)


@dataclass(frozen=True)
class Sharding:
    """The sharding that the config asks for. group: number of neighbouring ranks of dp (x cp) over which a bucket is
    sharded; None: all of them. in_order, applied: as in Cut."""

    level: int = 0
    group: int | None = None
    outside: bool = False
    in_order: bool = False
    applied: bool = False

    @staticmethod
    def of(layout: LayoutConfig, in_order: bool, applied: bool) -> Sharding:
        return Sharding(layout.sharding, layout.shard_group, layout.shard_across == "optimizer", in_order, applied)

    def group_size(self, axis: SumAxis, grid: Grid) -> int:
        """Ranks in a group. A group for experts consists of ranks of the dense groups: as many edp ranks as there are
        among them."""
        if self.level == 0:
            return 1
        if self.group is None or axis != "edp":
            return self.group or grid.sum_size(axis)
        return max(1, self.group * grid.tp // (grid.ep * grid.etp))

    def cut(self, bucket: Bucket, grid: Grid, training: bool = True) -> Cut:
        """The sharding of a bucket. It is not sharded (ZeRO-0) if a shard would be the whole, or if nothing is
        trained. Frozen weights are sharded at ZeRO-3."""
        size = grid.sum_size(bucket.axis)
        if not (training and bucket.trained) or (bucket.frozen and self.level < 3):
            return Cut(bucket.numel, 0, 1, size, learns=bucket.learns)
        inner = self.group_size(bucket.axis, grid)
        if bucket.frozen:
            return Cut(bucket.numel, 3 if inner > 1 else 0, inner, size // inner, learns=False)
        level, outside = self.level if inner > 1 else 0, self.outside or bucket.updater.matrix
        return Cut(bucket.numel, level, inner, size // inner, outside, self.in_order, applied=self.applied)

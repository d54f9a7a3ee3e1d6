"""How a bucket is cut over the ranks that sum its gradients: in groups of neighbours that hold its parts, and copies
of such groups.

Knows sizes and ranges only; who talks to whom is the mesh's, what is held when is the state machine's (data_parallel).
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.layout.buckets import Bucket
from phalanx.layout.config import LayoutConfig
from phalanx.layout.grid import Grid, SumAxis

Range = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """Of one bucket of `numel` elements: `inner` neighbouring ranks hold its parts, `outer` such groups hold the
    same ones.

    level    0: all of everything on each rank; 1: optimizer state in parts; 2: gradients too; 3: weights too
    outside  the optimizer state of a part is cut once more, over the groups; so are always the gradients of matrices
             that are updated as a whole: each element leaves from one rank for its home (layout.homes)
    in_order gradients are added up over micro-batches before ranks, whatever the level: they stay whole
    learns   there are gradients at all
    """

    numel: int
    level: int
    inner: int
    outer: int
    outside: bool = False
    in_order: bool = False
    learns: bool = True

    @property
    def cuts_gradients(self) -> bool:
        return self.level >= 2 and self.learns and not self.in_order

    @property
    def chained(self) -> bool:
        """Whether gradients are summed over a group first, and then over groups."""
        return self.level >= 1 and self.outer > 1 and self.learns and not self.in_order

    @property
    def cuts_weights(self) -> bool:
        return self.level >= 3

    def part(self, inner: int) -> Range:
        """Elements that rank number `inner` of a group keeps."""
        size = self.numel // self.inner
        return inner * size, (inner + 1) * size

    def own(self, inner: int, outer: int) -> Range:
        """Elements that are counted in norms and written to checkpoints by this rank alone."""
        size = self.numel // (self.inner * self.outer)
        first = (inner * self.outer + outer) * size
        return first, first + size

    def updated(self, inner: int, outer: int) -> Range:
        """Elements whose optimizer state this rank has."""
        return self.own(inner, outer) if self.outside else self.part(inner)


@dataclass(frozen=True)
class Sharding:
    """What the config asks for. group: neighbouring ranks of dp (x cp) that cut a bucket among them; None: all of
    them. in_order: as of Cut."""

    level: int = 0
    group: int | None = None
    outside: bool = False
    in_order: bool = False

    @staticmethod
    def of(layout: LayoutConfig, in_order: bool) -> Sharding:
        return Sharding(layout.sharding, layout.shard_group, layout.shard_across == "optimizer", in_order)

    def group_size(self, axis: SumAxis, grid: Grid) -> int:
        """Ranks of a group. A group of experts lies on the ranks of the dense groups: as many of edp as there are
        among them."""
        if self.level == 0:
            return 1
        if self.group is None or axis != "edp":
            return self.group or grid.sum_size(axis)
        return max(1, self.group * grid.tp // (grid.ep * grid.etp))

    def cut(self, bucket: Bucket, grid: Grid, training: bool = True) -> Cut:
        """Where a part would be the whole, and where nothing is trained, a bucket is not sharded: level 0. Frozen
        weights are cut at level 3."""
        size = grid.sum_size(bucket.axis)
        if not (training and bucket.trained) or (bucket.frozen and self.level < 3):
            return Cut(bucket.numel, 0, 1, size, learns=bucket.learns)
        inner = self.group_size(bucket.axis, grid)
        if bucket.frozen:
            return Cut(bucket.numel, 3 if inner > 1 else 0, inner, size // inner, learns=False)
        level, outside = self.level if inner > 1 else 0, self.outside or bucket.updater.matrix
        return Cut(bucket.numel, level, inner, size // inner, outside, self.in_order)

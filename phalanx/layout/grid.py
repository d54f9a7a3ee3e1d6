"""Rank <-> coordinates of the mesh: the dense view (pp, dp, cp, tp) and, over the same ranks, the expert view (pp, edp,
ep, etp).

Tensor parallelism is innermost, pipeline parallelism outermost. The ranks of a stage, numbered as in the dense view,
are divided a second time for experts. So expert parallelism may span tensor, context and data parallelism, and experts
may be sharded differently from attention.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Literal

from phalanx.base.dataclass import dataclass

AxisName = Literal["pp", "dp", "cp", "tp"]
ExpertAxis = Literal["edp", "ep", "etp"]
# axes over which a parameter's gradient is summed: dp x cp for dense parameters, edp for experts
SumAxis = Literal["dp", "edp"]


@dataclass(frozen=True)
class Coords:
    """The coordinates of one rank along each axis."""

    pp: int = 0
    dp: int = 0
    cp: int = 0
    tp: int = 0


@dataclass(frozen=True)
class ExpertCoords:
    """The coordinates of one rank in the expert view of its stage."""

    edp: int = 0
    ep: int = 0
    etp: int = 0


@dataclass(frozen=True)
class Grid:
    """Sizes of the mesh axes. Rank = ((pp * DP + dp) * CP + cp) * TP + tp: neighbours in tp are neighbours on the node.

    Along cp, groups of `ulysses` neighbours exchange heads; `dynamic`: documents are assigned to ranks by length. Along
    dp, groups of `media` neighbours compute each other's images. In the expert view, the rank inside its stage is (edp
    * EP + ep) * ETP + etp; EDP is what remains of the stage.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    ulysses: int = 1
    dynamic: bool = False
    media: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def text(self) -> str:
        """Such as "pp 2 x dp 4 x tp 8"; cp is mentioned where sequences are sharded."""
        return f"pp {self.pp} x dp {self.dp}{f' x cp {self.cp}' if self.cp > 1 else ''} x tp {self.tp}"

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        return self.stage // (self.ep * self.etp)

    def size(self, axis: AxisName | ExpertAxis) -> int:
        return getattr(self, axis)

    def sum_size(self, axis: SumAxis) -> int:
        """Number of ranks over which gradients are summed and their bucket is sharded."""
        return self.dp * self.cp if axis == "dp" else self.edp

    def coords(self, rank: int) -> Coords:
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coords(pp, dp, cp, tp)

    def rank(self, at: Coords) -> int:
        return ((at.pp * self.dp + at.dp) * self.cp + at.cp) * self.tp + at.tp

    def ranks(self, at: Coords, axes: tuple[AxisName, ...]) -> tuple[int, ...]:
        """Ranks that differ from `at` only along `axes`, in rank order."""
        where = [{a: i for a, i in zip(axes, index)} for index in product(*(range(self.size(a)) for a in axes))]
        return tuple(sorted(self.rank(replace(at, **w)) for w in where))

    def members(self, at: Coords, axis: AxisName, indices: tuple[int, ...]) -> tuple[int, ...]:
        """Ranks at `indices` along `axis`, with all other coordinates as in `at`."""
        return tuple(self.rank(replace(at, **{axis: i})) for i in indices)

    def cp_heads(self, at: Coords) -> tuple[int, ...]:
        """The neighbours along cp that exchange heads with this rank."""
        first = at.cp // self.ulysses * self.ulysses
        return self.members(at, "cp", tuple(range(first, first + self.ulysses)))

    def cp_keys(self, at: Coords) -> tuple[int, ...]:
        """The ranks along cp that hold the same heads as this one for other tokens."""
        return self.members(at, "cp", tuple(range(at.cp % self.ulysses, self.cp, self.ulysses)))

    def expert_coords(self, at: Coords) -> ExpertCoords:
        rest, etp = divmod(self.rank(at) % self.stage, self.etp)
        edp, ep = divmod(rest, self.ep)
        return ExpertCoords(edp, ep, etp)

    def media_ranks(self, at: Coords) -> tuple[int, ...]:
        """The ranks that compute the images of this rank's micro-batches and of its neighbours' along dp, by dp, cp and
        tp."""
        return tuple(
            rank
            for rank in self.ranks(at, ("dp", "cp", "tp"))
            if self.coords(rank).dp // self.media == at.dp // self.media
        )

    def index(self, at: Coords, axis: AxisName | ExpertAxis) -> int:
        """A rank's number along an axis of either view."""
        return getattr(self.expert_coords(at) if axis in ("edp", "ep", "etp") else at, axis)

    def expert_ranks(self, at: Coords, axes: tuple[ExpertAxis, ...]) -> tuple[int, ...]:
        """Ranks of this stage that differ from `at` only along `axes` of the expert view, in rank order."""
        mine, first = self.expert_coords(at), at.pp * self.stage
        sizes = {"edp": self.edp, "ep": self.ep, "etp": self.etp}
        spans = [range(n) if axis in axes else (getattr(mine, axis),) for axis, n in sizes.items()]
        return tuple(first + (d * self.ep + e) * self.etp + t for d, e, t in product(*spans))

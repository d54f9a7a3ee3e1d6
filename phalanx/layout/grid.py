"""Rank <-> coordinates of the mesh (pp, dp, cp, tp): tensor parallel innermost, pipeline outermost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

AxisName = Literal["pp", "dp", "cp", "tp"]
AXES: tuple[AxisName, ...] = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class Coords:
    """Where one rank stands along each axis."""

    pp: int = 0
    dp: int = 0
    cp: int = 0
    tp: int = 0


@dataclass(frozen=True)
class Grid:
    """Sizes of the mesh axes. Rank = ((pp * DP + dp) * CP + cp) * TP + tp: neighbours in tp are neighbours on the node."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def size(self, axis: AxisName) -> int:
        return getattr(self, axis)

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
        """Ranks at `indices` along `axis`, everything else as `at`."""
        return tuple(self.rank(replace(at, **{axis: i})) for i in indices)

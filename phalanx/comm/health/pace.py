"""Pace: which ranks the others wait for, judging by what all say about their steps.

A rank's work is its step without the time it waited. Ranks of one pipeline stage have the same work, so a slow one
stands out from the others' median. A rank that is alone in its stage is compared with all others, with a wider margin,
because stages are not equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from phalanx.base.dataclass import dataclass

RATIO, RATIO_OF_STAGES = 1.3, 2.0
PART_OF_STEP, LEAST_S = 0.1, 0.005  # how much longer than the others' median it must work


@dataclass(frozen=True)
class Pace:
    """Medians over a rank's last steps. work_s: computing, loading, logging. place: where it mostly was during that
    time."""

    rank: int
    stage: int
    work_s: float
    step_s: float
    place: str = ""


@dataclass(frozen=True)
class Slow:
    """A rank for which the others wait. ratio: its work over the others' median."""

    rank: int
    ratio: float
    work_s: float
    others_s: float
    step_s: float
    place: str

    def __str__(self) -> str:
        where = f", mostly at {self.place}" if self.place else ""
        return (
            f"works {self.work_s * 1e3:.0f} ms of a step of {self.step_s * 1e3:.0f} ms, the others "
            f"{self.others_s * 1e3:.0f} ms: "
            f"they wait for it{where}"
        )


def slow_ranks(paces: Sequence[Pace]) -> dict[int, Slow]:
    found = {}
    for one in paces:
        peers = [p.work_s for p in paces if p.stage == one.stage and p.rank != one.rank]
        ratio = RATIO if peers else RATIO_OF_STAGES
        others = peers or [p.work_s for p in paces if p.rank != one.rank]
        if not others:
            continue
        usual = median(others)
        if one.work_s > ratio * usual and one.work_s - usual > max(LEAST_S, PART_OF_STEP * one.step_s):
            found[one.rank] = Slow(one.rank, one.work_s / max(usual, 1e-9), one.work_s, usual, one.step_s, one.place)
    return found

"""Transfers: which boxes of a global tensor go from their holders to those who need them.

A holder is a rank, a file or anything else; how boxes are transported is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from phalanx.base.dataclass import dataclass
from phalanx.layout.box import Box

H = TypeVar("H")


@dataclass(frozen=True)
class Transfer(Generic[H]):
    """`box` goes from `holder`, which has `held`, to the receiver of `wanted`. All three are boxes of one global
    tensor."""

    holder: H
    held: Box
    wanted: Box
    box: Box

    @property
    def source(self) -> tuple[slice, ...]:
        """Slices that select it in what the holder has."""
        return self.box.within(self.held)

    @property
    def target(self) -> tuple[slice, ...]:
        """Slices that select its place in `wanted`."""
        return self.box.within(self.wanted)


class NotCovered(ValueError):
    """The holders lack some elements of what is wanted, or hold some twice: `found` in total."""

    def __init__(self, wanted: Box, found: int):
        super().__init__(f"{found} of the {wanted.numel} elements in {wanted} are held")
        self.found = found


def transfers(wanted: Box, held: Iterable[tuple[H, Box]]) -> list[Transfer[H]]:
    """The transfers that make up `wanted`, in the order of the holders. NotCovered unless each element is held exactly
    once (holders' boxes do not overlap, so counting is enough)."""
    both = [(holder, box, box.intersect(wanted)) for holder, box in held]
    found = [Transfer(holder, box, wanted, common) for holder, box, common in both if not common.empty]
    have = sum(t.box.numel for t in found)
    if have != wanted.numel:
        raise NotCovered(wanted, have)
    return found

"""Moment: how one tensor of an optimizer's state is stored, the same for all optimizers."""

from __future__ import annotations

from phalanx.base.dataclass import dataclass


@dataclass(frozen=True)
class Moment:
    """One number for each element of a weight, initially zero, stored as `optim.moments` says.

    nonnegative     it is never below zero: FP8 stores its square root, and no positive value becomes zero (an update
                    may divide by it)
    """

    nonnegative: bool = False

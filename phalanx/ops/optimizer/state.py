"""Moment: how one tensor of an optimizer's state is kept, for all of them alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Moment:
    """A number for each element of a weight, zero at the beginning, stored as `optim.moments` says.

    nonnegative     it is never below zero: FP8 keeps its root, and no positive one becomes zero (an update may divide
    by it)
    """

    nonnegative: bool = False

"""A learning-rate schedule as a package of somebody else's has it: down with the square root of what is done."""

from __future__ import annotations

import math

import phalanx as px


@px.lr_schedule("one_minus_sqrt", reads=("min_lr", "decay_steps"))
def one_minus_sqrt(at: px.LRPoint) -> float:
    return at.decayed(math.sqrt(at.done))


@px.lr_schedule("below_zero")
def below_zero(at: px.LRPoint) -> float:
    return -at.config.lr


@px.lr_schedule("broken")
def broken(at: px.LRPoint) -> float:
    return 1 / (at.end - at.step)


def plain(at: px.LRPoint) -> float:
    return at.config.lr

"""Generates pipeline schedules: the order of each rank's forwards and backwards of stages, by the schedule's name.

Every schedule interleaves a list of forwards with a list of backwards: first some forwards (the warm-up), then one
forward and one backward in turn, then the remaining backwards. GPipe warms up with all forwards, a forward-only
schedule has no backwards, and gradient accumulation without a pipeline is pp = 1. This file knows nothing of blocks or
messages.
"""

from __future__ import annotations

from phalanx.schedule.actions import Action, B, F, Schedule, ScheduleError

NAMES = ("auto", "gpipe", "1f1b", "interleaved", "forward")


def generate(name: str, pp: int, virtual_stages: int, num_micro_batches: int) -> Schedule:
    """The schedule `name` over pp ranks holding `virtual_stages` stages each: stage s lives on rank s % pp.

    - gpipe: all forwards, then all backwards (arXiv:1811.06965); with virtual stages, breadth first
      (arXiv:2211.05953).
    - 1f1b: one forward, one backward; at most min(pp - rank, num_micro_batches) micro-batches alive
      (arXiv:2006.09503).
    - interleaved: 1F1B over virtual stages, depth first in rounds of about pp micro-batches (arXiv:2104.04473); any
      number of micro-batches.
    - forward: no backward (evaluation, generation).
    - auto: 1f1b, or interleaved when there are virtual stages.

    Raises ScheduleError when a number is below 1, the name is unknown, or 1f1b is asked for virtual stages.
    """
    if name == "auto":
        name = "interleaved" if virtual_stages > 1 else "1f1b"
    _check(name, pp, virtual_stages, num_micro_batches)
    rounds = [range(num_micro_batches)] if name == "gpipe" else _rounds(num_micro_batches, pp)
    orders = []
    for rank in range(pp):
        stages = range(rank, pp * virtual_stages, pp)
        forwards = [F(stage, mb) for mbs in rounds for stage in stages for mb in mbs]
        backwards = (
            [B(stage, mb) for mbs in rounds for stage in reversed(stages) for mb in mbs] if name != "forward" else []
        )
        orders.append(_weave(forwards, backwards, _warm_up(name, pp - 1 - rank, virtual_stages, rounds)))
    return Schedule(name, num_micro_batches, tuple(stage % pp for stage in range(pp * virtual_stages)), tuple(orders))


def _check(name: str, pp: int, virtual_stages: int, num_micro_batches: int) -> None:
    if name not in NAMES:
        raise ScheduleError(f"unknown schedule {name!r}; there are {', '.join(NAMES)}")
    for what, number in (("pp", pp), ("virtual_stages", virtual_stages), ("num_micro_batches", num_micro_batches)):
        if number < 1:
            raise ScheduleError(f"schedule {name}: {what}={number} must be at least 1")
    if name == "1f1b" and virtual_stages > 1:
        raise ScheduleError(
            f"schedule 1f1b has one stage per rank, not virtual_stages={virtual_stages}; use 'interleaved'"
        )


def _rounds(num_micro_batches: int, pp: int) -> list[range]:
    """Micro-batches in consecutive rounds of at least pp (one round if there are fewer), as even as possible, larger
    rounds first.

    A rank works on one of its stages for a round before it turns to the next stage: with pp micro-batches the first one
    is back from the other ranks just when it is needed. The first round is never smaller than a later one, because it
    determines the length of the warm-up.
    """
    num_rounds = max(1, num_micro_batches // pp)
    small, larger = divmod(num_micro_batches, num_rounds)
    rounds, first = [], 0
    for i in range(num_rounds):
        size = small + (i < larger)
        rounds.append(range(first, first + size))
        first += size
    return rounds


def _warm_up(name: str, hops_to_last: int, virtual_stages: int, rounds: list[range]) -> int:
    """How many forwards a rank does before its first backward can follow without waiting."""
    if name in ("gpipe", "forward"):
        return virtual_stages * sum(len(mbs) for mbs in rounds)
    if name == "1f1b":
        return hops_to_last
    return (virtual_stages - 1) * len(rounds[0]) + 2 * hops_to_last


def _weave(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    order = forwards[:warm_up]
    steady = forwards[warm_up:]
    for forward, backward in zip(steady, backwards):
        order += [forward, backward]
    return tuple(order + backwards[len(steady) :])

"""Pipeline schedules: the order of each rank's forwards and backwards of stages, by the schedule's name.

A schedule is a function of the pipeline's shape, found by name (base.registry): ours are below, others may come from
any package. Everything else (segments, messages, buckets, memory) follows from the order of actions, by lowering, and
the simulator proves each program before it runs.

Ours interleave a list of forwards with a list of backwards: first some forwards (the warm-up), then one forward and one
backward in turn, then the remaining backwards. GPipe warms up with all forwards, a forward-only schedule has no
backwards, and gradient accumulation without a pipeline is pp = 1. This file knows nothing of blocks or messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.registry import NotFound, find, register
from phalanx.schedule.actions import Action, B, F, I, Schedule, ScheduleError, W

SEAM = "pipeline_schedule"
VirtualStages = Literal["one", "any", "several"]


@dataclass(frozen=True)
class PipelineShape:
    """What a schedule is made for. Each of pp ranks holds `virtual_stages` stages: stage s is on rank s % pp."""

    pp: int
    virtual_stages: int
    num_micro_batches: int

    def stages_of(self, rank: int) -> range:
        """The stages of a rank, the model's first layers first."""
        return range(rank, self.pp * self.virtual_stages, self.pp)


Orders = Sequence[Sequence[Action]]
"""Of each rank, its actions in order."""


@dataclass(frozen=True)
class PipelineSchedule:
    """The order of actions for every shape. virtual_stages: how many stages a rank may have: one, any number, or
    several. splits_backward: whether there are actions I and W."""

    orders: Callable[[PipelineShape], Orders]
    virtual_stages: VirtualStages = "one"
    splits_backward: bool = False


def pipeline_schedule(
    name: str, virtual_stages: VirtualStages = "one", splits_backward: bool = False
) -> Callable[[Callable[[PipelineShape], Orders]], PipelineSchedule]:
    """Make a pipeline schedule of a function, so that `layout.schedule` may be this name wherever its module has been
    imported, and `module:FUNCTION` anywhere.

    The function returns each rank's actions in order: for every stage of the rank and every micro-batch a forward
    (F), then a backward (B), or, with `splits_backward`, the gradients of the inputs (I) and later those of the weights
    (W).
    """

    def named(orders: Callable[[PipelineShape], Orders]) -> PipelineSchedule:
        made = PipelineSchedule(orders, virtual_stages, splits_backward)
        register(SEAM, name, made, f"{orders.__module__}:{orders.__qualname__}")
        return made

    return named


def find_pipeline_schedule(name: str) -> PipelineSchedule:
    """The schedule that `layout.schedule` means. NotFound says what is wrong with it."""
    found = find(SEAM, name)
    if not isinstance(found, PipelineSchedule):
        raise NotFound("is no pipeline schedule: put @px.pipeline_schedule(NAME) above its function")
    return found


def resolved(name: str, virtual_stages: int) -> str:
    """`auto` decided: 1f1b, or interleaved when there are virtual stages."""
    if name != "auto":
        return name
    return "interleaved" if virtual_stages > 1 else "1f1b"


def generate(name: str, pp: int, virtual_stages: int, num_micro_batches: int) -> Schedule:
    """The schedule `name` over pp ranks holding `virtual_stages` stages each: stage s lives on rank s % pp. Beside the
    names of the registry there are `auto` and `forward`, which has no backward (evaluation, generation).

    Raises ScheduleError when a number is below 1, the name is unknown, the schedule is asked for virtual stages that it
    does not have, or its function returns no actions of stages and micro-batches that exist.
    """
    name = resolved(name, virtual_stages)
    try:
        made = FORWARD_ONLY if name == "forward" else find_pipeline_schedule(name)
    except NotFound as error:
        raise ScheduleError(f"schedule {name!r} {error}") from error
    for what, number in (("pp", pp), ("virtual_stages", virtual_stages), ("num_micro_batches", num_micro_batches)):
        if number < 1:
            raise ScheduleError(f"schedule {name}: {what}={number} must be at least 1")
    if made.virtual_stages == "one" and virtual_stages > 1:
        raise ScheduleError(
            f"schedule {name} has one stage per rank, not virtual_stages={virtual_stages}; use 'interleaved'"
        )
    shape = PipelineShape(pp, virtual_stages, num_micro_batches)
    orders = _checked(name, shape, made.orders(shape))
    schedule = Schedule(name, num_micro_batches, tuple(stage % pp for stage in range(pp * virtual_stages)), orders)
    if schedule.splits_backward and not made.splits_backward:
        raise ScheduleError(f"schedule {name} has actions I and W: declare it with splits_backward=True")
    return schedule


def _checked(name: str, shape: PipelineShape, orders: Any) -> tuple[tuple[Action, ...], ...]:
    """What a schedule's function returned: for each rank actions of its own stages, none twice. What is missing, and
    what would hang, is the simulator's to find."""
    try:
        found = tuple(tuple(Action(*action) for action in order) for order in orders)
    except TypeError as error:
        raise ScheduleError(f"schedule {name} must return a list of actions for each rank: {error}") from error
    if len(found) != shape.pp:
        raise ScheduleError(f"schedule {name} returned the orders of {len(found)} ranks, not of pp={shape.pp}")
    for rank, order in enumerate(found):
        stages = shape.stages_of(rank)
        for kind, stage, mb in order:
            if kind not in ("F", "B", "I", "W") or stage not in stages or mb not in range(shape.num_micro_batches):
                raise ScheduleError(
                    f"schedule {name}: rank {rank} has stages {list(stages)} and {shape.num_micro_batches} "
                    f"micro-batches, and nothing like {Action(kind, stage, mb)}"
                )
        if len(set(order)) < len(order):
            twice = next(action for action in order if order.count(action) > 1)
            raise ScheduleError(f"schedule {name}: rank {rank} has {twice} twice")
    return found


# ---- ours


@pipeline_schedule("gpipe", virtual_stages="any")
def gpipe(shape: PipelineShape) -> Orders:
    """All forwards, then all backwards (arXiv:1811.06965); with virtual stages, breadth first (arXiv:2211.05953)."""
    rounds = [range(shape.num_micro_batches)]
    return [
        [*_forwards(shape.stages_of(rank), rounds), *_backwards(shape.stages_of(rank), rounds)]
        for rank in range(shape.pp)
    ]


@pipeline_schedule("1f1b")
def one_forward_one_backward(shape: PipelineShape) -> Orders:
    """One forward, one backward; at most min(pp - rank, num_micro_batches) micro-batches alive (arXiv:2006.09503)."""
    rounds = [range(shape.num_micro_batches)]
    return [
        _woven(
            _forwards(shape.stages_of(rank), rounds),
            _backwards(shape.stages_of(rank), rounds),
            shape.pp - 1 - rank,
        )
        for rank in range(shape.pp)
    ]


@pipeline_schedule("interleaved", virtual_stages="several")
def interleaved(shape: PipelineShape) -> Orders:
    """1F1B over virtual stages, depth first in rounds of about pp micro-batches (arXiv:2104.04473); any number of
    micro-batches."""
    rounds = _rounds(shape.num_micro_batches, shape.pp)
    orders = []
    for rank in range(shape.pp):
        stages = shape.stages_of(rank)
        warm_up = (shape.virtual_stages - 1) * len(rounds[0]) + 2 * (shape.pp - 1 - rank)
        orders.append(_woven(_forwards(stages, rounds), _backwards(stages, rounds), warm_up))
    return orders


@pipeline_schedule("zb_h1", splits_backward=True)
def zb_h1(shape: PipelineShape) -> Orders:
    """1F1B with its backwards split: rank r does the gradients of weights r micro-batches after those of the inputs,
    for which the rank before it waits (ZB-H1 of Qi et al., "Zero bubble pipeline parallelism", arXiv:2401.10241).

    At most min(pp, num_micro_batches) micro-batches are alive or have weight gradients that wait: on every rank what
    1F1B has on rank 0. Rank 0, for which nobody waits, does whole backwards. Forwards and gradients of inputs begin no
    later than in 1F1B.
    """
    orders = []
    for rank, whole in enumerate(one_forward_one_backward.orders(shape)):
        if rank == 0:
            orders.append(whole)
            continue
        order: list[Action] = []
        for action in whole:
            if action.kind == "F":
                order.append(action)
                continue
            order.append(I(rank, action.mb))
            if action.mb >= rank:
                order.append(W(rank, action.mb - rank))
        first_left = max(0, shape.num_micro_batches - rank)
        orders.append(order + [W(rank, mb) for mb in range(first_left, shape.num_micro_batches)])
    return orders


def _forward_only(shape: PipelineShape) -> Orders:
    rounds = _rounds(shape.num_micro_batches, shape.pp)
    return [_forwards(shape.stages_of(rank), rounds) for rank in range(shape.pp)]


FORWARD_ONLY = PipelineSchedule(_forward_only, "any")


def _forwards(stages: range, rounds: list[range]) -> list[Action]:
    return [F(stage, mb) for mbs in rounds for stage in stages for mb in mbs]


def _backwards(stages: range, rounds: list[range]) -> list[Action]:
    return [B(stage, mb) for mbs in rounds for stage in reversed(stages) for mb in mbs]


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


def _woven(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """So many forwards, the fewest before a rank's first backward can follow without waiting, then one of each."""
    order = forwards[:warm_up]
    steady = forwards[warm_up:]
    for forward, backward in zip(steady, backwards):
        order += [forward, backward]
    return order + backwards[len(steady) :]

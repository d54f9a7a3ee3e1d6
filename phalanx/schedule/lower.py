"""Lowers a schedule: turns the actions of whole stages into the instructions of each rank.

Stages are cut into segments of blocks, and messages are posted in the same order on both ends. `generators` decides the
order of compute, `buckets` and `offload` add their instructions, pipeline.execute carries all of them out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial

from phalanx.schedule.actions import (
    Action,
    Backward,
    Buckets,
    Flow,
    Forward,
    InputGrad,
    Instruction,
    Program,
    Recv,
    Schedule,
    ScheduleError,
    Send,
    TransferKind,
    Wait,
    WeightGrad,
)
from phalanx.schedule.buckets import with_buckets
from phalanx.schedule.offload import with_offload


def lower(
    schedule: Schedule,
    segments_per_stage: Sequence[int] | None = None,
    buckets_of_rank: Sequence[Buckets] | None = None,
    prefetch: int = 1,
    flows_of_rank: Sequence[Mapping[int, Flow]] = (),
    early: Set[tuple[int, int]] = frozenset(),
    bucket_prefetch: int = 1,
    keep: bool = False,
    offloaded: Set[tuple[int, int]] = frozenset(),
) -> Program:
    """The instruction list of every rank.

    segments_per_stage         the number of segments of each stage; default 1
    buckets_of_rank        of each rank: bucket -> the (stage, segment) pairs that use it; default none
    prefetch               receives are posted this many actions before their use (earlier where the sender's order
                           demands it), so that messages travel during compute and few buffers wait
    flows_of_rank, early   see Program
    bucket_prefetch, keep  see buckets.with_buckets
    offloaded              (stage, segment) pairs whose activations are offloaded, see offload.with_offload

    Raises ScheduleError when the numbers do not fit the schedule or a value is sent to an action that does not exist.
    """
    segments = tuple(segments_per_stage) if segments_per_stage is not None else (1,) * schedule.num_stages
    buckets = tuple(buckets_of_rank) if buckets_of_rank is not None else ({},) * schedule.pp
    _check(schedule, segments, buckets, prefetch)
    if bucket_prefetch < 0:
        raise ScheduleError(f"bucket_prefetch={bucket_prefetch} must not be negative")
    edges = _edges(schedule)
    lists = []
    for rank in range(schedule.pp):
        receives = _receives(
            schedule.orders[rank], {source: readers for (source, to), readers in edges.items() if to == rank}, prefetch
        )
        instructions = _compute_and_messages(schedule, rank, receives, partial(_compute, segments, early))
        flows = flows_of_rank[rank] if flows_of_rank else {}
        lists.append(
            with_offload(with_buckets(instructions, buckets[rank], flows, early, bucket_prefetch, keep), offloaded)
        )
    return Program(schedule, segments, buckets, tuple(lists), tuple(flows_of_rank), early)


def _check(schedule: Schedule, segments: tuple[int, ...], buckets: tuple[Buckets, ...], prefetch: int) -> None:
    if len(segments) != schedule.num_stages or min(segments) < 1:
        raise ScheduleError(
            f"segments_per_stage={segments} must give each of the {schedule.num_stages} stages at least one segment"
        )
    if len(buckets) != schedule.pp:
        raise ScheduleError(f"buckets are given for {len(buckets)} ranks, but the schedule has {schedule.pp}")
    if prefetch < 0:
        raise ScheduleError(f"prefetch={prefetch} must not be negative")
    for rank, of_rank in enumerate(buckets):
        here = {(stage, segment) for stage in schedule.stages_of(rank) for segment in range(segments[stage])}
        for bucket, users in of_rank.items():
            if not users or not users <= here:
                raise ScheduleError(
                    f"bucket {bucket} of rank {rank} must lie in (stage, segment) pairs {sorted(here)}, "
                    f"not {sorted(users)}"
                )


def _edges(schedule: Schedule) -> dict[tuple[int, int], list[Action]]:
    """(sending rank, receiving rank) -> the actions that read the messages, in the order in which both ends post
    them."""
    edges: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, order in enumerate(schedule.orders):
        for action in order:
            reader = _remote_reader(schedule, action)
            if reader is not None:
                edges[rank, schedule.stage_rank[reader.stage]].append(reader)
    return edges


def _compute_and_messages(
    schedule: Schedule,
    rank: int,
    receives: dict[int, list[Recv]],
    compute: Callable[[Action], Iterable[Instruction]],
) -> list[Instruction]:
    received = {recv.value for posts in receives.values() for recv in posts}
    program: list[Instruction] = []
    for position, action in enumerate(schedule.orders[rank]):
        # Before the Wait below: a rank that waits must not keep its peers from sending.
        program += receives.get(position, [])
        wait = Wait(_kind(action), action.stage, action.mb)
        if action.kind != "W" and wait.value in received:
            program.append(wait)
        program += compute(action)
        reader = _remote_reader(schedule, action)
        if reader is not None:
            program.append(Send(_kind(action), action.stage, action.mb, schedule.stage_rank[reader.stage]))
    return program


def _compute(segments: tuple[int, ...], early: Set[tuple[int, int]], action: Action) -> Iterable[Instruction]:
    """The instructions of a stage's segments. A segment whose head has made its gradients in forward has nothing that
    could wait: its backward is done whole, in I."""
    kind, stage, mb = action
    numbers = range(segments[stage])
    if kind == "F":
        return [Forward(stage, segment, mb) for segment in numbers]
    if kind == "B":
        return [Backward(stage, segment, mb) for segment in reversed(numbers)]
    split = [(stage, segment) not in early for segment in numbers]
    if kind == "W":
        return [WeightGrad(stage, segment, mb) for segment in reversed(numbers) if split[segment]]
    return [(InputGrad if split[segment] else Backward)(stage, segment, mb) for segment in reversed(numbers)]


def _receives(order: Sequence[Action], incoming: dict[int, list[Action]], prefetch: int) -> dict[int, list[Recv]]:
    """Position in a rank's order -> the receives to post before that action. `incoming`: sending rank -> the actions
    that read its messages.

    Receives from one rank are posted in the order in which it sends: a value that is needed late is posted before a
    value that is sent after it but needed earlier.
    """
    position = {action: i for i, action in enumerate(order)}
    due: list[tuple[int, Recv]] = []
    for source, readers in sorted(incoming.items()):
        need = len(order)
        from_last = []
        for reader in reversed(readers):
            if reader not in position:
                raise ScheduleError(f"rank {source} makes a value for {reader}, which no rank runs")
            need = min(need, position[reader])
            from_last.append((need, Recv(_kind(reader), reader.stage, reader.mb, source)))
        due += reversed(from_last)
    posts: dict[int, list[Recv]] = defaultdict(list)
    for need, recv in sorted(due, key=lambda pair: pair[0]):  # stable, so each edge keeps its order
        posts[max(0, need - prefetch)].append(recv)
    return posts


def _remote_reader(schedule: Schedule, action: Action) -> Action | None:
    """The action on another rank that reads this action's result. None if the reader is on the same rank, and at both
    ends of the model."""
    reader = schedule.consumer(action)
    if reader is None or schedule.stage_rank[reader.stage] == schedule.stage_rank[action.stage]:
        return None
    return reader


def _kind(action: Action) -> TransferKind:
    return "act" if action.kind == "F" else "grad"

"""The vocabulary of pipeline schedules: actions of whole stages, and the instructions that an executor carries out.

`generators` orders the actions, `lower` turns them into a list of instructions per rank. What an instruction means is
in `simulate` (the reference) and in pipeline.execute (on real tensors).

A stage is cut into segments of blocks, numbered from 0: the unit of compute instructions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence, Set
from functools import cached_property
from typing import Literal, NamedTuple

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import PhalanxError

ActionKind = Literal["F", "B", "I", "W"]
"""Forward, full backward, gradient of the inputs only, gradient of the weights only (I then W makes a B)."""
TransferKind = Literal["act", "grad"]
Buckets = Mapping[int, Set[tuple[int, int]]]
"""Bucket number -> the (stage, segment) pairs of one rank whose parameters are in it."""


class ScheduleError(PhalanxError):
    """A schedule that cannot be made, or that would hang or compute the wrong thing. Found before any process group
    exists."""

    exit_code = 2


class Action(NamedTuple):
    """Compute of one whole stage for one micro-batch."""

    kind: ActionKind
    stage: int
    mb: int

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, mb {self.mb})"


def F(stage: int, mb: int) -> Action:
    return Action("F", stage, mb)


def B(stage: int, mb: int) -> Action:
    return Action("B", stage, mb)


def I(stage: int, mb: int) -> Action:  # noqa: E743
    return Action("I", stage, mb)


def W(stage: int, mb: int) -> Action:
    return Action("W", stage, mb)


@dataclass(frozen=True)
class Schedule:
    """The order of each rank's actions. `stage_rank[s]` is the rank of stage s; stages are numbered along the
    model."""

    name: str
    num_micro_batches: int
    stage_rank: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]

    @property
    def pp(self) -> int:
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        return len(self.stage_rank)

    @cached_property
    def has_backward(self) -> bool:
        return any(action.kind != "F" for order in self.orders for action in order)

    @cached_property
    def _split(self) -> frozenset[tuple[int, int]]:
        """(stage, micro-batch) pairs whose backward is an I and a W."""
        return frozenset((action.stage, action.mb) for order in self.orders for action in order if action.kind == "I")

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is an I and a W."""
        return bool(self._split)

    @cached_property
    def _stages(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for stage, owner in enumerate(self.stage_rank):
            found[owner] = (*found.get(owner, ()), stage)
        return found

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return self._stages.get(rank, ())

    def consumer(self, action: Action) -> Action | None:
        """The action that reads the result of this one, or None at the end of the chain."""
        if action.kind == "W":
            return None
        stage = action.stage + 1 if action.kind == "F" else action.stage - 1
        if not 0 <= stage < self.num_stages:
            return None
        if action.kind == "F":
            return F(stage, action.mb)
        return I(stage, action.mb) if (stage, action.mb) in self._split else B(stage, action.mb)

    def most_in_flight(self, sorts: Sequence[Hashable]) -> Counter[tuple[int, Hashable]]:
        """(stage, sort) -> the largest number of micro-batches of that sort that are between their forward and the end
        of their backward (W, if it is split) in the stage at the same time. `sorts`: of each micro-batch; None: it does
        not count."""
        live, most = Counter[tuple[int, Hashable]](), Counter[tuple[int, Hashable]]()
        for action in (a for order in self.orders for a in order if sorts[a.mb] is not None):
            where = action.stage, sorts[action.mb]
            live[where] += (action.kind == "F") - (action.kind in ("B", "W"))
            most[where] = max(most[where], live[where])
        return most


def check_order(schedule: Schedule) -> None:
    """Raise ScheduleError if a stage adds its weight gradients in another order than that of the micro-batches."""
    for rank, order in enumerate(schedule.orders):
        last: dict[int, Action] = {}
        for action in (a for a in order if a.kind in ("B", "W")):
            before = last.get(action.stage, action)
            if action.mb < before.mb:
                raise ScheduleError(
                    f"schedule {schedule.name}: rank {rank} does {before} before {action}, but train.deterministic "
                    "adds up the gradients of micro-batches in their order"
                )
            last[action.stage] = action


# ---- Instructions. A value between two stages is named by its reader: (kind, reading stage, mb). An executor keeps
# these values in one table. The last segment of a stage adds its result, Send removes it, Wait adds a received value,
# and the first segment of the next stage removes it. So two neighbouring stages on one rank need no instruction between
# them.


class Value(NamedTuple):
    """What crosses a stage border: the activation for `stage`'s forward, or the gradient for `stage`'s backward."""

    kind: TransferKind
    stage: int
    mb: int

    def __str__(self) -> str:
        return f"{self.kind} for stage {self.stage}, mb {self.mb}"


@dataclass(frozen=True, slots=True)
class Forward:
    """Forward of one segment. Segment 0 reads the value (act, stage, mb), or the batch in stage 0."""

    stage: int
    segment: int
    mb: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Full backward of one segment. The last segment reads the value (grad, stage, mb), or the loss seed in the last
    stage."""

    stage: int
    segment: int
    mb: int


@dataclass(frozen=True, slots=True)
class InputGrad:
    """The part of a segment's backward that its neighbour waits for: gradients of the segment's inputs. Those of its
    weights wait, with what they need of the activations, for the WeightGrad of the same segment and micro-batch. Reads
    what Backward reads."""

    stage: int
    segment: int
    mb: int


@dataclass(frozen=True, slots=True)
class WeightGrad:
    """The rest of a segment's backward: adds the gradients of its weights. It reads no weights."""

    stage: int
    segment: int
    mb: int


Compute = Forward | Backward | InputGrad | WeightGrad


@dataclass(frozen=True, slots=True)
class Recv:
    """Post the asynchronous receive, from rank `peer`, of the activation for `stage`'s forward or the gradient for
    its backward."""

    kind: TransferKind
    stage: int
    mb: int
    peer: int

    @property
    def value(self) -> Value:
        return Value(self.kind, self.stage, self.mb)


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the posted receive of the same name; its value can be read from here on."""

    kind: TransferKind
    stage: int
    mb: int

    @property
    def value(self) -> Value:
        return Value(self.kind, self.stage, self.mb)


@dataclass(frozen=True, slots=True)
class Send:
    """Post the asynchronous send, to rank `peer`, of `stage`'s output activation or of the gradient of `stage`'s input.

    The buffer belongs to the transfer until it is complete.
    """

    kind: TransferKind
    stage: int
    mb: int
    peer: int

    @property
    def value(self) -> Value:
        return Value(self.kind, self.stage + 1 if self.kind == "act" else self.stage - 1, self.mb)


@dataclass(frozen=True)
class Flow:
    """Which instructions a bucket needs besides its reduction; it follows from how the bucket is sharded.

    gathers     its weights are in memory from Gather to Free only
    opens       its gradients are in memory from Open to Close only, and are reduced after each micro-batch
    closes      it needs a Close when a reduction is complete
    applies     its gradients are applied and freed when they are complete, in a step of one micro-batch (an Apply
                instead of the Close; they are in memory from Open to there)
    prefetched  its weights are gathered some time before their use; else right before it: there is nothing to send
    """

    gathers: bool = False
    opens: bool = False
    closes: bool = False
    applies: bool = False
    prefetched: bool = True


@dataclass(frozen=True, slots=True)
class Gather:
    """Allocate a bucket's weights and start gathering them."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Wait until a bucket's weights can be read: after its last Gather, or after the last optimizer update."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Free:
    """Free a bucket's gathered weights."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Open:
    """Allocate a bucket's gradients, all zero."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Start reducing a bucket's gradients. Nothing adds to them until the next Open, or the next step."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Close:
    """Wait for a bucket's reduction, keep this rank's shard and free the rest. `last`: it is the bucket's last
    reduction of the step."""

    bucket: int
    last: bool = True


@dataclass(frozen=True, slots=True)
class Apply:
    """Wait for a bucket's reduction, update what this rank updates of it, and free the gradients. Nothing in the step
    reads its weights after that."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Offload:
    """Start copying to the host what a segment's forward saved for its backward, and free it on the device."""

    stage: int
    segment: int
    mb: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Start copying back what an Offload copied to the host."""

    stage: int
    segment: int
    mb: int


Instruction = Compute | Recv | Wait | Send | Gather | Ready | Free | Open | Reduce | Close | Apply | Offload | Fetch


@dataclass(frozen=True)
class Program:
    """The instructions of each rank, with the facts they follow from (the simulator checks that nothing is missing).

    flows_of_rank   of each rank: bucket -> Flow; a bucket without an entry needs only its reduction
    early           (stage, segment) pairs whose forward adds to gradients: a head computes its gradients there. Their
                    backward is never split
    """

    schedule: Schedule
    segments_per_stage: tuple[int, ...]
    buckets_of_rank: tuple[Buckets, ...]
    lists: tuple[tuple[Instruction, ...], ...]
    flows_of_rank: tuple[Mapping[int, Flow], ...] = ()
    early: Set[tuple[int, int]] = frozenset()

    def flow(self, rank: int, bucket: int) -> Flow:
        return self.flows_of_rank[rank].get(bucket, Flow()) if self.flows_of_rank else Flow()

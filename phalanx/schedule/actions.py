"""The words of a pipeline schedule: actions of whole stages, and the instructions that one executor per rank runs in
list order.

Who decides the order of actions is `generators`; how they become instructions is `lower`; what running them means is
`simulate` (the reference) and `pipeline.execute` (the real one).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from phalanx.base.errors import PhalanxError

ActionKind = Literal["F", "B", "I", "W"]
"""Forward, full backward, gradient of the inputs only, gradient of the weights only (I then W makes a B)."""
TransferKind = Literal["act", "grad"]
Buckets = Mapping[int, Set[tuple[int, int]]]
"""Bucket number -> the (stage, run) pairs of one rank whose parameters lie in it."""


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


@dataclass(frozen=True)
class Schedule:
    """Per rank, the order of its actions. `stage_rank[s]` is the rank that holds stage s; stages are numbered along
    the model."""

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
    def _stages(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for stage, owner in enumerate(self.stage_rank):
            found[owner] = (*found.get(owner, ()), stage)
        return found

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return self._stages.get(rank, ())

    def consumer(self, action: Action) -> Action | None:
        """The action that reads what this one makes, or None at the end of the chain."""
        if action.kind == "W":
            return None
        stage = action.stage + 1 if action.kind == "F" else action.stage - 1
        return Action(action.kind, stage, action.mb) if 0 <= stage < self.num_stages else None

    def most_in_flight(self, sorts: Sequence[Hashable]) -> Counter[tuple[int, Hashable]]:
        """(stage, sort) -> most micro-batches of that sort that are in flight in the stage at once, between their
        forward and their backward. `sorts`: of each micro-batch; None: not counted."""
        live, most = Counter[tuple[int, Hashable]](), Counter[tuple[int, Hashable]]()
        for action in (a for order in self.orders for a in order if sorts[a.mb] is not None):
            where = action.stage, sorts[action.mb]
            live[where] += (action.kind == "F") - (action.kind == "B")
            most[where] = max(most[where], live[where])
        return most


# ---- Instructions. A value between two stages is named by its reader: (kind, reading stage, mb). An executor keeps
# such values in one table: the last run of a stage puts its result there, Send takes it away, Wait puts a received one
# there, and the first run of the next stage takes it. So two neighbouring stages on one rank need no instruction
# between them.


class Value(NamedTuple):
    """What crosses a stage border: the activation for `stage`'s forward, or the gradient for `stage`'s backward."""

    kind: TransferKind
    stage: int
    mb: int

    def __str__(self) -> str:
        return f"{self.kind} for stage {self.stage}, mb {self.mb}"


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the blocks of one run. Run 0 reads the value (act, stage, mb), or the batch in stage 0."""

    stage: int
    run: int
    mb: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Full backward of one run. The last run reads the value (grad, stage, mb), or the loss seed in the last stage."""

    stage: int
    run: int
    mb: int


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
    """What a bucket asks for besides its reduction, by how it is sharded.

    gathers   its weights have memory from Gather to Free only
    opens     its gradients have memory from Open to Close only, and are reduced after each micro-batch
    closes    something is to be done when a reduction is complete
    """

    gathers: bool = False
    opens: bool = False
    closes: bool = False


@dataclass(frozen=True, slots=True)
class Gather:
    """Give a bucket's weights memory and start gathering them into it."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Make sure that a bucket's weights have arrived: of the last Gather, or since the last optimizer update."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Free:
    """Let go of a bucket's gathered weights."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Open:
    """Give a bucket's gradients memory, all zero."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Start reducing what a bucket's gradients are so far: nothing adds to them before they are opened anew, or in
    this step."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Close:
    """Wait for a bucket's reduction, keep this rank's part and let go of the rest. `last`: the bucket's last one of
    the step."""

    bucket: int
    last: bool = True


@dataclass(frozen=True, slots=True)
class Offload:
    """Start copying to the host what a run's forward keeps for its backward, and let go of it on the device."""

    stage: int
    run: int
    mb: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Start copying it back."""

    stage: int
    run: int
    mb: int


Instruction = Forward | Backward | Recv | Wait | Send | Gather | Ready | Free | Open | Reduce | Close | Offload | Fetch


@dataclass(frozen=True)
class Program:
    """Instructions per rank, with the facts they were made from (so that the simulator can tell what is missing).

    flows_of_rank   of each rank's buckets; one that is not there asks for nothing
    early           (stage, run) pairs whose forward adds to gradients: heads make theirs there
    """

    schedule: Schedule
    runs_per_stage: tuple[int, ...]
    buckets_of_rank: tuple[Buckets, ...]
    lists: tuple[tuple[Instruction, ...], ...]
    flows_of_rank: tuple[Mapping[int, Flow], ...] = ()
    early: Set[tuple[int, int]] = frozenset()

    def flow(self, rank: int, bucket: int) -> Flow:
        return self.flows_of_rank[rank].get(bucket, Flow()) if self.flows_of_rank else Flow()

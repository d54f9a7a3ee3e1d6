"""Simulates the instruction lists of all ranks: proves that they finish and compute the right thing, and measures time
and memory.

The reference implementation of the executor (pipeline.execute). Each directed edge between two ranks does one transfer
at a time, unbuffered and in the order of posting, as one communicator per edge does. `actions` says what instructions
mean; how the lists were made does not matter here.

One rank, per instruction:

    the next instruction ──▶ allowed in this state? ──▶ do it, advance the clock ──▶ the next instruction
                                    │ no                        │ Wait, Send: the peer has not posted yet
                                    ▼                           ▼
                              ScheduleError               stay here; if all ranks stay: deadlock
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import field
from typing import Literal, NoReturn

from phalanx.base.dataclass import dataclass
from phalanx.schedule.actions import (
    Apply,
    Backward,
    Close,
    Compute,
    Fetch,
    Flow,
    Forward,
    Free,
    Gather,
    InputGrad,
    Instruction,
    Offload,
    Open,
    Program,
    Ready,
    Recv,
    Reduce,
    ScheduleError,
    Send,
    TransferKind,
    Value,
    Wait,
    WeightGrad,
)


@dataclass(frozen=True)
class Costs:
    """Seconds of the forward and of the backward of each stage for one micro-batch, and of one message between ranks.
    weights: of each backward, what gradients of weights take (W, if it is split); unset: half of it."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    send: float = 0.0
    weights: tuple[float, ...] | None = None

    @classmethod
    def uniform(cls, num_stages: int, forward: float = 1.0, backward: float = 2.0, send: float = 0.0) -> Costs:
        return cls((forward,) * num_stages, (backward,) * num_stages, send)

    def of(self, do: Compute) -> float:
        """Seconds of an instruction's whole stage."""
        stage = do.stage
        if isinstance(do, Forward):
            return self.forward[stage]
        if isinstance(do, Backward):
            return self.backward[stage]
        of_weights = self.backward[stage] / 2 if self.weights is None else self.weights[stage]
        return of_weights if isinstance(do, WeightGrad) else self.backward[stage] - of_weights


@dataclass(frozen=True)
class ActionSpan:
    """The time that one rank spends on the forward or backward of one segment, or on a part of the latter."""

    rank: int
    start: float
    end: float
    instruction: Compute


@dataclass(frozen=True)
class LiveChange:
    """From `time` on, a rank holds the activations of `live` micro-batches of `stage`, or what their W needs of
    them."""

    time: float
    stage: int
    live: int


@dataclass(frozen=True)
class ScheduleTrace:
    """The result of a simulation. Times are in seconds since the start of the step; tuples are indexed by rank unless
    the name says otherwise."""

    program: Program
    makespan: float
    busy: tuple[float, ...]
    spans: tuple[tuple[ActionSpan, ...], ...]
    live: tuple[tuple[LiveChange, ...], ...]
    peak_live: tuple[int, ...]
    """Most (stage, micro-batch) activations alive at once, over all stages of a rank; of a split backward until W."""
    peak_pending: tuple[int, ...]
    """Most (stage, micro-batch) pairs at once that are between their I and their W, over all stages of a rank."""
    peak_live_of_stage: tuple[int, ...]
    peak_receives: tuple[int, ...]
    """Most receive buffers posted and not yet waited for."""
    peak_sends: tuple[int, ...]
    """Most send buffers whose transfer was not complete."""

    @property
    def bubble(self) -> float:
        """Share of all ranks' time that is idle, 0 to 1."""
        total = self.makespan * len(self.busy)
        return 1 - sum(self.busy) / total if total else 0.0

    @property
    def bubble_over_ideal(self) -> float:
        """Idle time over compute time: (p-1)/m for 1F1B, (p-1)/(v m) interleaved (arXiv:2104.04473, section 2.2)."""
        busy = sum(self.busy)
        return self.makespan * len(self.busy) / busy - 1 if busy else 0.0


def simulate(program: Program, costs: Costs | None = None, host_rendezvous: bool = False) -> ScheduleTrace:
    """Simulate all lists to their end. With `host_rendezvous` a Send also blocks its host until the receiver has
    posted.

    Raises ScheduleError, which names ranks and instructions, when a list reads a value that is not there or computes
    something twice or never, when the two ends of an edge disagree, when a bucket is used before it is gathered or
    reduced before its last gradient, or when ranks wait for each other.
    """
    if len(program.lists) != program.schedule.pp:
        raise ScheduleError(f"there are {len(program.lists)} lists for {program.schedule.pp} ranks")
    costs = costs or Costs.uniform(program.schedule.num_stages)
    of_weights = costs.backward if costs.weights is None else costs.weights
    if {len(costs.forward), len(costs.backward), len(of_weights)} != {program.schedule.num_stages}:
        raise ScheduleError(
            f"costs are for {len(costs.forward)} stages, the schedule has {program.schedule.num_stages}"
        )
    edges: dict[tuple[int, int], _Edge] = defaultdict(lambda: _Edge(costs.send))
    ranks = [_Rank(program, rank, costs, edges, host_rendezvous) for rank in range(program.schedule.pp)]
    while any(not rank.finished for rank in ranks):
        # The order of the ranks does not matter: all times follow from the lists alone.
        if not any([rank.advance() for rank in ranks]):
            _deadlock(ranks)
    for (source, to), edge in edges.items():
        edge.check_empty(source, to)
    for rank in ranks:
        rank.check_complete()
    return _trace(program, ranks, edges)


class _Edge:
    """Messages from one rank to another: the i-th send meets the i-th receive."""

    def __init__(self, cost: float):
        self.cost = cost
        self.sends: list[tuple[Value, float]] = []
        self.recvs: list[tuple[Value, float]] = []
        self.ends: list[float] = []
        self.place: dict[Value, int] = {}

    def post(self, end: Literal["send", "recv"], value: Value, time: float, source: int, to: int) -> None:
        if end == "recv":
            self.place[value] = len(self.recvs)
        (self.sends if end == "send" else self.recvs).append((value, time))
        i = len(self.ends)
        if i >= min(len(self.sends), len(self.recvs)):
            return
        (sent, send_time), (expected, recv_time) = self.sends[i], self.recvs[i]
        if sent != expected:
            raise ScheduleError(
                f"edge rank {source} -> rank {to}: message {i} is sent as ({sent}) but received as ({expected})"
            )
        self.ends.append(max(send_time, recv_time, self.ends[-1] if i else 0.0) + self.cost)

    def arrival(self, value: Value) -> float | None:
        i = self.place[value]
        return self.ends[i] if i < len(self.ends) else None

    def check_empty(self, source: int, to: int) -> None:
        if len(self.sends) != len(self.recvs):
            some = self.sends if len(self.sends) > len(self.recvs) else self.recvs
            what = "sent but never received" if some is self.sends else "received but never sent"
            raise ScheduleError(f"edge rank {source} -> rank {to}: ({some[len(self.ends)][0]}) is {what}")


@dataclass
class _BucketStates:
    """The state of each bucket of one rank. A method that is told to do what the state forbids returns the reason,
    else "".

        weights        Gather            Ready            Free
              sharded ───────▶ gathered ──────▶ readable ──────▶ sharded

        gradients   Open       Backward, WeightGrad        Reduce             Close
              none ──────▶ open ───────────────────▶ added ───────▶ reducing ───────▶ none, or reduced for this step

    Instead of the Close, an Apply ends the reduction and changes the weights: they are not used again in this step.

    A bucket whose weights are not sharded has no Gather and no Free, one whose gradients are not sharded has no Open
    (actions.Flow). A Forward adds too if it is early (actions.Program).
    """

    gathered: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)
    opened: set[int] = field(default_factory=set)
    added: set[int] = field(default_factory=set)
    reducing: set[int] = field(default_factory=set)
    reduced: set[int] = field(default_factory=set)
    """For the last time in this step."""
    applied: set[int] = field(default_factory=set)

    def step(self, do: Gather | Ready | Free | Open | Reduce | Close | Apply, flow: Flow) -> str:
        b = do.bucket
        match do:
            case Gather():
                wrong = (
                    ""
                    if flow.gathers and b not in self.gathered | self.applied
                    else "gathers a bucket that is not cut, or one that is here"
                )
                self.gathered.add(b)
            case Ready():
                wrong = (
                    ""
                    if b not in self.ready and (b in self.gathered or not flow.gathers)
                    else "waits for a bucket twice, or before its gather"
                )
                self.ready.add(b)
            case Free():
                wrong = "" if flow.gathers and b in self.ready else "frees a bucket that is not here"
                self.ready.discard(b)
                self.gathered.discard(b)
            case Open():
                wrong = (
                    ""
                    if flow.opens and b not in self.opened | self.reduced
                    else "opens a bucket that is open, or was reduced for the last time"
                )
                self.opened.add(b)
            case Reduce():
                wrong = (
                    ""
                    if b in self.added and b not in self.reducing | self.reduced
                    else "reduces a bucket without new gradients, or one twice"
                )
                self.added.discard(b)
                (self.reducing if flow.opens or flow.closes else self.reduced).add(b)
            case Close(last=last):
                wrong = "" if b in self.reducing else "closes a bucket that is not being reduced"
                self.reducing.discard(b)
                self.opened.discard(b)
                if last:
                    self.reduced.add(b)
            case Apply():
                wrong = (
                    ""
                    if flow.applies and b in self.reducing and b not in self.gathered
                    else "applies a bucket that is not being reduced, or whose weights are still in use"
                )
                for states in (self.reducing, self.opened, self.ready):
                    states.discard(b)
                self.reduced.add(b)
                self.applied.add(b)
        return wrong

    def add(self, bucket: int, flow: Flow) -> str:
        if bucket in self.reduced | self.reducing:
            return f"adds gradients to bucket {bucket} after its reduction"
        if flow.opens and bucket not in self.opened:
            return f"adds gradients to bucket {bucket}, which is not open"
        self.added.add(bucket)
        return ""

    def missing(self, buckets: set[int], trained: bool, applying: set[int]) -> str:
        """What is missing at the end of the step, or "". applying: buckets that are applied in backward."""
        if trained and self.applied != applying:
            return f"never applies buckets {sorted(applying - self.applied)}"
        if trained and self.reduced != buckets:
            return f"never reduces buckets {sorted(buckets - self.reduced)} for the last time"
        left = self.gathered | self.opened | self.added
        return f"leaves buckets {sorted(left)} gathered, open or not reduced" if left else ""


@dataclass
class _Rank:
    """The executor of one rank: its list, its position in it, its clock, and the values it has."""

    program: Program
    rank: int
    costs: Costs
    edges: dict[tuple[int, int], _Edge]
    host_rendezvous: bool

    at: int = 0
    time: float = 0.0
    blocked_on: int | None = None
    values: set[Value] = field(default_factory=set)
    posted: dict[Value, int] = field(default_factory=dict)
    received: set[Value] = field(default_factory=set)
    done: set[Compute] = field(default_factory=set)
    over: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Segments of each (stage, micro-batch) whose backward is over, weight gradients included."""
    pending: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Segments of each (stage, micro-batch) whose weight gradients wait."""
    peak_pending: int = 0
    bucket_states: _BucketStates = field(default_factory=lambda: _BucketStates())
    sent_at: list[tuple[int, int, float]] = field(default_factory=list)
    sending: bool = False
    on_host: set[tuple[int, int, int]] = field(default_factory=set)
    spans: list[ActionSpan] = field(default_factory=list)
    live: Counter[int] = field(default_factory=Counter)
    live_changes: list[LiveChange] = field(default_factory=list)
    peak_live: int = 0
    peak_receives: int = 0

    def __post_init__(self) -> None:
        self.schedule = self.program.schedule
        self.list = self.program.lists[self.rank]
        self.stages = set(self.schedule.stages_of(self.rank))
        self.buckets = self.program.buckets_of_rank[self.rank]
        self.buckets_of = defaultdict(list)
        for bucket, users in self.buckets.items():
            for user in users:
                self.buckets_of[user].append(bucket)

    @property
    def finished(self) -> bool:
        return self.at == len(self.list)

    @property
    def here(self) -> Instruction | None:
        return None if self.finished else self.list[self.at]

    def state(self) -> str:
        return (
            "has finished"
            if self.finished
            else f"stands at instruction {self.at}, {self.here}, and waits for rank {self.blocked_on}"
        )

    def fail(self, why: str) -> NoReturn:
        raise ScheduleError(f"rank {self.rank}, instruction {self.at}, {self.here}: {why}")

    def require(self, condition: bool, why: str) -> None:
        if not condition:
            self.fail(why)

    def advance(self) -> bool:
        """Do instructions until the end of the list or until one must wait. Returns whether any was done."""
        start = self.at
        while not self.finished and self.step(self.list[self.at]):
            self.at += 1
        return self.at > start

    def step(self, instruction: Instruction) -> bool:
        """Do one instruction. Returns False if it must wait for a peer."""
        match instruction:
            case Forward():
                self.forward(instruction)
            case Backward() | InputGrad():
                self.backward(instruction)
            case WeightGrad():
                self.weight_grad(instruction)
            case Recv():
                self.recv(instruction)
            case Send():
                return self.send(instruction)
            case Wait():
                return self.wait(instruction)
            case Offload() | Fetch():
                self.move(instruction)
            case Gather() | Ready() | Free() | Open() | Reduce() | Close() | Apply():
                self.require(instruction.bucket in self.buckets, "is about an unknown bucket")
                wrong = self.bucket_states.step(instruction, self.program.flow(self.rank, instruction.bucket))
                self.require(not wrong, wrong)
        return True

    def move(self, do: Offload | Fetch) -> None:
        where = (do.stage, do.segment, do.mb)
        self.require(Forward(*where) in self.done and not self.went_back(*where), "there is nothing to move")
        if isinstance(do, Offload):
            self.require(where not in self.on_host, "is on the host already")
            self.on_host.add(where)
        else:
            self.require(where in self.on_host, "is not on the host")
            self.on_host.remove(where)

    # ---- compute

    def forward(self, do: Forward) -> None:
        self.check_place(do)
        if do.segment > 0:
            self.require(
                Forward(do.stage, do.segment - 1, do.mb) in self.done, "the segment before it has not run forward"
            )
        else:
            self.take("act", do.stage, do.mb, exists=do.stage > 0)
            self.change_live(do.stage, +1)
        self.use_buckets(do, adds=self.schedule.has_backward and (do.stage, do.segment) in self.program.early)
        self.work(do)
        if do.segment == self.program.segments_per_stage[do.stage] - 1:
            if do.stage < self.schedule.num_stages - 1:
                self.values.add(Value("act", do.stage + 1, do.mb))
            if not self.schedule.has_backward:
                self.change_live(do.stage, -1)

    def went_back(self, stage: int, segment: int, mb: int) -> bool:
        """Whether the gradients of a segment's inputs are there, those of its weights too or not."""
        return Backward(stage, segment, mb) in self.done or InputGrad(stage, segment, mb) in self.done

    def backward(self, do: Backward | InputGrad) -> None:
        self.check_place(do)
        last = self.program.segments_per_stage[do.stage] - 1
        self.require(not self.went_back(do.stage, do.segment, do.mb), "its backward has run already")
        self.require(Forward(do.stage, last, do.mb) in self.done, "its forward has not run")
        self.require((do.stage, do.segment, do.mb) not in self.on_host, "its activations are on the host")
        if do.segment < last:
            self.require(self.went_back(do.stage, do.segment + 1, do.mb), "the segment after it has not run backward")
        else:
            self.take("grad", do.stage, do.mb, exists=do.stage < self.schedule.num_stages - 1)
        self.use_buckets(do, adds=isinstance(do, Backward))
        self.work(do)
        if do.segment == 0 and do.stage > 0:
            self.values.add(Value("grad", do.stage - 1, do.mb))
        if isinstance(do, Backward):
            self.end_backward(do)
        else:
            self.pending[do.stage, do.mb] += 1
            self.peak_pending = max(self.peak_pending, len(+self.pending))

    def weight_grad(self, do: WeightGrad) -> None:
        self.check_place(do)
        self.require(InputGrad(do.stage, do.segment, do.mb) in self.done, "the gradients of its inputs have not run")
        self.add_gradients(do)
        self.work(do)
        self.pending[do.stage, do.mb] -= 1
        self.end_backward(do)

    def end_backward(self, do: Backward | WeightGrad) -> None:
        """The segment needs nothing more of this micro-batch."""
        self.over[do.stage, do.mb] += 1
        if self.over[do.stage, do.mb] == self.program.segments_per_stage[do.stage]:
            self.change_live(do.stage, -1)

    def check_place(self, do: Compute) -> None:
        self.require(do.stage in self.stages, f"stage {do.stage} is not on this rank")
        self.require(
            0 <= do.segment < self.program.segments_per_stage[do.stage], f"stage {do.stage} has no such segment"
        )
        self.require(0 <= do.mb < self.schedule.num_micro_batches, "there is no such micro-batch")
        self.require(do not in self.done, "runs a second time")

    def take(self, kind: TransferKind, stage: int, mb: int, exists: bool) -> None:
        if exists:
            value = Value(kind, stage, mb)
            self.require(value in self.values, f"({value}) is not there")
            self.values.remove(value)

    def work(self, do: Compute) -> None:
        start = self.time
        self.time += self.costs.of(do) / self.program.segments_per_stage[do.stage]
        self.spans.append(ActionSpan(self.rank, start, self.time, do))
        self.done.add(do)

    def change_live(self, stage: int, by: int) -> None:
        self.live[stage] += by
        self.live_changes.append(LiveChange(self.time, stage, self.live[stage]))
        self.peak_live = max(self.peak_live, self.live.total())

    # ---- messages

    def recv(self, do: Recv) -> None:
        self.require(do.value not in self.posted, "is posted a second time")
        from_stage = do.stage - 1 if do.kind == "act" else do.stage + 1
        self.require(
            do.stage in self.stages and self.owner(from_stage) == do.peer,
            f"stage {from_stage} is not on rank {do.peer}",
        )
        self.posted[do.value] = do.peer
        self.edges[do.peer, self.rank].post("recv", do.value, self.time, do.peer, self.rank)
        self.peak_receives = max(self.peak_receives, len(self.posted) - len(self.received))

    def wait(self, do: Wait) -> bool:
        self.require(do.value in self.posted, "no receive is posted for it")
        self.require(do.value not in self.received, "waits a second time")
        peer = self.posted[do.value]
        arrival = self.edges[peer, self.rank].arrival(do.value)
        self.blocked_on = peer
        if arrival is None:
            return False
        self.time = max(self.time, arrival)
        self.received.add(do.value)
        self.values.add(do.value)
        return True

    def send(self, do: Send) -> bool:
        """Post the send; with `host_rendezvous`, stay here until the receiver has posted too."""
        edge = self.edges[self.rank, do.peer]
        if not self.sending:
            self.require(
                do.stage in self.stages and self.owner(do.value.stage) == do.peer,
                f"its reader is not on rank {do.peer}",
            )
            self.take(*do.value, exists=True)
            self.sent_at.append((do.peer, len(edge.sends), self.time))
            edge.post("send", do.value, self.time, self.rank, do.peer)
            self.sending = True
        i = self.sent_at[-1][1]
        if self.host_rendezvous:
            self.blocked_on = do.peer
            if i >= len(edge.recvs):
                return False
            self.time = max(self.time, edge.recvs[i][1])
        self.sending = False
        return True

    def owner(self, stage: int) -> int | None:
        return self.schedule.stage_rank[stage] if 0 <= stage < self.schedule.num_stages else None

    # ---- buckets and the end

    def use_buckets(self, do: Forward | Backward | InputGrad, adds: bool) -> None:
        mine = self.buckets_of[do.stage, do.segment]
        missing = [bucket for bucket in mine if bucket not in self.bucket_states.ready]
        self.require(not missing, f"reads parameters of buckets {missing} before they are gathered")
        if adds:
            self.add_gradients(do)

    def add_gradients(self, do: Compute) -> None:
        for bucket in self.buckets_of[do.stage, do.segment]:
            wrong = self.bucket_states.add(bucket, self.program.flow(self.rank, bucket))
            self.require(not wrong, wrong)

    def check_complete(self) -> None:
        for stage in sorted(self.stages):
            for segment in range(self.program.segments_per_stage[stage]):
                for mb in range(self.schedule.num_micro_batches):
                    missing = self.never_done(stage, segment, mb)
                    if missing is not None:
                        raise ScheduleError(f"rank {self.rank} never runs {missing}")
        if self.values:
            raise ScheduleError(
                f"rank {self.rank} holds values that nobody reads: {', '.join(str(v) for v in sorted(self.values))}"
            )
        if len(self.posted) > len(self.received):
            raise ScheduleError(
                f"rank {self.rank} never waits for {[str(v) for v in sorted(set(self.posted) - self.received)]}"
            )
        trained = self.schedule.has_backward
        applying = {b for b in self.buckets if trained and self.program.flow(self.rank, b).applies}
        wrong = self.bucket_states.missing(set(self.buckets), trained, applying)
        if wrong:
            raise ScheduleError(f"rank {self.rank} {wrong}")

    def never_done(self, *where: int) -> Compute | None:
        """What a segment still has to do for a micro-batch at the end of the step."""
        if Forward(*where) not in self.done:
            return Forward(*where)
        if not self.schedule.has_backward or Backward(*where) in self.done:
            return None
        if InputGrad(*where) not in self.done:
            return Backward(*where)
        return None if WeightGrad(*where) in self.done else WeightGrad(*where)


def _deadlock(ranks: list[_Rank]) -> NoReturn:
    """Raise ScheduleError. From any blocked rank, follow who waits for whom: the walk ends in a cycle, or at a rank
    that has finished."""
    rank = next(rank for rank in ranks if not rank.finished)
    walk: list[_Rank] = []
    while rank not in walk and not rank.finished:
        walk.append(rank)
        rank = ranks[rank.blocked_on if rank.blocked_on is not None else rank.rank]
    culprits = walk[walk.index(rank) :] if rank in walk else [walk[-1], rank]
    raise ScheduleError("deadlock:\n" + "\n".join(f"  rank {rank.rank} {rank.state()}" for rank in culprits))


def _trace(program: Program, ranks: list[_Rank], edges: dict[tuple[int, int], _Edge]) -> ScheduleTrace:
    peak_of_stage: Counter[int] = Counter()
    for change in (change for rank in ranks for change in rank.live_changes):
        peak_of_stage[change.stage] = max(peak_of_stage[change.stage], change.live)
    return ScheduleTrace(
        program=program,
        makespan=max(rank.time for rank in ranks),
        busy=tuple(sum(span.end - span.start for span in rank.spans) for rank in ranks),
        spans=tuple(tuple(rank.spans) for rank in ranks),
        live=tuple(tuple(rank.live_changes) for rank in ranks),
        peak_live=tuple(rank.peak_live for rank in ranks),
        peak_pending=tuple(rank.peak_pending for rank in ranks),
        peak_live_of_stage=tuple(peak_of_stage[stage] for stage in range(program.schedule.num_stages)),
        peak_receives=tuple(rank.peak_receives for rank in ranks),
        peak_sends=tuple(_peak_sends(rank, edges) for rank in ranks),
    )


def _peak_sends(rank: _Rank, edges: dict[tuple[int, int], _Edge]) -> int:
    changes = []
    for peer, i, time in rank.sent_at:
        changes += [(time, 1), (edges[rank.rank, peer].ends[i], -1)]
    now = peak = 0
    for _, by in sorted(changes):  # at equal times, releases first
        now += by
        peak = max(peak, now)
    return peak

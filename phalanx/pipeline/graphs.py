"""CUDA graphs: after one eager step, the forward and the backward of each segment of blocks are one launch each.

A graph belongs to (stage, segment, slot). A slot holds one micro-batch in flight in a stage: its tokens, activations
and gradients always have the same addresses, so a segment's graph writes where the next segment's graph reads, without
copies. A stage has as many slots as micro-batches were ever in flight in it at once.

    step 1        eager, nothing is captured
    later steps   a micro-batch enters a stage ──▶ takes a free slot that fits it, or a new one
                  each segment forward         ──▶ the first time in this slot: capture; then replay
                  each segment backward        ──▶ the first time in this slot: capture; then replay
                  the last backward is over    ──▶ the slot is free again

Forward writes to a memory pool of its slot: within a slot graphs are replayed in the order of their capture, between
slots they are not. Backward writes to one pool that all slots of a rank share: its results are needed only until the
stage's backward of that micro-batch is over, and nothing else runs in between. Code that keeps the gradient of a
stage's input for longer copies it.

Segments with offloaded activations are never captured (config.check).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from phalanx.comm.axis import Axis, Overlap
from phalanx.nn.recompute import Recompute
from phalanx.pipeline.root import backward_from
from phalanx.pipeline.segments import CapturedSegment, Cuda, GraphCuts, uncollected
from phalanx.schedule.actions import Schedule
from phalanx.sequence.batch import Batch, usual_documents

Compute = Callable[[Tensor, Batch], Tensor]
"""(input, batch) -> output."""
Where = tuple[int, int]
SELDOM, BALANCED, PLAIN, OF_DOCUMENTS = range(4)
"""Kinds of micro-batches. SELDOM: it has more documents than slots have room for; it may come only once, which is not
worth a memory pool. BALANCED: its documents are balanced over ranks. PLAIN: without documents.
OF_DOCUMENTS: attention is inside documents."""
T = TypeVar("T")


def _kind(batch: Batch) -> int:
    if batch.most_documents > usual_documents(batch.all_tokens):
        return SELDOM
    if batch.balanced is not None:
        return BALANCED
    return PLAIN if batch.documents is None else OF_DOCUMENTS


class Eager:
    """Runs segments without CUDA graphs: the reference implementation of `Graphs`.

    reuses_memory   a segment's result is overwritten when its slot is used again: copy it to keep it
    captures        graphs may be captured in this step. CUDA may then wait for all work of the device, so nothing may
                    be pending there that depends on another rank's host: a receive posted ahead would wait for what
                    that rank computes from this segment
    """

    reuses_memory = False
    captures = False

    def begin(self, seed: Tensor, batches: Sequence[Batch]) -> Tensor:
        """Start a step with these micro-batches. `seed` () is the gradient of the summed loss; returns the tensor to
        use in its place."""
        return seed

    def forward(self, where: Where, mb: int, x: Tensor, batch: Batch, compute: Compute) -> tuple[Tensor, Tensor]:
        """(input, output) of a segment. The input is a leaf that will get a gradient, except in the model's first
        segment."""
        x = x if where == (0, 0) else x.detach().requires_grad_()
        with torch.enable_grad():
            return x, compute(x, batch)

    def backward(self, where: Where, mb: int, x: Tensor, y: Tensor, dy: Tensor | None, last: bool) -> Tensor | None:
        """Gradient of the segment's input. `last`: it is the stage's last backward of this micro-batch."""
        if y.requires_grad:  # the model's first segment may be frozen as a whole
            backward_from(y, dy)
        return x.grad

    def end(self) -> None:
        """End a step."""

    def close(self) -> None:
        """Delete all graphs. Communicators cannot be closed before the graphs that use them."""

    def forget(self) -> None:
        """The blocks compute something else now: delete all graphs and capture again after another eager step."""


@dataclass
class _Captured:
    """A segment captured in one slot: its forward, its backward and the tensors they read and write."""

    x: Tensor
    y: Tensor
    forward: CapturedSegment
    dy: Tensor | None = None
    backward: CapturedSegment | None = None

    def reset(self) -> None:
        for row in (self.forward, self.backward):
            if row is not None:
                row.reset()


@dataclass
class _Slot:
    """Memory for one micro-batch in flight in a stage, and the segments captured on it."""

    batch: Batch
    pool: Any
    segments: dict[Where, _Captured] = field(default_factory=dict)


class Graphs(Eager):
    """Captures each segment when it first runs in a slot after the first step, and replays it from then on.

    memories    shared memory through which ranks exchange inside segments
    between     names of ops that cannot be captured and run between graphs (segments.GraphCuts)
    hosts       the ranks that exchange tokens inside segments although their micro-batches differ
    schedule    the schedule for a number of micro-batches, if stages on other ranks pass messages
    """

    reuses_memory = True

    def __init__(
        self,
        device: Cuda,
        recompute: Recompute,
        memories: tuple[Overlap, ...] = (),
        between: Set[str] = frozenset(),
        hosts: Axis | None = None,
        schedule: Callable[[int], Schedule] | None = None,
    ):
        self.device = device
        self.memories = memories
        self._recompute = recompute
        self._cuts = GraphCuts(between)
        self._hosts = hosts
        self._passing = device.pool()  # backward of all slots
        self._warm = False
        self._seed: Tensor | None = None
        self._kinds: list[int] = []  # of the step's micro-batches
        self._schedule = schedule
        self._known: set[tuple] = set()  # the sorts of micro-batches of each step so far
        self._most: Counter[tuple[int, Hashable]] = Counter()  # slots by stage and sort, of all stages
        self._slots: dict[tuple, list[_Slot]] = {}  # by stage and sort of micro-batch
        self._free: dict[tuple, list[_Slot]] = {}
        self._taken: dict[tuple[int, int], tuple[tuple, _Slot, Batch]] = {}  # by stage and micro-batch

    def begin(self, seed: Tensor, batches: Sequence[Batch]) -> Tensor:
        self._kinds = self._agreed([_kind(b) for b in batches])
        self.captures = self._warm and self._needs_slots(batches)
        if self._seed is None:
            self._seed = seed.clone()
        self._seed.copy_(seed)
        return self._seed

    def end(self) -> None:
        if not self._warm:
            self.device.tidy()  # the cached memory of the first step becomes free for the graphs' pools
        self._warm = True

    def close(self) -> None:
        self.device.wait()
        for slot in (s for slots in self._slots.values() for s in slots):
            for segment in slot.segments.values():
                segment.reset()
        for kept in (self._slots, self._free, self._taken, self._known, self._most):
            kept.clear()
        self.memories, self._warm = (), False

    def forget(self) -> None:
        memories = self.memories
        self.close()
        self.memories, self._passing = memories, self.device.pool()  # a pool whose graphs are all gone takes no more

    def forward(self, where: Where, mb: int, x: Tensor, batch: Batch, compute: Compute) -> tuple[Tensor, Tensor]:
        if not self._warm or self._kinds[mb] == SELDOM:
            return self._turning(lambda: super(Graphs, self).forward(where, mb, x, batch, compute))
        if (where[0], mb) not in self._taken:
            self._taken[where[0], mb] = (*self._take(where[0], batch), batch)
        slot = self._taken[where[0], mb][1]
        segment = slot.segments.get(where)
        if segment is None:
            segment = slot.segments[where] = self._capture_forward(slot, where, x, compute)
        elif x.data_ptr() != segment.x.data_ptr():
            segment.x.detach().copy_(x)
        segment.forward.replay(batch)
        return segment.x, segment.y

    def backward(self, where: Where, mb: int, x: Tensor, y: Tensor, dy: Tensor | None, last: bool) -> Tensor | None:
        if (where[0], mb) not in self._taken:
            return self._turning(lambda: super(Graphs, self).backward(where, mb, x, y, dy, last))
        kind, slot, batch = self._taken[where[0], mb]
        segment = slot.segments[where]
        if segment.backward is None and segment.y.requires_grad:
            if dy is None:
                raise RuntimeError("the gradient of a segment that is being captured must be given")
            segment.dy = dy if self._stays(slot, dy) else dy.clone()
            segment.backward = self._capture(self._passing, lambda: backward_from(segment.y, segment.dy), late=True)
            segment.y = segment.y.detach()
            self._let_go(slot, segment)
        elif segment.dy is not None and dy is not None and dy.data_ptr() != segment.dy.data_ptr():
            segment.dy.copy_(dy)
        if segment.backward is not None:
            segment.backward.replay(batch)
        if last:
            del self._taken[where[0], mb]
            self._free[kind].append(slot)
        return segment.x.grad

    def _turning(self, work: Callable[[], T]) -> T:
        """Do eager work so that exchanges through shared memory end on the turn on which they began, as they do in
        graphs. Other graphs, and ranks that replay this segment, rely on it."""
        turns = [memory.turn for memory in self.memories]
        done = work()
        for memory, turn in zip(self.memories, turns):
            memory.back_to(turn)
        return done

    def _agreed(self, kinds: list[int]) -> list[int]:
        """The kinds on all ranks that exchange tokens: a micro-batch that is not of one kind on all of them is captured
        on none. NCCL requires that ranks capture an exchange together and replay it together."""
        if self._hosts is None:
            return kinds
        everyones = self._hosts.all_gather(torch.tensor([kinds])).wait()
        return torch.where((everyones == everyones[0]).all(0), everyones[0], SELDOM).tolist()

    def _needs_slots(self, batches: Sequence[Batch]) -> bool:
        """Whether some stage gets new slots in this step. All stages find the same answer, because they have
        micro-batches of the same sorts."""
        sorts = tuple(
            None if kind == SELDOM else (b.num_sequences, b.seq_length, kind) for kind, b in zip(self._kinds, batches)
        )
        if self._schedule is None or sorts in self._known:
            return False
        self._known.add(sorts)
        most = self._schedule(len(batches)).most_in_flight(sorts)
        more = any(number > self._most[where] for where, number in most.items())
        self._most |= most
        return more

    def _take(self, stage: int, batch: Batch) -> tuple[tuple, _Slot]:
        """The kind of slot that the batch needs, and a free one of the stage that now holds the batch."""
        kind = (stage, batch.num_sequences, batch.seq_length, _kind(batch))
        free = self._free.setdefault(kind, [])
        if not free:
            tensors = {
                f.name: getattr(batch, f.name).clone()
                for f in fields(batch)
                if isinstance(getattr(batch, f.name), Tensor)
            }
            slot = _Slot(replace(batch, **{**tensors, "loss_seed": self._seed, "_derived": {}}), self.device.pool())
            self._slots.setdefault(kind, []).append(slot)
            return kind, slot
        slot = free.pop()
        for f in fields(batch):
            value = getattr(batch, f.name)
            if isinstance(value, Tensor) and f.name != "loss_seed":
                getattr(slot.batch, f.name).copy_(value)
        return kind, slot

    def _stays(self, slot: _Slot, x: Tensor) -> bool:
        """Whether `x` has the same address in every step: it is the seed, or another segment of the slot writes it."""
        mine = {self._seed.data_ptr() if self._seed is not None else 0}
        for segment in slot.segments.values():
            mine |= {segment.y.data_ptr(), segment.x.grad.data_ptr() if segment.x.grad is not None else 0}
        return x.data_ptr() in mine

    def _let_go(self, slot: _Slot, segment: _Captured) -> None:
        """Drop the references to the gradient that `segment` has read, so that later captures may reuse its memory.

        From then on it is passed on as None: the graphs know its address.
        """
        for writer in slot.segments.values():
            if (
                writer.x.grad is not None
                and segment.dy is not None
                and writer.x.grad.data_ptr() == segment.dy.data_ptr()
            ):
                writer.x.grad = segment.dy = None

    def _capture_forward(self, slot: _Slot, where: Where, x: Tensor, compute: Compute) -> _Captured:
        if where != (0, 0):
            x = (x if self._stays(slot, x) else x.clone()).detach().requires_grad_()
        made: list[Tensor] = []

        def work() -> None:
            with torch.enable_grad():
                made.append(compute(x, slot.batch))

        graph = self._capture(slot.pool, work)
        return _Captured(x, made[0], graph)

    def _capture(self, pool: Any, work: Callable[[], None], late: bool = False) -> CapturedSegment:
        row = CapturedSegment(self.device, pool, late)
        with uncollected(), self.device.aside(), self._cutting(row):
            row.begin()
            try:
                self._turning(work)
            finally:
                row.end()
        return row

    @contextmanager
    def _cutting(self, row: CapturedSegment) -> Iterator[None]:
        """Inside, ops that cannot be captured become eager steps of this captured segment."""
        self._recompute.cuts, self._cuts.row = self._cuts, row
        try:
            yield
        finally:
            self._recompute.cuts = self._cuts.row = None

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

Segments with offloaded activations and split backwards are never captured (config.check). Segments whose rows follow
the images of a micro-batch (a vision tower, and the embedding of the text that its features go to) run without graphs
before those of the text, whose graphs copy what they are given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import field, replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.comm.axis import Axis, Overlap
from phalanx.nn.recompute import Recompute
from phalanx.pipeline.root import backward_from
from phalanx.pipeline.segments import CapturedSegment, Cuda, GraphCuts, uncollected
from phalanx.schedule.actions import Schedule
from phalanx.sequence.batch import Batch, usual_documents

Tensors = tuple[Tensor, ...]
"""What crosses a border of segments: one tensor per stream (sequence.streams)."""
Gradients = tuple[Tensor | None, ...]
"""Of such tensors; None: a tensor without a gradient."""
Compute = Callable[[Tensors, Batch], Tensors]
"""(inputs, batch) -> outputs."""
Where = tuple[int, int]
SELDOM, BALANCED, PLAIN, OF_DOCUMENTS = range(4)
"""Kinds of micro-batches. SELDOM: it has more documents than slots have room for, or longer ones; it may come only
once, which is not worth a memory pool. BALANCED: its documents are balanced over ranks. PLAIN: without documents.
OF_DOCUMENTS: attention is inside documents."""
ENOUGH = 64  # micro-batches, after which slots are made anew if too many of them were SELDOM
TOO_MANY = 4  # if more than every fourth was
T = TypeVar("T")


def _fixed(batch: Batch) -> dict[str, Batch]:
    """The streams beside the text that have as many rows in every micro-batch."""
    return {name: stream for name, stream in batch.beside.items() if stream.units is None}


TEXT_ITSELF = ""


class SlotRooms:
    """How many documents slots have room for, and how long ones, in each stream.

    Kernels are captured with these bounds and start programs that find nothing to do for what a micro-batch has less,
    so bounds are those of the data: what the first step had, which runs without graphs, and documents twice as long.
    Where too many later micro-batches exceed them, the bounds grow, and graphs are captured anew.
    """

    def __init__(self) -> None:
        self._bounds: dict[str, tuple[int, int]] = {}
        self._seen: dict[str, tuple[int, int]] = {}
        self._few_labels = False
        self._count = self._beyond = 0

    def see(self, batches: Sequence[Batch]) -> None:
        """The micro-batches of another step."""
        self._few_labels |= any(batch.label_rows for batch in batches)
        for name, batch in chain.from_iterable(map(_with_documents, batches)):
            most, longest = self._seen.get(name, (0, 0))
            self._seen[name] = max(most, batch.room_for_documents), max(longest, batch.longest)
        if self._bounds:
            self._count += len(batches)
            self._beyond += sum(not self.fits(batch) for batch in batches)

    @property
    def outgrown(self) -> bool:
        """Whether they should grow."""
        return self._count >= ENOUGH and self._beyond * TOO_MANY > self._count

    def grow(self) -> None:
        """To what was seen."""
        self._bounds, self._count, self._beyond = dict(self._seen), 0, 0

    def of(self, name: str, batch: Batch) -> tuple[int, int]:
        """Documents, and tokens of the longest, that a slot for this batch has room for."""
        most, longest = self._bounds.get(name, (0, batch.seq_length))
        return max(most, usual_documents(batch.all_tokens)), min(2 << (longest - 1).bit_length(), batch.seq_length)

    def fits(self, batch: Batch) -> bool:
        """Whether a slot has room for the documents of this batch, and for its labels where slots have few."""
        if self._few_labels and not batch.label_rows:
            return False
        inside = [(*self.of(name, each), each) for name, each in _with_documents(batch)]
        return all(each.room_for_documents <= most and each.longest <= longest for most, longest, each in inside)

    def slot(self, batch: Batch) -> Batch:
        """A copy of a batch that has all the room, without streams of units."""
        own = {name: stream.roomier(*self.of(name, stream)) for name, stream in _fixed(batch).items()}
        return replace(batch.roomier(*self.of(TEXT_ITSELF, batch)), beside=own).map(Tensor.clone)


def _with_documents(batch: Batch) -> Iterator[tuple[str, Batch]]:
    """The text, and what has fixed rows beside it, by name, if it has documents."""
    for name, each in {TEXT_ITSELF: batch, **_fixed(batch)}.items():
        if each.documents is not None:
            yield name, each


class Eager:
    """Runs segments without CUDA graphs: the reference implementation of `Graphs`.

    reuses_memory   a segment's result is overwritten when its slot is used again: copy it to keep it
    captures        graphs may be captured in this step. CUDA may then wait for all work of the device, so nothing may
                    be pending there that depends on another rank's host: a receive posted ahead would wait for what
                    that rank computes from this segment
    """

    reuses_memory = False
    captures = False
    without_gradient: Set[Where] = frozenset({(0, 0)})
    """Segments whose inputs get no gradient."""

    def begin(self, seed: Tensor, batches: Sequence[Batch]) -> Tensor:
        """Start a step with these micro-batches. `seed` () is the gradient of the summed loss; returns the tensor to
        use in its place."""
        return seed

    def forward(self, where: Where, mb: int, xs: Tensors, batch: Batch, compute: Compute) -> tuple[Tensors, Tensors]:
        """(inputs, outputs) of a segment. The inputs are leaves that will get a gradient, except in the model's first
        segment, and where nothing before a segment is trained."""
        xs = xs if where in self.without_gradient else leaves(xs)
        return xs, outputs_of(xs, batch, compute)

    def backward(self, where: Where, mb: int, xs: Tensors, ys: Tensors, dys: Gradients, last: bool) -> Gradients:
        """Gradients of the segment's inputs. `last`: it is the stage's last backward of this micro-batch."""
        backward_from_known(ys, dys)
        return gradients_of(xs)

    def end(self) -> None:
        """End a step."""

    def close(self) -> None:
        """Delete all graphs. Communicators cannot be closed before the graphs that use them."""

    def forget(self) -> None:
        """The blocks compute something else now: delete all graphs and capture again after another eager step."""


def leaves(xs: Tensors) -> Tensors:
    """The same tensors cut off autograd's graph."""
    return tuple(x.detach().requires_grad_(x.is_floating_point()) for x in xs)


def outputs_of(xs: Tensors, batch: Batch, compute: Compute) -> Tensors:
    """What a segment computes. Several streams become views: a border's tensors are its own, whatever passes through a
    segment or is read in it too."""
    with torch.enable_grad():
        ys = compute(xs, batch)
        return tuple(y.view_as(y) for y in ys) if max(len(xs), len(ys)) > 1 else ys


def backward_from_known(ys: Tensors, dys: Gradients) -> None:
    """Backward from those with a gradient: of the model's first segment, which may be frozen as a whole, perhaps
    none."""
    pairs = [(y, dy) for y, dy in zip(ys, dys, strict=True) if y.requires_grad]
    if any(dy is None for _, dy in pairs):
        raise RuntimeError("the gradient of what a segment returned must be given")
    if pairs:
        backward_from(*zip(*pairs))


def gradients_of(xs: Tensors) -> Gradients:
    """What backward left, and zeros where nothing read a stream."""
    for x in xs if len(xs) > 1 else ():
        if x.requires_grad and x.grad is None:
            x.grad = torch.zeros_like(x)
    return tuple(x.grad for x in xs)


@dataclass
class _Captured:
    """A segment captured in one slot: its forward, its backward and the tensors they read and write."""

    xs: Tensors
    ys: Tensors
    forward: CapturedSegment
    dys: Gradients = ()
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
    varying: Set[Where] = frozenset()
    """Segments of which each micro-batch has another number of rows: they run without graphs."""

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
        self._rooms = SlotRooms()
        self._kinds: list[int] = []  # of the step's micro-batches
        self._schedule = schedule
        self._known: set[tuple] = set()  # the sorts of micro-batches of each step so far
        self._most: Counter[tuple[int, Hashable]] = Counter()  # slots by stage and sort, of all stages
        self._slots: dict[tuple, list[_Slot]] = {}  # by stage and sort of micro-batch
        self._free: dict[tuple, list[_Slot]] = {}
        self._taken: dict[tuple[int, int], tuple[tuple, _Slot, Batch]] = {}  # by stage and micro-batch

    def begin(self, seed: Tensor, batches: Sequence[Batch]) -> Tensor:
        self._rooms.see(batches)
        self._kinds, outgrown = self._agreed([self._kind(b) for b in batches], self._rooms.outgrown)
        if self._warm and outgrown:
            self.forget()
        if not self._warm:
            self._rooms.grow()
        self.captures = self._warm and self._needs_slots(batches)
        if self._seed is None:
            self._seed = seed.clone()
        self._seed.copy_(seed)
        return self._seed

    def end(self) -> None:
        if not self._warm:
            self.device.tidy()  # the cached memory of the first step becomes free for the graphs' pools
        self._warm = True

    @property
    def captured(self) -> int:
        """Segments that are replayed."""
        return sum(len(slot.segments) for slots in self._slots.values() for slot in slots)

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

    def forward(self, where: Where, mb: int, xs: Tensors, batch: Batch, compute: Compute) -> tuple[Tensors, Tensors]:
        if not self._warm or self._kinds[mb] == SELDOM or where in self.varying:
            return self._turning(lambda: super(Graphs, self).forward(where, mb, xs, batch, compute))
        if (where[0], mb) not in self._taken:
            self._taken[where[0], mb] = (*self._take(where[0], batch), batch)
        slot = self._taken[where[0], mb][1]
        segment = slot.segments.get(where)
        if segment is None:
            segment = slot.segments[where] = self._capture_forward(slot, where, xs, compute)
        else:
            for x, mine in zip(xs, segment.xs, strict=True):
                if x.data_ptr() != mine.data_ptr():
                    mine.detach().copy_(x)
        segment.forward.replay(batch)
        return segment.xs, segment.ys

    def backward(self, where: Where, mb: int, xs: Tensors, ys: Tensors, dys: Gradients, last: bool) -> Gradients:
        if (where[0], mb) not in self._taken or where in self.varying:
            gradients = self._turning(lambda: super(Graphs, self).backward(where, mb, xs, ys, dys, last))
            if last:
                self._give_back(where[0], mb)
            return gradients
        _, slot, batch = self._taken[where[0], mb]
        segment = slot.segments[where]
        if segment.backward is None and any(y.requires_grad for y in segment.ys):
            segment.dys = tuple(dy if dy is None or self._stays(slot, dy) else dy.clone() for dy in dys)
            segment.backward = self._capture(self._passing, lambda: self._backward_of(segment), late=True)
            segment.ys = tuple(y.detach() for y in segment.ys)
            gradients = tuple(x.grad for x in segment.xs)
            self._let_go(slot, segment)
        else:
            for dy, mine in zip(dys, segment.dys):
                if mine is not None and dy is not None and dy.data_ptr() != mine.data_ptr():
                    mine.copy_(dy)
            gradients = tuple(x.grad for x in segment.xs)
        if segment.backward is not None:
            segment.backward.replay(batch)
        if last:
            self._give_back(where[0], mb)
        return gradients

    def _give_back(self, stage: int, mb: int) -> None:
        """The stage has no more use for the slot of a micro-batch, if it has one."""
        if (stage, mb) in self._taken:
            kind, slot, _ = self._taken.pop((stage, mb))
            self._free[kind].append(slot)

    def _turning(self, work: Callable[[], T]) -> T:
        """Do eager work so that exchanges through shared memory end on the turn on which they began, as they do in
        graphs. Other graphs, and ranks that replay this segment, rely on it."""
        turns = [memory.turn for memory in self.memories]
        done = work()
        for memory, turn in zip(self.memories, turns):
            memory.back_to(turn)
        return done

    def _kind(self, batch: Batch) -> int:
        if not self._rooms.fits(batch):
            return SELDOM
        if batch.balanced is not None:
            return BALANCED
        return PLAIN if batch.documents is None else OF_DOCUMENTS

    def _agreed(self, kinds: list[int], outgrown: bool) -> tuple[list[int], bool]:
        """The kinds on all ranks that exchange tokens: a micro-batch that is not of one kind on all of them is captured
        on none. NCCL requires that ranks capture an exchange together and replay it together. Beside them, whether on
        any rank documents have outgrown the slots."""
        if self._hosts is None:
            return kinds, outgrown
        everyones = self._hosts.all_gather(torch.tensor([[*kinds, int(outgrown)]])).wait()
        found = everyones[:, :-1]
        return torch.where((found == found[0]).all(0), found[0], SELDOM).tolist(), bool(everyones[:, -1].any())

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
        kind = (stage, batch.num_sequences, batch.seq_length, self._kind(batch))
        free = self._free.setdefault(kind, [])
        if not free:
            slot = _Slot(replace(self._rooms.slot(batch), loss_seed=self._seed), self.device.pool())
            self._slots.setdefault(kind, []).append(slot)
            return kind, slot
        slot = free.pop()
        slot.batch.copy_from(batch)
        return kind, slot

    def _stays(self, slot: _Slot, x: Tensor) -> bool:
        """Whether `x` has the same address in every step: it is the seed, or another segment of the slot writes it."""
        mine = {self._seed.data_ptr() if self._seed is not None else 0}
        for segment in slot.segments.values():
            mine |= {y.data_ptr() for y in segment.ys} | {x.grad.data_ptr() for x in segment.xs if x.grad is not None}
        return x.data_ptr() in mine

    def _let_go(self, slot: _Slot, segment: _Captured) -> None:
        """Drop the references to the gradients that `segment` has read, so that later captures may reuse their memory.

        From then on they are passed on as None: the graphs know their addresses.
        """
        read = {dy.data_ptr() for dy in segment.dys if dy is not None}
        dropped = set()
        for x in (x for writer in slot.segments.values() if writer is not segment for x in writer.xs):
            if x.grad is not None and x.grad.data_ptr() in read:
                dropped.add(x.grad.data_ptr())
                x.grad = None
        segment.dys = tuple(None if dy is None or dy.data_ptr() in dropped else dy for dy in segment.dys)

    def _capture_forward(self, slot: _Slot, where: Where, xs: Tensors, compute: Compute) -> _Captured:
        if where not in self.without_gradient:
            xs = leaves(tuple(x if self._stays(slot, x) else x.clone() for x in xs))
        made: list[Tensors] = []

        def work() -> None:
            made.append(outputs_of(xs, slot.batch, compute))

        graph = self._capture(slot.pool, work)
        return _Captured(xs, made[0], graph)

    def _backward_of(self, segment: _Captured) -> None:
        backward_from_known(segment.ys, segment.dys)
        gradients_of(segment.xs)  # zeros too are made by the graph: they must not outlive its memory

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

"""CUDA graphs of runs of blocks: after a step without them, forward and backward of each run become one launch each.

A graph belongs to (stage, run, slot). A slot is a place for one micro-batch in flight in a stage: its tokens, its
activations and its gradients always lie at the same addresses, so what a run writes is what the next run's graph
reads, without copies. A stage has as many slots as micro-batches were ever in flight in it at once.

What forward makes lies in a pool of memory of its slot: within a slot the order of captures is the order of replays,
between slots it is not. What backward makes is needed no longer than until the stage's backward of that micro-batch
is over, and nothing comes between its runs, so all slots of a rank share one pool for it; whoever keeps the gradient
of a stage's input takes a copy.
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
"""Kinds of micro-batches: with more documents than the others have room for, which may come once and is not worth a
pool of memory; whose documents are dealt to ranks; without documents; with them."""
T = TypeVar("T")


def _kind(batch: Batch) -> int:
    if batch.most_documents > usual_documents(batch.all_tokens):
        return SELDOM
    if batch.balanced is not None:
        return BALANCED
    return PLAIN if batch.documents is None else OF_DOCUMENTS


class Eager:
    """Runs blocks as they are: what graphs are the fast implementation of.

    `reuses_memory`: what a run returns is overwritten when its place is used again, so whoever keeps it for long
    takes a copy. `captures`: whether graphs may be made in this step. CUDA may wait then for all that the device is
    doing, so nothing may be under way there that another rank's host has yet to ask for: a message received ahead
    would wait for what that rank computes from this run.
    """

    reuses_memory = False
    captures = False

    def begin(self, seed: Tensor, batches: Sequence[Batch]) -> Tensor:
        """At the start of a step with these micro-batches; `seed` () is the gradient of the summed loss. Returns the
        tensor to use in its place."""
        return seed

    def forward(self, where: Where, mb: int, x: Tensor, batch: Batch, compute: Compute) -> tuple[Tensor, Tensor]:
        """(input, output) of a run, the input a leaf that will get a gradient (unless it is the model's first)."""
        x = x if where == (0, 0) else x.detach().requires_grad_()
        with torch.enable_grad():
            return x, compute(x, batch)

    def backward(self, where: Where, mb: int, x: Tensor, y: Tensor, dy: Tensor | None, last: bool) -> Tensor | None:
        """Gradient of the run's input. `last`: nothing of this micro-batch is left in this stage after it."""
        if y.requires_grad:  # not where all that the model's first run has is frozen
            backward_from(y, dy)
        return x.grad

    def end(self) -> None:
        """At the end of a step."""

    def close(self) -> None:
        """Let go of what was captured. Communicators cannot be closed before the graphs that use them."""

    def forget(self) -> None:
        """What runs compute has changed: capture it anew, after another step without graphs."""


@dataclass
class _Captured:
    """A run's two rows of graphs and the tensors they read and write."""

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
    batch: Batch
    pool: Any
    runs: dict[Where, _Captured] = field(default_factory=dict)


class Graphs(Eager):
    """Replays runs; captures each when it first comes by after the first step. `memories`: what ranks exchange
    through inside. `between`: names of ops of the blocks' `tape` that cannot be captured. `hosts`: of ranks whose
    runs exchange while they have different micro-batches. `schedule`: of so many micro-batches, where stages on
    other ranks pass messages."""

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
        self.device, self.memories, self._recompute, self._cuts, self._hosts = (
            device,
            memories,
            recompute,
            GraphCuts(between),
            hosts,
        )
        self._passing = device.pool()  # what backward makes
        self._warm = False
        self._seed: Tensor | None = None
        self._kinds: list[int] = []  # of the step's micro-batches
        self._schedule = schedule
        self._known: set[tuple] = set()  # the sorts of micro-batches of steps so far
        self._most: Counter[tuple[int, Hashable]] = Counter()  # slots by stage and sort, of all stages
        self._slots: dict[tuple, list[_Slot]] = {}  # by stage and what sort of batch it takes
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
            self.device.tidy()  # what the first step used goes to the graphs' pools
        self._warm = True

    def close(self) -> None:
        self.device.wait()
        for slot in (s for slots in self._slots.values() for s in slots):
            for run in slot.runs.values():
                run.reset()
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
        run = slot.runs.get(where)
        if run is None:
            run = slot.runs[where] = self._capture_forward(slot, where, x, compute)
        elif x.data_ptr() != run.x.data_ptr():
            run.x.detach().copy_(x)
        run.forward.replay(batch)
        return run.x, run.y

    def backward(self, where: Where, mb: int, x: Tensor, y: Tensor, dy: Tensor | None, last: bool) -> Tensor | None:
        if (where[0], mb) not in self._taken:
            return self._turning(lambda: super(Graphs, self).backward(where, mb, x, y, dy, last))
        kind, slot, batch = self._taken[where[0], mb]
        run = slot.runs[where]
        if run.backward is None and run.y.requires_grad:
            if dy is None:
                raise RuntimeError("the gradient of a run that is being captured must be given")
            run.dy = dy if self._stays(slot, dy) else dy.clone()
            run.backward = self._capture(self._passing, lambda: backward_from(run.y, run.dy), late=True)
            run.y = run.y.detach()
            self._let_go(slot, run)
        elif run.dy is not None and dy is not None and dy.data_ptr() != run.dy.data_ptr():
            run.dy.copy_(dy)
        if run.backward is not None:
            run.backward.replay(batch)
        if last:
            del self._taken[where[0], mb]
            self._free[kind].append(slot)
        return run.x.grad

    def _turning(self, work: Callable[[], T]) -> T:
        """Do what is not captured, its exchanges ending on the turn on which they began, as those of graphs do:
        other graphs, and ranks that replay theirs of this run, count on it."""
        turns = [memory.turn for memory in self.memories]
        done = work()
        for memory, turn in zip(self.memories, turns):
            memory.back_to(turn)
        return done

    def _agreed(self, kinds: list[int]) -> list[int]:
        """What is not of one kind on all ranks that exchange tokens is captured on none: NCCL requires that of an
        exchange, and that all replay the graphs that they captured together."""
        if self._hosts is None:
            return kinds
        everyones = self._hosts.all_gather(torch.tensor([kinds])).wait()
        return torch.where((everyones == everyones[0]).all(0), everyones[0], SELDOM).tolist()

    def _needs_slots(self, batches: Sequence[Batch]) -> bool:
        """Whether some stage gets slots in this step. All stages find the same: they have micro-batches of the same
        sorts."""
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
        """A free slot of the stage for such a batch, holding its values."""
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
        """Whether `x` always lies where it lies now: the seed, or what another run of the slot writes."""
        mine = {self._seed.data_ptr() if self._seed is not None else 0}
        for run in slot.runs.values():
            mine |= {run.y.data_ptr(), run.x.grad.data_ptr() if run.x.grad is not None else 0}
        return x.data_ptr() in mine

    def _let_go(self, slot: _Slot, run: _Captured) -> None:
        """The gradient that `run` has read may be overwritten by what is captured after it: its writer no longer
        holds it.

        From then on it is passed on as None: it lies where the graph expects it.
        """
        for writer in slot.runs.values():
            if writer.x.grad is not None and run.dy is not None and writer.x.grad.data_ptr() == run.dy.data_ptr():
                writer.x.grad = run.dy = None

    def _capture_forward(self, slot: _Slot, where: Where, x: Tensor, compute: Compute) -> _Captured:
        if where != (0, 0):
            x = (x if self._stays(slot, x) else x.clone()).detach().requires_grad_()
        made: list[Tensor] = []

        def run() -> None:
            with torch.enable_grad():
                made.append(compute(x, slot.batch))

        graph = self._capture(slot.pool, run)
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
        """What the tape runs meanwhile stands in this row, if it is of the sort that runs as it is."""
        self._recompute.cuts, self._cuts.row = self._cuts, row
        try:
            yield
        finally:
            self._recompute.cuts = self._cuts.row = None

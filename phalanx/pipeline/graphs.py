"""CUDA graphs of runs of blocks: after a step without them, forward and backward of each run become one launch each.

A graph belongs to (stage, run, slot). A slot is a place for one micro-batch in flight in a stage: its tokens, its activations and its
gradients always lie at the same addresses, so what a run writes is what the next run's graph reads, without copies. A stage has
as many slots as micro-batches were ever in flight in it at once.

What forward makes lies in a pool of memory of its slot: within a slot the order of captures is the order of replays, between slots
it is not. What backward makes is needed no longer than until the stage's backward of that micro-batch is over, and nothing comes
between its runs, so all slots of a rank share one pool for it; whoever keeps the gradient of a stage's input takes a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from phalanx.base.batch import Batch, usual_documents
from phalanx.comm.symmetric import Symmetric
from phalanx.nn.tape import Tape

Compute = Callable[[Tensor, Batch], Tensor]
Where = tuple[int, int]
T = TypeVar("T")


class Eager:
    """Runs blocks as they are: what graphs are the fast twin of.

    `reuses_memory`: what a run returns is overwritten when its place is used again, so whoever keeps it for long takes a copy.
    """

    reuses_memory = False

    def begin(self, seed: Tensor) -> Tensor:
        """At the start of a step; `seed` () is the gradient of the summed loss. Returns the tensor to use in its place."""
        return seed

    def forward(self, where: Where, mb: int, x: Tensor, batch: Batch, compute: Compute) -> tuple[Tensor, Tensor]:
        """(input, output) of a run, the input a leaf that will get a gradient (unless it is the model's first)."""
        x = x if where == (0, 0) else x.detach().requires_grad_()
        with torch.enable_grad():
            return x, compute(x, batch)

    def backward(self, where: Where, mb: int, x: Tensor, y: Tensor, dy: Tensor | None, last: bool) -> Tensor | None:
        """Gradient of the run's input. `last`: nothing of this micro-batch is left in this stage after it."""
        if y.requires_grad:  # not where all that the model's first run has is frozen
            y.backward(dy)
        return x.grad

    def end(self) -> None:
        """At the end of a step."""

    def close(self) -> None:
        """Let go of what was captured. Communicators cannot be closed before the graphs that use them."""

    def forget(self) -> None:
        """What runs compute has changed: capture it anew, after another step without graphs."""


class Cuda:
    """What graphs ask of a GPU. `loose`: a capture may begin in one thread and end in another (autograd has its own for backward)."""

    def __init__(self, device: torch.device, loose: bool = False):
        self.device, self.mode = device, "relaxed" if loose else "thread_local"  # either way other threads watch communicators meanwhile
        self._stream = torch.cuda.Stream(device)

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def begin(self, pool: Any) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool, capture_error_mode=self.mode)
        return graph

    def end(self, graph: Any) -> None:
        with torch.cuda.stream(self._stream):
            graph.capture_end()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Where captures are made."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def tidy(self) -> None:
        torch.cuda.empty_cache()


class Row:
    """Graphs of a run's forward or backward in order, and between them what runs as it is."""

    def __init__(self, device: Cuda, pool: Any, late: bool = False):
        """late: of a backward."""
        self.device, self.pool, self.late, self.parts = device, pool, late, list[Any]()

    def begin(self) -> None:
        self.parts.append(self.device.begin(self.pool))

    def end(self) -> None:
        self.device.end(self.parts[-1])

    def replay(self, batch: Batch) -> None:
        for part in self.parts:
            if isinstance(part, _Step):
                part.run(batch)
            else:
                part.replay()

    def reset(self) -> None:
        for part in self.parts:
            if not isinstance(part, _Step):
                part.reset()
        self.parts.clear()


class Cuts:
    """Stands in a Tape while a run is captured: ends the graph before an op that is to run as it is, and begins the next one behind it."""

    def __init__(self) -> None:
        self.row: Row | None = None
        self._places: dict[tuple, Tensor] = {}

    def place(self, name: str | int, like: Tensor) -> Tensor:
        """A tensor that ops between graphs pass on in backward, each read before the next is run."""
        key = (name, like.shape, like.dtype)
        if key not in self._places:
            self._places[key] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return self._places[key]

    def op(self, make: Callable[..., Tensor], shape: tuple[int, ...]) -> Callable[..., Tensor]:
        """What to run in place of make(batch, *inputs), a tensor of this shape: called with the inputs alone."""
        return _Site(self, make, shape)


class _Site:
    """An op between graphs. `calls`: where its forward stands in rows; made again in backward it stands in that one too. `kept`: the inputs
    of its last run and where backward begins; the output itself may go: its copy stays."""

    def __init__(self, cuts: Cuts, make: Callable[..., Tensor], shape: tuple[int, ...]):
        self.cuts, self.make, self.shape, self.late, self.goes_back = cuts, make, shape, cuts.row is not None and cuts.row.late, False
        self.calls: list[_Step] = []
        self.kept: tuple[list[Tensor], GradientEdge | None] | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        anchor = torch.zeros((), requires_grad=True)  # weights inside learn, whether or not an input has a gradient
        return _Between.apply(self, anchor, *inputs)

    @contextmanager
    def between(self) -> Iterator[Row]:
        """The graph ends here, and the next one begins behind what is added to the row."""
        row = self.cuts.row
        if row is None:
            raise RuntimeError("an op that is to run between graphs, while none is captured")
        row.end()
        yield row
        row.begin()


class _Step:
    """A part of a row that runs as it is."""

    def run(self, batch: Batch) -> None:
        raise NotImplementedError


class _Onward(_Step):
    def __init__(self, site: _Site, inputs: tuple[Tensor, ...], wanted: tuple[bool, ...]):
        self.site, self.inputs, self.wanted = site, inputs, wanted
        self.out = inputs[0].new_empty(site.shape)

    def run(self, batch: Batch) -> None:
        site = self.site
        if site.calls[-1] is not self or (site.late and not site.goes_back):  # it is made again before backward, or has none
            with torch.no_grad():
                self.out.copy_(site.make(batch, *self.inputs))
            return
        leaves = [t.detach().requires_grad_(wanted) for t, wanted in zip(self.inputs, self.wanted)]
        with torch.enable_grad():
            out = site.make(batch, *leaves)
        self.out.copy_(out.detach())
        site.kept = leaves, get_gradient_edge(out) if out.requires_grad else None


class _Back(_Step):
    def __init__(self, site: _Site, dout: Tensor, grads: list[Tensor | None]):
        self.site, self.dout, self.grads = site, dout, grads

    def run(self, batch: Batch) -> None:
        if self.site.kept is None:
            raise RuntimeError("backward of an op between graphs that did not run forward")
        (leaves, edge), self.site.kept = self.site.kept, None
        if edge is not None:
            torch.autograd.backward(edge, self.dout)
        for leaf, grad in zip(leaves, self.grads):
            if grad is not None:
                grad.zero_() if leaf.grad is None else grad.copy_(leaf.grad)


class _Between(Function):
    @staticmethod
    def forward(ctx: Any, site: _Site, anchor: Tensor, *inputs: Tensor) -> Tensor:  # type: ignore[override]
        with site.between() as row:  # so that its output is in no graph's memory
            step = _Onward(site, tuple(t.detach() for t in inputs), ctx.needs_input_grad[2:])
            row.parts.append(step)
            site.cuts.place("out", step.out)
        site.calls.append(step)
        ctx.site, ctx.like = site, step.inputs
        return step.out.data  # with a count of changes of its own: what saves it sees none when it is written anew

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        site, cuts, wanted = ctx.site, ctx.site.cuts, ctx.needs_input_grad[2:]
        given = cuts.place("out", dout).copy_(dout)
        with site.between() as row:
            grads = [cuts.place(i, t) if w else None for i, (t, w) in enumerate(zip(ctx.like, wanted))]
            row.parts.append(_Back(site, given, grads))
        site.goes_back = True
        return None, None, *grads


@dataclass
class _Captured:
    """A run's two rows of graphs and the tensors they read and write."""

    x: Tensor
    y: Tensor
    forward: Row
    dy: Tensor | None = None
    backward: Row | None = None


@dataclass
class _Slot:
    batch: Batch
    pool: Any
    runs: dict[Where, _Captured] = field(default_factory=dict)


class Graphs(Eager):
    """Replays runs; captures each when it first comes by after the first step. `memories`: what ranks exchange through inside. `tape`: of the
    blocks, if there are ops whose shapes follow the batch."""

    reuses_memory = True

    def __init__(self, device: Cuda, memories: tuple[Symmetric, ...] = (), tape: Tape | None = None):
        self.device, self.memories, self._tape, self._cuts = device, memories, tape, Cuts()
        self._passing = device.pool()  # what backward makes
        self._warm = False
        self._seed: Tensor | None = None
        self._slots: dict[tuple, list[_Slot]] = {}  # by stage and what sort of batch it takes
        self._free: dict[tuple, list[_Slot]] = {}
        self._taken: dict[tuple[int, int], tuple[tuple, _Slot, Batch]] = {}  # by stage and micro-batch

    def begin(self, seed: Tensor) -> Tensor:
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
                run.forward.reset()
                if run.backward is not None:
                    run.backward.reset()
        for kept in (self._slots, self._free, self._taken):
            kept.clear()
        self.memories, self._warm = (), False

    def forget(self) -> None:
        memories = self.memories
        self.close()
        self.memories = memories

    def forward(self, where: Where, mb: int, x: Tensor, batch: Batch, compute: Compute) -> tuple[Tensor, Tensor]:
        if not self._warm or batch.most_documents > usual_documents(batch.all_tokens):  # such a batch may come once: not worth a pool of memory
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
            run.backward = self._capture(self._passing, lambda: run.y.backward(run.dy), late=True)
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
        """Do what is not captured, its exchanges ending on the turn on which they began, as those of graphs do: other graphs, and ranks that
        replay theirs of this run, count on it."""
        turns = [memory.turn for memory in self.memories]
        done = work()
        for memory, turn in zip(self.memories, turns):
            memory.back_to(turn)
        return done

    def _take(self, stage: int, batch: Batch) -> tuple[tuple, _Slot]:
        """A free slot of the stage for such a batch, holding its values."""
        kind = (stage, batch.num_sequences, batch.seq_length, batch.documents is None, batch.dealt is None)
        free = self._free.setdefault(kind, [])
        if not free:
            tensors = {f.name: getattr(batch, f.name).clone() for f in fields(batch) if isinstance(getattr(batch, f.name), Tensor)}
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
        """The gradient that `run` has read may be overwritten by what is captured after it: its writer no longer holds it.

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

    def _capture(self, pool: Any, work: Callable[[], None], late: bool = False) -> Row:
        row = Row(self.device, pool, late)
        with self.device.aside(), self._cutting(row):
            row.begin()
            try:
                self._turning(work)
            finally:
                row.end()
        return row

    @contextmanager
    def _cutting(self, row: Row) -> Iterator[None]:
        """What the tape runs meanwhile stands in this row, if it is of the sort that runs as it is."""
        if self._tape is None:
            yield
            return
        self._tape.cuts, self._cuts.row = self._cuts, row
        try:
            yield
        finally:
            self._tape.cuts = self._cuts.row = None

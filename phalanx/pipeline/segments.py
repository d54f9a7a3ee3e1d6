"""A captured segment: CUDA graphs with eager ops in between.

An op cannot be captured if its shapes follow the batch or if the host waits inside it. During the capture such an op
ends the current graph, and the next graph begins after it. At each replay it runs eagerly, forward and backward. Its
inputs and outputs have fixed addresses, so the graphs before and after it find them where they were captured. What it
saves for backward is new at each replay and freed afterwards.

    capture     begin ──▶ graph 1 ──▶ end, attention, begin ──▶ graph 2 ──▶ end
    replay                graph 1 ──▶      attention       ──▶ graph 2

This file knows graphs and tensors. pipeline.graphs knows micro-batches and decides when to capture.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from phalanx.nn.recompute import Like
from phalanx.sequence.batch import Batch


@contextmanager
def uncollected() -> Iterator[None]:
    """Python's garbage collector is off inside: a finalizer could free memory that other ranks map too, which ends a
    capture with an error."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Cuda:
    """What graphs need from a GPU; tests put a recorder in its place.

    loose    a capture may begin in one thread and end in another (autograd has its own thread for backward)
    """

    def __init__(self, device: torch.device, loose: bool = False):
        self.device = device
        # In neither mode do the threads that watch communicators disturb a capture.
        self.mode = "relaxed" if loose else "thread_local"
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
        """Captures are made inside, on a stream of their own."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def tidy(self) -> None:
        torch.cuda.empty_cache()


class CapturedSegment:
    """The graphs of a segment's forward or backward, in order, and the eager ops between them.

    late    it is the segment's backward
    """

    def __init__(self, device: Cuda, pool: Any, late: bool = False):
        self.device, self.pool, self.late = device, pool, late
        self.parts: list[Any] = []

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


class GraphCuts:
    """Set in a `Recompute` while a segment is captured: ends the graph before an op of these names and begins the
    next graph after it."""

    def __init__(self, names: Set[str]) -> None:
        self.names = names
        self.row: CapturedSegment | None = None
        self._places: dict[tuple, Tensor] = {}

    def place(self, name: str | int, like: Tensor) -> Tensor:
        """A buffer through which ops between graphs pass gradients. Ops share it: each one's result is read before
        the next op runs."""
        key = (name, like.shape, like.dtype)
        if key not in self._places:
            self._places[key] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return self._places[key]

    def op(self, make: Callable[..., Any], likes: Sequence[Like]) -> Callable[..., Any]:
        """A function of the inputs to run in place of make(batch, *inputs), whose results have these shapes and
        dtypes."""
        return _Site(self, make, likes)


class _Site:
    """An op between graphs.

    calls        its forwards in captured segments: one in the forward's, and one more in the backward's if the op is
                 recomputed there
    kept         the inputs of its last run, and the graph edge of its first output, where backward begins. The outputs
                 themselves may be freed: their copies stay
    late         it is called first while a backward is captured
    goes_back    its backward was captured
    """

    def __init__(self, cuts: GraphCuts, make: Callable[..., Any], likes: Sequence[Like]):
        self.cuts, self.make, self.likes = cuts, make, likes
        self.late = cuts.row is not None and cuts.row.late
        self.goes_back = False
        self.calls: list[_Step] = []
        self.kept: tuple[list[Tensor], GradientEdge | None] | None = None

    def __call__(self, *inputs: Tensor) -> Any:
        anchor = torch.zeros((), requires_grad=True)  # weights inside get gradients even if no input has one
        outs = _Between.apply(self, anchor, *inputs)
        return outs if len(self.likes) > 1 else outs[0]

    @contextmanager
    def between(self) -> Iterator[CapturedSegment]:
        """Around adding an eager step to the captured segment: ends the current graph, then begins the next."""
        row = self.cuts.row
        if row is None:
            raise RuntimeError("an op that is to run between graphs, while none is captured")
        row.end()
        try:
            yield row
        finally:  # also after an error: the caller ends the graph that is begun here
            row.begin()


class _Step:
    """A part of a captured segment that runs eagerly."""

    def run(self, batch: Batch) -> None:
        raise NotImplementedError


class _Onward(_Step):
    """The forward of an op between graphs; `inputs` and `outs` have fixed addresses, `wanted`: inputs with a
    gradient."""

    def __init__(self, site: _Site, inputs: tuple[Tensor, ...], wanted: tuple[bool, ...]):
        self.site, self.inputs, self.wanted = site, inputs, wanted
        self.outs = tuple(inputs[0].new_empty(shape, dtype=dtype) for shape, dtype in site.likes)

    def run(self, batch: Batch) -> None:
        site = self.site
        recomputed_later = site.calls[-1] is not self
        has_no_backward = site.late and not site.goes_back
        if recomputed_later or has_no_backward:
            with torch.no_grad():
                self._keep(site.make(batch, *self.inputs))
            return
        leaves = [t.detach().requires_grad_(wanted) for t, wanted in zip(self.inputs, self.wanted)]
        with torch.enable_grad():
            out = self._keep(site.make(batch, *leaves))
        site.kept = leaves, get_gradient_edge(out) if out.requires_grad else None

    def _keep(self, made: Tensor | tuple[Tensor, ...]) -> Tensor:
        """Copy the results to where the graphs read them; returns the first."""
        made = (made,) if isinstance(made, Tensor) else made
        for place, out in zip(self.outs, made, strict=True):
            place.copy_(out.detach())
        return made[0]


class _Back(_Step):
    """The backward of an op between graphs: from `dout` to `grads`, both at fixed addresses."""

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
    """An op between graphs as autograd sees it during a capture."""

    @staticmethod
    def forward(ctx: Any, site: _Site, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        with site.between() as row:  # outside any graph, so that the outputs are not in a graph's memory pool
            step = _Onward(site, tuple(t.detach() for t in inputs), ctx.needs_input_grad[2:])
            row.parts.append(step)
            site.cuts.place("out", step.outs[0])
        site.calls.append(step)
        ctx.site, ctx.like = site, step.inputs
        # `.data` has a version counter of its own: autograd, which may save it, does not see the writes of replays.
        return tuple(out.data for out in step.outs)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        site, cuts, wanted = ctx.site, ctx.site.cuts, ctx.needs_input_grad[2:]
        given = cuts.place("out", dout).copy_(dout)
        with site.between() as row:
            grads = [cuts.place(i, t) if w else None for i, (t, w) in enumerate(zip(ctx.like, wanted))]
            row.parts.append(_Back(site, given, grads))
        site.goes_back = True
        return None, None, *grads

"""A run's graphs in a row, and between them the ops that cannot be captured: those run as they are at each replay,
forward and backward.

Such an op's shapes follow the batch, or the host must wait inside. While a run is captured it ends the graph, and
the next one begins behind it. Its inputs and what it makes have places of their own, so graphs on both sides find
them where they were captured; what it saves for its backward is made anew at each replay and freed after it. Knows
graphs and tensors, not micro-batches or when to capture: that is pipeline.graphs.
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
    """Inside, Python does not look for garbage: memory that other ranks map too cannot be given back while a graph
    is captured."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Cuda:
    """What graphs ask of a GPU. `loose`: a capture may begin in one thread and end in another (autograd has its own
    for backward)."""

    def __init__(self, device: torch.device, loose: bool = False):
        self.device, self.mode = (
            device,
            "relaxed" if loose else "thread_local",
        )  # either way other threads watch communicators meanwhile
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


class GraphCuts:
    """Stands in a Tape while a run is captured: ends the graph before an op of these names, and begins the next one
    behind it."""

    def __init__(self, names: Set[str]) -> None:
        self.names = names
        self.row: CapturedSegment | None = None
        self._places: dict[tuple, Tensor] = {}

    def place(self, name: str | int, like: Tensor) -> Tensor:
        """A tensor that ops between graphs pass on in backward, each read before the next is run."""
        key = (name, like.shape, like.dtype)
        if key not in self._places:
            self._places[key] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return self._places[key]

    def op(self, make: Callable[..., Any], likes: Sequence[Like]) -> Callable[..., Any]:
        """What to run in place of make(batch, *inputs), a tensor or several, like these: called with the
        inputs alone."""
        return _Site(self, make, likes)


class _Site:
    """An op between graphs. `calls`: where its forward stands in rows; made again in backward it stands in that one
    too. `kept`: the inputs of its last run and where backward begins, at the first output; outputs themselves may
    go: their copies stay."""

    def __init__(self, cuts: GraphCuts, make: Callable[..., Any], likes: Sequence[Like]):
        self.cuts, self.make, self.likes, self.late, self.goes_back = (
            cuts,
            make,
            likes,
            cuts.row is not None and cuts.row.late,
            False,
        )
        self.calls: list[_Step] = []
        self.kept: tuple[list[Tensor], GradientEdge | None] | None = None

    def __call__(self, *inputs: Tensor) -> Any:
        anchor = torch.zeros((), requires_grad=True)  # weights inside learn, whether or not an input has a gradient
        outs = _Between.apply(self, anchor, *inputs)
        return outs if len(self.likes) > 1 else outs[0]

    @contextmanager
    def between(self) -> Iterator[CapturedSegment]:
        """The graph ends here, and the next one begins behind what is added to the row."""
        row = self.cuts.row
        if row is None:
            raise RuntimeError("an op that is to run between graphs, while none is captured")
        row.end()
        try:
            yield row
        finally:  # whoever captures ends a graph, whatever happens here
            row.begin()


class _Step:
    """A part of a row that runs as it is."""

    def run(self, batch: Batch) -> None:
        raise NotImplementedError


class _Onward(_Step):
    def __init__(self, site: _Site, inputs: tuple[Tensor, ...], wanted: tuple[bool, ...]):
        self.site, self.inputs, self.wanted = site, inputs, wanted
        self.outs = tuple(inputs[0].new_empty(shape, dtype=dtype) for shape, dtype in site.likes)

    def run(self, batch: Batch) -> None:
        site = self.site
        if site.calls[-1] is not self or (
            site.late and not site.goes_back
        ):  # it is made again before backward, or has none
            with torch.no_grad():
                self._keep(site.make(batch, *self.inputs))
            return
        leaves = [t.detach().requires_grad_(wanted) for t, wanted in zip(self.inputs, self.wanted)]
        with torch.enable_grad():
            out = self._keep(site.make(batch, *leaves))
        site.kept = leaves, get_gradient_edge(out) if out.requires_grad else None

    def _keep(self, made: Tensor | tuple[Tensor, ...]) -> Tensor:
        """What graphs read of it is in its place; the first of it."""
        made = (made,) if isinstance(made, Tensor) else made
        for place, out in zip(self.outs, made, strict=True):
            place.copy_(out.detach())
        return made[0]


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
    def forward(ctx: Any, site: _Site, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        with site.between() as row:  # so that its output is in no graph's memory
            step = _Onward(site, tuple(t.detach() for t in inputs), ctx.needs_input_grad[2:])
            row.parts.append(step)
            site.cuts.place("out", step.outs[0])
        site.calls.append(step)
        ctx.site, ctx.like = site, step.inputs
        return tuple(
            out.data for out in step.outs
        )  # with counts of changes of their own: what saves them sees none when they are written anew

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        site, cuts, wanted = ctx.site, ctx.site.cuts, ctx.needs_input_grad[2:]
        given = cuts.place("out", dout).copy_(dout)
        with site.between() as row:
            grads = [cuts.place(i, t) if w else None for i, (t, w) in enumerate(zip(ctx.like, wanted))]
            row.parts.append(_Back(site, given, grads))
        site.goes_back = True
        return None, None, *grads

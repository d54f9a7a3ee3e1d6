"""Tokens on their way to the ranks of their experts and back: three ways behind one signature, each with its way back in backward.

Each rank of the expert view brings its own tokens and the choice of experts made for them, and gets the outputs for the same
tokens back. An exchange is made with the tokens, told the choice (`send`), and called to compute: what is asked of the device between
these runs while the tokens travel. Inside an expert cut over etp each rank makes a part of the sum. Shapes: T tokens of this rank, K experts a token,
E experts in all, N of them here, R rows sorted by expert, D model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.comm.axis import Axis, ModelAxes, Work
from phalanx.ops.grouped import Later
from phalanx.ops.kernels import Kernels, use_triton
from phalanx.ops.permute import Rows, combine_rows, gather_rows, plan_rows, row_weights, twins
from phalanx.ops.push import Spread
from phalanx.ops.push import twins as push_twins

Dispatch = Literal["allgather", "alltoall", "push"]
Compute = Callable[[Tensor, Tensor, Tensor | None, Later | None], Tensor]
"""(rows (R, D) sorted by expert, ends (N,), what each row's output is multiplied by (R,) or None, what may be put off in backward or
None) -> (R, D): what this rank's experts make of them."""


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:  # type: ignore[override]
        ctx.axis = axis
        return axis.all_gather(x).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.axis.reduce_scatter(dy).wait(), None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:  # type: ignore[override]
        ctx.axis = axis
        return axis.reduce_scatter(x).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.axis.all_gather(dy).wait(), None


class _All:
    """A carrier: tokens go to every rank, and from each come sums, needed or not."""

    def __init__(self, axis: Axis, everyones: Work, triton: bool):
        self.axis, self.everyones, self.triton = axis, everyones, triton

    def tokens(self, x: Tensor) -> Any:
        """x (T, D) of each rank; `wait()` gives them all, (n T, D)."""
        return self.axis.gather(x)

    def sums(self, y: Tensor, rows: Rows) -> Any:
        """The sum of each token's rows y (R, D); `wait()` gives the sum over ranks, (T, D), of this rank's tokens."""
        scattering = self.axis.scatter(len(rows.row_TK), y.shape[1], y)
        for part, out in scattering.parts():
            twins(self.triton).sum_forward(y, None, replace(rows, row_TK=rows.row_TK[part]), out)
        return scattering


class _Chosen:
    """A carrier: tokens go where they have experts, and sums come back from there. Of the tokens that `wait()` gives only those are good."""

    def __init__(self, axis: Axis, experts: Tensor, everyones: Work, spread: Spread, triton: bool):
        self.axis, self.experts, self.everyones, self.spread, self.triton = axis, experts, everyones, spread, triton
        self.share = spread.share(experts.shape[1])

    def tokens(self, x: Tensor) -> Any:
        to = self.axis.push(x.shape[0], x.shape[1], x, False, self.share)
        return to.fill(lambda to: push_twins(self.triton).send_tokens(x, self.experts, self.spread, to))

    def sums(self, y: Tensor, rows: Rows) -> Any:
        to, everyones = self.axis.push(len(self.experts), y.shape[1], y, True, self.share), self.everyones.wait()
        return _Returning(to.fill(lambda to: push_twins(self.triton).send_sums(y, rows, everyones, self.spread, to)), self)


@dataclass(frozen=True)
class _Returning:
    """Sums on their way back."""

    pushed: Any
    carrier: _Chosen

    def wait(self) -> Tensor:
        c = self.carrier
        return push_twins(c.triton).add_sums(self.pushed.wait(), c.experts, c.spread)


class _Arrive(Function):
    """The rows of this rank's experts out of tokens (T, D) on their way here; backward sends the tokens' sums back, and does meanwhile what
    was put off till `later`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, coming: Any, rows: Rows, carrier: Any, later: Later) -> Tensor:  # type: ignore[override]
        ctx.rows, ctx.carrier, ctx.later = rows, carrier, later
        return twins(carrier.triton).gather_forward(coming.wait(), rows)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        returning = ctx.carrier.sums(dx, ctx.rows)
        while ctx.later:
            ctx.later.pop(0)()
        return returning.wait(), None, None, None, None


class _Leave(Function):
    """The sum of each token's rows (R, D), sent back to the ranks that the tokens came from."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, rows: Rows, carrier: Any) -> Tensor:  # type: ignore[override]
        ctx.rows, ctx.carrier = rows, carrier
        return carrier.sums(y, rows).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return twins(ctx.carrier.triton).gather_forward(ctx.carrier.tokens(dy).wait(), ctx.rows), None, None


class _Swap(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, send: list[int], receive: list[int]) -> Tensor:  # type: ignore[override]
        ctx.axis, ctx.send, ctx.receive = axis, send, receive
        return axis.all_to_all(x, send, receive)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.axis.all_to_all(dy, ctx.receive, ctx.send), None, None, None


def gather(x: Tensor, axis: Axis) -> Tensor:
    """(n, ...) of each rank -> (size * n, ...); gradients are summed on their way back."""
    return x if axis.size == 1 else _Gather.apply(x, axis)


def scatter(x: Tensor, axis: Axis) -> Tensor:
    """(size * n, ...) -> this rank's (n, ...) of the sum over ranks."""
    return x if axis.size == 1 else _Scatter.apply(x, axis)


def room_for(tokens: int, slots: int, ranks: int, here: int, room: float) -> tuple[int, int]:
    """(rows that a rank of `here` experts gets room for, rows that it may need) of `tokens` gathered over `ranks` expert ranks."""
    worst = tokens * min(slots, here)
    return math.ceil(min(room * tokens * slots / ranks, worst)), worst


class _Rows:
    """Each expert rank makes rows of the tokens that have experts there; sums of them come back. The host waits for nothing.

    `room`: rows that a rank has room for, over its fair share of all rows.
    """

    def __init__(self, x: Tensor, axes: ModelAxes, room: float = math.inf):
        self.x, self.axes, self.room = x, axes, room
        self.coming: Any = None
        self.carrier: Any = None
        self.here = 0  # experts of each rank

    def send(self, experts: Tensor, count: int, kernels: Kernels = "auto") -> None:
        """experts (T, K) int64: a number >= `count` is nobody's."""
        raise NotImplementedError

    def __call__(self, weights: Tensor, compute: Compute, kernels: Kernels = "auto") -> tuple[Tensor, Tensor]:
        """weights (T, K) -> (T, D), and () the number of rows that this rank had no room for: with any missing the result is wrong."""
        group, ranks, everyones = self.axes.experts, self.axes.ep.size, self.carrier.everyones.wait()
        tokens, slots = everyones.shape
        rows = plan_rows(everyones, self.axes.ep.index * self.here, self.here, room_for(tokens, slots, ranks, self.here, self.room)[0], kernels)
        later = Later()
        arrived = _Arrive.apply(self.x, self.coming, rows, self.carrier, later)
        made = compute(arrived, rows.ends_E, row_weights(gather(weights, group), rows), later)
        return _Leave.apply(made, rows, self.carrier), (rows.wanted - len(rows.source_R)).clamp_min(0)


class AllGather(_Rows):
    """Every token goes to every expert rank, which keeps those that chose its experts; sums come back scattered.

    On their way from the moment that this is made, so that a router can decide meanwhile.
    """

    def __init__(self, x: Tensor, axes: ModelAxes, room: float = math.inf):
        super().__init__(x, axes, room)
        self.coming = axes.experts.gather(x.detach())

    def send(self, experts: Tensor, count: int, kernels: Kernels = "auto") -> None:
        self.here = count // self.axes.ep.size
        self.carrier = _All(self.axes.experts, self.axes.experts.all_gather(experts), use_triton(kernels, self.x))


class Push(_Rows):
    """Each token is written into the memory of the ranks of its experts, once on each, and a sum comes back from each."""

    def send(self, experts: Tensor, count: int, kernels: Kernels = "auto") -> None:
        group, self.here = self.axes.experts, count // self.axes.ep.size
        spread = Spread(self.here, self.axes.etp.size, group.size, group.index)
        everyones = group.all_gather(experts, async_op=True)
        self.carrier = _Chosen(group, experts, everyones, spread, use_triton(kernels, self.x))
        self.coming = self.carrier.tokens(self.x.detach())


class AllToAll:
    """Each (token, expert) pair goes to the rank of its expert alone. How many go where is exchanged first, and the host waits for it
    once; so there is always room. Over etp the tokens are gathered first, since each part of an expert needs them all."""

    def __init__(self, x: Tensor, axes: ModelAxes, room: float = math.inf):
        self.x, self.axes = x, axes

    def send(self, experts: Tensor, count: int, kernels: Kernels = "auto") -> None:
        """As of the others; only the sizes travel."""
        ep, self.experts = self.axes.ep, self.axes.etp.all_gather(experts).wait()
        self.leaving = plan_rows(self.experts, 0, count, self.experts.numel(), kernels)
        ends = self.leaving.ends_E
        self.sizes = ends.diff(prepend=ends.new_zeros(1)).view(ep.size, -1)  # (ranks, N): rows for each of their experts
        self.arriving = ep.all_to_all(self.sizes)

    def __call__(self, weights: Tensor, compute: Compute, kernels: Kernels = "auto") -> tuple[Tensor, Tensor]:
        """As of the others; nothing is ever missing."""
        ep, etp, leaving = self.axes.ep, self.axes.etp, self.leaving
        x, weights, tokens = gather(self.x, etp), gather(weights, etp), len(self.experts)
        send, receive = host_sizes(self.sizes, self.arriving, self.experts.numel())
        leaving = replace(leaving, source_R=leaving.source_R[: sum(send)], slot_R=leaving.slot_R[: sum(send)])  # pairs that were dropped stay
        arrived = swap(gather_rows(x, leaving, kernels), ep, send, receive)
        sorting = plan_rows(_experts_of(self.arriving, sum(receive)), 0, self.sizes.shape[1], sum(receive), kernels)
        made = compute(gather_rows(arrived, sorting, kernels), sorting.ends_E, None, None)
        back = swap(combine_rows(made, None, sorting, len(arrived), kernels), ep, receive, send)
        return scatter(combine_rows(back, weights, leaving, tokens, kernels), etp), leaving.wanted.new_zeros(())


def swap(x: Tensor, axis: Axis, send: list[int], receive: list[int]) -> Tensor:
    """Runs of `send` rows to each rank -> the runs of `receive` rows from each."""
    return x if axis.size == 1 else _Swap.apply(x, axis, send, receive)


def host_sizes(sizes: Tensor, arriving: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Rows to and from each rank as numbers: the one place of a step where the host waits for the device. On meta an even routing."""
    if sizes.is_meta:
        even = [rows // len(sizes)] * len(sizes)
        return even, even
    send, receive = torch.stack((sizes.sum(1), arriving.sum(1))).tolist()
    return send, receive


def _experts_of(arriving: Tensor, rows: int) -> Tensor:
    """(rows, 1) expert of each row that arrived: from each rank in turn, sorted by expert."""
    ranks, here = arriving.shape
    numbers = torch.arange(here, device=arriving.device).repeat(ranks)
    if arriving.is_meta:
        return torch.empty(rows, 1, dtype=torch.int64, device="meta")
    return numbers.repeat_interleave(arriving.flatten(), output_size=rows).unsqueeze(1)


EXCHANGES: dict[Dispatch, Any] = {"allgather": AllGather, "alltoall": AllToAll, "push": Push}

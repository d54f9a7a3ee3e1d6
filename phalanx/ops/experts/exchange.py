"""Tokens on their way to the ranks of their experts and back: three exchanges behind one signature, each with its own
backward.

Each rank of the expert group brings its own tokens and the experts chosen for them, and receives the outputs for the
same tokens. An exchange is constructed with the tokens, receives the choice of experts (`send`), and is called to
compute; device work issued between these calls overlaps with the transfer. If an expert is sharded over etp, each rank
computes a part of the sum. Shapes: T tokens of this rank, K experts a token, E experts in all, N of them here, R rows
sorted by expert, D model.

Fixed order: with `sources` = S > 0, the tokens of these ranks belong to S micro-batches; 0 means whatever is fastest.
Ranks' contributions to a token are then added in rank order rather than in a collective's order, and experts compute
the rows of each micro-batch separately. So neither outputs nor gradients depend on which micro-batches are under way
together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.base.dataclass import dataclass
from phalanx.base.pairwise import pairwise_sum
from phalanx.comm.axis import Axis, ModelAxes, Work
from phalanx.ops.experts.grouped import Later
from phalanx.ops.experts.permute import PERMUTE, combine_rows, gather_rows, gathered, plan_rows, row_weights
from phalanx.ops.experts.push import PUSH
from phalanx.ops.experts.rows import ExpertRows
from phalanx.ops.experts.spread import Spread
from phalanx.ops.op import Kernels

Dispatch = Literal["allgather", "alltoall", "push"]
Weigh = Literal["outputs", "inputs"]
"""What the weights of a token's experts multiply: their outputs, or the token as each of them gets it (Llama 4)."""
Compute = Callable[[Tensor, Tensor, Tensor | None, Later | None, int], Tensor]
"""(rows (R, D) sorted by expert, ends (N,), weight of each row (R,), which `compute` applies, or None, a list for work
that backward may defer or None, the micro-batch that the rows belong to) -> (R, D): the output of this rank's
experts."""


def sum_scattered(x: Tensor, axis: Axis, in_order: bool) -> Tensor:
    """(size * n, ...) on each rank -> (n, ...): this rank's slice of the sum; `in_order`: added in rank order, in fp32
    or wider."""
    if not in_order or axis.size == 1:
        return axis.reduce_scatter(x).wait()
    parts = axis.all_to_all(x).view(axis.size, -1, *x.shape[1:])
    return pairwise_sum(parts.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)


class _GatherExperts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, in_order: bool) -> Tensor:  # type: ignore[override]
        ctx.axis, ctx.in_order = axis, in_order
        return axis.all_gather(x).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return sum_scattered(dy, ctx.axis, ctx.in_order), None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, in_order: bool) -> Tensor:  # type: ignore[override]
        ctx.axis = axis
        return sum_scattered(x, axis, in_order)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.axis.all_gather(dy).wait(), None, None


class _All:
    """A carrier that sends tokens to every rank and returns sums from every rank, whether they are needed or not."""

    def __init__(self, axis: Axis, everyones: Work, by: Any, in_order: bool = False):
        self.axis, self.everyones, self.by, self.in_order = axis, everyones, by, in_order

    def tokens(self, x: Tensor) -> Any:
        """x (T, D) of each rank; `wait()` gives them all, (n T, D)."""
        return self.axis.gather(x)

    def sums(self, y: Tensor, rows: ExpertRows) -> Any:
        """The sum of each token's rows y (R, D); `wait()` gives the sum over ranks, (T, D), for this rank's tokens."""
        if self.in_order:
            return Work(sum_scattered(self.by.sum_forward(y, None, rows), self.axis, True))
        scattering = self.axis.scatter(len(rows.row_TK), y.shape[1], y)
        for part, out in scattering.parts():
            self.by.sum_forward(y, None, replace(rows, row_TK=rows.row_TK[part]), out)
        return scattering


class _Chosen:
    """A carrier that sends tokens only to ranks with an expert for them, and returns sums from those ranks. Of the
    tokens that `wait()` gives, only those are valid."""

    def __init__(self, axis: Axis, experts: Tensor, everyones: Work, spread: Spread, by: tuple[Any, Any]):
        """by: implementations of PERMUTE and PUSH."""
        self.axis, self.experts, self.everyones, self.spread = axis, experts, everyones, spread
        self.by, self.push = by
        self.share = spread.share(experts.shape[1])

    def tokens(self, x: Tensor) -> Any:
        to = self.axis.push(x.shape[0], x.shape[1], x, False, self.share)
        return to.fill(lambda to: self.push.send_tokens(x, self.experts, self.spread, to))

    def sums(self, y: Tensor, rows: ExpertRows) -> Any:
        to, everyones = self.axis.push(len(self.experts), y.shape[1], y, True, self.share), self.everyones.wait()
        return _Returning(to.fill(lambda to: self.push.send_sums(y, rows, everyones, self.spread, to)), self)


@dataclass(frozen=True)
class _Returning:
    """Sums on their way back."""

    pushed: Any
    carrier: _Chosen

    def wait(self) -> Tensor:
        c = self.carrier
        total: Tensor = c.push.add_sums(self.pushed.wait(), c.experts, c.spread)
        return total


class _Arrive(Function):
    """The rows of this rank's experts from tokens (T, D) that are arriving. Backward sends the tokens' gradient sums
    back and meanwhile runs the work deferred in `later`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, coming: Any, rows: ExpertRows, carrier: Any, later: Later, lazy: bool) -> Tensor:  # type: ignore[override]
        ctx.rows, ctx.carrier, ctx.later = rows, carrier, later
        return gathered(coming.wait(), rows, carrier.by, lazy)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        returning = ctx.carrier.sums(dx, ctx.rows)
        while ctx.later:
            ctx.later.pop(0)()
        return returning.wait(), None, None, None, None, None


class _Leave(Function):
    """The sum of each token's rows (R, D), sent back to the rank that the token came from."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, rows: ExpertRows, carrier: Any, lazy: bool) -> Tensor:  # type: ignore[override]
        ctx.rows, ctx.carrier, ctx.lazy = rows, carrier, lazy
        return carrier.sums(y, rows).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return gathered(ctx.carrier.tokens(dy).wait(), ctx.rows, ctx.carrier.by, ctx.lazy), None, None, None


class _Swap(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, send: list[int], receive: list[int]) -> Tensor:  # type: ignore[override]
        ctx.axis, ctx.send, ctx.receive = axis, send, receive
        return axis.all_to_all(x, send, receive)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.axis.all_to_all(dy, ctx.receive, ctx.send), None, None, None


def gather(x: Tensor, axis: Axis, in_order: bool = False) -> Tensor:
    """(n, ...) of each rank -> (size * n, ...); gradients are summed on their way back."""
    return x if axis.size == 1 else _GatherExperts.apply(x, axis, in_order)


def scatter(x: Tensor, axis: Axis, in_order: bool = False) -> Tensor:
    """(size * n, ...) -> this rank's (n, ...) of the sum over ranks."""
    return x if axis.size == 1 else _Scatter.apply(x, axis, in_order)


def room_for(tokens: int, slots: int, ranks: int, here: int, room: float) -> tuple[int, int]:
    """(rows that a rank of `here` experts has room for, rows that it could need in the worst case) for `tokens`
    gathered over `ranks` expert ranks."""
    worst = tokens * min(slots, here)
    return math.ceil(min(room * tokens * slots / ranks, worst)), worst


class _Rows:
    """Common base of exchanges in which each expert rank builds rows from the tokens that have experts there and
    returns sums of them. The host waits for nothing.

    `room`: rows that a rank has room for, as a multiple of its fair share of all rows (of each micro-batch, where they
    are kept separate).
    """

    def __init__(self, x: Tensor, axes: ModelAxes, room: float = math.inf, sources: int = 0, weigh: Weigh = "outputs"):
        self.x, self.axes, self.room, self.sources = x, axes, room, sources
        self.coming: Any = None
        self.carrier: Any = None
        self.here = 0  # experts of each rank

    def send(self, experts: Tensor, count: int, kernels: Kernels = "auto") -> None:
        """experts (T, K) int64; a number >= `count` means no expert."""
        raise NotImplementedError

    def __call__(
        self, weights: Tensor, compute: Compute, kernels: Kernels = "auto", lazy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """weights (T, K) -> (T, D), and () the number of rows that did not fit on this rank; if it is not zero, the
        result is wrong.

        lazy: whether `compute` accepts a lazy tensor (ops.lazy_tensor) for its rows, and its backward one for their
        gradient.
        """
        lazy = lazy and self.sources <= 1  # rows of several micro-batches are slices of one tensor
        group, ranks, everyones = self.axes.experts, self.axes.ep.size, self.carrier.everyones.wait()
        parts = everyones.chunk(max(1, self.sources))
        room = room_for(len(parts[0]), everyones.shape[1], ranks, self.here, self.room)[0]
        plans = [plan_rows(part, self.axes.ep.index * self.here, self.here, room, kernels) for part in parts]
        rows, later = one_after_the_other(plans), Later()
        arrived = _Arrive.apply(self.x, self.coming, rows, self.carrier, later, lazy)
        row_weight = row_weights(gather(weights, group, self.sources > 0), rows)
        runs = zip(parts_of(arrived, room), plans, row_weight.split(room))
        made = [compute(x, plan.ends_E, weight, later, source) for source, (x, plan, weight) in enumerate(runs)]
        missing = torch.stack([plan.wanted for plan in plans]).sub(room).clamp_min(0).sum()
        return _Leave.apply(joined(made), rows, self.carrier, lazy), missing


class AllGather(_Rows):
    """Every token goes to every expert rank, which keeps those that chose its experts; sums are scattered back.

    The transfer starts as soon as this object is constructed, so that the router can run meanwhile.
    """

    def __init__(self, x: Tensor, axes: ModelAxes, room: float = math.inf, sources: int = 0, weigh: Weigh = "outputs"):
        super().__init__(x, axes, room, sources, weigh)
        self.coming = axes.experts.gather(x.detach())

    def send(self, experts: Tensor, count: int, kernels: Kernels = "auto") -> None:
        self.here = count // self.axes.ep.size
        everyones, by = self.axes.experts.all_gather(experts), PERMUTE.choose(kernels, self.x)
        self.carrier = _All(self.axes.experts, everyones, by, self.sources > 0)


class Push(_Rows):
    """Each token is written into the memory of the ranks of its experts, once on each rank, and a sum comes back from
    each."""

    def send(self, experts: Tensor, count: int, kernels: Kernels = "auto") -> None:
        group, self.here = self.axes.experts, count // self.axes.ep.size
        spread = Spread(self.here, self.axes.etp.size, group.size, group.index)
        everyones = group.all_gather(experts, async_op=True)
        by = PERMUTE.choose(kernels, self.x), PUSH.choose(kernels, self.x)
        self.carrier = _Chosen(group, experts, everyones, spread, by)
        self.coming = self.carrier.tokens(self.x.detach())


class AllToAll:
    """Each (token, expert) pair goes only to the rank of its expert. The numbers of pairs are exchanged first, and the
    host waits once for them, so there is always enough room. Over etp the tokens are gathered first, because each shard
    of an expert needs them all.

    Where pairs of several micro-batches are kept separate, they are sorted as if each micro-batch had experts of its
    own, S N on every rank.
    """

    def __init__(self, x: Tensor, axes: ModelAxes, room: float = math.inf, sources: int = 0, weigh: Weigh = "outputs"):
        self.x, self.axes, self.in_order, self.sources = x, axes, sources > 0, max(1, sources)
        self.weigh = weigh

    def send(self, experts: Tensor, count: int, kernels: Kernels = "auto") -> None:
        """As in the other exchanges; only the sizes are sent here."""
        ep, self.experts = self.axes.ep, self.axes.etp.all_gather(experts).wait()
        self.leaving = plan_rows(
            self._of_sources(count // ep.size, count), 0, self.sources * count, self.experts.numel(), kernels
        )
        ends = self.leaving.ends_E
        self.sizes = ends.diff(prepend=ends.new_zeros(1)).view(
            ep.size, -1
        )  # (ranks, S N): rows for each of their experts
        self.arriving = ep.all_to_all(self.sizes)

    def _of_sources(self, here: int, count: int) -> Tensor:
        """The experts of this rank's pairs, (etp T, K), numbered by rank, then by micro-batch, then by expert."""
        if self.sources == 1:
            return self.experts
        etp, first = self.axes.etp.size, self.axes.ep.index * self.axes.etp.size
        rank = first + torch.arange(etp, device=self.experts.device).repeat_interleave(len(self.experts) // etp)
        source = (rank * self.sources // self.axes.experts.size).unsqueeze(1)
        numbered = (self.experts // here * self.sources + source) * here + self.experts % here
        return torch.where(self.experts < count, numbered, self.sources * count)

    def __call__(
        self, weights: Tensor, compute: Compute, kernels: Kernels = "auto", lazy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """As in the other exchanges; no row is ever missing."""
        lazy = lazy and self.sources <= 1
        ep, etp, leaving = self.axes.ep, self.axes.etp, self.leaving
        x = gather(self.x, etp, self.in_order)
        weights = gather(weights, etp, self.in_order)
        send, receive, each = host_sizes(self.sizes, self.arriving, self.experts.numel(), self.sources)
        leaving = replace(
            leaving, source_R=leaving.source_R[: sum(send)], slot_R=leaving.slot_R[: sum(send)]
        )  # dropped pairs are not sent
        going = gather_rows(x, leaving, kernels)
        if self.weigh == "inputs":
            going = weighed_rows(going, leaving.ends_E, row_weights(weights, leaving))
        arrived = swap(going, ep, send, receive)
        sorting = plan_rows(_experts_of(self.arriving, sum(receive)), 0, self.sizes.shape[1], sum(receive), kernels)
        rows = gather_rows(arrived, sorting, kernels, lazy)
        ends = sorting.ends_E.view(self.sources, -1)
        starts = torch.cat((ends.new_zeros(1), ends[:-1, -1]))
        made = joined(
            [
                compute(x, e - start, None, None, s)
                for s, (x, e, start) in enumerate(zip(parts_of(rows, each), ends, starts))
            ]
        )
        back = swap(combine_rows(made, None, sorting, len(arrived), kernels, lazy), ep, receive, send)
        y = combine_rows(back, weights if self.weigh == "outputs" else None, leaving, len(self.experts), kernels)
        return scatter(y, etp, self.in_order), leaving.wanted.new_zeros(())


def weighed_rows(x: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
    """x (R, D) times weights (R,), in at least fp32; zeros from the last of `ends` on, where both are undefined."""
    here = (torch.arange(len(x), device=x.device) < ends[-1]).unsqueeze(-1)
    return torch.where(here, x * weights.unsqueeze(-1), 0).to(x.dtype)


def parts_of(rows: Tensor, sizes: int | list[int]) -> Any:
    """The rows of each micro-batch. For a single one, the tensor itself, which may be lazy."""
    alone = sizes == len(rows) or isinstance(sizes, list) and len(sizes) == 1
    return [rows] if alone else rows.split(sizes)


def joined(made: list[Tensor]) -> Tensor:
    return made[0] if len(made) == 1 else torch.cat(made)


def swap(x: Tensor, axis: Axis, send: list[int], receive: list[int]) -> Tensor:
    """Slices of `send` rows for each rank -> the slices of `receive` rows from each."""
    return x if axis.size == 1 else _Swap.apply(x, axis, send, receive)


def one_after_the_other(plans: list[ExpertRows]) -> ExpertRows:
    """The concatenated rows of several plans, each for the next group of tokens. The padding between them stays and
    holds arbitrary values."""
    if len(plans) == 1:
        return plans[0]
    room, (tokens, slots) = len(plans[0].source_R), plans[0].row_TK.shape
    made = [
        (p.source_R + i * tokens, p.slot_R + i * tokens * slots, torch.where(p.row_TK >= 0, p.row_TK + i * room, -1))
        for i, p in enumerate(plans)
    ]
    source, slot, row = (torch.cat(parts) for parts in zip(*made))
    return ExpertRows(
        source, slot, row, torch.full_like(plans[0].ends_E, len(source)), torch.full_like(plans[0].wanted, len(source))
    )


def host_sizes(sizes: Tensor, arriving: Tensor, rows: int, sources: int) -> tuple[list[int], list[int], list[int]]:
    """Rows to each rank, from each rank, and of each of `sources` micro-batches, as numbers. This is the only place in
    a step where the host waits for the device. On meta, an even routing is assumed."""
    if sizes.is_meta:
        even = [rows // len(sizes)] * len(sizes)
        return even, even, [sum(even) // sources] * sources
    ranks = len(sizes)
    sizes_on_host = torch.cat((sizes.sum(1), arriving.sum(1), arriving.view(ranks, sources, -1).sum((0, 2)))).tolist()
    return sizes_on_host[:ranks], sizes_on_host[ranks : 2 * ranks], sizes_on_host[2 * ranks :]


def _experts_of(arriving: Tensor, rows: int) -> Tensor:
    """(rows, 1) expert of each row that arrived: from each rank in turn, sorted by expert."""
    ranks, here = arriving.shape
    numbers = torch.arange(here, device=arriving.device).repeat(ranks)
    if arriving.is_meta:
        return torch.empty(rows, 1, dtype=torch.int64, device="meta")
    return numbers.repeat_interleave(arriving.flatten(), output_size=rows).unsqueeze(1)


EXCHANGES: dict[Dispatch, Any] = {"allgather": AllGather, "alltoall": AllToAll, "push": Push}

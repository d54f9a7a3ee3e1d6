"""Tokens on their way to the ranks of their experts and back: two ways behind one signature, each with its way back in backward.

Each rank of the expert view brings its own tokens and the choice of experts made for them, and gets the outputs for the same
tokens back. Inside an expert cut over etp each rank makes a part of the sum. Shapes: T tokens of this rank, K experts a token,
E experts in all, N of them here, R rows sorted by expert, D model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.comm.axis import Axis, ModelAxes
from phalanx.ops.grouped import Later
from phalanx.ops.kernels import Kernels, use_triton
from phalanx.ops.permute import Rows, combine_rows, gather_rows, plan_rows, row_weights, twins

Dispatch = Literal["allgather", "alltoall"]
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


class _Arrive(Function):
    """The rows of this rank's experts out of tokens (T, D) being gathered; backward scatters the tokens' sums, part by part, and
    does meanwhile what was put off till `later`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gathering: Any, rows: Rows, axis: Axis, triton: bool, later: Later) -> Tensor:  # type: ignore[override]
        ctx.rows, ctx.axis, ctx.triton, ctx.later = rows, axis, triton, later
        return twins(triton).gather_forward(gathering.wait(), rows)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        scattering = _scatter_sums(dx, ctx.rows, ctx.axis, ctx.triton)
        while ctx.later:
            ctx.later.pop(0)()
        return scattering.wait(), None, None, None, None, None


class _Leave(Function):
    """The sum of each token's rows (R, D), scattered part by part to the ranks that the tokens came from."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, rows: Rows, axis: Axis, triton: bool) -> Tensor:  # type: ignore[override]
        ctx.rows, ctx.axis, ctx.triton = rows, axis, triton
        return _scatter_sums(y, rows, axis, triton).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return twins(ctx.triton).gather_forward(ctx.axis.gather(dy).wait(), ctx.rows), None, None, None


def _scatter_sums(y: Tensor, rows: Rows, axis: Axis, triton: bool) -> Any:
    """Under way: each rank's tokens of the sum over ranks of each token's rows."""
    scattering = axis.scatter(len(rows.row_TK), y.shape[1], y)
    for part, out in scattering.parts():
        twins(triton).sum_forward(y, None, replace(rows, row_TK=rows.row_TK[part]), out)
    return scattering


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


class AllGather:
    """Every token goes to every expert rank, which keeps those that chose its experts; sums come back scattered. The host waits for nothing.

    On their way from the moment that this is made, so that a router can decide meanwhile. `room`: rows that a rank has room for,
    over its fair share of all rows.
    """

    def __init__(self, x: Tensor, axes: ModelAxes, room: float = math.inf):
        self.x, self.axes, self.room = x, axes, room
        self.gathering = axes.experts.gather(x.detach())

    def __call__(self, experts: Tensor, weights: Tensor, count: int, compute: Compute, kernels: Kernels = "auto") -> tuple[Tensor, Tensor]:
        """experts (T, K) int64 (a number >= `count` is nobody's), weights (T, K) -> (T, D), and () the number of rows that this rank had
        no room for: with any missing the result is wrong."""
        group, ranks, here = self.axes.experts, self.axes.ep.size, count // self.axes.ep.size
        everyones = group.all_gather(experts).wait()
        tokens, slots = everyones.shape
        rows = plan_rows(everyones, self.axes.ep.index * here, here, room_for(tokens, slots, ranks, here, self.room)[0], kernels)
        triton, later = use_triton(kernels, self.x), Later()
        arrived = _Arrive.apply(self.x, self.gathering, rows, group, triton, later)
        made = compute(arrived, rows.ends_E, row_weights(gather(weights, group), rows), later)
        return _Leave.apply(made, rows, group, triton), (rows.wanted - len(rows.source_R)).clamp_min(0)


class AllToAll:
    """Each (token, expert) pair goes to the rank of its expert alone. How many go where is exchanged first, and the host waits for it
    once; so there is always room. Over etp the tokens are gathered first, since each part of an expert needs them all."""

    def __init__(self, x: Tensor, axes: ModelAxes, room: float = math.inf):
        self.x, self.axes = x, axes

    def __call__(self, experts: Tensor, weights: Tensor, count: int, compute: Compute, kernels: Kernels = "auto") -> tuple[Tensor, Tensor]:
        """As of AllGather; nothing is ever missing."""
        ep, etp = self.axes.ep, self.axes.etp
        x, weights, experts = gather(self.x, etp), gather(weights, etp), etp.all_gather(experts).wait()
        tokens, slots = experts.shape
        leaving = plan_rows(experts, 0, count, tokens * slots, kernels)
        sizes = leaving.ends_E.diff(prepend=leaving.ends_E.new_zeros(1)).view(ep.size, -1)  # (ranks, N): rows for each of their experts
        arriving = ep.all_to_all(sizes)
        send, receive = host_sizes(sizes, arriving, tokens * slots)
        leaving = replace(leaving, source_R=leaving.source_R[: sum(send)], slot_R=leaving.slot_R[: sum(send)])  # pairs that were dropped stay
        arrived = swap(gather_rows(x, leaving, kernels), ep, send, receive)
        sorting = plan_rows(_experts_of(arriving, sum(receive)), 0, sizes.shape[1], sum(receive), kernels)
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


EXCHANGES: dict[Dispatch, Any] = {"allgather": AllGather, "alltoall": AllToAll}

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
from phalanx.ops.kernels import Kernels
from phalanx.ops.permute import Rows, combine_rows, gather_rows, plan_rows

Dispatch = Literal["allgather", "alltoall"]
Compute = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(rows (R, D) sorted by expert, ends (N,), what each row's output is multiplied by (R,) or None) -> (R, D): what this rank's experts make."""


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


class _Swap(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, send: list[int], receive: list[int]) -> Tensor:  # type: ignore[override]
        ctx.axis, ctx.send, ctx.receive = axis, send, receive
        return axis.all_to_all(x, send, receive)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.axis.all_to_all(dy, ctx.receive, ctx.send), None, None, None


class _Weigh(Function):
    """weights (T, K) of pairs -> those of rows (R,)."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, rows: Rows) -> Tensor:  # type: ignore[override]
        ctx.rows = rows
        return weights.flatten().index_select(0, rows.slot_R)

    @staticmethod
    def backward(ctx: Any, dweights: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        row = ctx.rows.row_TK
        return torch.where(row >= 0, dweights[row.clamp_min(0)], 0), None


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


def through_all_gather(x: Tensor, experts: Tensor, weights: Tensor, count: int, compute: Compute, axes: ModelAxes,
                       kernels: Kernels = "auto", room: float = math.inf) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Every token goes to every expert rank, which keeps those that chose its experts; sums come back scattered. The host waits for nothing.

    x (T, D), experts (T, K) int64 (a number >= `count` is nobody's), weights (T, K) -> (T, D), and () the number of rows that this
    rank had no room for: it has room for `room` times its fair share of all rows. With any missing the result is wrong.
    """
    group, here = axes.experts, count // axes.ep.size
    everyones = group.all_gather(experts).wait()
    tokens, slots = everyones.shape
    rows = plan_rows(everyones, axes.ep.index * here, here, room_for(tokens, slots, axes.ep.size, here, room)[0], kernels)
    made = compute(gather_rows(gather(x, group), rows, kernels), rows.ends_E, _Weigh.apply(gather(weights, group), rows))
    y = scatter(combine_rows(made, None, rows, tokens, kernels), group)
    return y, (rows.wanted - len(rows.source_R)).clamp_min(0)


def through_all_to_all(x: Tensor, experts: Tensor, weights: Tensor, count: int, compute: Compute, axes: ModelAxes,
                       kernels: Kernels = "auto", room: float = math.inf) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Each (token, expert) pair goes to the rank of its expert alone. How many go where is exchanged first, and the host waits for it
    once; so there is always room.

    Arguments as of `through_all_gather`. Over etp the tokens are gathered first, since each part of an expert needs them all.
    """
    x, weights, experts = gather(x, axes.etp), gather(weights, axes.etp), axes.etp.all_gather(experts).wait()
    tokens, slots = experts.shape
    leaving = plan_rows(experts, 0, count, tokens * slots, kernels)
    sizes = leaving.ends_E.diff(prepend=leaving.ends_E.new_zeros(1)).view(axes.ep.size, -1)  # (ranks, N): rows for each of their experts
    arriving = axes.ep.all_to_all(sizes)
    send, receive = host_sizes(sizes, arriving, tokens * slots)
    leaving = replace(leaving, source_R=leaving.source_R[: sum(send)], slot_R=leaving.slot_R[: sum(send)])  # pairs that were dropped stay
    arrived = swap(gather_rows(x, leaving, kernels), axes.ep, send, receive)
    sorting = plan_rows(_experts_of(arriving, sum(receive)), 0, sizes.shape[1], sum(receive), kernels)
    made = combine_rows(compute(gather_rows(arrived, sorting, kernels), sorting.ends_E, None), None, sorting, len(arrived), kernels)
    y = scatter(combine_rows(swap(made, axes.ep, receive, send), weights, leaving, tokens, kernels), axes.etp)
    return y, leaving.wanted.new_zeros(())


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


DISPATCHERS: dict[Dispatch, Any] = {"allgather": through_all_gather, "alltoall": through_all_to_all}

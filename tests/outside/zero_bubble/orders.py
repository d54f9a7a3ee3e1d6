"""Pipeline schedules as a package of somebody else's has them: ZB-H2 of Qi et al., "Zero bubble pipeline parallelism"
(arXiv:2401.10241), which keeps up to twice as many micro-batches as 1F1B; and functions that are no schedules."""

from __future__ import annotations

import phalanx as px


@px.pipeline_schedule("zb_h2", splits_backward=True)
def zb_h2(shape: px.PipelineShape) -> list[list[px.Action]]:
    """Rank r begins with 2 (p - r) - 1 forwards; its weight gradients wait for 2 r further micro-batches."""
    orders = []
    for rank in range(shape.pp):
        m, lag = shape.num_micro_batches, 2 * rank
        warm_up = min(m, 2 * (shape.pp - rank) - 1)
        order = [px.Action("F", rank, mb) for mb in range(warm_up)]
        for mb in range(m + lag):
            if mb < m:
                order.append(px.Action("I", rank, mb))
            if mb >= lag:
                order.append(px.Action("W", rank, mb - lag))
            if mb + warm_up < m:
                order.append(px.Action("F", rank, mb + warm_up))
        orders.append(order)
    return orders


@px.pipeline_schedule("late", virtual_stages="any", splits_backward=True)
def late(shape: px.PipelineShape) -> list[list[px.Action]]:
    """All forwards, all gradients of inputs, and those of weights at the end, the last micro-batch first."""
    orders = []
    for rank in range(shape.pp):
        stages, mbs = shape.stages_of(rank), range(shape.num_micro_batches)
        orders.append(
            [px.Action("F", s, mb) for s in stages for mb in mbs]
            + [px.Action("I", s, mb) for s in reversed(stages) for mb in mbs]
            + [px.Action("W", s, mb) for s in stages for mb in reversed(mbs)]
        )
    return orders


@px.pipeline_schedule("undeclared")
def undeclared(shape: px.PipelineShape) -> list[list[px.Action]]:
    """It has I and W, and does not say so."""
    return late.orders(shape)  # type: ignore[return-value]


@px.pipeline_schedule("forgetful", splits_backward=True)
def forgetful(shape: px.PipelineShape) -> list[list[px.Action]]:
    """The last weight gradient of each rank is missing."""
    return [list(order[:-1]) for order in zb_h2.orders(shape)]


@px.pipeline_schedule("elsewhere")
def elsewhere(shape: px.PipelineShape) -> list[list[px.Action]]:
    """Every rank does the first stage."""
    return [[px.Action("F", 0, 0), px.Action("B", 0, 0)]] * shape.pp


@px.pipeline_schedule("broken")
def broken(shape: px.PipelineShape) -> list[list[px.Action]]:
    return [[]] * (1 // (shape.pp - shape.pp))


def plain(shape: px.PipelineShape) -> list[list[px.Action]]:
    return late.orders(shape)  # type: ignore[return-value]

"""Gathers and scatters of an axis on gloo: the same result for parts small enough for an all-to-all and for larger
ones, in every dtype."""

from __future__ import annotations

import pytest
import torch

from phalanx.comm.axis import SMALL, Axis, _at_once

WORLD = 3


def part(rank: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """(rows, 2) small whole numbers, exact in every dtype."""
    return ((torch.arange(rows * 2).view(rows, 2) * 7 + rank * 3) % 16).to(dtype)


def exchanged(rank: int, world: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    axis, x = Axis("x", tuple(range(world)), rank), part(rank, rows, dtype)
    whole = axis.all_gather(x, async_op=True).wait()
    axis.barrier()
    sums = (
        axis.reduce_scatter(part(rank, rows * world, dtype)).wait()
        if dtype.is_floating_point and dtype.itemsize > 1
        else None
    )
    return whole.view(torch.uint8), sums


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("rows", [1, 5, SMALL])
def test_parts_of_any_size_are_gathered_and_scattered(ranks, rows, dtype):
    assert _at_once(part(0, rows, dtype)) == (rows < SMALL)
    found = ranks.run("tests.comm.test_axis:exchanged", WORLD, rows, dtype)
    whole = torch.cat([part(r, rows, dtype) for r in range(WORLD)])
    total = sum(part(r, rows * WORLD, dtype) for r in range(WORLD))
    for rank, (gathered, sums) in enumerate(found):
        assert torch.equal(gathered.view(dtype), whole)
        assert sums is None or torch.equal(sums, total[rank * rows : (rank + 1) * rows])

"""Sums over rows: each program sums some rows of some columns, and a second, short sum adds what they found."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.kernel_tools import cut_rows, triton_wide, wide_of

ROWS, COLS = 32, 128  # of a tile


@triton.jit
def _parts(x, sums, T, F, EACH, WIDE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A program sums EACH tiles of rows of its columns."""
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = cols < F
    total = tl.zeros((ROWS, COLS), WIDE)
    first = tl.program_id(0).to(tl.int64) * EACH * ROWS
    for tile in range(EACH):
        rows = first + tile * ROWS + tl.arange(0, ROWS)
        mask = (rows < T)[:, None] & inside[None, :]
        total += tl.load(x + rows[:, None] * F + cols[None, :], mask=mask, other=0.0).to(WIDE)
    tl.store(sums + tl.program_id(0) * F + cols, tl.sum(total, 0), mask=inside)


def over_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (T, F) -> (F,), in the wide dtype."""
    x = x.contiguous()
    rows, width = x.shape
    parts, across, each = cut_rows(x, ROWS, COLS)
    sums = torch.empty(parts, width, dtype=wide_of(x.dtype), device=x.device)
    if sums.numel():
        _parts[(parts, across)](
            x, sums, rows, width, each, WIDE=triton_wide(x.dtype), ROWS=ROWS, COLS=COLS, num_warps=4
        )
    return sums.sum(0)

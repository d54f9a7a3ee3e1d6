"""Tokens written straight into the memory of the ranks that need them, and the sums of their rows straight back.

Knows which ranks a token's experts are on, and buffers of comm (`Axis.push`) whose part on each rank it may write
to. The host never learns how many rows go where. Shapes: T tokens of this rank, N ranks (N / `etp` of them hold
different experts, `here` each), K experts a token, R rows of this rank's experts, D model.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phalanx.ops.experts.permute import sum_forward
from phalanx.ops.experts.rows import ExpertRows
from phalanx.ops.experts.spread import Buffers, Spread


def goes_to(experts_TK: Tensor, spread: Spread, rank: int) -> Tensor:
    """(T,) bool: tokens with an expert on a rank; dropped pairs have none."""
    return (experts_TK // spread.here == rank // spread.etp).any(1)


def send_tokens(x: Tensor, experts_TK: Tensor, spread: Spread, to: Buffers) -> None:
    """The reference implementation of kernels.push.send_tokens: x (T, D) to this rank's part on each rank that a token
    has an expert on."""
    for rank in range(spread.ranks):
        part = to.part(rank)
        part.copy_(torch.where(goes_to(experts_TK, spread, rank).unsqueeze(1), x, part))


def send_sums(y: Tensor, rows: ExpertRows, everyones: Tensor, spread: Spread, to: Buffers) -> None:
    """The reference implementation of kernels.push.send_sums: of each token with an expert here the sum of its rows (R,
    D), to the rank it is of.

    `everyones` (N * T, K) and `rows`: of all ranks' tokens. A token whose rows had no room gets zeros.
    """
    for rank in range(spread.ranks):
        mine, part = slice(rank * to.tokens, (rank + 1) * to.tokens), to.part(rank)
        total = sum_forward(y, None, replace(rows, row_TK=rows.row_TK[mine]))
        part.copy_(torch.where(goes_to(everyones[mine], spread, spread.index).unsqueeze(1), total, part))


def add_sums(parts: Tensor, experts_TK: Tensor, spread: Spread) -> Tensor:
    """The reference implementation of kernels.push.add_sums: (T, D) the sums (N * T, D) that came back for each token,
    added in rank order, fp32 or wider."""
    tokens = len(experts_TK)
    total = torch.zeros(
        tokens,
        parts.shape[1],
        dtype=torch.float64 if parts.dtype == torch.float64 else torch.float32,
        device=parts.device,
    )
    for rank in range(spread.ranks):
        part = parts[rank * tokens : (rank + 1) * tokens].to(total.dtype)
        total = total + torch.where(goes_to(experts_TK, spread, rank).unsqueeze(1), part, 0)
    return total.to(parts.dtype)


def twins(triton: bool) -> Any:
    """The module whose send_tokens, send_sums and add_sums are to run."""
    if triton:
        from phalanx.ops.experts import push_kernel

        return push_kernel
    return sys.modules[__name__]

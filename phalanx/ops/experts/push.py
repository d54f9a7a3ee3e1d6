"""Tokens written directly into the memory of the ranks that need them, and the sums of their rows written directly
back.

Works with the ranks that hold a token's experts, and with buffers of comm (`Axis.push`) in which it may write to its
slot on each rank. The host never learns how many rows go where. Shapes: T tokens of this rank, N ranks (N / `etp` of
them hold different experts, `here` each), K experts a token, R rows of this rank's experts, D model.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.ops.experts.permute import plan_rows, sum_forward
from phalanx.ops.experts.rows import ExpertRows
from phalanx.ops.experts.spread import Buffers, Spread
from phalanx.ops.op import Case, Kernels, Op, triton


def goes_to(experts_TK: Tensor, spread: Spread, rank: int) -> Tensor:
    """(T,) bool: tokens with an expert on a rank; dropped pairs have none."""
    return (experts_TK // spread.here == rank // spread.etp).any(1)


def send_tokens(x: Tensor, experts_TK: Tensor, spread: Spread, to: Buffers) -> None:
    """Write each token of x (T, D) to this rank's slot on every rank that holds one of its experts."""
    for rank in range(spread.ranks):
        part = to.part(rank)
        part.copy_(torch.where(goes_to(experts_TK, spread, rank).unsqueeze(1), x, part))


def send_sums(y: Tensor, rows: ExpertRows, everyones: Tensor, spread: Spread, to: Buffers) -> None:
    """For each token with an expert here, write the sum of its rows (R, D) to the rank that it came from.

    `everyones` (N * T, K) and `rows` cover the tokens of all ranks. A token whose rows had no room gets zeros.
    """
    for rank in range(spread.ranks):
        mine, part = slice(rank * to.tokens, (rank + 1) * to.tokens), to.part(rank)
        total = sum_forward(y, None, replace(rows, row_TK=rows.row_TK[mine]))
        part.copy_(torch.where(goes_to(everyones[mine], spread, spread.index).unsqueeze(1), total, part))


def add_sums(parts: Tensor, experts_TK: Tensor, spread: Spread) -> Tensor:
    """(T, D) the sums (N * T, D) that came back for each token, added in rank order, in fp32 or wider."""
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


@dataclass(frozen=True)
class LocalBuffers:
    """For test cases: the buffers of several ranks in one process, as rank 0 sees them."""

    wholes: tuple[Tensor, ...]
    tokens: int
    index: int = 0
    first: int = 0

    @property
    def addresses(self) -> Tensor:
        return torch.tensor([whole.data_ptr() for whole in self.wholes], device=self.wholes[0].device)

    def part(self, rank: int) -> Tensor:
        return self.wholes[rank][: self.tokens]


def _case(x: Tensor, kernels: Kernels) -> Tensor:
    """Tokens with two of four experts on two ranks: what is sent to each, and sums sent back and added."""
    x, tokens = x.detach(), len(x)
    by, spread = PUSH.choose(kernels, x), Spread(2, 1, 2, 0)
    numbers = torch.arange(tokens, device=x.device)
    experts = torch.stack([numbers % 4, numbers // 2 % 5], 1)
    everyones = torch.cat((experts, experts.flip(0)))
    sent, back = (LocalBuffers(x.new_zeros(2, 2 * tokens, x.shape[1]).unbind(), tokens) for _ in range(2))
    by.send_tokens(x, experts, spread, sent)
    rows = plan_rows(everyones, spread.first, spread.here, 4 * tokens, "plain")
    y = torch.cat((x, x, -x, x))[rows.source_R % tokens]
    by.send_sums(y, rows, everyones, spread, back)
    return torch.cat((*sent.wholes, *back.wholes, by.add_sums(torch.cat((x, 2 * x)), experts, spread)))


PUSH = Op(
    "push",
    "tokens written into the memory of the ranks of their experts",
    __name__,
    ("send_tokens", "send_sums", "add_sums"),
    (triton("phalanx.ops.experts.push_kernel"),),
    switches=("permute",),
    cases=(Case("push", _case, ((11, 33),)),),
)

"""fp32 masters as the bf16 weights and the bits that these lack (optim.masters=split).

A weight is its master rounded to the nearest bf16, ties to even. As integers, the bits of the master minus those of the
weight (followed by 16 zeros) are at most 2^15 away from zero. Between -2^15 and 2^15 - 1 the difference is stored in 16
bits. It is 2^15 if the master lies half-way between two weights and was rounded down. A weight whose last bit is zero
takes ties from both sides, so it belongs to 2^16 + 1 masters, one more than 16 bits can tell apart. For those ties one
more bit is stored, 8 of them to a byte. So nothing is lost: a master is given back with every bit, and 2.125 bytes are
stored beside each weight instead of 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.ops.optimizer.packed import PackedTensor, check_blocks

BITS = 8  # ties in a byte
BYTES = 2 + 1 / BITS
"""Beside each weight."""


@dataclass(frozen=True)
class SplitMaster(PackedTensor):
    """`weights` (n,) bf16, which forward and backward read; `rest` (n,) int16; `ties` (n / 8,) uint8, the first element
    in the lowest bit."""

    weights: Tensor
    rest: Tensor
    ties: Tensor

    dtype, block, name = torch.float32, BITS, "optim.masters=split"

    @staticmethod
    def of(weights: Tensor) -> SplitMaster:
        """Masters equal to these weights (n,)."""
        check_blocks(len(weights), BITS)
        rest = torch.zeros(len(weights), dtype=torch.int16, device=weights.device)
        return SplitMaster(weights, rest, torch.zeros(len(rest) // BITS, dtype=torch.uint8, device=weights.device))

    def __len__(self) -> int:
        return len(self.rest)

    def part(self, start: int, stop: int) -> SplitMaster:
        return SplitMaster(self.weights[start:stop], self.rest[start:stop], self.ties[start // BITS : stop // BITS])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Besides the weights."""
        return self.rest, self.ties

    def wide(self, dtype: torch.dtype = torch.float32) -> Tensor:
        bits = (self.ties.unsqueeze(1).int() >> _places(self.ties)) & 1
        upper = (self.weights.view(torch.int16).int() + bits.flatten()) << 16
        return (upper + self.rest.int()).view(torch.float32).to(dtype)

    def store_(self, values: Tensor, step: Tensor | None = None) -> None:
        """The weights are set too."""
        values = values.float()
        self.weights.copy_(values)
        difference = values.view(torch.int32) - (self.weights.view(torch.int16).int() << 16)
        tie = difference == 1 << 15
        self.rest.copy_(torch.where(tie, -(1 << 15), difference).to(torch.int16))
        self.ties.copy_((tie.view(-1, BITS).int() << _places(self.ties)).sum(1))


def _places(ties: Tensor) -> Tensor:
    return torch.arange(BITS, dtype=torch.int32, device=ties.device)

"""Scaling blocks of a matrix, where a range of its elements is stored in a flat buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.base.align import BYTES, room
from phalanx.base.dataclass import dataclass


@dataclass(frozen=True)
class Blocks:
    """A matrix (rows, columns) whose blocks of size `block` (both sizes given) share a scale."""

    rows: int
    columns: int
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """The number of blocks down and across."""
        return -(-self.rows // self.block[0]), -(-self.columns // self.block[1])

    @property
    def count(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def room(self) -> int:
        """4-byte elements to reserve for the scales of this matrix beside those of others, so that each starts at an
        address that cuBLAS accepts."""
        return room(self.count, BYTES // 4)

    def of(self, first: int, stop: int, device: torch.device) -> Tensor:
        """(stop - first,) int64: the block of each element, counted along rows."""
        at = torch.arange(first, stop, device=device)
        return at // self.columns // self.block[0] * self.shape[1] + at % self.columns // self.block[1]

"""PackedTensor: (n,) numbers of a shard that are not stored as one tensor of them, such as moments in FP8."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

import torch
from torch import Tensor


class PackedTensor(ABC):
    """Numbers of a flat range of elements, and how they are stored.

    dtype   holds every number exactly: what checkpoints contain
    block   elements stored together; a range begins and ends at a multiple (or at the end of the shard)
    name    the config value that asks for it, for messages
    """

    dtype: ClassVar[torch.dtype]
    block: ClassVar[int]
    name: ClassVar[str]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def part(self, start: int, stop: int) -> Self:
        """Elements start..stop, both multiples of `block`, as a view."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """What holds the numbers."""

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @abstractmethod
    def wide(self, dtype: torch.dtype) -> Tensor:
        """The numbers (n,) in new memory."""

    @abstractmethod
    def store_(self, values: Tensor, step: Tensor | None = None) -> None:
        """Store (n,) numbers: with `step` () the result of this step's update; without it what a checkpoint or an
        initialisation gives."""

    def __getitem__(self, span: slice) -> Self:
        start, stop = span.start or 0, len(self) if span.stop is None else span.stop
        if start % self.block or stop % self.block:
            raise ValueError(
                f"{self.name} keeps {self.block} elements together, and optim.lr_scale tells matrices apart "
                "that are stored in one "
                f"(at element {start if start % self.block else stop}); give them one factor"
            )
        return self.part(start, stop)

    def around(self, start: int, stop: int) -> tuple[int, Tensor]:
        """The numbers of the blocks that contain elements start..stop, exact in `dtype`, and the number of the first of
        them."""
        first, last = start // self.block * self.block, -(-stop // self.block) * self.block
        return first, self.part(first, min(last, len(self))).wide(self.dtype)


def check_blocks(numel: int, block: int) -> None:
    """ValueError if a shard has no whole number of blocks."""
    if numel % block:
        raise ValueError(f"{numel} elements are no whole blocks of {block}")

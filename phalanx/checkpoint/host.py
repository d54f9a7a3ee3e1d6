"""HostCopies: memory of the host that tensors are copied to, so that training can go on while they are written. Knows nothing of files."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopies:
    """Copies are made in stream order without waiting; `wait` waits for them. The memory is kept for the next save.

    Of a GPU it is pinned. The first save pays for the memory (every page is touched), later ones only for the copies.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._memory: list[Tensor] = []
        self._used = 0
        self._event: torch.cuda.Event | None = None

    def begin(self) -> None:
        """Nobody reads the earlier copies any more."""
        self._used = 0

    def copy(self, x: Tensor) -> Tensor:
        """x in memory of the host, contiguous."""
        memory = self._next(x.numel() * x.element_size())
        out = memory.view(x.dtype).view(x.shape)
        out.copy_(x, non_blocking=True)
        return out

    def _next(self, size: int) -> Tensor:
        """`size` bytes; saves ask for the same sizes in the same order, so that each finds its own again."""
        if self._used == len(self._memory) or len(self._memory[self._used]) < size:
            fresh = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            self._memory[self._used : self._used + 1] = [fresh]
        self._used += 1
        return self._memory[self._used - 1][:size]

    def mark(self) -> None:
        """All copies of this save are on their way."""
        if self.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> None:
        """Until the copies are made. Called from the thread that reads them."""
        if self._event is not None:
            self._event.synchronize()

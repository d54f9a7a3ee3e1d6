"""HostCopies: host memory to which tensors are copied, so that training can continue while they are written. Knows
nothing of files."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopies:
    """The copies of a save, made beside the computation: on a GPU on a separate stream, which runs after everything
    computed so far.

    Until `release`, nothing that is copied may change. Reading it is fine, so the next forward and backward can run
    meanwhile. `wait` waits for the copies. The memory is kept for the next save; for a GPU it is pinned. The first save
    pays for the memory (every page is touched), later ones only for the copies.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._memory: list[Tensor] = []
        self._used = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._event: torch.cuda.Event | None = None
        self._beside = True

    def begin(self, fresh: int = 0) -> None:
        """The earlier copies are no longer read. `fresh`: bytes of device memory that tensors created just for this
        save take. If the device has no room for all of them, the computation waits for their copies."""
        self._used = 0
        if self.device.type == "cuda":
            idle = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            self._beside = 2 * fresh < torch.cuda.mem_get_info(self.device)[0] + idle

    def copy(self, x: Tensor, fresh: bool = False) -> Tensor:
        """x in contiguous host memory. `fresh`: x was created for this save, and the caller drops it."""
        memory = self._next(x.numel() * x.element_size())
        out = memory.view(x.dtype).view(x.shape)
        if self._stream is None:
            return out.copy_(x)
        now = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            out.copy_(x, non_blocking=True)
        if fresh and self._beside:
            x.record_stream(self._stream)  # its memory is not reused before
        elif fresh:
            now.wait_stream(self._stream)
        return out

    def _next(self, size: int) -> Tensor:
        """`size` bytes; saves ask for the same sizes in the same order, so each finds its own memory again."""
        if self._used == len(self._memory) or len(self._memory[self._used]) < size:
            fresh = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            self._memory[self._used : self._used + 1] = [fresh]
        self._used += 1
        return self._memory[self._used - 1][:size]

    def mark(self) -> None:
        """All copies of this save have been started."""
        if self._stream is not None:
            self._event = self._stream.record_event()

    def release(self) -> None:
        """Whatever follows in the current stream and changes what is copied runs after the copies. The host does not
        wait."""
        if self._event is not None:
            torch.cuda.current_stream(self.device).wait_event(self._event)

    def wait(self) -> None:
        """Wait until the copies are complete. Called from the thread that reads them."""
        if self._event is not None:
            self._event.synchronize()

"""HostCopies: host memory to which tensors are copied, so that training can continue while they are written. Knows
nothing of files."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import torch
from torch import Tensor

from phalanx.checkpoint.pinned import PageLocked

ALIGNED = 64  # bytes, at which a copy begins


def room(sizes: Iterable[int]) -> int:
    """Bytes of memory for copies of these sizes."""
    return sum(-(-size // ALIGNED) * ALIGNED for size in sizes)


class HostCopies:
    """The copies of a save, made beside the computation: on a GPU on a separate stream, which runs after everything
    computed before `begin`. Another thread may go on with them (`leave_open`, then `last` there).

    Until `release`, nothing that is copied may change. Reading it is fine, so the next forward and backward can run
    meanwhile. `wait` waits for the copies. The memory is one piece that is kept for the next save; for a GPU it is
    page-locked. The first save pays for it (every page is touched) unless `prepare` did, later ones only for the
    copies.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._locked: PageLocked | None = None
        self._preparing: threading.Thread | None = None
        self._used = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._event: torch.cuda.Event | None = None
        self._beside = True
        self._started = threading.Event()
        self._started.set()

    def prepare(self, size: int) -> None:
        """Allocate memory for copies of `size` bytes (`room`) in a thread, for which `begin` waits."""
        self._preparing = threading.Thread(
            target=self._prepare, args=(size,), daemon=True, name="copies-of-checkpoints"
        )
        self._preparing.start()

    def _prepare(self, size: int) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # each thread has its own
        with suppress(Exception):  # `begin` tries again, where an error is the save's
            self._allocate(size)

    def _allocate(self, size: int) -> None:
        if len(self._memory) < size:
            self._memory, self._locked = torch.empty(0, dtype=torch.uint8), None  # freed before there is more
            self._locked = None if self._stream is None else PageLocked(size)
            self._memory = torch.empty(size, dtype=torch.uint8) if self._locked is None else self._locked.memory

    def lacks(self, size: int) -> str:
        """Take memory for copies of `size` bytes; why it cannot be had, "" if it is there."""
        try:
            self._taken(size)
        except (OSError, RuntimeError, MemoryError) as error:  # of mmap, torch's allocators and Python
            return str(error).splitlines()[0]
        return ""

    def _taken(self, size: int) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        self._allocate(size)

    def begin(self, size: int, fresh: int = 0) -> None:
        """The earlier copies are no longer read. `size`: `room` for what will be copied. `fresh`: bytes of device
        memory that tensors created just for this save take. If the device has no room for all of them, the computation
        waits for their copies."""
        self._used = 0
        self._taken(size)
        if self._stream is not None:
            idle = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            self._beside = 2 * fresh < torch.cuda.mem_get_info(self.device)[0] + idle
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def copy(self, x: Tensor) -> Tensor:
        """x, as it was before `begin`, in contiguous host memory."""
        out = self._next(x)
        with self._on_stream():
            return out.copy_(x, non_blocking=self._stream is not None)

    def copy_fresh(self, x: Tensor) -> Tensor:
        """x in contiguous host memory; it was created for this save, and the caller drops it."""
        if self._stream is None:
            return self.copy(x)
        now = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(now)
        out = self.copy(x)
        if self._beside:
            x.record_stream(self._stream)  # its memory is not reused before
        else:
            now.wait_stream(self._stream)
        return out

    def _next(self, x: Tensor) -> Tensor:
        """Memory for x, the next of what `begin` made room for."""
        first, size = self._used, x.numel() * x.element_size()
        self._used += room([size])
        if self._used > len(self._memory):
            raise ValueError(f"copies of {self._used} bytes where there is room for {len(self._memory)}")
        return self._memory[first : first + size].view(x.dtype).view(x.shape)

    def leave_open(self) -> None:
        """More copies follow, in another thread, for whose start `release` waits."""
        self._started.clear()

    @contextmanager
    def last(self) -> Iterator[None]:
        """The last copies of this save are started inside. What is computed for them inside runs on their stream."""
        try:
            with self._on_stream():
                yield
            if self._stream is not None:
                self._event = self._stream.record_event()
        finally:
            self._started.set()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def release(self) -> None:
        """Whatever follows in the current stream and changes what is copied runs after the copies. The host waits until
        they have been started, not for their end."""
        self._started.wait()
        if self._event is not None:
            torch.cuda.current_stream(self.device).wait_event(self._event)

    def wait(self) -> None:
        """Wait until the copies are complete. Called from the thread that reads them."""
        if self._event is not None:
            self._event.synchronize()

"""Landing: memory of the host through which bytes of files come to a device, so that it fetches them while the next
are read. Knows no files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor


class StagingBuffer:
    """Two pieces of memory of one thread in turn, page-locked where a GPU fetches from them. What is in one stays
    until it is taken again."""

    def __init__(self, gpu: torch.device | None):
        self._gpu = gpu
        self._memory = [torch.empty(0, dtype=torch.uint8)] * 2
        self._fetched: list[torch.cuda.Event | None] = [None, None]

    def take(self, size: int) -> Tensor:
        """At least `size` bytes (uint8), once the GPU has fetched what was there before."""
        self._memory.reverse()
        self._fetched.reverse()
        if (event := self._fetched[0]) is not None:
            event.synchronize()
        if len(self._memory[0]) < size:
            self._memory[0] = torch.empty(size, dtype=torch.uint8, pin_memory=self._gpu is not None)
        return self._memory[0]

    def sent(self) -> None:
        """All copies from the piece that was taken last have been asked for, in the current stream."""
        if self._gpu is not None:
            event = torch.cuda.Event(blocking=True)  # a thread that waits leaves its core to those that read
            event.record()
            self._fetched[0] = event


class StagingBuffers:
    """Landings of several threads, whose copies go into the stream that is current where this is made."""

    def __init__(self, devices: Iterable[torch.device]):
        self._gpu = next((device for device in devices if device.type == "cuda"), None)
        self._stream = torch.cuda.current_stream(self._gpu) if self._gpu is not None else None

    @contextmanager
    def one(self) -> Iterator[StagingBuffer]:
        """Of the thread that asks."""
        with ExitStack() as inside:
            if self._stream is not None:
                inside.enter_context(torch.cuda.stream(self._stream))
            yield StagingBuffer(self._gpu)

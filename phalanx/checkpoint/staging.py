"""Staging buffers: host memory through which bytes of files go to a device, so that it copies them while the next are
read. Knows nothing of files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor


class StagingBuffer:
    """Two buffers of one thread, used in turn, page-locked where a GPU copies from them. The contents of a buffer stay
    until it is taken again."""

    def __init__(self, gpu: torch.device | None):
        self._gpu = gpu
        self._memory = [torch.empty(0, dtype=torch.uint8)] * 2
        self._fetched: list[torch.cuda.Event | None] = [None, None]

    def take(self, size: int) -> Tensor:
        """At least `size` bytes (uint8), once the GPU has copied the previous contents."""
        self._memory.reverse()
        self._fetched.reverse()
        if (event := self._fetched[0]) is not None:
            event.synchronize()
        if len(self._memory[0]) < size:
            self._memory[0] = torch.empty(size, dtype=torch.uint8, pin_memory=self._gpu is not None)
        return self._memory[0]

    def sent(self) -> None:
        """All copies from the buffer taken last have been issued in the current stream."""
        if self._gpu is not None:
            event = torch.cuda.Event(blocking=True)  # a waiting thread leaves its core to those that read
            event.record()
            self._fetched[0] = event


class StagingBuffers:
    """Staging buffers of several threads; copies go into the stream that is current when this is created."""

    def __init__(self, devices: Iterable[torch.device]):
        self._gpu = next((device for device in devices if device.type == "cuda"), None)
        self._stream = torch.cuda.current_stream(self._gpu) if self._gpu is not None else None

    @contextmanager
    def one(self) -> Iterator[StagingBuffer]:
        """The buffer of the calling thread."""
        with ExitStack() as inside:
            if self._stream is not None:
                inside.enter_context(torch.cuda.stream(self._stream))
            yield StagingBuffer(self._gpu)

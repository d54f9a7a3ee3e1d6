"""Waits: how long a rank's work stands still in collectives, to tell a rank that others wait for from those that wait.

On a CPU this is the host's time; on a GPU, the current stream's time between two events, read at the end of the step.
Collectives inside CUDA graphs and exchanges through shared memory are not covered.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Waited:
    """The time that one step waited. `seconds` is available once the device has finished the step; work that other
    streams still do then is not counted."""

    def __init__(self, host_s: float, events: list[tuple[torch.cuda.Event, torch.cuda.Event]]):
        self._host_s, self._events = host_s, events

    def seconds(self) -> float:
        return self._host_s + sum(before.elapsed_time(after) for before, after in self._events if after.query()) / 1e3


class Waits:
    """The waits of one mesh. on: whether this step is measured."""

    def __init__(self, cuda: bool = False):
        self.on, self._cuda = False, cuda
        self._host_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def around(self, call: Callable[[], T]) -> T:
        if not self._cuda:
            begun = time.perf_counter()
            found = call()
            self._host_s += time.perf_counter() - begun
            return found
        if torch.cuda.is_current_stream_capturing():
            return call()
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        found = call()
        after.record()
        self._events.append((before, after))
        return found

    def take(self) -> Waited | None:
        """The wait of the step that ends here; None if it was not measured."""
        if not self.on:
            return None
        taken = Waited(self._host_s, self._events)
        self._host_s, self._events = 0.0, []
        return taken


class Timed:
    """A torch handle whose wait is measured."""

    def __init__(self, handle: Any, waits: Waits):
        self._handle, self._waits = handle, waits

    def wait(self) -> None:
        self._waits.around(self._handle.wait)

    def is_completed(self) -> bool:
        return self._handle.is_completed()


def timed(handle: Any, waits: Waits) -> Any:
    if isinstance(handle, list):
        return [timed(h, waits) for h in handle]
    return None if handle is None else Timed(handle, waits)

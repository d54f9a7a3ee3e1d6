"""Worker processes whose results bring their large arrays through a file in memory instead of the pipe.

    worker: result ──pickle──▶ header ───────────pipe────────────▶ header ──unpickle──▶ result
                       └─────▶ large buffers ──write▶ file ▶readv──┘                   this process

Python reads a pipe 64 KiB at a time, and takes its lock (GIL) after each: hundreds of times for one image, while the
training thread needs it. A file is read in one call without the lock.

The files have no name (memfd_create; where there is none, files unlinked at once), and workers inherit them open. So
nothing is left behind, whichever processes are killed, and no other user can open them. They are written and read,
never mapped: where one cannot grow, as in a small /dev/shm, `write` fails instead of ending a process (SIGBUS), and
that result goes through the pipe whole.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import suppress
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
R = TypeVar("R")
SHARED_MEMORY = "/dev/shm"
LARGE = 1 << 16  # bytes of an array that does not go through the pipe
QUEUED = 4  # calls per worker that run or wait, each with a file of its own, so that a slow one does not hold up others


class Handed(NamedTuple):
    """What goes through the pipe: a pickled result without its large buffers, and their sizes in bytes."""

    header: bytes
    sizes: tuple[int, ...]


class HandoverFile:
    """A file without a name for the large buffers of one result at a time: a worker fills it, and the process that
    started the worker takes them out."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def __reduce__(self) -> tuple[Callable[..., HandoverFile], tuple[Any]]:
        """For a worker, while it is started: the same open file."""
        return _inherited, (DupFd(self.descriptor),)

    def fill(self, buffers: Sequence[memoryview]) -> None:
        """Write them one after another. OSError where there is no room for all of them."""
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        for buffer in buffers:
            while buffer:
                buffer = buffer[os.write(self.descriptor, buffer) :]

    def take(self, sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
        """The buffers of these sizes in bytes; the file is empty afterwards."""
        found = [np.empty(size, np.uint8) for size in sizes]
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        for array in found:
            unread = array.data
            while unread:
                count = os.readv(self.descriptor, [unread])
                if not count:
                    raise EOFError(f"a result of {sum(sizes):,} bytes was cut short on its way from a worker")
                unread = unread[count:]
        self.clear()
        return found

    def clear(self) -> None:
        os.ftruncate(self.descriptor, 0)


def _inherited(handle: Any) -> HandoverFile:
    return HandoverFile(handle.detach())


def memory_file() -> int:
    """A descriptor of a new file without a name, in memory where the system has such files."""
    if sys.platform == "linux" and hasattr(os, "memfd_create"):  # Python for an old C library does not have it
        with suppress(OSError):  # a container may forbid the call
            return os.memfd_create("phalanx-handover")
    return unlinked_file()


def unlinked_file() -> int:
    """The same in shared memory, or else in the folder for temporary files."""
    folder = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    descriptor, path = tempfile.mkstemp(prefix="phalanx-handover-", dir=folder)
    os.unlink(path)
    return descriptor


class HandoverPool:
    """Processes that make calls; they end with this one. Threads that call `map` at the same time take turns."""

    def __init__(self, workers: int):
        self.files = [HandoverFile(memory_file()) for _ in range(QUEUED * workers)]
        self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin, (self.files,))
        self._lock = threading.Lock()

    def map(self, call: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """call(item) for each item, in order. Raises the first error of a call, when others that run have ended, and
        BrokenProcessPool if a process died."""
        found, waiting = list[R](), deque[Future[Handed]]()

        def take() -> None:
            handed = waiting[0].result()
            file = self.files[len(found) % len(self.files)]  # results are taken in order
            found.append(pickle.loads(handed.header, buffers=file.take(handed.sizes)))
            waiting.popleft()

        with self._lock:
            try:
                for number, item in enumerate(items):
                    if len(waiting) == len(self.files):
                        take()
                    waiting.append(self._pool.submit(_made, call, item, number % len(self.files)))
                while waiting:
                    take()
            except BaseException:
                wait(waiting)  # calls that still run fill files, which the next calls need empty
                for file in self.files:
                    file.clear()
                raise
        return found


# ---- in a worker

_files: list[HandoverFile] = []


def _begin(files: list[HandoverFile]) -> None:
    _files.extend(files)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _made(call: Callable[[T], object], item: T, number: int) -> Handed:
    result = call(item)
    handed, buffers = without_large(result)
    try:
        _files[number].fill(buffers)
    except OSError:
        return Handed(pickle.dumps(result, protocol=5), ())
    return handed


def without_large(result: object) -> tuple[Handed, list[memoryview]]:
    """What goes through the pipe, and the large buffers that do not. Arrays that are not contiguous stay in the
    header."""
    large: list[memoryview] = []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < LARGE:
            return True
        large.append(raw)
        return False

    header = pickle.dumps(result, protocol=5, buffer_callback=stays)
    return Handed(header, tuple(raw.nbytes for raw in large)), large

"""Worker processes whose results bring their large arrays through a file in memory instead of the pipe.

    worker: result ─┬─▶ the rest, with shapes and dtypes ──pipe──▶─┬─▶ result, in this process
                    └─▶ large arrays ──write──▶ file ──readv──▶────┘

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
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from multiprocessing.reduction import DupFd
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from phalanx.base.dataclass import dataclass

T = TypeVar("T")
R = TypeVar("R")
SHARED_MEMORY = "/dev/shm"
LARGE = 1 << 16  # bytes of an array that does not go through the pipe
QUEUED = 4  # calls per worker that run or wait, each with a file of its own, so that a slow one does not hold up others


@dataclass(frozen=True)
class InFile:
    """Stands for an array of a result that is in the file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


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

    def take(self, result: R) -> R:
        """A result with its arrays, which are read in the order in which they were written; the file is empty
        afterwards."""
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        whole: R = changed(result, InFile, self._read)
        self.clear()
        return whole

    def _read(self, of: InFile) -> NDArray[Any]:
        raw = np.empty(of.nbytes, np.uint8)
        unread = raw.data
        while unread:
            count = os.readv(self.descriptor, [unread])
            if not count:
                raise EOFError(f"an array of {of.nbytes:,} bytes was cut short on its way from a worker")
            unread = unread[count:]
        return raw.view(of.dtype).reshape(of.shape)

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
        found, waiting = list[R](), deque[Future[R]]()

        def take() -> None:
            file = self.files[len(found) % len(self.files)]  # results are taken in order
            found.append(file.take(waiting[0].result()))
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


def _made(call: Callable[[T], R], item: T, number: int) -> R:
    result = call(item)
    rest, large = without_large(result)
    try:
        _files[number].fill(large)
    except OSError:
        return result
    return rest


def without_large(result: R) -> tuple[R, list[memoryview]]:
    """The result without its large arrays, and these. Arrays of objects, and those whose rows are not in order in
    memory, stay in it."""
    large: list[memoryview] = []

    def moved(array: NDArray[Any]) -> NDArray[Any] | InFile:
        if array.nbytes < LARGE or array.dtype.hasobject or not array.flags.c_contiguous:
            return array
        large.append(array.reshape(-1).view(np.uint8).data)
        return InFile(array.shape, array.dtype)

    return changed(result, np.ndarray, moved), large


def changed(value: Any, kind: type[Any], change: Callable[[Any], Any]) -> Any:
    """`value` with every object of this kind changed: itself, or in lists, tuples and fields of dataclasses."""
    if isinstance(value, kind):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(changed(each, kind, change) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: changed(getattr(value, f.name), kind, change) for f in fields(value)})
    return value

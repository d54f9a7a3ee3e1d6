"""Threads of one rank that read, hash, copy and write at the same time: how many, and how they divide the work. Knows
nothing of files."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from phalanx.checkpoint.agree import agree
from phalanx.comm.axis import Axis

LEAST = 4  # even with few cores: a thread mostly waits for its disk or its server
MOST = 16  # of one rank: so many keep memory, a disk or a server busy
T = TypeVar("T")


def threads_of_rank(axis: Axis) -> int:
    """This rank's share of the cores it may use, within bounds. Called by all ranks together, since those on a host
    share its cores."""
    return share_of(cores(), agree(axis, socket.gethostname).count(socket.gethostname()))


def share_of(cores: int, ranks: int) -> int:
    return max(LEAST, min(MOST, cores // ranks))


def cores() -> int:
    """Cores of this host on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_threads(tasks: Iterable[T], worker: Callable[[Iterator[T]], None], threads: int) -> None:
    """Run every task in one of the threads, roughly in order: `worker` is called once in each thread and takes the next
    task until none is left.

    The first error stops all threads as soon as they ask for their next task, and is raised once they have ended.
    """
    todo = deque(tasks)

    def next_ones() -> Iterator[T]:
        with suppress(IndexError):  # another thread took the last one
            while True:
                yield todo.popleft()

    def thread() -> None:
        try:
            worker(next_ones())
        except BaseException:
            todo.clear()
            raise

    with ThreadPoolExecutor(threads, "checkpoint") as pool:
        for done in [pool.submit(thread) for _ in range(min(threads, len(todo)))]:
            done.result()

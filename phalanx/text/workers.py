"""Calls of a function in worker processes: results in the order of the calls, few calls in flight, no process left
behind."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from phalanx.base.errors import DataError

T = TypeVar("T")
R = TypeVar("R")
QUEUED = 2  # calls per worker that wait or run


def ordered(call: Callable[[Any, T], R], shared: Any, items: Iterable[T], workers: int) -> Iterator[R]:
    """call(shared, item) for each item, in order. With one worker, in this process; with more, in processes that
    receive `shared` once.

    Memory: at most QUEUED items for each worker are taken from `items` before their results. Workers end with this
    process.
    """
    if workers <= 1:
        for item in items:
            yield call(shared, item)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin, (call, shared))
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(_run, item))
            if len(waiting) >= QUEUED * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            "a worker process died, perhaps for want of memory (fewer workers take less); run again to continue"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_ready: list[Callable[[Any], Any]] = []  # of a worker process: the call, with what all calls share


def _begin(call: Callable[[Any, Any], Any], shared: Any) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per worker; the library reads it at each call
    _ready.append(lambda item: call(shared, item))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _run(item: Any) -> Any:
    return _ready[0](item)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

"""Python's garbage collector while a program starts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Inside, Python's garbage collector runs seldom. Start-up time: what imports and a plan allocate is nearly all
    kept, and by default it is gone through again and again, with all that torch has made."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)

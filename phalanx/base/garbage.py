"""Python's garbage collector while a program starts, and while it trains or serves."""

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


@contextmanager
def settled() -> Iterator[None]:
    """Inside, Python's garbage collector leaves out what is there at the beginning: modules, a model, all that torch
    made. Going through it stops a whole process for 100 to 200 ms, on each rank at a time of its own, and the others
    wait for it. At the end these objects are collected again.

    In a process that leaves out some already, nothing changes.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

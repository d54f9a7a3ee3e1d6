"""Python's garbage collector while a program runs: what is left out, and that nothing is left out for good."""

from __future__ import annotations

import gc
import weakref

import pytest

from phalanx.base.garbage import settled


class Cycle:
    """Only the collector frees it."""

    def __init__(self):
        self.me = self


def collected(ref: weakref.ref) -> bool:
    gc.collect()
    return ref() is None


@pytest.fixture(autouse=True)
def nothing_is_left_out_before():
    """Earlier tests of this process leave out what ranks share with it (tests.harness.pool)."""
    kept = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if kept:
        gc.freeze()


def test_what_is_there_at_the_beginning_is_left_out_until_the_end():
    before, every = Cycle(), len(gc.get_objects())
    early = weakref.ref(before)
    with settled():
        assert len(gc.get_objects()) < every / 10 < gc.get_freeze_count()
        late = weakref.ref(Cycle())
        del before
        assert collected(late) and early() is not None
    assert collected(early) and gc.get_freeze_count() == 0


def test_what_a_process_leaves_out_already_stays_so():
    before = Cycle()
    early = weakref.ref(before)
    gc.freeze()
    del before
    with settled():
        late = weakref.ref(Cycle())
        assert collected(late) and not collected(early)
    assert not collected(early)
    gc.unfreeze()
    assert collected(early)

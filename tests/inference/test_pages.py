"""Pages of memory: reference counts, the cache of prefixes, windows."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.inference.pages import GroupSpec, PagePool, PageTables, page_key, pages_of, pages_touched
from phalanx.sequence.paged import NO_PAGE

SIZE = 4


def keys_of(count: int, first: int = 0) -> list[bytes]:
    keys = [page_key(b"", bytes([first]))]
    while len(keys) < count:
        keys.append(page_key(keys[-1], b"x"))
    return keys[:count]


def tables_of(*windows: int | None, num_pages: int = 20, rows: int = 3) -> PageTables:
    return PageTables([GroupSpec(window, num_pages) for window in windows], rows, 64, SIZE)


def known(tables: PageTables, row: int, keys: list[bytes]) -> None:
    tables.extend(row, len(keys))
    for index, key in enumerate(keys):
        tables.know(row, index, key)


def test_a_key_is_of_all_tokens_before():
    assert page_key(b"", b"ab") != page_key(b"", b"ba")
    assert page_key(page_key(b"", b"a"), b"b") != page_key(page_key(b"", b"c"), b"b")
    assert page_key(b"", b"a") == page_key(b"", b"a")


def test_pages_of_tokens():
    assert [pages_of(n, SIZE) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    for n in range(1, 20):
        worst = max((first + n - 1) // SIZE - first // SIZE + 1 for first in range(SIZE))
        assert pages_touched(n, SIZE) == worst


def test_nobody_has_page_zero_and_pages_run_out():
    pool = PagePool(4)
    assert sorted(pool.take() for _ in range(3)) == [1, 2, 3]
    with pytest.raises(IndexError, match="every page has a user"):
        pool.take()
    pool.check()


def test_known_pages_are_kept_until_they_are_needed_the_longest_unused_first():
    pool = PagePool(4)
    pages = [pool.take() for _ in range(3)]
    for page, key in zip(pages, (b"a", b"b", b"c")):
        pool.know(page, key)
    for page in (pages[1], pages[0]):
        pool.release(page)
    assert pool.available == 2 and pool.find(b"b") == pages[1]
    pool.share(pages[1])  # used once more, then unused last
    pool.release(pages[1])
    assert pool.take() == pages[0] and pool.find(b"a") is None and pool.find(b"b") == pages[1]
    pool.check()


def test_unknown_pages_are_taken_before_known_ones():
    pool = PagePool(4)
    first, second = pool.take(), pool.take()
    pool.know(first, b"a")
    pool.release(first)
    pool.release(second)
    assert {pool.take(), pool.take()} == {second, 3} and pool.find(b"a") == first


def test_a_page_is_there_until_its_last_user_leaves():
    pool = PagePool(3)
    page = pool.take()
    pool.know(page, b"a")
    pool.share(page)
    pool.release(page)
    assert pool.users[page] == 1 and pool.available == 1
    pool.release(page)
    assert pool.available == 2


def test_the_second_page_of_the_same_tokens_is_not_known():
    pool = PagePool(4)
    first, second = pool.take(), pool.take()
    pool.know(first, b"a")
    pool.know(second, b"a")
    assert pool.find(b"a") == first and not pool.is_known(second)
    pool.release(second)
    pool.check()


@pytest.mark.parametrize("broken", ("users", "key", "twice"))
def test_the_check_of_a_pool_finds_what_is_wrong(broken):
    pool = PagePool(4)
    page = pool.take()
    pool.know(page, b"a")
    if broken == "users":
        pool.users[page] = 0
    elif broken == "key":
        pool._keys[page] = None
    else:
        pool._unknown.append(page)
    with pytest.raises(ValueError):
        pool.check()


def test_rows_share_a_prefix_and_write_their_own_pages():
    tables = tables_of(None)
    keys = keys_of(3)
    known(tables, 0, keys)
    assert tables.longest_prefix([*keys[:2], b"other"]) == 2
    tables.attach(1, keys[:2])
    tables.extend(1, 1)
    assert tables.tables[0][1, :2].tolist() == tables.tables[0][0, :2].tolist()
    assert tables.tables[0][1, 2] not in tables.tables[0][0]
    tables.release(0)
    assert [tables.pools[0].users[page] for page in tables.tables[0][1, :3].tolist()] == [1, 1, 1]
    assert (tables.tables[0][0] == NO_PAGE).all() and tables.longest_prefix(keys) == 3


def test_slots():
    tables = tables_of(None, 8)
    tables.extend(1, 2)
    found = tables.slots(np.array([1, 1]), np.array([3, 4]))
    for group, slots in enumerate(found):
        first, second = tables.tables[group][1, :2].tolist()
        assert slots.tolist() == [first * SIZE + 3, second * SIZE]


@pytest.mark.parametrize("window", (1, 2, 4, 5, 6, 9))
def test_pages_leave_a_window_when_nobody_reads_them(window):
    """Of the token at each position: the pages there are those with a token less than `window` before it, no more."""
    tables = tables_of(None, window)
    for position in range(40):
        tables.leave_windows(np.array([2]), np.array([position]))
        if position % SIZE == 0:
            tables.extend(2, 1)
        read = {p // SIZE for p in range(max(0, position - window + 1), position + 1)}
        assert set(np.flatnonzero(tables.tables[1][2]).tolist()) == read
        assert len(np.flatnonzero(tables.tables[0][2])) == position // SIZE + 1
        assert len(read) <= GroupSpec(window, 99).most_pages(position + 1, 1, SIZE)
        tables.pools[1].check()


@pytest.mark.parametrize("window", (1, 4, 5, 6))
def test_a_prefix_counts_if_the_window_of_the_next_token_is_there(window):
    tables = tables_of(None, window, num_pages=17)
    keys = keys_of(6)
    known(tables, 0, keys)
    tables.leave_windows(np.array([0]), np.array([24]))
    tables.release(0)
    while tables.pools[1]._unknown:
        tables.pools[1].take()
    for evicted in range(1, 7):  # the first pages left first, the end of what was released last goes before its front
        page = tables.pools[1].take()
        assert page
        there = [tables.pools[1].find(key) is not None for key in keys]
        right = [n for n in range(1, 7) if all(there[max(0, n * SIZE - window + 1) // SIZE : n])]
        assert tables.longest_prefix(keys) == max(right, default=0), evicted
    if window > 1:
        assert tables.longest_prefix(keys) == 0


def test_a_prefix_in_a_window_begins_with_the_pages_that_are_read():
    tables = tables_of(None, 6)
    keys = keys_of(5)
    known(tables, 0, keys)
    tables.attach(1, keys)
    assert [np.count_nonzero(table[1]) for table in tables.tables] == [5, 2]
    assert tables.tables[1][1, :5].tolist()[:3] == [NO_PAGE] * 3
    tables.extend(1, 1)
    tables.leave_windows(np.array([1]), np.array([24]))
    assert [np.count_nonzero(table[1]) for table in tables.tables] == [6, 2]
    tables.release(1)
    tables.release(0)
    assert not any(any(pool.users) for pool in tables.pools)


def test_pages_behind_rejected_drafts_are_given_back():
    tables = tables_of(None, 6)
    tables.extend(0, 4)
    tables.shrink(0, 2)
    assert tables.filled[0] == 2 and [pool.available for pool in tables.pools] == [17, 17]
    assert (tables.tables[0][0, 2:] == NO_PAGE).all()

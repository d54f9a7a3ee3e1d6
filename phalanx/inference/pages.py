"""Which page of memory holds which tokens of which sequence, on the host and without a device: reference counts, and a
cache of prefixes that several sequences share.

Layers that keep the same tokens form a group (nn.memory): those of full attention, those of one window. Each group has
pages of its own. A full page is known by a hash of its tokens and of all before them, so a sequence that begins with
the same tokens uses it too; it is never written again. A page without users stays known until its room is needed, the
one unused for longest first (Kwon et al., "PagedAttention", 2023).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from phalanx.base.dataclass import dataclass
from phalanx.sequence.paged import NO_PAGE

NO_BOUND = 1 << 62
DIGEST = 16  # bytes of a page's key: two of 2**40 pages have one with a probability of 2**-49


def page_key(before: bytes, tokens: bytes, images: bytes = b"") -> bytes:
    """The key of a full page: a hash of its tokens and of the key of the page before it (`first_key` of the first).
    images: digests of those for which some of the tokens stand; the tokens alone are the same for all images."""
    return hashlib.blake2b(before + tokens + images, digest_size=DIGEST).digest()


def first_key(adapter: str | None, source: bytes = b"") -> bytes:
    """What stands before a sequence: with another adapter, or beside another source (an encoder's text), the same
    tokens are remembered otherwise."""
    key = b"" if adapter is None else hashlib.blake2b(adapter.encode(), digest_size=DIGEST, person=b"adapter").digest()
    return key if not source else hashlib.blake2b(key + source, digest_size=DIGEST, person=b"source").digest()


def pages_of(tokens: int, page_size: int) -> int:
    """Pages that hold the first `tokens` tokens of a sequence."""
    return -(-tokens // page_size)


def pages_touched(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` consecutive tokens, wherever they begin."""
    return (tokens + page_size - 2) // page_size + 1


@dataclass(frozen=True)
class GroupSpec:
    """Layers that remember alike.

    window     a token is read by itself and those less than so many tokens later; None: by all later ones
    num_pages  pages in memory, NO_PAGE among them
    """

    window: int | None
    num_pages: int

    def most_pages(self, tokens: int, together: int, page_size: int) -> int:
        """Pages that a sequence of `tokens` tokens needs at once, if at most `together` of them are computed in one
        step."""
        pages = pages_of(tokens, page_size)
        if self.window is None:
            return pages
        return min(pages, pages_touched(self.window - 1 + together, page_size))

    def first_read(self, position: int, page_size: int) -> int:
        """Index of the first page that the token at `position` reads."""
        return 0 if self.window is None else max(0, position - self.window + 1) // page_size


class PagePool:
    """The pages of one group: how many sequences use each, and which tokens it is known to hold."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.users = [0] * num_pages
        self._keys: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._unknown = [page for page in range(num_pages - 1, 0, -1) if page != NO_PAGE]  # without users and key
        self._cached: OrderedDict[int, None] = OrderedDict()  # without users, with a key, the longest unused first

    @property
    def available(self) -> int:
        """Pages without users."""
        return len(self._unknown) + len(self._cached)

    def take(self) -> int:
        """A page for one user, whatever it held before. IndexError if none is available."""
        if self._unknown:
            page = self._unknown.pop()
        elif self._cached:
            page, _ = self._cached.popitem(last=False)
            del self._page_of[self._key_of(page)]
            self._keys[page] = None
        else:
            raise IndexError("every page has a user")
        self.users[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more user of a page."""
        if not self.users[page]:
            del self._cached[page]
        self.users[page] += 1

    def release(self, page: int) -> None:
        """One user less."""
        self.users[page] -= 1
        if self.users[page]:
            return
        if self._keys[page] is None:
            self._unknown.append(page)
        else:
            self._cached[page] = None

    def know(self, page: int, key: bytes) -> None:
        """The page is full, and holds the tokens of `key`. If another is known to hold them, this one stays unknown."""
        if self._keys[page] is None and key not in self._page_of:
            self._keys[page] = key
            self._page_of[key] = page

    def find(self, key: bytes) -> int | None:
        return self._page_of.get(key)

    def is_known(self, page: int) -> bool:
        return self._keys[page] is not None

    def check(self) -> None:
        """ValueError unless each page is in one place, and keys and pages agree."""
        used = [page for page, users in enumerate(self.users) if users]
        everywhere = sorted([*used, *self._unknown, *self._cached, NO_PAGE])
        if everywhere != list(range(self.num_pages)):
            raise ValueError(f"pages {everywhere} are not each of {self.num_pages} once")
        by_page = {page: key for key, page in self._page_of.items()}
        if by_page != {page: key for page, key in enumerate(self._keys) if key is not None}:
            raise ValueError("keys of pages and pages of keys differ")
        if any(page not in by_page for page in self._cached) or any(page in by_page for page in self._unknown):
            raise ValueError("a page is cached without a key, or has one and is not")

    def _key_of(self, page: int) -> bytes:
        key = self._keys[page]
        if key is None:
            raise ValueError(f"page {page} is cached without a key")
        return key


class PageTables:
    """The pages of sequences in a fixed number of rows, of every group.

    tables  of each group (rows, P) int32: pages of each row in order; NO_PAGE where none is yet, or its tokens have
            left the window
    filled  (rows,) int64  entries of a row that have had pages, in all groups
    first   of each group (rows,) int64  entries of a row before that have left the window
    """

    def __init__(self, groups: Sequence[GroupSpec], rows: int, longest: int, page_size: int):
        self.groups = tuple(groups)
        self.page_size = page_size
        self.pools = [PagePool(group.num_pages) for group in groups]
        width = pages_of(longest, page_size)
        self.tables = tuple(np.full((rows, width), NO_PAGE, np.int32) for _ in groups)
        self.filled = np.zeros(rows, np.int64)
        self.first = tuple(np.zeros(rows, np.int64) for _ in groups)
        self._windows = tuple((g, group.window) for g, group in enumerate(groups) if group.window is not None)
        # of groups with a window: the position whose token no longer reads the first page of the row
        self._leaves = {g: np.full(rows, page_size + window - 1, np.int64) for g, window in self._windows}

    def available(self) -> int:
        """Pages without users in the group that has fewest; no bound if there are no groups."""
        return min((pool.available for pool in self.pools), default=NO_BOUND)

    def extend(self, row: int, pages: int) -> None:
        """So many more pages for a row in every group. IndexError if they are not available."""
        begin = int(self.filled[row])
        for pool, table in zip(self.pools, self.tables):
            if pages == 1:
                table[row, begin] = pool.take()
            else:
                table[row, begin : begin + pages] = [pool.take() for _ in range(pages)]
        self.filled[row] = begin + pages

    def shrink(self, row: int, pages: int) -> None:
        """Give back all but the first so many pages of a row."""
        end = int(self.filled[row])
        for pool, table in zip(self.pools, self.tables):
            for index in range(end - 1, pages - 1, -1):
                pool.release(int(table[row, index]))
            table[row, pages:end] = NO_PAGE
        self.filled[row] = min(pages, end)

    def leave_windows(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """Give back pages that the tokens at these positions, the next ones of rows, no longer read."""
        for g, window in self._windows:
            passed = positions >= self._leaves[g][rows]
            if not passed.any():
                continue
            pool, table, first, leaves = self.pools[g], self.tables[g], self.first[g], self._leaves[g]
            for row, position in zip(rows[passed].tolist(), positions[passed].tolist()):
                begin, end = int(first[row]), (position - window + 1) // self.page_size
                for index in range(end - 1, begin - 1, -1):  # of a prefix the end is forgotten first
                    pool.release(int(table[row, index]))
                table[row, begin:end] = NO_PAGE
                first[row] = end
                leaves[row] = (end + 1) * self.page_size + window - 1

    def release(self, row: int) -> None:
        """Give back all pages of a row."""
        end = int(self.filled[row])
        for g, (pool, table, first) in enumerate(zip(self.pools, self.tables, self.first)):
            begin = int(first[row])
            for page in reversed(table[row, begin:end].tolist()):
                pool.release(page)
            table[row, :end] = NO_PAGE
            self._set_first(g, row, 0)
        self.filled[row] = 0

    def know(self, row: int, index: int, key: bytes) -> None:
        """The page at `index` of a row is full, with the tokens of `key`."""
        for pool, table in zip(self.pools, self.tables):
            page = int(table[row, index])
            if page != NO_PAGE:
                pool.know(page, key)

    def longest_prefix(self, keys: Sequence[bytes]) -> int:
        """So many pages of a sequence with these keys need no computing: all that the token after them reads are
        there, in every group."""
        best = len(keys)
        for group, pool in zip(self.groups, self.pools):
            if group.window is None:
                best = next((i for i in range(best) if pool.find(keys[i]) is None), best)
        for pages in range(best, 0, -1):
            if all(self._has_window(g, keys, pages) for g, _ in self._windows):
                return pages
        return 0

    def found(self, group: int, keys: Sequence[bytes]) -> list[int]:
        """Pages of a group that a sequence needs whose next token comes after pages with these keys."""
        first = self.groups[group].first_read(len(keys) * self.page_size, self.page_size)
        return [self._find(group, key) for key in keys[first:]]

    def attach(self, row: int, keys: Sequence[bytes]) -> None:
        """Begin an empty row with known pages (`longest_prefix`)."""
        for g, (pool, table) in enumerate(zip(self.pools, self.tables)):
            pages = self.found(g, keys)
            for page in pages:
                pool.share(page)
            first = len(keys) - len(pages)
            table[row, first : len(keys)] = pages
            self._set_first(g, row, first)
        self.filled[row] = len(keys)

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, ...]:
        """Of each group, where the tokens at these positions of rows are written: page * page_size + place in it."""
        indices, places = np.divmod(positions, self.page_size)
        return tuple(table[rows, indices].astype(np.int64) * self.page_size + places for table in self.tables)

    def _set_first(self, group: int, row: int, first: int) -> None:
        self.first[group][row] = first
        if group in self._leaves:
            window = self.groups[group].window or 0
            self._leaves[group][row] = (first + 1) * self.page_size + window - 1

    def _has_window(self, group: int, keys: Sequence[bytes], pages: int) -> bool:
        """The token after so many pages finds what it reads."""
        first = self.groups[group].first_read(pages * self.page_size, self.page_size)
        return all(self.pools[group].find(keys[i]) is not None for i in range(pages - 1, first - 1, -1))

    def _find(self, group: int, key: bytes) -> int:
        page = self.pools[group].find(key)
        if page is None:
            raise ValueError("a page of the prefix is not known")
        return page


class SourcePages:
    """The pages of sources, which encoders read: of a sequence in a row all at once, from when it begins to run. What
    is in them is its own.

    table    (rows, P) int32: pages of each row in order, NO_PAGE behind them
    lengths  (rows,) int64: tokens of each row's source
    """

    def __init__(self, group: GroupSpec, rows: int, longest: int, page_size: int):
        self.group, self.page_size = group, page_size
        self.pool = PagePool(group.num_pages)
        self.table = np.full((rows, pages_of(longest, page_size)), NO_PAGE, np.int32)
        self.lengths = np.zeros(rows, np.int64)

    def has_room(self, tokens: int) -> bool:
        return pages_of(tokens, self.page_size) <= self.pool.available

    def take(self, row: int, tokens: int) -> None:
        """Pages for a source of so many tokens. IndexError if they are not available."""
        count = pages_of(tokens, self.page_size)
        self.table[row, :count] = [self.pool.take() for _ in range(count)]
        self.lengths[row] = tokens

    def release(self, row: int) -> None:
        """Give back all pages of a row."""
        for page in self.table[row, : pages_of(int(self.lengths[row]), self.page_size)].tolist():
            self.pool.release(page)
        self.table[row], self.lengths[row] = NO_PAGE, 0

    def slots(self, row: int) -> np.ndarray:
        """Where the tokens of a row's source are written, one after another."""
        indices, places = np.divmod(np.arange(int(self.lengths[row])), self.page_size)
        return self.table[row, indices].astype(np.int64) * self.page_size + places

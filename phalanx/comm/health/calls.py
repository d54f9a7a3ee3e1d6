"""Which collectives a rank has called, and which rank deviated when ranks wait for different things.

Each rank keeps its last calls, as names only. When a collective has failed, the calls of ranks that wait for each other
are compared. Ranks that share communicators must make the same calls over them in the same order. Sends and receives
are not kept, because their two ends differ.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

KEPT = 1024
LONGEST = 32  # calls before a place in the program by which that place is recognized
ODD = 8  # calls that not every step makes
SIZES_DIFFER = ("all_to_all", "push", "hop")  # where ranks may pass in different numbers of elements
NOT_KEPT = ("send",)
Kind = tuple[str, str, int]


class CollectiveCall(NamedTuple):
    """group: axis, first rank and size. number: of calls over it so far. numel: elements passed in; 0 where ranks may
    differ."""

    group: str
    number: int
    op: str
    numel: int

    @property
    def kind(self) -> Kind:
        return self.group, self.op, self.numel

    def __str__(self) -> str:
        return (
            f"{self.op}{f' of {self.numel} elements' if self.numel else ''} over {self.group} (its call {self.number})"
        )


class Calls:
    """The last calls of one rank."""

    def __init__(self) -> None:
        self._last: deque[CollectiveCall] = deque(maxlen=KEPT)
        self._numbers: dict[str, int] = {}
        self.made = 0

    def note(self, group: str, op: str, numel: int) -> None:
        if op in NOT_KEPT:
            return
        self.made += 1
        number = self._numbers[group] = self._numbers.get(group, 0) + 1
        self._last.append(CollectiveCall(group, number, op, 0 if op in SIZES_DIFFER else numel))

    def last(self) -> list[CollectiveCall]:
        return list(self._last)


class Parting(NamedTuple):
    """What two ranks called at the point where they diverge. who: 0 or 1, the one that did not repeat what it had
    called there before; None: unknown."""

    calls: tuple[CollectiveCall, CollectiveCall]
    who: int | None


def parting(one: Sequence[CollectiveCall], two: Sequence[CollectiveCall]) -> Parting | None:
    """The first point where two ranks called different things over the communicators that they share; None: one of them
    is only behind."""
    shared = {c.group for c in one} & {c.group for c in two}
    a, b = ([c for c in calls if c.group in shared] for calls in (one, two))
    known = {(c.group, c.number): i for i, c in enumerate(b)}
    begin = next(((i, known[c.group, c.number]) for i, c in enumerate(a) if (c.group, c.number) in known), None)
    if begin is None:
        return None
    a, b = a[begin[0] :], b[begin[1] :]
    at = next((i for i, (x, y) in enumerate(zip(a, b)) if x.kind != y.kind), None)
    if at is None:
        return None
    usual = followed([c.kind for c in a[:at]], (a[at].kind, b[at].kind))
    return Parting((a[at], b[at]), None if usual is None else 1 - usual)


def followed(kinds: Sequence[Kind], either: tuple[Kind, Kind]) -> int | None:
    """Which of two calls followed the same calls before as now, since a step is like an earlier step. The longest
    sequence of equal calls decides, then the latest; if nothing like it occurred before, the last few calls are left
    out (what a save calls between two steps)."""
    for stop in range(len(kinds), max(1, len(kinds) - ODD), -1):
        for length in range(min(LONGEST, stop - 1), 0, -1):
            context = kinds[stop - length : stop]
            for end in range(stop - 1, length - 1, -1):
                if kinds[end - length : end] == context and kinds[end] in either:
                    return either.index(kinds[end])
    return None


def culprit(calls: Mapping[int, Sequence[CollectiveCall]]) -> tuple[tuple[int, ...], str] | None:
    """(ranks, what they did) for those that deviated from the others, by most pairs; None: all made the same calls as
    far as they came.

    Both ranks of a pair if nothing tells which of them. A rank is compared with the lowest rank and with its
    neighbours.
    """
    ranks = sorted(calls)
    pairs = dict.fromkeys([*((ranks[0], other) for other in ranks[1:]), *zip(ranks, ranks[1:])])
    partings = {pair: found for pair in pairs if (found := parting(calls[pair[0]], calls[pair[1]]))}
    if not partings:
        return None
    sure = Counter(pair[found.who] for pair, found in partings.items() if found.who is not None)
    votes = sure or Counter(rank for pair in partings for rank in pair)
    most = max(votes.values())
    named = tuple(sorted(rank for rank, count in votes.items() if count == most))
    pair, found = next((p, f) for p, f in partings.items() if (p[f.who] if f.who is not None else p[0]) in named)
    return named, f"rank {pair[0]} called {found.calls[0]}, rank {pair[1]} called {found.calls[1]}"

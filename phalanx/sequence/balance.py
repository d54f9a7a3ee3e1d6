"""Which context-parallel ranks work on which documents of a micro-batch: short ones whole on one rank, long ones cut
over as many as they need.

A pure function of the documents' lengths, so that all ranks choose alike without a word. Every rank has as many
tokens as it has when sequences are cut evenly; only which ones they are changes. What ranks differ in is attention
and what they exchange. Costs are in pairs of query and key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.sequence.shard import SequenceShard

# Pairs whose attention takes as long as ...
EXCHANGE = 512  # a token's keys and values take to another rank (32 heads, 8 of keys, of 128; 200 GB/s, 400 TFLOP/s)
TOKEN = 8192  # the rest of a layer takes for a token (of width 1,300; of wider models more)
# it takes to start what is sent to another rank and the kernels for it, however little that is (some 60 us)
MEETING = 500_000
UNEVEN = 0.05  # of a rank's work: what ranks may differ by before a document is cut for balance alone
LEAST = 2  # tokens of a part: each of its two chunks has one
TRIES = 6  # documents that may fill up the ranks


@dataclass(frozen=True)
class Share:
    """`degree` neighbouring ranks, from `first` on, have a document: all of it, or zig-zag parts of it
    (sequence.shard).

    sizes  tokens that each of them has, where a document fills up what others have left; empty: as many as each other
    """

    degree: int
    first: int
    sizes: tuple[int, ...] = ()

    @property
    def parts(self) -> tuple[SequenceShard, ...]:
        return (SequenceShard.of_sizes(self.sizes) if self.sizes else SequenceShard(0, self.degree)).all


def degrees_of(count: int, heads: int = 1) -> tuple[int, ...]:
    """How many of `count` ranks may share a document, where runs of `heads` neighbours exchange heads: divisors,
    ascending."""
    return tuple(d for d in range(1, count + 1) if count % d == 0 and (d % heads == 0 or heads % d == 0))


def pairs(part: SequenceShard, length: int) -> float:
    """Of query and key that a part of a document reads."""
    return sum((run.start + run.stop + 1) * len(run) / 2 for run in part.runs(length))


def exchange(part: SequenceShard, length: int) -> float:
    """What it takes to get the other parts."""
    return EXCHANGE * (length - part.size(length)) + MEETING * (part.count - 1)


def assign(lengths: Sequence[int], sizes: Sequence[int], degrees: Sequence[int]) -> list[Share] | None:
    """A share of each document, such that rank i has at most sizes[i] tokens of all of them together.

    The longest document chooses first. It takes the fewest ranks with which none of them has more attention to do
    than an even division (and UNEVEN) gives it; if there is no such number, the one with which, exchange included,
    the fullest has least to do. What does not fit in equal parts is cut into others. Whole documents hardly ever
    fill all ranks to the last token: one is chosen last, and is cut over all of them into whatever they have left.
    The shortest that can be is tried first, and a few longer ones; the best is taken where none leaves ranks nearly
    even. If all leave short documents without a rank, those are cut too. None: documents do not fit in that way.
    """
    order, slack = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)), UNEVEN * TOKEN * min(sizes)
    even = sum(n * (n + 1) / 2 for n in lengths) / len(sizes) + slack
    best: _Table | None = None
    tries = [(last, min(sizes) // 2) for last in (None, *_fillers(lengths, order, len(sizes)))]
    for last, long in (*tries, (None, 0)):
        table = _Table(lengths, sizes, degrees, even, long)
        if (long or best is None) and table.place(order, last) and (best is None or max(table.load) < max(best.load)):
            best = table
            if max(table.load) <= sum(table.load) / len(sizes) + slack:
                break
    return None if best is None else [best.found[i] for i in range(len(lengths))]


def _fillers(lengths: Sequence[int], order: Sequence[int], count: int) -> Iterator[int]:
    """Documents that may be cut over all ranks, the shortest first, each at least half as long again as the one
    before."""
    at_least, given = float(LEAST * count), 0
    for i in reversed(order):
        if lengths[i] >= at_least and given < TRIES:
            at_least, given = 1.5 * lengths[i], given + 1
            yield i


class _Table:
    """Ranks while documents are dealt to them: `room` for tokens, and the `load` of each so far. `long`: tokens of a
    document that may be cut into parts of any length."""

    def __init__(self, lengths: Sequence[int], sizes: Sequence[int], degrees: Sequence[int], even: float, long: int):
        self.lengths, self.degrees, self.even, self.long = lengths, degrees, even, long
        self.room, self.load = list(sizes), [0.0] * len(sizes)
        self.found: dict[int, Share] = {}

    def place(self, order: Sequence[int], last: int | None) -> bool:
        """All documents of `order`, `last` at the end over all ranks: whether they fit."""
        kept = 0 if last is None else LEAST
        self.room = [n - kept for n in self.room]
        for i in order:
            if i == last:
                continue
            share = self._in_equal_parts(self.lengths[i])
            if share is None and self.lengths[i] >= self.long:
                share = self._in_any_parts(self.lengths[i], self.degrees)
            if share is None:
                return False
            self._take(i, share)
        self.room = [n + kept for n in self.room]
        if last is not None:
            share = self._in_any_parts(self.lengths[last], (len(self.room),))
            if share is None:
                return False
            self._take(last, share)
        return True

    def _take(self, i: int, share: Share) -> None:
        self.found[i], length = share, self.lengths[i]
        for rank, part in enumerate(share.parts, share.first):
            self.room[rank] -= part.size(length)
            self.load[rank] += pairs(part, length) + exchange(part, length)

    def _groups(self, degree: int) -> range:
        return range(0, len(self.room), degree)

    def _in_equal_parts(self, length: int) -> Share | None:
        pairs_here = length * (length + 1) / 2
        ranks = enumerate(zip(self.load, self.room)) if self.degrees[0] == 1 else ()
        alone = min(((load, rank) for rank, (load, room) in ranks if room >= length), default=None)
        if alone is not None and alone[0] + pairs_here <= self.even:
            return Share(1, alone[1])
        best = None if alone is None else (alone[0] + pairs_here, Share(1, alone[1]))
        for degree in (d for d in self.degrees if d > 1):
            if length < LEAST * degree:
                break
            parts = SequenceShard(0, degree).all
            each = [part.size(length) for part in parts]
            firsts = [f for f in self._groups(degree) if all(self.room[f + k] >= n for k, n in enumerate(each))]
            if not firsts:
                continue
            before, first = min((max(self.load[f : f + degree]), f) for f in firsts)
            full = before + pairs_here / degree
            if full <= self.even:
                return Share(degree, first)
            after = full + exchange(parts[-1], length)
            if best is None or after < best[0]:
                best = after, Share(degree, first)
        return None if best is None else best[1]

    def _in_any_parts(self, length: int, degrees: Sequence[int]) -> Share | None:
        """Over ranks that have room for it together, more of it where there is less to do."""
        best: tuple[float, Share] | None = None
        for degree in degrees:
            for first in self._groups(degree) if degree > 1 else ():
                sizes = self._pour(length, range(first, first + degree))
                if sizes is None:
                    continue
                share = Share(degree, first, sizes)
                loads = (
                    self.load[r] + pairs(p, length) + exchange(p, length) for r, p in enumerate(share.parts, first)
                )
                after = max(loads)
                if best is None or after < best[0]:
                    best = after, share
        return None if best is None else best[1]

    def _pour(self, length: int, ranks: range) -> tuple[int, ...] | None:
        """How many of `length` tokens each rank takes, so that loads come out as even as rooms allow; None: they
        have no room."""
        room, load = [self.room[r] for r in ranks], [self.load[r] for r in ranks]
        if min(room) < LEAST or sum(room) < length or length < LEAST * len(ranks):
            return None
        each = (length + 1) / 2  # keys that a token reads
        low, high = min(load), max(load) + each * length

        def taken(level: float) -> list[int]:
            return [min(r, max(LEAST, int((level - at) / each))) for r, at in zip(room, load)]

        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if sum(taken(middle)) <= length else (low, middle)
        sizes = taken(low)
        for i in range(len(sizes)):
            sizes[i] += min(length - sum(sizes), room[i] - sizes[i])
        return tuple(sizes)


def loads(lengths: Sequence[int], shares: Sequence[Share], count: int) -> list[float]:
    """Pairs of query and key of each rank."""
    found = [0.0] * count
    for length, share in zip(lengths, shares):
        for rank, part in enumerate(share.parts, share.first):
            found[rank] += pairs(part, length)
    return found

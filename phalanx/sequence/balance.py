"""Which context-parallel ranks work on which documents of a micro-batch: short documents whole on one rank, long ones
sharded over as many ranks as they need.

A pure function of the documents' lengths, so that all ranks decide alike without communication. Every rank has the same
number of tokens as when sequences are divided evenly; only which tokens they are changes. Ranks differ in attention and
in what they exchange. Costs are counted in (query, key) pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phalanx.base.dataclass import dataclass
from phalanx.sequence.shard import SequenceShard

# Numbers of pairs whose attention takes as long as the following.
EXCHANGE = 512  # sending a token's keys and values (32 heads, 8 kv heads, of 128; 200 GB/s, 400 TFLOP/s)
TOKEN = 8192  # the rest of a layer for one token (of width 1,300; more for wider models)
# starting a transfer to another rank and its kernels, however small (about 60 us)
MEETING = 500_000
UNEVEN = 0.05  # of a rank's work: the difference between ranks above which a document is split just for balance
LEAST = 2  # tokens in a shard: one for each of its two chunks
TRIES = 6  # documents to try as fillers of the ranks


@dataclass(frozen=True)
class Share:
    """`degree` neighbouring ranks, starting with `first`, have a document: all of it, or zig-zag shards of it
    (sequence.shard).

    sizes  tokens that each of them has, if the document fills the room that others leave; empty: equal numbers
    """

    degree: int
    first: int
    sizes: tuple[int, ...] = ()

    @property
    def parts(self) -> tuple[SequenceShard, ...]:
        return (SequenceShard.of_sizes(self.sizes) if self.sizes else SequenceShard(0, self.degree)).all


def degrees_of(count: int, heads: int = 1) -> tuple[int, ...]:
    """The numbers of ranks, of `count`, that may share a document if groups of `heads` neighbours exchange heads:
    divisors, ascending."""
    return tuple(d for d in range(1, count + 1) if count % d == 0 and (d % heads == 0 or heads % d == 0))


def pairs(part: SequenceShard, length: int) -> float:
    """(query, key) pairs that a shard of a document computes."""
    return sum((run.start + run.stop + 1) * len(run) / 2 for run in part.runs(length))


def exchange(part: SequenceShard, length: int) -> float:
    """The cost of receiving the other shards."""
    return EXCHANGE * (length - part.size(length)) + MEETING * (part.count - 1)


def assign(lengths: Sequence[int], sizes: Sequence[int], degrees: Sequence[int]) -> list[Share] | None:
    """A share for each document, such that rank i has at most sizes[i] tokens in total.

    The longest document is placed first. It gets the smallest number of ranks for which none of them has more attention
    to compute than under an even division (plus UNEVEN); if there is no such number, the one for which the fullest
    rank, exchange included, has least to do. What does not fit in equal shards is cut into unequal ones.

    Whole documents hardly ever fill all ranks to the last token. So one document is placed last and sharded over all
    ranks into whatever room they have left. The shortest possible one is tried first, then a few longer ones; if none
    leaves the ranks nearly even, the best is taken. If all of them leave short documents without a rank, those are
    sharded too. None: documents do not fit in this way.
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


def assign_whole(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank of each item, so that sums of sizes are about equal: the largest goes first, each to the rank with the
    least. Two ranks differ by no more than the largest item that the fuller one has (Graham, Bounds on multiprocessing
    timing anomalies, 1969)."""
    found, loads = [0] * len(sizes), [0] * ranks
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        found[i] = min(range(ranks), key=loads.__getitem__)
        loads[found[i]] += sizes[i]
    return found


def assign_shared(sizes: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """The rank of each item of several replicas, which have so many ranks each, replica by replica. Two ranks differ by
    no more than the largest item that the fuller one has, and none has more than if each replica kept its own: where
    the largest first would give it more, the replicas begin with their own, and give to others."""
    every = [size for each in sizes for size in each]
    found = assign_whole(every, len(sizes) * ranks)
    alone = [first * ranks + home for first, each in enumerate(sizes) for home in assign_whole(each, ranks)]
    if max(_loads(every, found, len(sizes) * ranks)) <= max(_loads(every, alone, len(sizes) * ranks)):
        return found
    return _evened(every, alone, len(sizes) * ranks)


def _loads(sizes: Sequence[int], homes: Sequence[int], ranks: int) -> list[int]:
    loads = [0] * ranks
    for size, home in zip(sizes, homes):
        loads[home] += size
    return loads


def _evened(sizes: Sequence[int], homes: Sequence[int], ranks: int) -> list[int]:
    """One item at a time goes from the fullest rank to the emptiest, while these differ by more than it: each time the
    sum of squares of the loads falls."""
    found, loads = list(homes), _loads(sizes, homes, ranks)
    while True:
        full, low = loads.index(max(loads)), loads.index(min(loads))
        more = loads[full] - loads[low]
        fits = [i for i, home in enumerate(found) if home == full and sizes[i] < more]
        if not fits:
            return found
        moved = min(fits, key=lambda i: abs(2 * sizes[i] - more))
        found[moved] = low
        loads[full] -= sizes[moved]
        loads[low] += sizes[moved]


def _fillers(lengths: Sequence[int], order: Sequence[int], count: int) -> Iterator[int]:
    """Documents that may be sharded over all ranks, the shortest first, each at least one and a half times as long as
    the one before."""
    at_least, given = float(LEAST * count), 0
    for i in reversed(order):
        if lengths[i] >= at_least and given < TRIES:
            at_least, given = 1.5 * lengths[i], given + 1
            yield i


class _Table:
    """The ranks while documents are assigned to them: `room` for tokens, and the `load` of each so far. `long`: tokens
    of a document that may be cut into shards of any length."""

    def __init__(self, lengths: Sequence[int], sizes: Sequence[int], degrees: Sequence[int], even: float, long: int):
        self.lengths, self.degrees, self.even, self.long = lengths, degrees, even, long
        self.room, self.load = list(sizes), [0.0] * len(sizes)
        self.found: dict[int, Share] = {}

    def place(self, order: Sequence[int], last: int | None) -> bool:
        """Place all documents of `order`, with `last` at the end over all ranks; returns whether they fit."""
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
        """Over ranks that have room for it together, with more of it where there is less to do."""
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
        """How many of `length` tokens each rank takes, so that loads become as even as rooms allow; None: there is no
        room."""
        room, load = [self.room[r] for r in ranks], [self.load[r] for r in ranks]
        if min(room) < LEAST or sum(room) < length or length < LEAST * len(ranks):
            return None
        each = (length + 1) / 2  # keys that a token reads, on average
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
    """(query, key) pairs of each rank."""
    found = [0.0] * count
    for length, share in zip(lengths, shares):
        for rank, part in enumerate(share.parts, share.first):
            found[rank] += pairs(part, length)
    return found

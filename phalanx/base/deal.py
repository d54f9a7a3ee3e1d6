"""Which context-parallel ranks work on which documents of a micro-batch: short ones whole on one rank, long ones cut over as many as they need.

A pure function of the documents' lengths, so that all ranks choose alike without a word. Every rank has as many tokens as it has
when sequences are cut evenly; only which ones they are changes. Costs are in pairs of query and key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.base.part import Part

# Pairs whose attention takes as long as ...
EXCHANGE = 512  # a token's keys and values take to another rank (32 heads, 8 of keys, of 128; 200 GB/s, 400 TFLOP/s)
TOKEN = 8192  # the rest of a layer takes for a token (of width 1,300; of wider models more)
UNEVEN = 0.05  # of a rank's work: what ranks may differ by before a document is cut for balance alone


@dataclass(frozen=True)
class Share:
    """`degree` neighbouring ranks, from `first` on, have a document: all of it, or zig-zag parts of it (base.part)."""

    degree: int
    first: int


def degrees_of(count: int, heads: int = 1) -> tuple[int, ...]:
    """How many of `count` ranks may share a document, where runs of `heads` neighbours exchange heads: divisors, ascending."""
    return tuple(d for d in range(1, count + 1) if count % d == 0 and (d % heads == 0 or heads % d == 0))


def attention(length: int, degree: int) -> float:
    """Pairs of a document for each rank that has a part of it."""
    return length * (length + 1) / 2 / degree


def exchange(length: int, degree: int) -> float:
    """What each of those ranks takes to get the other parts."""
    return EXCHANGE * length * (degree - 1) / degree


def deal(lengths: Sequence[int], sizes: Sequence[int], degrees: Sequence[int]) -> list[Share] | None:
    """A share of each document, such that rank i has at most sizes[i] tokens of all of them together.

    The longest document chooses first. It takes the fewest ranks with which none of them has more attention to do than an even division (and
    UNEVEN) gives it; if there is no such number, the one with which, exchange included, the fullest has least to do. Where documents
    do not fit in so, more and more of the longest are cut over all ranks. None: they do not fit in that way either.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    able, forced = sum(length >= 2 * len(sizes) for length in lengths), 0
    while True:
        found = _place(lengths, order, sizes, degrees, forced)
        if found is not None or forced >= able:
            return found
        forced = min(able, max(1, 2 * forced))


def _place(lengths: Sequence[int], order: Sequence[int], sizes: Sequence[int], degrees: Sequence[int],
           forced: int) -> list[Share] | None:  # fmt: skip
    """The first `forced` documents of `order` over all ranks, the others as they fit best."""
    count, room, load = len(sizes), list(sizes), [0.0] * len(sizes)
    even = sum(n * (n + 1) / 2 for n in lengths) / count + UNEVEN * TOKEN * min(sizes)
    found: dict[int, Share] = {}
    for turn, i in enumerate(order):
        best: tuple[bool, float, Share] | None = None
        for degree in (count,) if turn < forced else degrees:
            if degree > 1 and lengths[i] < 2 * degree:
                break
            each = [part.size(lengths[i]) for part in Part(0, degree).all]
            firsts = [f for f in range(0, count, degree) if all(room[f + k] >= n for k, n in enumerate(each))]
            if not firsts:
                continue
            full, first = min((max(load[f : f + degree]), f) for f in firsts)
            full += attention(lengths[i], degree)
            after = full + exchange(lengths[i], degree)
            if best is None or (not best[0] and after < best[1]):
                best = (full <= even, after, Share(degree, first))
        if best is None:
            return None
        share = found[i] = best[2]
        for k, part in enumerate(Part(0, share.degree).all):
            room[share.first + k] -= part.size(lengths[i])
            load[share.first + k] += attention(lengths[i], share.degree) + exchange(lengths[i], share.degree)
    return [found[i] for i in range(len(lengths))]


def loads(lengths: Sequence[int], shares: Sequence[Share], count: int) -> list[float]:
    """Pairs of query and key of each rank."""
    found = [0.0] * count
    for length, share in zip(lengths, shares):
        for part in Part(0, share.degree).all:
            found[share.first + part.index] += sum((run.start + run.stop + 1) * len(run) / 2 for run in part.runs(length))
    return found

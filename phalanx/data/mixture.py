"""The order of training data, as pure functions of a sample number: permutations, blends and splits. Reads no files.

The state of the data is one integer, the number of consumed samples. Sample g of a run belongs to source i, as its n-th
sample (`Blend`), and is window `permute(n % windows)` of epoch n // windows. Nothing is stored, so resuming costs
nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction
from math import isfinite, lcm

import numpy as np
from numpy.typing import NDArray

Weight = float | Fraction

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
ROUNDS = 8
MAX_DENOMINATOR = 1 << 36
MAX_SOURCES = 2048
CHUNK = 1 << 14  # with the two limits above, every product in Blend.counts stays inside int64
REACH = 512  # samples up to which Blend.locate steps rather than jumps


def make_key(*parts: int) -> int:
    """A 64-bit key of some integers (splitmix64, chained)."""
    key = 0
    for part in parts:
        key = (key ^ (part & MASK)) + GOLDEN & MASK
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & MASK
        key = (key ^ key >> 27) * 0x94D049BB133111EB & MASK
        key ^= key >> 31
    return key


def hash64(x: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """64 random-looking bits for each of x: splitmix64 of x, keyed."""
    x = (x ^ np.uint64(key)) + np.uint64(GOLDEN)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def permute(index: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Images of `index` (each in [0, size)) under the keyed bijection of [0, size).

    A Feistel network over the next power of two; what it sends outside is sent on until it lands inside (cycle walking,
    Black and Rogaway 2002), less than two walks on average.
    """
    image = _feistel(np.asarray(index).astype(np.uint64), size, key)
    while len(outside := np.flatnonzero(image >= np.uint64(size))):
        image[outside] = _feistel(image[outside], size, key)
    return image.astype(np.int64)


def _feistel(x: NDArray[np.uint64], size: int, key: int) -> NDArray[np.uint64]:
    bits = max(2, (size - 1).bit_length())
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)
    low, high = x & low_mask, x >> low_bits
    for step in range(0, ROUNDS, 2):  # each half is xored with a hash of the other: undone by doing it again
        low = low ^ (hash64(high, make_key(key, step)) & low_mask)
        high = high ^ (hash64(low, make_key(key, step + 1)) & high_mask)
    return high << low_bits | low


class Blend:
    """A sequence of sources in which every prefix holds each source within one sample of its share: Tijdeman's rule.

    R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980). Of k sources with shares w (sum 1),
    let u = 2k - 2. Use j of source i becomes eligible at the first sample n (from 1) with w n >= j - 1 + 1/u, and is
    due at the last n where waiting was still allowed, floor((j - 1/u) / w) + 1. Among the eligible ones the first
    due is taken. Then
    |uses of i among the first n - w n| <= 1 - 1/u for all i and n.

    That rule looks like it needs its history, and `counts` shows that it does not: earliest due first serves the
    uses that rank up to any one use as if the others did not exist, so the number of them served in n samples is
    given by the reflection formula min over s <= n of (those of them eligible by s) + n - s. At most one use per
    source is eligible and not yet due at n, and a term of the minimum is below that of s = 0 only when such a use
    was already eligible at s; so the state after n samples follows exactly from the last 1/min(w) samples at most.

    Weights are taken as exact decimals; shares whose common denominator exceeds 2**36 are rounded to multiples of
    2**-36.
    """

    def __init__(self, weights: Sequence[Weight]):
        """ValueError for weights that are negative, not finite, all zero, or too small beside the others to ever be
        seen."""
        self.shares = _shares(weights)
        self._denominator = sum(self.shares)
        self._sources = [i for i, share in enumerate(self.shares) if share]
        self._unit = max(2, 2 * len(self._sources) - 2)
        self._cursor = (0, tuple(0 for _ in self.shares))  # replaced as a whole, so threads may share a Blend

    def counts(self, samples: int) -> list[int]:
        """How many of the first `samples` samples come from each source."""
        done = [0] * len(self.shares)
        open_uses = []
        for i in self._sources:
            scaled, base = self._unit * self.shares[i] * samples, self._unit * self._denominator
            done[i] = (scaled + self._denominator - 1) // base  # uses due by now
            if (scaled - self._denominator) // base + 1 > done[i]:  # uses eligible by now: one more at most
                open_uses.append((self._due(i, done[i] + 1), i))
        served = self._served(samples, done, sorted(open_uses)) if sum(done) < samples else []
        for i in served:
            done[i] += 1
        return done

    def locate(self, samples: Sequence[int]) -> list[tuple[int, int]]:
        """(source, number of the sample within the source) of each of some samples; fastest when they ascend."""
        position, counts = self._cursor
        race = _Race(self, position, list(counts))
        places = []
        for sample in samples:
            if not race.position <= sample <= race.position + REACH:
                race = _Race(self, sample, self.counts(sample))
            while race.position < sample:
                race.next()
            places.append(race.next())
        self._cursor = (race.position, tuple(race.counts))
        return places

    def _eligible(self, i: int, use: int) -> int:
        return -(-((use - 1) * self._unit + 1) * self._denominator // (self._unit * self.shares[i]))

    def _due(self, i: int, use: int) -> int:
        return (use * self._unit - 1) * self._denominator // (self._unit * self.shares[i]) + 1

    def _served(self, samples: int, done: list[int], open_uses: list[tuple[int, int]]) -> list[int]:
        """The sources whose open use (given in order of due time) is among the first `samples` samples."""
        if sum(done) + len(open_uses) == samples:
            return [i for _, i in open_uses]
        eligible = [self._eligible(i, done[i] + 1) for _, i in open_uses]
        # least[p]: the minimum over s, less `samples`, for the uses up to open use p
        least = [0] * (len(open_uses) + 1)
        for at in range(min(eligible), samples + 1, CHUNK):
            excess = self._excess(at, min(CHUNK, samples + 1 - at), done)
            least[0] = min(least[0], int(excess.min()))
            for p, since in enumerate(eligible):
                excess[max(0, since - at) :] += 1
                least[p + 1] = min(least[p + 1], int(excess.min()))
        return [i for p, (_, i) in enumerate(open_uses) if least[p + 1] > least[p]]

    def _excess(self, at: int, count: int, done: list[int]) -> NDArray[np.int64]:
        """For s = at .. at + count - 1: uses eligible by s, counting at most done[i] of source i, less s."""
        steps = np.arange(count, dtype=np.int64)
        excess = -(at + steps)
        base = self._unit * self._denominator
        for i in self._sources:
            whole, rest = divmod(self._unit * self.shares[i] * at - self._denominator, base)
            excess += np.minimum(whole + 1 + (rest + self._unit * self.shares[i] * steps) // base, done[i])
        return excess


class _Race:
    """Runs Tijdeman's rule forward from a position where the counts are known."""

    def __init__(self, blend: Blend, position: int, counts: list[int]):
        self.blend, self.position, self.counts = blend, position, counts
        self._waiting = [(blend._eligible(i, counts[i] + 1), i) for i in blend._sources]
        self._ready: list[tuple[int, int]] = []
        heapq.heapify(self._waiting)

    def next(self) -> tuple[int, int]:
        self.position += 1
        while self._waiting and self._waiting[0][0] <= self.position:
            _, i = heapq.heappop(self._waiting)
            heapq.heappush(self._ready, (self.blend._due(i, self.counts[i] + 1), i))
        _, i = heapq.heappop(self._ready)
        self.counts[i] += 1
        heapq.heappush(self._waiting, (self.blend._eligible(i, self.counts[i] + 1), i))
        return i, self.counts[i] - 1


def _shares(weights: Sequence[Weight]) -> list[int]:
    """Integers in the ratio of the weights; their sum is the period of the blend."""
    if not 1 <= len(weights) <= MAX_SOURCES:
        raise ValueError(f"{len(weights)} weights; a blend has 1 to {MAX_SOURCES} sources")
    for weight in weights:
        if not isfinite(weight) or weight < 0:
            raise ValueError(f"weight {weight}: must be a finite number, zero or more")
    exact = [Fraction(repr(w)) if isinstance(w, float) else Fraction(w) for w in weights]  # 0.1 means one tenth
    total = sum(exact)
    if total == 0:
        raise ValueError("all weights are zero")
    fractions = [w / total for w in exact]
    denominator = lcm(*(f.denominator for f in fractions))
    if denominator <= MAX_DENOMINATOR:
        return [int(f * denominator) for f in fractions]
    shares = [round(f * MAX_DENOMINATOR) for f in fractions]
    for weight, share in zip(weights, shares):
        if weight and not share:
            raise ValueError(f"weight {weight}: less than 2**-37 of the sum of all weights, it would never be seen")
    return shares


def parse_split(text: str) -> tuple[float, float, float]:
    """Fractions for train, validation and test of a split such as '98,2,0'. ValueError says what is wrong with it."""
    parts = text.split(",")
    if len(parts) != 3:
        raise ValueError(f"must be three numbers 'train,validation,test', but has {len(parts)}")
    try:
        train, valid, test = (float(part) for part in parts)
    except ValueError:
        raise ValueError("must be three numbers 'train,validation,test'") from None
    if not all(isfinite(part) and part >= 0 for part in (train, valid, test)):
        raise ValueError("each part must be a finite number, zero or more")
    if (total := train + valid + test) <= 0:
        raise ValueError("the sum of the parts must be greater than zero")
    return train / total, valid / total, test / total

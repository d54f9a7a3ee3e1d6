"""Which places of every sequence a context-parallel rank holds: zig-zag, so that causal attention costs each rank
the same.

Pure numbers; tensors are cut by it in `sequence.batch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class SequenceShard:
    """Part `index` of `count`: a sequence is cut into 2 * count chunks, and this part has chunks index and 2 * count
    - 1 - index.

    Chunk j of a sequence of S tokens is places j S // (2 count) .. (j + 1) S // (2 count): lengths differ by at most
    one. So `run` neighbouring parts together are one part of count / run: their first chunks are one run of places,
    their second ones another.

    borders  where the chunks of one document begin and the last one ends, where they are not equally long; 2 count +
    1 places
    dynamic  documents are dealt to the parts by their lengths (sequence.balance), in as many tokens as a part has
    anyway; runs of `heads` of them
             exchange heads
    """

    index: int = 0
    count: int = 1
    dynamic: bool = False
    heads: int = 1
    borders: tuple[int, ...] = ()

    @staticmethod
    def of_sizes(sizes: Sequence[int]) -> SequenceShard:
        """Part 0 of a document of which part i has sizes[i] tokens, as many in one chunk as in the other."""
        early = [(n + 1) // 2 for n in sizes]
        return SequenceShard(
            0,
            len(sizes),
            borders=tuple(accumulate([0, *early, *(n - e for n, e in zip(reversed(sizes), reversed(early)))])),
        )

    def runs(self, length: int) -> tuple[range, range]:
        """The places of its two chunks in a sequence of `length` tokens, ascending."""
        return self._chunk(self.index, length), self._chunk(2 * self.count - 1 - self.index, length)

    def _chunk(self, j: int, length: int) -> range:
        if self.borders:
            return range(self.borders[j], self.borders[j + 1])
        return range(j * length // (2 * self.count), (j + 1) * length // (2 * self.count))

    def size(self, length: int) -> int:
        """Tokens that it has of a sequence of `length`."""
        return sum(map(len, self.runs(length)))

    @property
    def all(self) -> tuple[SequenceShard, ...]:
        """Every part of the sequence, this one included."""
        return self.neighbours(self.count)

    def neighbours(self, run: int) -> tuple[SequenceShard, ...]:
        """The `run` parts, this one among them, that together are one part of count / run."""
        first = self.index // run * run
        return tuple(SequenceShard(i, self.count, borders=self.borders) for i in range(first, first + run))

    def most(self, length: int) -> int:
        """Tokens of the largest part of a sequence of `length`."""
        return max(part.size(length) for part in self.all)

    def among(self, run: int) -> SequenceShard:
        """What its `run` neighbours are together."""
        return SequenceShard(self.index // run, self.count // run, borders=self.borders[::run])


WHOLE = SequenceShard()

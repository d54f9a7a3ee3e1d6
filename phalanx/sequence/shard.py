"""Which positions of every sequence a context-parallel rank holds: in zig-zag order, so that causal attention costs
each rank the same.

Only numbers; `sequence.batch` applies them to tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from phalanx.base.dataclass import dataclass


@dataclass(frozen=True)
class SequenceShard:
    """Shard `index` of `count`: a sequence is cut into 2 * count chunks, and this shard has chunks index and 2 * count
    - 1 - index.

    Chunk j of a sequence of S tokens is positions j S // (2 count) .. (j + 1) S // (2 count): lengths differ by at most
    one. So `run` neighbouring shards together form one shard of count / run: their first chunks are contiguous, and so
    are their second ones.

    borders  where the chunks of one document begin and the last one ends, if they are not equally long; 2 count + 1
             positions
    dynamic  documents are assigned to shards by length (sequence.balance), with the usual number of tokens in each
             shard; groups of `heads` shards exchange heads
    rank, ranks  this rank among those of tp, which share a shard of the tokens; streams of units (sequence.units) are
             assigned to each of them
    replica, replicas  this rank's replica among those whose ranks compute each other's units: micro-batches of as many
             neighbours along dp, one from each
    """

    index: int = 0
    count: int = 1
    dynamic: bool = False
    heads: int = 1
    borders: tuple[int, ...] = ()
    rank: int = 0
    ranks: int = 1
    replica: int = 0
    replicas: int = 1

    @property
    def sharers(self) -> int:
        """Ranks of a replica: those of cp and tp."""
        return self.count * self.ranks

    @property
    def everyone(self) -> int:
        """Ranks to which units are assigned."""
        return self.replicas * self.sharers

    @property
    def here(self) -> int:
        """This rank's number among them."""
        return (self.replica * self.count + self.index) * self.ranks + self.rank

    @property
    def alone(self) -> SequenceShard:
        """The same for a micro-batch whose units no other replica computes."""
        return replace(self, replica=0, replicas=1)

    @staticmethod
    def of_sizes(sizes: Sequence[int]) -> SequenceShard:
        """Shard 0 of a document of which shard i has sizes[i] tokens, divided equally between its two chunks."""
        early = [(n + 1) // 2 for n in sizes]
        return SequenceShard(
            0,
            len(sizes),
            borders=tuple(accumulate([0, *early, *(n - e for n, e in zip(reversed(sizes), reversed(early)))])),
        )

    def runs(self, length: int) -> tuple[range, range]:
        """The positions of its two chunks in a sequence of `length` tokens, ascending."""
        return self._chunk(self.index, length), self._chunk(2 * self.count - 1 - self.index, length)

    def _chunk(self, j: int, length: int) -> range:
        if self.borders:
            return range(self.borders[j], self.borders[j + 1])
        return range(j * length // (2 * self.count), (j + 1) * length // (2 * self.count))

    def size(self, length: int) -> int:
        """Tokens that it has in a sequence of `length`."""
        return sum(map(len, self.runs(length)))

    @property
    def all(self) -> tuple[SequenceShard, ...]:
        """Every shard of the sequence, including this one."""
        return self.neighbours(self.count)

    def neighbours(self, run: int) -> tuple[SequenceShard, ...]:
        """The `run` shards, including this one, that together form one shard of count / run."""
        first = self.index // run * run
        return tuple(SequenceShard(i, self.count, borders=self.borders) for i in range(first, first + run))

    def most(self, length: int) -> int:
        """Tokens of the largest shard of a sequence of `length`."""
        return max(part.size(length) for part in self.all)

    def among(self, run: int) -> SequenceShard:
        """The shard that its `run` neighbours form together."""
        return SequenceShard(self.index // run, self.count // run, borders=self.borders[::run])


WHOLE = SequenceShard()

"""Places in memory that stay, for weights and gradients that come and go: which buckets share one. A bucket always
comes to the same place, so whatever was captured once (CUDA graphs) finds it there.

Knows instruction lists and sizes; what lies at a place is data_parallel's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from phalanx.schedule.actions import Close, Free, Gather, Instruction, Open, ScheduleError

Pairs = set[frozenset[int]]
Come = type[Gather] | type[Open]
Go = type[Free] | type[Close]


@dataclass(frozen=True)
class MemorySlots:
    """Of one rank: the number of each bucket's place, for gathered weights and for open gradients, and the elements
    of each place."""

    weights: Mapping[int, int]
    gradients: Mapping[int, int]
    weight_sizes: tuple[int, ...]
    gradient_sizes: tuple[int, ...]


def make_slots(lists: Iterable[Sequence[Instruction]], numel: Mapping[int, int]) -> MemorySlots:
    """Places that do for all these instruction lists of a rank, given the elements of each of its buckets."""
    weights: Pairs = set()
    gradients: Pairs = set()
    for instructions in lists:
        weights |= together(instructions, Gather, Free)
        gradients |= together(instructions, Open, Close)
    one, two = share(numel, weights), share(numel, gradients)
    return MemorySlots(one, two, sizes(one, numel), sizes(two, numel))


def lives(instructions: Sequence[Instruction], come: Come, go: Go) -> Iterator[frozenset[int]]:
    """The buckets that are here, after each that comes."""
    here: set[int] = set()
    for i in instructions:
        if isinstance(i, come):
            here.add(i.bucket)
            yield frozenset(here)
        elif isinstance(i, go):
            here.discard(i.bucket)


def together(instructions: Sequence[Instruction], come: Come, go: Go) -> Pairs:
    """Pairs of buckets that are here at once; of one that comes the bucket alone."""
    found: Pairs = set()
    for here in lives(instructions, come, go):
        found |= {frozenset(pair) for pair in combinations(here, 2)} | {frozenset((b,)) for b in here}
    return found


def share(numel: Mapping[int, int], pairs: Pairs) -> dict[int, int]:
    """Greedy colouring, the largest first, so that places of one size serve buckets of that size: each takes the
    first place that none of those it meets has."""
    buckets = {b for pair in pairs for b in pair}
    place: dict[int, int] = {}
    for b in sorted(buckets, key=lambda b: (-numel[b], b)):
        taken = {place[other] for pair in pairs if b in pair for other in pair - {b} if other in place}
        place[b] = next(n for n in range(len(buckets)) if n not in taken)
    return place


def sizes(place: Mapping[int, int], numel: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(max(numel[b] for b, n in place.items() if n == number) for number in range(len(set(place.values()))))


def fits(instructions: Sequence[Instruction], places: MemorySlots) -> bool:
    """Whether each bucket has a place whenever it comes, which no other has then."""
    kinds: tuple[tuple[Mapping[int, int], Come, Go], ...] = (
        (places.weights, Gather, Free),
        (places.gradients, Open, Close),
    )
    for place, come, go in kinds:
        for here in lives(instructions, come, go):
            if not here <= place.keys() or len({place[b] for b in here}) < len(here):
                return False
    return True


def prove(lists: Iterable[Sequence[Instruction]], places: Sequence[MemorySlots]) -> None:
    """ScheduleError if two buckets of a rank would meet at one place."""
    for rank, (instructions, of_rank) in enumerate(zip(lists, places)):
        if not fits(instructions, of_rank):
            raise ScheduleError(f"rank {rank}: two buckets are at one place of memory at once, or one has none")

"""Memory slots of sharded buckets: fixed addresses for gathered weights and for gradients, and which buckets share one.

A bucket always uses the same slot, so CUDA graphs find it where they were captured. Buckets that are never there at the
same time may share a slot. This file knows instruction lists and sizes; data_parallel owns the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations

from phalanx.base.dataclass import dataclass
from phalanx.schedule.actions import Close, Free, Gather, Instruction, Open, ScheduleError

Pairs = set[frozenset[int]]
Adds = type[Gather] | type[Open]
Drops = type[Free] | type[Close]


@dataclass(frozen=True)
class MemorySlots:
    """Of one rank: the slot of each bucket for its gathered weights and for its gradients, and the number of elements
    of each slot."""

    weights: Mapping[int, int]
    gradients: Mapping[int, int]
    weight_sizes: tuple[int, ...]
    gradient_sizes: tuple[int, ...]


def make_slots(lists: Iterable[Sequence[Instruction]], numel: Mapping[int, int]) -> MemorySlots:
    """Slots that serve all these instruction lists of a rank. `numel`: the number of elements of each bucket."""
    weights: Pairs = set()
    gradients: Pairs = set()
    for instructions in lists:
        weights |= together(instructions, Gather, Free)
        gradients |= together(instructions, Open, Close)
    one, two = assigned(numel, weights), assigned(numel, gradients)
    return MemorySlots(one, two, sizes(one, numel), sizes(two, numel))


def present(instructions: Sequence[Instruction], adds: Adds, drops: Drops) -> Iterator[frozenset[int]]:
    """The buckets that are in memory, after each one that is added."""
    here: set[int] = set()
    for i in instructions:
        if isinstance(i, adds):
            here.add(i.bucket)
            yield frozenset(here)
        elif isinstance(i, drops):
            here.discard(i.bucket)


def together(instructions: Sequence[Instruction], adds: Adds, drops: Drops) -> Pairs:
    """Pairs of buckets that are in memory at the same time, and each bucket alone."""
    found: Pairs = set()
    for here in present(instructions, adds, drops):
        found |= {frozenset(pair) for pair in combinations(here, 2)} | {frozenset((b,)) for b in here}
    return found


def assigned(numel: Mapping[int, int], pairs: Pairs) -> dict[int, int]:
    """Bucket -> slot, by greedy colouring: each bucket takes the first slot that no bucket has which is in memory at
    the same time. The largest are placed first, so that a slot serves buckets of about its size."""
    buckets = {b for pair in pairs for b in pair}
    place: dict[int, int] = {}
    for b in sorted(buckets, key=lambda b: (-numel[b], b)):
        taken = {place[other] for pair in pairs if b in pair for other in pair - {b} if other in place}
        place[b] = next(n for n in range(len(buckets)) if n not in taken)
    return place


def sizes(place: Mapping[int, int], numel: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(max(numel[b] for b, n in place.items() if n == number) for number in range(len(set(place.values()))))


def fits(instructions: Sequence[Instruction], slots: MemorySlots) -> bool:
    """Whether each bucket has a slot, and no two buckets that are in memory at the same time share one."""
    kinds: tuple[tuple[Mapping[int, int], Adds, Drops], ...] = (
        (slots.weights, Gather, Free),
        (slots.gradients, Open, Close),
    )
    for place, adds, drops in kinds:
        for here in present(instructions, adds, drops):
            if not here <= place.keys() or len({place[b] for b in here}) < len(here):
                return False
    return True


def prove(lists: Iterable[Sequence[Instruction]], slots: Sequence[MemorySlots]) -> None:
    """Raises ScheduleError if two buckets of a rank would use one slot at the same time."""
    for rank, (instructions, of_rank) in enumerate(zip(lists, slots)):
        if not fits(instructions, of_rank):
            raise ScheduleError(f"rank {rank}: two buckets are at one place of memory at once, or one has none")

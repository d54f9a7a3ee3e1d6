"""Whether ranks that must hold the same bits do: compares hashes of weights and state, and names the ranks that
differ."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from phalanx.base.errors import NumericalStop
from phalanx.checkpoint.agree import agree
from phalanx.comm.axis import Axis
from phalanx.data_parallel.flat import FlatBucket
from phalanx.engine.build import State

PART = 1 << 22  # elements that are hashed at once


def hash_bits(x: Tensor) -> Tensor:
    """() int64: a sum over the bits of x, each element times a different odd number, so that any flipped bit changes
    it."""
    bits = (
        x.contiguous()
        .view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
        .flatten()
    )
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, len(bits), PART):
        part = bits[start : start + PART].long()
        total += (part * (2 * torch.arange(start, start + len(part), device=x.device) + 1)).sum()
    return total


def check_replicas(state: State) -> None:
    """Compare what data-parallel ranks hold in common: weights and, with ZeRO-0, masters and the optimizer's state;
    between groups that shard, shards.

    NumericalStop on all ranks names those that differ from most of their peers (of two, both) and the tensors that
    differ. With sharding, each rank's shard of the weights goes to all others after every update: a wrong bit in it is
    then everywhere, and one in another's shard is overwritten. So only corruption since the last update can be seen
    there. With ZeRO-3 and no groups, no two ranks hold the same.
    """
    state.buffers.ready()
    hashes = {what: int(hash_bits(x)) for what, x in _alike(state).items()}
    odd = _odd(
        agree(
            state.mesh.world,
            lambda: [(_peers(state, *key).ranks, " ".join(map(str, key)), f) for key, f in hashes.items()],
        )
    )
    if not odd:
        return
    named = sorted({name for rank in agree(state.mesh.world, lambda: _named(state, odd)) for name in rank})
    ranks = sorted({rank for members in odd.values() for rank in members})
    who = f"rank {ranks[0]} does" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} do"
    raise NumericalStop(
        f"silent corruption: {who} not hold what other replicas hold, in "
        f"{', '.join(named[:5])}{' ...' if len(named) > 5 else ''}; "
        "test that hardware, and start the same command again: it goes on from the newest checkpoint"
    )


def _alike(state: State) -> dict[tuple[int, str], Tensor]:
    """(bucket, what) -> what all ranks of `_peers` must hold in common."""
    found = {(i, "weight"): f.storage.resident[1] for i, f in enumerate(state.buffers.flat)}
    numbers = {f.bucket.id: i for i, f in enumerate(state.buffers.flat)}
    shards = [s for s in state.optimizer.shards if s.home is None]  # only the home has a whole matrix's state
    for shard in (s for s in shards if not state.buffers.flat[numbers[s.bucket.id]].cut.outside):
        found |= {(numbers[shard.bucket.id], what): shard.values(what) for what in shard.kinds}
    return found


def _peers(state: State, bucket: int, what: str) -> Axis:
    """The ranks that hold the same of a bucket: for weights that are kept whole the whole axis, for shards other
    groups."""
    flat = state.buffers.flat[bucket]
    return flat.axis if what == "weight" and not flat.cut.cuts_weights else flat.groups.outer


def _odd(reports: list[list[tuple[list[int], str, int]]]) -> dict[tuple[int, ...], list[int]]:
    """Peers -> those of them that differ from most; reports[rank] holds (peers, what, hash)."""
    groups: dict[tuple[tuple[int, ...], str], dict[int, int]] = {}
    for rank, hashes in enumerate(reports):
        for members, what, number in hashes:
            groups.setdefault((tuple(members), what), {})[rank] = number
    odd: dict[tuple[int, ...], set[int]] = {}
    for (peers, _), numbers in groups.items():
        (most, count), *others = Counter(numbers.values()).most_common()
        if others:
            alone = [r for r in numbers if numbers[r] != most] if count > others[0][1] else list(numbers)
            odd.setdefault(peers, set()).update(alone)
    return {peers: sorted(ranks) for peers, ranks in odd.items()}


def _named(state: State, odd: dict[tuple[int, ...], list[int]]) -> list[str]:
    """On a rank whose peers disagree: the tensors whose weights or state differ. Peers compare slot by slot."""
    found = []
    for (i, what), x in _alike(state).items():
        flat, peers = state.buffers.flat[i], _peers(state, i, what)
        if tuple(peers.ranks) in odd:
            found += [f"{what} of {slot_name}" for slot_name in _slots_that_differ(flat, what, x, peers)]
    return found


def _slots_that_differ(flat: FlatBucket, what: str, x: Tensor, peers: Axis) -> list[str]:
    if what == "weight":
        parts = [flat.storage.resident_of(slot) for slot in flat.bucket.slots]
    else:
        ends = [(max(s.offset - flat.lo, 0), max(s.offset + s.numel - flat.lo, 0)) for s in flat.bucket.slots]
        parts = [x[a:b] for a, b in ends]
    all_ = peers.all_gather(torch.stack([hash_bits(part) for part in parts])).wait().view(peers.size, -1)
    differs = (all_ != all_[0]).any(0).tolist()
    return [slot.spec.name for slot, bad in zip(flat.bucket.slots, differs) if bad]

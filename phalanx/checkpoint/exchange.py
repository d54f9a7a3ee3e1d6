"""Box exchange over the network: ranks that hold boxes of global tensors send them to the ranks that want them.
Checkpoints do the same through files (tensors.fill)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.agree import agree
from phalanx.checkpoint.boxes import Item
from phalanx.checkpoint.tensors import DTYPES, NAMES, natural
from phalanx.comm.axis import Axis
from phalanx.layout.box import Box
from phalanx.layout.transfer import NotCovered, transfers

ROUND_BYTES = 256 << 20  # in flight at the same time, over all ranks


@dataclass(frozen=True)
class Offer:
    """A box of a global tensor that a rank holds or wants: `number` in that rank's list."""

    rank: int
    number: int
    name: str
    shape: tuple[int, ...]
    box: Box
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Message:
    """A box sent from one rank of the axis to another, in the dtype in which it is held. give: its values, on the
    source; into: where they go, on the target."""

    source: int
    target: int
    dtype: torch.dtype
    give: Tensor | None
    into: Tensor | None


def offered(axis: Axis, items: Sequence[Item]) -> list[list[Offer]]:
    """The items of every rank, known to every rank."""
    lists = agree(axis, lambda: [(i.name, i.shape, i.box.start, i.box.stop, NAMES[i.dtype]) for i in items])
    return [
        [
            Offer(rank, n, name, tuple(shape), Box(tuple(a), tuple(b)), DTYPES[dtype])
            for n, (name, shape, a, b, dtype) in enumerate(those)
        ]
        for rank, those in enumerate(lists)
    ]


@torch.no_grad()
def exchange(axis: Axis, held: Sequence[Item], wanted: Sequence[Item], device: torch.device) -> None:
    """Fill every rank's `wanted` from what the ranks hold, where each element of a tensor is held by exactly one of
    them. A model moves from one layout to another without files.

    Values are cast where the dtypes differ. CheckpointError on every rank if anything wanted is not held, or is held in
    another shape. Staging takes at most ROUND_BYTES, or one tensor.
    """
    holders: dict[str, list[Offer]] = {}
    for offer in (o for rank in offered(axis, held) for o in rank):
        holders.setdefault(offer.name, []).append(offer)
    wants = sorted((o for rank in offered(axis, wanted) for o in rank), key=lambda o: natural(o.name))
    for round in _rounds(wants):
        carry(axis, [m for want in round for m in _messages(axis, want, holders, held, wanted)], device)


def _rounds(wants: Iterable[Offer]) -> Iterator[list[Offer]]:
    """Rounds of offers, the same on every rank."""
    round, size = list[Offer](), 0
    for want in wants:
        if round and size + want.nbytes > ROUND_BYTES:
            yield round
            round, size = [], 0
        round.append(want)
        size += want.nbytes
    yield round


def _messages(
    axis: Axis, want: Offer, holders: dict[str, list[Offer]], held: Sequence[Item], wanted: Sequence[Item]
) -> Iterator[Message]:
    offers = holders.get(want.name, [])
    shapes = {offer.shape for offer in offers} - {want.shape}
    if shapes:
        raise CheckpointError(f"ranks hold {want.name} in the shape {shapes.pop()}, and want it in {want.shape}")
    try:
        found = transfers(want.box, [(offer, offer.box) for offer in offers])
    except NotCovered as error:
        raise CheckpointError(f"{want.name}: {error}") from error
    for t in found:
        give = held[t.holder.number].view[t.source] if t.holder.rank == axis.index else None
        into = wanted[want.number].view[t.target] if want.rank == axis.index else None
        yield Message(t.holder.rank, want.rank, t.holder.dtype, give, into)


def carry(axis: Axis, messages: Iterable[Message], device: torch.device) -> None:
    """Send and receive, all together. Every rank passes the same messages in the same order."""
    gives, takes, arriving = list[tuple[Tensor, int]](), list[tuple[Tensor, int]](), list[tuple[Tensor, Tensor]]()
    for m in messages:
        if m.give is not None and m.into is not None:
            m.into.copy_(m.give)
        elif m.give is not None:
            gives.append((as_bytes(m.give.to(m.dtype).contiguous()), m.target))
        elif m.into is not None:
            direct = m.into.is_contiguous() and (m.into.dtype, m.into.device) == (m.dtype, device)
            part = m.into if direct else torch.empty(m.into.shape, dtype=m.dtype, device=device)
            takes.append((as_bytes(part), m.source))
            if not direct:
                arriving.append((m.into, part))
    axis.trade(gives, takes).wait()
    for into, part in arriving:
        into.copy_(part)


def as_bytes(x: Tensor) -> Tensor:
    """A contiguous tensor as bytes, which every backend can send."""
    return x.reshape(-1).view(torch.uint8)

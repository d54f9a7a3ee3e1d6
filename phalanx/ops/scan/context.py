"""Scans and convolutions over sequences that are sharded over context-parallel ranks: what each chunk needs of the
tokens before it.

A rank has two chunks of each sequence (sequence/shard.py). The output of a scan is linear in its first state, so every
chunk runs without one. What each chunk leaves (its last state, and what is left of a state that passes it) is joined
by one all-gather; each rank then follows the states through all chunks and adds what came before its own. A
convolution gets the few tokens before a chunk from the rank that has them, by one all-to-all with its neighbours.
Backward follows automatically, because both exchanges are differentiable.

Shapes: B sequences, n ranks, 2n chunks of a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.comm.axis import Axis
from phalanx.ops.experts.exchange import gather, swap
from phalanx.sequence.batch import Batch, PerBatch


@dataclass(frozen=True)
class Chunk:
    """Tokens of each sequence that follow one another and are on one rank.

    number   among the chunks of a sequence
    rows     where they lie among this rank's tokens of a sequence
    numbers  (B, l) int64: their documents; None: a sequence is one
    """

    number: int
    rows: slice
    numbers: Tensor | None


CHUNKS = PerBatch[tuple[Chunk, ...]]()
LINKS = PerBatch["tuple[Tensor, Tensor]"]()


def chunks_of(batch: Batch) -> tuple[Chunk, ...]:
    """The chunks of each sequence on this rank, in order: one if no ranks share it, otherwise two."""
    return CHUNKS.of(batch, lambda: _chunks(batch))


def _chunks(batch: Batch) -> tuple[Chunk, ...]:
    part, length = batch.part, batch.length
    numbers = None if batch.documents is None else batch.documents.view(batch.num_sequences, length)
    if part.count == 1:
        return (Chunk(0, slice(0, length), numbers),)
    first = len(part.runs(batch.seq_length)[0])
    found = []
    for number, rows in ((part.index, slice(0, first)), (2 * part.count - 1 - part.index, slice(first, length))):
        found.append(Chunk(number, rows, None if numbers is None else numbers[:, rows]))
    return tuple(found)


def _starts(batch: Batch) -> list[int]:
    """The first token of each chunk of a sequence."""
    count = 2 * batch.part.count
    runs = {}
    for part in batch.part.all:
        runs[part.index], runs[count - 1 - part.index] = part.runs(batch.seq_length)
    return [runs[number].start for number in range(count)]


def chunk_links(batch: Batch) -> tuple[Tensor, Tensor]:
    """(2n, B) bool: whether each chunk goes on with the document before it, and whether it is all of one document."""
    return LINKS.of(batch, lambda: _make_links(batch))


def _make_links(batch: Batch) -> tuple[Tensor, Tensor]:
    starts, shape = _starts(batch), (batch.num_sequences, batch.seq_length)
    whole = batch.uncut.documents
    numbers = batch.tokens.new_zeros(shape) if whole is None else whole.view(shape)
    stops = (*starts[1:], batch.seq_length)
    first = torch.stack([numbers[:, start] for start in starts], 1)  # a list as index would be copied from the host
    last = torch.stack([numbers[:, stop - 1] for stop in stops], 1)
    goes_on = torch.cat((torch.zeros_like(first[:, :1], dtype=torch.bool), first[:, 1:] == last[:, :-1]), 1)
    return goes_on.t(), (first == last).t()


def tokens_before(x: Tensor, batch: Batch, reach: int, axis: Axis) -> list[Tensor | None]:
    """x (B, L, C) of this rank's tokens -> for each of its chunks the `reach` tokens before it (B, reach, C), zero
    where they belong to another document than the chunk's first token; None: nothing comes before."""
    chunks, count, rank = chunks_of(batch), batch.part.count, batch.part.index
    if count == 1:
        return [None]
    early, late = (x[:, chunk.rows][:, -reach:].reshape(-1, x.shape[-1]) for chunk in chunks)
    each = len(early)
    send, receive = [0] * count, [0] * count
    going = []
    if rank > 0:  # the last chunk's neighbour is one rank down, the first one's one rank up
        send[rank - 1] = receive[rank - 1] = each
        going.append(late)
    if rank < count - 1:
        send[rank + 1] = receive[rank + 1] = each
        going.append(early)
    arrived = list(swap(torch.cat(going), axis, send, receive).split([n for n in receive if n]))
    before_late = arrived.pop() if rank < count - 1 else early
    before_early = arrived.pop() if rank > 0 else None
    starts = _starts(batch)
    return [
        None if rows is None else _of_document(rows.view(-1, reach, x.shape[-1]), batch, starts[chunk.number])
        for rows, chunk in zip((before_early, before_late), chunks)
    ]


def _of_document(rows: Tensor, batch: Batch, start: int) -> Tensor:
    """Tokens (B, reach, C) before position `start` of each sequence, zero where a document ends between."""
    whole = batch.uncut.documents
    if whole is None:
        return rows
    numbers = whole.view(batch.num_sequences, batch.seq_length)
    same = numbers[:, start - rows.shape[1] : start] == numbers[:, start : start + 1]
    return torch.where(same.unsqueeze(-1), rows, 0)


def states_before(states: list[Tensor], decays: list[Tensor], batch: Batch, axis: Axis) -> list[Tensor]:
    """For each chunk of this rank, the state (B, H, P, N) before it. `states`: those that the chunks leave if they
    begin without one; `decays` (B, H): what is left of a state that passes each, if it is one document."""
    count, shape = batch.part.count, states[0].shape
    packed = torch.stack([torch.cat((s.flatten(2), d.unsqueeze(-1)), -1) for s, d in zip(states, decays)])
    everyone = gather(packed, axis)  # (2n, B, H, P * N + 1), the two chunks of each rank after those of the rank before
    goes_on, whole = chunk_links(batch)
    before = [torch.zeros_like(states[0])]
    for number in range(2 * count - 1):
        at = 2 * number if number < count else 2 * (2 * count - 1 - number) + 1
        left, passed = everyone[at, ..., :-1].view(shape), everyone[at, ..., -1]
        passed = torch.where(whole[number].unsqueeze(-1), passed, 0)
        after = left + passed[..., None, None] * before[-1]
        before.append(torch.where(goes_on[number + 1][:, None, None, None], after, 0))
    return [before[chunk.number] for chunk in chunks_of(batch)]

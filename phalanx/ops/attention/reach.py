"""Reach: which keys each query reads, as one range of them, whatever hides the others.

Documents, windows, chunks, prefixes and groups of tokens that read each other all leave a query an unbroken range of
positions. So where a mask has an element for each pair, this has two numbers for each query.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.ops.attention.kind import AttentionKind, groups_together
from phalanx.sequence.batch import Batch, PerBatch
from phalanx.sequence.shard import WHOLE, SequenceShard

RANGES = PerBatch["Reach"]()  # of whole sequences, in positions
REACHES = PerBatch["Reach"]()  # of a shard's queries, among the keys of another shard


class Reach(NamedTuple):
    """Query i of a sequence reads keys first[i] .. stop[i] - 1; both (sequences, queries) int32."""

    first: Tensor
    stop: Tensor


def reach_of(
    batch: Batch,
    kind: AttentionKind,
    source: SequenceShard = WHOLE,
    queries: slice = slice(None),
    keys: slice = slice(None),
) -> Reach:
    """The reach of some of this shard's queries in some of the keys of shard `source`, in the order in which it holds
    them. The kind has no chunks (kind.by_documents)."""
    hiding = (kind.window, kind.direction, kind.together)
    by = (source, (queries.start, queries.stop), (keys.start, keys.stop), *hiding)
    return REACHES.of(batch, lambda: _make_reach(batch, kind, source, queries, keys), *by)


def _make_reach(batch: Batch, kind: AttentionKind, source: SequenceShard, queries: slice, keys: slice) -> Reach:
    hiding = (kind.window, kind.direction, kind.together)
    whole = RANGES.of(batch.uncut, lambda: _ranges(batch, kind), *hiding)
    chunks, length = source.runs(batch.seq_length), source.size(batch.seq_length)
    low, high, _ = keys.indices(length)
    found = []
    for ends in whole:
        mine = batch.take(ends).view(batch.num_sequences, -1)[:, queries]
        before = sum((mine - chunk.start).clamp(0, len(chunk)) for chunk in chunks)  # keys of the shard before it
        found.append((before.clamp(low, high) - low).int())  # type: ignore[union-attr]
    return Reach(*found)


def _ranges(batch: Batch, kind: AttentionKind) -> Reach:
    """Of the queries of whole sequences, (tokens of the micro-batch,) int64 each, in positions of the sequence."""
    whole = batch.uncut
    number, room = whole.runs
    device, length = number.device, batch.seq_length
    at = torch.arange(length, device=device).repeat(batch.num_sequences)
    # documents have numbers of their own in each sequence, or none goes on from one sequence into the next
    ends = torch.zeros(room, dtype=torch.int64, device=device).scatter_reduce_(0, number, at + 1, "amax")
    starts = torch.full((room,), length, dtype=torch.int64, device=device).scatter_reduce_(0, number, at, "amin")
    first, stop = starts[number], at + 1
    if kind.direction == "both":
        stop = ends[number]
    if kind.direction == "prefix" and whole.prefix is not None:
        read = (at + 1).where(whole.prefix > 0, 0)
        of_document = torch.zeros_like(ends).scatter_reduce_(0, number, read, "amax")
        stop = torch.maximum(stop, of_document[number])
    if kind.together is not None:
        group = groups_together(batch, kind.together)
        here = group.clamp(min=0)
        last = torch.zeros_like(at).scatter_reduce_(0, here, (at + 1).where(group >= 0, 0), "amax")
        stop = torch.maximum(stop, last[here].where(group >= 0, 0))
    if kind.window is not None:
        first = torch.maximum(first, at - kind.window + 1)
        if kind.together is None:
            stop = torch.minimum(stop, at + kind.window)
    return Reach(first, stop)

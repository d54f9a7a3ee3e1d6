"""Attention over sequences that are sharded over context-parallel ranks: how each rank's queries read the keys before
them.

Two exchanges, one inside the other. Neighbouring ranks may exchange heads for tokens, so that each has all of their
tokens for some of the heads (Jacobs et al., "DeepSpeed Ulysses", 2023). Between such groups keys and values travel:
shard by shard, with the next one under way while attention to the last one runs (Liu et al., "Ring attention", 2023),
or all at once (Llama team, "The Llama 3 herd of models", 2024, section 3.3.2). Attention of the queries to each shard
is computed separately. The outputs are then joined by their log-sum-exp, and each kernel's backward is given the joint
one (ops/attention/backends.py).

Shards are assigned in zig-zag order (sequence/shard.py), so that a causal mask gives every rank the same work; both
ways they have the same work in any order. Only the chunks of a shard that somebody reads are sent, and no kernel runs
where nothing is read. Backward sends the keys and
values again instead of storing them, and sends each shard's gradients home.

Shapes: L local tokens of a sequence, S tokens of a whole sequence, K and V the widths of a query and a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.base.dataclass import dataclass
from phalanx.comm.axis import Axis, ModelAxes, Work
from phalanx.ops.attention import attention as whole
from phalanx.ops.attention.attention import ProbabilityDropout, check_prefix
from phalanx.ops.attention.backends import SavedBlock, Scoring, block_backend
from phalanx.ops.attention.kind import (
    CAUSAL,
    EVERYTHING,
    NOTHING,
    AttentionKind,
    Learned,
    by_documents,
    groups_together,
    in_one_group,
    refuse_unsupported,
)
from phalanx.ops.attention.largest_scores import LargestScores
from phalanx.ops.attention.reach import reach_of
from phalanx.ops.attention.relative_bias import Biased
from phalanx.ops.attention.segments import SEGMENTS, Segments
from phalanx.ops.attention.sinks import join_sinks, sinks_grad
from phalanx.ops.dense.grads import add_grad
from phalanx.ops.experts.exchange import gather, swap
from phalanx.ops.op import Case, Kernels, Op, triton
from phalanx.sequence.batch import Batch, PerBatch
from phalanx.sequence.shard import SequenceShard

Form = Literal["ring", "allgather"]


def _at_once(make: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return make(*inputs)


@dataclass(frozen=True)
class AttentionPlan:
    """How a layer's attention is computed, whatever the batch.

    kind     what is read
    axes     over which sequences are cut
    form     how keys and values travel between ranks
    kernels  which implementations are asked for
    keep     runs what lies between the exchanges of heads: keep(make, q, k, v) is to give make(q, k, v)
    largest  takes the largest score of each head; None: nobody asks for it
    """

    kind: AttentionKind = CAUSAL
    axes: ModelAxes = field(default_factory=ModelAxes)
    form: Form = "ring"
    kernels: Kernels = "plain"
    keep: Callable[..., Tensor] = _at_once
    largest: LargestScores | None = None


def attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch, plan: AttentionPlan, learned: Learned = NOTHING) -> Tensor:
    """As ops.attention.attention, of this rank's part of each sequence: q (sequences, heads, L, K), k, v alike ->
    (T, heads * V)."""
    kind, axes = plan.kind, plan.axes
    learned.check(kind)
    check_prefix(batch, kind)
    if batch.balanced is not None or axes.keys.size > 1:
        refuse_unsupported(kind, offers_of(plan.form, True, 0.0, plan.kernels))
    if batch.balanced is not None:
        return _of_pieces(q, k, v, batch, plan, learned)
    q, k, v = to_heads(q, k, v, batch, axes.heads)
    batch_of_heads, learned = batch.among(axes.heads.size), own_heads(learned, axes.heads)
    largest = None if plan.largest is None else plan.largest.of_heads(axes.heads.index * q.shape[1], q.shape[1])
    if axes.keys.size == 1:

        def read_whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if largest is not None:
                largest.take_whole(q, k, batch_of_heads, kind)
            return whole.attention(q, k, v, batch_of_heads, kind, learned, plan.kernels)

        out = plan.keep(read_whole, q, k, v)
    else:
        inside, kind = by_documents(batch_of_heads, kind.within(batch.seq_length))
        scale = 1 / math.sqrt(q.shape[-1]) if kind.scale is None else kind.scale
        reading = ContextAttention(inside, axes.keys, plan.form, replace(kind, scale=scale), plan.kernels, largest)
        given = (learned.sinks, learned.bias, reading)
        out = plan.keep(
            lambda q, k, v: _ReadParts.apply(q, k, v, *given).transpose(1, 2).flatten(2).flatten(0, 1), q, k, v
        )
    return to_tokens(out, batch, axes.heads)


def offers_of(form: Form, keys_are_cut: bool, dropout: float, kernels: Kernels) -> dict[str, frozenset[str]]:
    """By name of what could run a layer's attention, the features that it has, known when the layer is built.
    `keys_are_cut`: ranks of context parallelism read each other's keys."""
    if dropout > 0:
        return {"attention with dropout": EVERYTHING}
    if keys_are_cut:
        return {f"context parallelism by {form}": EVERYTHING}
    return whole.offers(kernels)


def likes_of(q: Tensor, v: Tensor) -> tuple[tuple[tuple[int, int], torch.dtype]]:
    """(T, heads * V) and dtype of the output."""
    return (((q.shape[0] * q.shape[2], q.shape[1] * v.shape[-1]), q.dtype),)


def _of_pieces(q: Tensor, k: Tensor, v: Tensor, batch: Batch, plan: AttentionPlan, learned: Learned) -> Tensor:
    """Of a dealt batch: each document that ranks share over those ranks, then all that is whole here. Who shares two
    documents meets for them in one order: those of more ranks first, then as they lie in the micro-batch."""
    pieces = batch.pieces
    flat = (t.transpose(1, 2).flatten(0, 1).split([piece.num_tokens for piece in pieces]) for t in (q, k, v))
    mixed = []
    for piece, *rows in zip(pieces, *flat):
        q, k, v = (t.unsqueeze(0).transpose(1, 2) for t in rows)
        among = replace(plan, axes=plan.axes.among(piece.part.count))
        mixed.append(attention(q, k, v, piece, among, learned))
    return torch.cat(mixed)


def attention_with_dropout(
    heads: tuple[Tensor, Tensor, Tensor],
    batch: Batch,
    plan: AttentionPlan,
    learned: Learned,
    dropout: ProbabilityDropout,
) -> Tensor:
    """As ops.attention_with_dropout, for this rank's shard of each sequence. The probabilities of a query are computed
    together, over all keys."""
    q, k, v = heads
    axes = plan.axes
    if batch.balanced is not None:
        k, v = gather_keys(k, v, batch, axes.cp)
        return whole.attention_with_dropout((q, k, v), batch, plan.kind, learned, dropout)
    q, k, v = to_heads(q, k, v, batch, axes.heads)
    batch_of_heads, learned = batch.among(axes.heads.size), own_heads(learned, axes.heads)
    dropout = replace(dropout, first_head=dropout.first_head + axes.heads.index * q.shape[1])
    k, v = gather_keys(k, v, batch_of_heads, axes.keys)
    mixed = whole.attention_with_dropout((q, k, v), batch_of_heads, plan.kind, learned, dropout)
    return to_tokens(mixed, batch, axes.heads)


# ---- heads for tokens ----------------------------------------------------------------------------


def to_heads(q: Tensor, k: Tensor, v: Tensor, batch: Batch, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """(sequences, heads, L, ...) of this shard -> (sequences, heads / n, L of its n neighbours together, ...), by one
    all-to-all."""
    n = axis.size
    if n == 1:
        return q, k, v
    each = [t.unflatten(1, (n, -1)).permute(1, 0, 3, 2, 4).flatten(1, 2) for t in (q, k, v)]  # (n, T, heads / n, ...)
    packed = torch.cat([t.flatten(2) for t in each], -1)
    parts, tokens = _neighbours(batch, n)
    arrived = swap(packed.flatten(0, 1), axis, [batch.num_tokens] * n, tokens)
    joined = batch.join(arrived.split(tokens), parts).unflatten(0, (batch.num_sequences, -1))
    taken = joined.split([t[0, 0].numel() for t in each], -1)
    mine = [t.unflatten(-1, like.shape[2:]).transpose(1, 2) for t, like in zip(taken, each)]
    return mine[0], mine[1], mine[2]


def to_tokens(out: Tensor, batch: Batch, axis: Axis) -> Tensor:
    """The inverse exchange: (T of the neighbours together, heads / n * V) -> (T, heads * V)."""
    n = axis.size
    if n == 1:
        return out
    parts, tokens = _neighbours(batch, n)
    back = swap(torch.cat(batch.split(out, parts)), axis, tokens, [batch.num_tokens] * n)
    return back.unflatten(0, (n, -1)).transpose(0, 1).flatten(1)


def _neighbours(batch: Batch, n: int) -> tuple[tuple[SequenceShard, ...], list[int]]:
    """The neighbours' shards, and how many tokens each has."""
    parts = batch.part.neighbours(n)
    return parts, [batch.num_sequences * part.size(batch.seq_length) for part in parts]


def own_heads(learned: Learned, axis: Axis) -> Learned:
    """This rank's slice of parameters with something for each head (the last dim), in at least fp32."""
    if axis.size == 1:
        return learned
    return Learned(*(None if x is None else _OwnHeads.apply(x, axis) for x in (learned.sinks, learned.bias)))


class _OwnHeads(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:  # type: ignore[override]
        ctx.x, ctx.axis = x, axis
        mine = x.chunk(axis.size, -1)[axis.index]
        return mine.clone() if x.dtype == torch.float64 else mine.float()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:  # type: ignore[override]
        dx = dy.new_zeros(ctx.x.shape)
        dx.chunk(ctx.axis.size, -1)[ctx.axis.index].copy_(dy)
        return add_grad(ctx.x, dx), None


# ---- what the queries of one shard read of another's keys ------------------------------------------


@dataclass(frozen=True)
class QueryKeyBlock:
    """Queries `queries` of one shard read keys `keys` of another (slices of their L): all of them, those up to their
    own position, or by a mask."""

    queries: slice
    keys: slice
    how: Literal["all", "causal", "mask"]


def block_of(
    mine: SequenceShard, theirs: SequenceShard, length: int, kind: AttentionKind, documents: bool
) -> QueryKeyBlock | None:
    """What the shard `mine` reads of `theirs` in sequences of `length` tokens, in whole chunks; None: nothing."""
    q, k = mine.runs(length), theirs.runs(length)
    reach = length if kind.window is None else kind.window
    seen = [(i, j) for i in (0, 1) for j in (0, 1) if q[i] and k[j] and _reads(q[i], k[j], reach, kind)]
    if not seen:
        return None
    (i0, i1), (j0, j1) = ((min(side), max(side)) for side in zip(*seen))
    before, after = q[i1].stop - 1 - k[j0].start, k[j1].stop - 1 - q[i0].start  # the furthest keys
    every = before < reach and after < (reach if kind.direction == "both" else 1)
    causal = mine == theirs and kind.window is None and not kind.reads_later
    if documents or not (every or causal):
        how: Literal["all", "causal", "mask"] = "mask"
    else:
        how = "all" if every else "causal"
    return QueryKeyBlock(_rows(q, i0, i1), _rows(k, j0, j1), how)


def _reads(q: range, k: range, reach: int, kind: AttentionKind) -> bool:
    """Whether some of these queries may read some of these keys."""
    near = q.start - k.stop + 1 < reach and (kind.together is not None or k.start - q.stop + 1 < reach)
    return near and (kind.reads_later or k.start < q.stop)


def _rows(chunks: tuple[range, range], first: int, last: int) -> slice:
    """Where a shard holds its chunks first .. last."""
    ends = (0, len(chunks[0]), len(chunks[0]) + len(chunks[1]))
    return slice(ends[first], ends[last + 1])


MASKS_BY_SOURCE = PerBatch[tuple[Tensor, Tensor]]()
SEGMENTS_BY_SOURCE = PerBatch[tuple[Tensor, Tensor, Tensor]]()


def mask_of(
    batch: Batch, source: SequenceShard, block: QueryKeyBlock, kind: AttentionKind, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The additive mask (sequences or 1, 1, queries, keys) of a block, and which of its queries (sequences or 1, 1,
    queries) read nothing."""
    by = (source, kind.window, kind.direction, kind.together, dtype)
    return MASKS_BY_SOURCE.of(batch, lambda: _make_mask(batch, source, block, kind, dtype), *by)


def _make_mask(
    batch: Batch, source: SequenceShard, block: QueryKeyBlock, kind: AttentionKind, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    places = torch.arange(batch.seq_length, device=batch.tokens.device)
    q, k = (
        torch.cat([places[run.start : run.stop] for run in part.runs(batch.seq_length)])
        for part in (batch.part, source)
    )
    distance = q[block.queries].unsqueeze(-1) - k[block.keys]
    seen = (torch.ones_like(distance, dtype=torch.bool) if kind.direction == "both" else distance >= 0)[None, None]
    if kind.direction == "prefix":
        prefix = batch.take(batch.uncut.prefix, source).view(batch.num_sequences, 1, 1, -1)  # type: ignore[arg-type]
        seen = seen | (prefix[..., block.keys] > 0)
    if kind.together is not None:
        groups = groups_together(batch, kind.together)
        mine, theirs = (batch.take(groups, part).view(batch.num_sequences, 1, -1) for part in (batch.part, source))
        seen = seen | in_one_group(mine[..., block.queries].unsqueeze(-1), theirs[..., block.keys].unsqueeze(-2))
    if kind.window is not None:
        seen = seen & ((distance.abs() if kind.together is None else distance) < kind.window)
    if batch.documents is not None:
        theirs = batch.take(batch.uncut.documents, source)  # type: ignore[arg-type]
        mine, theirs = (doc.view(batch.num_sequences, 1, -1) for doc in (batch.documents, theirs))
        seen = seen & (mine[..., block.queries].unsqueeze(-1) == theirs[..., block.keys].unsqueeze(-2))
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf), ~seen.any(-1)


def segments_of(batch: Batch, source: SequenceShard, block: QueryKeyBlock) -> tuple[Segments, Tensor]:
    """The documents of a block as segments, and which of its queries (sequences, 1, queries) read nothing in it.

    A shard keeps the order of the sequence, so its tokens of one document are contiguous. From another shard, a causal
    block holds only keys that come before all of its queries (zig-zag); so only in the rank's own block can keys inside
    a document be hidden.
    """
    of_queries, of_keys, blind = SEGMENTS_BY_SOURCE.of(batch, lambda: _find_segments(batch, source, block), source)
    most = (min(run.stop - run.start, batch.longest) for run in (block.queries, block.keys))
    return Segments(of_queries, of_keys, *most), blind


def _find_segments(batch: Batch, source: SequenceShard, block: QueryKeyBlock) -> tuple[Tensor, Tensor, Tensor]:
    theirs = batch.take(batch.uncut.documents, source)  # type: ignore[arg-type]
    sides = ((batch.documents, block.queries), (theirs, block.keys))
    queries, keys = (doc.view(batch.num_sequences, -1)[:, run].flatten() for doc, run in sides)  # type: ignore[union-attr]
    counts = [_counts(side, batch.room_for_documents) for side in (queries, keys)]
    ends = [F.pad(each.cumsum(0), (1, 0)).int() for each in counts]
    return ends[0], ends[1], (counts[1][queries] == 0).view(batch.num_sequences, 1, -1)


def _counts(documents: Tensor, room: int) -> Tensor:
    """Tokens of each document. Not torch.bincount, which waits for the device."""
    return torch.zeros(room, dtype=torch.int64, device=documents.device).scatter_add_(
        0, documents, torch.ones_like(documents)
    )


# ---- how keys and values travel ------------------------------------------------------------------


@dataclass(frozen=True)
class ContextAttention:
    """One attention over the shards of a batch: the axis over which they are spread (this rank's is batch.part), how
    they travel and what is read (with a scale, without chunks). largest: takes the largest scores of these heads."""

    batch: Batch
    axis: Axis
    form: Form
    kind: AttentionKind
    kernels: Kernels
    largest: LargestScores | None = None

    def block(self, reader: int, source: int) -> QueryKeyBlock | None:
        parts = self.batch.part.all
        return block_of(
            parts[reader], parts[source], self.batch.seq_length, self.kind, self.batch.documents is not None
        )

    def take_largest(self, source: int, block: QueryKeyBlock, q: Tensor, k: Tensor) -> None:
        """The largest scores of the queries and keys of a block."""
        if self.largest is not None:
            theirs = self.batch.part.all[source]
            reach = reach_of(self.batch, self.kind, theirs, block.queries, block.keys)
            self.largest.take(q, k, reach, self.kind.scale or 0.0)

    def biased(self, source: int, block: QueryKeyBlock) -> Biased | None:
        """How the bias of a block's scores is read in its table; None: there is none."""
        if self.kind.bias is None:
            return None
        length = self.batch.seq_length
        queries = _chosen(self.batch.part.runs(length), block.queries)
        keys = _chosen(self.batch.part.all[source].runs(length), block.keys)
        return Biased.of(self.batch, self.kind.bias, queries, keys)


def _chosen(chunks: tuple[range, range], rows: slice) -> tuple[range, ...]:
    """Those of a shard's chunks that lie in these rows of it."""
    first, second = (0, len(chunks[0])), (len(chunks[0]), len(chunks[0]) + len(chunks[1]))
    return tuple(c for c, (a, b) in zip(chunks, (first, second)) if rows.start <= a and b <= rows.stop and c)


class Ring:
    """Shards travel one at a time: in step s to the rank s places ahead, from the rank s places behind. Gradients go
    home in the opposite direction."""

    def __init__(self, kv: Tensor, reading: ContextAttention):
        self.kv, self.reading, self.axis = kv, reading, reading.axis
        self.returning: list[tuple[Work, slice | None]] = []

    def arrivals(self) -> Iterator[tuple[int, Tensor]]:
        """Yields (number of a shard, the keys and values in it that this rank reads), this rank's own shard first."""
        coming = self._post(1)
        yield self.axis.index, self.kv
        for step in range(1, self.axis.size):
            arrived, coming = coming.wait(), self._post(step + 1)
            yield (self.axis.index - step) % self.axis.size, arrived

    def _post(self, step: int) -> Work:
        if step == self.axis.size:
            return Work(self.kv)
        here, n = self.axis.index, self.axis.size
        to, source = (here + step) % n, (here - step) % n
        wanted, reads = self.reading.block(to, here), self.reading.block(here, source)
        out = None if reads is None else self.kv.new_empty(reads.keys.stop - reads.keys.start, *self.kv.shape[1:])
        return self.axis.hop(None if wanted is None else self.kv[wanted.keys], to, out, source)

    def give_back(self, source: int, grad: Tensor | None) -> None:
        """Send home the gradient of what this rank has read in shard `source`. Meanwhile a gradient of its own shard
        arrives from a rank that has read it."""
        here, n = self.axis.index, self.axis.size
        reader = (2 * here - source) % n
        read = self.reading.block(reader, here)
        out = None if read is None else self.kv.new_empty(read.keys.stop - read.keys.start, *self.kv.shape[1:])
        work = self.axis.hop(grad, source, out, reader)
        self.returning.append((work, None if read is None else read.keys))

    def collected(self, own: Tensor) -> Tensor:
        """`own` (L, ...), the gradient of this rank's shard from its own queries, plus those from all other ranks."""
        for work, keys in self.returning:
            grad = work.wait()
            if keys is not None:
                own[keys] += grad
        return own


class KeyValueGather:
    """All shards are gathered before the first is read; the sums of their gradients are scattered at the end."""

    def __init__(self, kv: Tensor, reading: ContextAttention):
        self.kv, self.reading, self.axis = kv, reading, reading.axis
        batch = reading.batch
        self.most = batch.part.most(batch.seq_length)
        self.grads: Tensor | None = None

    def arrivals(self) -> Iterator[tuple[int, Tensor]]:
        filled = (
            torch.cat((self.kv, self.kv.new_zeros(self.most - len(self.kv), *self.kv.shape[1:])))
            if len(self.kv) < self.most
            else self.kv
        )
        gathering = self.axis.all_gather(filled, async_op=True)
        yield self.axis.index, self.kv
        parts = gathering.wait().unflatten(0, (self.axis.size, self.most))
        for source in (i for i in range(self.axis.size) if i != self.axis.index):
            block = self.reading.block(self.axis.index, source)
            yield source, self.kv[:0] if block is None else parts[source][block.keys]

    def give_back(self, source: int, grad: Tensor | None) -> None:
        if self.grads is None:
            self.grads = self.kv.new_zeros(self.axis.size, self.most, *self.kv.shape[1:])
        block = self.reading.block(self.axis.index, source)
        if block is not None and grad is not None:
            self.grads[source, block.keys] = grad

    def collected(self, own: Tensor) -> Tensor:
        if self.grads is None:
            return own
        return own + self.axis.reduce_scatter(self.grads.flatten(0, 1)).wait()[: len(own)]


TRAVEL: dict[Form, type[Ring] | type[KeyValueGather]] = {"ring": Ring, "allgather": KeyValueGather}


class _ReadParts(Function):
    """q (sequences, heads, L, K), k and v (sequences, kv_heads, L, ...) of this shard, sinks, table of the bias ->
    (sequences, heads, L, V)."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:  # type: ignore[override]
        q, k, v, sinks, table, reading = given
        kv, joint = packed(k, v), Joint(JOIN.choose(reading.kernels, q))
        ctx.kept = {}
        for source, arrived in TRAVEL[reading.form](kv, reading).arrivals():
            block = reading.block(reading.axis.index, source)
            if block is not None:
                queries = q[:, :, block.queries]
                backend, how, blind = how_to_read(reading, source, block, queries, v, table)
                read = unpacked(arrived, k)
                out, lse, *ctx.kept[source] = backend.forward(queries, *read, how)
                reading.take_largest(source, block, queries, read[0])
                joint.add(block.queries, out, lse, blind)
        out, lse = joint.out, joint.lse
        if sinks is not None:
            out, lse = join_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.sinks, ctx.table, ctx.reading = sinks, table, reading
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (q, k, v, out, lse), reading = ctx.saved_tensors, ctx.reading
        travel = TRAVEL[reading.form](packed(k, v), reading)
        dq, own, dtable = torch.zeros_like(q, dtype=lse.dtype), torch.empty(0), None
        for source, arrived in travel.arrivals():
            block = reading.block(reading.axis.index, source)
            grad = None
            if block is not None:
                douts, queries, outs, lses = (t[:, :, block.queries] for t in (dout, q, out, lse))
                backend, how, _ = how_to_read(reading, source, block, queries, v, ctx.table)
                read = (queries, *unpacked(arrived, k), outs, lses.contiguous())
                found = backend.backward(douts, SavedBlock(*read, tuple(ctx.kept[source])), how)
                dq[:, :, block.queries] += found.q
                grad = packed(found.k, found.v)
                biased = reading.biased(source, block)
                if biased is not None:
                    more = biased.table_grad(found.bias)
                    dtable = more if dtable is None else dtable + more
            if source == reading.axis.index:
                own = grad.to(lse.dtype)  # type: ignore[union-attr]
            else:
                travel.give_back(source, grad)
        dk, dv = unpacked(travel.collected(own).to(q.dtype), k)
        ds = None if ctx.sinks is None or not ctx.needs_input_grad[3] else sinks_grad(ctx.sinks, dout, out, lse)
        dt = None if dtable is None or not ctx.needs_input_grad[4] else add_grad(ctx.table, dtable)
        return dq.to(q.dtype), dk, dv, ds, dt, None


def how_to_read(
    reading: ContextAttention, source: int, block: QueryKeyBlock, q: Tensor, v: Tensor, table: Tensor | None
) -> tuple[Any, Scoring, Tensor | None]:
    """The backend of a block, its scoring, and which of its queries read nothing (or None)."""
    kernels, kind, theirs = reading.kernels, reading.kind, reading.batch.part.all[source]
    biased = reading.biased(source, block)
    bias = None if biased is None or table is None else biased.scores(table, q.dtype)
    how = Scoring(None, block.how == "causal", kind.scale or 0.0, kind.soft_cap, bias)
    if block.how != "mask":
        return block_backend(q, v, how, kernels, not reading.batch.piece), how, None
    if kind.window is None and kind.direction != "prefix" and kind.together is None:  # documents alone hide anything
        sizes = (q.shape[-1], v.shape[-1], q.shape[1] != v.shape[1])
        by_segments = SEGMENTS.fast(kernels, q, *sizes, asked=how.features)
        if by_segments is not None:
            own = source == reading.axis.index
            segments, blind = segments_of(reading.batch, theirs, block)
            return (
                by_segments(segments),
                how._replace(causal=own and kind.direction == "causal"),
                None if own else blind,
            )
    mask, blind = mask_of(reading.batch, theirs, block, kind, q.dtype)
    how = how._replace(mask=mask)
    return block_backend(q, v, how, kernels), how, blind


def packed(k: Tensor, v: Tensor) -> Tensor:
    """(sequences, kv_heads, L, K) and (..., V) -> (L, sequences, kv_heads, K + V), so that consecutive tokens are
    contiguous in memory."""
    return torch.cat((k, v), -1).permute(2, 0, 1, 3).contiguous()


def unpacked(kv: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """k and v from what `packed` returned; `like`: a tensor shaped like k."""
    k, v = kv.permute(1, 2, 0, 3).split((like.shape[-1], kv.shape[-1] - like.shape[-1]), -1)
    return k, v


class Joint:
    """The running result of attention to several sets of keys: out (sequences, heads, L, V) and its log-sum-exp, in the
    dtype of the latter."""

    def __init__(self, by: Any) -> None:
        """by: an implementation of JOIN."""
        self.out = self.lse = torch.empty(0)
        self.join_ = by.join_

    def add(self, queries: slice, out: Tensor, lse: Tensor, blind: Tensor | None) -> None:
        """Add attention of `queries` to more keys. The first call must cover all queries, and each of them must read
        something (itself). `blind`: queries that read nothing."""
        if blind is not None:
            out, lse = out.masked_fill(blind.unsqueeze(-1), 0), lse.masked_fill(blind, -torch.inf)
        if not self.out.numel():
            self.out, self.lse = out.to(lse.dtype), lse.contiguous()
            return
        self.join_(self.out, self.lse, out, lse, queries.start or 0)


def join_(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor, first: int) -> None:
    """Join `more` (sequences, heads, count, V), attention outputs of tokens from `first` on, into out (sequences,
    heads, L, V) and its log-sum-exp, in place."""
    rows = slice(first, first + more.shape[2])
    mine, before = out[:, :, rows], lse[:, :, rows]
    joint = torch.logaddexp(before, more_lse)
    mine.mul_((before - joint).exp().unsqueeze(-1)).add_(more * (more_lse - joint).exp().unsqueeze(-1))
    before.copy_(joint)


def _join_case(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor, kernels: Kernels) -> Tensor:
    out, lse = (t.detach().to(torch.promote_types(t.dtype, torch.float32)).clone() for t in (out, lse))
    JOIN.choose(kernels, out).join_(out, lse, more.detach(), more_lse.detach().to(lse.dtype), 4)
    return torch.cat((out, lse.unsqueeze(-1)), -1)


JOIN = Op(
    "join",
    "outputs of attention to several sets of keys, joined",
    __name__,
    ("join_",),
    (triton("phalanx.ops.attention.join_kernel"),),
    switches=("attention",),
    cases=(Case("join", _join_case, ((2, 3, 21, 20), (2, 3, 21), (2, 3, 17, 20), (2, 3, 17))),),
)


def gather_keys(k: Tensor, v: Tensor, batch: Batch, axis: Axis) -> tuple[Tensor, Tensor]:
    """k and v (sequences, kv_heads, L, ...) of all shards -> (sequences, kv_heads, S, ...), by one collective."""
    if axis.size == 1:
        return k, v
    mine = torch.cat((k, v), -1).transpose(1, 2).flatten(0, 1)
    everyones = batch.join(gather(batch.pad(mine), axis).chunk(axis.size), batch.part.all)
    k, v = everyones.unflatten(0, (batch.num_sequences, -1)).transpose(1, 2).split((k.shape[-1], v.shape[-1]), -1)
    return k, v

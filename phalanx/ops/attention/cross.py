"""Cross-attention: the queries of one stream of tokens read the keys of another, the memory (Vaswani et al., "Attention
is all you need", 2017, section 3.2.3).

Both streams are batches of the same sequences, with tokens, lengths and positions of their own. A query reads all
memory of its own sequence, or, inside documents, of the document with the same number; if there is none, it gets
zeros. Over ranks of context parallelism both streams are cut. The memory's keys and values are gathered, since every
query reads all of its memory, and each rank computes its own queries with all of its heads.

Shapes: L local queries of a sequence, M tokens of a whole sequence of the memory.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.base.rng import keep_mask
from phalanx.ops.attention.attention import ProbabilityDropout
from phalanx.ops.attention.backends import SavedBlock, Scoring, repeated
from phalanx.ops.attention.context import AttentionPlan, gather_keys
from phalanx.ops.attention.kind import NOTHING, AttentionKind, refuse_unsupported
from phalanx.ops.attention.one_block import attend_block
from phalanx.ops.attention.segments import SEGMENTS, Segments
from phalanx.sequence.batch import Batch, PerBatch

FEATURES = frozenset(("direction", "soft_cap", "scale"))
"""Of a kind, those that cross-attention has. Its direction is always both: a memory has no order beside the
queries'."""

MASKS = PerBatch[tuple[Tensor, Tensor]]()
SEGMENTS_OF_MEMORY = PerBatch[tuple[Tensor, Tensor, Tensor]]()


def cross_attention(
    heads: tuple[Tensor, Tensor, Tensor],
    batch: Batch,
    memory: Batch,
    plan: AttentionPlan,
    dropout: ProbabilityDropout | None = None,
) -> Tensor:
    """heads: q (sequences, heads, L, K) of this rank's tokens; k (sequences, kv_heads, ., K) and v (sequences,
    kv_heads, ., V) of this rank's tokens of the memory -> (T, heads * V).

    Query head h reads kv head h // (heads / kv_heads). ValueError if the streams are not of the same sequences.
    """
    refuse_unsupported(plan.kind, {"cross-attention": FEATURES})
    check_streams(batch, memory)
    q, k, v = heads
    k, v = gather_keys(k, v, memory, plan.axes.cp)
    if batch.balanced is not None:  # a shard's queries may belong to any sequence
        q, k, v = (t.transpose(1, 2).flatten(0, 1).unsqueeze(0).transpose(1, 2) for t in (q, k, v))
    if dropout is not None:
        out = _dropped(q, k, v, (batch, memory), plan.kind, dropout)
    else:
        out = plan.keep(lambda q, k, v: _attend(q, k, v, (batch, memory), plan), q, k, v)
    return out.transpose(1, 2).reshape(batch.num_tokens, -1)


def check_streams(batch: Batch, memory: Batch) -> None:
    """ValueError if they are not of the same sequences, or only one of them is divided into documents."""
    if batch.num_sequences != memory.num_sequences:
        raise ValueError(f"{batch.num_sequences} sequences cannot read the memory of {memory.num_sequences}")
    if (batch.documents is None) != (memory.documents is None):
        which = "the queries" if memory.documents is None else "the memory"
        raise ValueError(f"of two streams only {which} have documents: both must have them, or neither")


def _attend(q: Tensor, k: Tensor, v: Tensor, streams: tuple[Batch, Batch], plan: AttentionPlan) -> Tensor:
    batch, memory = streams
    kind = plan.kind
    scale = 1 / math.sqrt(q.shape[-1]) if kind.scale is None else kind.scale
    how = Scoring(None, False, scale, kind.soft_cap)
    if batch.documents is None and batch.balanced is None:
        return _read(q, k, v, how)
    if batch.balanced is None:
        sizes = (q.shape[-1], v.shape[-1], q.shape[1] != v.shape[1])
        by = SEGMENTS.fast(plan.kernels, q, *sizes, asked=how.features)
        if by is not None:
            ends = SEGMENTS_OF_MEMORY.of(batch, lambda: _segments(batch, memory), memory.tokens)
            segments = Segments(ends[0], ends[1], min(batch.length, batch.longest), memory.longest)
            made: Tensor = _InSegments.apply(q, k, v, by(segments), how, ends[2])
            return made
    mask, blind = _mask(batch, memory, q.dtype)
    return _read(q, k, v, how._replace(mask=mask)).masked_fill(blind.unsqueeze(-1), 0)


def _read(q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> Tensor:
    if how.soft_cap is not None:
        return attend_block(q, k, v, NOTHING, how, None)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=how.mask, scale=how.scale, enable_gqa=grouped)


class _InSegments(Function):
    """By kernels that have no masks. `blind` (sequences, 1, L): queries that read nothing."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, by: Any, how: Scoring, blind: Tensor) -> Tensor:  # type: ignore[override]
        out, lse, *kept = by.forward(q, k, v, how)
        out, lse = out.masked_fill(blind.unsqueeze(-1), 0), lse.masked_fill(blind, 0)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.by, ctx.how, ctx.blind, ctx.kept = by, how, blind, tuple(kept)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dout = dout.masked_fill(ctx.blind.unsqueeze(-1), 0)
        q, k, v, out, lse = ctx.saved_tensors
        found = ctx.by.backward(dout, SavedBlock(q, k, v, out, lse, ctx.kept), ctx.how)
        return found.q, found.k, found.v, None, None, None


def _dropped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    streams: tuple[Batch, Batch],
    kind: AttentionKind,
    dropout: ProbabilityDropout,
) -> Tensor:
    """By the formula; the probability of a key is dropped by its place in the memory's sequence."""
    batch, memory = streams
    scores = (q @ repeated(k, q.shape[1]).mT).to(torch.promote_types(q.dtype, torch.float32))
    scores = scores / math.sqrt(q.shape[-1]) if kind.scale is None else scores * kind.scale
    if kind.soft_cap is not None:
        scores = kind.soft_cap * torch.tanh(scores / kind.soft_cap)
    mask, blind = _mask(batch, memory, scores.dtype)
    probs = torch.softmax(scores + mask, -1)
    rows = tuple(t.view(len(q), -1) for t in (batch.samples, batch.places))
    numbers = range(dropout.first_head, dropout.first_head + q.shape[1])
    key = (dropout.p, dropout.seed, dropout.layer, dropout.site)
    keep = torch.stack([keep_mask(*key, rows, memory.seq_length, head) for head in numbers], 1)  # type: ignore[arg-type]
    keep = keep.repeat(1, 1, 1, k.shape[2] // memory.seq_length)
    out = (probs * keep / (1.0 - dropout.p)).to(v.dtype) @ repeated(v, q.shape[1])
    return out.masked_fill(blind.unsqueeze(-1), 0)


def _mask(batch: Batch, memory: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The additive mask (sequences or 1, 1, queries, keys), and which queries (sequences or 1, 1, queries) read
    nothing; these are shown everything, so that no softmax is of nothing."""
    return MASKS.of(batch, lambda: _make_mask(batch, memory, dtype), memory.tokens, dtype)


def _make_mask(batch: Batch, memory: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows = 1 if batch.balanced is not None else batch.num_sequences
    mine, theirs = (number.view(rows, 1, -1) for number in (batch.runs[0], memory.uncut.runs[0]))
    seen = mine.unsqueeze(-1) == theirs.unsqueeze(-2)
    blind = ~seen.any(-1)
    hidden = ~(seen | blind.unsqueeze(-1))
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(hidden, -torch.inf), blind


def _segments(batch: Batch, memory: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Documents of both streams as runs of flat queries and keys, and which queries (sequences, 1, L) read nothing.
    Numbers ascend in both, and each stream has those that it has in one run."""
    room = max(batch.room_for_documents, memory.room_for_documents)
    queries, keys = batch.runs[0], memory.uncut.runs[0]
    counts = [torch.zeros(room, dtype=torch.int64, device=x.device) for x in (queries, keys)]
    for count, number in zip(counts, (queries, keys)):
        count.scatter_add_(0, number, torch.ones_like(number))
    of_queries, of_keys = (F.pad(count.cumsum(0), (1, 0)).int() for count in counts)
    return of_queries, of_keys, (counts[1][queries] == 0).view(batch.num_sequences, 1, -1)

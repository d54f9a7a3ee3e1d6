"""Attention over pages where sequences begin: what they read is in the batch, so fused kernels read it there. Only
sequences that have tokens before them read pages."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.ops.attention.backends import Scoring
from phalanx.ops.attention.kind import AttentionKind, Learned
from phalanx.ops.attention.paged import Pages, paged_attention
from phalanx.ops.attention.segments import SEGMENTS, Segments
from phalanx.ops.op import Kernels
from phalanx.sequence.paged import PagedSpans

FEATURES = frozenset(("scale",))
"""Of a kind of attention, those that prompts may have to be read from the batch."""


def attend_sequences(
    heads: tuple[Tensor, Tensor, Tensor | None],
    pages: Pages,
    spans: PagedSpans,
    kind: AttentionKind,
    learned: Learned,
    kernels: Kernels,
) -> Tensor:
    """paged_attention of q (T, heads, K), where k (T, kv_heads, K) and v (T, kv_heads, V) or None are the keys and
    values of the same tokens, already in their pages."""
    q, k, v = heads
    prompts = spans.prompts
    if spans.together is None and kind.together is not None:
        kind = replace(kind, together=None)
    within = kind if prompts is None else kind.within(prompts.longest)
    stored = v is not None and pages.keys.dtype == k.dtype  # a prompt found in pages of FP8 would read other numbers
    if prompts is None or v is None or not stored or within.features - FEATURES or spans.batch_invariant:
        return paged_attention(q, pages, spans, kind, learned, kernels)
    backend = SEGMENTS.fast(kernels, q, q.shape[-1], v.shape[-1], q.shape[1] != k.shape[1])
    if backend is None:
        return paged_attention(q, pages, spans, kind, learned, kernels)
    here = slice(prompts.begin, prompts.end)
    segments = Segments(prompts.offsets, prompts.offsets, prompts.longest, prompts.longest)
    how = Scoring(None, True, 1 / math.sqrt(q.shape[-1]) if kind.scale is None else kind.scale)
    batched = (x[here].transpose(0, 1)[None] for x in (q, k, v))
    read: Tensor = backend(segments).forward(*batched, how)[0][0].transpose(0, 1)
    parts = [read]
    if prompts.others is not None:
        parts.insert(0, paged_attention(q[: prompts.begin], pages, prompts.others, kind, learned, kernels))
    if prompts.end < len(q):
        parts.append(read.new_zeros(len(q) - prompts.end, *read.shape[1:]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)

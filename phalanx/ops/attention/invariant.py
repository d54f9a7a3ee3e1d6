"""Batch-invariant attention of training: whole sequences and documents are laid out in pages and read by paged
attention, so that a token adds up its keys in the order in which generation does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.ops.attention.attention import ByTorch
from phalanx.ops.attention.kind import PAGED, AttentionKind, Learned
from phalanx.ops.attention.paged import Pages, paged_attention, store_pages
from phalanx.sequence.batch import Batch, PerBatch
from phalanx.sequence.paged import NO_PAGE, PagedSpans

PAGE = 64
LAYOUT = PerBatch[tuple[Tensor, ...]]()


class FromPages:
    """An implementation of ops.attention.attention.ATTENTION. In backward, torch's attention runs again and its
    gradients are taken."""

    features = PAGED - {"bias", "together"}

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, batch: Batch, kind: AttentionKind, learned: Learned) -> Tensor:
        out: Tensor = _FromPages.apply(q, k, v, learned.sinks, batch, kind)
        return out


class _FromPages(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, batch: Batch, kind: AttentionKind
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.sinks, ctx.batch, ctx.kind = sinks, batch, kind
        starts, lengths, table, slots = LAYOUT.of(batch, lambda: _laid_out(batch))
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        shape = (1 + len(k) // PAGE + len(lengths), PAGE, k.shape[1])
        pages = Pages(k.new_zeros(*shape, k.shape[2]), v.new_zeros(*shape, v.shape[2]), v.shape[2])
        store_pages(k, v, pages, slots, "invariant")
        longest = batch.seq_length
        spans = PagedSpans(starts, lengths, table, PAGE, longest, longest, batch_invariant=True)
        return paged_attention(q, pages, spans, kind, Learned(sinks), "invariant").flatten(1)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            out = ByTorch.attend(q, k, v, ctx.batch, ctx.kind, Learned(ctx.sinks))
        inputs = (q, k, v) if ctx.sinks is None else (q, k, v, ctx.sinks)
        dq, dk, dv, *dsinks = torch.autograd.grad(out, inputs, dout, allow_unused=True)
        return dq, dk, dv, dsinks[0] if dsinks else None, None, None


def _laid_out(batch: Batch) -> tuple[Tensor, ...]:
    """starts, lengths, table and slots (sequence.paged) of the documents of a batch, or else of its sequences. Each
    begins with a page. Nothing waits for the device: there is room for as many as there may be."""
    number, most = batch.runs
    token = torch.arange(len(number), device=number.device)
    lengths = torch.zeros(most, dtype=torch.int64, device=number.device).index_add_(0, number, torch.ones_like(token))
    ends = lengths.cumsum(0)
    needed = (lengths + PAGE - 1) // PAGE
    first = NO_PAGE + 1 + needed.cumsum(0) - needed
    slots = first[number] * PAGE + token - (ends - lengths)[number]
    column = torch.arange(-(-batch.seq_length // PAGE), device=number.device)
    table = torch.where(column < needed[:, None], first[:, None] + column, NO_PAGE)
    return torch.cat((ends.new_zeros(1), ends)).int(), lengths.int(), table.int(), slots

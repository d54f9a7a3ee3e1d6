"""Causal attention over q, k, v of whole sequences: full, with a sliding window or with sinks, and inside documents if
the batch has them.

The definition that every backend must match is softmax(q k^T * scale) v. torch's scaled_dot_product_attention computes
it. On GPUs it picks cuDNN or flash kernels where there is no mask, and memory-efficient or cuDNN kernels with one; the
kernels of ops/attention/flash.py need no mask. Dropout of probabilities uses the explicit formula. Masks are additive
(0 and -inf, in the dtype of q). They are built once for each micro-batch and kind, and all layers read them without
widening them.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.base.rng import keep_mask
from phalanx.ops.attention.backends import repeated
from phalanx.ops.attention.flash import flash_attention, own_precision, spans_of, use_flash, use_torch_flash
from phalanx.ops.attention.kind import CAUSAL, AttentionBackend, AttentionKind, UnsupportedAttention, refuse_unsupported
from phalanx.ops.attention.sinks import attention_with_sinks
from phalanx.ops.op import Kernels
from phalanx.sequence.batch import Batch, PerBatch

MASKS, BLOCK_MASKS, VISIBLE = PerBatch[Tensor](), PerBatch[Tensor](), PerBatch[Tensor]()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    kind: AttentionKind = CAUSAL,
    sinks: Tensor | None = None,
    kernels: Kernels = "plain",
) -> Tensor:
    """q (sequences, heads, S, K), k (sequences, kv_heads, S, K), v (sequences, kv_heads, S, V) -> (T, heads * V).

    Query head h reads kv head h // (heads / kv_heads). `sinks` (heads,): a logit for each head that joins the softmax's
    denominator.

    Memory besides q, k, v and the output: none without documents and window, and none where flash kernels run (bf16 and
    fp16 on GPUs). Otherwise one mask for each micro-batch, of S * S elements (times sequences, with documents), or of T
    * 2 * window elements plus a copy of k and v of twice their length, where that is smaller.
    """
    if kind.sinks != (sinks is not None):
        raise ValueError(f"the kind of attention has sinks={kind.sinks}, and the logits given are {sinks}")
    window = None if kind.window is None or kind.window >= batch.seq_length else kind.window
    # cuDNN sets itself up for each new length
    no_dense = batch.documents is not None or window is not None or bool(batch.piece)
    return choose(kind, q, v, no_dense, kernels).call(q, k, v, batch, kind, window, sinks)


def choose(kind: AttentionKind, q: Tensor, v: Tensor, no_dense: bool, kernels: Kernels) -> AttentionBackend:
    """The backend to run: the first one that supports the kind and runs here."""
    for backend in BACKENDS:
        if kind.features <= backend.supports and backend.runs(kernels, q, v, no_dense):
            return backend
    refuse_unsupported(kind, BACKENDS)
    raise UnsupportedAttention(f"no backend of attention runs {q.dtype} heads of {q.shape[-1]} on {q.device}")


def _by_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    kind: AttentionKind,
    window: int | None,
    sinks: Tensor | None,
    flash_attn: bool = True,
) -> Tensor:
    return flash_attention(q, k, v, spans_of(batch), window, kind.scale, sinks, flash_attn)


def _by_torch(
    q: Tensor, k: Tensor, v: Tensor, batch: Batch, kind: AttentionKind, window: int | None, sinks: Tensor | None
) -> Tensor:
    """scaled_dot_product_attention, with a mask if more is hidden than the keys after each query."""
    if window is not None and 2 * window < batch.seq_length:
        out = _in_blocks(q, k, v, batch, kind.scale, window, sinks)
    else:
        mask = None if batch.documents is None and window is None else _mask(batch, window, q.dtype)
        out = _attend(q, k, v, mask, kind.scale, sinks)
    return out.transpose(1, 2).reshape(batch.num_tokens, -1)


def _by_formula(
    q: Tensor, k: Tensor, v: Tensor, batch: Batch, kind: AttentionKind, window: int | None, sinks: Tensor | None
) -> Tensor:
    """The definition, which materializes all scores: for features that no kernel here has."""
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32))
    scores = scores / math.sqrt(q.shape[-1]) if kind.scale is None else scores * kind.scale
    if kind.soft_cap is not None:
        scores = kind.soft_cap * torch.tanh(scores / kind.soft_cap)
    hidden = (window, kind.direction, kind.chunk)
    visible = VISIBLE.of(batch, lambda: _visible(batch, *hidden), *hidden)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        more = own_precision(sinks).to(scores.dtype).view(-1, 1, 1).expand(len(q), -1, scores.shape[2], 1)
        scores = torch.cat((scores, more), -1)
    probabilities = torch.softmax(scores, -1)[..., : k.shape[2]]
    return (probabilities.to(v.dtype) @ v).transpose(1, 2).reshape(batch.num_tokens, -1)


MASKED = frozenset(("window", "sinks", "scale"))
FLASH_ATTN_BACKEND = AttentionBackend(
    "flash-attn", MASKED, lambda kernels, q, v, no_dense: use_flash(kernels, q, v), _by_flash
)
BACKENDS = (
    FLASH_ATTN_BACKEND,
    AttentionBackend(
        "torch-flash",
        MASKED,
        lambda kernels, q, v, no_dense: no_dense and use_torch_flash(kernels, q, v),
        partial(_by_flash, flash_attn=False),
    ),
    AttentionBackend("torch", MASKED, lambda *_: True, _by_torch),
    AttentionBackend("formula", MASKED | {"direction", "chunk", "soft_cap"}, lambda *_: True, _by_formula),
)
"""The preferred backend first. `torch` runs everywhere."""


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, sinks: Tensor | None) -> Tensor:
    """Without a mask, causal."""
    if sinks is not None:
        return attention_with_sinks(q, k, v, sinks, mask, scale)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _in_blocks(
    q: Tensor, k: Tensor, v: Tensor, batch: Batch, scale: float | None, window: int, sinks: Tensor | None
) -> Tensor:
    """Queries in blocks of `window` tokens. Each block reads its own keys and those of the block before it, so the S x
    S matrix of scores is never built.

    The sequence is padded to fill the last block. Padding tokens are read by themselves alone and cut off at the end.
    """
    blocks = -(-batch.seq_length // window)
    q, k, v = (
        F.pad(t, (0, 0, 0, blocks * window - batch.seq_length)).unflatten(2, (blocks, window)).transpose(1, 2)
        for t in (q, k, v)
    )
    k, v = (
        torch.cat((F.pad(t[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0)), t), -2).flatten(0, 1) for t in (k, v)
    )  # the block before and the block itself
    mask = BLOCK_MASKS.of(batch, lambda: _make_block_mask(batch, window, q.dtype), window, q.dtype)
    out = _attend(q.flatten(0, 1), k, v, mask, scale, sinks)
    return out.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3)[:, :, : batch.seq_length]


def _make_block_mask(batch: Batch, window: int, dtype: torch.dtype) -> Tensor:
    """(sequences * blocks, 1, window, 2 * window): query a of a block reads keys a + 1 .. a + window of the pair of
    blocks."""
    device, length = batch.tokens.device, batch.seq_length
    doc = torch.zeros_like(batch.tokens) if batch.documents is None else batch.documents
    doc = F.pad(doc.view(batch.num_sequences, length), (0, -length % window), value=-1).unflatten(1, (-1, window))
    before = F.pad(doc[:, :-1], (0, 0, 1, 0), value=-2)  # before the first block there is nothing to read
    band = torch.ones(window, 2 * window, dtype=torch.bool, device=device).triu(1).tril(window)
    return (
        _additive(band & (doc.unsqueeze(-1) == torch.cat((before, doc), -1).unsqueeze(-2)), dtype)
        .flatten(0, 1)
        .unsqueeze(1)
    )


def attention_with_dropout(
    q: Tensor, k: Tensor, v: Tensor, batch: Batch, p: float, seed: int, layer: int, first_head: int
) -> Tensor:
    """Full causal attention with dropout of the probabilities, keyed by (sample, query position, layer, global head,
    key position).

    q of this rank's shard of the sequences, k and v of whole sequences. In a batch whose documents are balanced over
    ranks, the queries of a shard may belong to any sequence: each query is given the keys of all sequences and reads
    those of its own document.
    """
    heads = q.shape[1]
    if batch.balanced is not None:
        q, k, v = (t.transpose(1, 2).flatten(0, 1).unsqueeze(0).transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + _mask(batch, None, q.dtype)
    probs = torch.softmax(scores if scores.dtype == torch.float64 else scores.float(), -1)
    rows = tuple(t.view(len(q), -1) for t in (batch.samples, batch.places))
    keep = torch.stack([keep_mask(p, seed, layer, 0, rows, batch.seq_length, first_head + h) for h in range(heads)], 1)  # type: ignore[arg-type]
    keep = keep.repeat(1, 1, 1, k.shape[2] // batch.seq_length)
    out = (probs * keep / (1.0 - p)).to(v.dtype) @ v
    return out.transpose(1, 2).reshape(batch.num_tokens, -1)


def _mask(batch: Batch, window: int | None, dtype: torch.dtype) -> Tensor:
    """(sequences or 1, 1, L, S) for the L local queries of each sequence and all S keys: 0 where query i may read key j
    (j <= i, i - j < window, and the same document), -inf elsewhere."""
    return MASKS.of(batch, lambda: _additive(_visible(batch, window), dtype), window, dtype)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def _visible(batch: Batch, window: int | None, direction: str = "causal", chunk: int | None = None) -> Tensor:
    if batch.balanced is not None:
        keys = torch.arange(batch.all_tokens, device=batch.tokens.device)
        return ((keys <= batch.take(keys).unsqueeze(-1)) & (batch.runs[0].unsqueeze(-1) == batch.uncut.runs[0]))[
            None, None
        ]
    keys = torch.arange(batch.seq_length, device=batch.tokens.device)
    queries = torch.cat([keys[run.start : run.stop] for run in batch.part.runs(batch.seq_length)]).unsqueeze(-1)
    seen = keys <= queries if direction == "causal" else torch.ones_like(keys <= queries)
    if window is not None:
        seen &= (queries - keys).abs() < window
    if chunk is not None:
        seen &= queries // chunk == keys // chunk
    if batch.documents is None or batch.uncut.documents is None:
        return seen[None, None]
    of_queries, of_keys = (doc.view(batch.num_sequences, 1, -1) for doc in (batch.documents, batch.uncut.documents))
    return seen & (of_queries.unsqueeze(-1) == of_keys.unsqueeze(-2))

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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.base.rng import keep_mask
from phalanx.ops.attention.backends import repeated
from phalanx.ops.attention.flash import FLASH_ATTN, NARROW, TORCH_FLASH, own_precision
from phalanx.ops.attention.kind import CAUSAL, MASKED, PAGED, AttentionKind, refuse_unsupported
from phalanx.ops.attention.sinks import attention_with_sinks
from phalanx.ops.op import ALL_KERNELS, Case, Implementation, Kernels, Op, invariant
from phalanx.sequence.batch import Batch, PerBatch, room_for_documents

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
    kind = kind.within(batch.seq_length)
    hidden = batch.documents is not None or kind.window is not None or bool(batch.piece)  # cuDNN prepares for lengths
    sizes = (q.shape[-1], v.shape[-1], q.shape[1] != v.shape[1], hidden)
    chosen = ATTENTION.fast(kernels, q, *sizes, asked=kind.features)
    if chosen is None:
        refuse_unsupported(kind, offers(kernels))
        chosen = ATTENTION.reference
    out: Tensor = chosen.attend(q, k, v, batch, kind, sinks)
    return out


class Formula:
    """The definition, which makes the square of scores."""

    features = MASKED | {"direction", "chunk", "soft_cap"}

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, batch: Batch, kind: AttentionKind, sinks: Tensor | None) -> Tensor:
        """As `attention`; a window is narrower than the sequences."""
        k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
        scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32))
        scores = scores / math.sqrt(q.shape[-1]) if kind.scale is None else scores * kind.scale
        if kind.soft_cap is not None:
            scores = kind.soft_cap * torch.tanh(scores / kind.soft_cap)
        hidden = (kind.window, kind.direction, kind.chunk)
        visible = VISIBLE.of(batch, lambda: _visible(batch, *hidden), *hidden)
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            more = own_precision(sinks).to(scores.dtype).view(-1, 1, 1).expand(len(q), -1, scores.shape[2], 1)
            scores = torch.cat((scores, more), -1)
        probabilities = torch.softmax(scores, -1)[..., : k.shape[2]]
        return (probabilities.to(v.dtype) @ v).transpose(1, 2).reshape(batch.num_tokens, -1)


class ByTorch:
    """scaled_dot_product_attention; with a mask where something is hidden beside what is later."""

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, batch: Batch, kind: AttentionKind, sinks: Tensor | None) -> Tensor:
        if kind.window is not None and 2 * kind.window < batch.seq_length:
            out = _in_blocks(q, k, v, batch, kind, sinks)
        else:
            mask = None if batch.documents is None and kind.window is None else _mask(batch, kind.window, q.dtype)
            out = _attend(q, k, v, mask, kind.scale, sinks)
        return out.transpose(1, 2).reshape(batch.num_tokens, -1)


def offers(kernels: Kernels) -> dict[str, frozenset[str]]:
    """By name of what computes attention over whole sequences, the features that it has. With kernels "optional", and
    "invariant", there is one."""
    features = {made.name: made.features or Formula.features for made in ATTENTION.candidates}
    only = {"optional": "flash-attn", "invariant": "invariant"}.get(kernels)
    if only is not None:
        return {only: features[only]}
    asked = {made.name for made in ATTENTION.candidates if made.modes != ("invariant",)}
    return {**{name: has for name, has in features.items() if name in asked}, "formula": Formula.features}


def _case(name: str, kind: AttentionKind, documents: int, shape: tuple[int, ...], **fields: Any) -> Case:
    """An example whose heads are views of a packed qkv. `documents`: their mean length (0: none), and three of one
    token each. shape: sequences, tokens of each, heads, kv heads, widths of a query and of a value."""
    sequences, length, heads, kv_heads, wide_k, wide_v = shape
    tokens = sequences * length

    def call(packed: Tensor, *rest: Any) -> Tensor:
        *sinks, kernels = rest
        ids = torch.arange(tokens, device=packed.device)
        batch = Batch(ids, ids, ids % length, ids // length, sequences, length)
        if documents:
            starts = torch.rand(tokens, generator=torch.Generator().manual_seed(3)) < 1 / documents
            starts[::length] = starts[tokens // 3 : tokens // 3 + 3] = True
            numbers = starts.cumsum(0) - 1
            room = room_for_documents(int(numbers[-1]) + 1, tokens)
            batch = replace(batch, documents=numbers.to(packed.device), most_documents=room)
        each = packed.view(sequences, length, -1, wide_k).transpose(1, 2)
        q, k, v = each.split((heads, kv_heads, kv_heads), 1)
        return attention(q, k, v[..., :wide_v], batch, kind, sinks[0] if sinks else None, kernels)

    packed = (tokens, heads + 2 * kv_heads, wide_k)
    return Case(name, call, (packed, (heads,)) if kind.sinks else (packed,), (1,) if kind.sinks else (), **fields)


def _cases() -> Iterator[Case]:
    """At most two kinds of hidden keys and sinks, small and at the shapes of models."""
    kinds = {
        "causal": (CAUSAL, 0),
        "scaled": (AttentionKind(scale=0.3), 0),
        "documents": (CAUSAL, 150),
        "a window": (AttentionKind(window=100), 0),
        "sinks": (AttentionKind(sinks=True), 0),
        "documents, window": (AttentionKind(window=100), 150),
        "documents, window, sinks": (AttentionKind(window=100, sinks=True), 150),
        "window, sinks": (AttentionKind(window=128, sinks=True), 0),
    }
    for name, (kind, documents) in kinds.items():
        window = kind.window and kind.window // 25
        yield _case(name, replace(kind, window=window), documents // 25, (2, 21, 4, 2, 6, 6))
        for wide_k, wide_v in ((40, 40), (64, 64), (128, 128), (192, 128)):
            if wide_k == wide_v or not kind.sinks:
                kv_heads = 2 if wide_k == wide_v else 8
                shape = (2, 1000, 8, kv_heads, wide_k, wide_v)
                yield _case(f"{name}, heads of {wide_k} and {wide_v}", kind, documents, shape, large=True)
    for shape in (
        (1, 4096, 32, 8, 128, 128),
        (3, 1000, 12, 12, 64, 64),
        (2, 77, 4, 2, 64, 64),
        (1, 257, 8, 1, 128, 128),
    ):
        yield _case(
            f"{shape[2]}/{shape[3]} heads, {shape[0]} x {shape[1]}", CAUSAL, 0, shape, dtypes=NARROW, large=True
        )


ATTENTION = Op(
    "attention",
    "attention over whole sequences: inside documents and windows, with sinks",
    f"{__name__}:Formula",
    ("attend",),
    (
        FLASH_ATTN,
        TORCH_FLASH,
        Implementation("torch", f"{__name__}:ByTorch", features=MASKED, modes=ALL_KERNELS),
        invariant("phalanx.ops.attention.invariant:FromPages", "any", features=PAGED),
    ),
    cases=tuple(_cases()),
)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, sinks: Tensor | None) -> Tensor:
    """Without a mask, causal."""
    if sinks is not None:
        return attention_with_sinks(q, k, v, sinks, mask, scale)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, batch: Batch, kind: AttentionKind, sinks: Tensor | None) -> Tensor:
    """Queries in blocks of `window` tokens, each with its own and the block before as keys: no square of the
    sequence is made.

    The sequence is padded to fill the last block. Padding tokens are read by themselves alone and cut off at the end.
    """
    window: int = kind.window  # type: ignore[assignment]
    blocks = -(-batch.seq_length // window)
    q, k, v = (
        F.pad(t, (0, 0, 0, blocks * window - batch.seq_length)).unflatten(2, (blocks, window)).transpose(1, 2)
        for t in (q, k, v)
    )
    k, v = (
        torch.cat((F.pad(t[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0)), t), -2).flatten(0, 1) for t in (k, v)
    )  # the block before and the block itself
    mask = BLOCK_MASKS.of(batch, lambda: _make_block_mask(batch, window, q.dtype), window, q.dtype)
    out = _attend(q.flatten(0, 1), k, v, mask, kind.scale, sinks)
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


@dataclass(frozen=True)
class ProbabilityDropout:
    """Dropout of attention's probabilities, keyed by (seed, sample, query position, layer, global head, key position):
    `first_head` is the number of the first head that is here."""

    p: float
    seed: int
    layer: int
    first_head: int


def attention_with_dropout(q: Tensor, k: Tensor, v: Tensor, batch: Batch, dropout: ProbabilityDropout) -> Tensor:
    """Full causal attention with dropout of the probabilities.

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
    numbers = range(dropout.first_head, dropout.first_head + heads)
    key = (dropout.p, dropout.seed, dropout.layer, 0)
    keep = torch.stack([keep_mask(*key, rows, batch.seq_length, head) for head in numbers], 1)  # type: ignore[arg-type]
    keep = keep.repeat(1, 1, 1, k.shape[2] // batch.seq_length)
    out = (probs * keep / (1.0 - dropout.p)).to(v.dtype) @ v
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

"""Attention over q, k, v of whole sequences: causal or both ways, inside documents, windows and chunks, with sinks,
soft caps and relative bias.

The definition that every backend must match is softmax(q k^T * scale) v. torch's scaled_dot_product_attention computes
it. On GPUs it picks cuDNN or flash kernels where there is no mask, and memory-efficient or cuDNN kernels with one; the
kernels of ops/attention/flash.py need no mask. What its public call has no gradients for runs in the kernels behind it
(ops/attention/one_block.py). Dropout of probabilities uses the explicit formula. Masks are additive (0 and -inf, in the
dtype of q). They are built once for each micro-batch and kind, and all layers read them without widening them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.rng import keep_mask
from phalanx.ops.attention.backends import Scoring, repeated
from phalanx.ops.attention.flash import FLASH_ATTN, NARROW, TORCH_FLASH, own_precision
from phalanx.ops.attention.kind import (
    CAUSAL,
    EVERYTHING,
    NOTHING,
    PAGED,
    AttentionKind,
    Learned,
    RelativeBias,
    UnsupportedAttention,
    by_documents,
    groups_together,
    in_one_group,
    refuse_unsupported,
)
from phalanx.ops.attention.one_block import attend_block
from phalanx.ops.attention.relative_bias import Biased, Runs, bucket_of
from phalanx.ops.op import ALL_KERNELS, Case, Implementation, Kernels, Op, invariant, triton
from phalanx.sequence.batch import Batch, PerBatch, room_for_documents

MASKS, BLOCK_MASKS = PerBatch[Tensor](), PerBatch[Tensor]()
VISIBLE, PAIR_BUCKETS = PerBatch[Tensor](), PerBatch[Tensor]()
Qkv = tuple[Tensor, Tensor, Tensor]
"""q, k and v."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    kind: AttentionKind = CAUSAL,
    learned: Learned = NOTHING,
    kernels: Kernels = "plain",
) -> Tensor:
    """q (sequences, heads, S, K), k (sequences, kv_heads, S, K), v (sequences, kv_heads, S, V) -> (T, heads * V).

    Query head h reads kv head h // (heads / kv_heads).

    Memory besides q, k, v and the output: none without documents and window, and none where flash kernels run (bf16 and
    fp16 on GPUs). Otherwise one mask for each micro-batch, of S * S elements (times sequences, with documents), or of T
    * 2 * window elements plus a copy of k and v of twice their length, where that is smaller (three times, both ways).
    A bias has as many for each head where no kernel of its own runs, and so have soft-capped scores without flash-attn.
    """
    learned.check(kind)
    check_prefix(batch, kind)
    kind = kind.within(batch.seq_length)
    inside = batch.documents is not None or bool(batch.piece)
    hidden = inside or kind.window is not None or kind.chunk is not None  # cuDNN prepares for lengths
    sizes = (q.shape[-1], v.shape[-1], q.shape[1] != v.shape[1], hidden)
    op = ATTENTION if kind.bias is None else BIASED_ATTENTION
    chosen = op.fast(kernels, q, *sizes, asked=kind.features)
    if chosen is None:
        refuse_unsupported(kind, offers(kernels))
        chosen = op.reference
    out: Tensor = chosen.attend(q, k, v, batch, kind, learned)
    return out


def check_prefix(batch: Batch, kind: AttentionKind) -> None:
    """UnsupportedAttention if attention has prefixes and the batch has none: known when memory is forecast."""
    if kind.direction == "prefix" and batch.prefix is None:
        raise UnsupportedAttention(
            "attention with prefixes needs batches that say how long they are (Batch.prefix): set task.name to an "
            "objective that makes them (Objective.makes_prefix)"
        )


class Formula:
    """The definition, which makes the square of scores."""

    features = EVERYTHING

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, batch: Batch, kind: AttentionKind, learned: Learned) -> Tensor:
        """As `attention`; a window is narrower than the sequences."""
        batch, kind = by_documents(batch, kind)
        probabilities = _probabilities(q, k, batch, kind, learned)
        out = probabilities.to(v.dtype) @ repeated(v, q.shape[1])
        return out.transpose(1, 2).reshape(batch.num_tokens, -1)


def _probabilities(q: Tensor, k: Tensor, batch: Batch, kind: AttentionKind, learned: Learned) -> Tensor:
    """(sequences, heads, L, S) in at least fp32. q: of this shard of the sequences; k: of whole sequences."""
    scores = (q @ repeated(k, q.shape[1]).mT).to(torch.promote_types(q.dtype, torch.float32))
    scores = scores / math.sqrt(q.shape[-1]) if kind.scale is None else scores * kind.scale
    if kind.soft_cap is not None:
        scores = kind.soft_cap * torch.tanh(scores / kind.soft_cap)
    if kind.bias is not None and learned.bias is not None:
        bias = kind.bias
        bucket = PAIR_BUCKETS.of(batch, lambda: bucket_of(_distances(batch), bias), bias)
        scores = scores + own_precision(learned.bias).to(scores.dtype)[bucket].permute(2, 0, 1)
    visible = VISIBLE.of(batch, lambda: _visible(batch, kind), *_hiding(kind))
    scores = scores.masked_fill(~visible, -torch.inf)
    if learned.sinks is not None:
        more = own_precision(learned.sinks).to(scores.dtype).view(-1, 1, 1).expand(len(q), -1, scores.shape[2], 1)
        scores = torch.cat((scores, more), -1)
    return torch.softmax(scores, -1)[..., : k.shape[2]]


class ByTorch:
    """scaled_dot_product_attention, or the kernels behind it where there is more to learn; with a mask where something
    is hidden beside what is later."""

    features = EVERYTHING

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, batch: Batch, kind: AttentionKind, learned: Learned) -> Tensor:
        batch, kind = by_documents(batch, kind)
        blocks = {"causal": 2, "both": 3}.get(kind.direction)  # of keys; prefixes are of any length
        if kind.together is not None:  # of any length, as prefixes are
            blocks = None
        if kind.window is not None and blocks is not None and blocks * kind.window < batch.seq_length:
            out = _in_blocks(q, k, v, batch, kind, learned)
        else:
            hides = batch.documents is not None or kind.window is not None or kind.direction == "prefix"
            mask = _mask(batch, kind, q.dtype) if hides or kind.together is not None else None
            causal, places = mask is None and kind.direction == "causal", (range(batch.seq_length),)
            out = _attend((q, k, v), batch, kind, learned, _Block(mask, causal, places, places))
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
    params = {"sinks": (heads,)} if kind.sinks else {}
    if kind.bias is not None:
        params["bias"] = (kind.bias.buckets, heads)  # type: ignore[assignment]

    def call(packed: Tensor, *rest: Any) -> Tensor:
        *given, kernels = rest
        ids = torch.arange(tokens, device=packed.device)
        batch = Batch(ids, ids, ids % length, ids // length, sequences, length)
        if documents:
            starts = torch.rand(tokens, generator=torch.Generator().manual_seed(3)) < 1 / documents
            starts[::length] = starts[tokens // 3 : tokens // 3 + 3] = True
            numbers = starts.cumsum(0) - 1
            room = room_for_documents(int(numbers[-1]) + 1, tokens)
            batch = replace(batch, documents=numbers.to(packed.device), most_documents=room)
        if kind.together is not None:
            batch = replace(batch, tokens=ids.where(ids % length % (length // 2) < length // 4, kind.together))
        if kind.direction == "prefix":
            batch = replace(batch, prefix=(ids % length % 150 < length // 3).long())
        each = packed.view(sequences, length, -1, wide_k).transpose(1, 2)
        q, k, v = each.split((heads, kv_heads, kv_heads), 1)
        return attention(q, k, v[..., :wide_v], batch, kind, Learned(**dict(zip(params, given))), kernels)

    packed = (tokens, heads + 2 * kv_heads, wide_k)
    return Case(name, call, (packed, *params.values()), tuple(range(1, 1 + len(params))), asked=kind.features, **fields)


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
        "both ways": (AttentionKind("both"), 0),
        "both ways, documents, window": (AttentionKind("both", window=100), 150),
        "chunks": (AttentionKind(chunk=300), 0),
        "chunks, documents": (AttentionKind(chunk=100), 150),
        "prefix, documents": (AttentionKind("prefix"), 150),
        "together": (AttentionKind(together=-1), 0),
        "together, documents, window": (AttentionKind(together=-1, window=100), 150),
        "soft cap, documents": (AttentionKind(soft_cap=2.0), 150),
    }
    yield from _of_kinds(kinds)
    for shape in (
        (1, 4096, 32, 8, 128, 128),
        (3, 1000, 12, 12, 64, 64),
        (2, 77, 4, 2, 64, 64),
        (1, 257, 8, 1, 128, 128),
    ):
        yield _case(
            f"{shape[2]}/{shape[3]} heads, {shape[0]} x {shape[1]}", CAUSAL, 0, shape, dtypes=NARROW, large=True
        )


def _of_kinds(kinds: dict[str, tuple[AttentionKind, int]]) -> Iterator[Case]:
    """With the mean length of documents; each small, and at the shapes of models."""
    for name, (kind, documents) in kinds.items():
        small = replace(kind, window=kind.window and kind.window // 25, chunk=kind.chunk and kind.chunk // 25)
        yield _case(name, small, documents // 25, (2, 21, 4, 2, 6, 6))
        for wide_k, wide_v in ((40, 40), (64, 64), (128, 128), (192, 128)):
            if wide_k == wide_v or not kind.sinks:
                kv_heads = 2 if wide_k == wide_v else 8
                shape = (2, 1000, 8, kv_heads, wide_k, wide_v)
                yield _case(f"{name}, heads of {wide_k} and {wide_v}", kind, documents, shape, large=True)


def _biased_cases() -> Iterator[Case]:
    """Also with pairs whose distance has a bucket of its own, and others, whose bias is one number."""
    kinds = {
        "bias": (AttentionKind("both", bias=RelativeBias(32, 128, True), scale=1.0), 0),
        "bias, documents": (AttentionKind("both", bias=RelativeBias(32, 128, True)), 150),
        "bias, documents, window": (AttentionKind(bias=RelativeBias(32, 128), window=100), 150),
    }
    yield from _of_kinds(kinds)
    for direction in ("causal", "both"):
        kind = AttentionKind(direction, bias=RelativeBias(8, 10, direction == "both"))
        yield _case(f"bias of near and far, documents, {direction}", kind, 90, (1, 200, 2, 1, 6, 6))


def _flash_bias_fits(query: int, value: int, shared: bool, hidden: bool) -> bool:
    return max(query, value) <= 128


ATTENTION = Op(
    "attention",
    "attention over whole sequences: inside documents and windows, with sinks",
    f"{__name__}:Formula",
    ("attend",),
    (
        FLASH_ATTN,
        TORCH_FLASH,
        Implementation("torch", f"{__name__}:ByTorch", features=EVERYTHING, modes=ALL_KERNELS),
        invariant("phalanx.ops.attention.invariant:FromPages", "any", features=PAGED - {"bias", "together"}),
    ),
    cases=tuple(_cases()),
)


@dataclass(frozen=True)
class _Block:
    """What queries read of keys: by a mask, those up to themselves (causal), or all; and the places of both, as far as
    their distance goes."""

    mask: Tensor | None
    causal: bool
    queries: Runs
    keys: Runs


def _attend(heads: Qkv, batch: Batch, kind: AttentionKind, learned: Learned, seen: _Block) -> Tensor:
    """What is hidden by `kind` is in `seen` already."""
    q, k, v = heads
    if kind.soft_cap is None and learned == NOTHING:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=seen.mask,
            is_causal=seen.causal,
            scale=kind.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    scale = 1 / math.sqrt(q.shape[-1]) if kind.scale is None else kind.scale
    biased = None if kind.bias is None else Biased.of(batch, kind.bias, seen.queries, seen.keys)
    return attend_block(q, k, v, learned, Scoring(seen.mask, seen.causal, scale, kind.soft_cap), biased)


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, batch: Batch, kind: AttentionKind, learned: Learned) -> Tensor:
    """Queries in blocks of `window` tokens, each with its own and the block before as keys, and both ways also the one
    after: no square of the sequence is made.

    The sequence is padded to fill the last block. Padding tokens are read by themselves alone and cut off at the end.
    """
    window: int = kind.window  # type: ignore[assignment]
    both = kind.direction == "both"
    blocks = -(-batch.seq_length // window)
    q, k, v = (
        F.pad(t, (0, 0, 0, blocks * window - batch.seq_length)).unflatten(2, (blocks, window)).transpose(1, 2)
        for t in (q, k, v)
    )
    k, v = (_with_neighbours(t, both).flatten(0, 1) for t in (k, v))
    mask = BLOCK_MASKS.of(batch, lambda: _make_block_mask(batch, window, both, q.dtype), window, both, q.dtype)
    seen = _Block(mask, False, (range(window, 2 * window),), (range(k.shape[2]),))
    out = _attend((q.flatten(0, 1), k, v), batch, kind, learned, seen)
    return out.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3)[:, :, : batch.seq_length]


def _with_neighbours(x: Tensor, both: bool, value: int = 0) -> Tensor:
    """(sequences, blocks, ..., window, K) -> the same with each block after the one before it and, if `both`, before
    the one after it. Where there is none, `value`."""
    around = (0, 0) * (x.dim() - 2)
    parts = [F.pad(x[:, :-1], (*around, 1, 0), value=value), x]
    if both:
        parts.append(F.pad(x[:, 1:], (*around, 0, 1), value=value))
    return torch.cat(parts, -2)


def _make_block_mask(batch: Batch, window: int, both: bool, dtype: torch.dtype) -> Tensor:
    """(sequences * blocks, 1, window, 2 or 3 * window): query a of a block reads keys a + 1 .. a + window of the pair
    of blocks, or .. a + 2 window - 1 of three."""
    device, length = batch.tokens.device, batch.seq_length
    doc = torch.zeros_like(batch.tokens) if batch.documents is None else batch.documents
    doc = F.pad(doc.view(batch.num_sequences, length), (0, -length % window), value=-1).unflatten(1, (-1, window))
    keys = _with_neighbours(doc.unsqueeze(-1), both, -2).squeeze(-1)
    last = 2 * window - 1 if both else window
    band = torch.ones(window, keys.shape[-1], dtype=torch.bool, device=device).triu(1).tril(last)
    return _additive(band & (doc.unsqueeze(-1) == keys.unsqueeze(-2)), dtype).flatten(0, 1).unsqueeze(1)


@dataclass(frozen=True)
class ProbabilityDropout:
    """Dropout of attention's probabilities, keyed by (seed, sample, query position, layer, global head, key position):
    `first_head` is the number of the first head that is here; `site` tells apart the attentions of a layer."""

    p: float
    seed: int
    layer: int
    first_head: int
    site: int = 0


def attention_with_dropout(
    heads: Qkv, batch: Batch, kind: AttentionKind, learned: Learned, dropout: ProbabilityDropout
) -> Tensor:
    """`attention` with dropout of the probabilities. heads: q, k, v.

    q of this rank's shard of the sequences, k and v of whole sequences. In a batch whose documents are balanced over
    ranks, the queries of a shard may belong to any sequence: each query is given the keys of all sequences and reads
    those of its own document.
    """
    q, k, v = heads
    learned.check(kind)
    check_prefix(batch, kind)
    if batch.balanced is not None:
        q, k, v = (t.transpose(1, 2).flatten(0, 1).unsqueeze(0).transpose(1, 2) for t in (q, k, v))
    probs = _probabilities(q, k, *by_documents(batch, kind), learned)
    rows = tuple(t.view(len(q), -1) for t in (batch.samples, batch.places))
    numbers = range(dropout.first_head, dropout.first_head + q.shape[1])
    key = (dropout.p, dropout.seed, dropout.layer, dropout.site)
    keep = torch.stack([keep_mask(*key, rows, batch.seq_length, head) for head in numbers], 1)  # type: ignore[arg-type]
    keep = keep.repeat(1, 1, 1, k.shape[2] // batch.seq_length)
    out = (probs * keep / (1.0 - dropout.p)).to(v.dtype) @ repeated(v, q.shape[1])
    return out.transpose(1, 2).reshape(batch.num_tokens, -1)


def _hiding(kind: AttentionKind) -> tuple[Hashable, ...]:
    """What of a kind decides which keys a query reads."""
    return kind.window, kind.direction, kind.together


def _mask(batch: Batch, kind: AttentionKind, dtype: torch.dtype) -> Tensor:
    """(sequences or 1, 1, L, S) for the L local queries of each sequence and all S keys: 0 where query i may read key
    j, -inf elsewhere."""
    return MASKS.of(batch, lambda: _additive(_visible(batch, kind), dtype), *_hiding(kind), dtype)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def _distances(batch: Batch) -> Tensor:
    """(L, S): places of the S keys less those of the L local queries. Of a balanced batch all tokens of the micro-batch
    are keys."""
    device = batch.tokens.device
    if batch.balanced is not None:
        keys = torch.arange(batch.all_tokens, device=device)
        return keys - batch.take(keys).unsqueeze(-1)
    keys = torch.arange(batch.seq_length, device=device)
    return keys - torch.cat([keys[run.start : run.stop] for run in batch.part.runs(batch.seq_length)]).unsqueeze(-1)


def _visible(batch: Batch, kind: AttentionKind) -> Tensor:
    """(sequences or 1, 1, L, S): which keys each query reads: of its document, in the window, and none that is later
    unless both directions are read, both belong to the prefix (no query before a key of the prefix is beyond it), or
    both to one group of tokens that read each other."""
    distance, rows = _distances(batch), 1 if batch.balanced is not None else batch.num_sequences
    seen = torch.ones_like(distance, dtype=torch.bool) if kind.direction == "both" else distance <= 0
    if kind.direction == "prefix" and batch.uncut.prefix is not None:
        seen = seen | (batch.uncut.prefix.view(rows, 1, 1, -1) > 0)
    if kind.together is not None:
        keys = groups_together(batch, kind.together)
        queries = keys if batch.whole is None else batch.take(keys)
        seen = seen | in_one_group(queries.view(rows, 1, -1, 1), keys.view(rows, 1, 1, -1))
    if kind.window is not None:
        seen = seen & ((distance.abs() if kind.together is None else -distance) < kind.window)
    if batch.balanced is not None:
        return (seen & (batch.runs[0].unsqueeze(-1) == batch.uncut.runs[0])).view(1, 1, *distance.shape)
    if batch.documents is None or batch.uncut.documents is None:
        return seen if seen.dim() == 4 else seen[None, None]
    of_queries, of_keys = (doc.view(rows, 1, -1) for doc in (batch.documents, batch.uncut.documents))
    return seen & (of_queries.unsqueeze(-1) == of_keys.unsqueeze(-2))


BIASED_ATTENTION = Op(
    "attention_bias",
    "the same with a relative position bias",
    f"{__name__}:Formula",
    ("attend",),
    (
        triton(
            "phalanx.ops.attention.relative_bias_kernel:FlashBias",
            dtypes=NARROW,
            fits=_flash_bias_fits,
            shapes="heads of at most 128",
            features=EVERYTHING - {"sinks", "soft_cap"},
            insisted=("triton",),
            cost="a bias of all pairs, and its gradient, are made in memory",
        ),
        Implementation("torch", f"{__name__}:ByTorch", features=EVERYTHING, modes=ALL_KERNELS),
    ),
    cases=tuple(_biased_cases()),
)

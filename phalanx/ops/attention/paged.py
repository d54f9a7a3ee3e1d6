"""Attention over keys and values that lie in pages: of sequences that are generated, and of pieces of prompts.

What is remembered of a sequence's tokens lies in pages of a pool that all sequences share (sequence.paged; Kwon et
al., "PagedAttention", 2023). A query reads the pages of its sequence by a table. Pages may be in FP8 (e4m3): each
token's key and value then have a scale per head beside them. Forward only: nothing is kept for a backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.ops.attention.kind import CAUSAL, NOTHING, PAGED, AttentionKind, Learned, refuse_unsupported
from phalanx.ops.attention.relative_bias import bucket_of
from phalanx.ops.in_order import sum_in_order
from phalanx.ops.op import Case, Kernels, Op, invariant, triton
from phalanx.sequence.paged import NO_PAGE, PagedSpans

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
LEAST_SCALE = 2.0**-126
"""Of what is zero, or nearly so: the least fp32 that no device takes for zero."""

ELEMENTS = 2**25
"""The reference computes so many sequences and queries at once that it makes about so many elements."""


@dataclass(frozen=True)
class Pages:
    """What a layer remembers: N pages of page_size tokens.

    keys          (N, page_size, kv_heads, K)
    values        (N, page_size, kv_heads, V); None: a value is the first `width` features of its key (a latent is both)
    width         V
    key_scales    (N, page_size, kv_heads) fp32, of pages in FP8: a key is what is stored times its scale
    value_scales  the same of values; None where a value is part of its key
    """

    keys: Tensor
    values: Tensor | None
    width: int
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def __post_init__(self) -> None:
        stored = [("keys", self.keys, self.key_scales)]
        stored += [] if self.values is None else [("values", self.values, self.value_scales)]
        for name, pages, scales in stored:
            if (pages.dtype == FP8) != (scales is not None):
                raise ValueError(f"{name} of {pages.dtype} and scales {scales is not None}: pages in FP8 have some")
        if self.values is None and self.width > self.keys.shape[-1]:
            raise ValueError(f"a value of {self.width} features is no part of a key of {self.keys.shape[-1]}")
        if self.values is not None and self.values.shape != (*self.keys.shape[:3], self.width):
            raise ValueError(f"values are {tuple(self.values.shape)}, beside keys {tuple(self.keys.shape)}")

    @property
    def page_size(self) -> int:
        return self.keys.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[2]

    @property
    def tensors(self) -> list[Tensor]:
        """All that is stored."""
        return [t for t in (self.keys, self.values, self.key_scales, self.value_scales) if t is not None]


def paged_attention(
    q: Tensor,
    pages: Pages,
    spans: PagedSpans,
    kind: AttentionKind = CAUSAL,
    learned: Learned = NOTHING,
    kernels: Kernels = "plain",
) -> Tensor:
    """q (T, heads, K) -> (T, heads, V): what each query reads of its sequence's pages.

    Query head h reads kv head h // (heads / kv_heads). Keys on NO_PAGE are not read. Rows after the last sequence's,
    and queries that read nothing, get zeros. Tokens that read each other, if the kind has some, are in
    spans.together. UnsupportedAttention for a kind that is not causal.
    """
    return paged_attention_parts(q, pages, spans, kind, learned, kernels)[0]


def paged_attention_parts(
    q: Tensor,
    pages: Pages,
    spans: PagedSpans,
    kind: AttentionKind = CAUSAL,
    learned: Learned = NOTHING,
    kernels: Kernels = "plain",
) -> tuple[Tensor, Tensor]:
    """The same, and the log-sum-exp of each query's scores (T, heads) in fp32 (fp64 of fp64), -inf of those that read
    nothing: by it outputs of parts of the keys, such as those of other ranks, are joined. Sinks, where given, are in
    both: of several parts only one may have them."""
    refuse_unsupported(kind, {"paged attention": PAGED})
    learned.check(kind)
    if spans.together is None and kind.together is not None:  # of these tokens none read later ones
        kind = replace(kind, together=None)
    heads, width = q.shape[1:]
    if width != pages.keys.shape[-1] or heads % pages.kv_heads:
        raise ValueError(f"queries {tuple(q.shape)} do not fit keys {tuple(pages.keys.shape)}: (T, heads, K) reads")
    if pages.page_size != spans.page_size:
        raise ValueError(f"pages have {pages.page_size} tokens, spans count with {spans.page_size}")
    if kernels == "invariant" and not spans.batch_invariant:
        raise ValueError("batch-invariant attention needs spans that are (PagedSpans.batch_invariant)")
    by = PAGED_ATTENTION.choose(kernels, q, pages, asked=kind.features)
    out, lse = by.attend_pages(q, pages, spans, kind, learned)
    return out, lse


def store_pages(k: Tensor, v: Tensor | None, pages: Pages, slots: Tensor, kernels: Kernels = "plain") -> None:
    """Write the keys k (T, kv_heads, K) and values v (T, kv_heads, V) of tokens into their slots (T,), in place; v is
    None where a value is part of its key. Slots occur once, but for those of NO_PAGE."""
    if (v is None) != (pages.values is None):
        raise ValueError(f"values given: {v is not None}, pages of values: {pages.values is not None}; both or none")
    STORE_PAGES.choose(kernels, k, pages).write_pages(k, v, pages, slots)


# ---- the reference -------------------------------------------------------------------------------


def write_pages(k: Tensor, v: Tensor | None, pages: Pages, slots: Tensor) -> None:
    """store_pages. What FP8 stores is rounded from fp32, whatever the dtype of k."""
    stored = [(k, pages.keys, pages.key_scales)]
    if v is not None and pages.values is not None:
        stored.append((v, pages.values, pages.value_scales))
    for x, to, scales in stored:
        if scales is None:
            to.flatten(0, 1).index_copy_(0, slots, x.to(to.dtype))
        else:
            scale, quantized = in_fp8(x)
            to.flatten(0, 1).view(torch.uint8).index_copy_(0, slots, quantized.view(torch.uint8))
            scales.flatten(0, 1).index_copy_(0, slots, scale)


def in_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., K) -> scales (...) fp32 and x / scale in FP8: the largest magnitude becomes FP8's largest."""
    wide = x.float()
    scale = (wide.abs().amax(-1) / LARGEST).clamp_min(LEAST_SCALE)
    return scale, (wide / scale.unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(FP8)


def attend_pages(
    q: Tensor, pages: Pages, spans: PagedSpans, kind: AttentionKind, learned: Learned
) -> tuple[Tensor, Tensor]:
    """paged_attention_parts: pages gathered, then a masked softmax in fp32, or fp64 of fp64. Batch-invariant: sums over
    features and keys are taken element by element, in one order that hangs on positions alone."""
    tokens, heads, _ = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(tokens + 1, heads, pages.width)  # the last row takes what is no token's
    lse = q.new_full((tokens + 1, heads), -torch.inf, dtype=dtype)
    for part in _parts(spans, heads, pages):
        rows = spans.starts[part.sequences].unsqueeze(1) + torch.arange(part.first, part.end, device=q.device)
        rows = rows.where(rows < spans.starts[part.sequences + 1].unsqueeze(1), tokens).long()
        queries = rows.clamp_max(tokens - 1)
        found, found_lse = _attend_part(q[queries].to(dtype), part, pages, spans, kind, learned)
        out[rows], lse[rows] = found.to(q.dtype), found_lse
    return out[:-1], lse[:-1]


@dataclass(frozen=True)
class _Part:
    """What the reference computes at once: queries first .. end of some sequences, each over `keys` tokens."""

    sequences: Tensor
    first: int
    end: int
    keys: int


def _parts(spans: PagedSpans, heads: int, pages: Pages) -> Iterator[_Part]:
    """On the CPU sequences of equally many queries together, the long ones apart: little is padded. Elsewhere all as
    if they were as long as their bounds: nothing waits for the device."""
    per_key = pages.kv_heads * (pages.keys.shape[-1] + pages.width)
    heads *= pages.keys.shape[-1] + pages.width if spans.batch_invariant else 1  # what is added is there at once
    room = spans.table.shape[1] * spans.page_size
    if spans.starts.is_cpu:
        counts, lengths = spans.starts.diff().tolist(), spans.lengths.tolist()
    else:
        counts = [spans.most_queries] * spans.num_sequences
        lengths = [spans.most_keys] * spans.num_sequences
    lengths = [spans.keys_before(length) for length in lengths]
    order = sorted((i for i, n in enumerate(counts) if n), key=lambda i: (counts[i], lengths[i]))
    while order:
        count = counts[order[0]]
        together = [i for i in order if counts[i] == count]
        while len(together) > 1 and len(together) * lengths[together[-1]] * (per_key + heads * count) > ELEMENTS:
            together = together[: len(together) // 2]
        order = order[len(together) :]
        keys = min(lengths[together[-1]], room)
        step = max(1, min(count, ELEMENTS // max(1, len(together) * keys * heads)))
        first, last = together[0], together[-1]
        device = spans.starts.device  # there all are alike, so those together are neighbours
        sequences = torch.tensor(together) if device.type == "cpu" else torch.arange(first, last + 1, device=device)
        for first in range(0, count, step):
            yield _Part(sequences, first, min(first + step, count), keys)


def _attend_part(
    q: Tensor, part: _Part, pages: Pages, spans: PagedSpans, kind: AttentionKind, learned: Learned
) -> tuple[Tensor, Tensor]:
    """q (sequences, n, heads, K) -> (sequences, n, heads, V), (sequences, n, heads)."""
    groups, sinks = q.shape[2] // pages.kv_heads, learned.sinks
    table = spans.table[part.sequences, : -(-part.keys // spans.page_size)].long()
    places = torch.arange(table.shape[1] * spans.page_size, device=q.device) * spans.stride + spans.offset
    lengths = spans.lengths[part.sequences].unsqueeze(1)
    counts = (spans.starts[part.sequences + 1] - spans.starts[part.sequences]).unsqueeze(1)
    there = (table != NO_PAGE).repeat_interleave(spans.page_size, 1) & (places < lengths)  # (sequences, keys)
    k = _gathered(pages.keys, pages.key_scales, table, there, q.dtype)
    v = k[..., : pages.width]
    if pages.values is not None:
        v = _gathered(pages.values, pages.value_scales, table, there, q.dtype)
    positions = lengths - counts + torch.arange(part.first, part.end, device=q.device)  # (sequences, n)
    reach: Tensor | None = None
    if kind.together is not None and spans.together is not None:
        rows = spans.starts[part.sequences].unsqueeze(1) + torch.arange(part.first, part.end, device=q.device)
        reach = spans.together[rows.clamp_max(len(spans.together) - 1)]
    seen = there.unsqueeze(1) & _readable(positions.unsqueeze(-1), places, kind, reach)
    split = q.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4)  # (sequences, kv_heads, groups, n, K)
    scale = 1 / math.sqrt(q.shape[-1]) if kind.scale is None else kind.scale
    if spans.batch_invariant:
        scores = sum_in_order(split.flatten(2, 3).unsqueeze(3) * k.transpose(1, 2).unsqueeze(2)) * scale
    else:
        scores = split.flatten(2, 3) @ k.permute(0, 2, 3, 1) * scale
    if kind.soft_cap is not None:
        scores = kind.soft_cap * torch.tanh(scores / kind.soft_cap)
    scores = scores.unflatten(2, (groups, -1))  # (sequences, kv_heads, groups, n, keys)
    if kind.bias is not None and learned.bias is not None:
        bucket = bucket_of(places - positions.unsqueeze(-1), kind.bias)
        scores = scores + learned.bias.to(scores.dtype)[bucket].unflatten(-1, (-1, groups)).permute(0, 3, 4, 1, 2)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    if spans.batch_invariant:
        out, lse = _weighed_in_order(scores, v.transpose(1, 2), sinks)
        return out.permute(0, 3, 1, 2, 4).flatten(2, 3), lse.permute(0, 3, 1, 2).flatten(2, 3)
    lse = torch.logsumexp(scores, -1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(lse.dtype).view(-1, groups, 1))
    probabilities = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
    out = (probabilities.flatten(2, 3) @ v.transpose(1, 2)).unflatten(2, (groups, -1))
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3), lse.permute(0, 3, 1, 2).flatten(2, 3)


def _weighed_in_order(scores: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """scores (sequences, kv_heads, groups, n, keys), v (sequences, kv_heads, keys, V) -> (sequences, kv_heads, groups,
    n, V) and log-sum-exps (sequences, kv_heads, groups, n)."""
    top = scores.amax(-1)
    if sinks is not None:
        logits = sinks.to(top.dtype).view(-1, scores.shape[2], 1)
        top = torch.maximum(top, logits)
    top = top.masked_fill(top == -torch.inf, 0)
    weights = (scores - top.unsqueeze(-1)).exp()
    total = sum_in_order(weights)
    if sinks is not None:
        total = total + (logits - top).exp()
    sums = sum_in_order(weights.unsqueeze(-2) * v.mT[:, :, None, None])
    divisor = total.masked_fill(total == 0, 1)
    return sums / divisor.unsqueeze(-1), top + total.log()


def _gathered(pages: Tensor, scales: Tensor | None, table: Tensor, there: Tensor, dtype: torch.dtype) -> Tensor:
    """(sequences, keys, kv_heads, ...), zeros where there is nothing to read."""
    found = pages[table].to(dtype)
    if scales is not None:
        found = found * scales[table].to(dtype).unsqueeze(-1)
    return found.flatten(1, 2).masked_fill(~there[..., None, None], 0)


def _readable(positions: Tensor, places: Tensor, kind: AttentionKind, reach: Tensor | None) -> Tensor:
    """Whether a query at each position reads the key at each place, if that is there. reach (sequences, n, 2): the
    positions of those that each reads whatever their order (PagedSpans.together); of these a window hides what is
    before."""
    seen = places <= positions
    if reach is not None:
        seen = seen | ((reach[..., :1] <= places) & (places < reach[..., 1:]))
    if kind.window is not None:
        seen = seen & (positions - places < kind.window)
    if kind.chunk is not None:
        seen = seen & (positions // kind.chunk == places // kind.chunk)
    return seen


# ---- examples ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PagedExample:
    """Sequences for the tests: of each the tokens that are here and those so far.

    page_size  of the pages, which lie in no order
    kind       of the attention
    padding    rows after the last sequence's
    shared     values are the first features of keys
    fp8        pages in FP8
    offset     with stride: only tokens at positions offset, offset + stride ... are remembered
    """

    sequences: tuple[tuple[int, int], ...]
    page_size: int
    kind: AttentionKind = CAUSAL
    padding: int = 0
    shared: bool = False
    fp8: bool = False
    offset: int = 0
    stride: int = 1

    @property
    def tokens(self) -> int:
        """Rows of queries."""
        return sum(here for here, _ in self.sequences) + self.padding

    @property
    def memory(self) -> int:
        """Tokens of all sequences so far."""
        return sum(length for _, length in self.sequences)

    def laid_out(self, device: torch.device) -> tuple[PagedSpans, Tensor]:
        """The spans, and the slot of each token of all sequences: one after another, each from its first. Pages that
        have left the window are in the slots but not in the table."""
        held = self.page_size * self.stride  # tokens in a page, those that are not remembered included
        needed = [-(-length // held) for _, length in self.sequences]
        numbers = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(7)) + 1
        table = torch.full((len(needed), max(needed) + 1), NO_PAGE, dtype=torch.int32)
        slots = []
        for row, pages, (here, length) in zip(table, numbers.split(needed), self.sequences):
            places = torch.arange(length)
            mine = pages[places // held] * self.page_size + places % held // self.stride
            slots.append(mine.where(places % self.stride == self.offset, NO_PAGE))
            first = max(0, length - here - (self.kind.window or length) + 1) // held
            row[first : len(pages)] = pages[first:]
        starts = torch.tensor([0, *(here for here, _ in self.sequences)], dtype=torch.int32).cumsum(0).int()
        lengths = torch.tensor([length for _, length in self.sequences], dtype=torch.int32)
        most_queries, most_keys = (max(numbers) for numbers in zip(*self.sequences))
        starts, lengths, table = (t.to(device) for t in (starts, lengths, table))
        spans = PagedSpans(starts, lengths, table, self.page_size, most_queries, most_keys)
        return replace(spans, offset=self.offset, stride=self.stride), torch.cat(slots).to(device)

    def pages(self, k: Tensor, v: Tensor) -> Pages:
        """Pages for them in which nothing is stored: NaN."""
        count = sum(-(-length // self.page_size) for _, length in self.sequences) + 1
        dtype = FP8 if self.fp8 else k.dtype
        keys, values = (
            torch.full((count, self.page_size, *x.shape[1:]), torch.nan, device=x.device).to(dtype) for x in (k, v)
        )
        scales = [torch.full(keys.shape[:3], torch.nan, device=k.device) for _ in range(2)] if self.fp8 else [None] * 2
        if self.shared:
            return Pages(keys, None, v.shape[-1], scales[0])
        return Pages(keys, values, v.shape[-1], *scales)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernels: Kernels) -> Tensor:
        """q (tokens, heads, K), k and v (memory, kv_heads, ...) -> (tokens, heads, V + 1): outputs and log-sum-exp."""
        q, k, v, sinks = (x.detach() for x in (q, k, v, sinks))
        spans, slots = self.laid_out(q.device)
        pages = self.pages(k, v)
        for part in (slice(0, len(k) // 2), slice(len(k) // 2, None)):
            store_pages(k[part], None if self.shared else v[part], pages, slots[part], kernels)
        given = Learned(sinks) if self.kind.sinks else NOTHING
        spans = replace(spans, batch_invariant=kernels == "invariant")
        out, lse = paged_attention_parts(q, pages, spans, self.kind, given, kernels)
        return torch.cat((out.to(lse.dtype), lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)), -1)


_MIXED = PagedExample(((1, 5), (0, 9), (37, 237), (1, 70), (3, 3), (0, 0)), 16, padding=3)
_DECODE = PagedExample(tuple((1, 900 + i % 120) for i in range(64)), 16, padding=5)
_WINDOWED = replace(_DECODE, page_size=64, kind=AttentionKind(sinks=True, window=128))
_CHUNKS = PagedExample(((1, 700), (600, 1500), (1, 9), (300, 300)), 32, padding=7)
_LATENTS = PagedExample(((1, 700), (40, 900), (1, 1500)), 64, AttentionKind(scale=0.07), shared=True)
_STORED = PagedExample(((1, 40), (3, 9)), 16)
_WINDOW = replace(_MIXED, kind=AttentionKind(window=48), page_size=32)
_TWO = (torch.float64, torch.bfloat16)
_FP8 = (torch.float32, torch.bfloat16)


def _case(
    name: str,
    example: PagedExample,
    heads: tuple[int, int],
    widths: tuple[int, int],
    dtypes: tuple[torch.dtype, ...] | None = None,
) -> Case:
    """heads: of queries and of keys; widths: of keys and of values. Without dtypes: one for GPUs."""
    q, k, v = (example.tokens, heads[0]), (example.memory, heads[1]), (example.memory, heads[1])
    shapes = ((*q, widths[0]), (*k, widths[0]), (*v, widths[1]), (heads[0],))
    return Case(name, example.attend, shapes, dtypes=dtypes, large=dtypes is None)


def _with(kind: AttentionKind, page_size: int = 16) -> PagedExample:
    return replace(_MIXED, kind=kind, page_size=page_size)


PAGED_ATTENTION = Op(
    "paged_attention",
    "attention over keys and values in pages",
    __name__,
    ("attend_pages",),
    (
        triton(
            "phalanx.ops.attention.paged_kernel",
            invariant=True,
            features=PAGED - {"bias", "together"},
            fits=lambda pages: pages.keys.dtype != torch.float64,
        ),
        invariant(__name__, "any"),
    ),
    cases=(
        _case("pieces of prompts and single tokens", _MIXED, (4, 2), (16, 16), (*_TWO, *_FP8[:1], torch.float16)),
        _case("one kv head, window", _WINDOW, (8, 1), (24, 16), _TWO),
        _case("sinks, chunks", _with(AttentionKind(sinks=True, chunk=64)), (3, 3), (16, 10), _TWO),
        _case("soft cap, scale", _with(AttentionKind(soft_cap=2.0, scale=0.4), 64), (6, 2), (16, 16), _TWO),
        _case("latents", replace(_MIXED, shared=True), (16, 1), (48, 32), _TWO),
        _case("FP8", replace(_MIXED, fp8=True), (4, 2), (16, 16), _FP8),
        _case("latents in FP8", replace(_MIXED, shared=True, fp8=True), (16, 1), (48, 32), _FP8[1:]),
        _case("every third key", replace(_MIXED, offset=1, stride=3), (4, 2), (16, 16), _TWO),
        _case("every second key of a window", replace(_WINDOW, offset=1, stride=2), (8, 1), (24, 16), _TWO),
        _case("keys split, sinks", PagedExample(((1, 300),), 128, AttentionKind(sinks=True)), (2, 1), (16, 16), _TWO),
        _case("64 single tokens", _DECODE, (32, 8), (128, 128)),
        _case("a single token", PagedExample(((1, 1024),), 16), (32, 8), (128, 128)),
        _case("large pieces", _CHUNKS, (32, 8), (128, 128)),
        _case("window and sinks of gpt-oss", _WINDOWED, (64, 8), (64, 64)),
        _case("latents of DeepSeek-V3", _LATENTS, (128, 1), (576, 512)),
        _case("64 single tokens, FP8", replace(_DECODE, fp8=True), (32, 8), (128, 128)),
    ),
)
STORE_PAGES = Op(
    "store_pages",
    "keys and values written into pages",
    __name__,
    ("write_pages",),
    (triton("phalanx.ops.attention.store_kernel", invariant=True), invariant(__name__, "any")),
    cases=(
        _case("pages", _STORED, (2, 2), (16, 10), _TWO),
        _case("FP8 pages", replace(_STORED, fp8=True), (3, 3), (16, 10), _FP8),
        _case("FP8 latents", replace(_STORED, fp8=True, shared=True), (2, 1), (48, 32), _FP8[1:]),
    ),
)

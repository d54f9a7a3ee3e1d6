"""Attention over pages by Triton kernels: long keys split over programs, query heads of a kv head packed into a tile.

A program has a tile of rows: the query heads that share a kv head, of a few queries of one sequence that follow each
other. It reads keys in tiles by the table of pages and keeps the running softmax of Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018. Where rows are few, several programs share the keys of a row, and a second
launch joins their parts (Dao et al., "Flash-Decoding for long-context inference", 2023). Scores are kept times log2(e).

Two launches where a batch mixes single tokens with pieces of prompts: small tiles for the former, which memory limits,
and large ones for the latter. Grids come from what the host knows (rows, sequences, bounds), so that they can be
captured in a CUDA graph; programs without work return at once.

Batch-invariant (spans.batch_invariant): rows are grouped and keys are split by their positions in the sequence alone,
tiles are the same whatever the batch, and parts are always joined by the second launch, in one order.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.ops.attention.kind import AttentionKind, Learned
from phalanx.ops.attention.paged import FP8, Pages
from phalanx.ops.kernel_tools import num_programs, triton_wide, wide_of
from phalanx.sequence.paged import NO_PAGE, PagedSpans

LOG2E = math.log2(math.e)
_LN2 = tl.constexpr(math.log(2))
_NO_PAGE = tl.constexpr(NO_PAGE)
NUMBERS = ("tokens", "S", "P", "blocks", "per", "parts", "few")
"""Arguments of which no value is worth a kernel of its own."""
MOST_PARTS = 64
"""Programs that share the keys of a row, at most."""
PROGRAMS = 4
"""Programs for each processor that a launch is split into, where it has keys enough."""
INVARIANT_KEYS, INVARIANT_PARTS = 512, 16
"""Batch-invariant: keys of a part, at the least, and parts of a row, at most (two of them for a window's ends)."""
ALL, FEW, MANY = range(3)
_FEW, _MANY = tl.constexpr(FEW), tl.constexpr(MANY)


@dataclass(frozen=True)
class PagedTiles:
    """What a program computes: rows of queries and heads, keys at a time; by so many warps, loads so many tiles
    early."""

    rows: int
    keys: int
    warps: int
    stages: int


@triton.jit
def _dot(a, b, acc, INTERPRETED: tl.constexpr, WIDE: tl.constexpr):
    """a b + acc. The interpreter takes bf16 for integers."""
    if INTERPRETED:
        return tl.dot(a.to(WIDE), b.to(WIDE), acc, input_precision="ieee", out_dtype=WIDE)
    else:
        return tl.dot(a, b, acc, input_precision="ieee", out_dtype=WIDE)


@triton.jit
def _widened(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """FP8 as what it is multiplied with, which has all of its numbers. The interpreter knows no way to fp64."""
    if INTERPRETED:
        return x.to(tl.float32).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def _block_of(at, starts, S, per, Q: tl.constexpr, PAD: tl.constexpr, SEARCH: tl.constexpr):
    """Of program `at` along the blocks: its sequence, and the how manieth block of that. Each sequence has `per`
    blocks; with SEARCH about as many as it needs: sequence s begins with block (starts[s] + s PAD) / Q."""
    if SEARCH:
        low, high = 0, S
        while low < high:
            middle = (low + high) // 2
            if (tl.load(starts + middle) + middle * PAD) // Q <= at:
                low = middle + 1
            else:
                high = middle
        sequence = low - 1
        return sequence, at - (tl.load(starts + sequence) + sequence * PAD) // Q
    else:
        return at // per, at % per


@triton.jit
def _keys_before(position, OFFSET: tl.constexpr, STRIDE: tl.constexpr):
    """Keys in the pages of a sequence before a position: the first is at OFFSET, each next one STRIDE further on."""
    if STRIDE > 1:
        return (position + (STRIDE - 1 - OFFSET)) // STRIDE
    else:
        return position


@triton.jit
def _keys_of_block(
    first,
    length,
    parts,
    room,
    Q: tl.constexpr,
    N: tl.constexpr,
    OFFSET: tl.constexpr,
    STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    INVARIANT: tl.constexpr,
    INVARIANT_KEYS: tl.constexpr,
    INVARIANT_PARTS: tl.constexpr,
):
    """Of a block of Q queries from position `first` on: the first key that is read (of a tile), the one past the last,
    where the first part begins, how many keys a part has, and how many parts there are."""
    low = 0
    if WINDOW > 0:
        low = tl.maximum(low, first - WINDOW + 1)
    if CHUNK > 0:
        low = tl.maximum(low, first // CHUNK * CHUNK)
    low = _keys_before(low, OFFSET, STRIDE) // N * N
    high = tl.minimum(_keys_before(tl.minimum(first + Q, length), OFFSET, STRIDE), room)
    if INVARIANT:
        reach = first
        if WINDOW > 0:
            reach = tl.minimum(reach, WINDOW)
        if CHUNK > 0:
            reach = tl.minimum(reach, CHUNK)
        split = INVARIANT_KEYS
        for _ in tl.static_range(20):
            split = tl.where(split * (INVARIANT_PARTS - 2) <= reach, split * 2, split)
        origin = low // split * split
    else:
        split = tl.maximum(tl.cdiv(tl.cdiv(high - low, N), parts), 1) * N
        origin = low
    return low, high, origin, split, tl.cdiv(high - origin, split)


@triton.jit
def _read_keys(
    q,
    q_rest,
    keys,
    values,
    key_scales,
    value_scales,
    pages,
    kv_head,
    position,
    begin,
    end,
    K: tl.constexpr,
    V: tl.constexpr,
    KV: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K_MAIN: tl.constexpr,
    K_REST: tl.constexpr,
    V_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    OFFSET: tl.constexpr,
    STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    SHARED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Keys begin .. end of a sequence whose pages are at `pages`, read by rows of these positions: the largest score
    of each row, the sum of exp2(score - largest), and the sum of values so weighed. begin: of a tile."""
    top = tl.full((M,), float("-inf"), WIDE)
    total = tl.zeros((M,), WIDE)
    acc = tl.zeros((M, V_BLOCK), WIDE)
    i, i_value = tl.arange(0, K_MAIN), tl.arange(0, V_BLOCK)
    for at in range(begin, end, N):
        key = at + tl.arange(0, N)
        if PAGE % N == 0:
            page = tl.load(pages + at // PAGE)
            there = (key < end) & (page != _NO_PAGE)
            slot = page.to(tl.int64) * PAGE + at % PAGE + tl.arange(0, N)
        else:
            page = tl.load(pages + key // PAGE, mask=key < end, other=_NO_PAGE)
            there = (key < end) & (page != _NO_PAGE)
            slot = page.to(tl.int64) * PAGE + key % PAGE
        row = slot * KV + kv_head
        k = tl.load(keys + row[:, None] * K + i[None, :], mask=there[:, None] & (i < K)[None, :], other=0.0)
        if key_scales is not None:
            k = _widened(k, q.dtype, INTERPRETED)
        scores = _dot(q, k.T, tl.zeros((M, N), WIDE), INTERPRETED, WIDE)
        if K_REST > 0:
            i_rest = K_MAIN + tl.arange(0, K_REST)
            here = there[:, None] & (i_rest < K)[None, :]
            rest = tl.load(keys + row[:, None] * K + i_rest[None, :], mask=here, other=0.0)
            if key_scales is not None:
                rest = _widened(rest, q.dtype, INTERPRETED)
            scores = _dot(q_rest, rest.T, scores, INTERPRETED, WIDE)
        if key_scales is not None:
            key_scale = tl.load(key_scales + row, mask=there, other=0.0).to(WIDE)
            scores = scores * key_scale[None, :]
        if CAP > 0:
            scores = (CAP * 1.4426950408889634) * (1 - 2 / (tl.exp2(scores * (SCALE * 2 / CAP)) + 1))
        else:
            scores = scores * SCALE
        key = key * STRIDE + OFFSET
        seen = there[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (position[:, None] - key[None, :] < WINDOW)
        if CHUNK > 0:
            seen = seen & (position[:, None] // CHUNK == key[None, :] // CHUNK)
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(scores - finite[:, None])
        before = tl.exp2(top - finite)
        total = total * before + tl.sum(p, 1)
        acc = acc * before[:, None]
        top = new
        if SHARED and V == K_MAIN:
            v = k
            if key_scales is not None:
                p = p * key_scale[None, :]
        elif SHARED:
            v = tl.load(
                keys + row[:, None] * K + i_value[None, :], mask=there[:, None] & (i_value < V)[None, :], other=0.0
            )
            if key_scales is not None:
                v = _widened(v, q.dtype, INTERPRETED)
                p = p * key_scale[None, :]
        else:
            v = tl.load(
                values + row[:, None] * V + i_value[None, :], mask=there[:, None] & (i_value < V)[None, :], other=0.0
            )
            if value_scales is not None:
                v = _widened(v, q.dtype, INTERPRETED)
                p = p * tl.load(value_scales + row, mask=there, other=0.0).to(WIDE)[None, :]
        if INTERPRETED:
            acc = _dot(p, v, acc, INTERPRETED, WIDE)
        else:
            acc = _dot(p.to(q.dtype), v, acc, INTERPRETED, WIDE)
    return top, total, acc


@triton.jit
def _with_sink(top, total, logit, WIDE: tl.constexpr):
    """The largest score and the sum of a row with a logit that reads nothing; what the sums so far are multiplied
    by."""
    sink = logit.to(WIDE) * 1.4426950408889634
    new = tl.maximum(top, sink)
    return new, total * tl.exp2(top - new) + tl.exp2(sink - new), tl.exp2(top - new)


@triton.jit
def _first_of(first, block, Q: tl.constexpr, INVARIANT: tl.constexpr):
    """The position that a block of a sequence whose queries begin at `first` begins with."""
    if INVARIANT:
        return first // Q * Q + block * Q
    else:
        return first + block * Q


@triton.jit
def _not_here(count, few, position, length, WHICH: tl.constexpr):
    """Whether another launch has the sequence, or there is no query from a position on."""
    nothing = (count <= 0) | (position >= length)
    if WHICH == _FEW:
        nothing = nothing | (count > few)
    if WHICH == _MANY:
        nothing = nothing | (count <= few)
    return nothing


@triton.jit(do_not_specialize=NUMBERS)
def _attend(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    sinks,
    out,
    lse,
    part_out,
    part_sums,
    starts,
    lengths,
    table,
    tokens,
    S,
    P,
    blocks,
    per,
    parts,
    few,
    q_tok,
    q_head,
    WHICH: tl.constexpr,
    CLEAR: tl.constexpr,
    DIRECT: tl.constexpr,
    SEARCH: tl.constexpr,
    PAD: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KV: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K_MAIN: tl.constexpr,
    K_REST: tl.constexpr,
    V_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    OFFSET: tl.constexpr,
    STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    SHARED: tl.constexpr,
    INVARIANT: tl.constexpr,
    INVARIANT_KEYS: tl.constexpr,
    INVARIANT_PARTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """GROUP_BLOCK of the GROUP query heads that read a kv head, Q queries of a sequence; every so-manieth part of
    their keys. CLEAR: programs past `blocks` clear rows that are no sequence's."""
    groups: tl.constexpr = (GROUP + GROUP_BLOCK - 1) // GROUP_BLOCK
    kv_head = tl.program_id(0) // groups
    r = tl.arange(0, M)
    in_group = tl.program_id(0) % groups * GROUP_BLOCK + r % GROUP_BLOCK
    head = kv_head * GROUP + in_group
    is_row = (r // GROUP_BLOCK < Q) & (in_group < GROUP)
    i_value = tl.arange(0, V_BLOCK)
    at = tl.program_id(1)
    if CLEAR:
        if at >= blocks:
            token = (at - blocks) * Q + r // GROUP_BLOCK
            empty = is_row & (token < tokens) & (token >= tl.load(starts + S)) & (tl.program_id(2) == 0)
            place = token.to(tl.int64) * HEADS + head
            nothing = tl.zeros((M, V_BLOCK), out.dtype.element_ty)
            tl.store(out + place[:, None] * V + i_value[None, :], nothing, mask=empty[:, None] & (i_value < V)[None, :])
            tl.store(lse + place, tl.full((M,), float("-inf"), WIDE), mask=empty)
            return
    sequence, block = _block_of(at, starts, S, per, Q, PAD, SEARCH)
    start, length = tl.load(starts + sequence), tl.load(lengths + sequence)
    count = tl.load(starts + sequence + 1) - start
    first = length - count
    begin = _first_of(first, block, Q, INVARIANT)
    if _not_here(count, few, begin, length, WHICH):
        return
    position = begin + r // GROUP_BLOCK
    here = is_row & (position >= first) & (position < length)
    token = (start + position - first).to(tl.int64)
    low, high, origin, split, num = _keys_of_block(
        begin, length, parts, P * PAGE, Q, N, OFFSET, STRIDE, WINDOW, CHUNK, INVARIANT, INVARIANT_KEYS, INVARIANT_PARTS
    )
    i = tl.arange(0, K_MAIN)
    row = q + token[:, None] * q_tok + head[:, None] * q_head
    queries = tl.load(row + i[None, :], mask=here[:, None] & (i < K)[None, :], other=0.0)
    queries_rest = queries
    if K_REST > 0:
        i_rest = K_MAIN + tl.arange(0, K_REST)
        queries_rest = tl.load(row + i_rest[None, :], mask=here[:, None] & (i_rest < K)[None, :], other=0.0)
    pages = table + sequence.to(tl.int64) * P
    if DIRECT:
        top, total, acc = _read_keys(
            queries,
            queries_rest,
            keys,
            values,
            key_scales,
            value_scales,
            pages,
            kv_head,
            position,
            low,
            high,
            K,
            V,
            KV,
            M,
            N,
            K_MAIN,
            K_REST,
            V_BLOCK,
            PAGE,
            OFFSET,
            STRIDE,
            WINDOW,
            CHUNK,
            SCALE,
            CAP,
            SHARED,
            INTERPRETED,
            WIDE,
        )
        if sinks is not None:
            logit = tl.load(sinks + head, mask=in_group < GROUP, other=0.0)
            top, total, factor = _with_sink(top, total, logit, WIDE)
            acc = acc * factor[:, None]
        divisor = tl.where(total > 0, total, 1.0)
        made = (acc / divisor[:, None]).to(out.dtype.element_ty)
        place = token * HEADS + head
        tl.store(out + place[:, None] * V + i_value[None, :], made, mask=here[:, None] & (i_value < V)[None, :])
        tl.store(lse + place, (top + tl.log2(divisor)) * _LN2, mask=here)
    else:
        mine = at.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        for part in range(tl.program_id(2), num, tl.num_programs(2)):
            from_key, to_key = tl.maximum(origin + part * split, low), tl.minimum(origin + (part + 1) * split, high)
            top, total, acc = _read_keys(
                queries,
                queries_rest,
                keys,
                values,
                key_scales,
                value_scales,
                pages,
                kv_head,
                position,
                from_key,
                to_key,
                K,
                V,
                KV,
                M,
                N,
                K_MAIN,
                K_REST,
                V_BLOCK,
                PAGE,
                OFFSET,
                STRIDE,
                WINDOW,
                CHUNK,
                SCALE,
                CAP,
                SHARED,
                INTERPRETED,
                WIDE,
            )
            place = (mine * parts + part) * M + r
            tl.store(part_out + place[:, None] * V + i_value[None, :], acc, mask=here[:, None] & (i_value < V)[None, :])
            tl.store(part_sums + place * 2, top, mask=here)
            tl.store(part_sums + place * 2 + 1, total, mask=here)


@triton.jit(do_not_specialize=NUMBERS)
def _join_parts(
    sinks,
    out,
    lse,
    part_out,
    part_sums,
    starts,
    lengths,
    S,
    P,
    per,
    parts,
    few,
    WHICH: tl.constexpr,
    SEARCH: tl.constexpr,
    PAD: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    Q: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
    V_BLOCK: tl.constexpr,
    V_BLOCKS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    OFFSET: tl.constexpr,
    STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    INVARIANT: tl.constexpr,
    INVARIANT_KEYS: tl.constexpr,
    INVARIANT_PARTS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The parts of one row, V_BLOCK of its values."""
    groups: tl.constexpr = (GROUP + GROUP_BLOCK - 1) // GROUP_BLOCK
    head, at = tl.program_id(0), tl.program_id(1)
    query, value_block = tl.program_id(2) // V_BLOCKS, tl.program_id(2) % V_BLOCKS
    sequence, block = _block_of(at, starts, S, per, Q, PAD, SEARCH)
    start, length = tl.load(starts + sequence), tl.load(lengths + sequence)
    count = tl.load(starts + sequence + 1) - start
    first = length - count
    begin = _first_of(first, block, Q, INVARIANT)
    query = query + tl.maximum(first - begin, 0)
    position = begin + query
    if _not_here(count, few, position, length, WHICH) | (query >= Q):
        return
    _, _, _, _, num = _keys_of_block(
        begin, length, parts, P * PAGE, Q, N, OFFSET, STRIDE, WINDOW, CHUNK, INVARIANT, INVARIANT_KEYS, INVARIANT_PARTS
    )
    in_group = head % GROUP
    program = at.to(tl.int64) * (HEADS // GROUP * groups) + head // GROUP * groups + in_group // GROUP_BLOCK
    part = tl.arange(0, PARTS_BLOCK)
    mine = (program * parts + part) * M + query * GROUP_BLOCK + in_group % GROUP_BLOCK
    i = value_block * V_BLOCK + tl.arange(0, V_BLOCK)
    is_part = part < num
    top = tl.load(part_sums + mine * 2, mask=is_part, other=float("-inf"))
    total = tl.load(part_sums + mine * 2 + 1, mask=is_part, other=0.0)
    acc = tl.load(part_out + mine[:, None] * V + i[None, :], mask=is_part[:, None] & (i < V)[None, :], other=0.0)
    largest = tl.max(top, 0)
    weight = tl.exp2(top - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(total * weight, 0)
    joint = tl.sum(acc * weight[:, None], 0)
    if sinks is not None:
        largest, total, factor = _with_sink(largest, total, tl.load(sinks + head), WIDE)
        joint = joint * factor
    divisor = tl.where(total > 0, total, 1.0)
    place = (start + position - first).to(tl.int64) * HEADS + head
    tl.store(out + place * V + i, (joint / divisor).to(out.dtype.element_ty), mask=i < V)
    if value_block == 0:
        tl.store(lse + place, (largest + tl.log2(divisor)) * _LN2)


def attend_pages(
    q: Tensor,
    pages: Pages,
    spans: PagedSpans,
    kind: AttentionKind,
    learned: Learned,
    tiles: tuple[PagedTiles, PagedTiles] | None = None,
) -> tuple[Tensor, Tensor]:
    """As ops.attention.paged has it. tiles: of few queries and of many; None: `tiles_of`."""
    if pages.keys.dtype not in (q.dtype, FP8):
        raise ValueError(f"queries of {q.dtype} cannot read pages of {pages.keys.dtype}: the same, or {FP8}")
    if not all(t.is_contiguous() for t in (*pages.tensors, spans.starts, spans.lengths, spans.table)):
        raise ValueError(f"pages and tables must be contiguous; strides of keys are {pages.keys.stride()}")
    q = q if q.stride(-1) == 1 else q.contiguous()
    reading = _Reading(q, pages, spans, kind, learned.sinks)
    small, large = tiles or tiles_of(reading.group, q.shape[2], q.dtype.itemsize > 2)
    few = reading.queries(small)
    if spans.batch_invariant or spans.most_queries <= few:
        reading.launch(small, ALL, few)
    else:
        reading.launch(small, FEW, few)
        reading.launch(large, MANY, few)
    return reading.out, reading.lse


def tiles_of(group: int, width: int, wide: bool) -> tuple[PagedTiles, PagedTiles]:
    """Tiles for few queries, which memory limits, and for many. group: query heads of a kv head; width: of a key;
    wide: in fp32."""
    rows = max(16, min(32 if wide else 64, triton.next_power_of_2(group)))
    if width > 256:  # latents: rows share what fills a processor's memory
        tiles = PagedTiles(rows, 16 if wide else 32, 4 if rows < 64 else 8, 2)
        return tiles, tiles
    if wide:
        return PagedTiles(rows, 16, 4, 2), PagedTiles(32, 32, 8, 2)
    if width > 128:
        return PagedTiles(rows, 32, 4, 3), PagedTiles(64, 32, 4, 2)
    return PagedTiles(rows, 64, 4, 3), PagedTiles(128, 64, 8, 3)


class _Reading:
    """One call of attend_pages: what its launches share."""

    def __init__(self, q: Tensor, pages: Pages, spans: PagedSpans, kind: AttentionKind, sinks: Tensor | None):
        self.q, self.pages, self.spans, self.sinks = q, pages, spans, sinks
        self.tokens, self.heads, width = q.shape
        self.group = self.heads // pages.kv_heads
        self.out = q.new_empty(self.tokens, self.heads, pages.width)
        self.lse = q.new_empty(self.tokens, self.heads, dtype=wide_of(q.dtype))
        self.cleared = False
        self.reach = min(triton.cdiv(spans.most_keys, spans.stride), spans.table.shape[1] * spans.page_size)
        for most in (kind.window, kind.chunk):
            self.reach = self.reach if most is None else min(self.reach, triton.cdiv(most, spans.stride))
        self.both: dict[str, Any] = dict(
            HEADS=self.heads,
            GROUP=self.group,
            V=pages.width,
            PAGE=spans.page_size,
            OFFSET=spans.offset,
            STRIDE=spans.stride,
            WINDOW=kind.window or 0,
            CHUNK=kind.chunk or 0,
            INVARIANT=spans.batch_invariant,
            INVARIANT_KEYS=INVARIANT_KEYS,
            INVARIANT_PARTS=INVARIANT_PARTS,
            WIDE=triton_wide(q.dtype),
        )
        main, rest = key_blocks(width)
        scale = 1 / math.sqrt(width) if kind.scale is None else kind.scale
        self.reading: dict[str, Any] = dict(
            K=width,
            KV=pages.kv_heads,
            K_MAIN=main,
            K_REST=rest,
            V_BLOCK=max(16, triton.next_power_of_2(pages.width)),
            SCALE=scale * LOG2E,
            CAP=kind.soft_cap or 0.0,
            SHARED=pages.values is None,
            INTERPRETED=not q.is_cuda,
        )

    def queries(self, tiles: PagedTiles) -> int:
        """Of a block."""
        return max(1, tiles.rows // self.group)

    def launch(self, tiles: PagedTiles, which: int, few: int) -> None:
        """Attention of sequences of at most `few` queries, of those of more, or of all."""
        q, pages, spans = self.q, self.pages, self.spans
        queries, group_block = self.queries(tiles), min(self.group, tiles.rows)
        most_queries = min(few, spans.most_queries) if which == FEW else spans.most_queries
        pad = queries - 1 if not spans.batch_invariant else 2 * queries - 2
        per = (most_queries + pad) // queries
        blocks, search = spans.num_sequences * per, False
        if per > 1 and (self.tokens + spans.num_sequences * pad) // queries < blocks:
            blocks, search = (self.tokens + spans.num_sequences * pad) // queries, True
        heads = pages.kv_heads * triton.cdiv(self.group, group_block)
        parts, programs = self.parts(tiles, heads * blocks, queries)
        direct = parts == 1 and not spans.batch_invariant
        clear = 0 if self.cleared else triton.cdiv(self.tokens, queries)
        self.cleared = True
        room = 0 if direct else heads * blocks * parts * tiles.rows
        part_out, part_sums = (self.lse.new_empty(room, width) for width in (pages.width, 2))
        block = dict(
            WHICH=which, SEARCH=search, PAD=pad, GROUP_BLOCK=group_block, Q=queries, M=tiles.rows, N=tiles.keys
        )
        stored = (pages.keys, pages.values, pages.key_scales, pages.value_scales)
        made = (self.sinks, self.out, self.lse, part_out, part_sums, spans.starts, spans.lengths)
        numbers = (spans.num_sequences, spans.table.shape[1])
        if heads * (blocks + clear):
            _attend[(heads, blocks + clear, programs)](
                q,
                *stored,
                *made,
                spans.table,
                self.tokens,
                *numbers,
                blocks,
                per,
                parts,
                few,
                *q.stride()[:2],
                CLEAR=clear > 0,
                DIRECT=direct,
                **block,
                **self.both,
                **self.reading,
                num_warps=tiles.warps,
                num_stages=tiles.stages,
            )
        if not direct and heads * blocks:
            width = min(128, self.reading["V_BLOCK"])
            value_blocks = triton.cdiv(pages.width, width)
            most = INVARIANT_PARTS if spans.batch_invariant else triton.next_power_of_2(parts)
            _join_parts[(self.heads, blocks, min(queries, most_queries) * value_blocks)](
                *made,
                *numbers,
                per,
                parts,
                few,
                V_BLOCK=width,
                V_BLOCKS=value_blocks,
                PARTS_BLOCK=most,
                **block,
                **self.both,
                num_warps=4,
            )

    def parts(self, tiles: PagedTiles, blocks: int, queries: int) -> tuple[int, int]:
        """Parts of the keys of a block, at the most, and programs that share them, from what the host knows: as many
        as fill the device."""
        keys = self.reach + queries
        wanted = triton.cdiv(num_programs(self.q, PROGRAMS), max(1, blocks))
        if self.spans.batch_invariant:
            most = min(INVARIANT_PARTS, triton.cdiv(keys, INVARIANT_KEYS) + 1)
            return most, max(1, min(wanted, most))
        parts = max(1, min(wanted, MOST_PARTS, triton.cdiv(keys, tiles.keys)))
        return parts, parts


def key_blocks(width: int) -> tuple[int, int]:
    """A width as one or two powers of two that tiles can have, whichever is less: 576 as 512 and 64."""
    whole = max(16, triton.next_power_of_2(width))
    main = whole // 2
    rest = max(16, triton.next_power_of_2(max(1, width - main)))
    return (whole, 0) if main < 16 or main + rest >= whole else (main, rest)

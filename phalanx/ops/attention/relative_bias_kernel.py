"""Flash attention with a relative position bias (ops.attention.relative_bias), inside documents, windows and chunks, in
any direction: neither scores, nor the bias, nor its gradient are ever made whole.

A bias depends on the distance of key and query alone, and from `max_distance` on it is the same. So tiles of scores are
of two kinds. In far ones all pairs have one number, which a program reads once. In near ones, a band along the
diagonal, each pair reads that of its distance. Backward, after Dao, "FlashAttention-2", 2023:

    _flash_bias_keys     a block of keys: dk, dv
    _flash_bias_queries  a block of queries: dq; and the sums of the scores' gradients in far tiles
    _flash_bias_near     some of the tiles equally far from the diagonal: their scores' gradients are added up element
                         by element, since the same elements have the same distance in all of them; then by bucket

The table's gradient is thus summed in one order. Which keys a query reads is one range (ops.attention.reach), and first
and last grow with the query: so the queries that read a block of keys are a range too. Scores count in powers of two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from phalanx.base.dataclass import dataclass
from phalanx.ops.attention.kind import AttentionKind, Learned, RelativeBias, by_documents
from phalanx.ops.attention.reach import Reach, reach_of
from phalanx.ops.attention.relative_bias import bucket_of
from phalanx.ops.dense.grads import add_grad
from phalanx.ops.kernel_tools import triton_wide, wide_of
from phalanx.sequence.batch import Batch, PerBatch

LOG2_E = 1.4426950408889634
QUERIES, KEYS = 128, 64  # of a tile in forward
TILE = 64  # queries and keys of a tile in backward
FEW, MANY = {"num_warps": 4, "num_stages": 2}, {"num_warps": 8, "num_stages": 2}  # with few registers spilled
TOGETHER = 16  # near tiles that a program adds up
SPANS = PerBatch["BiasSpans"]()


@triton.jit
def _tile(x, row, length, tok, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """(rows, BLOCK) of x, zeros beyond its rows and features."""
    feature = tl.arange(0, BLOCK)
    seen = (row < length)[:, None] & (feature < WIDTH)[None, :]
    return tl.load(x + row.to(tl.int64)[:, None] * tok + feature[None, :], mask=seen, other=0.0)


@triton.jit
def _store_tile(x, value, row, length, tok, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    feature = tl.arange(0, BLOCK)
    seen = (row < length)[:, None] & (feature < WIDTH)[None, :]
    at = x + row.to(tl.int64)[:, None] * tok + feature[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=seen)


@triton.jit
def _range(first, stop, row, length):
    """The keys that queries read; those beyond the last read none."""
    low = tl.load(first + row, mask=row < length, other=2147483647)
    return low, tl.load(stop + row, mask=row < length, other=0)


@triton.jit
def _near_bias(each, distance, FAR: tl.constexpr):
    """Of pairs with these distances."""
    return tl.load(each + tl.minimum(tl.maximum(distance, -FAR), FAR) + FAR)


@triton.jit
def _dot(a, b, INTERPRETED: tl.constexpr, WIDE: tl.constexpr):
    """The interpreter multiplies no bf16."""
    if INTERPRETED:
        return tl.dot(a.to(WIDE), b.to(WIDE), input_precision="ieee", out_dtype=WIDE)
    else:
        return tl.dot(a, b, input_precision="ieee", out_dtype=WIDE)


@triton.jit
def _read_keys(
    acc,
    most,
    total,
    mine,
    row,
    low,
    high,
    k,
    v,
    each,
    far,
    begin,
    end,
    length,
    k_tok,
    v_tok,
    scale,
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Online softmax over the keys begin .. end - 1."""
    for at in range(begin, end, KEYS):
        column = at + tl.arange(0, KEYS)
        keys = _tile(k, column, length, k_tok, WIDTH, WIDTH_BLOCK)
        scores = _dot(mine, tl.trans(keys), INTERPRETED, WIDE) * scale
        if NEAR:
            scores += _near_bias(each, column[None, :] - row[:, None], FAR)
        else:
            scores += far
        seen = (low[:, None] <= column[None, :]) & (column[None, :] < high[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 1))
        against = tl.where(now == float("-inf"), 0.0, now)  # nothing read so far
        probs = tl.exp2(scores - against[:, None])
        kept = tl.exp2(most - against)
        total = total * kept + tl.sum(probs, 1)
        values = _tile(v, column, length, v_tok, VALUE, VALUE_BLOCK)
        more = _dot(probs.to(values.dtype), values, INTERPRETED, WIDE)
        acc = acc * kept[:, None] + more
        most = now
    return acc, most, total


@triton.jit
def _flash_bias_forward(
    q,
    k,
    v,
    each,
    first,
    stop,
    out,
    lse,
    heads,
    group,
    length,
    scale,
    q_seq,
    q_head,
    q_tok,
    k_seq,
    k_head,
    k_tok,
    v_seq,
    v_head,
    v_tok,
    o_seq,
    o_head,
    o_tok,
    FAR: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """lse (sequences * heads, length), in powers of two. each (heads, 2 FAR + 1): the bias by distance, the same."""
    block, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sequence, head = which // heads, which % heads
    row = block * QUERIES + tl.arange(0, QUERIES)
    low, high = _range(first + sequence * length, stop + sequence * length, row, length)
    mine = _tile(q + sequence * q_seq + head * q_head, row, length, q_tok, WIDTH, WIDTH_BLOCK)
    k += sequence * k_seq + (head // group) * k_head
    v += sequence * v_seq + (head // group) * v_head
    each += head * (2 * FAR + 1)
    before, after = tl.load(each), tl.load(each + 2 * FAR)
    begin, end = tl.min(low, 0) // KEYS * KEYS, tl.max(high, 0)
    near = tl.minimum(tl.maximum(tl.maximum(block * QUERIES - FAR + 1, 0) // KEYS * KEYS, begin), end)
    past = tl.minimum(tl.maximum(tl.cdiv(block * QUERIES + QUERIES - 1 + FAR, KEYS) * KEYS, near), end)
    most, total = tl.full((QUERIES,), float("-inf"), WIDE), tl.zeros((QUERIES,), WIDE)
    acc = tl.zeros((QUERIES, VALUE_BLOCK), WIDE)
    fars, borders = (before, before, after), (begin, near, past, end)
    for part in tl.static_range(3):
        acc, most, total = _read_keys(
            acc,
            most,
            total,
            mine,
            row,
            low,
            high,
            k,
            v,
            each,
            fars[part],
            borders[part],
            borders[part + 1],
            length,
            k_tok,
            v_tok,
            scale,
            part == 1,
            FAR,
            WIDTH,
            WIDTH_BLOCK,
            VALUE,
            VALUE_BLOCK,
            KEYS,
            INTERPRETED,
            WIDE,
        )
    total = tl.where(row < length, total, 1.0)
    most = tl.where(row < length, most, 0.0)
    _store_tile(out + sequence * o_seq + head * o_head, acc / total[:, None], row, length, o_tok, VALUE, VALUE_BLOCK)
    tl.store(lse + which * length + row, most + tl.log2(total), mask=row < length)


@triton.jit
def _flash_bias_dots(
    dout,
    out,
    found,
    heads,
    length,
    o_seq,
    o_head,
    o_tok,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """found (sequences * heads, length): the product of each query's output with its gradient."""
    which = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    base = which // heads * o_seq + which % heads * o_head
    a = _tile(dout + base, row, length, o_tok, VALUE, VALUE_BLOCK).to(WIDE)
    b = _tile(out + base, row, length, o_tok, VALUE, VALUE_BLOCK).to(WIDE)
    tl.store(found + which * length + row, tl.sum(a * b, 1), mask=row < length)


@triton.jit
def _probs(mine, keys, bias, low, high, column, lse, scale, INTERPRETED: tl.constexpr, WIDE: tl.constexpr):
    """(queries, keys), made anew."""
    scores = _dot(mine, tl.trans(keys), INTERPRETED, WIDE) * scale + bias
    seen = (low[:, None] <= column[None, :]) & (column[None, :] < high[:, None])
    return tl.where(seen, tl.exp2(scores - lse[:, None]), 0.0)


@triton.jit
def _queries_over(
    dq,
    sums,
    mine,
    dout,
    row,
    low,
    high,
    lse,
    dots,
    k,
    v,
    each,
    far,
    begin,
    end,
    length,
    k_tok,
    v_tok,
    scale,
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """dq, and (queries,) the sums of the scores' gradients in far tiles, over the keys begin .. end - 1."""
    for at in range(begin, end, TILE):
        column = at + tl.arange(0, TILE)
        keys = _tile(k, column, length, k_tok, WIDTH, WIDTH_BLOCK)
        values = _tile(v, column, length, v_tok, VALUE, VALUE_BLOCK)
        if NEAR:
            bias = _near_bias(each, column[None, :] - row[:, None], FAR)
        else:
            bias = far
        probs = _probs(mine, keys, bias, low, high, column, lse, scale, INTERPRETED, WIDE)
        dscores = probs * (_dot(dout, tl.trans(values), INTERPRETED, WIDE) - dots[:, None])
        if not NEAR:
            sums += tl.sum(dscores, 1)
        dq += _dot(dscores.to(keys.dtype), keys, INTERPRETED, WIDE)
    return dq, sums


@triton.jit
def _flash_bias_queries(
    q,
    k,
    v,
    dout,
    each,
    first,
    stop,
    lse,
    dots,
    dq,
    far_sums,
    heads,
    group,
    length,
    scale,
    plain_scale,
    q_seq,
    q_head,
    q_tok,
    k_seq,
    k_head,
    k_tok,
    v_seq,
    v_head,
    v_tok,
    o_seq,
    o_head,
    o_tok,
    d_seq,
    d_head,
    d_tok,
    FAR: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """far_sums (2, sequences * heads, blocks): of far tiles before and after a block of queries."""
    block, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sequence, head = which // heads, which % heads
    row = block * TILE + tl.arange(0, TILE)
    low, high = _range(first + sequence * length, stop + sequence * length, row, length)
    mine = _tile(q + sequence * q_seq + head * q_head, row, length, q_tok, WIDTH, WIDTH_BLOCK)
    given = _tile(dout + sequence * o_seq + head * o_head, row, length, o_tok, VALUE, VALUE_BLOCK)
    of_row = which * length + row
    norm = tl.load(lse + of_row, mask=row < length, other=0.0)
    dot = tl.load(dots + of_row, mask=row < length, other=0.0)
    k += sequence * k_seq + (head // group) * k_head
    v += sequence * v_seq + (head // group) * v_head
    each += head * (2 * FAR + 1)
    before, after = tl.load(each), tl.load(each + 2 * FAR)
    begin, end = tl.min(low, 0) // TILE * TILE, tl.max(high, 0)
    near = tl.minimum(tl.maximum(tl.maximum(block * TILE - FAR + 1, 0) // TILE * TILE, begin), end)
    past = tl.minimum(tl.maximum(tl.cdiv(block * TILE + TILE - 1 + FAR, TILE) * TILE, near), end)
    found, sums = tl.zeros((TILE, WIDTH_BLOCK), WIDE), tl.zeros((TILE,), WIDE)
    at = which * tl.num_programs(0) + block
    fars, borders = (before, before, after), (begin, near, past, end)
    for part in tl.static_range(3):
        found, sums = _queries_over(
            found,
            sums,
            mine,
            given,
            row,
            low,
            high,
            norm,
            dot,
            k,
            v,
            each,
            fars[part],
            borders[part],
            borders[part + 1],
            length,
            k_tok,
            v_tok,
            scale,
            part == 1,
            FAR,
            WIDTH,
            WIDTH_BLOCK,
            VALUE,
            VALUE_BLOCK,
            TILE,
            INTERPRETED,
            WIDE,
        )
        if part == 0:
            tl.store(far_sums + at, tl.sum(sums, 0))
            sums = tl.zeros((TILE,), WIDE)
    last = tl.num_programs(1).to(tl.int64) * tl.num_programs(0)
    tl.store(far_sums + last + at, tl.sum(sums, 0))
    _store_tile(dq + sequence * d_seq + head * d_head, found * plain_scale, row, length, d_tok, WIDTH, WIDTH_BLOCK)


@triton.jit
def _keys_over(
    dk,
    dv,
    keys,
    values,
    column,
    q,
    dout,
    first,
    stop,
    lse,
    dots,
    each,
    far,
    begin,
    end,
    length,
    q_tok,
    o_tok,
    scale,
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """dk (without the scale) and dv over the queries begin .. end - 1."""
    for at in range(begin, end, TILE):
        row = at + tl.arange(0, TILE)
        mine = _tile(q, row, length, q_tok, WIDTH, WIDTH_BLOCK)
        given = _tile(dout, row, length, o_tok, VALUE, VALUE_BLOCK)
        low, high = _range(first, stop, row, length)
        norm = tl.load(lse + row, mask=row < length, other=0.0)
        dot = tl.load(dots + row, mask=row < length, other=0.0)
        # keys by queries from the start: probabilities transposed in registers would be the left operand of a matmul,
        # which some versions of Triton miscompile (flash-linear-attention #640)
        scores = _dot(keys, tl.trans(mine), INTERPRETED, WIDE) * scale
        if NEAR:
            scores += _near_bias(each, column[:, None] - row[None, :], FAR)
        else:
            scores += far
        seen = (low[None, :] <= column[:, None]) & (column[:, None] < high[None, :])
        probs = tl.where(seen, tl.exp2(scores - norm[None, :]), 0.0)
        dv += _dot(probs.to(given.dtype), given, INTERPRETED, WIDE)
        dprobs = _dot(values, tl.trans(given), INTERPRETED, WIDE)
        dscores = probs * (dprobs - dot[None, :])
        dk += _dot(dscores.to(mine.dtype), mine, INTERPRETED, WIDE)
    return dk, dv


@triton.jit
def _flash_bias_keys(
    q,
    k,
    v,
    dout,
    each,
    first,
    stop,
    begins,
    ends,
    lse,
    dots,
    dk,
    dv,
    heads,
    group,
    length,
    scale,
    plain_scale,
    q_seq,
    q_head,
    q_tok,
    k_seq,
    k_head,
    k_tok,
    v_seq,
    v_head,
    v_tok,
    o_seq,
    o_head,
    o_tok,
    dk_seq,
    dk_head,
    dk_tok,
    dv_seq,
    dv_head,
    dv_tok,
    FAR: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """begins, ends (sequences, blocks of keys): the queries that read some of a block."""
    block, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kv_heads = heads // group
    sequence, kv_head = which // kv_heads, which % kv_heads
    column = block * TILE + tl.arange(0, TILE)
    keys = _tile(k + sequence * k_seq + kv_head * k_head, column, length, k_tok, WIDTH, WIDTH_BLOCK)
    values = _tile(v + sequence * v_seq + kv_head * v_head, column, length, v_tok, VALUE, VALUE_BLOCK)
    first += sequence * length
    stop += sequence * length
    begin = tl.load(begins + sequence * tl.num_programs(0) + block) // TILE * TILE
    end = tl.load(ends + sequence * tl.num_programs(0) + block)
    near = tl.minimum(tl.maximum(tl.maximum(block * TILE - FAR + 1, 0) // TILE * TILE, begin), end)
    past = tl.minimum(tl.maximum(tl.cdiv(block * TILE + TILE - 1 + FAR, TILE) * TILE, near), end)
    found_k, found_v = tl.zeros((TILE, WIDTH_BLOCK), WIDE), tl.zeros((TILE, VALUE_BLOCK), WIDE)
    for of_group in range(group):
        head = kv_head * group + of_group
        mine, given = q + sequence * q_seq + head * q_head, dout + sequence * o_seq + head * o_head
        of_rows = (sequence * heads + head) * length
        bias = each + head * (2 * FAR + 1)
        before, after = tl.load(bias), tl.load(bias + 2 * FAR)
        fars, borders = (after, after, before), (begin, near, past, end)
        for part in tl.static_range(3):
            found_k, found_v = _keys_over(
                found_k,
                found_v,
                keys,
                values,
                column,
                mine,
                given,
                first,
                stop,
                lse + of_rows,
                dots + of_rows,
                bias,
                fars[part],
                borders[part],
                borders[part + 1],
                length,
                q_tok,
                o_tok,
                scale,
                part == 1,
                FAR,
                WIDTH,
                WIDTH_BLOCK,
                VALUE,
                VALUE_BLOCK,
                TILE,
                INTERPRETED,
                WIDE,
            )
    dk += sequence * dk_seq + kv_head * dk_head
    dv += sequence * dv_seq + kv_head * dv_head
    _store_tile(dk, found_k * plain_scale, column, length, dk_tok, WIDTH, WIDTH_BLOCK)
    _store_tile(dv, found_v, column, length, dv_tok, VALUE, VALUE_BLOCK)


@triton.jit
def _flash_bias_near(
    q,
    k,
    v,
    dout,
    each,
    buckets,
    first,
    stop,
    lse,
    dots,
    sums,
    heads,
    group,
    sequences,
    length,
    scale,
    least,
    count,
    q_seq,
    q_head,
    q_tok,
    k_seq,
    k_head,
    k_tok,
    v_seq,
    v_head,
    v_tok,
    o_seq,
    o_head,
    o_tok,
    FAR: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """sums (offsets, heads, parts, count): of the scores' gradients of near tiles, by bucket. A program has the tiles
    `offset` + least tiles after the diagonal. buckets (2 FAR + 1,): by distance."""
    offset, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    blocks = tl.cdiv(length, TILE)
    inside = tl.arange(0, TILE)
    each += head * (2 * FAR + 1)
    distance = (offset + least) * TILE + inside[None, :] - inside[:, None]
    distance = tl.minimum(tl.maximum(distance, -FAR), FAR) + FAR
    bias, bucket = tl.load(each + distance), tl.load(buckets + distance)
    found = tl.zeros((TILE, TILE), WIDE)
    for number in range(part, sequences * blocks, tl.num_programs(2)):
        block, sequence = number % blocks, (number // blocks).to(tl.int64)
        other = block + offset + least
        if (other >= 0) & (other < blocks):
            row, column = block * TILE + inside, other * TILE + inside
            low, high = _range(first + sequence * length, stop + sequence * length, row, length)
            if (tl.min(low, 0) < other * TILE + TILE) & (tl.max(high, 0) > other * TILE):
                mine = _tile(q + sequence * q_seq + head * q_head, row, length, q_tok, WIDTH, WIDTH_BLOCK)
                given = _tile(dout + sequence * o_seq + head * o_head, row, length, o_tok, VALUE, VALUE_BLOCK)
                theirs = k + sequence * k_seq + (head // group) * k_head
                keys = _tile(theirs, column, length, k_tok, WIDTH, WIDTH_BLOCK)
                theirs = v + sequence * v_seq + (head // group) * v_head
                values = _tile(theirs, column, length, v_tok, VALUE, VALUE_BLOCK)
                of_row = (sequence * heads + head) * length + row
                norm = tl.load(lse + of_row, mask=row < length, other=0.0)
                dot = tl.load(dots + of_row, mask=row < length, other=0.0)
                probs = _probs(mine, keys, bias, low, high, column, norm, scale, INTERPRETED, WIDE)
                found += probs * (_dot(given, tl.trans(values), INTERPRETED, WIDE) - dot[:, None])
    sums += ((offset * heads + head) * tl.num_programs(2) + part).to(tl.int64) * count
    for number in range(count):
        here = tl.where(bucket == number, found, 0.0)
        tl.store(sums + number, tl.sum(tl.sum(here, 1), 0))


@dataclass(frozen=True)
class BiasSpans:
    """Which queries read which keys: the keys of each query, (sequences, S) int32, and the queries of each block of
    keys, (sequences, blocks) int32. buckets (2 max_distance + 1,) int32: by distance."""

    first: Tensor
    stop: Tensor
    begins: Tensor
    ends: Tensor
    buckets: Tensor


def _spans(batch: Batch, kind: AttentionKind, bias: RelativeBias) -> BiasSpans:
    reach, length = reach_of(batch, kind), batch.seq_length
    first, stop = (x.expand(batch.num_sequences, length).contiguous() for x in Reach(*reach))
    at = torch.arange(0, length, TILE, dtype=torch.int32, device=first.device).expand(len(first), -1).contiguous()
    begins = torch.searchsorted(stop, at, right=True, out_int32=True)
    ends = torch.searchsorted(first, at + TILE, out_int32=True)
    distances = torch.arange(-bias.max_distance, bias.max_distance + 1, device=first.device)
    return BiasSpans(first, stop, begins, ends, bucket_of(distances, bias).int())


class FlashBias:
    """Attention with a relative position bias, of whole sequences."""

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, batch: Batch, kind: AttentionKind, learned: Learned) -> Tensor:
        batch, kind = by_documents(batch, kind)
        bias = kind.bias
        if bias is None or learned.bias is None:
            raise TypeError("attention with a relative position bias has a table")
        hiding = (kind.window, kind.direction, kind.together, bias)
        spans = SPANS.of(batch, lambda: _spans(batch, kind, bias), *hiding)
        scale = q.shape[-1] ** -0.5 if kind.scale is None else kind.scale
        out: Tensor = _FlashBias.apply(q, k, v, learned.bias, spans, bias, scale)
        return out.reshape(batch.num_tokens, -1)


def _strides(*tensors: Tensor) -> list[int]:
    """Of sequence, head and token of tensors (sequences, heads, tokens, features)."""
    return [x.stride(d) for x in tensors for d in (0, 1, 2)]


def _sizes(q: Tensor, v: Tensor, bias: RelativeBias) -> dict[str, object]:
    width, value = q.shape[-1], v.shape[-1]
    blocks = {"WIDTH_BLOCK": width, "VALUE_BLOCK": value}
    blocks = {name: max(16, triton.next_power_of_2(size)) for name, size in blocks.items()}
    how = {"INTERPRETED": not q.is_cuda, "WIDE": triton_wide(q.dtype)}
    return {"FAR": bias.max_distance, "WIDTH": width, "VALUE": value, **blocks, **how}


class _FlashBias(Function):
    """q (B, heads, S, K), k and v (B, kv_heads, S, ...), table (buckets, heads) -> (B, S, heads, V)."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:  # type: ignore[override]
        *tensors, table, spans, bias, scale = given
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
        count, heads, length, _ = q.shape
        wide = wide_of(q.dtype)
        each = (table.to(wide)[spans.buckets.long()] * LOG2_E).mT.contiguous()
        out = q.new_empty(count, length, heads, v.shape[-1])
        lse = torch.empty(count * heads, length, dtype=wide, device=q.device)
        _flash_bias_forward[(triton.cdiv(length, QUERIES), count * heads)](
            q,
            k,
            v,
            each,
            spans.first,
            spans.stop,
            out,
            lse,
            heads,
            heads // k.shape[1],
            length,
            scale * LOG2_E,
            *_strides(q, k, v, out.transpose(1, 2)),
            **_sizes(q, v, bias),
            QUERIES=QUERIES,
            KEYS=KEYS,
            **MANY,
        )
        ctx.save_for_backward(q, k, v, out, lse, each)
        ctx.table, ctx.spans, ctx.bias, ctx.scale = table, spans, bias, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse, each = ctx.saved_tensors
        spans, scale, dout = ctx.spans, ctx.scale, dout.contiguous().transpose(1, 2)
        count, heads, length, _ = q.shape
        kv_heads, blocks, sizes = k.shape[1], triton.cdiv(length, TILE), _sizes(q, v, ctx.bias)
        strides, fixed = _strides(q, k, v, dout), {**sizes, "TILE": TILE}
        dots = torch.empty_like(lse)
        value = {name: sizes[name] for name in ("VALUE", "VALUE_BLOCK", "WIDE")}
        _flash_bias_dots[(blocks, count * heads)](
            dout, out, dots, heads, length, *_strides(dout), **value, ROWS=TILE, num_warps=4
        )
        dq, dk, dv = (x.new_empty(count, length, x.shape[1], x.shape[-1]).transpose(1, 2) for x in (q, k, v))
        numbers = (heads, heads // kv_heads, length, scale * LOG2_E)
        read = (q, k, v, dout, each, spans.first, spans.stop)
        _flash_bias_keys[(blocks, count * kv_heads)](
            *read,
            spans.begins,
            spans.ends,
            lse,
            dots,
            dk,
            dv,
            *numbers,
            scale,
            *strides,
            *_strides(dk, dv),
            **fixed,
            **FEW,
        )
        far = torch.empty(2, count, heads, blocks, dtype=lse.dtype, device=q.device)
        _flash_bias_queries[(blocks, count * heads)](
            *read, lse, dots, dq, far, *numbers, scale, *strides, *_strides(dq), **fixed, **FEW
        )
        dtable = None
        if ctx.needs_input_grad[3]:
            how = (numbers, strides, fixed)
            dtable = add_grad(ctx.table, _table_grad(ctx.bias, spans, read, (lse, dots, far), how))
        return dq, dk, dv, dtable, None, None, None


def _table_grad(
    bias: RelativeBias, spans: BiasSpans, read: tuple[Tensor, ...], sums: tuple[Tensor, ...], how: tuple[Any, ...]
) -> Tensor:
    """(buckets, heads), of near and far tiles. sums: log-sum-exps, products of outputs with their gradients, and what
    `_flash_bias_queries` found in far tiles."""
    *tensors, first, stop = read
    lse, dots, far = sums
    numbers, strides, fixed = how
    count, heads, length, _ = tensors[0].shape
    last = triton.cdiv(length, TILE) - 1
    least = max((1 - bias.max_distance) // TILE, -last)
    past = min(triton.cdiv(TILE - 1 + bias.max_distance, TILE), last + 1)
    parts = triton.cdiv(count * (last + 1), TOGETHER)
    found = lse.new_empty(past - least, heads, parts, bias.buckets)
    _flash_bias_near[tuple(found.shape[:3])](
        *tensors,
        spans.buckets,
        first,
        stop,
        lse,
        dots,
        found,
        *numbers[:2],
        count,
        *numbers[2:],
        least,
        bias.buckets,
        *strides,
        **fixed,
        **MANY,
    )
    grad, (before, after) = found.sum((0, 2)).mT.contiguous(), far.sum((1, 3))
    side = bias.buckets // 2 if bias.bidirectional else bias.buckets
    grad[side - 1] += before
    grad[2 * side - 1 if bias.bidirectional else 0] += after
    return grad

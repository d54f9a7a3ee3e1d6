"""The gated delta rule in chunks. Only states go from chunk to chunk; all else is computed by all chunks at once.

    forward    _sums (decays by feature)   _prepare: T and P of chunks   _pass: states before chunks, u   _outputs
    backward   the first two again   _pass_back: gradients of states after chunks, dx   _grads

Names as in the reference: with S the state before a chunk, k~, q~ keys and queries that read it, k^ keys as they are
left at the end,

    T = (1 + A)^-1     x = beta (v - k~ S)     u = T x     y = q~ S + P u     S' = passed S + k^^T u
    du = P^T dy + k^ dS'     dx = T^T du     dS = passed dS' + q~^T dy - k~^T (beta dx)
    dP = dy u^T     dA = - dx u^T     dq~ = dy S^T     dk~ = - (beta dx) S^T     dk^ = u dS'^T     dv = beta dx

With one decay of each head, lengths of keys and what is left of them are factors of whole tokens: they multiply rows
and columns of matmuls of q and k as they are stored. With decays by feature, products of tokens t and s are taken with
what is left of both since a token between them, so that no exponent is above 0: pairs in different halves of a chunk
since the end of the first half, pairs in different quarters of a half likewise, down to neighbours (LEVELS matmuls).

States are kept transposed, (V, K): then every matmul of the passes has its left operand in registers, from the matmul
before it. T is computed in fp32 by substitution in blocks of 16 tokens, which are then joined two by two (in TF32 where
T is rounded to 16 bits afterwards).
Powers of A, by which it can be had in fewer steps, grow like binomials where keys are alike.

The least that moves, for 32,768 tokens, 16 heads of keys and 32 of values of 128 in bf16: forward reads q, k, v and
writes y (0.8 GB), T and P (0.3 GB, read once or twice), u and the states (0.8 GB, written and read): 2.7 GB; backward
4.5 GB. Matmuls: 0.19 TFLOP forward, 0.5 backward. On an H200 (4.8 TB/s; 0.99 PFLOP/s in bf16) bytes take 0.56 and 0.94
ms, matmuls 0.19 and 0.5 ms. What both do not contain is the latency of the passes: 512 chunks, one after another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.delta.delta import BLOCK, CHUNK, EPS, DeltaGrads, DeltaInputs, DeltaTiles
from phalanx.ops.kernel_tools import triton_wide, wide_of

LEAST = 16  # rows and columns of a matmul's operands
LEVELS = CHUNK.bit_length() - 1
REGISTERS = 128  # of a thread that computes T: what waits is the substitution, and four programs fit into a processor


@triton.jit
def _documents(numbers, row, start, at, here, L, DOCUMENTS: tl.constexpr):
    """The documents of tokens `at` of a row and of the state before the chunk, counted from that of its last token, and
    1 past the end of the row."""
    own = tl.where(here, 0, 1)
    carried = tl.full((), 0, tl.int32)
    if DOCUMENTS:
        last = tl.load(numbers + row * L + tl.minimum(start + at.shape[0], L) - 1)
        own = (tl.load(numbers + row * L + at, mask=here, other=last + 1) - last).to(tl.int32)
        carried = (tl.load(numbers + row * L + tl.maximum(start - 1, 0)) - last).to(tl.int32)
    return own, carried


@triton.jit
def _tile(x, row, head, start, i, cols, here, inside, x_row, x_tok, WIDTH: tl.constexpr):
    """(tokens, features) of a head, of the tokens i after `start`. What all of them have in common is added to the
    address first, so that a thread has few long numbers."""
    first = x + row * x_row + _long(start) * x_tok + head * WIDTH
    return tl.load(first + (i[:, None] * x_tok + cols[None, :]), mask=here[:, None] & inside[None, :], other=0.0)


@triton.jit
def _across(x, row, head, start, i, cols, here, inside, x_row, x_tok, WIDTH: tl.constexpr):
    """(features, tokens) of a head."""
    first = x + row * x_row + _long(start) * x_tok + head * WIDTH
    return tl.load(first + (i[None, :] * x_tok + cols[:, None]), mask=here[None, :] & inside[:, None], other=0.0)


@triton.jit
def _long(x):
    return tl.full((), 0, tl.int64) + x


@triton.jit
def _dot(a, b, ELEMENT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """In the dtype of values, added up in the wide one."""
    return tl.dot(a.to(ELEMENT), b.to(ELEMENT), out_dtype=WIDE, input_precision=PRECISION).to(WIDE)


@triton.jit
def _wide_dot(a, b, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """All in the wide dtype."""
    return tl.dot(a, b, out_dtype=WIDE, input_precision=PRECISION).to(WIDE)


@triton.jit
def _inverse(a, C: tl.constexpr, B: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + a)^-1 of a strictly lower triangular a (C, C), C four times B."""
    N: tl.constexpr = C // B
    block, other = tl.arange(0, N), tl.arange(0, N)
    same = (block[:, None] == other[None, :])[:, None, :, None]
    i, j = tl.arange(0, B)[None, :, None], tl.arange(0, B)[None, None, :]
    own = tl.sum(tl.where(same, tl.reshape(a, (N, B, N, B)), 0.0), 2)
    made = tl.where(i == j, 1.0, own * 0)  # so its threads are those of a matmul's result: a warp has a block
    for number in range(1, B):
        weights = tl.sum(tl.where(i == number, own, 0.0), 1)
        line = tl.sum(tl.expand_dims(weights, 2) * made, 1)
        made -= tl.where(i == number, tl.expand_dims(line, 1), 0.0)
    whole = tl.reshape(tl.where(same, tl.expand_dims(made, 2), 0.0), (C, C))
    rows, cols = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    below = tl.where((rows // (2 * B) == cols // (2 * B)) & (rows // B > cols // B), a, 0.0)
    whole -= _wide_dot(whole, _wide_dot(below, whole, WIDE, PRECISION), WIDE, PRECISION)
    below = tl.where(rows // (2 * B) > cols // (2 * B), a, 0.0)
    whole -= _wide_dot(whole, _wide_dot(below, whole, WIDE, PRECISION), WIDE, PRECISION)
    return whole


@triton.jit
def _per_length(x, NORMALIZE: tl.constexpr, EPSILON: tl.constexpr):
    """(tokens,): what a token's features are multiplied with to have length 1."""
    found = tl.sum(x * 0, 1) + 1.0
    if NORMALIZE:
        found = 1 / tl.sqrt(tl.sum(x * x, 1) + EPSILON)
    return found


@triton.jit
def _level(sums, row, head, start, i, n, inside, own_sums, number, L, H, K: tl.constexpr, C: tl.constexpr):
    """Of the pairs of tokens in different halves of the blocks of a level: what is left of each by feature, (C, K),
    since the last token of the first half or until then; the pairs (C, C); and which tokens are in a second half."""
    half = C >> (number + 1)
    border = i // (2 * half) * (2 * half) + half - 1
    since = _tile(sums, row, head, start, border, n, start + border < L, inside, _long(L) * H * K, H * K, K)
    second = (i // half) % 2 == 1
    between = tl.where(second[:, None], own_sums - since, since - own_sums)
    left = tl.exp(tl.minimum(between, 0.0))
    block = i // (2 * half)
    pairs = (block[:, None] == block[None, :]) & second[:, None] & (second[None, :] == 0)
    return left, pairs, second


@triton.jit
def _sums(
    q,
    k,
    decay,
    numbers,
    sums,
    reading,
    writing,
    asking,
    passed_out,
    scale,
    L,
    q_row,
    q_tok,
    k_row,
    k_tok,
    H: tl.constexpr,
    K: tl.constexpr,
    EACH: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPSILON: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    ELEMENT: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
):
    """With decays by feature: their sums; keys that read the state before the chunk, keys as they are left at its end,
    and queries that read the state (R, L, H, K); and what is left of the state (chunks, R, H, K)."""
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = chunk * C
    i, n = tl.arange(0, C), tl.arange(0, BK)
    at, inside = start + i, n < K
    here = at < L
    own, carried = _documents(numbers, row, start, at, here, L, DOCUMENTS)
    seen = (i[None, :] <= i[:, None]) & (own[None, :] == own[:, None])
    logs = _tile(decay, row, head, start, i, n, here, inside, _long(L) * H * K, H * K, K).to(WIDE)
    e = _wide_dot(tl.where(seen, 1.0, tl.zeros((C, C), WIDE)), logs, WIDE, PRECISION)
    at_end = own == 0
    end = tl.sum(tl.where(at_end[:, None], logs, 0.0), 0)
    reach = tl.where((own == carried)[:, None], tl.exp(e), 0.0)
    left = tl.where(at_end[:, None], tl.exp(tl.minimum(end[None, :] - e, 0.0)), 0.0)
    keys = _tile(k, row, head // EACH, start, i, n, here, inside, k_row, k_tok, K).to(WIDE)
    queries = _tile(q, row, head // EACH, start, i, n, here, inside, q_row, q_tok, K).to(WIDE)
    keys *= _per_length(keys, NORMALIZE, EPSILON)[:, None]
    queries *= (_per_length(queries, NORMALIZE, EPSILON) * scale)[:, None]
    corner = ((row * L + start) * H + head) * K
    to = i[:, None] * (H * K) + n[None, :]
    mask = here[:, None] & inside[None, :]
    tl.store(sums + corner + to, e, mask=mask)
    tl.store(reading + corner + to, (keys * reach).to(ELEMENT), mask=mask)
    tl.store(writing + corner + to, (keys * left).to(ELEMENT), mask=mask)
    tl.store(asking + corner + to, (queries * reach).to(ELEMENT), mask=mask)
    place = (chunk * tl.num_programs(2) + row) * H + head
    tl.store(passed_out + place * K + n, tl.where(carried == 0, tl.exp(end), 0.0), mask=inside)


@triton.jit
def _prepare(
    q,
    k,
    decay,
    beta,
    numbers,
    sums,
    inverse,
    weights,
    read,
    write,
    ask,
    passed_out,
    scale,
    L,
    q_row,
    q_tok,
    k_row,
    k_tok,
    BY_FEATURE: tl.constexpr,
    DEPTH: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    EACH: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPSILON: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    ELEMENT: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    JOIN: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
    BK: tl.constexpr,
):
    """inverse, weights (chunks, R, H, C, C): T and P. With one decay of each head too: `sums` of decays, and what keys
    that read or are left, and queries, are multiplied with (R, L, H); what is left of the state (chunks, R, H)."""
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = chunk * C
    i, n = tl.arange(0, C), tl.arange(0, BK)
    at, inside = start + i, n < K
    here = at < L
    own, carried = _documents(numbers, row, start, at, here, L, DOCUMENTS)
    seen = (i[None, :] <= i[:, None]) & (own[None, :] == own[:, None])
    keys = _tile(k, row, head // EACH, start, i, n, here, inside, k_row, k_tok, K)
    queries = _tile(q, row, head // EACH, start, i, n, here, inside, q_row, q_tok, K)
    of_key = _per_length(keys.to(WIDE), NORMALIZE, EPSILON)
    of_query = _per_length(queries.to(WIDE), NORMALIZE, EPSILON) * scale
    token = (row * L + at) * H + head
    strength = tl.load(beta + token, mask=here, other=0.0).to(WIDE)
    place = (chunk * tl.num_programs(2) + row) * H + head
    if BY_FEATURE:
        e = _tile(sums, row, head, start, i, n, here, inside, _long(L) * H * K, H * K, K)
        wide_keys, wide_queries = keys.to(WIDE), queries.to(WIDE)
        of_pairs = tl.zeros((C, C), WIDE)
        read_pairs = tl.where(i[:, None] == i[None, :], tl.sum(wide_keys * wide_queries, 1)[:, None], 0.0)
        for number in range(0, DEPTH):
            left, pairs, _ = _level(sums, row, head, start, i, n, inside, e, number, L, H, K, C)
            far = (wide_keys * left).to(ELEMENT)
            found = _dot(far, tl.trans(far), ELEMENT, WIDE, PRECISION)
            of_pairs = tl.where(pairs, found, of_pairs)
            found = _dot(wide_queries * left, tl.trans(far), ELEMENT, WIDE, PRECISION)
            read_pairs = tl.where(pairs, found, read_pairs)
    else:
        logs = tl.load(decay + token, mask=here, other=0.0).to(WIDE)
        e = tl.sum(tl.where(seen, logs[None, :], 0.0), 1)
        at_end = own == 0
        end = tl.sum(tl.where(at_end, logs, 0.0), 0)
        reach = tl.where(own == carried, tl.exp(e), 0.0)
        left = tl.where(at_end, tl.exp(tl.minimum(end - e, 0.0)), 0.0)
        tl.store(sums + token, e, mask=here)
        tl.store(read + token, reach * of_key, mask=here)
        tl.store(write + token, left * of_key, mask=here)
        tl.store(ask + token, reach * of_query, mask=here)
        tl.store(passed_out + place, tl.where(carried == 0, tl.exp(end), 0.0))
        between = tl.exp(tl.where(seen, e[:, None] - e[None, :], 0.0))
        of_pairs = _dot(keys, tl.trans(keys), ELEMENT, WIDE, PRECISION) * between
        read_pairs = _dot(queries, tl.trans(keys), ELEMENT, WIDE, PRECISION) * between
    read_pairs = tl.where(seen, read_pairs * of_query[:, None] * of_key[None, :], 0.0)
    before = seen & (i[None, :] < i[:, None])
    a = tl.where(before, of_pairs * (strength * of_key)[:, None] * of_key[None, :], 0.0)
    to = place * C * C + (i[:, None] * C + i[None, :])
    tl.store(weights + to, read_pairs.to(ELEMENT))
    tl.store(inverse + to, _inverse(a, C, B, WIDE, JOIN).to(ELEMENT))


@triton.jit
def _pass(
    initial,
    k,
    reading,
    v,
    beta,
    inverse,
    read,
    write,
    passed,
    states,
    u_out,
    final,
    L,
    chunks,
    k_row,
    k_tok,
    v_row,
    v_tok,
    INITIAL: tl.constexpr,
    BY_FEATURE: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    EACH: tl.constexpr,
    ELEMENT: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """states (chunks, R, H, V, K): before chunks. u_out (R, L, H, V). final, initial (R, H, K, V). k: with decays by
    feature those that are left at the end, of each value head."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    i, n, m = tl.arange(0, C), tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    inside, wanted = n < K, m < V
    whole = wanted[:, None] & inside[None, :]
    of_row = (row * H + head) * K * V + (n[None, :] * V + m[:, None])
    state = tl.zeros((BV, BK), WIDE)
    if INITIAL:
        state = tl.load(initial + of_row, mask=whole, other=0.0).to(WIDE)
    key_head = head // EACH
    if BY_FEATURE:
        key_head = head
    for chunk in range(0, chunks):
        start = chunk * C
        at = start + i
        here = at < L
        place = (chunk * tl.num_programs(2) + row) * H + head
        token = (row * L + at) * H + head
        keys = _tile(k, row, key_head, start, i, n, here, inside, k_row, k_tok, K)
        t = tl.load(inverse + place * C * C + (i[:, None] * C + i[None, :]))
        values = _across(v, row, head, start, i, m, here, wanted, v_row, v_tok, V).to(WIDE)
        strength = tl.load(beta + token, mask=here, other=0.0).to(WIDE)
        tl.store(states + place * V * K + (m[:, None] * K + n[None, :]), state.to(ELEMENT), mask=whole)
        if BY_FEATURE:
            readers = _tile(reading, row, head, start, i, n, here, inside, k_row, k_tok, K)
            held = _dot(state, tl.trans(readers), ELEMENT, WIDE, PRECISION)
        else:
            held = _dot(state, tl.trans(keys), ELEMENT, WIDE, PRECISION)
            held *= tl.load(read + token, mask=here, other=0.0)[None, :]
        x = (values - held) * strength[None, :]
        u = _dot(x, tl.trans(t), ELEMENT, WIDE, PRECISION)
        corner = ((row * L + start) * H + head) * V
        to = i[None, :] * (H * V) + m[:, None]
        tl.store(u_out + corner + to, u.to(ELEMENT), mask=here[None, :] & wanted[:, None])
        if BY_FEATURE:
            state *= tl.load(passed + place * K + n, mask=inside, other=0.0)[None, :]
        else:
            state *= tl.load(passed + place)
            u *= tl.load(write + token, mask=here, other=0.0)[None, :]
        state += _dot(u, keys, ELEMENT, WIDE, PRECISION)
    tl.store(final + of_row, state, mask=whole)


@triton.jit
def _outputs(
    q,
    ask,
    weights,
    states,
    u_in,
    y,
    L,
    chunks,
    q_row,
    q_tok,
    BY_FEATURE: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    EACH: tl.constexpr,
    ELEMENT: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """q: with decays by feature the queries that read the state, of each value head."""
    chunk, head, row = tl.program_id(0) % chunks, tl.program_id(1), tl.program_id(2).to(tl.int64)
    i, n, m = tl.arange(0, C), tl.arange(0, BK), tl.program_id(0) // chunks * BV + tl.arange(0, BV)
    start, inside, wanted = chunk * C, n < K, m < V
    at = start + i
    here = at < L
    place = (chunk * tl.num_programs(2) + row) * H + head
    whole = wanted[:, None] & inside[None, :]
    state = tl.load(states + place * V * K + (m[:, None] * K + n[None, :]), mask=whole, other=0.0)
    if BY_FEATURE:
        queries = _tile(q, row, head, start, i, n, here, inside, q_row, q_tok, K)
        out = _dot(queries, tl.trans(state), ELEMENT, WIDE, PRECISION)
    else:
        queries = _tile(q, row, head // EACH, start, i, n, here, inside, q_row, q_tok, K)
        out = _dot(queries, tl.trans(state), ELEMENT, WIDE, PRECISION)
        out *= tl.load(ask + (row * L + at) * H + head, mask=here, other=0.0)[:, None]
    p = tl.load(weights + place * C * C + (i[:, None] * C + i[None, :]))
    u = _tile(u_in, row, head, start, i, m, here, wanted, _long(L) * H * V, H * V, V)
    out += _dot(p, u, ELEMENT, WIDE, PRECISION)
    corner = ((row * L + start) * H + head) * V
    to = i[:, None] * (H * V) + m[None, :]
    tl.store(y + corner + to, out.to(ELEMENT), mask=here[:, None] & wanted[None, :])


@triton.jit
def _pass_back(
    dfinal,
    dy,
    q,
    k,
    reading,
    beta,
    inverse,
    weights,
    read,
    write,
    ask,
    passed,
    after,
    dx_out,
    dinitial,
    L,
    chunks,
    q_row,
    q_tok,
    k_row,
    k_tok,
    FINAL: tl.constexpr,
    BY_FEATURE: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    EACH: tl.constexpr,
    ELEMENT: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """after (chunks, R, H, V, K): gradients of states after chunks. dx_out (R, L, H, V). dinitial, dfinal (R, H, K,
    V). q, k: with decays by feature queries that read the state and keys as they are left, of each value head."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    i, n, m = tl.arange(0, C), tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    inside, wanted = n < K, m < V
    whole = wanted[:, None] & inside[None, :]
    of_row = (row * H + head) * K * V + (n[None, :] * V + m[:, None])
    grad = tl.zeros((BV, BK), WIDE)
    if FINAL:
        grad = tl.load(dfinal + of_row, mask=whole, other=0.0).to(WIDE)
    key_head = head // EACH
    if BY_FEATURE:
        key_head = head
    for back in range(0, chunks):
        chunk = chunks - 1 - back
        start = chunk * C
        at = start + i
        here = at < L
        place = (chunk * tl.num_programs(2) + row) * H + head
        token = (row * L + at) * H + head
        matrix = place * C * C + (i[:, None] * C + i[None, :])
        keys = _tile(k, row, key_head, start, i, n, here, inside, k_row, k_tok, K)
        queries = _tile(q, row, key_head, start, i, n, here, inside, q_row, q_tok, K)
        t, p = tl.load(inverse + matrix), tl.load(weights + matrix)
        above = _across(dy, row, head, start, i, m, here, wanted, _long(L) * H * V, H * V, V)
        strength = tl.load(beta + token, mask=here, other=0.0).to(WIDE)
        tl.store(after + place * V * K + (m[:, None] * K + n[None, :]), grad.to(ELEMENT), mask=whole)
        du = _dot(grad, tl.trans(keys), ELEMENT, WIDE, PRECISION)
        if not BY_FEATURE:
            du *= tl.load(write + token, mask=here, other=0.0)[None, :]
        du += _dot(above, p, ELEMENT, WIDE, PRECISION)
        dx = _dot(du, t, ELEMENT, WIDE, PRECISION)
        corner = ((row * L + start) * H + head) * V
        to = i[None, :] * (H * V) + m[:, None]
        tl.store(dx_out + corner + to, dx.to(ELEMENT), mask=here[None, :] & wanted[:, None])
        dx *= strength[None, :]
        if BY_FEATURE:
            readers = _tile(reading, row, head, start, i, n, here, inside, k_row, k_tok, K)
            grad *= tl.load(passed + place * K + n, mask=inside, other=0.0)[None, :]
            grad += _dot(above, queries, ELEMENT, WIDE, PRECISION)
            grad += _dot(-dx, readers, ELEMENT, WIDE, PRECISION)
        else:
            grad *= tl.load(passed + place)
            asked = above.to(WIDE) * tl.load(ask + token, mask=here, other=0.0)[None, :]
            grad += _dot(asked, queries, ELEMENT, WIDE, PRECISION)
            dx *= tl.load(read + token, mask=here, other=0.0)[None, :]
            grad += _dot(-dx, keys, ELEMENT, WIDE, PRECISION)
    tl.store(dinitial + of_row, grad, mask=whole)


@triton.jit
def _along(grad, x, per_length, NORMALIZE: tl.constexpr):
    """The gradient of x from that of x over its length, times per_length; without its part along x."""
    if NORMALIZE:
        grad -= x * (per_length * per_length * tl.sum(grad * x, 1))[:, None]
    return grad


@triton.jit
def _grads(
    dy,
    q,
    k,
    v,
    beta,
    numbers,
    sums,
    inverse,
    weights,
    read,
    write,
    ask,
    passed,
    before,
    after,
    u_out,
    of_reads,
    dq,
    dk,
    dv,
    ddecay,
    dbeta,
    scale,
    L,
    q_row,
    q_tok,
    k_row,
    k_tok,
    v_row,
    v_tok,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    EACH: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPSILON: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    ELEMENT: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """With one decay of each head. A program has a chunk of a key head, and its value heads one after another: first
    what is inside the chunk, then what states add, so that only two large sums are in registers at a time. dv
    (R, L, H, V): comes as dx. before, after (chunks, R, H, V, K): states before, gradients of states after chunks.
    Between the two, inverse and weights hold the gradients of A and P, u_out (R, L, H, V) u, and of_reads (R, L, H)
    what reading keys have of the gradients of decays."""
    chunk, group, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = chunk * C
    i, n = tl.arange(0, C), tl.arange(0, BK)
    at, inside = start + i, n < K
    here = at < L
    keys = _tile(k, row, group, start, i, n, here, inside, k_row, k_tok, K)
    queries = _tile(q, row, group, start, i, n, here, inside, q_row, q_tok, K)
    of_key = _per_length(keys.to(WIDE), NORMALIZE, EPSILON)
    of_query = _per_length(queries.to(WIDE), NORMALIZE, EPSILON)
    # products of tokens inside the chunk, and gradients of values
    for number in range(0, EACH):
        head = group * EACH + number
        token = (row * L + at) * H + head
        place = (chunk * tl.num_programs(2) + row) * H + head
        matrix = place * C * C + (i[:, None] * C + i[None, :])
        strength = tl.load(beta + token, mask=here, other=0.0).to(WIDE)
        reads = tl.load(read + token, mask=here, other=0.0)
        t = tl.load(inverse + matrix)
        dp = tl.zeros((C, C), WIDE)
        da = tl.zeros((C, C), WIDE)
        dstrength = tl.zeros((C,), WIDE)
        of_read = tl.zeros((C,), WIDE)
        for first in range(0, V, BV):
            m = first + tl.arange(0, BV)
            wanted = m < V
            whole = wanted[:, None] & inside[None, :]
            state = tl.load(before + place * V * K + (m[:, None] * K + n[None, :]), mask=whole, other=0.0)
            above = _tile(dy, row, head, start, i, m, here, wanted, _long(L) * H * V, H * V, V)
            values = _tile(v, row, head, start, i, m, here, wanted, v_row, v_tok, V).to(WIDE)
            corner = ((row * L + start) * H + head) * V
            to = i[:, None] * (H * V) + m[None, :]
            mask = here[:, None] & wanted[None, :]
            dx = tl.load(dv + corner + to, mask=mask, other=0.0)
            held = _dot(keys, tl.trans(state), ELEMENT, WIDE, PRECISION) * reads[:, None]
            rest = values - held
            u = _dot(t, rest * strength[:, None], ELEMENT, WIDE, PRECISION).to(ELEMENT)
            dstrength += tl.sum(dx.to(WIDE) * rest, 1)
            dvalues = dx.to(WIDE) * strength[:, None]
            of_read += tl.sum(dvalues * held, 1)
            tl.store(u_out + corner + to, u, mask=mask)
            tl.store(dv + corner + to, dvalues.to(ELEMENT), mask=mask)
            dp += _dot(above, tl.trans(u), ELEMENT, WIDE, PRECISION)
            da += _dot(dx, tl.trans(u), ELEMENT, WIDE, PRECISION)
        # read here, as masks of the chunk would otherwise be in registers all the time
        own, _ = _documents(numbers, row, start, at, here, L, DOCUMENTS)
        seen = (i[None, :] <= i[:, None]) & (own[None, :] == own[:, None])
        earlier = seen & (i[None, :] < i[:, None])
        e = tl.load(sums + token, mask=here, other=0.0)
        between = tl.exp(tl.where(seen, e[:, None] - e[None, :], 0.0)) * of_key[None, :]
        da = tl.where(earlier, -da * between, 0.0) * of_key[:, None]
        both = da * _dot(keys, tl.trans(keys), ELEMENT, WIDE, PRECISION)
        dstrength += tl.sum(both, 1)
        dp = tl.where(seen, dp, 0.0)
        both = both * strength[:, None] + tl.where(earlier, dp * tl.load(weights + matrix).to(WIDE), 0.0)
        tl.store(weights + matrix, (dp * between * (of_query * scale)[:, None]).to(ELEMENT))
        tl.store(inverse + matrix, (da * strength[:, None]).to(ELEMENT))
        tl.store(of_reads + token, of_read, mask=here)
        tl.store(ddecay + token, tl.sum(both, 1) - tl.sum(both, 0) - of_read, mask=here)
        tl.store(dbeta + token, dstrength, mask=here)
    tl.debug_barrier()  # what other threads of the program stored is read below
    # queries, keys and decays
    dkeys = tl.zeros((C, BK), WIDE)
    dqueries = tl.zeros((C, BK), WIDE)
    along_keys = tl.zeros((C,), WIDE)
    along_queries = tl.zeros((C,), WIDE)
    for number in range(0, EACH):
        head = group * EACH + number
        token = (row * L + at) * H + head
        place = (chunk * tl.num_programs(2) + row) * H + head
        reads = tl.load(read + token, mask=here, other=0.0)
        writes = tl.load(write + token, mask=here, other=0.0)
        asks = tl.load(ask + token, mask=here, other=0.0)
        of_state = tl.zeros((BV,), WIDE)
        for first in range(0, V, BV):
            m = first + tl.arange(0, BV)
            wanted = m < V
            at_state = place * V * K + (m[:, None] * K + n[None, :])
            whole = wanted[:, None] & inside[None, :]
            state = tl.load(before + at_state, mask=whole, other=0.0)
            grad = tl.load(after + at_state, mask=whole, other=0.0)
            of_state += tl.sum(state.to(WIDE) * grad.to(WIDE), 1)
            above = _tile(dy, row, head, start, i, m, here, wanted, _long(L) * H * V, H * V, V).to(WIDE)
            dqueries += _dot(above * asks[:, None], state, ELEMENT, WIDE, PRECISION)
            dvalues = _tile(dv, row, head, start, i, m, here, wanted, _long(L) * H * V, H * V, V).to(WIDE)
            dkeys += _dot(dvalues * -reads[:, None], state, ELEMENT, WIDE, PRECISION)
            u = _tile(u_out, row, head, start, i, m, here, wanted, _long(L) * H * V, H * V, V).to(WIDE)
            dkeys += _dot(u * writes[:, None], grad, ELEMENT, WIDE, PRECISION)
        # of decays: what was added to the gradients, along queries and keys
        queries = _tile(q, row, group, start, i, n, here, inside, q_row, q_tok, K)
        keys = _tile(k, row, group, start, i, n, here, inside, k_row, k_tok, K)
        of_query = tl.sum(dqueries * queries.to(WIDE), 1) - along_queries
        of_write = tl.sum(dkeys * keys.to(WIDE), 1) - along_keys + tl.load(of_reads + token, mask=here, other=0.0)
        of_logs = tl.load(ddecay + token, mask=here, other=0.0) + of_query - of_write
        # A logarithm counts in the sums of its document's later tokens, and in what is left at the end.
        own, _ = _documents(numbers, row, start, at, here, L, DOCUMENTS)
        seen = (i[None, :] <= i[:, None]) & (own[None, :] == own[:, None])
        dlogs = tl.sum(tl.where(seen, of_logs[:, None], 0.0), 0)
        at_end = tl.sum(of_write, 0) + tl.load(passed + place) * tl.sum(of_state, 0)
        tl.store(ddecay + token, dlogs + tl.where(own == 0, at_end, 0.0), mask=here)
        matrices = place * C * C
        dp = tl.load(weights + matrices + (i[:, None] * C + i[None, :]))
        da = tl.load(inverse + matrices + (i[:, None] * C + i[None, :]))
        across = tl.load(inverse + matrices + (i[None, :] * C + i[:, None]))
        dqueries += _dot(dp, keys, ELEMENT, WIDE, PRECISION)
        dkeys += _dot(tl.trans(dp), queries, ELEMENT, WIDE, PRECISION)
        dkeys += _dot(da + across, keys, ELEMENT, WIDE, PRECISION)
        along_queries = tl.sum(dqueries * queries.to(WIDE), 1)
        along_keys = tl.sum(dkeys * keys.to(WIDE), 1)
    queries = _tile(q, row, group, start, i, n, here, inside, q_row, q_tok, K)
    keys = _tile(k, row, group, start, i, n, here, inside, k_row, k_tok, K)
    of_query = _per_length(queries.to(WIDE), NORMALIZE, EPSILON)
    of_key = _per_length(keys.to(WIDE), NORMALIZE, EPSILON)
    dqueries = _along(dqueries, queries.to(WIDE), of_query, NORMALIZE)
    dkeys = _along(dkeys, keys.to(WIDE), of_key, NORMALIZE)
    corner = ((row * L + start) * tl.num_programs(1) + group) * K
    to = i[:, None] * (tl.num_programs(1) * K) + n[None, :]
    mask = here[:, None] & inside[None, :]
    tl.store(dq + corner + to, dqueries.to(ELEMENT), mask=mask)
    tl.store(dk + corner + to, dkeys.to(ELEMENT), mask=mask)


@triton.jit
def _grads_by_feature(
    dy,
    q,
    k,
    v,
    beta,
    numbers,
    sums,
    inverse,
    reading,
    passed,
    before,
    after,
    dq,
    dk,
    dv,
    ddecay,
    dbeta,
    scale,
    L,
    q_row,
    q_tok,
    k_row,
    k_tok,
    v_row,
    v_tok,
    DEPTH: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    EACH: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPSILON: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    ELEMENT: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """With decays by feature. A program has a chunk of a value head; dq, dk (R, L, H, K) are its part of theirs."""
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = chunk * C
    i, n = tl.arange(0, C), tl.arange(0, BK)
    at, inside = start + i, n < K
    here = at < L
    own, carried = _documents(numbers, row, start, at, here, L, DOCUMENTS)
    seen = (i[None, :] <= i[:, None]) & (own[None, :] == own[:, None])
    token = (row * L + at) * H + head
    place = (chunk * tl.num_programs(2) + row) * H + head
    strength = tl.load(beta + token, mask=here, other=0.0).to(WIDE)
    readers = _tile(reading, row, head, start, i, n, here, inside, _long(L) * H * K, H * K, K)
    t = tl.load(inverse + place * C * C + (i[:, None] * C + i[None, :]))
    dp = tl.zeros((C, C), WIDE)
    da = tl.zeros((C, C), WIDE)
    dstrength = tl.zeros((C,), WIDE)
    of_state = tl.zeros((BK,), WIDE)
    dqueries = tl.zeros((C, BK), WIDE)
    dreaders = tl.zeros((C, BK), WIDE)
    dleft = tl.zeros((C, BK), WIDE)
    for first in range(0, V, BV):
        m = first + tl.arange(0, BV)
        wanted = m < V
        at_state = place * V * K + (m[:, None] * K + n[None, :])
        whole = wanted[:, None] & inside[None, :]
        state = tl.load(before + at_state, mask=whole, other=0.0)
        grad = tl.load(after + at_state, mask=whole, other=0.0)
        above = _tile(dy, row, head, start, i, m, here, wanted, _long(L) * H * V, H * V, V)
        values = _tile(v, row, head, start, i, m, here, wanted, v_row, v_tok, V).to(WIDE)
        corner = ((row * L + start) * H + head) * V
        to = i[:, None] * (H * V) + m[None, :]
        mask = here[:, None] & wanted[None, :]
        dx = tl.load(dv + corner + to, mask=mask, other=0.0)
        rest = values - _dot(readers, tl.trans(state), ELEMENT, WIDE, PRECISION)
        u = _dot(t, rest * strength[:, None], ELEMENT, WIDE, PRECISION)
        dstrength += tl.sum(dx.to(WIDE) * rest, 1)
        dvalues = dx.to(WIDE) * strength[:, None]
        tl.store(dv + corner + to, dvalues.to(ELEMENT), mask=mask)
        of_state += tl.sum(state.to(WIDE) * grad.to(WIDE), 0)
        dp += _dot(above, tl.trans(u.to(ELEMENT)), ELEMENT, WIDE, PRECISION)
        da += _dot(-dx, tl.trans(u.to(ELEMENT)), ELEMENT, WIDE, PRECISION)
        dqueries += _dot(above, state, ELEMENT, WIDE, PRECISION)
        dreaders += _dot(-dvalues, state, ELEMENT, WIDE, PRECISION)
        dleft += _dot(u, grad, ELEMENT, WIDE, PRECISION)
    # what is read of the state before the chunk, and what is left at its end
    keys = _tile(k, row, head // EACH, start, i, n, here, inside, k_row, k_tok, K).to(WIDE)
    queries = _tile(q, row, head // EACH, start, i, n, here, inside, q_row, q_tok, K).to(WIDE)
    of_key = _per_length(keys, NORMALIZE, EPSILON)
    of_query = _per_length(queries, NORMALIZE, EPSILON)
    e = _tile(sums, row, head, start, i, n, here, inside, _long(L) * H * K, H * K, K)
    at_end = own == 0
    place_end = tl.minimum(start + C, L) - 1
    end = tl.load(sums + ((row * L + place_end) * H + head) * K + n, mask=inside, other=0.0)
    reach = tl.where((own == carried)[:, None], tl.exp(e), 0.0)
    dqueries *= reach * (of_query * scale)[:, None]
    dkeys = dreaders * reach * of_key[:, None]
    dlogs = dqueries * queries + dkeys * keys
    dleft *= tl.where(at_end[:, None], tl.exp(tl.minimum(end[None, :] - e, 0.0)), 0.0) * of_key[:, None]
    dkeys += dleft
    of_end = tl.sum(dleft * keys, 0) + tl.load(passed + place * K + n, mask=inside, other=0.0) * of_state
    dlogs -= dleft * keys
    # inside the chunk
    dp = tl.where(seen, dp, 0.0) * (of_query * scale)[:, None] * of_key[None, :]
    da = tl.where(seen, da, 0.0) * of_key[:, None] * of_key[None, :]
    own_weight = tl.sum(tl.where(i[:, None] == i[None, :], dp, 0.0), 1)
    dqueries += own_weight[:, None] * keys
    dkeys += own_weight[:, None] * queries
    for number in range(0, DEPTH):
        left, pairs, second = _level(sums, row, head, start, i, n, inside, e, number, L, H, K, C)
        far_keys, far_queries = (keys * left).to(ELEMENT), (queries * left).to(ELEMENT)
        dp_here = tl.where(pairs, dp, 0.0).to(ELEMENT)
        da_here = tl.where(pairs, da, 0.0)
        of_queries = _dot(dp_here, far_keys, ELEMENT, WIDE, PRECISION) * left
        of_readers = _dot(da_here, far_keys, ELEMENT, WIDE, PRECISION) * left
        dstrength += tl.sum(of_readers * keys, 1)
        da_here = (da_here * strength[:, None]).to(ELEMENT)
        of_sources = _dot(tl.trans(da_here), far_keys, ELEMENT, WIDE, PRECISION)
        of_sources += _dot(tl.trans(dp_here), far_queries, ELEMENT, WIDE, PRECISION)
        of_keys = of_readers * strength[:, None] + of_sources * left
        dqueries += of_queries
        dkeys += of_keys
        dlogs += of_queries * queries + tl.where(second[:, None], of_keys, -of_keys) * keys
    dlogs = _wide_dot(tl.trans(tl.where(seen, 1.0, tl.zeros((C, C), WIDE))), dlogs, WIDE, PRECISION)
    dlogs += tl.where(at_end[:, None], of_end[None, :], 0.0)
    corner = ((row * L + start) * H + head) * K
    to = i[:, None] * (H * K) + n[None, :]
    mask = here[:, None] & inside[None, :]
    tl.store(ddecay + corner + to, dlogs, mask=mask)
    tl.store(dbeta + token, dstrength, mask=here)
    tl.store(dq + corner + to, _along(dqueries, queries, of_query, NORMALIZE).to(dq.dtype.element_ty), mask=mask)
    tl.store(dk + corner + to, _along(dkeys, keys, of_key, NORMALIZE).to(dk.dtype.element_ty), mask=mask)


def _last_two(x: Tensor) -> Tensor:
    """The same, contiguous in its last two dims."""
    return x if x.stride(3) == 1 and x.stride(2) == x.shape[3] else x.contiguous()


ELEMENTS = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


class DeltaChunks:
    """What the kernels of a delta rule are given, and what is computed for all chunks at once."""

    def __init__(self, s: DeltaInputs, tiles: DeltaTiles):
        self.inputs, self.tiles = s, tiles
        self.q, self.k, self.v = (_last_two(t) for t in (s.q, s.k, s.v))
        self.decay, self.beta = s.decay.contiguous(), s.beta.contiguous()
        self.numbers = None if s.numbers is None else s.numbers.contiguous()
        (self.rows, self.length, self.heads, self.width), (self.key_heads, self.features) = s.v.shape, s.k.shape[2:]
        self.chunks, self.wide = -(-self.length // CHUNK), wide_of(s.v.dtype)
        self.by_feature, self.precision = s.by_feature, "ieee" if self.wide == torch.float64 else "tf32x3"
        of_tokens = (self.rows, self.length, self.heads)
        of_chunks = (self.chunks, self.rows, self.heads)
        self.read: Tensor | None
        self.write: Tensor | None
        self.ask: Tensor | None
        self.reading: Tensor | None
        self.inverse, self.weights = (self.like(*of_chunks, CHUNK, CHUNK) for _ in range(2))
        if self.by_feature:
            self.sums, self.passed = self.empty(*of_tokens, self.features), self.empty(*of_chunks, self.features)
            self.reading, self.writing, self.asking = (self.like(*of_tokens, self.features) for _ in range(3))
            self.read, self.write, self.ask = None, None, None
        else:
            self.sums, self.passed = self.empty(*of_tokens), self.empty(*of_chunks)
            self.read, self.write, self.ask = (self.empty(*of_tokens) for _ in range(3))
            self.reading, self.writing, self.asking = None, self.k, self.q
        self.prepare()

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.wide, device=self.v.device)

    def like(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.v.dtype, device=self.v.device)

    def strides(self, *tensors: Tensor) -> list[int]:
        return [n for t in tensors for n in (t.stride(0), t.stride(1))]

    @property
    def arithmetic(self) -> dict[str, Any]:
        block = max(LEAST, triton.next_power_of_2(self.features))
        sizes = dict(H=self.heads, K=self.features, EACH=self.heads // self.key_heads, C=CHUNK, BK=block)
        return dict(ELEMENT=ELEMENTS[self.v.dtype], WIDE=triton_wide(self.wide), PRECISION=self.precision, **sizes)

    @property
    def how(self) -> dict[str, Any]:
        return dict(NORMALIZE=self.inputs.normalize, EPSILON=EPS, DOCUMENTS=self.numbers is not None)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.chunks, self.heads, self.rows

    def block(self, most: int) -> int:
        """Features of values that a program has: fewer of 32 bits, as shared memory has room for."""
        most = most * 2 // max(2, self.v.dtype.itemsize)
        return max(LEAST, min(most, triton.next_power_of_2(self.width)))

    def stages(self, wanted: int) -> int:
        return wanted if self.v.dtype.itemsize == 2 else 1

    def prepare(self) -> None:
        s, strides = self.inputs, self.strides(self.q, self.k)
        if self.by_feature:
            _sums[self.grid](
                self.q,
                self.k,
                self.decay,
                self.numbers,
                self.sums,
                self.reading,
                self.writing,
                self.asking,
                self.passed,
                s.scale,
                self.length,
                *strides,
                **self.how,
                **self.arithmetic,
                num_warps=4,
            )
        _prepare[self.grid](
            self.q,
            self.k,
            self.decay,
            self.beta,
            self.numbers,
            self.sums,
            self.inverse,
            self.weights,
            self.read,
            self.write,
            self.ask,
            self.passed,
            s.scale,
            self.length,
            *strides,
            BY_FEATURE=self.by_feature,
            DEPTH=LEVELS,
            B=BLOCK,
            JOIN="tf32" if self.v.dtype.itemsize == 2 else self.precision,
            **self.how,
            **self.arithmetic,
            num_warps=4,
            maxnreg=REGISTERS,
        )

    def over_states(self) -> tuple[tuple[int, int, int], dict[str, Any]]:
        """The grid and sizes of kernels that follow states from chunk to chunk."""
        block = self.block(self.tiles.values)
        sizes = dict(BY_FEATURE=self.by_feature, V=self.width, BV=block, **self.arithmetic)
        how = dict(num_warps=self.tiles.warps, num_stages=self.stages(self.tiles.stages))
        return (triton.cdiv(self.width, block), self.heads, self.rows), dict(**sizes, **how)


class DeltaBuffers(NamedTuple):
    """Of a backward: the gradient of y; states before, and gradients of states after chunks; and what the gradients of
    values (dx so far), decays and beta are written to."""

    dy: Tensor
    before: Tensor
    after: Tensor
    dv: Tensor
    ddecay: Tensor
    dbeta: Tensor


class DeltaKernels:
    """The op's members with tiles of a kind."""

    def __init__(self, tiles: DeltaTiles):
        self.tiles = tiles

    def delta_forward(self, s: DeltaInputs) -> tuple[Tensor, Tensor, Tensor]:
        """As the reference; states before chunks are in the dtype of v, as (chunks, R, HV, V, K)."""
        call = DeltaChunks(s, self.tiles)
        states = call.like(call.chunks, call.rows, call.heads, call.width, call.features)
        u = call.like(*s.v.shape)
        final = call.empty(*s.state_shape)
        initial = None if s.initial is None else s.initial.contiguous()
        grid, sizes = call.over_states()
        _pass[grid](
            initial,
            call.writing,
            call.reading,
            call.v,
            call.beta,
            call.inverse,
            call.read,
            call.write,
            call.passed,
            states,
            u,
            final,
            call.length,
            call.chunks,
            *call.strides(call.writing, call.v),
            INITIAL=initial is not None,
            **sizes,
        )
        y, block = call.like(*s.v.shape), call.block(self.tiles.outputs)
        _outputs[call.chunks * triton.cdiv(call.width, block), call.heads, call.rows](
            call.asking,
            call.ask,
            call.weights,
            states,
            u,
            y,
            call.length,
            call.chunks,
            *call.strides(call.asking),
            BY_FEATURE=call.by_feature,
            V=call.width,
            BV=block,
            **call.arithmetic,
            num_warps=4,
        )
        return y, final, states

    def delta_backward(self, dy: Tensor, dstate: Tensor | None, s: DeltaInputs, before: Tensor) -> DeltaGrads:
        """As the reference."""
        call, dy = DeltaChunks(s, self.tiles), dy.contiguous()
        after, dv, dinitial = torch.empty_like(before), call.like(*s.v.shape), call.empty(*s.state_shape)
        given = None if dstate is None else dstate.contiguous()
        grid, sizes = call.over_states()
        _pass_back[grid](
            given,
            dy,
            call.asking,
            call.writing,
            call.reading,
            call.beta,
            call.inverse,
            call.weights,
            call.read,
            call.write,
            call.ask,
            call.passed,
            after,
            dv,
            dinitial,
            call.length,
            call.chunks,
            *call.strides(call.asking, call.writing),
            FINAL=given is not None,
            **sizes,
        )
        ddecay, dbeta = call.empty(*s.decay.shape), call.empty(*s.beta.shape)
        found = self.by_feature if call.by_feature else self.by_head
        dq, dk = found(call, DeltaBuffers(dy, before, after, dv, ddecay, dbeta))
        return DeltaGrads(dq, dk, dv, ddecay, dbeta, None if s.initial is None else dinitial.to(s.initial.dtype))

    def by_head(self, call: DeltaChunks, b: DeltaBuffers) -> tuple[Tensor, Tensor]:
        s = call.inputs
        dq, dk = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (s.q, s.k))
        _grads[call.chunks, call.key_heads, call.rows](
            b.dy,
            call.q,
            call.k,
            call.v,
            call.beta,
            call.numbers,
            call.sums,
            call.inverse,
            call.weights,
            call.read,
            call.write,
            call.ask,
            call.passed,
            b.before,
            b.after,
            call.like(*s.v.shape),
            call.empty(*s.beta.shape),
            dq,
            dk,
            b.dv,
            b.ddecay,
            b.dbeta,
            s.scale,
            call.length,
            *call.strides(call.q, call.k, call.v),
            V=call.width,
            BV=call.block(self.tiles.grads),
            **call.how,
            **call.arithmetic,
            num_warps=self.tiles.grad_warps,
            num_stages=call.stages(self.tiles.grad_stages),
        )
        return dq, dk

    def by_feature(self, call: DeltaChunks, b: DeltaBuffers) -> tuple[Tensor, Tensor]:
        s, each = call.inputs, call.heads // call.key_heads
        of_tokens = (call.rows, call.length, call.heads, call.features)
        dq, dk = (call.like(*of_tokens) if each == 1 else call.empty(*of_tokens) for _ in range(2))
        _grads_by_feature[call.grid](
            b.dy,
            call.q,
            call.k,
            call.v,
            call.beta,
            call.numbers,
            call.sums,
            call.inverse,
            call.reading,
            call.passed,
            b.before,
            b.after,
            dq,
            dk,
            b.dv,
            b.ddecay,
            b.dbeta,
            s.scale,
            call.length,
            *call.strides(call.q, call.k, call.v),
            DEPTH=LEVELS,
            V=call.width,
            BV=call.block(self.tiles.grads),
            **call.how,
            **call.arithmetic,
            num_warps=self.tiles.grad_warps,
            num_stages=call.stages(self.tiles.grad_stages),
        )
        if each > 1:
            dq, dk = (t.unflatten(2, (call.key_heads, each)).sum(3).to(s.q.dtype) for t in (dq, dk))
        return dq, dk

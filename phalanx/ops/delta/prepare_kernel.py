"""What the kernels of the delta rule compute of all chunks at once before states are known: sums of decays, T and P."""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.ops.delta.chunk_tools import documents_at, dot, length_factors, level, long, summable, tile, wide_dot


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
    whole -= wide_dot(whole, wide_dot(below, whole, WIDE, PRECISION), WIDE, PRECISION)
    below = tl.where(rows // (2 * B) > cols // (2 * B), a, 0.0)
    whole -= wide_dot(whole, wide_dot(below, whole, WIDE, PRECISION), WIDE, PRECISION)
    return whole


@triton.jit
def decay_sums(
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
    row, head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    start = chunk * C
    i, n = tl.arange(0, C), tl.arange(0, BK)
    at, inside = start + i, n < K
    here = at < L
    own, carried = documents_at(numbers, row, start, at, here, L, DOCUMENTS)
    seen = (i[None, :] <= i[:, None]) & (own[None, :] == own[:, None])
    logs = summable(tile(decay, row, head, start, i, n, here, inside, long(L) * H * K, H * K, K), WIDE)
    e = wide_dot(tl.where(seen, 1.0, tl.zeros((C, C), WIDE)), logs, WIDE, PRECISION)
    at_end = own == 0
    end = tl.sum(tl.where(at_end[:, None], logs, 0.0), 0)
    corner = ((row * L + start) * H + head) * K
    to = i[:, None] * (H * K) + n[None, :]
    mask = here[:, None] & inside[None, :]
    tl.store(sums + corner + to, e, mask=mask)
    keys = tile(k, row, head // EACH, start, i, n, here, inside, k_row, k_tok, K).to(WIDE)
    keys *= length_factors(keys, NORMALIZE, EPSILON)[:, None]
    left = tl.where(at_end[:, None], tl.exp(tl.minimum(end[None, :] - e, 0.0)), 0.0)
    tl.store(writing + corner + to, (keys * left).to(ELEMENT), mask=mask)
    reach = tl.where((own == carried)[:, None], tl.exp(e), 0.0)
    tl.store(reading + corner + to, (keys * reach).to(ELEMENT), mask=mask)
    queries = tile(q, row, head // EACH, start, i, n, here, inside, q_row, q_tok, K).to(WIDE)
    queries *= (length_factors(queries, NORMALIZE, EPSILON) * scale)[:, None]
    tl.store(asking + corner + to, (queries * reach).to(ELEMENT), mask=mask)
    place = (chunk * tl.num_programs(0) + row) * H + head
    tl.store(passed_out + place * K + n, tl.where(carried == 0, tl.exp(end), 0.0), mask=inside)


@triton.jit
def prepare_chunks(
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
    row, head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    start = chunk * C
    i, n = tl.arange(0, C), tl.arange(0, BK)
    at, inside = start + i, n < K
    here = at < L
    own, carried = documents_at(numbers, row, start, at, here, L, DOCUMENTS)
    seen = (i[None, :] <= i[:, None]) & (own[None, :] == own[:, None])
    keys = tile(k, row, head // EACH, start, i, n, here, inside, k_row, k_tok, K)
    queries = tile(q, row, head // EACH, start, i, n, here, inside, q_row, q_tok, K)
    of_key = length_factors(keys.to(WIDE), NORMALIZE, EPSILON)
    of_query = length_factors(queries.to(WIDE), NORMALIZE, EPSILON) * scale
    token = (row * L + at) * H + head
    strength = tl.load(beta + token, mask=here, other=0.0).to(WIDE)
    place = (chunk * tl.num_programs(0) + row) * H + head
    if BY_FEATURE:
        e = tile(sums, row, head, start, i, n, here, inside, long(L) * H * K, H * K, K)
        wide_keys, wide_queries = keys.to(WIDE), queries.to(WIDE)
        of_pairs = tl.zeros((C, C), WIDE)
        read_pairs = tl.where(i[:, None] == i[None, :], tl.sum(wide_keys * wide_queries, 1)[:, None], 0.0)
        for number in range(0, DEPTH):
            left, same, second = level(sums, row, head, start, i, n, inside, e, number, L, H, K, C)
            pairs = same & second[:, None] & (second[None, :] == 0)
            far = (wide_keys * left).to(ELEMENT)
            found = dot(far, tl.trans(far), ELEMENT, WIDE, PRECISION)
            of_pairs = tl.where(pairs, found, of_pairs)
            found = dot(wide_queries * left, tl.trans(far), ELEMENT, WIDE, PRECISION)
            read_pairs = tl.where(pairs, found, read_pairs)
    else:
        logs = summable(tl.load(decay + token, mask=here, other=0.0), WIDE)
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
        of_pairs = dot(keys, tl.trans(keys), ELEMENT, WIDE, PRECISION) * between
        read_pairs = dot(queries, tl.trans(keys), ELEMENT, WIDE, PRECISION) * between
    read_pairs = tl.where(seen, read_pairs * of_query[:, None] * of_key[None, :], 0.0)
    before = seen & (i[None, :] < i[:, None])
    a = tl.where(before, of_pairs * (strength * of_key)[:, None] * of_key[None, :], 0.0)
    to = place * C * C + (i[:, None] * C + i[None, :])
    tl.store(weights + to, read_pairs.to(ELEMENT))
    tl.store(inverse + to, _inverse(a, C, B, WIDE, JOIN).to(ELEMENT))

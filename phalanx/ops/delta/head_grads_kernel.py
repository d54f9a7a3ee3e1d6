"""Gradients of the delta rule's inputs, with one decay of each head."""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.ops.delta.chunk_tools import along, documents_at, dot, length_factors, long, state_tile, tile


@triton.jit
def value_grads(
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
    before,
    u_out,
    of_reads,
    of_inside,
    dv,
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
    """Gradients of values, beta and the matmuls inside chunks: a program has a chunk of a value head. dv (R, L, H, V)
    comes as dx; inverse and weights come as T and P, and leave as the gradients of A and P, to be read along and
    across. u_out (R, L, H, V): u. of_inside, of_reads (R, L, H): of the gradients of decays, what comes from inside
    chunks, and what keys that read states have. before (chunks, R, H, V, K)."""
    row, head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    start = chunk * C
    i, n = tl.arange(0, C), tl.arange(0, BK)
    at, inside = start + i, n < K
    here = at < L
    keys = tile(k, row, head // EACH, start, i, n, here, inside, k_row, k_tok, K)
    queries = tile(q, row, head // EACH, start, i, n, here, inside, q_row, q_tok, K)
    of_key = length_factors(keys.to(WIDE), NORMALIZE, EPSILON)
    of_query = length_factors(queries.to(WIDE), NORMALIZE, EPSILON)
    token = (row * L + at) * H + head
    place = (chunk * tl.num_programs(0) + row) * H + head
    of_matrix = i[:, None] * C + i[None, :]
    inverse += place * C * C
    weights += place * C * C
    strength = tl.load(beta + token, mask=here, other=0.0).to(WIDE)
    reads = tl.load(read + token, mask=here, other=0.0)
    t = tl.load(inverse + of_matrix)
    dp = tl.zeros((C, C), WIDE)
    da = tl.zeros((C, C), WIDE)
    dstrength = tl.zeros((C,), WIDE)
    of_read = tl.zeros((C,), WIDE)
    for first in range(0, V, BV):
        m = first + tl.arange(0, BV)
        wanted = m < V
        state = state_tile(before, place, m, n, wanted, inside, V, K)
        above = tile(dy, row, head, start, i, m, here, wanted, long(L) * H * V, H * V, V)
        values = tile(v, row, head, start, i, m, here, wanted, v_row, v_tok, V).to(WIDE)
        corner = ((row * L + start) * H + head) * V
        to = i[:, None] * (H * V) + m[None, :]
        mask = here[:, None] & wanted[None, :]
        dx = tl.load(dv + corner + to, mask=mask, other=0.0)
        held = dot(keys, tl.trans(state), ELEMENT, WIDE, PRECISION) * reads[:, None]
        rest = values - held
        u = dot(t, rest * strength[:, None], ELEMENT, WIDE, PRECISION).to(ELEMENT)
        dstrength += tl.sum(dx.to(WIDE) * rest, 1)
        dvalues = dx.to(WIDE) * strength[:, None]
        of_read += tl.sum(dvalues * held, 1)
        tl.store(u_out + corner + to, u, mask=mask)
        tl.store(dv + corner + to, dvalues.to(ELEMENT), mask=mask)
        dp += dot(above, tl.trans(u), ELEMENT, WIDE, PRECISION)
        da += dot(dx, tl.trans(u), ELEMENT, WIDE, PRECISION)
    # read here, as masks of the chunk would otherwise be in registers all the time
    own, _ = documents_at(numbers, row, start, at, here, L, DOCUMENTS)
    seen = (i[None, :] <= i[:, None]) & (own[None, :] == own[:, None])
    earlier = seen & (i[None, :] < i[:, None])
    e = tl.load(sums + token, mask=here, other=0.0)
    between = tl.exp(tl.where(seen, e[:, None] - e[None, :], 0.0)) * of_key[None, :]
    da = tl.where(earlier, -da * between, 0.0) * of_key[:, None]
    both = da * dot(keys, tl.trans(keys), ELEMENT, WIDE, PRECISION)
    dstrength += tl.sum(both, 1)
    dp = tl.where(seen, dp, 0.0)
    both = both * strength[:, None] + tl.where(earlier, dp * tl.load(weights + of_matrix).to(WIDE), 0.0)
    tl.debug_barrier()  # T and P, which other threads of the program may still read, are overwritten below
    tl.store(weights + of_matrix, (dp * between * (of_query * scale)[:, None]).to(ELEMENT))
    tl.store(inverse + of_matrix, (da * strength[:, None]).to(ELEMENT))
    tl.store(of_reads + token, of_read, mask=here)
    tl.store(of_inside + token, tl.sum(both, 1) - tl.sum(both, 0) - of_read, mask=here)
    tl.store(dbeta + token, dstrength, mask=here)


@triton.jit
def query_grads(
    dy,
    q,
    k,
    weights,
    ask,
    before,
    of_queries,
    dq,
    L,
    q_row,
    q_tok,
    k_row,
    k_tok,
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
    """Gradients of queries, from what value_grads left: a program has a chunk of a key head, and its value heads one
    after another. of_queries (R, L, H): of the gradients of decays, what queries that read states have."""
    row, group, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    start = chunk * C
    i, n = tl.arange(0, C), tl.arange(0, BK)
    at, inside = start + i, n < K
    here = at < L
    queries = tile(q, row, group, start, i, n, here, inside, q_row, q_tok, K)
    keys = tile(k, row, group, start, i, n, here, inside, k_row, k_tok, K)
    dqueries = tl.zeros((C, BK), WIDE)
    along_queries = tl.zeros((C,), WIDE)
    for head in range(group * EACH, group * EACH + EACH):
        token = (row * L + at) * H + head
        place = (chunk * tl.num_programs(0) + row) * H + head
        asks = tl.load(ask + token, mask=here, other=0.0)
        for first in range(0, V, BV):
            m = first + tl.arange(0, BV)
            wanted = m < V
            state = state_tile(before, place, m, n, wanted, inside, V, K)
            above = tile(dy, row, head, start, i, m, here, wanted, long(L) * H * V, H * V, V).to(WIDE)
            dqueries += dot(above * asks[:, None], state, ELEMENT, WIDE, PRECISION)
        of_query = tl.sum(dqueries * queries.to(WIDE), 1)  # of this head what was added, along queries
        tl.store(of_queries + token, of_query - along_queries, mask=here)
        dp = tl.load(weights + place * C * C + (i[:, None] * C + i[None, :]))
        dqueries += dot(dp, keys, ELEMENT, WIDE, PRECISION)
        along_queries = tl.sum(dqueries * queries.to(WIDE), 1)
    factors = length_factors(queries.to(WIDE), NORMALIZE, EPSILON)
    dqueries = along(dqueries, queries.to(WIDE), factors, NORMALIZE)
    corner = ((row * L + start) * tl.num_programs(1) + group) * K
    to = i[:, None] * (tl.num_programs(1) * K) + n[None, :]
    tl.store(dq + corner + to, dqueries.to(ELEMENT), mask=here[:, None] & inside[None, :])


@triton.jit
def key_grads(
    q,
    k,
    numbers,
    inverse,
    weights,
    read,
    write,
    passed,
    before,
    after,
    u_in,
    of_reads,
    of_queries,
    of_inside,
    dk,
    dv,
    ddecay,
    L,
    q_row,
    q_tok,
    k_row,
    k_tok,
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
    """Gradients of keys and decays, from what value_grads and query_grads left; programs as of query_grads. after
    (chunks, R, H, V, K): gradients of states after chunks."""
    row, group, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    start = chunk * C
    i, n = tl.arange(0, C), tl.arange(0, BK)
    at, inside = start + i, n < K
    here = at < L
    queries = tile(q, row, group, start, i, n, here, inside, q_row, q_tok, K)
    keys = tile(k, row, group, start, i, n, here, inside, k_row, k_tok, K)
    dkeys = tl.zeros((C, BK), WIDE)
    along_keys = tl.zeros((C,), WIDE)
    for head in range(group * EACH, group * EACH + EACH):
        token = (row * L + at) * H + head
        place = (chunk * tl.num_programs(0) + row) * H + head
        reads = tl.load(read + token, mask=here, other=0.0)
        writes = tl.load(write + token, mask=here, other=0.0)
        of_state = tl.zeros((BV,), WIDE)
        for first in range(0, V, BV):
            m = first + tl.arange(0, BV)
            wanted = m < V
            state = state_tile(before, place, m, n, wanted, inside, V, K)
            grad = state_tile(after, place, m, n, wanted, inside, V, K)
            of_state += tl.sum(state.to(WIDE) * grad.to(WIDE), 1)
            dvalues = tile(dv, row, head, start, i, m, here, wanted, long(L) * H * V, H * V, V).to(WIDE)
            dkeys += dot(dvalues * -reads[:, None], state, ELEMENT, WIDE, PRECISION)
            u = tile(u_in, row, head, start, i, m, here, wanted, long(L) * H * V, H * V, V).to(WIDE)
            dkeys += dot(u * writes[:, None], grad, ELEMENT, WIDE, PRECISION)
        # of decays: what was added to the gradients, along keys
        of_write = tl.sum(dkeys * keys.to(WIDE), 1) - along_keys + tl.load(of_reads + token, mask=here, other=0.0)
        of_query = tl.load(of_queries + token, mask=here, other=0.0)
        of_logs = tl.load(of_inside + token, mask=here, other=0.0) + of_query - of_write
        # A logarithm counts in the sums of its document's later tokens, and in what is left at the end.
        own, _ = documents_at(numbers, row, start, at, here, L, DOCUMENTS)
        seen = (i[None, :] <= i[:, None]) & (own[None, :] == own[:, None])
        dlogs = tl.sum(tl.where(seen, of_logs[:, None], 0.0), 0)
        at_end = tl.sum(of_write, 0) + tl.load(passed + place) * tl.sum(of_state, 0)
        tl.store(ddecay + token, dlogs + tl.where(own == 0, at_end, 0.0), mask=here)
        matrices = place * C * C
        dp_across = tl.load(weights + matrices + (i[None, :] * C + i[:, None]))
        dkeys += dot(dp_across, queries, ELEMENT, WIDE, PRECISION)
        da = tl.load(inverse + matrices + (i[:, None] * C + i[None, :]))
        da_across = tl.load(inverse + matrices + (i[None, :] * C + i[:, None]))
        dkeys += dot(da + da_across, keys, ELEMENT, WIDE, PRECISION)
        along_keys = tl.sum(dkeys * keys.to(WIDE), 1)
    factors = length_factors(keys.to(WIDE), NORMALIZE, EPSILON)
    dkeys = along(dkeys, keys.to(WIDE), factors, NORMALIZE)
    corner = ((row * L + start) * tl.num_programs(1) + group) * K
    to = i[:, None] * (tl.num_programs(1) * K) + n[None, :]
    tl.store(dk + corner + to, dkeys.to(ELEMENT), mask=here[:, None] & inside[None, :])

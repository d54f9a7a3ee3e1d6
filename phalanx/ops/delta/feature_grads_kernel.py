"""Gradients of the delta rule's inputs, with decays by feature."""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.ops.delta.chunk_tools import along, documents_at, dot, length_factors, level, long, tile, wide_dot


@triton.jit
def grads_by_feature(
    dy,
    q,
    k,
    v,
    beta,
    numbers,
    sums,
    inverse,
    weights,
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
    """A program has a chunk of a value head; dq, dk (R, L, H, K) are its part of theirs. Between its two parts, inverse
    and weights hold the gradients of A and P, to be read along and across: on Hopper some versions of Triton give wrong
    matmuls whose left operand is another one's result, transposed (fla-org/flash-linear-attention#640)."""
    row, head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    start = chunk * C
    i, n = tl.arange(0, C), tl.arange(0, BK)
    at, inside = start + i, n < K
    here = at < L
    own, carried = documents_at(numbers, row, start, at, here, L, DOCUMENTS)
    seen = (i[None, :] <= i[:, None]) & (own[None, :] == own[:, None])
    token = (row * L + at) * H + head
    place = (chunk * tl.num_programs(0) + row) * H + head
    strength = tl.load(beta + token, mask=here, other=0.0).to(WIDE)
    readers = tile(reading, row, head, start, i, n, here, inside, long(L) * H * K, H * K, K)
    matrices = place * C * C
    t = tl.load(inverse + matrices + (i[:, None] * C + i[None, :]))
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
        above = tile(dy, row, head, start, i, m, here, wanted, long(L) * H * V, H * V, V)
        values = tile(v, row, head, start, i, m, here, wanted, v_row, v_tok, V).to(WIDE)
        corner = ((row * L + start) * H + head) * V
        to = i[:, None] * (H * V) + m[None, :]
        mask = here[:, None] & wanted[None, :]
        dx = tl.load(dv + corner + to, mask=mask, other=0.0)
        rest = values - dot(readers, tl.trans(state), ELEMENT, WIDE, PRECISION)
        u = dot(t, rest * strength[:, None], ELEMENT, WIDE, PRECISION)
        dstrength += tl.sum(dx.to(WIDE) * rest, 1)
        dvalues = dx.to(WIDE) * strength[:, None]
        tl.store(dv + corner + to, dvalues.to(ELEMENT), mask=mask)
        of_state += tl.sum(state.to(WIDE) * grad.to(WIDE), 0)
        dp += dot(above, tl.trans(u.to(ELEMENT)), ELEMENT, WIDE, PRECISION)
        da += dot(-dx, tl.trans(u.to(ELEMENT)), ELEMENT, WIDE, PRECISION)
        dqueries += dot(above, state, ELEMENT, WIDE, PRECISION)
        dreaders += dot(-dvalues, state, ELEMENT, WIDE, PRECISION)
        dleft += dot(u, grad, ELEMENT, WIDE, PRECISION)
    # what is read of the state before the chunk, and what is left at its end
    keys = tile(k, row, head // EACH, start, i, n, here, inside, k_row, k_tok, K).to(WIDE)
    queries = tile(q, row, head // EACH, start, i, n, here, inside, q_row, q_tok, K).to(WIDE)
    of_key = length_factors(keys, NORMALIZE, EPSILON)
    of_query = length_factors(queries, NORMALIZE, EPSILON)
    e = tile(sums, row, head, start, i, n, here, inside, long(L) * H * K, H * K, K)
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
    tl.debug_barrier()  # T, which other threads of the program may still read, is overwritten below
    tl.store(weights + matrices + (i[:, None] * C + i[None, :]), dp.to(ELEMENT))
    tl.store(inverse + matrices + (i[:, None] * C + i[None, :]), (da * strength[:, None]).to(ELEMENT))
    tl.debug_barrier()  # what other threads of the program stored is read below
    dp_across = tl.load(weights + matrices + (i[None, :] * C + i[:, None]))
    da_across = tl.load(inverse + matrices + (i[None, :] * C + i[:, None]))
    dqueries += own_weight[:, None] * keys
    dkeys += own_weight[:, None] * queries
    for number in range(0, DEPTH):
        left, same, second = level(sums, row, head, start, i, n, inside, e, number, L, H, K, C)
        pairs, across = same & second[:, None] & (second[None, :] == 0), same & second[None, :] & (second[:, None] == 0)
        far_keys, far_queries = (keys * left).to(ELEMENT), (queries * left).to(ELEMENT)
        of_queries = dot(tl.where(pairs, dp, 0.0), far_keys, ELEMENT, WIDE, PRECISION) * left
        of_readers = dot(tl.where(pairs, da, 0.0), far_keys, ELEMENT, WIDE, PRECISION) * left
        dstrength += tl.sum(of_readers * keys, 1)
        of_sources = dot(tl.where(across, da_across, 0.0), far_keys, ELEMENT, WIDE, PRECISION)
        of_sources += dot(tl.where(across, dp_across, 0.0), far_queries, ELEMENT, WIDE, PRECISION)
        of_keys = of_readers * strength[:, None] + of_sources * left
        dqueries += of_queries
        dkeys += of_keys
        dlogs += of_queries * queries + tl.where(second[:, None], of_keys, -of_keys) * keys
    later = (i[None, :] >= i[:, None]) & (own[None, :] == own[:, None])
    dlogs = wide_dot(tl.where(later, 1.0, tl.zeros((C, C), WIDE)), dlogs, WIDE, PRECISION)
    dlogs += tl.where(at_end[:, None], of_end[None, :], 0.0)
    corner = ((row * L + start) * H + head) * K
    to = i[:, None] * (H * K) + n[None, :]
    mask = here[:, None] & inside[None, :]
    tl.store(ddecay + corner + to, dlogs, mask=mask)
    tl.store(dbeta + token, dstrength, mask=here)
    tl.store(dq + corner + to, along(dqueries, queries, of_query, NORMALIZE).to(dq.dtype.element_ty), mask=mask)
    tl.store(dk + corner + to, along(dkeys, keys, of_key, NORMALIZE).to(dk.dtype.element_ty), mask=mask)

"""States of the delta rule from chunk to chunk, and outputs; and gradients of states back again."""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.ops.delta.chunk_tools import across, dot, long, tile


@triton.jit
def pass_states(
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
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, n, m = tl.arange(0, C), tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
    inside, wanted = n < K, m < V
    whole = wanted[:, None] & inside[None, :]
    kept = None if K == BK and V % BV == 0 else whole
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
        place = (chunk * tl.num_programs(0) + row) * H + head
        token = (row * L + at) * H + head
        keys = tile(k, row, key_head, start, i, n, here, inside, k_row, k_tok, K)
        t = tl.load(inverse + place * C * C + (i[:, None] * C + i[None, :]))
        values = across(v, row, head, start, i, m, here, wanted, v_row, v_tok, V).to(WIDE)
        strength = tl.load(beta + token, mask=here, other=0.0).to(WIDE)
        tl.store(states + place * V * K + (m[:, None] * K + n[None, :]), state.to(ELEMENT), mask=kept)
        if BY_FEATURE:
            readers = tile(reading, row, head, start, i, n, here, inside, k_row, k_tok, K)
            held = dot(state, tl.trans(readers), ELEMENT, WIDE, PRECISION)
        else:
            held = dot(state, tl.trans(keys), ELEMENT, WIDE, PRECISION)
            held *= tl.load(read + token, mask=here, other=0.0)[None, :]
        x = (values - held) * strength[None, :]
        u = dot(x, tl.trans(t), ELEMENT, WIDE, PRECISION)
        corner = ((row * L + start) * H + head) * V
        to = i[None, :] * (H * V) + m[:, None]
        tl.store(u_out + corner + to, u.to(ELEMENT), mask=here[None, :] & wanted[:, None])
        if BY_FEATURE:
            state *= tl.load(passed + place * K + n, mask=inside, other=0.0)[None, :]
        else:
            state *= tl.load(passed + place)
            u *= tl.load(write + token, mask=here, other=0.0)[None, :]
        state += dot(u, keys, ELEMENT, WIDE, PRECISION)
    tl.store(final + of_row, state, mask=whole)


@triton.jit
def outputs(
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
    row, head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) % chunks
    i, n, m = tl.arange(0, C), tl.arange(0, BK), tl.program_id(2) // chunks * BV + tl.arange(0, BV)
    start, inside, wanted = chunk * C, n < K, m < V
    at = start + i
    here = at < L
    place = (chunk * tl.num_programs(0) + row) * H + head
    whole = wanted[:, None] & inside[None, :]
    state = tl.load(states + place * V * K + (m[:, None] * K + n[None, :]), mask=whole, other=0.0)
    if BY_FEATURE:
        queries = tile(q, row, head, start, i, n, here, inside, q_row, q_tok, K)
        out = dot(queries, tl.trans(state), ELEMENT, WIDE, PRECISION)
    else:
        queries = tile(q, row, head // EACH, start, i, n, here, inside, q_row, q_tok, K)
        out = dot(queries, tl.trans(state), ELEMENT, WIDE, PRECISION)
        out *= tl.load(ask + (row * L + at) * H + head, mask=here, other=0.0)[:, None]
    p = tl.load(weights + place * C * C + (i[:, None] * C + i[None, :]))
    u = tile(u_in, row, head, start, i, m, here, wanted, long(L) * H * V, H * V, V)
    out += dot(p, u, ELEMENT, WIDE, PRECISION)
    corner = ((row * L + start) * H + head) * V
    to = i[:, None] * (H * V) + m[None, :]
    tl.store(y + corner + to, out.to(ELEMENT), mask=here[:, None] & wanted[None, :])


@triton.jit
def pass_back(
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
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, n, m = tl.arange(0, C), tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
    inside, wanted = n < K, m < V
    whole = wanted[:, None] & inside[None, :]
    kept = None if K == BK and V % BV == 0 else whole
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
        place = (chunk * tl.num_programs(0) + row) * H + head
        token = (row * L + at) * H + head
        of_matrix = i[:, None] * C + i[None, :]
        keys = tile(k, row, key_head, start, i, n, here, inside, k_row, k_tok, K)
        queries = tile(q, row, key_head, start, i, n, here, inside, q_row, q_tok, K)
        t, p = tl.load(inverse + place * C * C + of_matrix), tl.load(weights + place * C * C + of_matrix)
        above = across(dy, row, head, start, i, m, here, wanted, long(L) * H * V, H * V, V)
        strength = tl.load(beta + token, mask=here, other=0.0).to(WIDE)
        tl.store(after + place * V * K + (m[:, None] * K + n[None, :]), grad.to(ELEMENT), mask=kept)
        du = dot(grad, tl.trans(keys), ELEMENT, WIDE, PRECISION)
        if not BY_FEATURE:
            du *= tl.load(write + token, mask=here, other=0.0)[None, :]
        du += dot(above, p, ELEMENT, WIDE, PRECISION)
        dx = dot(du, t, ELEMENT, WIDE, PRECISION)
        corner = ((row * L + start) * H + head) * V
        to = i[None, :] * (H * V) + m[:, None]
        tl.store(dx_out + corner + to, dx.to(ELEMENT), mask=here[None, :] & wanted[:, None])
        dx *= strength[None, :]
        if BY_FEATURE:
            readers = tile(reading, row, head, start, i, n, here, inside, k_row, k_tok, K)
            grad *= tl.load(passed + place * K + n, mask=inside, other=0.0)[None, :]
            grad += dot(above, queries, ELEMENT, WIDE, PRECISION)
            grad += dot(-dx, readers, ELEMENT, WIDE, PRECISION)
        else:
            grad *= tl.load(passed + place)
            asked = above.to(WIDE) * tl.load(ask + token, mask=here, other=0.0)[None, :]
            grad += dot(asked, queries, ELEMENT, WIDE, PRECISION)
            dx *= tl.load(read + token, mask=here, other=0.0)[None, :]
            grad += dot(-dx, keys, ELEMENT, WIDE, PRECISION)
    tl.store(dinitial + of_row, grad, mask=whole)

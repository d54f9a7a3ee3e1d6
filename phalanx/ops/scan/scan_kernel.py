"""The selective scan in chunks. Only states go from chunk to chunk; all else is computed by all chunks at once.

    forward    _decays   _pass: states before chunks   _outputs
    backward   _decays   _pass_back: gradients of states after chunks   _query_grads   _key_grads   _value_grads: of all
               other inputs

Names as in the reference: with l the logarithms of decays, e_t their sum over the tokens of t's document in the chunk
up to t, u = dt x, and W_ts = (c_t b_s) exp(e_t - e_s) for s <= t of one document,

    y_t = sum_s W_ts u_s + exp(e_t) S c_t          if the state S before the chunk belongs to the document of t
    S'  = sum_s exp(e_last - e_s) u_s b_s^T + exp(e_last) S      over the last token's document

Gradients of B and C are sums over the heads of a group: a program of _query_grads or _key_grads has several heads of a
chunk, one after another, and keeps the sum; those of a group's programs are added up in one order. What a head has for
itself is computed apart from them: one kernel of all gradients has no room for its sums in registers.

States before chunks, and gradients of those after, are stored in the dtype of x, in which matmuls read them: with
chunks of 64 tokens of 64 features and states of 128, they are most of what moves. For 32,768 tokens, 80 heads and 8
groups in bf16: forward 2.5 GB (x read twice and y 1.0, states 1.3 written and read, B and C 0.2, from the L2 cache for
the heads of a group), backward 6.2 GB (x three times, dy four times and dx 2.7, states twice 1.3, their gradients three
times 2.0, gradients of B and C 0.2). On an H200 (4.8 TB/s) that takes 0.5 and 1.3 ms; matmuls, 0.10 and 0.4 TFLOP, 0.1
and 0.4 ms. What both do not contain is the latency of the passes: 512 chunks, one after another. Measured there: 1.3
and 3.1 ms, of which the passes have 0.6 each, _outputs 0.5, _query_grads 0.4, _key_grads 0.5 and _value_grads 1.7.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.kernel_tools import shared_bytes, triton_wide, wide_of
from phalanx.ops.scan.scan import CHUNK, ScanGrads, ScanInputs

LEAST = 16  # rows and columns of a matmul's operands
HEADS = 16  # of a program that adds up gradients of B and C
WARPS = 4
STATES = 64  # features of a state that a program takes from chunk to chunk
STAGES = 3  # of loops over values of 16 bits
OUTPUT_REGISTERS, VALUE_REGISTERS = 128, 168  # of a thread: four, and three, programs fit into a processor


@triton.jit
def _documents(numbers, row, start, at, here, L, DOCUMENTS: tl.constexpr):
    """The documents of tokens `at` of a row (-1 past its end), of the state before the chunk, and of its last token."""
    own = tl.zeros_like(at).to(tl.int64)
    carried = tl.full((), 0, tl.int64)
    last = tl.full((), 0, tl.int64)
    if DOCUMENTS:
        own = tl.load(numbers + row * L + at, mask=here, other=-1)
        carried = tl.load(numbers + row * L + tl.maximum(start - 1, 0))
        last = tl.load(numbers + row * L + tl.minimum(start + at.shape[0], L) - 1)
    return own, carried, last


@triton.jit
def _tile(x, row, head, start, i, cols, here, inside, x_row, x_tok, WIDTH: tl.constexpr):
    """(tokens, features) of a head, or of a group, of the tokens i after `start`."""
    first = x + row * x_row + tl.cast(start, tl.int64) * x_tok + head * WIDTH
    mask = here[:, None] if cols.shape[0] == WIDTH else here[:, None] & inside[None, :]
    return tl.load(first + (i[:, None] * x_tok + cols[None, :]), mask=mask, other=0.0)


@triton.jit
def _across(x, row, head, start, i, cols, here, inside, x_row, x_tok, WIDTH: tl.constexpr):
    """(features, tokens)."""
    first = x + row * x_row + tl.cast(start, tl.int64) * x_tok + head * WIDTH
    return tl.load(first + (i[None, :] * x_tok + cols[:, None]), mask=here[None, :] & inside[:, None], other=0.0)


@triton.jit
def _state(states, place, p, n, P: tl.constexpr, N: tl.constexpr):
    """(features, state) of a head and chunk."""
    at = states + place * P * N + (p[:, None] * N + n[None, :])
    if p.shape[0] == P and n.shape[0] == N:
        return tl.load(at)
    return tl.load(at, mask=(p < P)[:, None] & (n < N)[None, :], other=0.0)


@triton.jit
def _store_tile(y, values, row, head, start, i, cols, here, inside, L, heads, WIDTH: tl.constexpr):
    """To (tokens, heads, features) of a row: those of a head, of the tokens i after `start`."""
    first = y + ((row * L + start) * heads + head) * WIDTH
    mask = here[:, None] if cols.shape[0] == WIDTH else here[:, None] & inside[None, :]
    tl.store(first + (i[:, None] * (heads * WIDTH) + cols[None, :]), values.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _sums_from(x, i, ELEMENT: tl.constexpr, WIDE: tl.constexpr):
    """Of (rows, columns): the sums of each row from a column on. They are a matmul, which takes far less time than
    sums over threads do: in TF32 where x is made of numbers of 16 bits."""
    later = tl.where(i[:, None] >= i[None, :], 1.0, 0.0).to(WIDE)
    HOW: tl.constexpr = "ieee" if ELEMENT == WIDE else "tf32"
    return tl.dot(x, later, out_dtype=WIDE, input_precision=HOW).to(WIDE)


@triton.jit
def _since(sums, numbers, row, token, start, at, i, here, L, DOCUMENTS: tl.constexpr):
    """What is left at token t (rows) of the earlier tokens s of its document (columns): exp(e_t - e_s), else zero."""
    own, _, _ = _documents(numbers, row, start, at, here, L, DOCUMENTS)
    seen = (i[None, :] <= i[:, None]) & (own[None, :] == own[:, None])
    e = tl.load(sums + token, mask=here, other=0.0)
    return tl.where(seen, tl.exp(tl.where(seen, e[:, None] - e[None, :], 0.0)), 0.0)


@triton.jit
def _until(sums, numbers, row, token, start, at, i, here, L, DOCUMENTS: tl.constexpr):
    """What is left of token t (rows) at the later tokens s of its document (columns): exp(e_s - e_t), else zero."""
    own, _, _ = _documents(numbers, row, start, at, here, L, DOCUMENTS)
    seen = (i[None, :] >= i[:, None]) & (own[None, :] == own[:, None]) & here[None, :]
    e = tl.load(sums + token, mask=here, other=0.0)
    return tl.where(seen, tl.exp(tl.where(seen, e[None, :] - e[:, None], 0.0)), 0.0)


@triton.jit
def _dot(a, b, ELEMENT: tl.constexpr, WIDE: tl.constexpr):
    """In the dtype of x, added up in the wide one."""
    return tl.dot(a.to(ELEMENT), b.to(ELEMENT), out_dtype=WIDE, input_precision="ieee").to(WIDE)


@triton.jit
def _decays(
    dt,
    a,
    numbers,
    steps,
    sums,
    reaches,
    lefts,
    passed_out,
    L,
    H: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    WIDE: tl.constexpr,
    Q: tl.constexpr,
    BH: tl.constexpr,
):
    """Of tokens, (R, H, L), so that those of a head are read together: dt, e, exp(e) where the state before the chunk
    is read, and what is left of each at the end; and what is left of the state before the chunk (chunks, R, H)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(2)
    start, i, head = chunk * Q, tl.arange(0, Q), tl.program_id(1) * BH + tl.arange(0, BH)
    at, there = start + i, head < H
    here = at < L
    own, carried, last = _documents(numbers, row, start, at, here, L, DOCUMENTS)
    inside = here[:, None] & there[None, :]
    step = tl.load(dt + (row * L + at)[:, None] * H + head[None, :], mask=inside, other=0.0).to(WIDE)
    LOWEST: tl.constexpr = -746.0 if WIDE == tl.float64 else -104.0  # ops.scan.scan.NOTHING_LEFT
    logs = step * tl.load(a + head, mask=there, other=0.0).to(WIDE)[None, :]
    logs = tl.where(logs < LOWEST, LOWEST, logs)
    seen = (i[None, :] <= i[:, None]) & (own[None, :] == own[:, None])
    e = _dot(tl.where(seen, 1.0, 0.0), logs, WIDE, WIDE)
    at_end = (own == last)[:, None]
    end = tl.sum(tl.where(at_end, logs, 0.0), 0)
    to = (row * H + head)[None, :] * L + at[:, None]
    tl.store(steps + to, step, mask=inside)
    tl.store(sums + to, e, mask=inside)
    tl.store(reaches + to, tl.where((own == carried)[:, None], tl.exp(e), 0.0), mask=inside)
    tl.store(lefts + to, tl.where(at_end, tl.exp(end[None, :] - e), 0.0), mask=inside)
    place = (chunk * tl.num_programs(0) + row) * H + head
    tl.store(passed_out + place, tl.where(carried == last, tl.exp(end), 0.0), mask=there)


@triton.jit
def _pass(
    initial,
    x,
    steps,
    b,
    lefts,
    passed,
    before,
    final,
    L,
    chunks,
    x_row,
    x_tok,
    b_row,
    b_tok,
    INITIAL: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    EACH: tl.constexpr,
    ELEMENT: tl.constexpr,
    WIDE: tl.constexpr,
    Q: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    """before (chunks, R, H, P, N), in the dtype of x; final, initial (R, H, P, N). A program has BN features of a
    head's state, which stays in registers from chunk to chunk."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, p, n = tl.arange(0, Q), tl.arange(0, BP), tl.program_id(2) * BN + tl.arange(0, BN)
    whole = (p < P)[:, None] & (n < N)[None, :]
    of_state = p[:, None] * N + n[None, :]
    state = tl.zeros((BP, BN), WIDE)
    if INITIAL:
        state = tl.load(initial + (row * H + head) * P * N + of_state, mask=whole, other=0.0).to(WIDE)
    for chunk in range(0, chunks):
        start = chunk * Q
        here = start + i < L
        place = (chunk * tl.num_programs(0) + row) * H + head
        token = (row * H + head) * L + start + i
        values = _across(x, row, head, start, i, p, here, p < P, x_row, x_tok, P).to(WIDE)
        keys = _tile(b, row, head // EACH, start, i, n, here, n < N, b_row, b_tok, N)
        weights = tl.load(steps + token, mask=here, other=0.0) * tl.load(lefts + token, mask=here, other=0.0)
        tl.store(before + place * P * N + of_state, state.to(before.dtype.element_ty), mask=whole)
        state *= tl.load(passed + place)
        state += _dot(values * weights[None, :], keys, ELEMENT, WIDE)
    tl.store(final + (row * H + head) * P * N + of_state, state, mask=whole)


@triton.jit
def _outputs(
    x,
    steps,
    b,
    c,
    d,
    numbers,
    sums,
    reaches,
    before,
    y,
    L,
    x_row,
    x_tok,
    b_row,
    b_tok,
    c_row,
    c_tok,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    EACH: tl.constexpr,
    SKIP: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    ELEMENT: tl.constexpr,
    WIDE: tl.constexpr,
    Q: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    row, head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    start, i = chunk * Q, tl.arange(0, Q)
    at, p, n = start + i, tl.arange(0, BP), tl.arange(0, BN)
    here = at < L
    token = (row * H + head) * L + at
    keys = _across(b, row, head // EACH, start, i, n, here, n < N, b_row, b_tok, N)
    queries = _tile(c, row, head // EACH, start, i, n, here, n < N, c_row, c_tok, N)
    weights = _dot(queries, keys, ELEMENT, WIDE)
    place = ((chunk * tl.num_programs(0) + row) * H + head) * P * N
    inside = (n < N)[:, None] & (p < P)[None, :]
    state = tl.load(before + place + p[None, :] * N + n[:, None], mask=inside, other=0.0)
    out = _dot(queries, state, ELEMENT, WIDE) * tl.load(reaches + token, mask=here, other=0.0)[:, None]
    weights *= _since(sums, numbers, row, token, start, at, i, here, L, DOCUMENTS)
    values = _tile(x, row, head, start, i, p, here, p < P, x_row, x_tok, P).to(WIDE)
    step = tl.load(steps + token, mask=here, other=0.0)
    out += _dot(weights, values * step[:, None], ELEMENT, WIDE)
    if SKIP:
        out += tl.load(d + head).to(WIDE) * values
    _store_tile(y, out, row, head, start, i, p, here, p < P, L, H, P)


@triton.jit
def _pass_back(
    dfinal,
    dy,
    c,
    reaches,
    passed,
    after,
    dinitial,
    L,
    chunks,
    c_row,
    c_tok,
    FINAL: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    EACH: tl.constexpr,
    ELEMENT: tl.constexpr,
    WIDE: tl.constexpr,
    Q: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    """after (chunks, R, H, P, N): the gradients of the states after each chunk, in the dtype of x; dinitial, dfinal
    (R, H, P, N). Programs as in _pass."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, p, n = tl.arange(0, Q), tl.arange(0, BP), tl.program_id(2) * BN + tl.arange(0, BN)
    whole = (p < P)[:, None] & (n < N)[None, :]
    of_state = p[:, None] * N + n[None, :]
    grad = tl.zeros((BP, BN), WIDE)
    if FINAL:
        grad = tl.load(dfinal + (row * H + head) * P * N + of_state, mask=whole, other=0.0).to(WIDE)
    for back in range(0, chunks):
        chunk = chunks - 1 - back
        start = chunk * Q
        here = start + i < L
        place = (chunk * tl.num_programs(0) + row) * H + head
        token = (row * H + head) * L + start + i
        above = _across(dy, row, head, start, i, p, here, p < P, tl.cast(L, tl.int64) * H * P, H * P, P).to(WIDE)
        queries = _tile(c, row, head // EACH, start, i, n, here, n < N, c_row, c_tok, N)
        reach = tl.load(reaches + token, mask=here, other=0.0)
        tl.store(after + place * P * N + of_state, grad.to(after.dtype.element_ty), mask=whole)
        grad *= tl.load(passed + place)
        grad += _dot(above * reach[None, :], queries, ELEMENT, WIDE)
    tl.store(dinitial + (row * H + head) * P * N + of_state, grad, mask=whole)


@triton.jit
def _query_grads(
    dy,
    x,
    b,
    numbers,
    steps,
    sums,
    reaches,
    before,
    dc,
    L,
    x_row,
    x_tok,
    b_row,
    b_tok,
    parts,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    EACH: tl.constexpr,
    TOGETHER: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    ELEMENT: tl.constexpr,
    WIDE: tl.constexpr,
    Q: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    """dc (R, L, programs of a row and chunk, N). Program 1 of the grid: TOGETHER heads of a group, the `parts` of a
    group one after another."""
    row, which, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group, first = which // parts, which // parts * EACH + which % parts * TOGETHER
    start, i = chunk * Q, tl.arange(0, Q)
    at, p, n = start + i, tl.arange(0, BP), tl.arange(0, BN)
    here = at < L
    keys = _tile(b, row, group, start, i, n, here, n < N, b_row, b_tok, N)
    dqueries = tl.zeros((Q, BN), WIDE)
    for head in range(first, first + TOGETHER):
        token = (row * H + head) * L + at
        place = (chunk * tl.num_programs(0) + row) * H + head
        # of the state before the chunk
        above = _tile(dy, row, head, start, i, p, here, p < P, tl.cast(L, tl.int64) * H * P, H * P, P)
        reach = tl.load(reaches + token, mask=here, other=0.0)
        dqueries += _dot(above.to(WIDE) * reach[:, None], _state(before, place, p, n, P, N), ELEMENT, WIDE)
        # inside the chunk
        values = _across(x, row, head, start, i, p, here, p < P, x_row, x_tok, P).to(WIDE)
        u = values * tl.load(steps + token, mask=here, other=0.0)[None, :]
        between = _since(sums, numbers, row, token, start, at, i, here, L, DOCUMENTS)
        dqueries += _dot(_dot(above, u, ELEMENT, WIDE) * between, keys, ELEMENT, WIDE)
    _store_tile(dc, dqueries, row, which, start, i, n, here, n < N, L, tl.num_programs(1), N)


@triton.jit
def _key_grads(
    dy,
    x,
    c,
    numbers,
    steps,
    sums,
    lefts,
    after,
    db,
    L,
    x_row,
    x_tok,
    c_row,
    c_tok,
    parts,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    EACH: tl.constexpr,
    TOGETHER: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    ELEMENT: tl.constexpr,
    WIDE: tl.constexpr,
    Q: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    """after: gradients of the states after chunks. db and programs as in _query_grads. Products of tokens are those of
    the readers transposed, computed so: on Hopper some versions of Triton give wrong matmuls whose left operand is
    another one's result, transposed (fla-org/flash-linear-attention#640)."""
    row, which, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group, first = which // parts, which // parts * EACH + which % parts * TOGETHER
    start, i = chunk * Q, tl.arange(0, Q)
    at, p, n = start + i, tl.arange(0, BP), tl.arange(0, BN)
    here = at < L
    queries = _tile(c, row, group, start, i, n, here, n < N, c_row, c_tok, N)
    dkeys = tl.zeros((Q, BN), WIDE)
    for head in range(first, first + TOGETHER):
        token = (row * H + head) * L + at
        place = (chunk * tl.num_programs(0) + row) * H + head
        # u, which is left to the state after the chunk, and read inside it
        values = _tile(x, row, head, start, i, p, here, p < P, x_row, x_tok, P).to(WIDE)
        u = values * tl.load(steps + token, mask=here, other=0.0)[:, None]
        left = tl.load(lefts + token, mask=here, other=0.0)
        dkeys += _dot(u * left[:, None], _state(after, place, p, n, P, N), ELEMENT, WIDE)
        above = _tile(dy, row, head, start, i, p, here, p < P, tl.cast(L, tl.int64) * H * P, H * P, P)
        between = _until(sums, numbers, row, token, start, at, i, here, L, DOCUMENTS)
        dscores = _dot(u, tl.trans(above), ELEMENT, WIDE) * between
        dkeys += _dot(dscores, queries, ELEMENT, WIDE)
    _store_tile(db, dkeys, row, which, start, i, n, here, n < N, L, tl.num_programs(1), N)


@triton.jit
def _value_grads(
    dy,
    x,
    a,
    b,
    c,
    d,
    numbers,
    steps,
    sums,
    reaches,
    lefts,
    passed,
    before,
    after,
    dx,
    ddt,
    da,
    dd,
    L,
    x_row,
    x_tok,
    b_row,
    b_tok,
    c_row,
    c_tok,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    EACH: tl.constexpr,
    SKIP: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    ELEMENT: tl.constexpr,
    WIDE: tl.constexpr,
    Q: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    """Gradients of x, steps and rates, of a head and chunk: da, dd (chunks, R, H)."""
    row, head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    start, i = chunk * Q, tl.arange(0, Q)
    at, p, n = start + i, tl.arange(0, BP), tl.arange(0, BN)
    here = at < L
    token = (row * H + head) * L + at
    place = (chunk * tl.num_programs(0) + row) * H + head
    step = tl.load(steps + token, mask=here, other=0.0)
    values = _tile(x, row, head, start, i, p, here, p < P, x_row, x_tok, P).to(WIDE)
    above = _tile(dy, row, head, start, i, p, here, p < P, tl.cast(L, tl.int64) * H * P, H * P, P)
    # what is left to the state after the chunk, and what is read of the one before it
    grad, state = _state(after, place, p, n, P, N), _state(before, place, p, n, P, N)
    of_passed = tl.sum(tl.sum(state.to(WIDE) * grad.to(WIDE), 1), 0) * tl.load(passed + place)
    keys = _tile(b, row, head // EACH, start, i, n, here, n < N, b_row, b_tok, N)
    du = _dot(keys, tl.trans(grad), ELEMENT, WIDE) * tl.load(lefts + token, mask=here, other=0.0)[:, None]
    of_end = tl.sum(du * values, 1) * step
    queries = _tile(c, row, head // EACH, start, i, n, here, n < N, c_row, c_tok, N)
    read = _dot(queries, tl.trans(state), ELEMENT, WIDE)
    of_read = tl.sum(read * above.to(WIDE), 1) * tl.load(reaches + token, mask=here, other=0.0)
    # inside the chunk
    tl.debug_barrier()  # what is read again below need not stay in registers until then
    above = _tile(dy, row, head, start, i, p, here, p < P, tl.cast(L, tl.int64) * H * P, H * P, P)
    values = _tile(x, row, head, start, i, p, here, p < P, x_row, x_tok, P).to(WIDE)
    between = _until(sums, numbers, row, token, start, at, i, here, L, DOCUMENTS)
    weights = _dot(keys, tl.trans(queries), ELEMENT, WIDE) * between
    du += _dot(weights, above, ELEMENT, WIDE)
    # A logarithm counts in all that passes its token. Added up so, not as gradients of e, which cancel.
    both = weights * _dot(values * step[:, None], tl.trans(above), ELEMENT, WIDE)
    passing = _sums_from(both, i, ELEMENT, WIDE)
    dlogs = tl.sum(tl.where(i[:, None] < i[None, :], passing, 0.0), 0) + tl.cumsum(of_read, 0, reverse=True)
    tl.debug_barrier()
    above = _tile(dy, row, head, start, i, p, here, p < P, tl.cast(L, tl.int64) * H * P, H * P, P)
    values = _tile(x, row, head, start, i, p, here, p < P, x_row, x_tok, P).to(WIDE)
    own, _, last = _documents(numbers, row, start, at, here, L, DOCUMENTS)
    at_end = tl.cumsum(of_end, 0) - of_end + of_passed
    dlogs += tl.where((own == last) & here, at_end, 0.0)
    dstep = dlogs * tl.load(a + head).to(WIDE) + tl.sum(du * values, 1)
    tl.store(ddt + (row * L + at) * H + head, dstep, mask=here)
    tl.store(da + place, tl.sum(dlogs * step, 0))
    du *= step[:, None]
    if SKIP:
        du += tl.load(d + head).to(WIDE) * above.to(WIDE)
        tl.store(dd + place, tl.sum(tl.sum(above.to(WIDE) * values, 1), 0))
    _store_tile(dx, du, row, head, start, i, p, here, p < P, L, H, P)


def _last_two(x: Tensor) -> Tensor:
    """The same, contiguous in its last two dims."""
    return x if x.stride(3) == 1 and x.stride(2) == x.shape[3] else x.contiguous()


ELEMENTS = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def grad_stages(features: int, state: int, room: int) -> int:
    """Of the loops of _query_grads and _key_grads over values of 16 bits: as many as shared memory of `room` bytes
    surely has room for."""
    once, each = 2 * CHUNK * (features + state), 2 * features * (CHUNK + state) + 1024
    return max((n for n in range(2, STAGES + 1) if once + n * each <= room), default=1)


class _ScanCall:
    """What all kernels of a scan are given, and decays."""

    def __init__(self, s: ScanInputs):
        self.x, self.b, self.c = (_last_two(t) for t in (s.x, s.b, s.c))
        self.dt, self.a, self.numbers = s.dt.contiguous(), s.a.contiguous(), s.numbers
        if self.numbers is not None:
            self.numbers = self.numbers.contiguous()
        (self.rows, self.length, self.heads, self.width), (self.groups, self.state) = s.x.shape, s.b.shape[2:]
        self.chunks, self.wide = -(-self.length // CHUNK), wide_of(s.x.dtype)
        of_tokens = [self.empty(self.rows, self.heads, self.length) for _ in range(4)]
        self.steps, self.sums, self.reaches, self.lefts = of_tokens
        self.passed = self.empty(self.chunks, self.rows, self.heads)
        how = dict(H=self.heads, DOCUMENTS=self.numbers is not None, WIDE=triton_wide(self.wide), Q=CHUNK)
        grid = self.rows, triton.cdiv(self.heads, LEAST), self.chunks
        given = (self.dt, self.a, self.numbers)
        _decays[grid](*given, *of_tokens, self.passed, self.length, BH=LEAST, **how, num_warps=WARPS)

    @property
    def arithmetic(self) -> dict[str, Any]:
        blocks = {n: max(LEAST, triton.next_power_of_2(size)) for n, size in (("BP", self.width), ("BN", self.state))}
        sizes = dict(H=self.heads, P=self.width, N=self.state, EACH=self.heads // self.groups, Q=CHUNK)
        return dict(ELEMENT=ELEMENTS[self.x.dtype], WIDE=triton_wide(self.wide), **sizes, **blocks)

    @property
    def of_chunks(self) -> dict[str, Any]:
        """Of kernels that compute all chunks at once."""
        return dict(DOCUMENTS=self.numbers is not None, **self.arithmetic, num_warps=WARPS)

    def strides(self, *tensors: Tensor) -> list[int]:
        return [n for t in tensors for n in (t.stride(0), t.stride(1))]

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.wide, device=self.x.device)

    def states(self) -> Tensor:
        """Of all chunks."""
        shape = (self.chunks, self.rows, self.heads, self.width, self.state)
        return torch.empty(shape, dtype=self.x.dtype, device=self.x.device)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Rows come first: of the others a GPU takes 65,535 at most."""
        return self.rows, self.heads, self.chunks

    def over_states(self) -> tuple[tuple[int, int, int], dict[str, Any]]:
        """The grid and sizes of kernels that follow states from chunk to chunk."""
        sizes = self.arithmetic
        sizes["BN"] = min(sizes["BN"], STATES)
        stages = STAGES if self.x.dtype.itemsize == 2 else 1
        grid = self.rows, self.heads, triton.cdiv(self.state, sizes["BN"])
        return grid, dict(**sizes, num_warps=WARPS, num_stages=stages)


def scan_forward(s: ScanInputs) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference; states before chunks are in the dtype of x."""
    call = _ScanCall(s)
    before, final = call.states(), call.empty(call.rows, call.heads, call.width, call.state)
    initial = None if s.initial is None else s.initial.contiguous()
    grid, sizes = call.over_states()
    _pass[grid](
        initial,
        call.x,
        call.steps,
        call.b,
        call.lefts,
        call.passed,
        before,
        final,
        call.length,
        call.chunks,
        *call.strides(call.x, call.b),
        INITIAL=initial is not None,
        **sizes,
    )
    y = torch.empty(s.x.shape, dtype=s.x.dtype, device=s.x.device)
    _outputs[call.grid](
        call.x,
        call.steps,
        call.b,
        call.c,
        s.d,
        call.numbers,
        call.sums,
        call.reaches,
        before,
        y,
        call.length,
        *call.strides(call.x, call.b, call.c),
        SKIP=s.d is not None,
        maxnreg=OUTPUT_REGISTERS,
        **call.of_chunks,
    )
    return y, final, before


def scan_backward(dy: Tensor, dstate: Tensor | None, s: ScanInputs, before: Tensor) -> ScanGrads:
    """As the reference."""
    call, dy = _ScanCall(s), dy.contiguous()
    after, dinitial = torch.empty_like(before), call.empty(*before.shape[1:])
    given = None if dstate is None else dstate.contiguous()
    grid, sizes = call.over_states()
    _pass_back[grid](
        given,
        dy,
        call.c,
        call.reaches,
        call.passed,
        after,
        dinitial,
        call.length,
        call.chunks,
        *call.strides(call.c),
        FINAL=given is not None,
        **sizes,
    )
    of_group = call.heads // call.groups
    together = max(n for n in range(1, HEADS + 1) if of_group % n == 0)
    how = dict(**call.arithmetic, DOCUMENTS=call.numbers is not None, num_warps=WARPS)
    parts, stages = of_group // together, 1
    if call.x.dtype.itemsize == 2:
        stages = grad_stages(how["BP"], how["BN"], shared_bytes(call.x))
    dx = torch.empty(s.x.shape, dtype=s.x.dtype, device=s.x.device)
    of_parts = (call.rows, call.length, call.groups, parts, call.state)
    kinds = (like.dtype if parts == 1 else call.wide for like in (s.b, s.c))
    db, dc = (torch.empty(of_parts, dtype=kind, device=dy.device) for kind in kinds)
    of_groups = (call.rows, call.groups * parts, call.chunks)
    _query_grads[of_groups](
        dy,
        call.x,
        call.b,
        call.numbers,
        call.steps,
        call.sums,
        call.reaches,
        before,
        dc,
        call.length,
        *call.strides(call.x, call.b),
        parts,
        TOGETHER=together,
        **how,
        num_stages=stages,
    )
    _key_grads[of_groups](
        dy,
        call.x,
        call.c,
        call.numbers,
        call.steps,
        call.sums,
        call.lefts,
        after,
        db,
        call.length,
        *call.strides(call.x, call.c),
        parts,
        TOGETHER=together,
        **how,
        num_stages=stages,
    )
    ddt = call.empty(*call.dt.shape)
    da, dd = (call.empty(call.chunks, call.rows, call.heads) for _ in range(2))
    _value_grads[call.grid](
        dy,
        call.x,
        call.a,
        call.b,
        call.c,
        s.d,
        call.numbers,
        call.steps,
        call.sums,
        call.reaches,
        call.lefts,
        call.passed,
        before,
        after,
        dx,
        ddt,
        da,
        dd,
        call.length,
        *call.strides(call.x, call.b, call.c),
        SKIP=s.d is not None,
        maxnreg=VALUE_REGISTERS,
        **how,
    )
    added = (t.squeeze(3) if parts == 1 else t.sum(3) for t in (db, dc))
    db, dc = (t.to(like.dtype) for t, like in zip(added, (s.b, s.c)))
    initial = None if s.initial is None else dinitial.to(s.initial.dtype)
    return ScanGrads(dx, ddt, da.sum((0, 1)), db, dc, None if s.d is None else dd.sum((0, 1)), initial)

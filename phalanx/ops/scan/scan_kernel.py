"""The selective scan in chunks. What a chunk adds to the state, and what it makes of the state before it, are computed
by all chunks at once; only the states themselves go from chunk to chunk.

    forward    _states: what each chunk adds   _pass: states before chunks   _outputs
    backward   _state_grads: what each chunk's outputs ask of the state before it   _pass_back   _input_grads

Names as in the reference: with l the logarithms of decays, e_t their sum over the tokens of t's document in the chunk
up to t, u = dt x, and W_ts = (c_t b_s) exp(e_t - e_s) for s <= t of one document,

    y_t = sum_s W_ts u_s + exp(e_t) S c_t          if the state S before the chunk belongs to the document of t
    S'  = sum_s exp(e_last - e_s) u_s b_s^T + exp(e_last) S      over the last token's document

Gradients of B and C are sums over the heads of a group: a program has several heads of a chunk, one after another, and
keeps both sums; the sums of a group's programs are added up in one order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.kernel_tools import triton_wide, wide_of
from phalanx.ops.scan.scan import CHUNK, ScanGrads, ScanInputs

LEAST = 16  # rows and columns of a matmul's operands
HEADS = 16  # of a program that adds up gradients of B and C
WARPS = 8


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
def _decays(dt, a, own, carried, last, here, Q: tl.constexpr):
    """(Q, Q) which tokens each one reads; of tokens: e, exp(e) where the state before the chunk is read, and what is
    left of each at the end; and what is left of the state before the chunk."""
    i = tl.arange(0, Q)
    seen = (i[None, :] <= i[:, None]) & (own[None, :] == own[:, None]) & here[None, :] & here[:, None]
    e = tl.sum(tl.where(seen, (dt * a)[None, :], 0.0), 1)
    end = tl.sum(tl.where((own == last) & here, dt * a, 0.0), 0)
    reach = tl.where((own == carried) & here, tl.exp(e), 0.0)
    left = tl.where((own == last) & here, tl.exp(end - e), 0.0)
    passed = tl.where(carried == last, tl.exp(end), 0.0)
    return seen, e, reach, left, passed


@triton.jit
def _tile(x, row, head, at, cols, here, inside, x_row, x_tok, WIDTH: tl.constexpr):
    """(tokens, features) of a head, or of a group."""
    place = row * x_row + at.to(tl.int64)[:, None] * x_tok + head * WIDTH + cols[None, :]
    return tl.load(x + place, mask=here[:, None] & inside[None, :], other=0.0)


@triton.jit
def _dot(a, b, ELEMENT: tl.constexpr, WIDE: tl.constexpr):
    """In the dtype of x, added up in the wide one."""
    return tl.dot(a.to(ELEMENT), b.to(ELEMENT), out_dtype=WIDE, input_precision="ieee").to(WIDE)


@triton.jit
def _states(
    x,
    dt,
    a,
    b,
    numbers,
    added,
    passed_out,
    L,
    chunks,
    x_row,
    x_tok,
    b_row,
    b_tok,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    EACH: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    ELEMENT: tl.constexpr,
    WIDE: tl.constexpr,
    Q: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    """added (chunks, R, H, P, N), passed_out (chunks, R, H)."""
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = chunk * Q
    at, p, n = start + tl.arange(0, Q), tl.arange(0, BP), tl.arange(0, BN)
    here = at < L
    own, carried, last = _documents(numbers, row, start, at, here, L, DOCUMENTS)
    steps = tl.load(dt + (row * L + at) * H + head, mask=here, other=0.0).to(WIDE)
    _, _, _, left, passed = _decays(steps, tl.load(a + head).to(WIDE), own, carried, last, here, Q)
    u = _tile(x, row, head, at, p, here, p < P, x_row, x_tok, P).to(WIDE) * (steps * left)[:, None]
    keys = _tile(b, row, head // EACH, at, n, here, n < N, b_row, b_tok, N)
    place = (chunk * tl.num_programs(2) + row) * H + head
    tl.store(passed_out + place, passed)
    tl.store(
        added + place * P * N + p[:, None] * N + n[None, :],
        _dot(tl.trans(u), keys, ELEMENT, WIDE),
        mask=(p < P)[:, None] & (n < N)[None, :],
    )


@triton.jit
def _pass(
    initial,
    added,
    passed,
    before,
    final,
    chunks,
    each,
    PN: tl.constexpr,
    INITIAL: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """before, added (chunks, R * H, P * N), `each` of them in a chunk; final, initial (R * H, P * N)."""
    state_number = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < PN
    state = tl.zeros((BLOCK,), WIDE)
    if INITIAL:
        state = tl.load(initial + state_number * PN + cols, mask=mask, other=0.0).to(WIDE)
    for chunk in range(0, chunks):
        place = chunk * each + state_number
        tl.store(before + place * PN + cols, state, mask=mask)
        state = tl.load(added + place * PN + cols, mask=mask, other=0.0) + tl.load(passed + place) * state
    tl.store(final + state_number * PN + cols, state, mask=mask)


@triton.jit
def _outputs(
    x,
    dt,
    a,
    b,
    c,
    d,
    numbers,
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
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = chunk * Q
    at, p, n = start + tl.arange(0, Q), tl.arange(0, BP), tl.arange(0, BN)
    here = at < L
    own, carried, last = _documents(numbers, row, start, at, here, L, DOCUMENTS)
    steps = tl.load(dt + (row * L + at) * H + head, mask=here, other=0.0).to(WIDE)
    seen, e, reach, _, _ = _decays(steps, tl.load(a + head).to(WIDE), own, carried, last, here, Q)
    values = _tile(x, row, head, at, p, here, p < P, x_row, x_tok, P).to(WIDE)
    keys = _tile(b, row, head // EACH, at, n, here, n < N, b_row, b_tok, N)
    queries = _tile(c, row, head // EACH, at, n, here, n < N, c_row, c_tok, N)
    weights = _dot(queries, tl.trans(keys), ELEMENT, WIDE)
    weights = tl.where(seen, weights * tl.exp(tl.where(seen, e[:, None] - e[None, :], 0.0)), 0.0)
    out = _dot(weights, values * steps[:, None], ELEMENT, WIDE)
    place = ((chunk * tl.num_programs(2) + row) * H + head) * P * N
    inside = (p < P)[:, None] & (n < N)[None, :]
    state = tl.load(before + place + p[:, None] * N + n[None, :], mask=inside, other=0.0)
    out += reach[:, None] * _dot(queries, tl.trans(state), ELEMENT, WIDE)
    if SKIP:
        out += tl.load(d + head).to(WIDE) * values
    to = ((row * L + at)[:, None] * H + head) * P + p[None, :]
    tl.store(y + to, out.to(y.dtype.element_ty), mask=here[:, None] & (p < P)[None, :])


@triton.jit
def _state_grads(
    dy,
    dt,
    a,
    c,
    numbers,
    asked,
    L,
    c_row,
    c_tok,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    EACH: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    ELEMENT: tl.constexpr,
    WIDE: tl.constexpr,
    Q: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    """asked (chunks, R, H, P, N): of the gradient of the state before a chunk, what comes from its outputs."""
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = chunk * Q
    at, p, n = start + tl.arange(0, Q), tl.arange(0, BP), tl.arange(0, BN)
    here = at < L
    own, carried, last = _documents(numbers, row, start, at, here, L, DOCUMENTS)
    steps = tl.load(dt + (row * L + at) * H + head, mask=here, other=0.0).to(WIDE)
    _, _, reach, _, _ = _decays(steps, tl.load(a + head).to(WIDE), own, carried, last, here, Q)
    above = _tile(dy, row, head, at, p, here, p < P, tl.cast(L, tl.int64) * H * P, H * P, P).to(WIDE) * reach[:, None]
    queries = _tile(c, row, head // EACH, at, n, here, n < N, c_row, c_tok, N)
    place = ((chunk * tl.num_programs(2) + row) * H + head) * P * N
    tl.store(
        asked + place + p[:, None] * N + n[None, :],
        _dot(tl.trans(above), queries, ELEMENT, WIDE),
        mask=(p < P)[:, None] & (n < N)[None, :],
    )


@triton.jit
def _pass_back(
    dfinal,
    asked,
    passed,
    dinitial,
    chunks,
    each,
    PN: tl.constexpr,
    FINAL: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """asked (chunks, R * H, P * N) becomes the gradients of the states after each chunk; dinitial (R * H, P * N)."""
    state_number = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < PN
    grad = tl.zeros((BLOCK,), WIDE)
    if FINAL:
        grad = tl.load(dfinal + state_number * PN + cols, mask=mask, other=0.0).to(WIDE)
    for back in range(0, chunks):
        place = (chunks - 1 - back) * each + state_number
        own = tl.load(asked + place * PN + cols, mask=mask, other=0.0)
        tl.store(asked + place * PN + cols, grad, mask=mask)
        grad = own + tl.load(passed + place) * grad
    tl.store(dinitial + state_number * PN + cols, grad, mask=mask)


@triton.jit
def _input_grads(
    dy,
    x,
    dt,
    a,
    b,
    c,
    d,
    numbers,
    before,
    after,
    dx,
    ddt,
    db,
    dc,
    da,
    dd,
    L,
    x_row,
    x_tok,
    b_row,
    b_tok,
    c_row,
    c_tok,
    parts,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    EACH: tl.constexpr,
    TOGETHER: tl.constexpr,
    SKIP: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    ELEMENT: tl.constexpr,
    WIDE: tl.constexpr,
    Q: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    """after: gradients of the states after chunks. db, dc (R, L, programs of a row and chunk, N); da, dd (chunks, R,
    H). Program 1 of the grid: TOGETHER heads of a group, the `parts` of a group one after another."""
    chunk, which, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group, part = which // parts, which % parts
    start = chunk * Q
    i = tl.arange(0, Q)
    at, p, n = start + i, tl.arange(0, BP), tl.arange(0, BN)
    here = at < L
    inside = (p < P)[:, None] & (n < N)[None, :]
    own, carried, last = _documents(numbers, row, start, at, here, L, DOCUMENTS)
    keys = _tile(b, row, group, at, n, here, n < N, b_row, b_tok, N)
    queries = _tile(c, row, group, at, n, here, n < N, c_row, c_tok, N)
    scores = _dot(queries, tl.trans(keys), ELEMENT, WIDE)
    before_it = i[None, :] < i[:, None]
    dkeys = tl.zeros((Q, BN), WIDE)
    dqueries = tl.zeros((Q, BN), WIDE)
    for k in range(0, TOGETHER):
        number = part * TOGETHER + k
        if number < EACH:
            head = group * EACH + number
            rate = tl.load(a + head).to(WIDE)
            steps = tl.load(dt + (row * L + at) * H + head, mask=here, other=0.0).to(WIDE)
            seen, e, reach, left, passed = _decays(steps, rate, own, carried, last, here, Q)
            between = tl.where(seen, tl.exp(tl.where(seen, e[:, None] - e[None, :], 0.0)), 0.0)
            values = _tile(x, row, head, at, p, here, p < P, x_row, x_tok, P).to(WIDE)
            above = _tile(dy, row, head, at, p, here, p < P, tl.cast(L, tl.int64) * H * P, H * P, P).to(WIDE)
            u = values * steps[:, None]
            place = ((chunk * tl.num_programs(2) + row) * H + head) * P * N
            at_state = place + p[:, None] * N + n[None, :]
            state = tl.load(before + at_state, mask=inside, other=0.0)
            grad = tl.load(after + at_state, mask=inside, other=0.0)
            # inside the chunk
            weights = scores * between
            dweights = _dot(above, tl.trans(u), ELEMENT, WIDE)
            both = dweights * weights
            dscores = dweights * between
            du = _dot(tl.trans(weights), above, ELEMENT, WIDE)
            dqueries += _dot(dscores, keys, ELEMENT, WIDE)
            dkeys += _dot(tl.trans(dscores), queries, ELEMENT, WIDE)
            # what is read of the state before it
            read = _dot(above, state, ELEMENT, WIDE) * reach[:, None]
            dqueries += read
            of_read = tl.sum(read * queries.to(WIDE), 1)
            # what is left to the state after it
            kept = _dot(keys, tl.trans(grad), ELEMENT, WIDE) * left[:, None]
            du += kept
            dkeys += _dot(u, grad, ELEMENT, WIDE) * left[:, None]
            of_end = tl.sum(kept * u, 1)
            # A logarithm counts in all that passes its token. Added up so, not as gradients of e, which cancel.
            dlogs = tl.sum(tl.where(before_it, tl.cumsum(both, 0, reverse=True), 0.0), 1)
            dlogs += tl.sum(tl.where(before_it, 0.0, of_read[None, :]), 1)
            at_end = tl.sum(tl.where(before_it, of_end[None, :], 0.0), 1) + passed * tl.sum(tl.sum(state * grad, 1), 0)
            dlogs += tl.where((own == last) & here, at_end, 0.0)
            token = (row * L + at) * H + head
            tl.store(ddt + token, dlogs * rate + tl.sum(du * values, 1), mask=here)
            dvalues = du * steps[:, None]
            of_head = (chunk * tl.num_programs(2) + row) * H + head
            tl.store(da + of_head, tl.sum(dlogs * steps, 0))
            if SKIP:
                dvalues += tl.load(d + head).to(WIDE) * above
                tl.store(dd + of_head, tl.sum(tl.sum(above * values, 1), 0))
            to = token[:, None] * P + p[None, :]
            tl.store(dx + to, dvalues.to(dx.dtype.element_ty), mask=here[:, None] & (p < P)[None, :])
    to = ((row * L + at)[:, None] * tl.num_programs(1) + which) * N + n[None, :]
    mask = here[:, None] & (n < N)[None, :]
    tl.store(db + to, dkeys, mask=mask)
    tl.store(dc + to, dqueries, mask=mask)


def _last_two(x: Tensor) -> Tensor:
    """The same, contiguous in its last two dims."""
    return x if x.stride(3) == 1 and x.stride(2) == x.shape[3] else x.contiguous()


class _ScanCall:
    """What all kernels of a scan are given."""

    def __init__(self, s: ScanInputs):
        self.x, self.b, self.c = (_last_two(t) for t in (s.x, s.b, s.c))
        self.dt, self.a, self.numbers = s.dt.contiguous(), s.a.contiguous(), s.numbers
        if self.numbers is not None:
            self.numbers = self.numbers.contiguous()
        (self.rows, self.length, self.heads, self.width), (self.groups, self.state) = s.x.shape, s.b.shape[2:]
        self.chunks, self.wide = -(-self.length // CHUNK), wide_of(s.x.dtype)

    @property
    def constants(self) -> dict[str, Any]:
        blocks = {n: max(LEAST, triton.next_power_of_2(size)) for n, size in (("BP", self.width), ("BN", self.state))}
        element = {
            torch.bfloat16: tl.bfloat16,
            torch.float16: tl.float16,
            torch.float32: tl.float32,
            torch.float64: tl.float64,
        }[self.x.dtype]
        sizes = dict(H=self.heads, P=self.width, N=self.state, EACH=self.heads // self.groups)
        how = dict(DOCUMENTS=self.numbers is not None, ELEMENT=element, WIDE=triton_wide(self.wide), Q=CHUNK)
        return dict(**sizes, **how, **blocks, num_warps=WARPS)

    def strides(self, *tensors: Tensor) -> list[int]:
        return [n for t in tensors for n in (t.stride(0), t.stride(1))]

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.wide, device=self.x.device)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.chunks, self.heads, self.rows

    def over_states(self) -> tuple[tuple[int, int], dict[str, Any]]:
        """The grid and sizes of kernels that follow states from chunk to chunk."""
        numel = self.width * self.state
        block = min(1024, triton.next_power_of_2(numel))
        grid = triton.cdiv(numel, block), self.rows * self.heads
        return grid, dict(PN=numel, WIDE=triton_wide(self.wide), BLOCK=block, num_warps=4)

    def added(self) -> tuple[Tensor, Tensor]:
        """What each chunk adds to the state, and what is left of the state before it."""
        added = self.empty(self.chunks, self.rows, self.heads, self.width, self.state)
        passed = self.empty(self.chunks, self.rows, self.heads)
        strides = self.strides(self.x, self.b)
        _states[self.grid](
            self.x,
            self.dt,
            self.a,
            self.b,
            self.numbers,
            added,
            passed,
            self.length,
            self.chunks,
            *strides,
            **self.constants,
        )
        return added, passed


def scan_forward(s: ScanInputs) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference."""
    call = _ScanCall(s)
    added, passed = call.added()
    before, final = torch.empty_like(added), call.empty(*added.shape[1:])
    initial = None if s.initial is None else s.initial.contiguous()
    grid, sizes = call.over_states()
    each = call.rows * call.heads
    _pass[grid](initial, added, passed, before, final, call.chunks, each, INITIAL=initial is not None, **sizes)
    y = torch.empty(s.x.shape, dtype=s.x.dtype, device=s.x.device)
    _outputs[call.grid](
        call.x,
        call.dt,
        call.a,
        call.b,
        call.c,
        s.d,
        call.numbers,
        before,
        y,
        call.length,
        *call.strides(call.x, call.b, call.c),
        SKIP=s.d is not None,
        **call.constants,
    )
    return y, final, before


def scan_backward(dy: Tensor, dstate: Tensor | None, s: ScanInputs, before: Tensor) -> ScanGrads:
    """As the reference."""
    call, dy = _ScanCall(s), dy.contiguous()
    added, passed = call.added()
    del added
    after, dinitial = torch.empty_like(before), call.empty(*before.shape[1:])
    _state_grads[call.grid](
        dy, call.dt, call.a, call.c, call.numbers, after, call.length, *call.strides(call.c), **call.constants
    )
    grid, sizes = call.over_states()
    each, given = call.rows * call.heads, None if dstate is None else dstate.contiguous()
    _pass_back[grid](given, after, passed, dinitial, call.chunks, each, FINAL=given is not None, **sizes)
    of_group = call.heads // call.groups
    together = min(HEADS, of_group)
    parts = -(-of_group // together)
    dx, ddt = torch.empty(s.x.shape, dtype=s.x.dtype, device=s.x.device), call.empty(*call.dt.shape)
    db, dc = (call.empty(call.rows, call.length, call.groups * parts, call.state) for _ in range(2))
    da, dd = (call.empty(call.chunks, call.rows, call.heads) for _ in range(2))
    _input_grads[call.chunks, call.groups * parts, call.rows](
        dy,
        call.x,
        call.dt,
        call.a,
        call.b,
        call.c,
        s.d,
        call.numbers,
        before,
        after,
        dx,
        ddt,
        db,
        dc,
        da,
        dd,
        call.length,
        *call.strides(call.x, call.b, call.c),
        parts,
        TOGETHER=together,
        SKIP=s.d is not None,
        **call.constants,
    )
    by_group = (call.rows, call.length, call.groups, parts, call.state)
    db, dc = (t.view(by_group).sum(3).to(like.dtype) for t, like in ((db, s.b), (dc, s.c)))
    initial = None if s.initial is None else dinitial.to(s.initial.dtype)
    return ScanGrads(dx, ddt, da.sum((0, 1)), db, dc, None if s.d is None else dd.sum((0, 1)), initial)

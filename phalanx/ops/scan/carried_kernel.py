"""What the outputs of a scan read of a state before it, forward and backward. A block of tokens at which nothing is
left of the state is not read: y keeps its values there, and what gradients get from it is zero.

For 65,536 tokens of 128 heads of 64 features and states of 128 in bf16, all of which read the state: forward reads and
writes y, 2.1 GB, backward reads dy twice, 2.1 GB; C comes from the L2 cache for the heads of a group. Matmuls take
0.14 and 0.27 TFLOP. With nothing left, `reach` is read, 34 MB.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.kernel_tools import triton_wide
from phalanx.ops.scan.carried import SEGMENT, state_parts
from phalanx.ops.scan.scan_kernel import (
    ELEMENTS,
    LEAST,
    WARPS,
    _across,
    _dot,
    _last_two,
    _state,
    _store_tile,
    _tile,
)

TOKENS = 64  # of a block
QUERY = dict(num_warps=8, maxnreg=128)  # two programs, 16 warps, fit into a processor


@triton.jit
def _left(reach, token, here):
    """What is left of the state at tokens (zero past the end of a row), and whether that is anything. NaN is."""
    left = tl.exp(tl.load(reach + token, mask=here, other=float("-inf")))
    return left, tl.max(tl.where(left == 0.0, 0, 1), 0) > 0


@triton.jit
def _carried(
    y,
    reach,
    c,
    initial,
    L,
    c_row,
    c_tok,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    EACH: tl.constexpr,
    ELEMENT: tl.constexpr,
    WIDE: tl.constexpr,
    BT: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    row, head, start = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BT
    i, p, n = tl.arange(0, BT), tl.arange(0, BP), tl.arange(0, BN)
    here = start + i < L
    left, some = _left(reach, (row * H + head) * L + start + i, here)
    if some:
        queries = _tile(c, row, head // EACH, start, i, n, here, n < N, c_row, c_tok, N)
        state = _state(initial, row * H + head, p, n, P, N)
        out = _dot(queries, tl.trans(state.to(ELEMENT)), ELEMENT, WIDE) * left[:, None]
        out += _tile(y, row, head, start, i, p, here, p < P, tl.cast(L, tl.int64) * H * P, H * P, P).to(WIDE)
        _store_tile(y, out, row, head, start, i, p, here, p < P, L, H, P)


@triton.jit
def _carried_query_grads(
    dy,
    reach,
    c,
    initial,
    dreach,
    dc,
    L,
    dy_row,
    dy_tok,
    c_row,
    c_tok,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    EACH: tl.constexpr,
    ELEMENT: tl.constexpr,
    WIDE: tl.constexpr,
    BT: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    """dreach (R, H, L); dc (R, L, G, N), summed over the heads of a group, one after another."""
    row, group, start = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BT
    i, p, n = tl.arange(0, BT), tl.arange(0, BP), tl.arange(0, BN)
    here = start + i < L
    dqueries = tl.zeros((BT, BN), WIDE)
    for head in range(group * EACH, group * EACH + EACH):
        token = (row * H + head) * L + start + i
        left, some = _left(reach, token, here)
        of_reach = tl.zeros((BT,), WIDE)
        if some:
            above = _tile(dy, row, head, start, i, p, here, p < P, dy_row, dy_tok, P)
            state = _state(initial, row * H + head, p, n, P, N).to(ELEMENT)
            queries = _tile(c, row, group, start, i, n, here, n < N, c_row, c_tok, N)
            read = _dot(queries, tl.trans(state), ELEMENT, WIDE)
            of_reach = tl.sum(read * above.to(WIDE), 1) * left
            dqueries += _dot(above, state, ELEMENT, WIDE) * left[:, None]
        tl.store(dreach + token, of_reach, mask=here)
    _store_tile(dc, dqueries, row, group, start, i, n, here, n < N, L, H // EACH, N)


@triton.jit
def _carried_state_grads(
    dy,
    reach,
    c,
    parts,
    L,
    dy_row,
    dy_tok,
    c_row,
    c_tok,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    EACH: tl.constexpr,
    ELEMENT: tl.constexpr,
    WIDE: tl.constexpr,
    SIZE: tl.constexpr,
    BT: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    """parts (segments, R, H, P, N), of SIZE tokens each."""
    row, head, segment = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    i, p, n = tl.arange(0, BT), tl.arange(0, BP), tl.arange(0, BN)
    grad = tl.zeros((BP, BN), WIDE)
    for start in range(segment * SIZE, tl.minimum(segment * SIZE + SIZE, L), BT):
        here = start + i < L
        left, some = _left(reach, (row * H + head) * L + start + i, here)
        if some:
            above = _across(dy, row, head, start, i, p, here, p < P, dy_row, dy_tok, P).to(WIDE)
            queries = _tile(c, row, head // EACH, start, i, n, here, n < N, c_row, c_tok, N)
            grad += _dot(above * left[None, :], queries, ELEMENT, WIDE)
    place = ((segment * tl.num_programs(0) + row) * H + head) * P * N
    tl.store(parts + place + (p[:, None] * N + n[None, :]), grad, mask=(p < P)[:, None] & (n < N)[None, :])


def _sizes(y: Tensor, c: Tensor) -> dict[str, Any]:
    """Of y (R, L, H, P), or its gradient, and c."""
    (heads, width), (groups, state) = y.shape[2:], c.shape[2:]
    blocks = {name: max(LEAST, triton.next_power_of_2(size)) for name, size in (("BP", width), ("BN", state))}
    sizes = dict(H=heads, P=width, N=state, EACH=heads // groups, BT=TOKENS, **blocks)
    return dict(ELEMENT=ELEMENTS[y.dtype], WIDE=triton_wide(y.dtype), **sizes)


def carried_forward(y: Tensor, reach: Tensor, c: Tensor, initial: Tensor) -> None:
    """As the reference."""
    if not y.is_contiguous():
        whole = y.contiguous()
        carried_forward(whole, reach, c, initial)
        y.copy_(whole)
        return
    rows, length, heads, _ = y.shape
    c = _last_two(c)
    given = (y, reach.contiguous(), c, initial.contiguous(), length, c.stride(0), c.stride(1))
    _carried[(rows, heads, triton.cdiv(length, TOKENS))](*given, **_sizes(y, c), num_warps=WARPS)


def carried_backward(dy: Tensor, reach: Tensor, c: Tensor, initial: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference."""
    rows, length, heads, _ = dy.shape
    dreach, dc = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (reach, c))
    dy, reach, c, initial = _last_two(dy), reach.contiguous(), _last_two(c), initial.contiguous()
    strides = dy.stride(0), dy.stride(1), c.stride(0), c.stride(1)
    of_groups = rows, c.shape[2], triton.cdiv(length, TOKENS)
    sizes = _sizes(dy, c)
    _carried_query_grads[of_groups](dy, reach, c, initial, dreach, dc, length, *strides, **sizes, **QUERY)
    parts = state_parts(length, initial)
    of_segments, options = (rows, heads, len(parts)), dict(SIZE=SEGMENT, num_warps=WARPS)
    _carried_state_grads[of_segments](dy, reach, c, parts, length, *strides, **sizes, **options)
    return dreach, dc, parts.sum(0).to(initial.dtype)

"""RMSNorm of each query and key head and their rotation, from one packed qkv to another, forward and backward in one
pass each.

Forward: one token per program. Backward recomputes the norm's scale rather than reading it; each program handles every
n-th token and keeps its share of the weights' gradients in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.dense.rope import Angles
from phalanx.ops.dense.rope_kernel import angles, pair, pairing
from phalanx.ops.kernel_tools import num_programs, triton_wide, wide_of


@triton.jit
def _load(
    src,
    step,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The first and the second features of the pairs of `HEADS` heads that are `step` apart in memory."""
    head = tl.arange(0, BLOCK)[:, None]
    i = tl.arange(0, HALF_BLOCK)[None, :]
    mask = (head < HEADS) & (i < HALF)
    first, second = pair(i, PAIRS, HALF, NEIGHBOURS)
    at = src + head * step
    return tl.load(at + first, mask=mask, other=0.0).to(WIDE), tl.load(at + second, mask=mask, other=0.0).to(WIDE)


@triton.jit
def _store(
    out,
    a,
    b,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):
    """Store both features of each pair, as consecutive heads."""
    head = tl.arange(0, BLOCK)[:, None]
    i = tl.arange(0, HALF_BLOCK)[None, :]
    mask = (head < HEADS) & (i < HALF)
    first, second = pair(i, PAIRS, HALF, NEIGHBOURS)
    at = out + head * (2 * HALF)
    tl.store(at + first, a.to(out.dtype.element_ty), mask=mask)
    tl.store(at + second, b.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _of_pairs(
    row,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A weight's values for the first and the second features of the pairs."""
    i = tl.arange(0, HALF_BLOCK)[None, :]
    first, second = pair(i, PAIRS, HALF, NEIGHBOURS)
    a = tl.load(row + first, mask=i < HALF, other=0.0).to(WIDE)
    return a, tl.load(row + second, mask=i < HALF, other=0.0).to(WIDE)


@triton.jit
def _forward_part(
    src,
    out,
    weight,
    cos,
    sin,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    WIDE: tl.constexpr,
):
    a, b = _load(src, 2 * HALF, HEADS, BLOCK, HALF, HALF_BLOCK, PAIRS, NEIGHBOURS, WIDE)
    scale = (1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + EPS))[:, None]
    w_a, w_b = _of_pairs(weight, HALF, HALF_BLOCK, PAIRS, NEIGHBOURS, WIDE)
    a = (a * scale).to(weight.dtype.element_ty).to(
        WIDE
    ) * w_a  # rounded before the weight, as the reference implementation and Hugging Face do
    b = (b * scale).to(weight.dtype.element_ty).to(WIDE) * w_b
    _store(out, a * cos - b * sin, b * cos + a * sin, HEADS, BLOCK, HALF, HALF_BLOCK, PAIRS, NEIGHBOURS)


@triton.jit
def _forward(
    qkv,
    out,
    q_weight,
    k_weight,
    cos_table,
    sin_table,
    EPS: tl.constexpr,
    Q: tl.constexpr,
    KV: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    ROTATE: tl.constexpr,
    PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    WIDE: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    qkv += t * (Q + 2 * KV) * 2 * HALF
    out += t * (Q + 2 * KV) * 2 * HALF
    cos, sin = angles(cos_table, sin_table, t, tl.arange(0, HALF_BLOCK)[None, :], PAIRS, ROTATE, WIDE)
    _forward_part(qkv, out, q_weight, cos, sin, Q, Q_BLOCK, HALF, HALF_BLOCK, EPS, PAIRS, NEIGHBOURS, WIDE)
    _forward_part(
        qkv + Q * 2 * HALF,
        out + Q * 2 * HALF,
        k_weight,
        cos,
        sin,
        KV,
        KV_BLOCK,
        HALF,
        HALF_BLOCK,
        EPS,
        PAIRS,
        NEIGHBOURS,
        WIDE,
    )
    values = (Q + KV) * 2 * HALF
    a, b = _load(qkv + values, 2 * HALF, KV, KV_BLOCK, HALF, HALF_BLOCK, PAIRS, NEIGHBOURS, WIDE)
    _store(out + values, a, b, KV, KV_BLOCK, HALF, HALF_BLOCK, PAIRS, NEIGHBOURS)


@triton.jit
def _backward_part(
    dy,
    s_head,
    x,
    dx,
    weight,
    cos,
    sin,
    dw_a,
    dw_b,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One token's heads: dx, with the weight's gradient added to dw_a and dw_b."""
    d_a, d_b = _load(dy, s_head, HEADS, BLOCK, HALF, HALF_BLOCK, PAIRS, NEIGHBOURS, WIDE)
    g_a = d_a * cos + d_b * sin  # rotated back
    g_b = d_b * cos - d_a * sin
    a, b = _load(x, 2 * HALF, HEADS, BLOCK, HALF, HALF_BLOCK, PAIRS, NEIGHBOURS, WIDE)
    scale = (1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + EPS))[:, None]
    a = a * scale
    b = b * scale
    dw_a += g_a * a
    dw_b += g_b * b
    w_a, w_b = _of_pairs(weight, HALF, HALF_BLOCK, PAIRS, NEIGHBOURS, WIDE)
    g_a = g_a * w_a
    g_b = g_b * w_b
    mean = ((tl.sum(g_a * a, 1) + tl.sum(g_b * b, 1)) / (2 * HALF))[:, None]
    _store(dx, (g_a - a * mean) * scale, (g_b - b * mean) * scale, HEADS, BLOCK, HALF, HALF_BLOCK, PAIRS, NEIGHBOURS)
    return dw_a, dw_b


@triton.jit
def _backward(
    dq,
    dk,
    dv,
    qkv,
    dqkv,
    q_weight,
    k_weight,
    cos_table,
    sin_table,
    dw_parts,
    tokens,
    length,
    programs,
    q_seq,
    q_head,
    q_tok,
    k_seq,
    k_head,
    k_tok,
    v_seq,
    v_head,
    v_tok,
    EPS: tl.constexpr,
    Q: tl.constexpr,
    KV: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    ROTATE: tl.constexpr,
    PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    WIDE: tl.constexpr,
):
    first = tl.program_id(0)
    q_a = tl.zeros((Q_BLOCK, HALF_BLOCK), WIDE)
    q_b = tl.zeros((Q_BLOCK, HALF_BLOCK), WIDE)
    k_a = tl.zeros((KV_BLOCK, HALF_BLOCK), WIDE)
    k_b = tl.zeros((KV_BLOCK, HALF_BLOCK), WIDE)
    for number in range(first, tokens, programs):
        t = tl.full((), number, tl.int64)
        seq, tok = t // length, t % length
        x, dx = qkv + t * (Q + 2 * KV) * 2 * HALF, dqkv + t * (Q + 2 * KV) * 2 * HALF
        cos, sin = angles(cos_table, sin_table, t, tl.arange(0, HALF_BLOCK)[None, :], PAIRS, ROTATE, WIDE)
        q_a, q_b = _backward_part(
            dq + seq * q_seq + tok * q_tok,
            q_head,
            x,
            dx,
            q_weight,
            cos,
            sin,
            q_a,
            q_b,
            Q,
            Q_BLOCK,
            HALF,
            HALF_BLOCK,
            EPS,
            PAIRS,
            NEIGHBOURS,
            WIDE,
        )
        keys, values = Q * 2 * HALF, (Q + KV) * 2 * HALF
        k_a, k_b = _backward_part(
            dk + seq * k_seq + tok * k_tok,
            k_head,
            x + keys,
            dx + keys,
            k_weight,
            cos,
            sin,
            k_a,
            k_b,
            KV,
            KV_BLOCK,
            HALF,
            HALF_BLOCK,
            EPS,
            PAIRS,
            NEIGHBOURS,
            WIDE,
        )
        a, b = _load(dv + seq * v_seq + tok * v_tok, v_head, KV, KV_BLOCK, HALF, HALF_BLOCK, PAIRS, NEIGHBOURS, WIDE)
        _store(dx + values, a, b, KV, KV_BLOCK, HALF, HALF_BLOCK, PAIRS, NEIGHBOURS)
    i = tl.arange(0, HALF_BLOCK)
    one, two = pair(i, PAIRS, HALF, NEIGHBOURS)
    out = dw_parts + first * 4 * HALF
    tl.store(out + one, tl.sum(q_a, 0), mask=i < HALF)
    tl.store(out + two, tl.sum(q_b, 0), mask=i < HALF)
    tl.store(out + 2 * HALF + one, tl.sum(k_a, 0), mask=i < HALF)
    tl.store(out + 2 * HALF + two, tl.sum(k_b, 0), mask=i < HALF)


def _constants(
    heads: int, kv_heads: int, eps: float, table: Angles | None, x: Tensor, per_warp: int
) -> dict[str, object]:
    """x: the packed qkv. per_warp: pairs of features of q that one warp holds. For 256 of them in forward, ptxas needs
    64 registers a thread; for 128 in backward, 100."""
    power, width = triton.next_power_of_2, x.shape[-1]
    half = width // 2
    warps = max(1, min(16, power(heads) * power(half) // per_warp))
    return dict(
        EPS=eps,
        Q=heads,
        KV=kv_heads,
        Q_BLOCK=power(heads),
        KV_BLOCK=power(max(1, kv_heads)),  # queries may be alone
        HALF=half,
        HALF_BLOCK=power(half),
        **pairing(table, width),
        WIDE=triton_wide(x.dtype),
        num_warps=warps,
    )


def forward(qkv: Tensor, heads: int, q_weight: Tensor, k_weight: Tensor, table: Angles | None, eps: float) -> Tensor:
    """qkv (T, heads + 2 * kv_heads, K), K even -> the same with q and k normalized, scaled and, with a table, rotated
    by its angles."""
    qkv = qkv.contiguous()
    out = torch.empty_like(qkv)
    tokens, packed, _ = qkv.shape
    cos, sin = (table.cos, table.sin) if table is not None else (qkv, qkv)
    if tokens:
        constants = _constants(heads, (packed - heads) // 2, eps, table, qkv, per_warp=256)
        _forward[(tokens,)](qkv, out, q_weight, k_weight, cos, sin, **constants)
    return out


def backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    table: Angles | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq (sequences, heads, S, K), dk and dv (sequences, kv_heads, S, K) -> d_qkv like qkv, and the weights'
    gradients (K,) in the wide dtype."""
    dq, dk, dv = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk, dv))
    qkv = qkv.contiguous()
    dqkv, (tokens, _, width) = torch.empty_like(qkv), qkv.shape
    cos, sin = (table.cos, table.sin) if table is not None else (qkv, qkv)
    programs = min(tokens, num_programs(qkv, per_processor=2))
    dw = torch.empty(programs, 2, width, dtype=wide_of(qkv.dtype), device=qkv.device)
    if tokens:
        strides = [x.stride(d) for x in (dq, dk, dv) for d in (0, 1, 2)]
        constants = _constants(dq.shape[1], dk.shape[1], eps, table, qkv, per_warp=128)
        _backward[(programs,)](
            dq,
            dk,
            dv,
            qkv,
            dqkv,
            q_weight,
            k_weight,
            cos,
            sin,
            dw,
            tokens,
            dq.shape[2],
            programs,
            *strides,
            **constants,
        )
    return dqkv, *dw.sum(0)

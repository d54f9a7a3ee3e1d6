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

from phalanx.ops.kernel_tools import num_programs, triton_wide, wide_of


@triton.jit
def _load(
    src,
    step,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Both halves of `HEADS` heads that are `step` apart in memory, and the mask of valid elements."""
    head = tl.arange(0, BLOCK)[:, None]
    i = tl.arange(0, HALF_BLOCK)[None, :]
    mask = (head < HEADS) & (i < HALF)
    at = src + head * step + i
    return tl.load(at, mask=mask, other=0.0).to(WIDE), tl.load(at + HALF, mask=mask, other=0.0).to(WIDE)


@triton.jit
def _store(out, a, b, HEADS: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr):
    """Store both halves as consecutive heads."""
    head = tl.arange(0, BLOCK)[:, None]
    i = tl.arange(0, HALF_BLOCK)[None, :]
    mask = (head < HEADS) & (i < HALF)
    at = out + head * (2 * HALF) + i
    tl.store(at, a.to(out.dtype.element_ty), mask=mask)
    tl.store(at + HALF, b.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _halves(row, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, WIDE: tl.constexpr):
    i = tl.arange(0, HALF_BLOCK)[None, :]
    a = tl.load(row + i, mask=i < HALF, other=0.0).to(WIDE)
    return a, tl.load(row + HALF + i, mask=i < HALF, other=0.0).to(WIDE)


@triton.jit
def _angles(
    cos_table, sin_table, t, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, ROTATE: tl.constexpr, WIDE: tl.constexpr
):
    i = tl.arange(0, HALF_BLOCK)[None, :]
    cos = tl.full((1, HALF_BLOCK), 1.0, WIDE)
    sin = tl.zeros((1, HALF_BLOCK), WIDE)
    if ROTATE:
        cos = tl.load(cos_table + t * HALF + i, mask=i < HALF, other=0.0).to(WIDE)
        sin = tl.load(sin_table + t * HALF + i, mask=i < HALF, other=0.0).to(WIDE)
    return cos, sin


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
    WIDE: tl.constexpr,
):
    a, b = _load(src, 2 * HALF, HEADS, BLOCK, HALF, HALF_BLOCK, WIDE)
    scale = (1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + EPS))[:, None]
    w_a, w_b = _halves(weight, HALF, HALF_BLOCK, WIDE)
    a = (a * scale).to(weight.dtype.element_ty).to(
        WIDE
    ) * w_a  # rounded before the weight, as the reference implementation and Hugging Face do
    b = (b * scale).to(weight.dtype.element_ty).to(WIDE) * w_b
    _store(out, a * cos - b * sin, b * cos + a * sin, HEADS, BLOCK, HALF, HALF_BLOCK)


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
    WIDE: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    qkv += t * (Q + 2 * KV) * 2 * HALF
    out += t * (Q + 2 * KV) * 2 * HALF
    cos, sin = _angles(cos_table, sin_table, t, HALF, HALF_BLOCK, ROTATE, WIDE)
    _forward_part(qkv, out, q_weight, cos, sin, Q, Q_BLOCK, HALF, HALF_BLOCK, EPS, WIDE)
    _forward_part(qkv + Q * 2 * HALF, out + Q * 2 * HALF, k_weight, cos, sin, KV, KV_BLOCK, HALF, HALF_BLOCK, EPS, WIDE)
    values = (Q + KV) * 2 * HALF
    a, b = _load(qkv + values, 2 * HALF, KV, KV_BLOCK, HALF, HALF_BLOCK, WIDE)
    _store(out + values, a, b, KV, KV_BLOCK, HALF, HALF_BLOCK)


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
    WIDE: tl.constexpr,
):
    """One token's heads: dx, with the weight's gradient added to dw_a and dw_b."""
    d_a, d_b = _load(dy, s_head, HEADS, BLOCK, HALF, HALF_BLOCK, WIDE)
    g_a = d_a * cos + d_b * sin  # rotated back
    g_b = d_b * cos - d_a * sin
    a, b = _load(x, 2 * HALF, HEADS, BLOCK, HALF, HALF_BLOCK, WIDE)
    scale = (1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + EPS))[:, None]
    a = a * scale
    b = b * scale
    dw_a += g_a * a
    dw_b += g_b * b
    w_a, w_b = _halves(weight, HALF, HALF_BLOCK, WIDE)
    g_a = g_a * w_a
    g_b = g_b * w_b
    mean = ((tl.sum(g_a * a, 1) + tl.sum(g_b * b, 1)) / (2 * HALF))[:, None]
    _store(dx, (g_a - a * mean) * scale, (g_b - b * mean) * scale, HEADS, BLOCK, HALF, HALF_BLOCK)
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
        cos, sin = _angles(cos_table, sin_table, t, HALF, HALF_BLOCK, ROTATE, WIDE)
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
            WIDE,
        )
        a, b = _load(dv + seq * v_seq + tok * v_tok, v_head, KV, KV_BLOCK, HALF, HALF_BLOCK, WIDE)
        _store(dx + values, a, b, KV, KV_BLOCK, HALF, HALF_BLOCK)
    i = tl.arange(0, HALF_BLOCK)
    out = dw_parts + first * 4 * HALF + i
    tl.store(out, tl.sum(q_a, 0), mask=i < HALF)
    tl.store(out + HALF, tl.sum(q_b, 0), mask=i < HALF)
    tl.store(out + 2 * HALF, tl.sum(k_a, 0), mask=i < HALF)
    tl.store(out + 3 * HALF, tl.sum(k_b, 0), mask=i < HALF)


def _constants(
    heads: int, kv_heads: int, width: int, eps: float, rotate: bool, dtype: torch.dtype, per_warp: int
) -> dict[str, object]:
    """`per_warp`: pairs of features of q that one warp holds. For 256 of them in forward, ptxas needs 64 registers a
    thread; for 128 in backward, 100."""
    power, half = triton.next_power_of_2, width // 2
    warps = max(1, min(16, power(heads) * power(half) // per_warp))
    return dict(
        EPS=eps,
        Q=heads,
        KV=kv_heads,
        Q_BLOCK=power(heads),
        KV_BLOCK=power(kv_heads),
        HALF=half,
        HALF_BLOCK=power(half),
        ROTATE=rotate,
        WIDE=triton_wide(dtype),
        num_warps=warps,
    )


def forward(
    qkv: Tensor, heads: int, q_weight: Tensor, k_weight: Tensor, table: tuple[Tensor, Tensor] | None, eps: float
) -> Tensor:
    """qkv (T, heads + 2 * kv_heads, K), K even -> the same with q and k normalized, scaled and, with a table, rotated
    by its angles."""
    qkv = qkv.contiguous()
    out = torch.empty_like(qkv)
    tokens, packed, width = qkv.shape
    cos, sin = table if table is not None else (qkv, qkv)
    if tokens:
        constants = _constants(heads, (packed - heads) // 2, width, eps, table is not None, qkv.dtype, per_warp=256)
        _forward[(tokens,)](qkv, out, q_weight, k_weight, cos, sin, **constants)
    return out


def backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    table: tuple[Tensor, Tensor] | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq (sequences, heads, S, K), dk and dv (sequences, kv_heads, S, K) -> d_qkv like qkv, and the weights'
    gradients (K,) in the wide dtype."""
    dq, dk, dv = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk, dv))
    qkv = qkv.contiguous()
    dqkv, (tokens, _, width) = torch.empty_like(qkv), qkv.shape
    cos, sin = table if table is not None else (qkv, qkv)
    programs = min(tokens, num_programs(qkv, per_processor=2))
    dw = torch.empty(programs, 2, width, dtype=wide_of(qkv.dtype), device=qkv.device)
    if tokens:
        strides = [x.stride(d) for x in (dq, dk, dv) for d in (0, 1, 2)]
        constants = _constants(dq.shape[1], dk.shape[1], width, eps, table is not None, qkv.dtype, per_warp=128)
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

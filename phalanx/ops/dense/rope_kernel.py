"""Rotary position embedding from separate q, k and v into one packed tensor: one token for each program.

Forward packs the rotated q and k and a copy of v. Backward rotates the gradients of q and k back and packs them with
v's, so that no slices are filled, copied or added.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.kernel_tools import triton_wide


@triton.jit
def _heads(
    src,
    out,
    cos,
    sin,
    s_seq,
    s_head,
    s_tok,
    seq,
    tok,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    ROTATE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Store one token's `HEADS` heads of `src`, rotated if asked, as consecutive heads at `out`."""
    head = tl.arange(0, BLOCK)[:, None].to(tl.int64)  # heads of a long sequence may lie 2^31 apart
    i = tl.arange(0, HALF_BLOCK)[None, :]
    mask = (head < HEADS) & (i < HALF)
    here = src + seq * s_seq + tok * s_tok + head * s_head + i
    a = tl.load(here, mask=mask, other=0.0).to(WIDE)
    b = tl.load(here + HALF, mask=mask, other=0.0).to(WIDE)
    if ROTATE:
        a, b = a * cos - b * sin, b * cos + a * sin
    there = out + head * (2 * HALF) + i
    tl.store(there, a.to(out.dtype.element_ty), mask=mask)
    tl.store(there + HALF, b.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _pack(
    q,
    k,
    v,
    out,
    cos_table,
    sin_table,
    length,
    q_seq,
    q_head,
    q_tok,
    k_seq,
    k_head,
    k_tok,
    v_seq,
    v_head,
    v_tok,
    SIGN: tl.constexpr,
    Q: tl.constexpr,
    KV: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    ROTATE: tl.constexpr,
    WIDE: tl.constexpr,
):
    t = tl.program_id(0)
    seq, tok = (t // length).to(tl.int64), (t % length).to(tl.int64)
    out += t.to(tl.int64) * (Q + 2 * KV) * 2 * HALF
    i = tl.arange(0, HALF_BLOCK)[None, :]
    if ROTATE:
        cos = tl.load(cos_table + t * HALF + i, mask=i < HALF, other=0.0).to(WIDE)
        sin = SIGN * tl.load(sin_table + t * HALF + i, mask=i < HALF, other=0.0).to(WIDE)
    else:
        cos = tl.zeros((1, HALF_BLOCK), WIDE)
        sin = cos
    _heads(q, out, cos, sin, q_seq, q_head, q_tok, seq, tok, Q, Q_BLOCK, HALF, HALF_BLOCK, ROTATE, WIDE)
    _heads(
        k, out + Q * 2 * HALF, cos, sin, k_seq, k_head, k_tok, seq, tok, KV, KV_BLOCK, HALF, HALF_BLOCK, ROTATE, WIDE
    )
    _heads(
        v,
        out + (Q + KV) * 2 * HALF,
        cos,
        sin,
        v_seq,
        v_head,
        v_tok,
        seq,
        tok,
        KV,
        KV_BLOCK,
        HALF,
        HALF_BLOCK,
        False,
        WIDE,
    )


def pack_heads(q: Tensor, k: Tensor, v: Tensor, table: tuple[Tensor, Tensor] | None, back: bool = False) -> Tensor:
    """q (sequences, heads, S, K), k and v (sequences, kv_heads, S, K) -> (sequences * S, heads + 2 * kv_heads, K).

    With a table, q and k are rotated by its angles (backwards with `back`). The last dim must be contiguous and even.
    """
    sequences, heads, length, width = q.shape
    kv_heads, half = k.shape[1], width // 2
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out = torch.empty(sequences * length, heads + 2 * kv_heads, width, dtype=q.dtype, device=q.device)
    cos, sin = table if table is not None else (q, q)
    power = triton.next_power_of_2
    if out.numel():
        strides = [x.stride(d) for x in (q, k, v) for d in (0, 1, 2)]
        _pack[(sequences * length,)](
            q,
            k,
            v,
            out,
            cos,
            sin,
            length,
            *strides,
            SIGN=-1.0 if back else 1.0,
            Q=heads,
            KV=kv_heads,
            Q_BLOCK=power(heads),
            KV_BLOCK=power(kv_heads),
            HALF=half,
            HALF_BLOCK=power(half),
            ROTATE=table is not None,
            WIDE=triton_wide(q.dtype),
            num_warps=4,
        )
    return out

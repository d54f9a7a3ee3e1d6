"""Rotary position embedding from separate q, k and v into one packed tensor: one token for each program.

Forward packs the rotated q and k and a copy of v. Backward rotates the gradients of q and k back and packs them with
v's, so that no slices are filled, copied or added.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.dense.rope import Angles
from phalanx.ops.kernel_tools import triton_wide


@triton.jit
def pair(i, PAIRS: tl.constexpr, HALF: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """Where in a head of 2 * HALF features the two of pair i are. The first PAIRS pairs are rotated: features i and
    i + PAIRS, or NEIGHBOURS. The features after them are paired only to be read and written."""
    if NEIGHBOURS:
        first = 2 * i
        second = first + 1
    elif PAIRS == HALF:
        first = i
        second = i + HALF
    else:
        first = tl.where(i < PAIRS, i, i + PAIRS)
        second = i + tl.where(i < PAIRS, PAIRS, HALF)
    return first, second


@triton.jit
def angles(cos_table, sin_table, t, i, PAIRS: tl.constexpr, ROTATE: tl.constexpr, WIDE: tl.constexpr):
    """cos and sin of token t for the pairs i: those after the first PAIRS are not rotated."""
    cos = tl.full(i.shape, 1.0, WIDE)
    sin = tl.zeros(i.shape, WIDE)
    if ROTATE:
        cos = tl.load(cos_table + t * PAIRS + i, mask=i < PAIRS, other=1.0).to(WIDE)
        sin = tl.load(sin_table + t * PAIRS + i, mask=i < PAIRS, other=0.0).to(WIDE)
    return cos, sin


def pairing(table: Angles | None, width: int) -> dict[str, object]:
    """The constants ROTATE, PAIRS and NEIGHBOURS of the kernels, for heads of this width."""
    if table is None:
        return dict(ROTATE=False, PAIRS=width // 2, NEIGHBOURS=False)
    return dict(ROTATE=True, PAIRS=table.pairs, NEIGHBOURS=table.interleaved)


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
    PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Store one token's `HEADS` heads of `src`, rotated if asked, as consecutive heads at `out`."""
    head = tl.arange(0, BLOCK)[:, None].to(tl.int64)  # heads of a long sequence may lie 2^31 apart
    i = tl.arange(0, HALF_BLOCK)[None, :]
    mask = (head < HEADS) & (i < HALF)
    first, second = pair(i, PAIRS, HALF, NEIGHBOURS)
    here = src + seq * s_seq + tok * s_tok + head * s_head
    a = tl.load(here + first, mask=mask, other=0.0).to(WIDE)
    b = tl.load(here + second, mask=mask, other=0.0).to(WIDE)
    if ROTATE:
        a, b = a * cos - b * sin, b * cos + a * sin
    there = out + head * (2 * HALF)
    tl.store(there + first, a.to(out.dtype.element_ty), mask=mask)
    tl.store(there + second, b.to(out.dtype.element_ty), mask=mask)


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
    PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    WIDE: tl.constexpr,
):
    t = tl.program_id(0)
    seq, tok = (t // length).to(tl.int64), (t % length).to(tl.int64)
    out += t.to(tl.int64) * (Q + 2 * KV) * 2 * HALF
    i = tl.arange(0, HALF_BLOCK)[None, :]
    cos, sin = angles(cos_table, sin_table, t, i, PAIRS, ROTATE, WIDE)
    sin = SIGN * sin
    _heads(
        q,
        out,
        cos,
        sin,
        q_seq,
        q_head,
        q_tok,
        seq,
        tok,
        Q,
        Q_BLOCK,
        HALF,
        HALF_BLOCK,
        ROTATE,
        PAIRS,
        NEIGHBOURS,
        WIDE,
    )
    _heads(
        k,
        out + Q * 2 * HALF,
        cos,
        sin,
        k_seq,
        k_head,
        k_tok,
        seq,
        tok,
        KV,
        KV_BLOCK,
        HALF,
        HALF_BLOCK,
        ROTATE,
        PAIRS,
        NEIGHBOURS,
        WIDE,
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
        HALF,
        False,
        WIDE,
    )


def pack_heads(q: Tensor, k: Tensor, v: Tensor, table: Angles | None, back: bool = False) -> Tensor:
    """q (sequences, heads, S, K), k and v (sequences, kv_heads, S, K) -> (sequences * S, heads + 2 * kv_heads, K).

    With a table, its pairs of features of q and k are rotated (backwards with `back`). The last dim must be contiguous
    and even.
    """
    sequences, heads, length, width = q.shape
    kv_heads, half = k.shape[1], width // 2
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out = torch.empty(sequences * length, heads + 2 * kv_heads, width, dtype=q.dtype, device=q.device)
    cos, sin = (table.cos, table.sin) if table is not None else (q, q)
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
            **pairing(table, width),
            WIDE=triton_wide(q.dtype),
            num_warps=4,
        )
    return out

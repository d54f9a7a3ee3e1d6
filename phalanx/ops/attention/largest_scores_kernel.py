"""The largest score of each head: keys pass by in blocks, and scores are computed only where the norms of queries and
keys allow one that is larger than what is known.

Norms round too: a bound is taken a little larger than it is. A block of queries reads the keys between the first and
the last that any of them reads; of documents, those in between that no query reads are computed and not counted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.attention.reach import Reach
from phalanx.ops.kernel_tools import triton_wide, wide_of

QUERIES, KEYS = 64, 64
SLACK = 1.001


@triton.jit
def _largest(
    q,
    k,
    first,
    stop,
    bounds,
    out,
    heads,
    group,
    length,
    keys,
    blocks,
    scale,
    least,
    q_seq,
    q_head,
    q_tok,
    k_seq,
    k_head,
    k_tok,
    SLACK: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """out (sequences * heads, blocks of queries): the largest score of a block, or `least`. bounds (sequences *
    kv_heads, blocks of keys): the largest norm of a block's keys."""
    which, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence, head = which // heads, which % heads
    row = block * QUERIES + tl.arange(0, QUERIES)
    here, feature = row < length, tl.arange(0, WIDTH_BLOCK)
    low = tl.load(first + sequence * length + row, mask=here, other=2147483647)
    high = tl.load(stop + sequence * length + row, mask=here, other=0)
    at = q + sequence * q_seq + head * q_head + row.to(tl.int64)[:, None] * q_tok + feature[None, :]
    mine = tl.load(at, mask=here[:, None] & (feature[None, :] < WIDTH), other=0.0)
    wide = mine.to(WIDE)
    norm = tl.sqrt(tl.max(tl.sum(wide * wide, 1), 0)) * (tl.abs(scale) * SLACK)
    kv_heads = heads // group
    of_keys = sequence * kv_heads + head // group
    base = k + sequence * k_seq + (head // group) * k_head
    best = tl.max(tl.full((QUERIES,), least, WIDE), 0)
    for number in range(tl.min(low, 0) // KEYS, tl.cdiv(tl.max(high, 0), KEYS)):
        if norm * tl.load(bounds + of_keys * blocks + number).to(WIDE) > best:
            column = number * KEYS + tl.arange(0, KEYS)
            place = base + column.to(tl.int64)[None, :] * k_tok + feature[:, None]
            theirs = tl.load(place, mask=(column[None, :] < keys) & (feature[:, None] < WIDTH), other=0.0)
            scores = tl.dot(mine, theirs, input_precision="ieee", out_dtype=WIDE) * scale
            seen = (low[:, None] <= column[None, :]) & (column[None, :] < high[:, None])
            best = tl.maximum(best, tl.max(tl.max(tl.where(seen, scores, float("-inf")), 1), 0))
    tl.store(out + which * tl.num_programs(1) + block, best)


@torch.no_grad()
def largest_scores(q: Tensor, k: Tensor, reach: Reach, scale: float, least: float) -> Tensor:
    """As the reference."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    sequences, heads, length, width = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    wide, blocks = wide_of(q.dtype), triton.cdiv(keys, KEYS)
    norms = torch.linalg.vector_norm(k, dim=-1, dtype=wide)
    padded = torch.nn.functional.pad(norms, (0, blocks * KEYS - keys))
    bounds = padded.view(sequences, kv_heads, blocks, KEYS).amax(-1).contiguous()
    first, stop = (ends.expand(sequences, length).contiguous() for ends in reach)
    grid = (sequences * heads, triton.cdiv(length, QUERIES))
    out = torch.empty(grid, dtype=wide, device=q.device)
    _largest[grid](
        q,
        k,
        first,
        stop,
        bounds,
        out,
        heads,
        heads // kv_heads,
        length,
        keys,
        blocks,
        scale,
        least,
        *(q.stride(d) for d in (0, 1, 2)),
        *(k.stride(d) for d in (0, 1, 2)),
        SLACK=SLACK,
        WIDTH=width,
        WIDTH_BLOCK=max(16, triton.next_power_of_2(width)),
        QUERIES=QUERIES,
        KEYS=KEYS,
        WIDE=triton_wide(q.dtype),
        num_warps=4,
    )
    return out.view(sequences, heads, -1).amax((0, 2))

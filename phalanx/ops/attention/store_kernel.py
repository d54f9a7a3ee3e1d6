"""Keys and values of tokens written into pages, in one launch; into FP8 with the scales that they are rounded by."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.attention.paged import LARGEST, LEAST_SCALE, Pages
from phalanx.ops.quantized.quantize_tile import store_quantized


@triton.jit
def _store_heads(
    x,
    to,
    scales,
    token,
    slot,
    x_tok,
    x_head,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    H_BLOCK: tl.constexpr,
    W_BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """x (T, HEADS, WIDTH) of a token to its slot of `to` (slots, HEADS, WIDTH)."""
    h, i = tl.arange(0, H_BLOCK), tl.arange(0, W_BLOCK)
    here = (h < HEADS)[:, None] & (i < WIDTH)[None, :]
    v = tl.load(x + token * x_tok + h[:, None] * x_head + i[None, :], mask=here, other=0.0)
    first = to + slot * HEADS * WIDTH
    if scales is None:
        tl.store(first + h[:, None] * WIDTH + i[None, :], v, mask=here)
    else:
        wide = v.to(tl.float32)
        scale = tl.maximum(tl.math.div_rn(tl.max(tl.abs(wide), 1), LARGEST), LEAST)
        tl.store(scales + slot * HEADS + h, scale, mask=h < HEADS)
        small = tl.math.div_rn(wide, tl.broadcast_to(scale[:, None], [H_BLOCK, W_BLOCK]))
        store_quantized(small, first, WIDTH, h, i, here, LARGEST, False, INTERPRETED, False, True)


@triton.jit
def _store(
    k,
    v,
    keys,
    values,
    key_scales,
    value_scales,
    slots,
    k_tok,
    k_head,
    v_tok,
    v_head,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    H_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    _store_heads(
        k, keys, key_scales, token, slot, k_tok, k_head, HEADS, K, H_BLOCK, K_BLOCK, LARGEST, LEAST, INTERPRETED
    )
    if values is not None:
        _store_heads(
            v, values, value_scales, token, slot, v_tok, v_head, HEADS, V, H_BLOCK, V_BLOCK, LARGEST, LEAST, INTERPRETED
        )


def write_pages(k: Tensor, v: Tensor | None, pages: Pages, slots: Tensor) -> None:
    """As ops.attention.paged has it. One program a token."""
    if not len(slots):
        return
    if not all(t.is_contiguous() for t in pages.tensors):
        raise ValueError(f"pages must be contiguous; strides of keys are {pages.keys.stride()}")
    given = [x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (k, v)]
    strides = [(0, 0) if x is None else x.stride()[:2] for x in given]
    width = pages.keys.shape[-1]
    _store[(len(slots),)](
        given[0],
        given[1],
        pages.keys,
        pages.values,
        pages.key_scales,
        pages.value_scales,
        slots,
        *strides[0],
        *strides[1],
        HEADS=pages.kv_heads,
        K=width,
        V=pages.width,
        H_BLOCK=triton.next_power_of_2(pages.kv_heads),
        K_BLOCK=triton.next_power_of_2(width),
        V_BLOCK=triton.next_power_of_2(pages.width),
        LARGEST=LARGEST,
        LEAST=LEAST_SCALE,
        INTERPRETED=not k.is_cuda,
        num_warps=4 if pages.kv_heads * width >= 512 else 1,
    )

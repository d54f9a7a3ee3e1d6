"""Attention by flash-attn-4 (CuTe DSL kernels for Hopper and newer, an optional wheel). When it is taken is asked here, the rest is its own.

Dao et al., "FlashAttention", 2022; Shah et al., "FlashAttention-3", 2024. Its backward adds up d_q in the order in which blocks
finish, so gradients differ in the last bits from run to run, unless `torch.use_deterministic_algorithms(True)` asks for a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.ops.kernels import Kernels
from phalanx.ops.wheels import use_wheel


def flash_fits(head_dim: int) -> bool:
    """Head widths that its kernels were tested with here (of 40, its gradients were wrong)."""
    return head_dim in (64, 128)


def use_flash(kernels: Kernels, q: Tensor) -> bool:
    return use_wheel("attention", kernels, q, flash_fits(q.shape[-1]))


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal: q (sequences, heads, S, K), k and v (sequences, kv_heads, S, K) -> (sequences * S, heads * K), bf16 or fp16.

    It reads the heads where they lie (views of the packed qkv: its tensors are (sequences, S, heads, K) with any strides but the
    last), and returns gradients that `ops.rope` packs in the one pass it makes anyway: nothing is copied for it.
    """
    from flash_attn.cute.interface import flash_attn_func

    heads_last = (t.transpose(1, 2) for t in (q, k, v))
    out = flash_attn_func(*heads_last, causal=True, deterministic=torch.are_deterministic_algorithms_enabled())[0]
    return out.view(q.shape[0] * q.shape[2], -1)

"""Rotary position embedding of the packed qkv, taken apart into q, k and v; backward turns back and writes d_qkv as one tensor."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.ops.kernels import Kernels, use_triton


def inverse_frequencies(head_dim: int, theta: float, llama3: Any = None) -> Tensor:
    """(head_dim / 2,) float64 angles per position. Su et al., "RoFormer", 2021; `llama3` has Llama-3.1's scaling fields.

    Llama 3.1 divides low frequencies by `factor`, keeps high ones, and blends in between (by wavelength against the original
    context length).
    """
    inv = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if llama3 is None:
        return inv
    wavelength = 2 * math.pi / inv
    low = llama3.original_max_position_embeddings / llama3.low_freq_factor
    high = llama3.original_max_position_embeddings / llama3.high_freq_factor
    span = llama3.high_freq_factor - llama3.low_freq_factor
    smooth = (llama3.original_max_position_embeddings / wavelength - llama3.low_freq_factor) / span
    blended = (1 - smooth) * inv / llama3.factor + smooth * inv
    return torch.where(wavelength > low, inv / llama3.factor, torch.where(wavelength < high, inv, blended))


def rotary_table(positions: Tensor, inv: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin (T, K / 2) of positions (T,), in `dtype`, computed in float64."""
    angle = positions.to(torch.float64).unsqueeze(-1) * inv.to(positions.device)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def pack_heads(q: Tensor, k: Tensor, v: Tensor, table: tuple[Tensor, Tensor] | None, back: bool = False) -> Tensor:
    """The plain twin of kernels.rope.pack_heads."""
    sequences, heads, length, width = q.shape
    packed = torch.cat((q, k, v), 1).transpose(1, 2).reshape(sequences * length, -1, width)
    if table is None:
        return packed
    cos, sin = (t.unsqueeze(1) for t in table)
    sin = -sin if back else sin
    turned, half = heads + k.shape[1], width // 2
    out = packed.clone()
    a, b = packed[:, :turned, :half], packed[:, :turned, half:]
    out[:, :turned, :half] = a * cos - b * sin
    out[:, :turned, half:] = b * cos + a * sin
    return out


def split_heads(qkv: Tensor, heads: int, kv_heads: int, sequences: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (sequences, heads, S, K), k and v (sequences, kv_heads, S, K): views of the packed qkv (sequences * S, heads + 2 * kv_heads, K)."""
    x = qkv.view(sequences, -1, *qkv.shape[1:]).transpose(1, 2)
    return x[:, :heads], x[:, heads : heads + kv_heads], x[:, heads + kv_heads :]


class _Rope(Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, kv_heads: int, sequences: int, table: Any, triton: bool) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.table, ctx.triton = table, triton
        if table is not None:
            qkv = _twin(triton)(*split_heads(qkv, heads, kv_heads, sequences), table)
        return split_heads(qkv, heads, kv_heads, sequences)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _twin(ctx.triton)(dq, dk, dv, ctx.table, True), None, None, None, None, None


def _twin(triton: bool) -> Any:
    if triton:
        from phalanx.ops.kernels import rope

        return rope.pack_heads
    return pack_heads


def rope(qkv: Tensor, heads: int, kv_heads: int, sequences: int, table: tuple[Tensor, Tensor] | None,
         kernels: Kernels = "auto") -> tuple[Tensor, ...]:  # fmt: skip
    """The packed qkv (sequences * S, heads + 2 * kv_heads, K) as q, k, v (sequences, heads or kv_heads, S, K), q and k turned by the
    table's angles: feature i pairs with i + K/2. Without a table they are only taken apart. Backward packs the three gradients in one pass."""
    return _Rope.apply(qkv, heads, kv_heads, sequences, table, use_triton(kernels, qkv) and qkv.shape[-1] % 2 == 0)

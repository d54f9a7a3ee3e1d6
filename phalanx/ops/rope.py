"""Rotary position embedding over the packed qkv; the backward rotates back and writes d_qkv as one tensor."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


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


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, num_rotated: int) -> Tensor:
    """Rotate the first `num_rotated` heads of x (T, heads, K), pairing feature i with i + K/2; copy the others."""
    out = x.clone()
    half = x.shape[-1] // 2
    a, b = x[:, :num_rotated, :half], x[:, :num_rotated, half:]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    out[:, :num_rotated, :half] = a * cos - b * sin
    out[:, :num_rotated, half:] = b * cos + a * sin
    return out


class _Rope(Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, num_rotated: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(cos, sin)
        ctx.num_rotated = num_rotated
        return _rotate(qkv, cos, sin, num_rotated)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotate(dy, cos, -sin, ctx.num_rotated), None, None, None


def rope(qkv: Tensor, cos: Tensor, sin: Tensor, num_rotated: int) -> Tensor:
    """qkv (T, q heads + k heads + v heads, K): rotate the first `num_rotated` = q + k heads by the table's angles."""
    return _Rope.apply(qkv, cos, sin, num_rotated)

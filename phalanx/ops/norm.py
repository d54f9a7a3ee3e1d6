"""RMSNorm and LayerNorm over the last dim, computed in at least fp32; each rank normalises its own tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.ops.grads import add_grad


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        wide = _widen(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, scale)
        ctx.weight = weight
        return (wide * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # With n = x * s, s = rsqrt(mean(x^2) + eps), g = dy * w:  dx = s * (g - n * mean(g * n)),  dw = sum(dy * n)
        (x, scale), weight = ctx.saved_tensors, ctx.weight
        dy_wide, n = _widen(dy), _widen(x) * scale
        g = dy_wide * weight
        dx = scale * (g - n * (g * n).mean(-1, keepdim=True))
        return dx.to(x.dtype), add_grad(weight, (dy_wide * n).sum(0)), None


class _LayerNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        wide = _widen(x)
        mean = wide.mean(-1, keepdim=True)
        scale = torch.rsqrt(wide.var(-1, unbiased=False, keepdim=True) + eps)
        ctx.save_for_backward(x, mean, scale)
        ctx.weight, ctx.bias = weight, bias
        return ((wide - mean) * scale * weight + bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # With n = (x - mean) * s, g = dy * w:  dx = s * (g - mean(g) - n * mean(g * n)),  dw = sum(dy * n),  db = sum(dy)
        (x, mean, scale), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        dy_wide, n = _widen(dy), (_widen(x) - mean) * scale
        g = dy_wide * weight
        dx = scale * (g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True))
        return dx.to(x.dtype), add_grad(weight, (dy_wide * n).sum(0)), add_grad(bias, dy_wide.sum(0)), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (T, D) / sqrt(mean(x^2) + eps) * weight (D,). Zhang & Sennrich, "Root mean square layer normalization", 2019."""
    return _RMSNorm.apply(x, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim of x (T, D). Ba et al., "Layer normalization", 2016."""
    return _LayerNorm.apply(x, weight, bias, eps)

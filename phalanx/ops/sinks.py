"""Attention with sinks: each query head has a learned logit that joins the softmax's denominator and reads nothing.

Xiao et al., "Efficient streaming language models with attention sinks", 2024; the learned form is that of gpt-oss (OpenAI, 2025). The
fused kernels of torch do the work, and no square of the sequence is made. With L the log-sum-exp of a query's scores and s the sink of
its head, M = log(e^L + e^s) is the one with the sink, and the output is e^(L - M) of the plain one. Backward of a fused kernel makes
the probabilities anew as e^(score - L) and subtracts D = dout . out: given M and the scaled output it returns dq, dk, dv with the sink
in them. The sink's value is zero, so ds = -sum over queries of e^(s - M) D.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.ops.grads import add_grad

aten = torch.ops.aten


def attention_with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """q (B, heads, S, K), k and v (B, kv_heads, keys, K), sinks (heads,), additive mask or None (causal) -> (B, heads, S, K).

    Kept for backward: q, k, v, the output and a number per query and head. On GPUs without a mask: flash attention (bf16, fp16);
    otherwise memory-efficient attention, for which k and v are repeated to the query heads (not float64: RuntimeError of torch).
    """
    if q.is_cuda and not _is_flash(q, mask):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    return _SinkAttention.apply(q, k, v, sinks, mask, scale)


class _SinkAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:  # type: ignore[override]
        out, lse, more = _forward(q, k, v, mask, scale)
        real = lse[..., : q.shape[2]]  # memory-efficient attention pads it
        whole = torch.logaddexp(real, sinks.to(lse.dtype).view(-1, 1))
        out = (out * (real - whole).exp().unsqueeze(-1)).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, whole)
        ctx.sinks, ctx.mask, ctx.scale, ctx.more, ctx.padding = sinks, mask, scale, more, lse.shape[-1] - q.shape[2]
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, whole = ctx.saved_tensors
        dq, dk, dv = _backward(dout, q, k, v, out, F.pad(whole, (0, ctx.padding)), ctx.more, ctx.mask, ctx.scale)
        ds = None
        if ctx.needs_input_grad[3]:
            dot = (dout.to(whole.dtype) * out).sum(-1)
            weight = (ctx.sinks.to(whole.dtype).view(-1, 1) - whole).exp()
            ds = add_grad(ctx.sinks, -(weight * dot).sum((0, 2)))
        return dq, dk, dv, ds, None, None


def _is_flash(q: Tensor, mask: Tensor | None) -> bool:
    return q.is_cuda and mask is None and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor, Any]:
    """Output, log-sum-exp (B, heads, S or more), and what the backward of the same kernel wants to have back."""
    if _is_flash(q, mask):
        out, lse, *more = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)
        return out, lse, more
    if q.is_cuda:
        bias = _aligned(mask, q.shape[1])
        out, lse, *more = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, mask is None, scale=scale)
        return out, lse, more
    return *aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale), None


def _backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, more: Any, mask: Tensor | None,
              scale: float | None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if _is_flash(q, mask):
        cum_q, cum_k, max_q, max_k, seed, offset, *_ = more
        return aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset, scale=scale
        )  # fmt: skip
    if q.is_cuda:
        wanted = [True, True, True, False]
        return aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, _aligned(mask, q.shape[1]), out, lse, *more, 0.0, wanted, mask is None, scale=scale
        )[:3]  # fmt: skip
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, out, lse, 0.0, mask is None, attn_mask=mask, scale=scale)


def _aligned(mask: Tensor | None, heads: int) -> Tensor | None:
    """(B, heads, S, keys) with rows that start at multiples of 16 bytes, as memory-efficient attention wants them."""
    if mask is None:
        return None
    keys = mask.shape[-1]
    return F.pad(mask, (0, -keys % 8))[..., :keys].expand(-1, heads, -1, -1)

"""Attention with sinks: each query head has a learned logit that joins the softmax's denominator and reads nothing.

Xiao et al., "Efficient streaming language models with attention sinks", 2024; the learned form is that of gpt-oss (OpenAI, 2025). The
fused kernels of torch do the work, and no square of the sequence is made. With L the log-sum-exp of a query's scores and s the sink of
its head, M = log(e^L + e^s) is the one with the sink, and the output is e^(L - M) of the plain one. Backward of a fused kernel makes
the probabilities anew as e^(score - L) and subtracts D = dout . out: given M and the scaled output it returns dq, dk, dv with the sink
in them. The sink's value is zero, so ds = -sum over queries of e^(s - M) D.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.ops.grads import add_grad

aten = torch.ops.aten


def attention_with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """q (B, heads, S, K), k and v (B, kv_heads, keys, K), sinks (heads,), additive mask or None (causal) -> (B, heads, S, K).

    Kept for backward: q, k, v, the output and a number per query and head. On GPUs bf16 and fp16 without a mask run flash attention,
    others memory-efficient attention, for which k and v are repeated to the query heads. float64 and heads whose width is no multiple
    of 8 run the plain formula there, which makes the S x keys square of scores.
    """
    backend = choose_backend(q, mask)
    if backend.repeat:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    return _SinkAttention.apply(q, k, v, sinks, mask, 1 / math.sqrt(q.shape[-1]) if scale is None else scale, backend)


class _SinkAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Any, scale: float, backend: Backend) -> Tensor:  # type: ignore[override]
        out, lse, *more = backend.forward(q, k, v, mask, scale)
        real = lse[..., : q.shape[2]]  # memory-efficient attention pads it
        whole = torch.logaddexp(real, sinks.to(lse.dtype).view(-1, 1))
        out = (out * (real - whole).exp().unsqueeze(-1)).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, whole)
        ctx.sinks, ctx.mask, ctx.scale, ctx.backend, ctx.more, ctx.padding = sinks, mask, scale, backend, more, lse.shape[-1] - q.shape[2]
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, whole = ctx.saved_tensors
        dq, dk, dv = ctx.backend.backward(dout, q, k, v, out, F.pad(whole, (0, ctx.padding)), ctx.mask, ctx.scale, *ctx.more)
        ds = None
        if ctx.needs_input_grad[3]:
            dot = (dout.to(whole.dtype) * out).sum(-1)
            weight = (ctx.sinks.to(whole.dtype).view(-1, 1) - whole).exp()
            ds = add_grad(ctx.sinks, -(weight * dot).sum((0, 2)))
        return dq, dk, dv, ds, None, None, None


@dataclass(frozen=True)
class Backend:
    """forward(q, k, v, mask, scale) -> (out, log-sum-exp (B, heads, S or more), what backward wants to have back ...);
    backward(dout, q, k, v, out, log-sum-exp, mask, scale, ...) -> dq, dk, dv. `repeat`: k and v must have as many heads as q."""

    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    repeat: bool


def choose_backend(q: Tensor, mask: Tensor | None) -> Backend:
    if not q.is_cuda:
        return CPU
    if q.dtype == torch.float64 or q.shape[-1] % 8:
        return PLAIN
    return FLASH if mask is None and q.dtype != torch.float32 else EFFICIENT


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = q @ k.transpose(-1, -2) * scale
    if mask is not None:
        scores = scores + mask
    else:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    return scores if scores.dtype == torch.float64 else scores.float()


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, mask, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp().to(v.dtype) @ v, lse


def _plain_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None,
                    scale: float) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """With P the probabilities: dv = P^T dout, dscores = P * (dout v^T - dout . out)."""
    probs = (_scores(q, k, mask, scale) - lse.unsqueeze(-1)).exp()
    dscores = (probs * (dout @ v.transpose(-1, -2) - (dout * out).sum(-1, keepdim=True)) * scale).to(q.dtype)
    return dscores @ k, dscores.transpose(-1, -2) @ q, probs.to(q.dtype).transpose(-1, -2) @ dout


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale)


def _cpu_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None,
                  scale: float) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, out, lse, 0.0, mask is None, attn_mask=mask, scale=scale)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, mask: None, scale: float) -> tuple[Any, ...]:
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)
    return out, lse, cum_q, cum_k, max_q, max_k, seed, offset


def _flash_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: None, scale: float, cum_q: Any, cum_k: Any,
                    max_q: int, max_k: int, seed: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    call = aten._scaled_dot_product_flash_attention_backward
    return call(dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset, scale=scale)


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Any, ...]:
    return aten._scaled_dot_product_efficient_attention(q, k, v, _aligned(mask, q), True, 0.0, mask is None, scale=scale)


def _efficient_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, scale: float,
                        seed: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    call, wanted = aten._scaled_dot_product_efficient_attention_backward, [True, True, True, False]
    return call(dout, q, k, v, _aligned(mask, q), out, lse, seed, offset, 0.0, wanted, mask is None, scale=scale)[:3]


def _aligned(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """(B, heads, S, keys) with rows that start at multiples of 16 bytes, as memory-efficient attention wants them."""
    if mask is None:
        return None
    keys = mask.shape[-1]
    return F.pad(mask, (0, -keys % 8))[..., :keys].expand(*q.shape[:2], -1, -1)


PLAIN = Backend(_plain_forward, _plain_backward, repeat=True)
CPU = Backend(_cpu_forward, _cpu_backward, repeat=False)
FLASH = Backend(_flash_forward, _flash_backward, repeat=False)
EFFICIENT = Backend(_efficient_forward, _efficient_backward, repeat=True)

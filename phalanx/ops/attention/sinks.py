"""Attention with sinks: each query head has a learned logit that joins the softmax's denominator and contributes no
value.

Xiao et al., "Efficient streaming language models with attention sinks", 2024; the learned form is that of gpt-oss
(OpenAI, 2025). torch's fused kernels do the work, and the S x S scores are never materialized. With L the log-sum-exp
of a query's scores and s the sink of its head, M = log(e^L + e^s) is the log-sum-exp with the sink, and the output is
e^(L - M) times the plain one. Backward of a fused kernel recomputes the probabilities as e^(score - L) and subtracts D
= dout . out, so given M and the scaled output it returns dq, dk, dv with the sink included. The sink's value is zero,
so ds = -sum over queries of e^(s - M) D.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.ops.attention.backends import Backend, SavedBlock, Scoring, block_backend
from phalanx.ops.dense.grads import add_grad


def attention_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """q (B, heads, S, K), k and v (B, kv_heads, keys, K), sinks (heads,), additive mask or None (causal) -> (B, heads,
    S, K).

    Saved for backward: q, k, v, the output and one number for each query and head.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return _SinkAttention.apply(
        q, k, v, sinks, Scoring(mask, mask is None, scale), block_backend(q, v, mask is not None)
    )


class _SinkAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, how: Scoring, backend: Backend) -> Tensor:  # type: ignore[override]
        out, lse, *kept = backend.forward(q, k, v, how)
        out, whole = join_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, whole)
        ctx.sinks, ctx.how, ctx.backend, ctx.kept = sinks, how, backend, tuple(kept)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, whole = ctx.saved_tensors
        saved = SavedBlock(q, k, v, out, whole, ctx.kept)
        dq, dk, dv = ctx.backend.backward(dout, saved, ctx.how)
        ds = sinks_grad(ctx.sinks, dout, out, whole) if ctx.needs_input_grad[3] else None
        return dq, dk, dv, ds, None, None


def join_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, heads, S, V) and its log-sum-exp (B, heads, S), with the sinks (heads,) added to the denominator."""
    whole = torch.logaddexp(lse, sinks.to(lse.dtype).view(-1, 1))
    return out * (lse - whole).exp().unsqueeze(-1), whole


def sinks_grad(sinks: Tensor, dout: Tensor, out: Tensor, whole: Tensor) -> Tensor | None:
    """Account for the gradient of the sinks (ops.dense.grads) and return what a backward must return for them. `out`
    and `whole` are what join_sinks returned."""
    dot = (dout.to(whole.dtype) * out).sum(-1)
    weight = (sinks.to(whole.dtype).view(-1, 1) - whole).exp()
    return add_grad(sinks, -(weight * dot).sum((0, 2)))

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

import torch
from torch import Tensor

from phalanx.ops.dense.grads import add_grad


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

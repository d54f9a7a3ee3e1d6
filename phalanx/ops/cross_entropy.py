"""Chunked, vocabulary-parallel linear cross entropy: the full logits exist on no rank and at no time.

loss_t = logsumexp_v(x_t . w_v) - x_t . w_label. Each rank computes the logits of its own rows of the vocabulary, a chunk of
tokens at a time, and keeps only its log-sum-exp; backward makes the chunk's logits again, so memory is one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.base.batch import IGNORE
from phalanx.comm.axis import Axis
from phalanx.ops.grads import add_product_grad

CHUNK_ELEMENTS = 1 << 28  # logits of a chunk: 1 GiB in fp32


def local_logits(x: Tensor, weight: Tensor, count: int) -> Tensor:
    """Logits (T, rows) in at least fp32 of this rank's rows; rows past `count` are padding and get -inf."""
    logits = x @ weight.t()
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if count < weight.shape[0]:
        logits[:, count:] = -torch.inf
    return logits


def _chunks(tokens: int, rows: int) -> list[tuple[int, int]]:
    step = max(1, CHUNK_ELEMENTS // rows)
    return [(a, min(a + step, tokens)) for a in range(0, tokens, step)]


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, first: int, count: int, tp: Axis) -> Tensor:  # type: ignore[override]
        x_all = tp.all_gather(x).wait()
        here = (labels >= first) & (labels < first + count)
        rows = torch.where(here, labels - first, 0)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        parts = torch.empty(1, 2, len(labels), dtype=wide, device=x.device)  # this rank's log-sum-exp and label logit
        for a, b in _chunks(len(labels), weight.shape[0]):
            logits = local_logits(x_all[a:b], weight, count)
            parts[0, 0, a:b] = torch.logsumexp(logits, -1)
            parts[0, 1, a:b] = torch.where(here[a:b], logits.gather(1, rows[a:b, None])[:, 0], 0)
        everyone = tp.all_gather(parts).wait()
        lse, label_logit = torch.logsumexp(everyone[:, 0], 0), everyone[:, 1].sum(0)
        valid = labels != IGNORE
        ctx.save_for_backward(x, rows, here, valid, lse)
        ctx.weight, ctx.count, ctx.tp = weight, count, tp
        return torch.where(valid, lse - label_logit, 0).sum()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x, rows, here, valid, lse), weight, tp = ctx.saved_tensors, ctx.weight, ctx.tp
        x_all = tp.all_gather(x).wait()
        scale = (dloss * valid).unsqueeze(-1)
        dx, dw = torch.empty_like(x_all), None
        for a, b in _chunks(len(rows), weight.shape[0]):
            d = torch.exp(local_logits(x_all[a:b], weight, ctx.count) - lse[a:b, None])  # softmax
            d.scatter_add_(1, rows[a:b, None], -here[a:b, None].to(d.dtype))
            d = (d * scale[a:b]).to(x.dtype)
            dx[a:b] = d @ weight
            if ctx.needs_input_grad[1]:
                part = add_product_grad(weight, d, x_all[a:b])
                dw = part if dw is None or part is None else dw + part
        return tp.reduce_scatter(dx).wait(), dw, None, None, None, None


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor, first: int, count: int, tp: Axis) -> Tensor:
    """Sum over tokens of the cross entropy of x W^T against labels: a scalar, the same on every tp rank.

    x (T / tp, D) this rank's tokens; weight (rows, D) holding ids first..first+count-1, the other rows padding; labels (T,)
    of all tokens, IGNORE where there is no loss.
    """
    return _LinearCrossEntropy.apply(x, weight, labels, first, count, tp)

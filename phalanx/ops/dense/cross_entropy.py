"""Chunked, vocabulary-parallel linear cross entropy: the full logits exist on no rank and at no time.

loss_t = logsumexp_v(x_t . w_v) - x_t . w_label. Each rank computes the logits of its own rows of the vocabulary, a
chunk of tokens at a time. When the gradient of the loss is known beforehand (`seed`), forward turns each chunk's
logits into their gradient and multiplies on, so no logits are made twice; otherwise backward makes the chunk's
logits again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.comm.axis import Axis
from phalanx.ops.dense.grads import add_product_grad
from phalanx.ops.op import Kernels, use_triton
from phalanx.sequence.batch import IGNORE

CHUNK_ELEMENTS = 1 << 28  # logits of a chunk on the CPU and on the plain path (1 GiB in fp32)
CHUNK_ELEMENTS_TRITON = (
    1 << 30
)  # 2 GiB in bf16: each chunk reads and writes the whole weight gradient, so few are better


def local_logits(x: Tensor, weight: Tensor, count: int) -> Tensor:
    """Logits (T, rows) in at least fp32 of this rank's rows; rows past `count` are padding and get -inf."""
    logits = x @ weight.t()
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if count < weight.shape[0]:
        logits[:, count:] = -torch.inf
    return logits


def softmax_stats(logits: Tensor, rows: Tensor, here: Tensor, count: int) -> Tensor:
    """The reference implementation of kernels.loss.softmax_stats: (2, T) log-sum-exp of the first `count` columns; the
    label's logit, 0 where not `here`."""
    wide = logits[:, :count] if logits.dtype == torch.float64 else logits[:, :count].float()
    if count == 0:
        return torch.stack((wide.new_full((len(rows),), -torch.inf), wide.new_zeros(len(rows))))
    label = torch.where(here, wide.gather(1, rows.unsqueeze(-1))[:, 0], 0)
    return torch.stack((torch.logsumexp(wide, -1), label))


def softmax_gradient_(logits: Tensor, rows: Tensor, here: Tensor, lse: Tensor, scale: Tensor, count: int) -> Tensor:
    """The reference implementation of kernels.loss.softmax_gradient_: logits become (softmax - one hot) * scale[t], 0
    in the padding."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    d = torch.exp(wide - lse.unsqueeze(-1))
    d[:, count:] = 0
    d.scatter_add_(1, rows.unsqueeze(-1), -here.unsqueeze(-1).to(d.dtype))
    return logits.copy_(d * scale.unsqueeze(-1))


def _chunks(tokens: int, rows: int, triton: bool) -> list[slice]:
    """Runs of tokens of about equal length, each of at most CHUNK_ELEMENTS logits."""
    most = max(1, (CHUNK_ELEMENTS_TRITON if triton else CHUNK_ELEMENTS) // max(1, rows))
    step = -(-tokens // max(1, -(-tokens // most)))
    return [slice(a, min(a + step, tokens)) for a in range(0, tokens, max(1, step))]


def _twins(triton: bool) -> tuple[Any, Any]:
    if triton:
        from phalanx.ops.dense import loss_kernel

        return loss_kernel.softmax_stats, loss_kernel.softmax_gradient_
    return softmax_stats, softmax_gradient_


class _Grads:
    """Gathers the gradients of all tokens (T, D) and of the weight from those of the logits, chunk by chunk."""

    def __init__(self, x_all: Tensor, weight: Tensor, needed: tuple[bool, ...]):
        self.x_all, self.weight, self.need_w = x_all, weight, needed[1]
        self.dx_all = torch.empty_like(x_all) if needed[0] else None
        self.dw: Tensor | None = None

    def add(self, d: Tensor, chunk: slice) -> None:
        if self.dx_all is not None:
            torch.mm(d, self.weight, out=self.dx_all[chunk])
        if self.need_w:
            part = add_product_grad(self.weight, d, self.x_all[chunk])
            self.dw = part if self.dw is None or part is None else self.dw + part

    def results(self, tp: Axis) -> tuple[Tensor | None, Tensor | None]:
        return None if self.dx_all is None else tp.reduce_scatter(self.dx_all).wait(), self.dw


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        first: int,
        count: int,
        tp: Axis,
        seed: Tensor | None,
        triton: bool,
    ) -> Tensor:  # type: ignore[override]
        stats_of, gradient_ = _twins(triton)
        x_all = tp.all_gather(x).wait()
        here = (labels >= first) & (labels < first + count)
        rows, valid = torch.where(here, labels - first, 0), labels != IGNORE
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        scale = None if seed is None else (seed * valid).to(wide)
        lse, label_logit = (torch.empty(len(labels), dtype=wide, device=x.device) for _ in range(2))
        grads = _Grads(x_all, weight, ctx.needs_input_grad)
        for c in _chunks(len(labels), weight.shape[0], triton):
            logits = x_all[c] @ weight.t()
            everyone = tp.all_gather(stats_of(logits, rows[c], here[c], count).unsqueeze(0)).wait()
            lse[c], label_logit[c] = torch.logsumexp(everyone[:, 0], 0), everyone[:, 1].sum(0)
            if scale is not None:
                grads.add(gradient_(logits, rows[c], here[c], lse[c], scale[c], count), c)
        ctx.weight, ctx.count, ctx.tp, ctx.triton, ctx.done = weight, count, tp, triton, seed is not None
        if seed is None:
            ctx.save_for_backward(x, rows, here, valid, lse)
        else:
            ctx.grads = grads.results(tp)
        return torch.where(valid, lse - label_logit, 0).sum()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.done:
            return *ctx.grads, *(None,) * 6
        (x, rows, here, valid, lse), weight, tp = ctx.saved_tensors, ctx.weight, ctx.tp
        x_all = tp.all_gather(x).wait()
        scale = (dloss * valid).to(lse.dtype)
        grads = _Grads(x_all, weight, ctx.needs_input_grad)
        for c in _chunks(len(rows), weight.shape[0], ctx.triton):
            d = _twins(ctx.triton)[1](x_all[c] @ weight.t(), rows[c], here[c], lse[c], scale[c], ctx.count)
            grads.add(d, c)
        return *grads.results(tp), *(None,) * 6


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    first: int,
    count: int,
    tp: Axis,
    seed: Tensor | None = None,
    kernels: Kernels = "auto",
) -> Tensor:
    """Sum over tokens of the cross entropy of x W^T against labels: a scalar, the same on every tp rank.

    x (T / tp, D) this rank's tokens; weight (rows, D) holding ids first..first+count-1, the other rows padding;
    labels (T,) of all tokens, IGNORE where there is no loss. `seed` (): the gradient that backward will be given for
    the returned sum, if
    known: then the gradients are made here, the weight's is added at once, and backward does not look at what it is
    given.
    """
    seed = seed if torch.is_grad_enabled() else None
    return _LinearCrossEntropy.apply(x, weight, labels, first, count, tp, seed, use_triton(kernels, x))

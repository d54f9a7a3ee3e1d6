"""Embeddings of texts, pooled from the hidden states that a model without a head ends with. The loss over them is
computed for a whole step (engine.embeddings); here they are made, and receive their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from phalanx.nn.env import Env
from phalanx.nn.module import Block, Module
from phalanx.nn.objective import EmbeddingObjective
from phalanx.nn.text_rows import num_rows, pooling_weights
from phalanx.sequence.batch import Batch
from phalanx.sequence.sample import Pooling


class _WithGradient(Function):
    """`value` () in forward; in backward x (T / tp, D) has the gradient of sum(weight x row of its document)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, rows: Tensor, weights: Tensor, gradients: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows, weights, gradients)
        ctx.dtype = x.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, dvalue: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, weights, gradients = ctx.saved_tensors
        scaled = gradients[rows] * (weights.to(gradients.dtype) * dvalue.to(gradients.dtype)).unsqueeze(1)
        return scaled.to(ctx.dtype), None, None, None, None


class PooledHead(Module):
    """What takes the place of a head. `tally` as in nn.head.Head."""

    def __init__(self, env: Env):
        super().__init__(env)
        self.tally: Tensor | None = None

    @torch.no_grad()
    def pooled(self, x: Tensor, batch: Batch, pooling: Pooling) -> Tensor:
        """x (T / tp, D) -> (R, D) in at least fp32: the embedding of each document of the whole micro-batch, the same
        on all ranks that share it."""
        rows, weights = self._own(batch, pooling)
        wide = x if x.dtype == torch.float64 else x.float()
        found = wide.new_zeros(num_rows(batch), x.shape[1])
        found.index_put_((rows,), wide * weights.to(wide.dtype).unsqueeze(1), accumulate=True)  # in a fixed order
        return self.env.axes.batch_group.all_reduce(found).wait()

    def loss(self, x: Tensor, batch: Batch) -> Tensor:
        """x (T / tp, D) -> summed loss of the micro-batch's queries, which the step has computed beforehand."""
        objective = self.env.objective
        if not isinstance(objective, EmbeddingObjective):
            raise TypeError(f"{type(objective).__qualname__} needs logits, and the model has no head")
        if batch.text_gradients is None or batch.text_sums is None:
            raise RuntimeError("the batch carries no gradients of its texts' embeddings")
        value = batch.text_sums[0]
        if self.tally is not None:
            self.tally += batch.text_sums[1:]
        rows, weights = self._own(batch, objective.pooling)
        found: Tensor = _WithGradient.apply(x, value, rows, weights, batch.text_gradients)
        return found

    def _own(self, batch: Batch, pooling: Pooling) -> tuple[Tensor, Tensor]:
        """The document of each token of this rank, and its weight there."""
        if batch.documents is None:
            raise ValueError("embeddings of texts need documents: data.document_attention=true")
        tp = self.env.tp
        return tp.own_rows(batch.documents), tp.own_rows(pooling_weights(batch, pooling))


class TextStates(Block):
    """The last block of a model without a head. norm: the model's last norm; None: its layers end with one."""

    recomputable = False

    def __init__(self, env: Env, norm: Module | None = None):
        super().__init__(env)
        self.norm = nn.Identity() if norm is None else norm
        self.head = PooledHead(env)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.head.loss(self.norm(x), batch)

    def pooled(self, x: Tensor, batch: Batch, pooling: Pooling) -> Tensor:
        return self.head.pooled(self.norm(x), batch, pooling)

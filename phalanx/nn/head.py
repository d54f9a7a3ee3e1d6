"""The language-model head: vocabulary-parallel logits and cross entropy, with a forward-only mode for generation."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.layout.box import cut
from phalanx.layout.param import Init, Replica
from phalanx.nn.embedding import vocabulary_spec
from phalanx.nn.env import Env
from phalanx.nn.module import Module
from phalanx.nn.parameter import Parameter
from phalanx.ops.dense.cross_entropy import LOSS, linear_cross_entropy, local_logits
from phalanx.sequence.batch import Batch


class Head(Module):
    """`weight` may be handed in: the input embedding's, when both are tied and on one rank."""

    def __init__(
        self,
        env: Env,
        name: str,
        vocab: int,
        width: int,
        std: float,
        replicas: tuple[Replica, ...] = (),
        weight: Parameter | None = None,
    ):
        super().__init__(env)
        first, stop = env.cut(vocab)
        self.first, self.count, self.vocab = first, stop - first, vocab
        self.weight = (
            weight
            if weight is not None
            else self.param(vocabulary_spec(env, name, vocab, width, Init("normal", std), replicas))
        )

    def loss(self, x: Tensor, batch: Batch) -> Tensor:
        """x (T / tp, D) -> summed cross entropy of the batch's labels, the same on every tp rank."""
        seed = batch.loss_seed if self.training and not batch.late else None
        return linear_cross_entropy(
            x, self.weight, batch.labels, self.first, self.count, self.env.tp, seed, self.env.kernels_for(LOSS)
        )

    @torch.no_grad()
    def logits(self, x: Tensor, rows: Tensor) -> Tensor:
        """Full logits (len(rows), vocab) of a few tokens, for generation; rows are places in the whole micro-batch."""
        tp = self.env.tp
        mine = local_logits(tp.all_gather(x).wait()[rows], self.weight, self.count)
        parts = tp.all_gather(mine.unsqueeze(0)).wait()
        return torch.cat([p[:, : b - a] for p, (a, b) in zip(parts, cut(self.vocab, tp.size))], -1)

    def flops(self, seq_length: int) -> float:
        return 2.0 * self.vocab * self.weight.shape[1]

    def loss_flops(self, seq_length: int) -> float:
        return self.flops(seq_length)

"""Multi-token prediction: modules after the last layer that predict tokens further ahead. DeepSeek-V3 technical report,
section 2.2.

Defines how depths are chained, what they read and how their losses join the main one; a depth's layer, the embedding
and the head are passed in. T tokens of a micro-batch, D model, k depth (1 is the token after the next).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from phalanx.nn.embedding import Embedding
from phalanx.nn.env import Env
from phalanx.nn.head import Head
from phalanx.nn.initial import Normal
from phalanx.nn.linear import ReplicatedLinear
from phalanx.nn.module import Block, Module, OutputRows
from phalanx.nn.moe import Attach
from phalanx.nn.norm import RMSNorm
from phalanx.sequence.batch import IGNORE, Batch, PerBatch

SHIFTED = PerBatch[tuple[Tensor, Tensor]]()


class DepthNames(NamedTuple):
    """Names of the tensors of a depth beside its layer's: the projection, and the norms of embeddings, of hidden states
    and of the layer's output; without `.weight`."""

    project: str
    embedding: str
    hidden: str
    norm: str


class Depth(Module):
    """One depth: h_k = norm(layer(project([norm(embedding of the later token); norm(h_{k-1})]))). The projection is
    whole on each tp rank. make_norm: the norm of this name."""

    def __init__(
        self, env: Env, names: DepthNames, make_norm: Callable[[str], RMSNorm], width: int, std: float, layer: Block
    ):
        super().__init__(env)
        rows = [OutputRows(f"{names.project}.weight", width, 0, width, env.everyone)]
        self.project = ReplicatedLinear(env, rows, 2 * width, Normal(std))
        self.enorm, self.hnorm = make_norm(names.embedding), make_norm(names.hidden)
        self.layer = layer
        self.norm = make_norm(names.norm)

    def forward(self, h: Tensor, next_embedding: Tensor, batch: Batch) -> Tensor:
        """h, next_embedding (T / tp, D) -> (T / tp, D)."""
        x = self.project(torch.cat((self.enorm(next_embedding), self.hnorm(h)), -1))
        return self.norm(self.layer(x, batch))

    def flops(self, seq_length: int) -> float:
        rows, columns = self.project.weight.shape
        return 2.0 * rows * columns + self.layer.flops(seq_length)


class MultiTokenPrediction(Block):
    """x -> norm(x), the model's last norm. In training, its backward also starts that of the losses of all depths.

    Each depth uses the objective's loss, summed over tokens and multiplied by weight / number of depths. Like the whole
    gradient, it is divided by the divisor of the main loss: a depth's mean is over all positions (equation 24),
    although the last k have no loss. `tally` () float64 accumulates the depths' summed losses over micro-batches; the
    training engine creates it.
    """

    recomputable = False  # heads compute gradients in forward, which must happen only once

    def __init__(self, env: Env, norm: RMSNorm, embed: Embedding, head: Head, depths: list[Depth], weight: float):
        super().__init__(env)
        self.norm, self.embed, self.head, self.depths, self.weight = norm, embed, head, nn.ModuleList(depths), weight
        self.tally: Tensor | None = None

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        h = self.norm(x)
        if not self.training or not torch.is_grad_enabled():
            return h
        unit = torch.ones((), dtype=torch.float64, device=x.device) if batch.loss_seed is None else batch.loss_seed
        share = unit * (self.weight / len(self.depths))
        state, loss = h, h.new_zeros((), dtype=torch.float32)
        for k, depth in enumerate(self.depths, 1):
            tokens, labels = SHIFTED.of(batch, partial(shifted, batch, k), k)
            state = self._hidden(depth, state, self.embed(tokens), batch)
            further = batch.with_loss(labels, None if batch.loss_seed is None else share)
            loss = loss + self.head.token_loss(state, further)
        return Attach.apply(h, loss, share, partial(self._count, loss.detach()))

    def remembering(self) -> list[Module]:
        """Nothing that the model's own tokens need: depths train it, and draft."""
        return []

    def drafting(self, depths: int) -> list[Module]:
        """What the first so many depths remember while they draft."""
        return [m for depth in self.depths[:depths] for m in depth.modules() if isinstance(m, Module) and m.remembers]

    def draft(self, depth: int, h: Tensor, tokens: Tensor, batch: Batch) -> Tensor:
        """What a depth (0 is the first) makes of h (T / tp, D), of the depth before or normed of the model, and of
        tokens (T,), each the last one that it reads: of sequences that go on (Batch.paged)."""
        made: Tensor = self.depths[depth](h, self.embed(tokens), batch)
        return made

    def _hidden(self, depth: nn.Module, h: Tensor, next_embedding: Tensor, batch: Batch) -> Tensor:
        return self.env.recompute.whole(partial(depth, batch=batch), h, next_embedding)

    def _count(self, loss: Tensor) -> None:
        if self.tally is not None:
            self.tally += loss

    def flops(self, seq_length: int) -> float:
        return self.loss_flops(seq_length) + sum(d.flops(seq_length) for d in self.depths if isinstance(d, Depth))

    def loss_flops(self, seq_length: int) -> float:
        return len(self.depths) * self.head.flops(seq_length)


def shifted(batch: Batch, k: int) -> tuple[Tensor, Tensor]:
    """(tokens, labels), each (T,), from `k` positions later in the sequence and the document.

    Past the end of either there is no loss, and the token is repeated.
    """
    if batch.whole is not None:
        tokens, labels = shifted(batch.uncut, k)
        return batch.take(tokens), batch.take(labels)
    place = torch.arange(batch.num_tokens, device=batch.tokens.device)
    further = torch.where(place % batch.seq_length < batch.seq_length - k, place + k, place)
    if batch.documents is not None:
        further = torch.where(batch.documents[further] == batch.documents, further, place)
    return batch.tokens[further], torch.where(further > place, batch.labels[further], IGNORE)

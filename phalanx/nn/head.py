"""The language-model head: vocabulary-parallel logits and the objective's loss over them, with a forward-only mode for
generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from phalanx.comm.axis import Axis
from phalanx.layout.box import cut
from phalanx.layout.param import Replica, Role
from phalanx.nn.embedding import vocabulary_bias_spec, vocabulary_spec
from phalanx.nn.env import Env
from phalanx.nn.initial import Normal
from phalanx.nn.module import Block, Module
from phalanx.nn.objective import (
    EmbeddingObjective,
    Objective,
    SequenceObjective,
    StepTexts,
    TokenObjective,
    cross_entropy,
)
from phalanx.nn.parameter import Parameter
from phalanx.nn.sequence_groups import SequenceGroups, groups_of
from phalanx.ops.dense.cross_entropy import LOSS, HeadMatrix, linear_cross_entropy, local_logits, soft_capped
from phalanx.ops.dense.token_loss import (
    LogitStats,
    SparseTargets,
    TokenTask,
    VocabularyShard,
    linear_token_loss,
    logit_stats,
    token_losses,
    top_log_probs,
    vocabulary_logits,
    widened,
)
from phalanx.ops.op import Kernels
from phalanx.sequence.batch import Batch

TokenFunction = Callable[[LogitStats], Tensor]


def no_metrics(logits: LogitStats) -> dict[str, Tensor]:
    return {}


class _WithValue(Function):
    """`value` in forward, with the gradients of `x` () in backward; `value` itself gets none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        ctx.dtype = x.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, dvalue: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return dvalue.to(ctx.dtype), None


def metric_names(objective: Objective) -> tuple[str, ...]:
    """The names of the metrics that an objective logs, found by calling it with one token or group. TypeError if it
    does not return what it should."""
    if isinstance(objective, SequenceObjective):
        zeros = torch.zeros(1, objective.sequences_per_sample, dtype=torch.float64)
        found: Any = objective.metrics(*[zeros] * (1 + objective.needs_reference))
    elif isinstance(objective, EmbeddingObjective):
        zero = torch.zeros(1, dtype=torch.int64)
        found = objective.metrics(StepTexts(torch.ones(1, 1, dtype=torch.float64), zero, zero, slice(0, 1)))
    elif isinstance(objective, TokenObjective):
        found = objective.metrics(_stats_of_one())
    if not isinstance(found, dict) or any(not isinstance(v, Tensor) or v.shape != (1,) for v in found.values()):
        kind = type(objective)
        rule = "must return a dict of tensors, a value for each token or group"
        raise TypeError(f"metrics of {kind.__module__}:{kind.__qualname__} {rule}, not {found!r}")
    return tuple(found)


def _stats_of_one() -> LogitStats:
    """Of one token whose label and target is the one id there is."""
    zero = torch.zeros(1, dtype=torch.int64)
    targets = SparseTargets(zero.view(1, 1), torch.ones(1, 1))
    logits = torch.zeros(1, 1, dtype=torch.float64)
    return logit_stats(logits, zero, VocabularyShard(0, 1, 1), Axis("tp"), targets)


class Head(Module):
    """`weight` may be passed in: the input embedding's, if both are tied and on one rank. `role` applies to a weight
    created here: "embedding" if both are tied. `soft_cap`: logits become cap * tanh(logit / cap).

    bias   name of a bias of the logits; None: there is none

    tally (K,) float64 accumulates the sums of the objective's K metrics over micro-batches; the training engine creates
    it.
    """

    def __init__(
        self,
        env: Env,
        name: str,
        vocab: int,
        width: int,
        std: float,
        replicas: tuple[Replica, ...] = (),
        weight: Parameter | None = None,
        role: Role = "head",
        soft_cap: float | None = None,
        bias: str | None = None,
    ):
        super().__init__(env)
        first, stop = env.cut(vocab)
        self.shard = VocabularyShard(first, stop - first, vocab)
        self.weight = (
            weight
            if weight is not None
            else self.param(vocabulary_spec(env, name, vocab, width, Normal(std), replicas, role))
        )
        self.names: tuple[str, ...] = (name,)  # as a linear, for its adapter
        self.cut, self.experts = 0, 0
        linears = env.weights.linears
        self.adapted = None if linears is None or weight is not None else linears.logits_of(self)
        self.bias = None if bias is None else self.param(vocabulary_bias_spec(env, bias, vocab))
        self.tally: Tensor | None = None
        self.soft_cap = soft_cap

    def _entered(self, x: Tensor) -> tuple[Tensor, HeadMatrix]:
        """What is multiplied: x (T / tp, D), with an adapter's features beside it, and the matrix."""
        if self.adapted is None:
            return x, HeadMatrix(self.weight, bias=self.bias)
        return self.adapted.enter(x), self.adapted.matrix(self.weight)._replace(bias=self.bias)

    def transform(self, logits: Tensor) -> Tensor:
        """Logits (tokens, ids) in at least fp32 -> the logits to use, element by element: for families that change
        them otherwise than by a cap."""
        return soft_capped(logits, self.soft_cap)

    def loss(self, x: Tensor, batch: Batch) -> Tensor:
        """x (T / tp, D) -> summed loss of the objective, the same on every tp rank."""
        objective = self.env.objective
        if isinstance(objective, SequenceObjective):
            return self._sequence_loss(x, batch, objective)
        if not isinstance(objective, TokenObjective) or type(objective).metrics is TokenObjective.metrics:
            return self.token_loss(x, batch)
        sums = self._sums(
            x, batch, self._task(batch, objective.weights(batch), objective.token_loss, objective.metrics)
        )
        self._count([sums[1:].detach()])
        return sums[0]

    def token_loss(self, x: Tensor, batch: Batch) -> Tensor:
        """x (T / tp, D) -> summed loss of a per-token objective, without its metrics."""
        objective: Any = self.env.objective
        weights = objective.weights(batch)
        if objective.token_loss is cross_entropy:
            return self.weighted_cross_entropy(x, batch, weights)
        return self._sums(x, batch, self._task(batch, weights, objective.token_loss))[0]

    def vocabulary_logits(self, x: Tensor) -> Tensor:
        """x (T / tp, D) -> (T, ids of this rank) logits with gradients, for losses that need all of them."""
        return self.transform(widened(vocabulary_logits(*self._entered(x), self.shard, self.env.tp, self._kernels)))

    def weighted_cross_entropy(self, x: Tensor, batch: Batch, weights: Tensor | None) -> Tensor:
        """x (T / tp, D) -> summed cross entropy of the labels, each times its weight (T,), if there are any."""
        if self._own_transform:
            return self._sums(x, batch, self._task(batch, weights))[0]
        shard, kernels, (x, matrix) = self.shard, self._kernels, self._entered(x)
        return linear_cross_entropy(
            x,
            matrix,
            batch.labels,
            shard.first,
            shard.count,
            self.env.tp,
            self._seed(batch),
            kernels,
            weights,
            self.soft_cap,
        )

    def _sequence_loss(self, x: Tensor, batch: Batch, objective: SequenceObjective) -> Tensor:
        """The first pass gives log-probabilities. The derivative of the loss by them scales each token's loss in the
        second."""
        groups, kernels = groups_of(batch, objective.sequences_per_sample), self._kernels
        with torch.no_grad():
            losses = token_losses(*self._entered(x), self.shard, self.env.tp, self._task(batch), kernels)
        weights = objective.weights(batch)
        policy = groups.sums(-losses if weights is None else -losses * weights, self.env.axes.cp)
        reference = [self._reference(batch, groups, weights)] if objective.needs_reference else []
        with torch.enable_grad():
            of_groups = objective.loss(policy.requires_grad_(), *reference)
            if of_groups.shape != groups.there.shape:
                shapes = f"{[*groups.there.shape]}, and has shape {[*of_groups.shape]}"
                raise TypeError(f"loss of {type(objective).__qualname__} must be one value for each group, {shapes}")
            (slopes,) = torch.autograd.grad(torch.where(groups.there, of_groups, 0).sum(), policy)
        with torch.no_grad():
            self._count(
                [groups.total(v).double().view(1) for v in objective.metrics(policy.detach(), *reference).values()]
            )
            total = groups.total(of_groups.detach())
        if not torch.is_grad_enabled():
            return total
        slopes = -groups.of_tokens(slopes) if weights is None else -groups.of_tokens(slopes) * weights
        return _WithValue.apply(self.weighted_cross_entropy(x, batch, slopes), total)

    def _reference(self, batch: Batch, groups: SequenceGroups, weights: Tensor | None) -> Tensor:
        """(P, n) log-probabilities of the reference model."""
        if batch.reference is None:
            raise RuntimeError("the batch carries no log-probabilities of a reference model")
        known = torch.where(batch.labelled, batch.reference, 0)
        return groups.sums(known if weights is None else known * weights, self.env.axes.cp)

    @torch.no_grad()
    def log_probs(self, x: Tensor, batch: Batch, top: int = 0) -> Tensor:
        """x (T / tp, D) -> (T, 1 + 2 top) float64: the log-probability of each label, 0 where there is none; then the
        `top` most likely ids and their log-probabilities, descending."""
        args = (*self._entered(x), self.shard, self.env.tp, self._task(batch))
        if top == 0:
            return -token_losses(*args, self._kernels).double().unsqueeze(-1)
        of_labels, ids, values = top_log_probs(*args, top)
        return torch.cat((of_labels.double().unsqueeze(-1), ids.double(), values.double()), -1)

    def _task(
        self,
        batch: Batch,
        weights: Tensor | None = None,
        loss: TokenFunction = cross_entropy,
        metrics: Callable[[LogitStats], dict[str, Tensor]] = no_metrics,
    ) -> TokenTask:
        objective = self.env.objective
        targets = objective.targets(batch) if isinstance(objective, TokenObjective) else None
        return TokenTask(batch.labels, weights, loss, metrics, self._transform, self._kernels, targets)

    @property
    def _kernels(self) -> Kernels:
        return self.env.kernels_for(LOSS)

    @property
    def _transform(self) -> Callable[[Tensor], Tensor] | None:
        return self.transform if self._own_transform or self.soft_cap is not None else None

    @property
    def _own_transform(self) -> bool:
        """Whether a family's class changes logits in a way that the fused op does not know."""
        return type(self).transform is not Head.transform

    def _sums(self, x: Tensor, batch: Batch, task: TokenTask) -> Tensor:
        return linear_token_loss(*self._entered(x), self.shard, self.env.tp, task, self._seed(batch))

    def _seed(self, batch: Batch) -> Tensor | None:
        """The gradient of the summed loss, if gradients are computed in forward."""
        return batch.loss_seed if self.training and not batch.late else None

    def _count(self, sums: list[Tensor]) -> None:
        if self.tally is not None and sums:
            self.tally += torch.cat(sums)

    @torch.no_grad()
    def logits(self, x: Tensor, rows: Tensor) -> Tensor:
        """Full logits (len(rows), vocab) of a few tokens, for generation; rows are positions in the whole micro-batch,
        whose tokens the ranks of cp, and of tp in each, have one after another."""
        tp, cp = self.env.tp, self.env.axes.cp
        x, matrix = self._entered(x)
        everyone = cp.all_gather(tp.all_gather(x).wait()).wait()
        mine = local_logits(everyone[rows], matrix, self.shard.count, self._kernels)
        parts = tp.all_gather(mine.unsqueeze(0)).wait()
        whole = torch.cat([p[:, : b - a] for p, (a, b) in zip(parts, cut(self.shard.size, tp.size))], -1)
        return self.transform(whole)

    def flops(self, seq_length: int) -> float:
        return 2.0 * self.shard.size * self.weight.shape[1]

    def loss_flops(self, seq_length: int) -> float:
        return self.flops(seq_length)


class HeadBlock(Block):
    """The last block of a model of text: a norm, then the head."""

    recomputable = False
    norm: nn.Module
    head: Head

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.head.loss(self.norm(x), batch)

    def logits(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.head.logits(self.norm(x), rows)

    def log_probs(self, x: Tensor, batch: Batch, top: int = 0) -> Tensor:
        return self.head.log_probs(self.norm(x), batch, top)

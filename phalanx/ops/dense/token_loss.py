"""Losses per token from vocabulary-parallel logits: statistics of the logits with gradients, and a head that turns any
loss over these statistics into gradients in one pass, one chunk of tokens at a time.

With z = logsumexp(logits), t = the label's logit and m = the logits' mean, a loss f(z, t, m) has the gradient df/dz
softmax + df/dt onehot + df/dm / V. A token may have further targets: K ids with weights (a teacher's distribution); the
weighted sum of their logits has the weights as its gradient. Each rank has its own rows of the vocabulary; all
statistics are the same on all. This is the reference for any loss. Cross entropy has faster implementations of its own
(cross_entropy.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.base.dataclass import dataclass
from phalanx.comm.axis import Axis
from phalanx.ops.dense.cross_entropy import LOSS, Columns, HeadGrads, HeadMatrix, chunks_of, softmax_stats
from phalanx.ops.dense.matmul import gather_matmul
from phalanx.ops.op import Kernels
from phalanx.sequence.batch import IGNORE


@dataclass(frozen=True)
class VocabularyShard:
    """The ids first .. first + count - 1 of a vocabulary of `size`, which this tp rank holds."""

    first: int
    count: int
    size: int

    def rows_of(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(T,) the row of each label, 0 for labels on other ranks; and whether the label is on this rank."""
        here = (labels >= self.first) & (labels < self.first + self.count)
        return torch.where(here, labels - self.first, 0), here


def widened(logits: Tensor) -> Tensor:
    """x in at least fp32."""
    return logits if logits.dtype == torch.float64 else logits.float()


@dataclass(frozen=True)
class SparseTargets:
    """Targets of T tokens over K ids each, such as the most likely ids of a teacher.

    ids      (T, K) int64, the same on all tp ranks
    weights  (T, K) the share of each id in its token's target
    """

    ids: Tensor
    weights: Tensor

    def of(self, tokens: slice) -> SparseTargets:
        return SparseTargets(self.ids[tokens], self.weights[tokens])


class FromLogits(NamedTuple):
    """What is computed from the logits themselves when it is asked for: the statistics at a temperature, and the
    largest logit (T,)."""

    at: Callable[[float], LogitStats]
    largest: Callable[[], Tensor]


class LogitStats:
    """Statistics of T tokens' logits over the whole vocabulary, equal on all tp ranks, in at least fp32.

    log_z    (T,) logarithm of the sum of exp(logit)
    target   (T,) logit of the token's label; 0 where it has none
    mean     (T,) mean logit; computed when it is read
    largest  (T,) the largest logit, without gradients; computed when it is read
    soft     (T,) sum of weight x logit over the targets that the objective gives; computed when it is read
    weights  (T, K) the weights of those targets
    """

    def __init__(
        self,
        log_z: Tensor,
        target: Tensor,
        make_mean: Callable[[], Tensor],
        make_soft: Callable[[], Tensor] | None = None,
        weights: Tensor | None = None,
        logits: FromLogits | None = None,
    ):
        self.log_z, self.target, self._make_mean = log_z, target, make_mean
        self._make_soft, self._weights, self._logits = make_soft, weights, logits
        self._made_at: dict[float, LogitStats] = {}

    @cached_property
    def mean(self) -> Tensor:
        return self._make_mean()

    @property
    def _from_logits(self) -> FromLogits:
        if self._logits is None:
            raise TypeError("these statistics were made without their logits")
        return self._logits

    @cached_property
    def largest(self) -> Tensor:
        return self._from_logits.largest()

    @cached_property
    def soft(self) -> Tensor:
        if self._make_soft is None:
            raise TypeError("the objective gives no targets besides labels: it must override `targets`")
        return self._make_soft()

    @property
    def weights(self) -> Tensor:
        if self._weights is None:
            raise TypeError("the objective gives no targets besides labels: it must override `targets`")
        return self._weights

    def at(self, temperature: float) -> LogitStats:
        """The statistics of the logits divided by a temperature."""
        if temperature == 1:
            return self
        if temperature not in self._made_at:
            self._made_at[temperature] = self._from_logits.at(temperature)
        return self._made_at[temperature]

    def detach(self) -> LogitStats:
        """The same without gradients."""
        return LogitStats(
            self.log_z.detach(),
            self.target.detach(),
            lambda: self.mean.detach(),
            lambda: self.soft.detach(),
            self._weights,
            FromLogits(lambda temperature: self.at(temperature).detach(), lambda: self.largest),
        )


class _LogitStats(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor, here: Tensor, tp: Axis) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        everyone = tp.all_gather(softmax_stats(logits, rows, here, Columns(logits.shape[1])).unsqueeze(0)).wait()
        log_z, target = torch.logsumexp(everyone[:, 0], 0), everyone[:, 1].sum(0)
        ctx.save_for_backward(logits, rows, here, log_z)
        return log_z, target

    @staticmethod
    def backward(ctx: Any, dlog_z: Tensor, dtarget: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, rows, here, log_z = ctx.saved_tensors
        d = torch.exp(logits - log_z.unsqueeze(-1)) * dlog_z.unsqueeze(-1)
        if d.shape[1]:  # a rank may hold no ids
            d.scatter_add_(1, rows.unsqueeze(-1), (dtarget * here).unsqueeze(-1))
        return d, None, None, None


class _MeanLogit(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, size: int, tp: Axis) -> Tensor:  # type: ignore[override]
        ctx.shape, ctx.size = logits.shape, size
        return tp.all_reduce(logits.sum(-1)).wait() / size

    @staticmethod
    def backward(ctx: Any, dmean: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (dmean / ctx.size).unsqueeze(-1).expand(ctx.shape), None, None


class _TargetLogits(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor, here: Tensor, tp: Axis) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows, here)
        ctx.shape = logits.shape
        mine = logits.gather(1, rows) if logits.shape[1] else logits.new_zeros(rows.shape)  # a rank may hold no ids
        return tp.all_reduce(torch.where(here, mine, 0)).wait()

    @staticmethod
    def backward(ctx: Any, dfound: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, here = ctx.saved_tensors
        d = dfound.new_zeros(ctx.shape)
        return d.scatter_add_(1, rows, dfound * here) if d.shape[1] else d, None, None, None


def target_logits(logits: Tensor, ids: Tensor, shard: VocabularyShard, tp: Axis) -> Tensor:
    """(T, K) the logit of each of ids (T, K), with gradients, from this rank's logits (T, shard.count)."""
    rows, here = shard.rows_of(ids)
    found: Tensor = _TargetLogits.apply(logits, rows, here, tp)
    return found


@torch.no_grad()
def largest_logits(logits: Tensor, tp: Axis) -> Tensor:
    """(T,) the largest over all ranks, each of which has its own ids (T, count), perhaps none."""
    mine = logits.amax(-1) if logits.shape[1] else logits.new_full(logits.shape[:1], -torch.inf)
    return tp.all_gather(mine.unsqueeze(0)).wait().amax(0)


def logit_stats(
    logits: Tensor, labels: Tensor, shard: VocabularyShard, tp: Axis, targets: SparseTargets | None = None
) -> LogitStats:
    """Statistics, with gradients, of this rank's logits (T, shard.count), widened to fp32; labels (T,)."""
    wide, (rows, here) = widened(logits), shard.rows_of(labels)
    log_z, target = _LogitStats.apply(wide, rows, here, tp)
    weights = None if targets is None else targets.weights.to(wide.dtype)

    def soft() -> Tensor:
        if targets is None or weights is None:
            raise TypeError("the objective gives no targets besides labels: it must override `targets`")
        return (target_logits(wide, targets.ids, shard, tp) * weights).sum(-1)

    return LogitStats(
        log_z,
        target,
        lambda: _MeanLogit.apply(wide, shard.size, tp),
        soft,
        weights,
        FromLogits(
            lambda temperature: logit_stats(wide / temperature, labels, shard, tp, targets),
            lambda: largest_logits(wide, tp),
        ),
    )


def vocabulary_logits(
    x: Tensor, weight: Tensor | HeadMatrix, shard: VocabularyShard, tp: Axis, kernels: Kernels = "auto"
) -> Tensor:
    """x (T / tp, D) of each rank, weight (rows, D) -> this rank's logits (T, shard.count), with gradients."""
    matrix = HeadMatrix.of(weight)
    own, beside = matrix.split(x)
    logits = gather_matmul(own, matrix.weight, tp, matrix.bias, kernels)[:, : shard.count]
    return logits if matrix.up is None else logits + gather_matmul(beside, matrix.up, tp)


@dataclass(frozen=True)
class TokenTask:
    """What is computed from the logits of T tokens.

    labels      (T,) IGNORE where there is no loss
    weights     (T,) factor of each token's loss; None: 1
    loss        statistics of some tokens -> (those tokens,) losses
    metrics     statistics of some tokens -> further values by name
    transform   (tokens, ids) this rank's logits in at least fp32 -> the logits to use, element by element; None: as
                they are
    kernels     of the matmul that makes the logits
    targets     further targets of the T tokens; None: none but labels
    """

    labels: Tensor
    weights: Tensor | None
    loss: Callable[[LogitStats], Tensor]
    metrics: Callable[[LogitStats], Mapping[str, Tensor]]
    transform: Callable[[Tensor], Tensor] | None = None
    kernels: Kernels = "auto"
    targets: SparseTargets | None = None

    def sums(self, logits: Tensor, tokens: slice, shard: VocabularyShard, tp: Axis) -> Tensor:
        """(1 + K,) from this rank's logits (tokens, ids): the summed loss, with gradients, and the sums of K
        metrics."""
        logits = logits if self.transform is None else self.transform(widened(logits))
        targets = None if self.targets is None else self.targets.of(tokens)
        stats = logit_stats(logits, self.labels[tokens], shard, tp, targets)
        values = {"token_loss": self.loss(stats)}
        with torch.no_grad():
            values |= self.metrics(stats.detach())
        return torch.stack([self._sum(name, value, tokens) for name, value in values.items()])

    def _sum(self, name: str, value: Tensor, tokens: slice) -> Tensor:
        labels = self.labels[tokens]
        if value.shape != labels.shape:
            raise TypeError(
                f"{name} must be one value for each of {len(labels)} tokens, and has shape {[*value.shape]}"
            )
        if self.weights is not None:
            value = value * self.weights[tokens]
        return torch.where(labels != IGNORE, value, 0).sum()


class _Work(NamedTuple):
    shard: VocabularyShard
    tp: Axis
    task: TokenTask

    def sums(
        self, x: Tensor, matrix: HeadMatrix, needed: tuple[bool, ...], seed: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """The sums, and with a `seed` also the gradients of x and of the matrix."""
        shard, tp, task = self
        x_all = tp.all_gather(x).wait()
        grads, sums = HeadGrads(x_all, matrix, needed), []
        for c in chunks_of(len(task.labels), matrix.rows, LOSS.choose("plain", x).CHUNK_ELEMENTS):
            logits = matrix.logits(x_all[c], task.kernels)
            with torch.set_grad_enabled(seed is not None):
                found = task.sums(logits.requires_grad_(seed is not None)[:, : shard.count], c, shard, tp)
                scaled = found[0] if seed is None else found[0] * seed
            sums.append(found.detach())
            if seed is not None:
                (d,) = torch.autograd.grad(scaled, logits)
                grads.add(d, c)
        return torch.stack(sums).sum(0), grads.results(tp) if seed is not None else (None,) * 4


class _LinearTokenLoss(Function):
    @staticmethod
    def forward(ctx: Any, work: _Work, seed: Tensor | None, x: Tensor, *matrix: Tensor | None) -> Tensor:  # type: ignore[override]
        ctx.matrix, ctx.work, ctx.done = HeadMatrix(*matrix), work, seed is not None  # type: ignore[arg-type]
        sums, grads = work.sums(x, ctx.matrix, ctx.needs_input_grad[2:], seed)
        if seed is None:
            ctx.save_for_backward(x)
        else:
            ctx.grads = grads
        return sums

    @staticmethod
    def backward(ctx: Any, dsums: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.done:
            return None, None, *ctx.grads
        (x,) = ctx.saved_tensors
        return None, None, *ctx.work.sums(x, ctx.matrix, ctx.needs_input_grad[2:], dsums[0])[1]


def linear_token_loss(
    x: Tensor,
    weight: Tensor | HeadMatrix,
    shard: VocabularyShard,
    tp: Axis,
    task: TokenTask,
    seed: Tensor | None = None,
) -> Tensor:
    """(1 + K,) over all tokens, the same on every tp rank: the summed loss of a task, and the sums of its K metrics.

    x (T / tp, D) this rank's tokens; weight (rows, D) with the ids of `shard`, the other rows padding. Both, and
    `seed`, as in linear_cross_entropy. Only the loss has gradients.
    """
    seed = seed if torch.is_grad_enabled() else None
    return _LinearTokenLoss.apply(_Work(shard, tp, task), seed, x, *HeadMatrix.of(weight))


@torch.no_grad()
def token_losses(
    x: Tensor,
    weight: Tensor | HeadMatrix,
    shard: VocabularyShard,
    tp: Axis,
    task: TokenTask,
    kernels: Kernels = "auto",
) -> Tensor:
    """(T,) cross entropy of each label of a task, 0 where there is none; x and weight as in linear_token_loss. Without
    gradients."""
    by, labels, matrix = LOSS.choose(kernels, x), task.labels, HeadMatrix.of(weight)
    x_all, (rows, here), found = tp.all_gather(x).wait(), shard.rows_of(labels), []
    for c in chunks_of(len(labels), matrix.rows, by.CHUNK_ELEMENTS):
        logits = matrix.logits(x_all[c], kernels)
        logits = logits if task.transform is None else task.transform(widened(logits))
        stats = by.softmax_stats(logits, rows[c], here[c], Columns(shard.count))
        everyone = tp.all_gather(stats.unsqueeze(0)).wait()
        found.append(torch.logsumexp(everyone[:, 0], 0) - everyone[:, 1].sum(0))
    return torch.where(labels != IGNORE, torch.cat(found), 0)


@torch.no_grad()
def top_log_probs(
    x: Tensor, weight: Tensor | HeadMatrix, shard: VocabularyShard, tp: Axis, task: TokenTask, top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(T,) log-probability of each label of a task, 0 where there is none; and the `top` most likely ids (T, top) with
    their log-probabilities (T, top), descending. The same on all tp ranks; x and weight as in linear_token_loss."""
    labels, found, matrix = task.labels, [], HeadMatrix.of(weight)
    x_all, (rows, here) = tp.all_gather(x).wait(), shard.rows_of(labels)
    for c in chunks_of(len(labels), matrix.rows, LOSS.choose("plain", x).CHUNK_ELEMENTS):
        logits = widened(matrix.logits(x_all[c], task.kernels)[:, : shard.count])
        logits = logits if task.transform is None else task.transform(logits)
        stats = softmax_stats(logits, rows[c], here[c], Columns(shard.count))
        everyone = tp.all_gather(stats.unsqueeze(0)).wait()
        log_z = torch.logsumexp(everyone[:, 0], 0)
        values, ids = logits.topk(min(top, shard.count), -1)
        room = (0, top - values.shape[1])  # ranks hold different numbers of ids
        values, ids = F.pad(values, room, value=-torch.inf), F.pad(ids + shard.first, room)
        values, ids = (tp.all_gather(t.unsqueeze(0)).wait().transpose(0, 1).flatten(1) for t in (values, ids))
        values, best = values.topk(top, -1)
        found.append((everyone[:, 1].sum(0) - log_z, ids.gather(1, best), values - log_z.unsqueeze(-1)))
    of_labels, ids, values = (torch.cat(parts) for parts in zip(*found))
    return torch.where(labels != IGNORE, of_labels, 0), ids, values

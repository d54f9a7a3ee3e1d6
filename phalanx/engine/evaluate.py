"""Validation: the mean loss over fixed samples of each named set, the same in every layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.data.loader import Loader
from phalanx.engine.model import Model
from phalanx.engine.step import evaluate_step
from phalanx.nn.objective import EmbeddingObjective, make_objective
from phalanx.planning.order import eval_samples, media_group_of
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.sequence.shard import SequenceShard

MICRO_BATCHES = 16  # of one forward-only schedule


Forward = Callable[[list[Batch]], Tensor]
"""(2 + K,) float64 sums over all ranks, given this rank's micro-batches: loss, number of tokens, K metrics."""


def evaluate(model: Model, loaders: dict[str, Loader]) -> dict[str, float]:
    """Set name -> mean loss (per token, or what else the objective divides by) over the first train.eval_samples
    samples, or all samples of a smaller set; `SET/METRIC` -> mean of each metric that the objective logs."""
    model.buffers.ready()

    def forward(batches: list[Batch]) -> Tensor:
        return evaluate_step(model, batches)

    run, mesh = model.plan.run, model.mesh
    sums = {name: summed(run, mesh, loader, eval_samples(run, loader), forward) for name, loader in loaders.items()}
    found: dict[str, float] = {}
    for name, total in sums.items():
        loss, *metrics = (total[[0, *range(2, len(total))]] / total[1]).tolist()
        found |= {name: loss, **{f"{name}/{metric}": value for metric, value in zip(model.metrics, metrics)}}
    return found


def summed(run: Run, mesh: Mesh, loader: Loader, limit: int, forward: Forward) -> Tensor:
    """(2 + K,) float64 sums, as of `forward`, over the first `limit` samples."""
    size = run.train.micro_batch
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    # texts are compared inside a round, so its size must not depend on the layout
    across = isinstance(make_objective(run.task), EmbeddingObjective)
    per_round = run.train.global_batch if across else size * mesh.dp.size * MICRO_BATCHES
    for first in range(0, limit, per_round):
        count = min(per_round, limit - first)
        micro = -(-count // (size * mesh.dp.size))
        ranks = media_group_of(run, mesh.dp.size, mesh.dp.index)
        batches = list[Batch]()
        for number in range(micro):
            firsts = [first + (rank * micro + number) * size for rank in ranks]
            batches.append(_batch(loader, firsts, size, limit, mesh.part).cut(mesh.part).to(mesh.device))
        total = total + forward(batches)
    return total


def _batch(loader: Loader, firsts: Sequence[int], size: int, limit: int, part: SequenceShard) -> Batch:
    """`size` samples from the first of each replica that shares its images (Loader.read), from which this part will be
    cut; those from `limit` on only fill the shape and have no loss."""
    batch = loader.batch([min(first + i, limit - 1) for first in firsts for i in range(size)], part)
    real = max(0, min(size, limit - firsts[part.replica])) * batch.seq_length
    if real == batch.num_tokens:
        return batch
    labels = {"labels": batch.labels, "pair_labels": batch.pair_labels}
    cut: dict[str, Any] = {name: each.clone() for name, each in labels.items() if each is not None}
    for each in cut.values():
        each[real:] = IGNORE
    return replace(batch, **cut)

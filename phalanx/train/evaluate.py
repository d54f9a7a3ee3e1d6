"""Validation: the mean loss over fixed samples of each named set, the same in every layout."""

from __future__ import annotations

from dataclasses import replace

import torch

from phalanx.base.batch import IGNORE, Batch
from phalanx.data.loader import Loader
from phalanx.train.build import State
from phalanx.train.order import eval_samples
from phalanx.train.step import evaluate_step

MICRO_BATCHES = 16  # of one forward-only schedule


def evaluate(state: State, loaders: dict[str, Loader]) -> dict[str, float]:
    """Set name -> mean loss per token over the first train.eval_samples samples, or all samples of a smaller set."""
    state.buffers.ready()
    return {name: _mean_loss(state, loader) for name, loader in loaders.items()}


def _mean_loss(state: State, loader: Loader) -> float:
    train, mesh = state.plan.run.train, state.mesh
    size, limit = train.micro_batch, eval_samples(state.plan.run, loader)
    total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    per_round = size * mesh.dp.size * MICRO_BATCHES
    for first in range(0, limit, per_round):
        count = min(per_round, limit - first)
        micro = -(-count // (size * mesh.dp.size))
        mine = first + mesh.dp.index * micro * size
        batches = [_batch(loader, mine + i * size, size, limit).cut(mesh.part).to(mesh.device) for i in range(micro)]
        total += torch.stack(evaluate_step(state, batches))
    return (total[0] / total[1]).item()


def _batch(loader: Loader, first: int, size: int, limit: int) -> Batch:
    """Samples first..first+size-1; those at or past `limit` only fill the shape and have no loss."""
    batch = loader.batch([min(i, limit - 1) for i in range(first, first + size)])
    real = max(0, min(size, limit - first)) * batch.seq_length
    if real == batch.num_tokens:
        return batch
    labels = batch.labels.clone()
    labels[real:] = IGNORE
    return replace(batch, labels=labels)

"""The loss of a step over the embeddings of all of its texts, before the forward that makes gradients (GradCache: Gao
et al., 2021, section 3).

    first pass, no gradients ──▶ embeddings ──gather over dp──▶ loss of own queries ──▶ gradient of every embedding
                                                                                              │ reduce-scatter over dp
    forward and backward of each micro-batch ◀── Batch.text_gradients ◀───────────────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from phalanx.comm.axis import Axis
from phalanx.engine.first_pass import first_pass
from phalanx.engine.model import Model
from phalanx.nn.module import Block
from phalanx.nn.objective import EmbeddingObjective, StepTexts
from phalanx.nn.text_rows import num_rows, text_rows
from phalanx.sequence.batch import Batch
from phalanx.sequence.sample import Pooling


def pooled_texts(block: Block, x: Any, batch: Batch, pooling: Pooling) -> Tensor:
    """(R, D) of a micro-batch's documents, from the input of a model's last block."""
    found: Tensor = block.pooled(x, batch, pooling)  # type: ignore[operator]
    return found


def with_embeddings(model: Model, batches: Sequence[Batch]) -> Sequence[Batch]:
    """The batches with the sums of their texts and, where gradients are wanted, the gradients of their embeddings, if
    the objective is over embeddings; only ranks with the model's last block have them. Dropout is that of the step."""
    objective = model.plan.objective
    if not isinstance(objective, EmbeddingObjective):
        return batches
    made = first_pass(model, batches, partial(pooled_texts, pooling=objective.pooling))
    if not made:
        return batches
    counts = [num_rows(batch) for batch in batches]
    texts = gathered([made[number] for number in range(len(batches))], batches, counts, model)
    sums, gradients = step_loss(objective, texts, model.mesh.dp)
    if batches[0].part.index > 0:
        sums = torch.zeros_like(sums)
    of_each = zip(batches, sums[: sum(counts)].split(counts), gradients[: sum(counts)].split(counts))
    return [replace(b, text_sums=s.sum(0), text_gradients=g, _made={}) for b, s, g in of_each]


def gathered(pooled: Sequence[Tensor], batches: Sequence[Batch], counts: Sequence[int], model: Model) -> StepTexts:
    """The texts of all ranks. pooled: (R, D) of each micro-batch of this rank; counts: its R."""
    dp, device = model.mesh.dp, model.mesh.device
    room = agreed_rows(sum(counts), model)
    ids, first = [], dp.index * room
    for batch, count in zip(batches, counts):
        rows = text_rows(batch)
        ids.append(torch.stack((rows.role, torch.where(rows.query < 0, -1, rows.query + first)), 1))
        first += count
    missing = room - sum(counts)
    own, own_ids = torch.cat(list(pooled)), torch.cat(ids)
    if missing:
        own, own_ids = pad(own, (0, 0, 0, missing)), pad(own_ids, (0, 0, 0, missing), value=-1)
    everyone = dp.all_gather(own).wait().to(device)
    role, query = dp.all_gather(own_ids).wait().unbind(1)
    return StepTexts(everyone, role, query, slice(dp.index * room, (dp.index + 1) * room))


def agreed_rows(mine: int, model: Model) -> int:
    """The most rows that any data-parallel rank has in this step. Hosts exchange it: no device waits."""
    hosts = model.mesh.dp_hosts or model.mesh.dp
    most = hosts.all_reduce(torch.tensor([mine], dtype=torch.int64), op="max").wait()
    return int(most[0])


def step_loss(objective: EmbeddingObjective, texts: StepTexts, dp: Axis) -> tuple[Tensor, Tensor]:
    """(M, 1 + K) float64: the loss of each of this rank's rows, 0 where it is no query, and K metrics; and (M, D) the
    gradient of the summed loss of all ranks by this rank's embeddings."""
    counted = texts.is_query[texts.mine]
    with torch.enable_grad():
        texts = replace(texts, embeddings=texts.embeddings.requires_grad_())
        losses = objective.loss(texts)
        if losses.shape != counted.shape:
            shapes = f"{[*counted.shape]}, and has shape {[*losses.shape]}"
            raise TypeError(f"loss of {type(objective).__qualname__} must be one value for each own row, {shapes}")
        (gradients,) = torch.autograd.grad(torch.where(counted, losses, 0).sum(), texts.embeddings)
    own = dp.reduce_scatter(gradients).wait()
    with torch.no_grad():
        known = replace(texts, embeddings=texts.embeddings.detach())
        values = [losses.detach(), *objective.metrics(known).values()]
        return torch.stack([torch.where(counted, v, 0).double() for v in values], 1), own

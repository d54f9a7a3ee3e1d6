"""The log-probabilities of a reference model, for objectives that compare with one: of the model without its adapters,
in a forward before the step's own. Those that a file has come with the batches (data/scores.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phalanx.engine.model import Model
from phalanx.nn.adapted_embedding import AdaptedEmbedding
from phalanx.nn.adapted_head import AdaptedHead
from phalanx.nn.adapted_linear import AdaptedMethod
from phalanx.nn.module import Block
from phalanx.nn.objective import Objective, SequenceObjective
from phalanx.pipeline.execute import execute
from phalanx.pipeline.graphs import Eager
from phalanx.sequence.batch import Batch


def compares_with_base(objective: Objective) -> bool:
    """Whether each step needs a forward of the model without its adapters."""
    return isinstance(objective, SequenceObjective) and objective.needs_reference and objective.scores is None


def label_log_probs(block: Block, x: Tensor, batch: Batch) -> Tensor:
    """(T,) of each label, from the input of a model's last block."""
    found: Tensor = block.log_probs(x, batch)[:, 0]  # type: ignore[operator]
    return found


def with_reference(model: Model, batches: Sequence[Batch]) -> Sequence[Batch]:
    """The batches with the base's log-probabilities, if the objective wants them; only ranks with the model's last
    block have them. Dropout is off; nothing of the step's own sums changes."""
    if not compares_with_base(model.plan.objective):
        return batches
    found = base_forward(model, batches)
    return [replace(b, reference=found[mb], _made={}) if mb in found else b for mb, b in enumerate(batches)]


@torch.no_grad()
def base_forward(model: Model, batches: Sequence[Batch]) -> dict[int, Tensor]:
    """(T,) the base's log-probabilities of the labels of each micro-batch, by number."""
    trained = any(block.training for segment in model.blocks.values() for block in segment)
    model.buffers.ready()
    stages = model.stages
    with _base_alone(model):
        if model.fp8 is not None:
            model.fp8.begin()
        stages.finish, runner = label_log_probs, stages.runner
        stages.runner = Eager()
        try:
            model.train(False)
            stages.begin(batches, seed=None)
            execute(model.program(len(batches), backward=False), model.handlers)
            stages.end()
        finally:
            stages.finish, stages.runner = None, runner
            model.train(trained)
        if model.fp8 is not None:
            model.fp8.amax.zero_()  # the base's activations are not part of the history
    return dict(stages.outputs)


@contextmanager
def _base_alone(model: Model) -> Iterator[None]:
    """Inside, adapters add nothing, and tokens travel to their experts by all-to-all, which always has room. Routing
    is not counted."""
    adapted = [m for m in model.modules.modules() if isinstance(m, AdaptedMethod | AdaptedEmbedding | AdaptedHead)]
    dispatch: list[Any] = [layer.dispatch for layer in model.routed]
    for method in adapted:
        method.on = False
    for layer in model.routed if model.plan.experts.room_may_lack else ():
        layer.dispatch = "alltoall"
    try:
        yield
    finally:
        for method in adapted:
            method.on = True
        for layer, before in zip(model.routed, dispatch):
            layer.dispatch = before
            if layer.tally is not None:
                layer.tally.zero_()

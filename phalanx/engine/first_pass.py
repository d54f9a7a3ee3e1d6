"""A forward without gradients before those of a step, for what an objective must know beforehand: a reference model's
log-probabilities, the embeddings of all texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from phalanx.engine.model import Model
from phalanx.nn.module import Block
from phalanx.pipeline.execute import execute
from phalanx.pipeline.graphs import Eager
from phalanx.sequence.batch import Batch

Finish = Callable[[Block, Any, Batch], Tensor]
"""(the model's last block, its input, a micro-batch) -> what is wanted of them."""


@torch.no_grad()
def first_pass(model: Model, batches: Sequence[Batch], finish: Finish) -> dict[int, Tensor]:
    """What `finish` makes of each micro-batch, by number; only ranks with the model's last block have any. Nothing of
    the step's own sums changes."""
    model.buffers.ready()
    stages = model.stages
    with _uncounted(model):
        if model.fp8 is not None:
            model.fp8.begin()
        stages.finish, runner = finish, stages.runner
        stages.runner = Eager()
        try:
            stages.begin(batches, seed=None)
            execute(model.program(len(batches), backward=False), model.handlers)
            stages.end()
        finally:
            stages.finish, stages.runner = None, runner
        if model.fp8 is not None:
            model.fp8.amax.zero_()  # these activations are not part of the history
    return dict(stages.outputs)


@contextmanager
def _uncounted(model: Model) -> Iterator[None]:
    """Inside, tokens travel to their experts by all-to-all, which always has room. Routing is not counted."""
    dispatch: list[Any] = [layer.dispatch for layer in model.routed]
    for layer in model.routed if model.plan.experts.room_may_lack else ():
        layer.dispatch = "alltoall"
    try:
        yield
    finally:
        for layer, before in zip(model.routed, dispatch):
            layer.dispatch = before
            if layer.tally is not None:
                layer.tally.zero_()
        model.forget_scores()

"""The log-probabilities of a reference model, for objectives that compare with one: of the model without its adapters,
in a forward before the step's own. Those that a file has come with the batches (data/scores.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from phalanx.engine.first_pass import first_pass
from phalanx.engine.model import Model
from phalanx.nn.adapted_embedding import AdaptedEmbedding
from phalanx.nn.adapted_head import AdaptedHead
from phalanx.nn.adapted_linear import AdaptedMethod
from phalanx.nn.module import Block
from phalanx.nn.objective import Objective, SequenceObjective
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


def base_forward(model: Model, batches: Sequence[Batch]) -> dict[int, Tensor]:
    """(T,) the base's log-probabilities of the labels of each micro-batch, by number."""
    trained = any(block.training for segment in model.blocks.values() for block in segment)
    with _base_alone(model):
        model.train(False)
        try:
            return first_pass(model, batches, label_log_probs)
        finally:
            model.train(trained)


@contextmanager
def _base_alone(model: Model) -> Iterator[None]:
    """Inside, adapters add nothing."""
    adapted = [m for m in model.modules.modules() if isinstance(m, AdaptedMethod | AdaptedEmbedding | AdaptedHead)]
    for method in adapted:
        method.on = False
    try:
        yield
    finally:
        for method in adapted:
            method.on = True

"""After a bad step: which layer's state overflows first, in which head and document. The step's batches are computed
once more, forward alone."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import torch

from phalanx.engine.model import Model
from phalanx.engine.step import evaluate_step
from phalanx.nn.module import Module
from phalanx.nn.state_watch import OverflowPlace, StateWatch
from phalanx.sequence.batch import Batch

NOWHERE = torch.iinfo(torch.int64).max


def overflow_of(model: Model, batches: Sequence[Batch]) -> str | None:
    """In words, equal on all ranks; None: no state overflows, with the weights as they are now. Collective."""
    layers = _watched(model)
    for _, module in layers:
        module.watch = StateWatch()
    try:
        model.buffers.ready()
        evaluate_step(model, batches)
        found = [(layer, module.watch.found) for layer, module in layers if module.watch and module.watch.found]
    finally:
        for _, module in layers:
            module.watch = None
    layer, place = _first(model, found)
    if place is None:
        return None
    return (
        f"the state of layer {layer} overflows in head {place.head}, document {place.document} of sample "
        f"{place.sample}, from token {place.position} on"
    )


def _watched(model: Model) -> list[tuple[int, Module]]:
    """This rank's layers that keep states, with their numbers in the names of tensors."""
    segments, first = model.plan.segments, model.plan.run.model.embedding_block + 1
    blocks = [pair for (stage, number), made in model.blocks.items() for pair in zip(segments[stage][number], made)]
    return [
        (number - first, module) for number, block in sorted(blocks, key=itemgetter(0)) for module in block.keeping()
    ]


def _first(model: Model, found: Sequence[tuple[int, OverflowPlace]]) -> tuple[int, OverflowPlace | None]:
    """Of all ranks, the place in the lowest layer; in one layer, of the first sample."""
    mine = [NOWHERE] * 5
    if found:
        layer, place = found[0]
        mine = [layer, place.sample, place.document, place.position, place.head]
    world = model.mesh.world
    everyone = world.all_gather(torch.tensor([mine], device=world.device)).wait().tolist()
    layer, *place = min(everyone)
    return layer, None if layer == NOWHERE else OverflowPlace(*place)

"""What tests of text during training run on each rank: steps of a tiny model, with an engine between or without."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.engine.build import build
from phalanx.engine.step import accumulate, update
from phalanx.forecast.decide import make_plan
from phalanx.inference.beside import TrainedModel
from phalanx.inference.engine import EngineOptions
from phalanx.inference.memory import remembering
from phalanx.verifying.compare import random_weights
from tests.harness.generation import Answer, Asked, answers_of
from tests.harness.parity import parts_of, step_batches


def train_and_answer(
    rank: int, world: int, run: Run, asked: Sequence[Asked], options: EngineOptions, steps: int = 2
) -> dict:
    """Losses, norms and the last weights of `steps` steps; before each and after the last, what an engine beside them
    answers, if anything is asked."""
    plan = make_plan(run, world)
    mesh = Mesh(plan.grid, rank)
    state = build(plan, mesh)
    random_weights(state.model)
    state.model.train()
    texts: list[list[Answer]] = []
    numbers = []
    trained = TrainedModel(state.model, wait_s=60) if asked else None

    def answer() -> None:
        if trained is None:
            return
        with trained.engine(options) as engine:
            if rank:
                engine.follow()
            else:
                texts.append(answers_of(engine, asked, arrive=2))
                engine.pause()
        layers = remembering([block for segment in state.model.blocks.values() for block in segment])
        if any(layer.memory is not None for layer in layers):
            raise RuntimeError("pages are left behind")

    for step in range(steps):
        answer()
        tokens = accumulate(state, step_batches(run, mesh, step, False))
        result = update(state, tokens, lr=1e-2)
        counted = [None if each is None else each.tolist() for each in (result.routing, result.fp8)]
        numbers.append((result.loss.item(), result.grad_norm.item(), *counted))
    answer()
    state.buffers.ready()
    return {"numbers": numbers, "weights": parts_of(state, "master"), "texts": texts}

"""Models apart from training: a process holds several, and what trains one leaves the others as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.engine.build import build, build_model
from phalanx.engine.step import evaluate_step, train_step
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.verifying.compare import random_weights
from tests.harness.parity import base_run, step_batches


def beside_a_frozen_one(rank: int, world: int, run: Run) -> dict[str, list[float]]:
    """Losses of one batch by a model that trains, and by a frozen one on the same ranks, before and after two steps;
    bytes of the frozen one's gradients."""
    plan = make_plan(run, world)
    mesh = Mesh(plan.grid, rank)
    state = build(plan, mesh)
    frozen = build_model(make_plan(replace(run, train=replace(run.train, freeze=("*",))), world), mesh)
    for model in (state.model, frozen):
        random_weights(model)
        model.buffers.publish()
    found: dict[str, list[float]] = {"trained": [], "frozen": []}
    for step in range(2):
        for name, model in (("trained", state.model), ("frozen", frozen)):
            model.buffers.ready()
            loss, tokens = evaluate_step(model, step_batches(run, mesh, 9, False))[:2]
            found[name].append((loss / tokens).item())
        if step == 0:
            for number in range(2):
                state.model.train()
                train_step(state, step_batches(run, mesh, number, False), lr=1e-2)
    found["gradients"] = [float(sum(p.grad is not None for p in frozen.modules.parameters()))]
    return found


@pytest.mark.parametrize(
    "ranks_of, layout",
    [(1, LayoutConfig(sharding=0)), (2, LayoutConfig(tp=2)), (2, LayoutConfig(pp=2)), (2, LayoutConfig(sharding=3))],
    ids=["alone", "tp2", "pp2", "dp2 sharding 3"],
)
def test_a_frozen_model_stands_beside_the_one_that_trains(ranks, ranks_of, layout):
    """Truth: before training both are one model; afterwards the frozen one gives the same bits as before."""
    run = replace(base_run("llama"), layout=layout)
    for found in ranks.run("tests.engine.test_model:beside_a_frozen_one", ranks_of, run):
        before, after = found["trained"]
        assert found["frozen"] == [before, before] and after != before
        assert found["gradients"] == [0.0]

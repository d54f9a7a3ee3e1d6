"""What a step sends over the axes of context parallelism, and for images that other replicas compute."""

from __future__ import annotations

from collections import Counter

from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.engine.build import build
from phalanx.engine.step import accumulate
from phalanx.forecast.decide import make_plan
from tests.harness.parity import random_weights, step_batches


def context_traffic(rank: int, world: int, run: Run, batches: str | bool) -> dict[tuple[str, str], tuple[int, int]]:
    """(calls, bytes) by axis and operation of the forward and backward of one step on a rank. batches: as in
    `step_batches`."""
    plan = make_plan(run, world)
    mesh = Mesh(plan.grid, rank)
    state = build(plan, mesh)
    random_weights(state.model)
    state.model.train()
    made = step_batches(run, mesh, 0, batches)
    mesh.watch.on = True
    accumulate(state, made)
    found: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    for site, (count, nbytes) in mesh.watch.calls.items():
        if site.axis.startswith("cp") or site.axis == "tp x cp x dp":
            found[site.axis, site.op] += nbytes
            calls[site.axis, site.op] += count
    return {key: (calls[key], found[key]) for key in found}

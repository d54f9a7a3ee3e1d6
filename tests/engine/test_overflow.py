"""The guard's report names the layer, head and document whose state overflows: in every layout, in what a run writes,
and nowhere if something else was not finite before."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import phalanx as px
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.engine.build import build
from phalanx.engine.overflow import overflow_of
from phalanx.forecast.decide import make_plan
from phalanx.planning.blocks import exported_shapes
from phalanx.sequence.batch import Batch
from tests.harness.checkpoints import make_run
from tests.harness.parity import MODELS, sample_batch
from tests.harness.sample import rest_in_soak
from tests.models.test_models import load_weights
from tests.training.test_loop import make_run as run_in

SAMPLE, PLACE = 2, 12  # of two samples' 16 tokens each; the last of three documents begins with token 11
LAYOUTS = {"one rank": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2}}


def batch() -> Batch:
    return sample_batch([1, SAMPLE], True)


def weights() -> dict[str, np.ndarray]:
    """Of a model whose third layer gets one feature of one token alone, and makes of it values and a B of head 5 whose
    product no fp32 holds."""
    model, dice = MODELS["mamba2"], np.random.default_rng(0)
    found = {name: dice.normal(0, 0.1, shape) for name, shape in exported_shapes(model).items()}
    tokens = batch().tokens
    token = int(tokens[16 + PLACE])
    assert int((tokens == token).sum()) == 1
    for name, tensor in found.items():
        if "norm" in name:
            tensor[:] = 1
        elif name.endswith(("layers.0.mixer.out_proj.weight", "layers.1.mixer.out_proj.weight")):
            tensor[:] = 0
        elif name.endswith("embeddings.weight"):
            tensor[:, 0] = 0
            tensor[token, 0] = 1
    inner, groups = model.num_heads * model.head_dim, model.n_groups * model.state_size
    rows = found["backbone.layers.2.mixer.in_proj.weight"]
    head = inner + 5 * model.head_dim
    rows[[*range(head, head + model.head_dim), *range(2 * inner, 2 * inner + groups)], 0] = 1e30
    return found


def overflow(rank: int, world: int, run: Run, tensors: dict[str, np.ndarray], batches: list[Batch]) -> str | None:
    plan = make_plan(run, world)
    mesh = Mesh(plan.grid, rank)
    state = build(plan, mesh)
    load_weights(state, tensors)
    state.model.train()
    return overflow_of(state.model, [each.cut(mesh.part) for each in batches])


@pytest.mark.parametrize("layout", rest_in_soak(LAYOUTS, ("tp2", "cp2")))
def test_layer_head_and_document_are_named(ranks, layout):
    run = make_run("mamba2", "fp32", **LAYOUTS[layout])
    run = replace(run, train=replace(run.train, micro_batch=2))
    found = ranks.run(
        "tests.engine.test_overflow:overflow", math.prod(LAYOUTS[layout].values()), run, weights(), [batch()]
    )
    said = "the state of layer 2 overflows in head 5, document 2 of sample 2, from token 1 on"
    assert found == [said] * len(found)


def test_what_was_not_finite_before_is_not_blamed_on_a_state():
    run = make_run("mamba2", "fp32")
    run, tensors = replace(run, train=replace(run.train, micro_batch=2)), weights()
    tensors["backbone.layers.2.mixer.in_proj.weight"][:, 0] = 0
    assert overflow(0, 1, run, tensors, [batch()]) is None
    tensors["backbone.embeddings.weight"][int(batch().tokens[3])] = torch.nan
    assert overflow(0, 1, run, tensors, [batch()]) is None


def test_the_report_of_a_run_says_it(tmp_path):
    """Weights so large that products of what they make are no number."""
    run = run_in(tmp_path, steps=2)
    run = replace(run, model=replace(MODELS["mamba2"], vocab_size=run.model.vocab_size))
    with px.session(run) as session:
        for batches in session.batches():
            for p in session.model.parameters():
                if p.spec.pieces[0].name == "backbone.layers.0.mixer.in_proj.weight" and session.step == 1:
                    p.data.mul_(1e21)
            session.train_step(batches)
    log = (tmp_path / "log.txt").read_text()
    assert "step 1 is bad: the loss or the gradient norm is not finite" in log
    assert "; the state of layer 0 overflows in head 0, document 0 of sample 0, from token " in log

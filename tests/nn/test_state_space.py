"""Layers with a scan on several ranks: documents stay apart to the bit, exchanges have the bytes of their formulas, and
dropping any of them is noticed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.engine.build import State, build
from phalanx.engine.step import accumulate
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.models.mamba2 import Mamba2Config
from phalanx.ops import op as ops
from phalanx.ops.op import Kernels, Op
from phalanx.ops.scan.carried import CARRIED
from phalanx.sequence.batch import Batch
from phalanx.verifying.compare import random_weights
from tests.harness.parity import Parts, assemble, base_run, parts_of, sample_batch
from tests.models.test_models import all_logits
from tests.verifying import test_mutations
from tests.verifying.test_parity import NAMED

LENGTH = 24  # shards of 2 and of 3 ranks are equally long
LAYOUTS = {
    "one rank": ("mamba2", {}),
    "cp3": ("mamba2", {"cp": 3}),
    "tp2 cp2": ("mamba2", {"tp": 2, "cp": 2}),
    "beside attention": ("falcon_h1", {}),
    "beside attention, cp2": ("falcon_h1", {"cp": 2}),
    "beside attention, cp3": ("falcon_h1", {"cp": 3}),
}


def run_of(model: str = "mamba2", **layout: int) -> Run:
    return replace(base_run(model, global_batch=1, seq_length=LENGTH), layout=LayoutConfig(**layout))


def state_of(run: Run, rank: int, world: int) -> tuple[State, Mesh]:
    plan = make_plan(run, world)
    mesh = Mesh(plan.grid, rank)
    state = build(plan, mesh)
    random_weights(state.model)
    return state, mesh


def logits_of(rank: int, world: int, run: Run, changed: int | None) -> list[np.ndarray]:
    """Logits of this rank's tokens of three documents, with the tokens of document `changed` replaced; and their
    documents."""
    state, mesh = state_of(run, rank, world)
    batch = sample_batch([3], True, LENGTH)
    if changed is not None:
        batch = replace(batch, tokens=torch.where(batch.documents == changed, 7, batch.tokens))
    mine = batch.cut(mesh.part)
    return [mine.documents.numpy(), *all_logits(state, [mine])]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_document_changes_no_bit_of_another(ranks, layout):
    model, sizes = LAYOUTS[layout]
    world = sizes.get("tp", 1) * sizes.get("cp", 1)

    def found(changed: int | None) -> list[list[np.ndarray]]:
        return ranks.run("tests.nn.test_state_space:logits_of", world, run_of(model, **sizes), changed)

    before = found(None)
    for changed in range(3):
        for (documents, old), (_, new) in zip(before, found(changed), strict=True):
            here = documents == changed
            assert np.array_equal(old[~here], new[~here])
            assert not here.any() or not np.array_equal(old[here], new[here])


def calls_of(rank: int, world: int, run: Run, batch: Batch) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Calls of the exchanges of scans, and bytes passed in, by function and operation."""
    state, mesh = state_of(run, rank, world)
    state.model.train()
    mine = batch.cut(mesh.part)
    mesh.watch.on = True
    accumulate(state, [mine])
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    for site, (count, nbytes) in mesh.watch.calls.items():
        if site.axis == "cp":
            key = (Path(site.file).stem, site.op, "cp")
            found[key] = tuple(a + b for a, b in zip(found.get(key, (0, 0)), (count, nbytes)))
    return found


@pytest.mark.parametrize("tp, cp", [(1, 3), (2, 2)])
def test_bytes_of_exchanges(ranks, tp, cp):
    """By layer and pass: two states and decays of each sequence to all ranks, and the tokens before a convolution to
    each neighbour. On the way back, states are summed, and gradients of tokens return."""
    run, sequences = run_of(tp=tp, cp=cp), 2
    run = replace(run, train=replace(run.train, micro_batch=sequences, global_batch=sequences))
    found = ranks.run("tests.nn.test_state_space:calls_of", tp * cp, run, sample_batch([1, 2], True, LENGTH))
    m, layers = run.model, run.model.num_hidden_layers
    assert isinstance(m, Mamba2Config)
    heads, groups = m.num_heads // tp, max(1, m.n_groups // tp)
    states = 2 * sequences * heads * (m.head_dim * m.state_size + 1) * 8
    tokens = sequences * (m.conv_kernel - 1) * (heads * m.head_dim + 2 * groups * m.state_size) * 8
    for rank, calls in enumerate(found):
        index = rank // tp % cp
        neighbours = (index > 0) + (index < cp - 1)
        assert calls["exchange", "all_gather", "cp"] == (layers, layers * states)
        assert calls["exchange", "reduce_scatter", "cp"] == (layers, layers * states * cp)
        assert calls["exchange", "all_to_all", "cp"] == (2 * layers, 2 * layers * tokens * neighbours)


def gradients_of(rank: int, world: int, run: Run, batch: Batch) -> tuple[Parts, set[str]]:
    """This rank's gradients, and the implementations that ran of what states add to outputs."""
    state, mesh = state_of(run, rank, world)
    chosen, choose = set[str](), Op.choose

    def noted(op: Op, kernels: Kernels, *given: Any, **more: Any) -> Any:
        found = choose(op, kernels, *given, **more)
        chosen.update([found.__name__.rpartition(".")[2]] if op is CARRIED else [])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Op, "choose", noted)
        accumulate(state, [batch.cut(mesh.part)])
    return parts_of(state, "grad"), chosen


@pytest.mark.soak
@pytest.mark.skipif(not ops.has_triton(), reason="needs triton")
def test_gradients_by_kernels_on_two_ranks(ranks):
    """Truth: the references. Documents go on over the borders of chunks."""
    found = []
    for kernels in ("triton", "plain"):
        run = replace(base_run("mamba2", global_batch=1, seq_length=LENGTH, kernels=kernels), layout=LayoutConfig(cp=2))
        made = ranks.run("tests.nn.test_state_space:gradients_of", 2, run, sample_batch([3], True, LENGTH))
        assert all(chosen == {"carried_kernel" if kernels == "triton" else "carried"} for _, chosen in made)
        found.append(assemble([grads for grads, _ in made]))
    mine, theirs = found
    assert theirs and mine.keys() == theirs.keys()
    for name, truth in theirs.items():
        np.testing.assert_allclose(mine[name], truth, rtol=0, atol=1e-10 * abs(truth).max(), err_msg=name)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["mamba2 cp3, documents", "mamba2 tp4 with 2 groups, sharding 3"])
def test_each_exchange_matters(ranks, name, monkeypatch):
    monkeypatch.setitem(test_mutations.LAYOUTS, name, NAMED[name])
    found = test_mutations.Layout(ranks, name)
    sites = [site for site in found.sites if site.axis == "cp" or "gated_norm" in site.file]
    assert {site.axis for site in sites} == {"cp" if "cp3" in name else "tp"}
    survivors = [site for site in sites if found.survives(site)]
    assert not survivors, f"dropped without notice: {survivors}"

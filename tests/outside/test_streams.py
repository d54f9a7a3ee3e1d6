"""A family of another package whose blocks pass more than one stream on (outside/memory.py): every layout computes what
one process computes, and the forecast counts what is sent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.comm.axis import Axis
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.engine.build import build, init_weights
from phalanx.engine.step import train_step
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import block_uses, rank_uses
from phalanx.layout.config import LayoutConfig
from phalanx.models.llama import LlamaConfig
from phalanx.planning.blocks import model_facts
from phalanx.sequence.streams import HIDDEN
from phalanx.verifying.shrink import shrink
from tests.harness.parity import (
    SEQ,
    VOCAB,
    Parts,
    assemble,
    compare,
    parts_of,
    random_weights,
    step_batches,
    truth_of,
)
from tests.harness.sample import covering, rest_in_soak
from tests.outside.memory import GIST, MemoryConfig, MemoryLayer
from tests.verifying.test_verify import is_valid_and_passes

NAME = "tests.outside.memory:FAMILY"
STEPS = 2
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 42,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODEL, LLAMA = MemoryConfig(family=NAME, **SIZES), LlamaConfig(**SIZES)
LAYOUTS = {
    "tp2": (2, {"tp": 2}, {}),
    "pp2": (2, {"pp": 2}, {}),
    "pp4": (4, {"pp": 4}, {}),
    "pp2 x 2 virtual stages": (2, {"pp": 2, "virtual_stages": 2}, {}),
    "pp2, gpipe, a segment per block": (2, {"pp": 2, "schedule": "gpipe", "bucket_mb": 0}, {}),
    "dp2, sharding 3": (2, {"sharding": 3, "bucket_mb": 0}, {}),
    "cp2": (2, {"cp": 2}, {}),
    "tp2 pp2, full recompute": (4, {"tp": 2, "pp": 2}, {"recompute": "full"}),
    "pp2, long recompute": (2, {"pp": 2}, {"recompute": "long"}),
    "pp2, offload": (2, {"pp": 2, "bucket_mb": 0}, {"offload_layers": 2}),
    "pp2, offload of one block of a segment": (2, {"pp": 2, "schedule": "gpipe"}, {"offload_layers": 1}),
}


def run_of(layout: dict[str, object], train: dict[str, object] | None = None) -> Run:
    options = {"steps": 10, "global_batch": 8, "micro_batch": 1, "seq_length": SEQ, "precision": "fp64"}
    train_config = TrainConfig(**(options | (train or {})))
    return Run(model=MODEL, train=train_config, layout=LayoutConfig(**layout), data=DataConfig(mock=True))


SAMPLE = covering(
    {name: (*layout.items(), *train.items()) for name, (_, layout, train) in LAYOUTS.items()},
    {name: world for name, (world, *_) in LAYOUTS.items()},
)


@pytest.mark.parametrize("name", rest_in_soak(LAYOUTS, SAMPLE))
def test_a_layout_changes_nothing(ranks, name):
    world, layout, train = LAYOUTS[name]
    run = run_of(layout, train)
    truth = truth_of(ranks, run, STEPS, False)
    assert all(abs(gradient).max() > 0 for gradient in truth["grads"][0].values())
    compare(ranks.run("tests.harness.parity:run_layout", world, run, STEPS, False), truth, STEPS)


def initial_weights(rank: int, world: int, layout: dict[str, object]) -> Parts:
    plan = make_plan(run_of(layout), world)
    state = build(plan, Mesh(plan.grid, rank))
    init_weights(state.model)
    return parts_of(state, "master")


def test_initial_values_of_its_own_kind(ranks):
    """memory.HalfNormal: none is negative, and every layout begins with the bits of one process."""
    [alone] = ranks.run("tests.outside.test_streams:initial_weights", 1, {"sharding": 0})
    truth = assemble([alone])
    mine = [values for name, values in truth.items() if ".memory." in name]
    assert len(mine) == 12 and all((values >= 0).all() and values.any() for values in mine)
    for layout in ({"tp": 2}, {"pp": 2, "sharding": 1}, {"sharding": 3}):
        found = assemble(ranks.run("tests.outside.test_streams:initial_weights", 2, layout))
        assert found.keys() == truth.keys() and all((found[name] == truth[name]).all() for name in truth)


def test_documents_and_padding(ranks):
    run = run_of({"pp": 2})
    truth = truth_of(ranks, run, STEPS, "packed")
    compare(ranks.run("tests.harness.parity:run_layout", 2, run, STEPS, "packed"), truth, STEPS)


@pytest.mark.parametrize("recompute", rest_in_soak(("none", "full"), ("full",)))
def test_graphs_change_no_bit(ranks, recompute):
    run = run_of({"pp": 2, "virtual_stages": 2, "bucket_mb": 0}, {"recompute": recompute, "cuda_graphs": "on"})
    plain = ranks.run("tests.pipeline.test_graphs:trained", 2, run, False, False)
    rows = ranks.run("tests.pipeline.test_graphs:trained", 2, run, False, True)
    for (expected, *_), (found, parts, _) in zip(plain, rows):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)) and parts


def test_saved_under_one_layout_and_loaded_under_another(ranks, tmp_path):
    assert all(ranks.run("tests.harness.checkpoints:save_on_rank", 2, run_of({"pp": 2}), tmp_path, {}))
    (path,) = tmp_path.glob("step-*")
    for layout in ({"tp": 2}, {"sharding": 3}, {"cp": 2}):
        assert ranks.run("tests.harness.checkpoints:load_on_rank", 2, run_of(layout), path) == [[], []]


def sent_bytes(rank: int, world: int, run: Run) -> list[int]:
    """Bytes of each message to another stage in one step."""
    plan = make_plan(run, world)
    mesh, found = Mesh(plan.grid, rank), []
    state, real = build(plan, mesh), Axis.send
    random_weights(state.model)

    def send(axis: Axis, x: torch.Tensor, to: int):
        found.append(x.nbytes)
        return real(axis, x, to)

    Axis.send = send
    try:
        train_step(state, step_batches(run, mesh, 0, False), 1e-3)
    finally:
        Axis.send = real
    return found


@pytest.mark.parametrize(
    ("world", "layout"), [(4, {"pp": 4}), (2, {"pp": 2, "virtual_stages": 2}), (4, {"tp": 2, "pp": 2})]
)
def test_the_forecast_counts_what_is_sent(ranks, world, layout):
    run = run_of(layout, {"precision": "fp32"})
    plan = make_plan(run, world)
    uses, _ = rank_uses(plan, plan.num_micro_batches(8))
    found = ranks.run("tests.outside.test_streams:sent_bytes", world, run)
    for rank, sizes in enumerate(found):
        assert sum(sizes) == uses[rank // plan.grid.tp].sent["pp"]
    rows = SEQ // plan.grid.tp
    hidden, memory, gist, even = rows * 32 * 4, rows * 24 * 4, rows // 2 * GIST * 4, rows * 8
    assert set(found[0]) == {hidden, memory, gist, even}


def test_a_model_with_one_stream_sends_one_message(ranks):
    run = replace(run_of({"pp": 2}, {"precision": "fp32"}), model=LLAMA)
    for sizes in ranks.run("tests.outside.test_streams:sent_bytes", 2, run):
        assert sizes == [SEQ * 32 * 4] * 8  # one for each micro-batch, forward or back


def test_the_forecast_counts_what_a_stream_keeps_once():
    """Of a stream that passes a block nothing is kept twice; of what is passed on all counts."""
    plan = make_plan(run_of({}, {"precision": "fp32"}), 1)
    uses = block_uses(plan)
    hidden, memory, gist, even = SEQ * 32 * 4, SEQ * 24 * 4, SEQ // 2 * GIST * 4, SEQ * 8
    assert [use.bytes.output for use in uses[:-2]] == [hidden + memory + gist + even] * 6
    assert uses[-2].bytes.output == hidden + memory and uses[1].bytes.kept == uses[3].bytes.kept
    llamas = block_uses(make_plan(replace(run_of({}, {"precision": "fp32"}), model=LLAMA), 1))
    assert uses[1].bytes.kept == llamas[1].bytes.kept  # layer 0: the streams that pass by are its output


def test_verify_accepts_it(ranks):
    is_valid_and_passes(ranks, shrink(run_of({"pp": 2}), 2))


@pytest.mark.parametrize(
    ("streams", "said"),
    [
        (lambda self, given: given[1:], "'hidden' must be among them"),
        (lambda self, given: (*given, given[0]), "each once"),
        (lambda self, given: (*given[:-1], replace(given[-1], name="odd")), "declares hidden, memory, gist, odd"),
        (lambda self, given: tuple(replace(s, width=s.width + 1) for s in given), "of torch.float64, but the blocks"),
        (lambda self, given: tuple(s for s in given if s.name == HIDDEN), "but declares hidden"),
    ],
)
def test_a_wrong_declaration_is_refused_before_anything_runs(monkeypatch, streams, said):
    monkeypatch.setattr(MemoryLayer, "streams", streams)
    model_facts.cache_clear()
    try:
        with pytest.raises(TypeError, match=said):
            block_uses(make_plan(run_of({}), 1))
    finally:
        model_facts.cache_clear()

"""Quantized base weights (lora.base): the same numbers in every layout, frozen to the byte, and as large as the plan
says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.data_parallel.base_storage import BaseStorage
from phalanx.engine.build import build
from phalanx.engine.step import accumulate, update
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.nn.adapter import find_adapter
from tests.harness import parity
from tests.harness.sample import rest_in_soak
from tests.inference.test_beside import PROMPTS, ROOM, same_answers, same_training
from tests.inference.test_engine import GREEDY

STEPS = 2
FORMATS = ("int8", "fp8", "int4", "nf4")


def based(run: Run, base: str, **fields) -> Run:
    return replace(run, lora=find_adapter("lora").Config(**{"rank": 3, "alpha": 5.0, "base": base, **fields}))


LAYOUTS = [
    ("llama", "nf4", 2, {"tp": 2}, {}),
    ("llama", "int4", 2, {"pp": 2, "virtual_stages": 2}, {}),
    ("qwen3", "nf4", 2, {"sharding": 3, "bucket_mb": 0}, {}),
    ("mistral", "fp8", 2, {"cp": 2}, {}),
    ("mixtral", "int8", 2, {"ep": 2}, {}),
]
IN_SOAK = [
    ("gpt2", "nf4", 2, {"tp": 2}, {}),  # its matrices are stored transposed
    ("gpt_oss", "nf4", 2, {"ep": 2}, {}),  # experts of a layer are one global tensor
    ("mixtral", "nf4", 4, {"tp": 2, "ep": 2, "etp": 2}, {}),
    ("deepseek_v3", "fp8", 4, {"tp": 2, "sharding": 3}, {"recompute": "full"}),
    ("llama", "int8", 4, {"tp": 2, "sharding": 3, "shard_group": 2}, {"deterministic": True}),
]


@pytest.mark.parametrize(
    "model, base, world, layout, train",
    [*LAYOUTS, *(pytest.param(*c, marks=pytest.mark.soak) for c in IN_SOAK)],
    ids=str,
)
def test_the_same_in_every_layout(ranks, model, base, world, layout, train):
    """Truth: one process with the same format: losses, norms, gradients of adapters, adapters, and the base, of which
    no value changes."""
    run = based(replace(parity.base_run(model, **train), layout=LayoutConfig(**layout)), base)
    truth = parity.truth_of(ranks, run, STEPS, False)
    parity.compare(ranks.run("tests.harness.parity:run_layout", world, run, STEPS, False), truth, STEPS)
    start = parity.truth_of(ranks, run, 0, False)["weights"]
    for name, value in truth["weights"].items():
        assert np.array_equal(value, start[name]) or ".lora_" in name, name


def bytes_on_rank(rank: int, world: int, run: Run) -> tuple[bool, list[tuple[int, int]]]:
    """Whether some steps leave this rank's bytes of the base as they were; and of each bucket of it, the bytes that
    decoded weights and gathered values have memory for afterwards."""
    plan = make_plan(run, world)
    mesh = Mesh(plan.grid, rank)
    state = build(plan, mesh)
    parity.random_weights(state.model)
    base = [f.storage for f in state.buffers.flat if isinstance(f.storage, BaseStorage)]
    before = [s.kept.clone() for s in base]
    for step in range(STEPS):
        update(state, accumulate(state, parity.step_batches(run, mesh, step, False)), lr=1e-2)
    same = all(torch.equal(s.kept, b) and b.any() for s, b in zip(base, before))
    gathered = [0 if s.whole is s.kept else s.whole.untyped_storage().nbytes() for s in base]
    return same, list(zip([s.weight.untyped_storage().nbytes() for s in base], gathered))


@pytest.mark.parametrize("base", rest_in_soak(FORMATS, ("fp8", "nf4")))
def test_bytes_of_the_base_stay(ranks, base):
    """And between uses nothing else of it is there: at ZeRO-3 no memory, below it the one place of all segments."""
    run = based(replace(parity.base_run("llama", precision="fp32"), layout=LayoutConfig(bucket_mb=0)), base)
    [(same, sizes)] = ranks.run("tests.data_parallel.test_quantized_base:bytes_on_rank", 1, run)
    assert same and len(sizes) > 1 and len(set(sizes)) == 1
    for same, sizes in ranks.run(
        "tests.data_parallel.test_quantized_base:bytes_on_rank",
        2,
        replace(run, layout=LayoutConfig(sharding=3, bucket_mb=0)),
    ):
        assert same and set(sizes) == {(0, 0)}


@pytest.mark.soak
def test_text_beside_training(ranks):
    """Truth: one process with the same format, which decodes for each step of the engine too; and training's bits are
    those without any text."""
    run = based(replace(parity.base_run("llama"), layout=LayoutConfig(sharding=3, bucket_mb=0)), "nf4")
    asked, train = [(prompt, GREEDY) for prompt in PROMPTS], "tests.harness.beside:train_and_answer"
    [alone], both = (ranks.run(train, world, run, asked, ROOM) for world in (1, 2))
    for found, wanted in zip(both[0]["texts"], alone["texts"], strict=True):
        same_answers(found, wanted)
    same_training(both, ranks.run(train, 2, run, [], ROOM))

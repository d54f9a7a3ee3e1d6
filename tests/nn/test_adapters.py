"""Adapters of linears: the same in every layout as in one process, and only they are trained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phalanx.config.run import Run
from phalanx.layout.config import LayoutConfig
from phalanx.nn.adapter import find_adapter
from tests.harness import parity

STEPS = 2


def lora(run: Run, method: str = "lora", **fields) -> Run:
    return replace(run, lora=find_adapter(method).Config(method=method, **fields))


LAYOUTS = [
    ("qwen2", 2, {"tp": 2}),
    ("llama", 4, {"tp": 2, "pp": 2}),
    ("llama", 4, {"tp": 4}),  # two key/value heads
    ("gpt2", 2, {"tp": 2}),  # q, k and v as one matrix
    ("qwen3", 2, {"sharding": 3, "bucket_mb": 0}),
    ("mistral", 2, {"cp": 2}),
    ("deepseek_v3", 2, {"tp": 2}),
    ("mixtral", 2, {"ep": 2}),
    ("mixtral", 4, {"tp": 2, "ep": 2, "etp": 2}),
    ("qwen3_moe", 4, {"ep": 2, "etp": 2, "sharding": 3}),  # etp is no part of tp
    ("deepseek_v3-mtp", 4, {"pp": 2, "ep": 2, "dispatch": "alltoall"}),
]


@pytest.mark.parametrize("model, world, layout", LAYOUTS, ids=[f"{m} {lay}" for m, _, lay in LAYOUTS])
def test_lora_is_the_same_in_every_layout(ranks, model, world, layout):
    """Truth: one process in float64: losses, norms, gradients and weights of A and B."""
    run = lora(replace(parity.base_run(model), layout=LayoutConfig(**layout)), rank=3, alpha=5.0)
    truth = parity.truth_of(ranks, run, STEPS, False)
    mine = [name for name in truth["weights"] if ".lora_" in name]
    assert mine and truth["grads"][0].keys() == set(mine)
    assert all(np.any(truth["grads"][0][name]) for name in mine if ".experts." not in name)  # some get no token
    parity.compare(ranks.run("tests.harness.parity:run_layout", world, run, STEPS, False), truth, STEPS)
    start = parity.truth_of(ranks, run, 0, False)["weights"]
    for name, value in truth["weights"].items():
        assert np.array_equal(value, start[name]) or name in mine, name


@pytest.mark.parametrize(
    "model, layout, train",
    [
        ("llama", {"pp": 2}, {}),  # the first stage has nothing to train
        ("llama", {"tp": 2, "sharding": 2}, {"recompute": "full"}),
        ("mixtral", {"ep": 2}, {"deterministic": True}),  # gradients of micro-batches stay apart
    ],
)
def test_few_targets(ranks, model, layout, train):
    """Truth: one process. Linears of the last layer alone have adapters, and one of several matrices of a linear."""
    last = parity.MODELS[model].num_hidden_layers - 1
    globs = [f"*.layers.{last}.*.v_proj.*", f"*.layers.{last}.*.up_proj.*", f"*.layers.{last}.*.w3.*"]
    carried = globs[:2] if model == "llama" else globs[::2]
    run = replace(parity.base_run(model, **train), layout=LayoutConfig(**layout))
    run = lora(run, rank=2, targets=carried)
    truth = parity.truth_of(ranks, run, STEPS, False)
    kinds = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in truth["grads"][0]}
    assert kinds == ({"v_proj", "up_proj"} if model == "llama" else {"v_proj", "w3"})
    parity.compare(ranks.run("tests.harness.parity:run_layout", 2, run, STEPS, False), truth, STEPS)

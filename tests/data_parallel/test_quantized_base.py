"""Quantized base weights (lora.base): the same numbers in every layout, frozen to the byte, and as large as the plan
says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phalanx.config.run import Run
from phalanx.layout.config import LayoutConfig
from phalanx.nn.adapter import find_adapter
from tests.harness import parity

STEPS = 2
FORMATS = ("int8", "fp8", "int4", "nf4")


def based(run: Run, base: str, **fields) -> Run:
    return replace(run, lora=find_adapter("lora").Config(**{"rank": 3, "alpha": 5.0, "base": base, **fields}))


LAYOUTS = [
    ("llama", "nf4", 2, {"tp": 2}, {}),
    ("llama", "int4", 2, {"pp": 2, "virtual_stages": 2}, {}),
    ("qwen3", "nf4", 2, {"sharding": 3, "bucket_mb": 0}, {}),
    ("mistral", "fp8", 2, {"cp": 2}, {}),
    ("gpt2", "nf4", 2, {"tp": 2}, {}),  # its matrices are stored transposed
    ("mixtral", "int8", 2, {"ep": 2}, {}),
    ("gpt_oss", "nf4", 2, {"ep": 2}, {}),  # experts of a layer are one global tensor
    ("mixtral", "nf4", 4, {"tp": 2, "ep": 2, "etp": 2}, {}),
    ("deepseek_v3", "fp8", 4, {"tp": 2, "sharding": 3}, {"recompute": "full"}),
    ("llama", "int8", 4, {"tp": 2, "sharding": 3, "shard_group": 2}, {"deterministic": True}),
]


@pytest.mark.parametrize(
    "model, base, world, layout, train", LAYOUTS, ids=[f"{m} {base} {lay}" for m, base, _, lay, _ in LAYOUTS]
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

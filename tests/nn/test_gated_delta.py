"""Layers with linear attention on several ranks: documents stay apart to the bit, and exchanges have the bytes of their
formulas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phalanx.config.run import Run
from phalanx.layout.config import LayoutConfig
from tests.harness.parity import MODELS, base_run, sample_batch
from tests.nn.test_state_space import LENGTH

LAYOUTS = {"one rank": {}, "cp3": {"cp": 3}, "tp2 cp2": {"tp": 2, "cp": 2}}


def run_of(family: str, **layout: int) -> Run:
    """Layers of both kinds, with dense MLPs: rows of experts are multiplied together, whatever document they are of."""
    run = base_run(family, global_batch=1, seq_length=LENGTH)
    dense = {"mlp_only_layers": (0, 1, 2, 3)} if family == "qwen3_next" else {}
    model = replace(run.model, **dense)
    return replace(run, model=model, layout=LayoutConfig(**layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_document_changes_no_bit_of_another(ranks, layout):
    sizes = LAYOUTS[layout]
    world = sizes.get("tp", 1) * sizes.get("cp", 1)

    def found(changed: int | None) -> list[list[np.ndarray]]:
        return ranks.run("tests.nn.test_state_space:logits_of", world, run_of("qwen3_next", **sizes), changed)

    before = found(None)
    for changed in range(3):
        for (documents, old), (_, new) in zip(before, found(changed), strict=True):
            here = documents == changed
            assert np.array_equal(old[~here], new[~here])
            assert not here.any() or not np.array_equal(old[here], new[here])


@pytest.mark.parametrize("tp, cp", [(1, 3), (2, 2)])
def test_bytes_of_exchanges(ranks, tp, cp):
    """By layer and pass: what two chunks of each sequence leave, and how they change a state, goes to all ranks, and
    the tokens before a convolution to each neighbour. On the way back, states are summed, and gradients of tokens
    return."""
    run, sequences = run_of("qwen3_next", tp=tp, cp=cp), 2
    run = replace(run, train=replace(run.train, micro_batch=sequences, global_batch=sequences))
    batch = sample_batch([1, 2], True, LENGTH)
    found = ranks.run("tests.nn.test_state_space:calls_of", tp * cp, run, batch)
    m, layers = MODELS["qwen3_next"], run.model.types.count("linear_attention")
    keys, values = m.linear_num_key_heads // tp, m.linear_num_value_heads // tp
    key, value = m.linear_key_head_dim, m.linear_value_head_dim
    states = 2 * sequences * values * key * (value + key) * 8
    tokens = sequences * (m.linear_conv_kernel_dim - 1) * (2 * keys * key + values * value) * 8
    for rank, calls in enumerate(found):
        index = rank // tp % cp
        neighbours = (index > 0) + (index < cp - 1)
        assert calls["exchange", "all_gather", "cp"] == (layers, layers * states)
        assert calls["exchange", "reduce_scatter", "cp"] == (layers, layers * states * cp)
        assert calls["exchange", "all_to_all", "cp"] == (2 * layers, 2 * layers * tokens * neighbours)

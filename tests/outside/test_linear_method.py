"""A method of linears from outside the package, in one file (tests/outside/low_rank.py), trains and saves in every
layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from phalanx.comm.axis import ModelAxes
from phalanx.layout.config import LayoutConfig
from phalanx.layout.grid import Coords
from phalanx.layout.param import Init
from phalanx.nn.env import Env, WeightRules
from phalanx.nn.linear import ColumnLinear, RowLinear
from phalanx.nn.module import OutputRows
from phalanx.planning.blocks import make_blocks
from phalanx.planning.plan import Plan
from tests.harness import checkpoints, parity
from tests.outside.low_rank import LowRank, LowRankLinears

RANK = 3
LAYOUTS = {"tp2": LayoutConfig(tp=2), "pp2": LayoutConfig(pp=2), "dp2 sharding 3": LayoutConfig(sharding=3)}
WORKERS = {f.__name__: f for f in (parity.run_layout, checkpoints.save_on_rank, checkpoints.load_on_rank)}


def adapted(rank: int, world: int, name: str, *given: Any) -> Any:
    """A worker of other tests, on a model whose linears all have an adapter."""
    plain = Plan.env

    def env(plan: Plan, at: Coords, axes: ModelAxes | None = None) -> Env:
        made = plain(plan, at, axes)
        return replace(made, weights=replace(made.weights, linears=LowRankLinears(RANK)))

    with mock.patch.object(Plan, "env", env):
        return WORKERS[name](rank, world, *given)


def test_the_method_adds_its_product():
    """Truth: x W^T + x A^T B^T, of a matrix whose outputs are cut over tp, and of one whose inputs are."""
    env, init = Env(weights=WeightRules(dtype=torch.float64, linears=LowRankLinears(RANK))), Init("normal", 0.02)
    for linear in (
        ColumnLinear(env, [OutputRows("up.weight", 8, 0, 8)], 6, init),
        RowLinear(env, "down.weight", 8, 6, (0, 6), init),
    ):
        for p in linear.parameters():
            shape = p.shape
            p.to_empty(torch.device("cpu"))
            p.data = torch.randn(shape, dtype=torch.float64)
        w, a, b = linear.parameters()
        x = torch.randn(5, 6, dtype=torch.float64)
        assert torch.allclose(linear(x), x @ w.t() + x @ a.t() @ b.t(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("model", ["qwen2", "gpt2"])
def test_a_low_rank_method_computes_the_same_in_every_layout(ranks, model):
    """Truth: one process in float64: losses, norms, gradients and weights, the adapters' own among them."""
    run = parity.base_run(model)
    alone = replace(run, layout=LayoutConfig(sharding=0))
    (truth,) = ranks.run("tests.outside.test_linear_method:adapted", 1, "run_layout", alone, 2)
    truth |= {
        "grads": [parity.assemble([g]) for g in truth["grads"]],
        "weights": parity.assemble([truth["weights"]]),
    }
    mine = [name for name in truth["weights"] if ".lora_" in name]
    assert mine and all(abs(truth["grads"][0][name]).max() > 0 for name in mine)
    for layout in LAYOUTS.values():
        found = ranks.run("tests.outside.test_linear_method:adapted", 2, "run_layout", replace(run, layout=layout), 2)
        parity.compare(found, truth, 2)


def test_an_adapter_is_saved_under_one_layout_and_loaded_under_another(ranks, tmp_path):
    run = replace(parity.base_run("qwen2"), layout=LAYOUTS["tp2"])
    assert all(ranks.run("tests.outside.test_linear_method:adapted", 2, "save_on_rank", run, tmp_path, {}))
    for layout in (LAYOUTS["pp2"], LAYOUTS["dp2 sharding 3"]):
        path = tmp_path / "step-00000010"
        found = ranks.run(
            "tests.outside.test_linear_method:adapted", 2, "load_on_rank", replace(run, layout=layout), path
        )
        assert found == [[], []]


def test_a_glob_chooses_the_linears_of_an_adapter():
    env = Env(weights=WeightRules(linears=LowRankLinears(RANK, "*o_proj*")))
    (layer,) = make_blocks(parity.MODELS["llama"], env, [1])
    assert isinstance(layer.attention.out.method, LowRank) and layer.attention.qkv.is_plain and layer.mlp.down.is_plain
    assert [p.spec.name for p in layer.parameters() if ".lora_" in p.spec.name] == [
        f"model.layers.0.self_attn.o_proj.weight.lora_{side}" for side in "AB"
    ]

"""Where adapters start: PiSSA against PEFT's, and at the base model; DoRA at the lengths of the base's rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import peft
import pytest
import torch

from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.engine.adapter_start import initial_tensors, start_adapters
from phalanx.engine.build import State, build, init_weights
from phalanx.engine.step import accumulate, update
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.nn.adapter import find_adapter
from phalanx.nn.adapters.lora import principal
from tests.harness.parity import assemble, base_run, parts_of, step_batches


def state_of(run: Run, rank: int = 0, world: int = 1) -> State:
    plan = make_plan(run, world)
    state = build(plan, Mesh(plan.grid, rank))
    init_weights(state.model)
    start_adapters(state.model, initial_tensors(run))
    return state


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_pissa_starts_as_that_of_peft(shape):
    """Truth: PEFT in fp32: what A and B multiply to, and how they share it."""
    torch.manual_seed(0)
    outputs, inputs = shape
    layer = torch.nn.Sequential(torch.nn.Linear(inputs, outputs, bias=False))
    weight = layer[0].weight.detach().clone().double()
    config = peft.LoraConfig(r=4, lora_alpha=6.0, target_modules=["0"], init_lora_weights="pissa")
    theirs = peft.get_peft_model(layer, config).base_model.model[0]
    a, b = principal(weight, 4, 6.0 / 4)
    expected = theirs.lora_B["default"].weight @ theirs.lora_A["default"].weight
    torch.testing.assert_close((b @ a).float(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(a.norm(dim=1).flip(0).float(), theirs.lora_A["default"].weight.norm(dim=1))
    torch.testing.assert_close(b.norm(dim=0).flip(0).float(), theirs.lora_B["default"].weight.norm(dim=0))


def test_a_matrix_of_small_rank_has_a_finite_start():
    a, b = principal(torch.outer(torch.arange(5.0), torch.ones(7)).double(), 3, 2.0)
    assert a.isfinite().all() and b.isfinite().all()
    torch.testing.assert_close(2.0 * b @ a, torch.outer(torch.arange(5.0), torch.ones(7)).double())


@pytest.mark.parametrize("model", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("method", [{"start": "pissa"}, {"method": "dora"}])
def test_the_first_step_begins_at_the_base_model(model, method):
    """Truth: the loss without adapters. Only then do gradients of A come without those of B being zero."""
    base = replace(base_run(model, global_batch=2), layout=LayoutConfig(sharding=0))
    name = method.get("method", "lora")
    run = replace(base, lora=find_adapter(name).Config(rank=3, **method))
    losses = []
    for each in (run, base):
        state = state_of(each)
        state.model.train()
        tokens = accumulate(state, step_batches(each, state.mesh, 0, False))
        grads = assemble([parts_of(state, "grad")])
        losses.append(update(state, tokens, 0.0).loss.item())
        if each is run:
            changed = "lora_A.weight" if name == "lora" else "lora_magnitude_vector"
            assert any(np.any(grad) for key, grad in grads.items() if key.endswith(changed))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def starts_on_rank(rank: int, world: int, run: Run) -> list:
    return parts_of(state_of(run, rank, world), "master")


@pytest.mark.parametrize("fields", [{"start": "pissa"}, {"method": "dora"}])
def test_the_start_is_the_same_in_every_layout(ranks, fields):
    """Truth: one process, to the bit."""
    lora = find_adapter(fields.get("method", "lora")).Config(rank=3, **fields)
    run = replace(base_run("mixtral"), lora=lora)
    [alone] = ranks.run("tests.nn.test_lora_start:starts_on_rank", 1, run)
    truth = assemble([alone])
    cut = replace(run, layout=LayoutConfig(tp=2, ep=2, etp=2, sharding=1))
    found = assemble(ranks.run("tests.nn.test_lora_start:starts_on_rank", 4, cut))
    assert found.keys() == truth.keys() and any("start_A" in name or "magnitude" in name for name in found)
    assert all(np.array_equal(found[name], truth[name]) for name in truth)


@pytest.mark.parametrize("fields", [{"start": "pissa"}, {"method": "dora"}])
def test_over_a_quantized_base_too(fields):
    """Truth: LoRA over the same base, whose B is zero. DoRA starts at the lengths of what the base stands for."""
    base, losses = replace(base_run("llama", global_batch=2), layout=LayoutConfig(sharding=0)), []
    for each in (fields, {}):
        lora = find_adapter(each.get("method", "lora")).Config(rank=3, base="int4", **each)
        state = state_of(replace(base, lora=lora))
        state.model.train()
        tokens = accumulate(state, step_batches(base, state.mesh, 0, False))
        losses.append(update(state, tokens, 0.0).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)

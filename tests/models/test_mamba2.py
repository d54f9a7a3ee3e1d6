"""Mamba-2's config.json there and back, its initial values, its parameters by the published count, and text equal to
transformers'."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers

from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.hf import from_hf, to_hf
from phalanx.comm.mesh import Mesh
from phalanx.config.read import load_run
from phalanx.config.run import Run, TrainConfig
from phalanx.engine.build import build, init_weights
from phalanx.forecast.decide import make_plan
from phalanx.models.mamba2 import Mamba2Config
from phalanx.planning.blocks import exported_shapes
from tests.harness import hf_fuzz
from tests.harness.parity import MODELS

CONFIGS = {
    "limited steps": MODELS["mamba2"],
    "no limit, biases, tied": replace(
        MODELS["mamba2"], time_step_limit=(0.0, math.inf), use_bias=True, tie_word_embeddings=True, use_conv_bias=False
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_there_and_back(name):
    """Written as a file and read again, to the byte; transformers reads the same sizes from it and writes a file that
    we read as the same model."""
    written = json.dumps(to_hf(CONFIGS[name], torch.float32))
    found = from_hf(json.loads(written))
    assert found == CONFIGS[name] and json.dumps(to_hf(found, torch.float32)) == written
    theirs = transformers.AutoConfig.for_model(**json.loads(written))
    assert theirs.num_heads == found.num_heads and tuple(theirs.time_step_limit) == found.time_step_limit
    assert from_hf(json.loads(theirs.to_json_string(use_diff=False))) == found


@pytest.mark.parametrize(
    "changed, text",
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"time_step_limit": [0.1]}, "time_step_limit=[0.1] (it must be two numbers"),
        ({"num_heads": 6}, "num_heads * head_dim must be expand * hidden_size"),
        ({"num_heads": None}, "num_heads=None (it must be an integer)"),
    ],
)
def test_what_is_not_computed_is_refused(changed, text):
    with pytest.raises(CheckpointError) as error:
        from_hf(to_hf(MODELS["mamba2"], torch.float32) | changed)
    assert text in str(error.value)


def test_tensors_are_transformers():
    """Names and shapes."""
    config = replace(MODELS["mamba2"], use_bias=True)
    model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**to_hf(config, torch.float32)))
    assert exported_shapes(config) == {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_initial_values():
    """A_log is log(1 .. heads), steps are log-uniform between the given ones, and the convolution is within its
    bound."""
    config = replace(MODELS["mamba2"], num_heads=64, head_dim=1, n_groups=1)
    run = Run(model=config, train=TrainConfig(steps=1, global_batch=1, micro_batch=1, seq_length=16, precision="fp64"))
    plan = make_plan(run, 1)
    state = build(plan, Mesh(plan.grid, 0))
    init_weights(state.model)
    found = {}
    for flat in state.buffers.flat:
        for slot in flat.bucket.slots:
            values = flat.master[slot.offset : slot.offset + slot.numel].view(slot.spec.shape)
            found |= {piece.name: piece.of(values) for piece in slot.spec.pieces}
    at = "backbone.layers.1.mixer"
    assert torch.equal(found[f"{at}.A_log"], torch.arange(1, 65).double().log()) and (found[f"{at}.D"] == 1).all()
    steps = F.softplus(found[f"{at}.dt_bias"])
    assert steps.min() >= 0.001 - 1e-12 and steps.max() <= 0.1 + 1e-12
    assert abs(float(steps.log().mean()) - math.log(0.01)) < 4 * math.log(100) / math.sqrt(12 * 64)
    assert found[f"{at}.conv1d.weight"].abs().max() <= 1 / math.sqrt(config.conv_kernel)


def test_published_size():
    """state-spaces/mamba2-2.7b: 2,702,599,680 parameters."""
    model = load_run("recipes/mamba2_2_7b.yaml").model
    assert isinstance(model, Mamba2Config)
    shapes = exported_shapes(model)
    assert sum(math.prod(shape) for shape in shapes.values()) == 2_702_599_680


def test_states_are_transformers(tmp_path):
    """Truth: transformers' own cache, token after token in float64, against its logits of the whole text."""
    config = MODELS["mamba2"]
    torch.manual_seed(0)
    with hf_fuzz.wide():
        made = transformers.Mamba2Config(**to_hf(replace(config, time_step_limit=(0.0, math.inf)), torch.float64))
        model = transformers.Mamba2ForCausalLM(made).double().eval()
        ids = torch.randint(0, config.vocab_size, (1, 12))
        with torch.no_grad():
            whole = model(ids).logits
            cache, found = None, []
            for token in ids.T:
                out = model(token.view(1, 1), cache_params=cache, use_cache=True)
                cache = out.cache_params
                found.append(out.logits)
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=0, atol=1e-10)

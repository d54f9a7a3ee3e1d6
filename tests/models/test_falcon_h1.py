"""Falcon-H1's config.json there and back, published forms of it, what is refused, its tensors, and what its layers
cost."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
import transformers

from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.hf import from_hf, to_hf
from phalanx.config.read import load_run
from phalanx.models.check import check
from phalanx.models.falcon_h1 import FalconH1Config
from phalanx.planning.blocks import exported_shapes, model_facts
from tests.harness.parity import MODELS

MODEL = MODELS["falcon_h1"]
WRITTEN = to_hf(MODEL, torch.float32)


@pytest.mark.parametrize("model", ["falcon_h1", "falcon_h1-norm"])
def test_config_there_and_back(model):
    """To the byte; transformers reads the same sizes, and writes a file that we read as the same model."""
    written = json.dumps(to_hf(MODELS[model], torch.float32))
    found = from_hf(json.loads(written))
    assert found == MODELS[model] and json.dumps(to_hf(found, torch.float32)) == written
    theirs = transformers.AutoConfig.for_model(**json.loads(written))
    assert theirs.mamba_d_head == found.mamba_d_head and tuple(theirs.ssm_multipliers) == found.ssm_multipliers
    assert from_hf(json.loads(theirs.to_json_string(use_diff=False))) == found


@pytest.mark.parametrize(
    "said, wanted",
    [
        ({"mamba_d_head": "auto"}, {}),
        ({"mamba_d_ssm": None, "mamba_n_heads": 4, "mamba_d_head": "auto"}, {"mamba_n_heads": 4, "mamba_d_head": 16}),
        ({"mlp_multipliers": None, "ssm_multipliers": None}, {"mlp_multipliers": (1.0,) * 2}),
        ({"mamba_norm_before_gate": False}, {"mamba_norm_before_gate": True}),  # there is no norm
        ({"mamba_use_mlp": True, "attn_layer_indices": None}, {}),
        ({"num_key_value_heads": None}, {"num_key_value_heads": 4}),
    ],
    ids=["head by itself", "width by expand", "no multipliers", "no norm", "older keys", "as many key heads"],
)
def test_published_forms(said, wanted):
    found = from_hf({**WRITTEN, **said})
    assert found == replace(MODEL, **wanted, ssm_multipliers=found.ssm_multipliers)
    assert found.ssm_multipliers == ((1.0,) * 5 if "ssm_multipliers" in said else MODEL.ssm_multipliers)


@pytest.mark.parametrize(
    "changed, text",
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"mamba_use_mlp": False}, "mamba_use_mlp=False"),
        ({"attn_layer_indices": [1]}, "attn_layer_indices=[1]"),
        ({"mamba_d_head": 5}, "mamba_d_head=5 (mamba_n_heads of them must be 24 features)"),
        ({"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers=[1.0, 2.0] (it must be 5 numbers)"),
        ({"time_step_limit": [0.1]}, "it must be two numbers"),
        ({"key_multiplier": -1.0}, "key_multiplier"),
    ],
)
def test_what_is_not_computed_is_refused(changed, text):
    with pytest.raises(CheckpointError) as error:
        from_hf({**WRITTEN, **changed})
    assert text in str(error.value)


@pytest.mark.parametrize(
    "changed, field, valid",
    [
        (dict(mamba_norm_before_gate=False), "model.mamba_norm_before_gate", (True,)),
        (dict(mamba_n_groups=3), "model.mamba_n_groups", (2, 4, 1, 8)),
        (dict(mlp_multipliers=(0.5, 0.0)), "model.mlp_multipliers", ((1.0, 1.0),)),
        (dict(embedding_multiplier=math.inf), "model.embedding_multiplier", (1.0,)),
        (dict(mamba_d_conv=1), "model.mamba_d_conv", (2, 3)),
        (dict(time_step_limit=(0.5, 0.1)), "model.time_step_limit", ((0.0, math.inf),)),
        (dict(mlp_bias=True), "model.mlp_bias", (False,)),
    ],
)
def test_rules(changed, field, valid):
    """Each suggested value is accepted."""
    [found] = check(replace(MODEL, **changed), tp=1, seq_length=16)
    assert (found.field, found.valid) == (field, valid)
    for value in valid:
        assert not check(replace(MODEL, **changed | {field.removeprefix("model."): value}), tp=1, seq_length=16)


def test_rules_of_ranks():
    wide = replace(MODEL, num_attention_heads=6, num_key_value_heads=3, mamba_n_groups=4)
    assert [(p.field, p.rule) for p in check(wide, tp=3, seq_length=16)] == [
        ("layout.tp", "must divide mamba_n_heads"),
        ("layout.tp", "must divide mamba_n_groups or be a multiple of it"),
    ]


def test_tensors_are_transformers():
    config = replace(
        MODELS["falcon_h1-norm"],
        tie_word_embeddings=False,
        mamba_proj_bias=True,
        projectors_bias=True,
        attention_bias=True,
    )
    model = transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**to_hf(config, torch.float32)))
    assert exported_shapes(config) == {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_published_size():
    """Truth: the sum over all tensors of tiiuae/Falcon-H1R-7B-GGUF, which has a norm behind each scan."""
    model = load_run("recipes/falcon_h1_7b.yaml").model
    assert isinstance(model, FalconH1Config)
    count = sum(math.prod(shape) for shape in exported_shapes(model).values())
    assert count == 7_585_648_736


def test_flops_are_those_of_both():
    """A layer costs its matrices, attention over all tokens before, and the scan, which does not grow with the
    length."""
    c = MODEL
    q, kv = c.num_attention_heads * c.head_dim, 2 * c.num_key_value_heads * c.head_dim
    inner, mixed = c.mamba_n_heads * c.mamba_d_head, 2 * c.mamba_n_groups * c.mamba_d_state
    weights = c.hidden_size * (2 * q + kv + 3 * inner + mixed + c.mamba_n_heads + 3 * c.intermediate_size)
    scan = 2 * c.mamba_d_conv * (inner + mixed) + 6 * inner * c.mamba_d_state
    for length in (16, 64):
        attention = 4 * length / 2 * q
        assert model_facts(c, length)[1].flops == pytest.approx(2 * weights + attention + scan)

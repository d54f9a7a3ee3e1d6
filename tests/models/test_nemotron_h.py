"""Nemotron-H's config.json there and back, patterns of layers in their published forms, what is refused, and costs by
kind of layer."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers

from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.hf import from_hf, to_hf
from phalanx.config.run import Run, TrainConfig
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.models.check import check
from phalanx.models.nemotron_h import FAMILY
from phalanx.planning.blocks import exported_shapes, model_facts
from tests.harness.parity import MODELS

MODEL = MODELS["nemotron_h"]
WRITTEN = to_hf(MODEL, torch.float32)


def test_config_there_and_back():
    """To the byte; transformers reads the same layers, and writes a file that we read as the same model."""
    written = json.dumps(WRITTEN)
    found = from_hf(json.loads(written))
    assert found == MODEL and json.dumps(to_hf(found, torch.float32)) == written
    theirs = transformers.AutoConfig.for_model(**json.loads(written))
    assert tuple(theirs.layers_block_type) == MODEL.layers_block_type
    assert from_hf(json.loads(theirs.to_json_string(use_diff=False))) == MODEL


@pytest.mark.parametrize(
    "said",
    [
        {"hybrid_override_pattern": "M-*M"},
        {"layers_block_type": ["mamba", "mlp", "attention", "mamba"]},
        {"layer_types": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
    ],
    ids=["pattern", "old names", "layer_types"],
)
def test_layers_in_published_forms(said):
    assert from_hf({**{k: v for k, v in WRITTEN.items() if k != "layers_block_type"}, **said}) == MODEL


@pytest.mark.parametrize(
    "changed, text",
    [
        ({"hybrid_override_pattern": "M-X", "layers_block_type": None}, "layer 2 is 'X'"),
        ({"layers_block_type": ["moe"], "n_shared_experts": 2}, "n_shared_experts=2"),
        ({"layers_block_type": ["moe"], "n_routed_experts": 6, "n_group": 4}, "n_group"),
        ({"layers_block_type": ["linear_attention", "conv"]}, "layer 1 is 'conv'"),
        ({"layers_block_type": []}, "there are none"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1"),
        ({"n_groups": 3}, "n_groups"),
    ],
)
def test_what_is_not_computed_is_refused(changed, text):
    with pytest.raises(CheckpointError) as error:
        from_hf({**WRITTEN, **changed})
    assert text in str(error.value)


def test_rules_of_layers_and_heads():
    found = check(replace(MODEL, num_hidden_layers=6), tp=1, seq_length=16)
    assert [(p.field, p.valid[0]) for p in found] == [
        ("model.layers_block_type", (*MODEL.layers_block_type, "linear_attention", "mlp"))
    ]
    wide = replace(MODEL, num_attention_heads=6, num_key_value_heads=3, n_groups=4)
    assert [(p.field, p.rule) for p in check(wide, tp=3, seq_length=16)] == [
        ("layout.tp", "must divide mamba_num_heads"),
        ("layout.tp", "must divide n_groups or be a multiple of it"),
    ]


def test_tensors_are_transformers():
    config = replace(MODEL, use_bias=True, mlp_bias=True)
    model = transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**to_hf(config, torch.float32)))
    assert exported_shapes(config) == {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_stages_are_cut_by_cost():
    """A stage of cheap layers has more of them: the costs of blocks are those of their kinds."""
    kinds = ("mlp",) * 2 + ("linear_attention",) * 6
    model = replace(MODEL, num_hidden_layers=8, layers_block_type=kinds, vocab_size=64, intermediate_size=4096)
    facts = model_facts(model, 16)
    assert facts[1].flops > 20 * facts[3].flops and len({f.flops for f in facts[3:9]}) == 1
    train = TrainConfig(steps=1, global_batch=4, micro_batch=1, seq_length=16)
    plan = make_plan(Run(model=model, train=train, layout=LayoutConfig(pp=2)), 2)
    assert [len(stage) for stage in plan.stages] == [2, 8]  # embedding and one MLP; the other layers and the head


def test_least_layers_have_every_kind():
    assert FAMILY.least_layers(MODEL) == 3

"""Nemotron-H's config.json there and back, patterns of layers in their published forms, what is refused, and costs by
kind of layer."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.hf import from_hf, to_hf
from phalanx.config.read import load_run
from phalanx.config.run import Run, TrainConfig
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import block_use
from phalanx.layout.config import LayoutConfig
from phalanx.models.check import check
from phalanx.models.nemotron_h import FAMILY, LETTERS, OF_EXPERTS, NemotronHConfig
from phalanx.ops.op import Kernels, Op
from phalanx.planning.blocks import exported_shapes, model_facts
from tests.harness.parity import MODELS, base_run

MODEL = MODELS["nemotron_h"]
WRITTEN = to_hf(MODEL, torch.float32)


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h-moe", "nemotron_h-latent"])
def test_config_there_and_back(name):
    """To the byte; transformers reads the same layers, and writes a file that we read as the same model. How fast the
    bias of choice moves is no key of it."""
    model = replace(MODELS[name], router_bias_update_rate=NemotronHConfig.router_bias_update_rate)
    written = json.dumps(to_hf(model, torch.float32))
    found = from_hf(json.loads(written))
    assert found == model and json.dumps(to_hf(found, torch.float32)) == written
    theirs = transformers.AutoConfig.for_model(**json.loads(written))
    assert tuple(theirs.layers_block_type) == model.layers_block_type
    assert from_hf(json.loads(theirs.to_json_string(use_diff=False))) == model


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
        ({"layers_block_type": ["moe", "mlp"], "num_hidden_layers": 3}, "has 2 kinds"),
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


@pytest.mark.parametrize("model", ["nemotron_h", "nemotron_h-moe", "nemotron_h-latent"])
def test_tensors_are_transformers(model):
    """Of experts, transformers has one tensor of a layer in memory, and one of each in files."""
    config = replace(MODELS[model], use_bias=True, mlp_bias=True)
    model = transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**to_hf(config, torch.float32)))
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}
    theirs |= {name: tuple(b.shape) for name, b in model.named_buffers() if "bias" in name}
    for name in [name for name in theirs if ".experts." in name]:
        count, *shape = theirs.pop(name)
        at, _, matrix = name.rpartition(".")
        theirs |= {f"{at}.{i}.{matrix}.weight": tuple(shape) for i in range(count)}
    assert exported_shapes(config) == theirs


def test_published_size():
    """nvidia/Nemotron-H-8B-Base-8K: 8.1 B parameters; 24 scans, 24 MLPs and 4 layers of attention."""
    model = load_run("recipes/nemotron_h_8b.yaml").model
    assert isinstance(model, NemotronHConfig)
    letters = {kind: letter for letter, kind in LETTERS.items()}
    pattern = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    assert "".join(letters[kind] for kind in model.layers_block_type) == pattern
    count = sum(math.prod(shape) for shape in exported_shapes(model).values())
    assert round(count / 1e9, 1) == 8.1


@pytest.mark.parametrize(
    "changed, field, valid",
    [
        (dict(n_group=3, topk_group=1, num_experts_per_tok=1), "model.n_group", (2, 4, 1, 8)),
        (dict(num_experts_per_tok=5), "model.num_experts_per_tok", (4,)),
        (dict(moe_latent_size=0), "model.moe_latent_size", (1, 2)),
        (dict(router_bias_update_rate=-1.0), "model.router_bias_update_rate", (0.001,)),
        (
            dict(
                layers_block_type=("mlp",) * 5,
                **{name: getattr(MODEL, name) for name in OF_EXPERTS} | {"moe_latent_size": 4},
            ),
            "model.moe_latent_size",
            (None,),
        ),
    ],
)
def test_rules_of_experts(changed, field, valid):
    """Each suggested value is accepted."""
    model = replace(MODELS["nemotron_h-moe"], **changed)
    [found] = check(model, tp=1, seq_length=16)
    assert (found.field, found.valid) == (field, valid)
    for value in valid:
        assert not check(replace(model, **{field.removeprefix("model."): value}), tp=1, seq_length=16)


def test_shared_experts_are_as_wide_as_there_are_ranks():
    narrow = replace(MODELS["nemotron_h-moe"], moe_shared_expert_intermediate_size=3, num_attention_heads=8)
    [found] = check(narrow, tp=4, seq_length=16)
    assert (found.field, found.rule, found.valid) == (
        "layout.tp",
        "must be <= moe_shared_expert_intermediate_size",
        (2, 1),
    )


@pytest.mark.parametrize("model", ["nemotron_h-moe", "nemotron_h-latent"])
def test_flops_of_experts(model):
    """Of the matrices that a token passes: router, chosen experts, shared expert, latents."""
    c = MODELS[model]
    width, routed = c.moe_latent_size or c.hidden_size, 2 * c.moe_intermediate_size
    weights = c.n_routed_experts * c.hidden_size + c.num_experts_per_tok * routed * width
    weights += 2 * c.hidden_size * (c.moe_shared_expert_intermediate_size + (c.moe_latent_size or 0))
    assert model_facts(c, 16)[2].flops == pytest.approx(2 * weights)


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
    assert FAMILY.least_layers(MODEL) == 3 and FAMILY.least_layers(MODELS["nemotron_h-moe"]) == 4


@pytest.mark.parametrize("plain, kernels", [([], "triton"), (["relu2"], "plain")])
def test_activations_run_by_the_kernels_of_the_config(monkeypatch, plain, kernels):
    """Of MLPs, of routed experts and of the shared one."""
    asked, choose = list[tuple[str, str]](), Op.choose

    def noted(op: Op, kernels: Kernels, *given: Any, **more: Any) -> Any:
        asked.append((op.name, kernels))
        return choose(op, kernels, *given, **more)

    monkeypatch.setattr(Op, "choose", noted)
    for model, kind in (("nemotron_h", "mlp"), ("nemotron_h-moe", "moe")):
        asked.clear()
        plan = make_plan(base_run(model, kernels="triton", plain_ops=plain), 1)
        block_use(plan, 1 + MODELS[model].layers_block_type.index(kind))
        assert {found for op, found in asked if op == "relu2"} == {kernels}

"""Families with linear attention: config.json there and back, kinds of layers in their published forms, what is
refused, names and shapes of tensors, and costs by kind of layer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.convert import export
from phalanx.checkpoint.hf import from_hf, read_folder, to_hf
from phalanx.checkpoint.load import load_weights
from phalanx.comm.mesh import Mesh
from phalanx.config.read import load_run
from phalanx.config.run import Run, TrainConfig
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.models.check import check
from phalanx.models.registry import family_of
from phalanx.planning.blocks import exported_shapes, model_facts
from tests.harness import hf_fuzz
from tests.harness.checkpoints import make_run, make_state, save_here, set_state
from tests.harness.parity import MODELS

RECIPES = Path(__file__).parents[2] / "recipes"
FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "olmo_hybrid")
QWEN35 = {"qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe"}
LINEAR, FULL = "linear_attention", "full_attention"


def written(family: str) -> dict:
    return to_hf(MODELS[family], torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_config_there_and_back(family):
    """To the byte; transformers reads the same kinds of layers, and writes a file that we read as the same model."""
    text, model = json.dumps(written(family)), MODELS[family]
    found = from_hf(json.loads(text))
    assert found == model and json.dumps(to_hf(found, torch.float32)) == text
    theirs = transformers.AutoConfig.for_model(**json.loads(text))
    assert tuple(theirs.layer_types) == model.types
    assert from_hf(json.loads(theirs.to_json_string(use_diff=False))) == model


@pytest.mark.parametrize("family", ["qwen3_next", *QWEN35])
def test_layers_by_interval(family):
    """As the first published folders say it."""
    config = {k: v for k, v in written(family).items() if k != "layer_types"}
    assert from_hf({**config, "full_attention_interval": 2}) == MODELS[family]
    assert from_hf(config) == replace(MODELS[family], layer_types=None)
    assert from_hf(config).types == (LINEAR,) * 3 + (FULL,)


def test_kimis_layers_in_published_forms():
    """transformers writes the kinds of layers and of MLPs as lists, under names of its own."""
    config, model = written("kimi_linear"), MODELS["kimi_linear"]
    assert config["linear_attn_config"]["kda_layers"] == [1, 3]
    plain = {k: v for k, v in config.items() if k not in ("linear_attn_config", "first_k_dense_replace")}
    own = {"linear_num_heads": 4, "linear_head_dim": 5, "linear_conv_kernel_dim": 3, "layer_types": [*model.types]}
    assert from_hf({**plain, **own, "mlp_layer_types": ["dense"] + ["sparse"] * 3}) == model
    with pytest.raises(CheckpointError, match="mlp_layer_types"):
        from_hf({**plain, **own, "mlp_layer_types": ["sparse", "dense"] * 2})
    some = {**config["linear_attn_config"], "kda_layers": [1]}
    with pytest.raises(CheckpointError, match="layer 2 is 'none'"):
        from_hf({**config, "linear_attn_config": some})


@pytest.mark.parametrize(
    "changed, text",
    [
        ({"layer_types": [LINEAR, "conv", LINEAR, FULL]}, "layer 1 is 'conv'"),
        ({"layer_types": [LINEAR, FULL]}, "has 2 kinds (supported: one for each of 4 layers)"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"linear_num_key_heads": 3}, "must divide linear_num_value_heads"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval=0"),
    ],
)
def test_what_is_not_computed_is_refused(changed, text):
    with pytest.raises(CheckpointError) as error:
        from_hf({**written("qwen3_next"), **changed})
    assert text in str(error.value)


def test_rules_of_layers_and_heads():
    model = MODELS["qwen3_next"]
    found = check(replace(model, num_hidden_layers=5), tp=1, seq_length=16)
    assert [(p.field, p.valid) for p in found] == [("model.layer_types", ((LINEAR, FULL, LINEAR, FULL, LINEAR), None))]
    wide = replace(model, num_attention_heads=12, num_key_value_heads=6, linear_num_value_heads=8)
    wide = replace(wide, linear_num_key_heads=4, shared_expert_intermediate_size=5)
    assert [(p.field, p.rule) for p in check(wide, tp=6, seq_length=16)] == [
        ("layout.tp", "must divide linear_num_value_heads"),
        ("layout.tp", "must divide linear_num_key_heads or be a multiple of it"),
        ("layout.tp", "must be <= shared_expert_intermediate_size"),
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_least_layers_have_every_kind(family):
    model = replace(MODELS[family], layer_types=(LINEAR, LINEAR, FULL, LINEAR))
    assert family_of(model).least_layers(model) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_are_cut_by_cost(family):
    """Of equal MLPs, a layer of many wide states costs more than one with attention, and a stage has fewer of them."""
    kinds = (LINEAR,) * 2 + (FULL,) * 6
    wide = dict(linear_num_key_heads=8, linear_num_value_heads=8, linear_key_head_dim=64, linear_value_head_dim=64)
    wide = dict(linear_num_heads=8, linear_head_dim=64) if family == "kimi_linear" else wide
    model = replace(MODELS[family], num_hidden_layers=8, layer_types=kinds, vocab_size=64, **wide)
    facts = model_facts(model, 16)
    assert facts[1].flops > 5 * facts[5].flops
    train = TrainConfig(steps=1, global_batch=4, micro_batch=1, seq_length=16)
    plan = make_plan(Run(model=model, train=train, layout=LayoutConfig(pp=2)), 2)
    assert [len(stage) for stage in plan.stages] in ([2, 8], [3, 7])


def test_a_published_module_of_token_prediction(tmp_path):
    """What we save with one, transformers reads without it; we read it even where config.json does not mention it, as
    that of Qwen3-Next, and a model without one leaves it out. With such a folder's experts in stacks too."""
    run = make_run("qwen3_next-mtp", "fp32")
    state = make_state(run)
    set_state(state)
    folder = export(save_here(state, tmp_path / "run").path, tmp_path / "out", "fp32")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    own = {name for name in tensors if name.startswith("mtp.")}
    assert {"mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "mtp.layers.0.mlp.experts.7.up_proj.weight"} <= own
    _, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]

    config = json.loads((folder / "config.json").read_text())
    assert config.pop("num_nextn_predict_layers") == 1
    (folder / "config.json").write_text(json.dumps(config))
    assert (found := read_folder(folder).model).predict_layers == 1
    assert replace(found, mtp_loss_weight=0.7, router_aux_loss_coef=0.1) == run.model
    at = "mtp.layers.0.mlp.experts"
    matrices = {
        n: torch.stack([tensors[f"{at}.{e}.{n}_proj.weight"] for e in range(8)]) for n in ("gate", "up", "down")
    }
    stacks = {
        f"{at}.gate_up_proj": torch.cat((matrices["gate"], matrices["up"]), 1),
        f"{at}.down_proj": matrices["down"],
    }
    kept = {name: tensor for name, tensor in tensors.items() if at not in name}
    save_file({**kept, **stacks}, file, metadata={"format": "pt"})
    found = make_state(run)
    load_weights(folder, found.buffers, Mesh(found.model.plan.grid, 0))
    for ours, theirs in zip(found.buffers.masters, state.buffers.masters, strict=True):
        assert torch.equal(ours.master, theirs.master)

    alone = make_state(replace(run, model=replace(run.model, num_nextn_predict_layers=0, mtp_loss_weight=0.3)))
    load_weights(folder, alone.buffers, Mesh(alone.model.plan.grid, 0))
    save_file({name: tensors[name] for name in tensors.keys() - own}, file, metadata={"format": "pt"})
    assert read_folder(folder).model.predict_layers == 0
    save_file({**tensors, "mtq.fc.weight": torch.ones(4, 4)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="mtq.fc.weight"):
        load_weights(folder, alone.buffers, Mesh(alone.model.plan.grid, 0))


@pytest.mark.parametrize(
    "family, key", [("qwen3_next", "num_nextn_predict_layers"), *((name, "mtp_num_hidden_layers") for name in QWEN35)]
)
def test_modules_of_token_prediction_in_config_json(family, key):
    """Under the names that vLLM reads. With images there are none."""
    model = replace(MODELS[family], num_nextn_predict_layers=1)
    text = to_hf(model, torch.float32)
    assert text[key] == 1 and from_hf(text) == model
    if family in QWEN35:
        pictured = MODELS[family.removesuffix("_text")]
        folder = to_hf(pictured, torch.float32)
        assert folder["text_config"][key] == 0
        folder["text_config"][key] = 1
        assert from_hf(folder) == pictured and from_hf(folder, wanted=family).predict_layers == 1
        found = check(replace(pictured, num_nextn_predict_layers=1), tp=1, seq_length=16)
        assert [(p.field, p.valid) for p in found] == [("model.num_nextn_predict_layers", (0,))]


@pytest.mark.parametrize("family", QWEN35)
@pytest.mark.parametrize("stacked", [False, True], ids=["matrices", "stacks"])
def test_the_text_of_a_folder_with_a_vision_tower(tmp_path, family, stacked):
    """Truth: the whole model of transformers, given text, from its own folder. Published folders have the experts of a
    layer in two stacks."""
    if stacked and family == "qwen3_5_text":
        pytest.skip("it has no experts")
    tower = dict(depth=1, hidden_size=16, intermediate_size=20, num_heads=2, out_hidden_size=32, patch_size=2)
    with hf_fuzz.wide():
        config = getattr(transformers, f"{QWEN35[family]}Config")(text_config=written(family), vision_config=tower)
        torch.manual_seed(0)
        made_by = getattr(transformers, f"{QWEN35[family]}ForConditionalGeneration")
        theirs = made_by._from_config(config, experts_implementation="eager").double().eval()
        hf_fuzz.randomise(theirs)
        theirs.save_pretrained(tmp_path, save_original_format=not stacked)
        names = {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
        assert any("visual" in name for name in names)
        assert any(name.endswith("experts.gate_up_proj") for name in names) == stacked
        with torch.no_grad():
            expected = theirs(hf_fuzz.tokens_of(131)).logits.flatten(0, 1)
    found = hf_fuzz.our_logits(tmp_path, wanted=family)
    assert (found - expected).abs().max() <= 1e-10 * expected.abs().max()


@pytest.mark.parametrize("parts", [(10, 10, 24), (15, 15, 14)], ids=["published", "by transformers"])
def test_olmos_folders_in_published_forms(tmp_path, parts):
    """Norms under other names, and a convolution in three tensors: of queries, of keys and of values; or, as
    transformers saves it, in three even ones."""
    state = make_state(make_run("olmo_hybrid", "fp32"))
    set_state(state)
    folder = export(save_here(state, tmp_path / "run").path, tmp_path / "out", "fp32")
    truth = hf_fuzz.our_logits(folder)
    (file,) = folder.glob("*.safetensors")
    names = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
    tensors = {}
    for name, tensor in load_file(file).items():
        if name.endswith(".conv1d.weight"):
            split = zip("qkv", tensor.split(parts), strict=True)
            tensors |= {name.replace("conv1d", f"{kind}_conv1d"): part.contiguous() for kind, part in split}
            continue
        linear = any(f".{i}." in name for i, kind in enumerate(MODELS["olmo_hybrid"].types) if kind == LINEAR)
        norm = next((n for n in names if linear and n in name), "")
        tensors[name.replace(norm, names[norm]) if norm else name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
    assert torch.equal(hf_fuzz.our_logits(folder), truth)


@pytest.mark.soak
@pytest.mark.parametrize("recipe", ["qwen3_next_80b_a3b", "kimi_linear_48b_a3b"])
def test_recipes_have_the_size_of_the_published_model(recipe):
    """Truth: what transformers' model of the same config saves: its parameters, and the biases of choice of Kimi's
    experts, which are buffers there."""
    model = load_run(RECIPES / f"{recipe}.yaml").model
    config = transformers.AutoConfig.for_model(**to_hf(model, torch.bfloat16))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(torch.Size(shape).numel() for shape in exported_shapes(model).values())
    assert count == sum(t.numel() for t in theirs.state_dict().values())

"""Hugging Face folders are read exactly as transformers reads them, or refused: tests.harness.hf_fuzz, and the
cases that users meet."""

from __future__ import annotations

import itertools
import json
import random
from copy import deepcopy
from dataclasses import dataclass, replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.convert import export
from phalanx.checkpoint.hf import differences, from_hf, read_folder, to_hf
from phalanx.layout.config import LayoutConfig
from phalanx.models.llama import LlamaConfig
from phalanx.models.rope import RopeScaling
from tests.harness import hf_fuzz, hf_fuzz_images
from tests.harness.checkpoints import make_run, make_state, save_here, set_state
from tests.harness.parity import MODELS, base_run, compare, truth_of
from tests.harness.sample import rest_in_soak


def bad_trials(first: int, count: int, tried=hf_fuzz.trial) -> list[str]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return hf_fuzz.soak(count, first, tried)[2]
    finally:
        torch.set_num_threads(threads)


@pytest.mark.trust(
    7,
    "a config.json with a key deleted, changed or added (36 of 850 trained another model)",
    "the loss of transformers, or refused",
)
def test_a_changed_config_is_read_as_transformers_reads_it_or_refused():
    assert not bad_trials(20261127, 60)


@pytest.mark.parametrize("family", ["gpt_neox", "modernbert"])
def test_a_width_of_heads_that_only_the_rotation_would_have_is_refused(family):
    """transformers rotates `head_dim` features, and its heads are as wide as hidden_size says."""
    written = to_hf(MODELS[family], torch.float32)
    width = MODELS[family].hidden_size // MODELS[family].num_attention_heads
    assert from_hf(written | {"head_dim": width}) == from_hf(written | {"head_dim": None}) == from_hf(written)
    with pytest.raises(CheckpointError, match=rf"head_dim=2 \(supported: {width}, hidden_size / num_attention_heads"):
        from_hf(written | {"head_dim": 2})


@pytest.mark.parametrize("model", sorted(MODELS))
def test_another_name_of_a_key_is_read_as_transformers_reads_it_or_refused(model):
    """Beside the key or without it, in the outer config, the text's and the tower's. Truth: the `attribute_map` of the
    config classes, and which value they end with."""
    written = to_hf(MODELS[model], torch.float64)
    kind = transformers.CONFIG_MAPPING[written["model_type"]]
    whole = json.loads(json.dumps(kind(**written).to_dict(), default=str))
    for part in [p for p in ("", "text_config", "vision_config") if not p or isinstance(whole.get(p), dict)]:
        before = whole[part] if part else whole
        names = type(getattr(kind(**whole), part) if part else kind(**whole)).attribute_map
        for other, key in names.items():
            if type(before.get(key)) is not int:
                continue
            value = 2 * before[key] or 1
            for own in ({**before, other: value}, {k: v for k, v in {**before, other: value}.items() if k != key}):
                config = {**whole, part: own} if part else own
                theirs = kind(**deepcopy(config))
                taken = getattr(getattr(theirs, part) if part else theirs, key)
                meant = {**before, key: taken}
                try:
                    ours = from_hf(config)
                except CheckpointError:
                    continue
                assert ours == from_hf({**whole, part: meant} if part else meant), (part, other, key)


def test_a_changed_config_of_a_family_with_images_is_read_as_transformers_reads_it_or_refused():
    assert not bad_trials(20261127, 12, hf_fuzz_images.trial)


@pytest.mark.soak
@pytest.mark.parametrize("tried", [hf_fuzz.trial, hf_fuzz_images.trial], ids=["text", "images"])
def test_other_changed_configs_each_time(tried):
    """The first seed is in the message of what fails; `make test` tries the same ones everywhere."""
    assert not bad_trials(random.Random().randrange(10**6) * 1000, 200, tried)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(10))
def test_five_thousand_changed_configs(part):
    assert not bad_trials(10**9 + 500 * part, 500)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(4))
def test_a_thousand_changed_configs_with_images(part):
    assert not bad_trials(10**9 + 250 * part, 250, hf_fuzz_images.trial)


def folder_of(tmp_path, family: str, **changes):
    config = hf_fuzz.base_config(family, old=False)
    assert hf_fuzz.write_weights(config, tmp_path, 0)
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    return tmp_path


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}


@pytest.mark.trust(
    7,
    "rope_scaling added to a folder that transformers 5 saved",
    "YaRN, as in transformers; refused where it would lose the base",
)
def test_rope_scaling_beside_rope_parameters(tmp_path):
    found = hf_fuzz.outcome(folder_of(tmp_path, "qwen3", rope_scaling=YARN))
    assert found.kind == "equal"
    scaling = read_folder(tmp_path).model.rope_scaling
    assert (scaling.rope_type, scaling.factor, scaling.original_max_position_embeddings) == ("yarn", 4.0, 8)
    lost = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": YARN}
    with pytest.raises(CheckpointError, match="rope_theta=1000000.0 of rope_parameters beside rope_scaling"):
        read_folder(folder_of(tmp_path, "qwen3", **lost))
    assert (
        hf_fuzz.outcome(folder_of(tmp_path, "qwen3", **{**lost, "rope_scaling": {**YARN, "rope_theta": 1e6}})).kind
        == "equal"
    )


@pytest.mark.parametrize("family", [f for f in hf_fuzz.FAMILIES if f != "ministral"])
def test_missing_keys_are_what_transformers_takes(family):
    """Truth: the config class of transformers, given the sizes alone."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "n_embd", "n_layer", "n_head")
    sizes += ("d_model", "d_ff", "num_layers", "num_heads", "hidden_size_per_layer_input", "layers_block_type")
    full = hf_fuzz.base_config(family, old=False)
    short = {"model_type": family, **{k: full[k] for k in sizes if k in full}}
    if family == "whisper":
        short = {"model_type": family, **hf_fuzz.FAMILIES[family]}  # all sizes are asked for
    elif family not in ("gpt2", "t5"):
        short |= {
            "num_attention_heads": 32 if family == "kimi_linear" else 128,
            "hidden_size": 1024,
        }  # as many as DeepSeek and Kimi Linear have heads of keys where they say none
    if family == "mamba2":
        short["num_heads"] = 32  # of 64 features
    theirs = json.loads(json.dumps(transformers.AutoConfig.for_model(**short).to_dict(), default=str))
    theirs.pop("num_nextn_predict_layers", None)  # 1 whatever the folder holds
    assert from_hf(short) == from_hf(theirs)


@pytest.mark.parametrize("family", hf_fuzz.PICTURED)
def test_missing_keys_of_a_text_or_tower_are_what_transformers_takes(family):
    """Truth: what the config class of transformers states after it read the same config."""
    whole = hf_fuzz_images.base(family)
    kind = transformers.CONFIG_MAPPING[family]
    for part in ("", "text_config", "vision_config"):
        before = whole[part] if part else whole
        for key in before:
            own = {k: v for k, v in before.items() if k != key}
            config = {**whole, part: own} if part else own
            try:
                ours = from_hf(config)
            except CheckpointError:
                continue
            theirs = json.loads(json.dumps(kind(**deepcopy(config)).to_dict(), default=str))
            assert ours == from_hf(theirs), (part, key)


@pytest.mark.parametrize("family, part", [("llava", "text"), *((f, "vision") for f in ("llava", "gemma3"))])
def test_a_kind_of_text_or_tower_that_is_no_name_is_refused(family, part):
    whole = deepcopy(hf_fuzz_images.base(family))
    whole[f"{part}_config"]["model_type"] = {}
    with pytest.raises(CheckpointError, match=rf"{part}_config: model_type={{}} \(supported: "):
        from_hf(whole)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe", "gemma3"])
def test_a_text_of_another_family_is_refused(family):
    """transformers would look for tensors of other names."""
    whole = deepcopy(hf_fuzz_images.base(family))
    whole["text_config"]["model_type"] = "llama"
    with pytest.raises(CheckpointError, match=r"text_config: model_type='llama' \(supported: "):
        from_hf(whole)


@pytest.mark.parametrize("family", hf_fuzz.PICTURED)
def test_which_part_of_a_config_says_that_the_head_is_tied(family):
    """Truth: the config class of transformers, for each part's true, false and nothing."""
    for outer, inner in itertools.product((False, True, None), repeat=2):
        config = deepcopy(hf_fuzz_images.base(family))
        for part, tied in ((config, outer), (config["text_config"], inner)):
            part.pop("tie_word_embeddings", None)
            part |= {} if tied is None else {"tie_word_embeddings": tied}
        theirs = transformers.CONFIG_MAPPING[family](**deepcopy(config)).tie_word_embeddings
        assert from_hf(config).tie_word_embeddings == theirs, (outer, inner)


def test_half_a_window_is_read_as_transformers_reads_it(tmp_path):
    assert hf_fuzz.outcome(folder_of(tmp_path, "modernbert", sliding_window=2)).kind == "equal"
    assert read_folder(tmp_path).model.local_attention == 4


def test_a_config_of_an_unknown_class_is_not_written_as_llamas():
    @dataclass(frozen=True, kw_only=True)
    class GemmaLikeConfig(LlamaConfig):
        family: str = "gemma"

    model = GemmaLikeConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(CheckpointError, match="no config.json is known for GemmaLikeConfig"):
        to_hf(model, torch.float32)


def test_a_checkpoint_from_before_a_field_was_added_is_of_the_same_model():
    now = MODELS["qwen2"]
    old = {k: v for k, v in vars(now).items() if k not in ("attention_bias", "mlp_bias", "layer_types")}
    assert differences(old, vars(now)) == []
    assert (
        differences(
            old, vars(replace(now, layer_types=("full_attention",) * 3 + ("sliding_attention",), max_window_layers=0))
        )
        != []
    )


def test_a_tied_config_with_another_head_is_read_untied(tmp_path):
    folder_of(tmp_path, "llama", tie_word_embeddings=True)
    assert not read_folder(tmp_path).model.tie_word_embeddings and hf_fuzz.outcome(tmp_path).kind == "equal"


@pytest.mark.parametrize("scaled", [True, False, None])
def test_t5s_outputs_are_scaled_as_the_file_says(tmp_path, scaled):
    """Whatever else it says, and whatever head is in it."""
    folder_of(tmp_path, "t5", tie_word_embeddings=True, scale_decoder_outputs=scaled)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["shared.weight"] + 0.1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = read_folder(tmp_path).model
    assert (model.tie_word_embeddings, model.scales_outputs) == (False, bool(scaled))
    assert hf_fuzz.outcome(tmp_path).kind == "equal"


def test_t5s_own_keys_of_its_mlp_go_before_feed_forward_proj(tmp_path):
    folder_of(tmp_path, "t5", feed_forward_proj="relu")  # beside is_gated_act and dense_act_fn
    assert read_folder(tmp_path).model.feed_forward_proj == "gated-gelu"
    assert hf_fuzz.outcome(tmp_path).kind == "equal"
    folder_of(tmp_path, "t5", dense_act_fn="silu")
    with pytest.raises(CheckpointError, match="dense_act_fn='silu'"):
        read_folder(tmp_path)


def test_gemma4s_text_is_read_from_a_folder_with_towers(tmp_path):
    """As published: tensors of towers beside the text's, and keys of layers that read those of others."""
    with hf_fuzz.wide():
        text = transformers.Gemma4TextConfig(**hf_fuzz.FAMILIES["gemma4_text"])
        whole = transformers.Gemma4Config(text_config=text, tie_word_embeddings=True)
        whole._attn_implementation = whole._experts_implementation = "eager"
        model = transformers.Gemma4ForConditionalGeneration(whole).double().eval()
        hf_fuzz.randomise(model)
        right = model(input_ids=hf_fuzz.tokens_of(hf_fuzz.VOCAB), use_cache=False).logits.flatten(0, 1).detach()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    own = "model.language_model.layers.1.self_attn"
    assert f"{own}.k_proj.weight" in tensors and "model.language_model.layers.2.self_attn.k_proj.weight" not in tensors
    for name in ("k_proj", "k_norm"):
        tensors[f"model.language_model.layers.2.self_attn.{name}.weight"] = torch.zeros(3)
    tensors["model.vision_tower.patch_embedder.input_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert (hf_fuzz.our_logits(tmp_path) - right).abs().max() <= 1e-10 * right.abs().max()
    del tensors[f"{own}.k_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_proj"):
        hf_fuzz.our_logits(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": {"model_type": "llama"}}))
    with pytest.raises(CheckpointError, match="model_type='gemma4_text'"):
        read_folder(tmp_path)


def test_multi_token_prediction_is_seen_from_the_files(tmp_path):
    folder_of(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    assert from_hf(json.loads((tmp_path / "config.json").read_text())).num_nextn_predict_layers == 1
    assert read_folder(tmp_path).model.num_nextn_predict_layers == 0 and hf_fuzz.outcome(tmp_path).kind == "equal"


NEW = {
    "llama: biases": replace(MODELS["llama"], attention_bias=True, mlp_bias=True),
    "llama: part of each head rotated": replace(
        MODELS["llama"], rope_scaling=RopeScaling(rope_type="proportional", partial_rotary_factor=0.5)
    ),
    "qwen3: biases, layer types": replace(
        MODELS["qwen3"],
        attention_bias=True,
        sliding_window=5,
        layer_types=("sliding_attention", "full_attention", "sliding_attention"),
    ),
    "qwen2: layer types": replace(
        MODELS["qwen2"],
        max_window_layers=0,
        layer_types=("sliding_attention", "full_attention", "full_attention", "sliding_attention"),
    ),
    "mistral: layer types": replace(
        MODELS["mistral"], layer_types=("full_attention", "sliding_attention", "full_attention", "sliding_attention")
    ),
    "gpt2: untied, exact gelu": replace(
        MODELS["gpt2"],
        dropout=0.0,
        attention_dropout=0.0,
        num_hidden_layers=2,
        tie_word_embeddings=False,
        activation_function="gelu",
    ),
    "olmo2: biases": replace(MODELS["olmo2"], attention_bias=True),
    "olmo3: layer types, scaled": replace(
        MODELS["olmo3"],
        num_hidden_layers=3,
        layer_types=("full_attention", "sliding_attention", "full_attention"),
        rope_scaling=RopeScaling(rope_type="linear", factor=3.0),
    ),
    "gemma3_text: layer types, capped logits": replace(
        MODELS["gemma3_text"],
        num_hidden_layers=3,
        layer_types=("full_attention", "full_attention", "sliding_attention"),
        rope_local_base_freq=50.0,
        final_logit_softcapping=3.0,
    ),
    "gemma4_text: values of their own, default rotary embedding, untied": replace(
        MODELS["gemma4_text"],
        attention_k_eq_v=False,
        num_global_key_value_heads=None,
        rope_scaling=None,
        rope_local_base_freq=50.0,
        tie_word_embeddings=False,
        attention_bias=True,
        layer_types=("full_attention", "sliding_attention", "sliding_attention", "full_attention"),
    ),
    "gemma4_text: inputs of layers, shared keys": MODELS["gemma4_text-shared"],
    "gemma4_text: experts": MODELS["gemma4_text-experts"],
    "phi3: default rotary embedding of a part": replace(
        MODELS["phi3"], rope_scaling=None, partial_rotary_factor=0.5, sliding_window=None
    ),
    "gemma2: no caps, biases, layer types": replace(
        MODELS["gemma2"],
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=True,
        layer_types=("full_attention", "full_attention", "sliding_attention"),
    ),
    "smollm3: windows in other layers": replace(
        MODELS["smollm3"], layer_types=("sliding_attention", "full_attention", "full_attention"), attention_bias=True
    ),
    "llama4_text: layers by number, no chunks": replace(
        MODELS["llama4_text"],
        attention_chunk_size=None,
        moe_layers=(0, 3),
        interleave_moe_layer_step=1,
        no_rope_layers=(0, 1, 1, 0),
        no_rope_layer_interval=4,
        use_qk_norm=False,
    ),
    "minimax_m2: a third of each head rotated, tied": replace(
        MODELS["minimax_m2"], partial_rotary_factor=1 / 3, tie_word_embeddings=True
    ),
    "glm4_moe: biases, yarn, no shared experts": replace(
        MODELS["glm4_moe"],
        attention_bias=True,
        use_qk_norm=False,
        n_shared_experts=0,
        rope_scaling=RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=8),
    ),
    "gpt_neox: one after the other, a whole head rotated": replace(
        MODELS["gpt_neox"], use_parallel_residual=False, partial_rotary_factor=1.0, tie_word_embeddings=True
    ),
    "nemotron_h: experts with latents": replace(
        MODELS["nemotron_h-latent"],
        layers_block_type=("moe", "linear_attention", "full_attention"),
        num_hidden_layers=3,
    ),
    "falcon_h1: gate first, tied, linear scaling": replace(
        MODELS["falcon_h1"],
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        mamba_n_groups=1,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_scaling=RopeScaling(rope_type="linear", factor=3.0),
    ),
    "mixtral: window": replace(MODELS["mixtral"], sliding_window=5),
    "qwen3_moe: window, biases": replace(MODELS["qwen3_moe"], sliding_window=5, attention_bias=True),
    "qwen3_next: attention in the fourth layer, biases, tied, one key head": replace(
        MODELS["qwen3_next"],
        layer_types=None,
        attention_bias=True,
        tie_word_embeddings=True,
        norm_topk_prob=False,
        linear_num_key_heads=1,
    ),
    "qwen3_5_text: attention in the fourth layer, tied": replace(
        MODELS["qwen3_5_text"], layer_types=None, tie_word_embeddings=True, partial_rotary_factor=1.0
    ),
    "qwen3_5_moe_text": MODELS["qwen3_5_moe_text"],
    "kimi_linear: queries from latents, no shared experts, attention in the fourth layer": replace(
        MODELS["kimi_linear"], layer_types=None, q_lora_rank=6, n_shared_experts=0, first_k_dense_replace=2
    ),
    "olmo_hybrid: rotated, attention in the fourth layer": replace(
        MODELS["olmo_hybrid"], layer_types=None, use_rope=True, tie_word_embeddings=True
    ),
    "olmo_hybrid": MODELS["olmo_hybrid"],
    "gpt_oss: no biases of attention": replace(MODELS["gpt_oss"], attention_bias=False),
    "deepseek_v3: no shared experts": replace(MODELS["deepseek_v3"], n_shared_experts=0),
}


@pytest.mark.parametrize("name", NEW)
def test_configs_of_new_features_go_there_and_back(name):
    model = NEW[name]
    written = to_hf(model, torch.float32)
    found = from_hf(written)
    assert [d for d in differences(vars(model) | {"rope_scaling": None}, vars(found) | {"rope_scaling": None})] == []
    assert getattr(found, "rope_scaling", None) == getattr(model, "rope_scaling", None)


LAYOUTS = {
    "tp2": dict(tp=2),
    "pp2": dict(pp=2),
    "cp2": dict(cp=2),
    "dp2 sharding 3": dict(sharding=3),
    "ep2": dict(ep=2),
}
CASES = {(name, layout): {name} for name in NEW for layout in LAYOUTS if layout != "ep2" or NEW[name].routed_experts}
SAMPLE = [(name, ("tp2", "cp2", "pp2", "dp2 sharding 3")[i % 2 if i % 3 else i % 4]) for i, name in enumerate(NEW)][::2]


@pytest.mark.trust(
    10, "biases, windows, layer types, partial rotary, an untied or gelu GPT-2 in a folder", "trained in every layout"
)
@pytest.mark.parametrize("case", rest_in_soak(CASES, SAMPLE), ids=str)
def test_new_features_in_every_layout(ranks, case):
    name, layout = case
    run = base_run("llama", global_batch=4)
    run = replace(run, model=NEW[name], layout=LayoutConfig(**LAYOUTS[layout]))
    compare(ranks.run("tests.harness.parity:run_layout", 2, run, 2), truth_of(ranks, run, 2, False), 2)


@pytest.mark.parametrize("name", NEW)
def test_new_features_are_exported(tmp_path, name):
    """Truth: transformers reads the folder with no tensor missing or left over, and computes the same."""
    state = make_state(replace(make_run("llama", "fp32"), model=NEW[name]))
    set_state(state)
    folder = export(save_here(state, tmp_path / "run").path, tmp_path / "out", "fp64")
    options = dict(dtype=torch.float64, output_loading_info=True)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    empty = {n for n, p in theirs.named_parameters() if not p.numel()}
    assert not any(set(found) - empty for found in info.values()), info
    assert hf_fuzz.outcome(folder).kind == "equal"
    assert differences(vars(read_folder(folder).model), vars(NEW[name])) == []

"""Hugging Face's config.json <-> our model configs. What a config asks for and we cannot compute is refused by name,
never ignored."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from phalanx.base.errors import CheckpointError
from phalanx.base.rules import default_of
from phalanx.checkpoint.hf_files import (
    depths_in,
    folder_of,
    has_weights,
    hf_index,
    read_config,
    read_json,
    same_in,
    two_heads,
)
from phalanx.checkpoint.hf_keys import THETA, values_of
from phalanx.checkpoint.hf_rope import OSS_ROPE, RopeFound, RopeOf, read_rope
from phalanx.checkpoint.readers.fp8 import block_of
from phalanx.checkpoint.tensors import Index
from phalanx.models.check import DEEPSEEK_EXPERTS, check
from phalanx.models.config import (
    ROPE_FIELDS,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    RopeScaling,
    UpperWindowConfig,
)
from phalanx.models.deepseek_config import DeepseekV3Config
from phalanx.models.moe_config import ExpertsConfig, GptOssConfig, MixtralConfig, Qwen3MoEConfig

ModelConfig = LlamaConfig | GPT2Config
LLAMAS: dict[str, tuple[type[LlamaConfig], str]] = {
    "llama": (LlamaConfig, "LlamaForCausalLM"),
    "mistral": (MistralConfig, "MistralForCausalLM"),
    "qwen2": (Qwen2Config, "Qwen2ForCausalLM"),
    "qwen3": (Qwen3Config, "Qwen3ForCausalLM"),
    "mixtral": (MixtralConfig, "MixtralForCausalLM"),
    "qwen3_moe": (Qwen3MoEConfig, "Qwen3MoeForCausalLM"),
    "gpt_oss": (GptOssConfig, "GptOssForCausalLM"),
}
# how the load of experts is kept even, and what losses weigh: a run may go on with another way
BALANCE = (
    "router_aux_loss_coef",
    "router_aux_loss_scope",
    "router_z_loss_coef",
    "expert_capacity_factor",
    "expert_capacity_drop",
    "router_bias_update_rate",
    "router_forced_balance",
    "mtp_loss_weight",
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
GELUS = {
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu": "gelu",
    "gelu_python": "gelu",
}  # names of each form
LAYER_TYPES = ("sliding_attention", "full_attention")

# key -> the only values that our models compute; in families that read the key. A key that is absent means the first
ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0.0, None),
    "router_jitter_noise": (0.0,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
# the same of keys that transformers reads, or code published with a model, whatever the family
ALWAYS_ONLY: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "per_layer_config": (None,),
    "configuration_files": (None,),
}
# of keys that DeepSeek's own code reads and transformers does not
LATENT_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}
LATENT_FIELDS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_interleave",
    "first_k_dense_replace",
    "n_routed_experts",
    "n_shared_experts",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "norm_topk_prob",
)


@dataclass(frozen=True)
class ModelFolder:
    """A Hugging Face folder as transformers reads it: the model, and what else the folder holds."""

    path: Path
    """The folder itself; of one of our checkpoints its `weights`."""
    model: ModelConfig
    config: dict[str, Any]
    """config.json as it stands."""
    index: Index | None
    """The tensors of its files, under the names they have there; None: a folder without weights."""

    @property
    def generation(self) -> dict[str, Any]:
        """generation_config.json; empty where there is none."""
        path = self.path / "generation_config.json"
        return read_json(path) if path.is_file() else {}

    @property
    def token_ids(self) -> dict[str, Any]:
        """Special tokens that the folder names: its generation_config.json has the last word, as in transformers."""
        return {
            k: v
            for found in (self.config, self.generation)
            for k, v in found.items()
            if k in TOKEN_IDS and v is not None
        }


def read_folder(path: str | Path) -> ModelFolder:
    """The model of a Hugging Face folder (or of one of our checkpoints), by its config.json and the tensors of its
    files.

    A head that differs from the embedding is kept although the config ties both, and modules of multi-token
    prediction that no file holds are not made: transformers does the same. Code named in the folder is never run.
    CheckpointError names everything that is not supported.
    """
    folder = folder_of(path)
    config = read_config(folder)
    model = from_hf(config, str(folder / "config.json"))
    if not has_weights(folder):
        return ModelFolder(folder, model, config, None)
    index = hf_index(folder)
    if model.tie_word_embeddings and two_heads(index, same_in(folder)):
        model = replace(model, tie_word_embeddings=False)
    if isinstance(model, DeepseekV3Config) and model.num_nextn_predict_layers and not depths_in(index):
        model = _dense_if_all_are(replace(model, num_nextn_predict_layers=0))
    return ModelFolder(folder, model, config, index)


def model_config_from_hf(folder: str | Path) -> ModelConfig:
    """The model of a Hugging Face folder, as `read_folder` finds it."""
    return read_folder(folder).model


def from_hf(config: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """The model that a config.json describes, as transformers 5 reads it; `where` names it in errors."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise CheckpointError(f"{where}: {unknown_family(family)}")
    if block_of(config) is not None or (family == "gpt_oss" and _is_mxfp4(config)):
        config = {
            **config,
            "quantization_config": None,
        }  # of how weights are stored: they are unpacked as they are read
    values = values_of(config, family, where)
    odd = [*_odd(values, ONLY), *_odd(config, ALWAYS_ONLY)]
    model = FAMILIES[family](config, values, odd) if not odd else None
    if model is None or odd:
        raise CheckpointError(
            f"{where}: not supported: {'; '.join(odd)}. Change the file only if the weights were trained so"
        )
    problems = check(model, tp=1, seq_length=1)
    if problems:
        raise CheckpointError(f"{where}: " + "; ".join(str(p).removeprefix("config error: ") for p in problems))
    return model


def _is_mxfp4(config: dict[str, Any]) -> bool:
    stated = config.get("quantization_config")
    return isinstance(stated, dict) and stated.get("quant_method") == "mxfp4"


def unknown_family(name: Any) -> str:
    """What is said of a model_type that is none of ours: the nearest, and what there is to do."""
    near = difflib.get_close_matches(str(name).lower().replace("-", "_"), FAMILIES, n=3, cutoff=0.5) or sorted(FAMILIES)
    return (
        f"model_type={name!r} is no family of Phalanx (nearest: {', '.join(near)}). Code of a model folder "
        "is never run; "
        'to add a family see "Adding a model family" in docs/ops-and-modules.md'
    )


def _odd(values: dict[str, Any], only: dict[str, tuple[Any, ...]]) -> list[str]:
    return [
        f"{k}={values[k]!r} (supported: {_shown(ok)})" for k, ok in only.items() if k in values and values[k] not in ok
    ]


def _shown(values: tuple[Any, ...]) -> str:
    return ", ".join(repr(v) for v in values if v is not None) or "unset"


def _llama(config: dict[str, Any], v: dict[str, Any], odd: list[str]) -> LlamaConfig | None:
    family = "mistral" if config["model_type"] == "ministral" else config["model_type"]
    cls = LLAMAS[family][0]
    types = layer_types_of(v, odd) if "layer_types" in v else None
    heads = max(1, v["num_attention_heads"])
    head_dim = v["hidden_size"] // heads if v["head_dim"] is None else v["head_dim"]
    kv_heads = heads if v["num_key_value_heads"] is None else v["num_key_value_heads"]
    of = RopeOf(THETA.get(family, 10000.0), head_dim, v["max_position_embeddings"], _names(config.get("layer_types")))
    rope = read_rope(config, of, OSS_ROPE if family == "gpt_oss" else None)
    odd += rope.odd
    own: dict[str, Any] = {k: v[k] for k in ("attention_bias", "mlp_bias", "swiglu_alpha", "swiglu_limit") if k in v}
    own |= {"num_key_value_heads": kv_heads, "head_dim": head_dim, **_window(cls, v, types, odd), **_experts(cls, v)}
    return None if odd else cls(**_decoder(v, rope), **own)


def _names(values: Any) -> list[Any]:
    return values if isinstance(values, list) else []


def _decoder(v: dict[str, Any], rope: RopeFound) -> dict[str, Any]:
    """What all families of Llama's kind have."""
    same = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "initializer_range",
    )
    return {**{k: v[k] for k in same}, "rope_theta": rope.theta, "rope_scaling": rope.scaling}


def _deepseek_v3(config: dict[str, Any], v: dict[str, Any], odd: list[str]) -> DeepseekV3Config | None:
    heads, rotated = v["num_attention_heads"], v["qk_rope_head_dim"]
    kv_heads = heads if v["num_key_value_heads"] is None else v["num_key_value_heads"]
    if kv_heads < 1 or heads // kv_heads != 1:
        odd.append(f"num_key_value_heads={kv_heads!r} (supported: {heads}, as many as query heads)")
    if config.get("head_dim", rotated) != rotated:
        odd.append(f"head_dim={config['head_dim']!r} (supported: {rotated}, as qk_rope_head_dim, or none)")
    rope = read_rope(
        config, RopeOf(10000.0, rotated, v["max_position_embeddings"], _names(config.get("layer_types")), scores=True)
    )
    odd += [*rope.odd, *_odd(config, LATENT_ONLY)]
    own = {k: v[k] for k in LATENT_FIELDS} | {k: bool(v[k]) for k in ("norm_topk_prob", "rope_interleave")}
    own["num_nextn_predict_layers"] = v["num_mtp_layers"]
    if "aux_loss_alpha" in config:
        scope = "sequence" if v["seq_aux"] else "micro_batch"
        own |= {"router_aux_loss_coef": v["aux_loss_alpha"], "router_aux_loss_scope": scope}
    return None if odd else _dense_if_all_are(DeepseekV3Config(**_decoder(v, rope), **own))


def _dense_if_all_are(model: DeepseekV3Config) -> DeepseekV3Config:
    """Without what the config says of experts, if all layers are dense: nothing reads it."""
    if model.routed_experts:
        return model
    return replace(model, **{name: default_of(DeepseekV3Config, name) for name in DEEPSEEK_EXPERTS})


def layer_types_of(v: dict[str, Any], odd: list[str]) -> list[str] | None:
    """The kind of each layer, if the config says it; `attention` is an old name of full attention."""
    if v["layer_types"] is None:
        return None
    types = ["full_attention" if kind == "attention" else kind for kind in v["layer_types"]]
    if len(types) != v["num_hidden_layers"] or any(kind not in LAYER_TYPES for kind in types):
        odd.append(
            f"layer_types={types!r} (supported: one of {_shown(LAYER_TYPES)} for each of "
            f"{v['num_hidden_layers']} layers)"
        )
    return types


def _window(cls: type[LlamaConfig], v: dict[str, Any], types: list[str] | None, odd: list[str]) -> dict[str, Any]:
    """The window, and the layers that have it in the shortest way to say it."""
    if "sliding_window" not in v:
        return {}
    window = v["sliding_window"] if v.get("use_sliding_window", True) else None
    if cls in (MixtralConfig, Qwen3MoEConfig):
        return {"sliding_window": window}
    layers = v["num_hidden_layers"]
    if types is None:
        types = _default_types(cls, layers, window, v.get("max_window_layers", 0))
    slides = [kind == LAYER_TYPES[0] for kind in types]
    if any(slides) and window is None:
        odd.append(
            "layer_types with 'sliding_attention' and no sliding_window in use (supported: a sliding_window, "
            "use_sliding_window=true)"
        )
    if cls is GptOssConfig:
        alternating = types == _default_types(cls, layers, window, 0)
        said = {} if alternating else {"layer_types": tuple(types)}
        return {**said, **({"sliding_window": window} if any(slides) else {})}
    if not any(slides):
        return {"sliding_window": None}
    first = slides.index(True)
    if not all(slides[first:]) or (cls is MistralConfig and first > 0):
        return {"sliding_window": window, "layer_types": tuple(types)}
    return (
        {"sliding_window": window} if cls is MistralConfig else {"sliding_window": window, "max_window_layers": first}
    )


def _default_types(cls: type[LlamaConfig], layers: int, window: int | None, first: int) -> list[str]:
    if cls is GptOssConfig:
        return [LAYER_TYPES[i % 2] for i in range(layers)]
    return [LAYER_TYPES[0] if window is not None and i >= first else LAYER_TYPES[1] for i in range(layers)]


def _experts(cls: type[LlamaConfig], v: dict[str, Any]) -> dict[str, Any]:
    if not issubclass(cls, ExpertsConfig):
        return {}
    found = {"num_experts_per_tok": v["num_experts_per_tok"], "router_aux_loss_coef": v["router_aux_loss_coef"]}
    if cls is GptOssConfig and not v["output_router_logits"]:
        del found["router_aux_loss_coef"]  # without those no loss is made of it; the published configs say 0.9
    if cls in (MixtralConfig, GptOssConfig):
        return {**found, "num_local_experts": v["num_local_experts"]}
    same = ("num_experts", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step")
    dense = tuple(i for i in v["mlp_only_layers"] or () if i in range(v["num_hidden_layers"]))  # others name no layer
    return {**found, **{k: v[k] for k in same}, "mlp_only_layers": dense}


def _gpt2(config: dict[str, Any], v: dict[str, Any], odd: list[str]) -> GPT2Config | None:
    dropout, embedding = v["resid_pdrop"], v["embd_pdrop"]
    if dropout != embedding:
        odd.append(f"embd_pdrop={embedding!r} beside resid_pdrop={dropout!r} (supported: equal ones)")
    if v["activation_function"] not in GELUS:
        odd.append(f"activation_function={v['activation_function']!r} (supported: {_shown(tuple(GELUS))})")
        return None
    return GPT2Config(
        vocab_size=v["vocab_size"],
        hidden_size=v["n_embd"],
        num_hidden_layers=v["n_layer"],
        num_attention_heads=v["n_head"],
        intermediate_size=v["n_inner"],
        max_position_embeddings=v["n_positions"],
        layer_norm_epsilon=v["layer_norm_epsilon"],
        dropout=dropout,
        attention_dropout=v["attn_pdrop"],
        initializer_range=v["initializer_range"],
        tie_word_embeddings=v["tie_word_embeddings"],
        activation_function=GELUS[v["activation_function"]],  # type: ignore[arg-type]
    )


# model_type -> what makes our model of a config.json, the values of its keys, and a list that it adds to what cannot be
# honoured
FAMILIES: dict[str, Callable[[dict[str, Any], dict[str, Any], list[str]], ModelConfig | None]] = {
    **dict.fromkeys((*LLAMAS, "ministral"), _llama),
    "deepseek_v3": _deepseek_v3,
    "gpt2": _gpt2,
}


def to_hf(model: ModelConfig, dtype: torch.dtype, token_ids: dict[str, Any] | None = None) -> dict[str, Any]:
    """config.json for a model whose weights are of `dtype`. Special tokens that are not given are none (not Hugging
    Face's defaults)."""
    write = WRITERS.get(type(model))
    if write is None:
        known = ", ".join(cls.__name__ for cls in WRITERS)
        raise CheckpointError(
            f"no config.json is known for {type(model).__name__} (there is one for {known}): add a writer to "
            f"WRITERS in {__name__}"
        )
    ids = {name: (token_ids or {}).get(name) for name in TOKEN_IDS}
    kind = str(dtype).removeprefix("torch.")
    return {**write(model), **ids, "dtype": kind, "torch_dtype": kind, "use_cache": True}


def generation_config(token_ids: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"_from_model_config": True, **{k: v for k, v in (token_ids or {}).items() if k in TOKEN_IDS}}


def _to_decoder(m: LlamaConfig) -> dict[str, Any]:
    return {
        "model_type": m.family,
        "vocab_size": m.vocab_size,
        "hidden_size": m.hidden_size,
        "intermediate_size": m.intermediate_size,
        "num_hidden_layers": m.num_hidden_layers,
        "num_attention_heads": m.num_attention_heads,
        "num_key_value_heads": m.num_key_value_heads or m.num_attention_heads,
        "max_position_embeddings": m.max_position_embeddings,
        "rms_norm_eps": m.rms_norm_eps,
        **_to_rope(m.rope_theta, m.rope_scaling),
        "tie_word_embeddings": m.tie_word_embeddings,
        "initializer_range": m.initializer_range,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
    }


def _to_llamas(m: LlamaConfig) -> dict[str, Any]:
    """A config.json with the class of the family, and the width of a head in so many words."""
    return {
        "architectures": [LLAMAS[m.family][1]],
        **_to_decoder(m),
        "head_dim": m.head_dim or m.hidden_size // m.num_attention_heads,
    }


def _to_llama(m: LlamaConfig) -> dict[str, Any]:
    return {**_to_llamas(m), "attention_bias": m.attention_bias, "mlp_bias": m.mlp_bias}


def _to_mistral(m: MistralConfig) -> dict[str, Any]:
    """With windows in some layers only it is what transformers calls Ministral."""
    own = {**_to_llamas(m), "sliding_window": m.sliding_window}
    if m.layer_types is None:
        return own
    return {
        **own,
        "model_type": "ministral",
        "architectures": ["MinistralForCausalLM"],
        "layer_types": list(m.layer_types),
    }


def _to_qwen2(m: UpperWindowConfig) -> dict[str, Any]:
    first = m.num_hidden_layers if m.sliding_window is None else m.max_window_layers
    used = {
        "use_sliding_window": m.sliding_window is not None,
        "sliding_window": m.sliding_window,
        "max_window_layers": first,
    }
    return {**_to_llamas(m), **used, "layer_types": _types(m)}


def _to_qwen3(m: Qwen3Config) -> dict[str, Any]:
    return {**_to_qwen2(m), "attention_bias": m.attention_bias}


def _types(m: LlamaConfig) -> list[str]:
    return [LAYER_TYPES[1] if m.window(i) is None else LAYER_TYPES[0] for i in range(m.num_hidden_layers)]


def _to_router(m: ExpertsConfig) -> dict[str, Any]:
    return {
        "num_experts_per_tok": m.num_experts_per_tok,
        "router_aux_loss_coef": m.router_aux_loss_coef,
        "output_router_logits": False,
    }


def _to_mixtral(m: MixtralConfig) -> dict[str, Any]:
    own = {"num_local_experts": m.num_local_experts, "router_jitter_noise": 0.0, "sliding_window": m.sliding_window}
    return {**_to_llamas(m), **_to_router(m), **own}


def _to_qwen3_moe(m: Qwen3MoEConfig) -> dict[str, Any]:
    return {
        **_to_llamas(m),
        **_to_router(m),
        "attention_bias": m.attention_bias,
        "use_sliding_window": m.sliding_window is not None,
        "sliding_window": m.sliding_window,
        "num_experts": m.num_experts,
        "moe_intermediate_size": m.moe_intermediate_size,
        "norm_topk_prob": m.norm_topk_prob,
        "decoder_sparse_step": m.decoder_sparse_step,
        "mlp_only_layers": list(m.mlp_only_layers),
    }


def _to_gpt_oss(m: GptOssConfig) -> dict[str, Any]:
    gate = {"swiglu_alpha": m.swiglu_alpha, "swiglu_limit": m.swiglu_limit}
    own = {
        "num_local_experts": m.num_local_experts,
        "experts_per_token": m.num_experts_per_tok,
        "attention_bias": m.attention_bias,
    }
    return {
        **_to_llamas(m),
        **_to_router(m),
        **own,
        **gate,
        "sliding_window": m.sliding_window,
        "layer_types": _types(m),
    }


def _to_deepseek_v3(m: DeepseekV3Config) -> dict[str, Any]:
    own: dict[str, Any] = {k: getattr(m, k) for k in LATENT_FIELDS}
    own |= {"aux_loss_alpha": m.router_aux_loss_coef, "seq_aux": m.router_aux_loss_scope == "sequence"}
    own |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "attention_bias": False}
    own["num_nextn_predict_layers"] = m.num_nextn_predict_layers
    return {"architectures": ["DeepseekV3ForCausalLM"], **_to_decoder(m), **own}


def _to_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Rotary parameters in both spellings: transformers 5 reads `rope_parameters`, others `rope_theta` and
    `rope_scaling`."""
    used = (
        {} if scaling is None else {k: getattr(scaling, k) for names in ROPE_FIELDS[scaling.rope_type] for k in names}
    )
    written = {k: list(v) if isinstance(v, tuple) else v for k, v in used.items() if v is not None}
    old = None if scaling is None else {"rope_type": scaling.rope_type, **written}
    return {
        "rope_theta": theta,
        "rope_scaling": old,
        "rope_parameters": {"rope_theta": theta, **(old or {"rope_type": "default"})},
    }


def _to_gpt2(m: GPT2Config) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": m.vocab_size,
        "n_embd": m.hidden_size,
        "n_layer": m.num_hidden_layers,
        "n_head": m.num_attention_heads,
        "n_inner": m.intermediate_size,
        "n_positions": m.max_position_embeddings,
        "n_ctx": m.max_position_embeddings,  # the same: llama.cpp's converter asks for the latter
        "layer_norm_epsilon": m.layer_norm_epsilon,
        "resid_pdrop": m.dropout,
        "embd_pdrop": m.dropout,
        "attn_pdrop": m.attention_dropout,
        "initializer_range": m.initializer_range,
        "activation_function": m.activation_function,
        "scale_attn_weights": True,
        "tie_word_embeddings": m.tie_word_embeddings,
    }


WRITERS: dict[type, Callable[[Any], dict[str, Any]]] = {
    LlamaConfig: _to_llama,
    MistralConfig: _to_mistral,
    Qwen2Config: _to_qwen2,
    Qwen3Config: _to_qwen3,
    MixtralConfig: _to_mixtral,
    Qwen3MoEConfig: _to_qwen3_moe,
    GptOssConfig: _to_gpt_oss,
    DeepseekV3Config: _to_deepseek_v3,
    GPT2Config: _to_gpt2,
}


def resolved(model: dict[str, Any]) -> dict[str, Any]:
    """A model config's dict with all defaults filled in, also of fields that came after it was written, so that two
    spellings are equal."""
    cls = next((cls for cls in WRITERS if cls.family == model.get("family")), None)  # type: ignore[attr-defined]
    later = {} if cls is None else {f.name: f.default for f in fields(cls) if f.default is not MISSING}
    m = {**later, **model}
    if m.get("family") in LLAMAS:  # deepseek_v3 has neither
        m["num_key_value_heads"] = m.get("num_key_value_heads") or m.get("num_attention_heads")
        m["head_dim"] = m.get("head_dim") or m["hidden_size"] // m["num_attention_heads"]
    if m.get("family") == "gpt2":
        m["intermediate_size"] = m.get("intermediate_size") or 4 * m["hidden_size"]
    if isinstance(m.get("rope_scaling"), dict):
        m["rope_scaling"] = {k: v for k, v in m["rope_scaling"].items() if v is not None}
    return m


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """`field old -> new` of every field in which two model configs differ, those that a run may change left out."""
    may_change = {"dropout", "attention_dropout", "initializer_range", *BALANCE}
    if new.get("family") != "gpt2":
        may_change.add("max_position_embeddings")  # of rotary positions it is no shape
    a, b = resolved(old), resolved(new)
    return [
        f"model.{k} {a.get(k)} -> {b.get(k)}"
        for k in sorted(a.keys() | b.keys())
        if a.get(k) != b.get(k) and k not in may_change
    ]

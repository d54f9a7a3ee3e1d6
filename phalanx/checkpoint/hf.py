"""Hugging Face's config.json <-> our model configs. What a config asks for and we cannot compute is refused by name, never ignored."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.fp8 import block_of
from phalanx.checkpoint.hf_files import depths_in, folder_of, has_weights, hf_index, read_config, read_json, same_in, two_heads
from phalanx.checkpoint.tensors import Index
from phalanx.models.config import ROPE_FIELDS, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, RopeScaling
from phalanx.models.deepseek_config import DeepseekV3Config
from phalanx.models.moe_config import ExpertsConfig, GptOssConfig, MixtralConfig, Qwen3MoEConfig

ModelConfig = LlamaConfig | GPT2Config
LLAMAS: dict[str, tuple[type[LlamaConfig], str]] = {
    "llama": (LlamaConfig, "LlamaForCausalLM"), "mistral": (MistralConfig, "MistralForCausalLM"), "qwen2": (Qwen2Config, "Qwen2ForCausalLM"),
    "qwen3": (Qwen3Config, "Qwen3ForCausalLM"), "mixtral": (MixtralConfig, "MixtralForCausalLM"),
    "qwen3_moe": (Qwen3MoEConfig, "Qwen3MoeForCausalLM"), "gpt_oss": (GptOssConfig, "GptOssForCausalLM"),
}  # fmt: skip
# how the load of experts is kept even, and what losses weigh: a run may go on with another way
BALANCE = (
    "router_aux_loss_coef", "router_aux_loss_scope", "router_z_loss_coef", "expert_capacity_factor", "expert_capacity_drop",
    "router_bias_update_rate", "router_forced_balance", "mtp_loss_weight",
)  # fmt: skip
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
GELU = ("gelu_new", "gelu_pytorch_tanh")

# key -> the only values that our model computes; a key that is absent means the first
LLAMA_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,), "attention_dropout": (0.0, None),
    "quantization_config": (None,), "partial_rotary_factor": (1.0, None), "router_jitter_noise": (0.0, None),
}  # fmt: skip
OSS_ONLY: dict[str, tuple[Any, ...]] = {**LLAMA_ONLY, "attention_bias": (True,)}
OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}  # where a config has none
LATENT_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"), "attention_bias": (False,), "attention_dropout": (0.0, None), "quantization_config": (None,),
    "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,),
}  # fmt: skip
LATENT_FIELDS = (
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleave", "first_k_dense_replace",
    "n_routed_experts", "n_shared_experts", "moe_intermediate_size", "num_experts_per_tok", "n_group", "topk_group", "routed_scaling_factor",
    "norm_topk_prob",
)  # fmt: skip
LAYER_TYPES = ("sliding_attention", "full_attention")
FULL_ONLY: dict[str, tuple[Any, ...]] = {"sliding_window": (None,), "use_sliding_window": (False,)}  # families without a window
GPT2_ONLY: dict[str, tuple[Any, ...]] = {
    "activation_function": GELU, "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,), "tie_word_embeddings": (True,), "quantization_config": (None,),
}  # fmt: skip


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
        return {k: v for found in (self.config, self.generation) for k, v in found.items() if k in TOKEN_IDS and v is not None}


def read_folder(path: str | Path) -> ModelFolder:
    """The model of a Hugging Face folder (or of one of our checkpoints), by its config.json and the tensors of its files.

    A head that differs from the embedding is kept although the config ties both, and modules of multi-token prediction that no file holds
    are not made: transformers does the same. Code named in the folder is never run. CheckpointError names everything that is not supported.
    """
    folder = folder_of(path)
    config = read_config(folder)
    model = from_hf(config, str(folder / "config.json"))
    if not has_weights(folder):
        return ModelFolder(folder, model, config, None)
    index = hf_index(folder)
    if isinstance(model, LlamaConfig) and model.tie_word_embeddings and two_heads(index, same_in(folder)):
        model = replace(model, tie_word_embeddings=False)
    if isinstance(model, DeepseekV3Config) and model.num_nextn_predict_layers and not depths_in(index):
        model = replace(model, num_nextn_predict_layers=0)
    return ModelFolder(folder, model, config, index)


def model_config_from_hf(folder: str | Path) -> ModelConfig:
    """The model of a Hugging Face folder, as `read_folder` finds it."""
    return read_folder(folder).model


def from_hf(config: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """The model that a config.json describes; `where` names it in errors."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise CheckpointError(f"{where}: {unknown_family(family)}")
    if block_of(config) is not None:
        config = {**config, "quantization_config": None}  # of how weights are stored: they are scaled as they are read
    try:
        return FAMILIES[family](config, where)
    except KeyError as error:
        raise CheckpointError(f"{where}: {error.args[0]} is missing") from error


def unknown_family(name: Any) -> str:
    """What is said of a model_type that is none of ours: the nearest, and what there is to do."""
    near = difflib.get_close_matches(str(name).lower().replace("-", "_"), FAMILIES, n=3, cutoff=0.5) or sorted(FAMILIES)
    return (
        f"model_type={name!r} is no family of Phalanx (nearest: {', '.join(near)}). Code of a model folder is never run; "
        'to add a family see "Adding a model family" in docs/ops-and-modules.md'
    )


def _refuse(config: dict[str, Any], only: dict[str, tuple[Any, ...]], where: str, more: list[str] | None = None) -> None:
    found = [f"{k}={config[k]!r} (supported: {_shown(ok)})" for k, ok in only.items() if k in config and config[k] not in ok] + (more or [])
    if found:
        raise CheckpointError(f"{where}: not supported: {'; '.join(found)}")


def _shown(values: tuple[Any, ...]) -> str:
    return ", ".join(repr(v) for v in values if v is not None) or "unset"


def _llama(c: dict[str, Any], where: str) -> LlamaConfig:
    cls = LLAMAS[c["model_type"]][0]
    theta, scaling, odd = _rope(c)
    _refuse(c, LLAMA_ONLY, where, [*odd, *_odd_layer_types(c)])
    if cls not in (MistralConfig, Qwen2Config):
        _refuse(c, FULL_ONLY if c.get("use_sliding_window") is not False else {}, where)
    head_dim = c.get("head_dim", 128 if cls is Qwen3Config else None)
    own = {**_window(c, cls), **_experts(c, cls)}
    return cls(**_decoder(c, theta, scaling), num_key_value_heads=c.get("num_key_value_heads"), head_dim=head_dim, **own)


def _gpt_oss(c: dict[str, Any], where: str) -> GptOssConfig:
    c = {"num_key_value_heads": 8, "rope_theta": 150000.0, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, **c}
    if not c.get("rope_scaling") and not c.get("rope_parameters"):
        c["rope_scaling"] = OSS_ROPE
    theta, scaling, odd = _rope(c)
    kinds = c.get("layer_types")
    if kinds is not None and (len(kinds) != c["num_hidden_layers"] or set(kinds) - set(LAYER_TYPES)):
        odd.append(f"layer_types={kinds!r} (supported: one of {_shown(LAYER_TYPES)} for each of {c['num_hidden_layers']} layers)")
    if (c.get("quantization_config") or {}).get("quant_method") == "mxfp4":
        c["quantization_config"] = None  # of how weights are stored: they are unpacked as they are read
    if not c.get("output_router_logits", False):
        c.pop("router_aux_loss_coef", None)  # without those no loss is made of it; the published configs say 0.9
    _refuse(c, OSS_ONLY, where, odd)
    own = {k: c[k] for k in ("head_dim", "sliding_window", "swiglu_alpha", "swiglu_limit") if c.get(k) is not None}
    if kinds is not None and list(kinds) != [LAYER_TYPES[i % 2] for i in range(len(kinds))]:
        own["layer_types"] = tuple(kinds)
    return GptOssConfig(**_decoder(c, theta, scaling), num_key_value_heads=c["num_key_value_heads"], **own, **_experts(c, GptOssConfig))


def _decoder(c: dict[str, Any], theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """What all families of Llama's kind have."""
    return {
        "vocab_size": c["vocab_size"], "hidden_size": c["hidden_size"], "intermediate_size": c["intermediate_size"],
        "num_hidden_layers": c["num_hidden_layers"], "num_attention_heads": c["num_attention_heads"],
        "max_position_embeddings": c.get("max_position_embeddings", 2048), "rms_norm_eps": c.get("rms_norm_eps", 1e-6),
        "rope_theta": theta, "rope_scaling": scaling, "tie_word_embeddings": c.get("tie_word_embeddings", False),
        "initializer_range": c.get("initializer_range", 0.02),
    }  # fmt: skip


def _deepseek_v3(c: dict[str, Any], where: str) -> DeepseekV3Config:
    theta, scaling, odd = _rope(c)
    heads = c["num_attention_heads"]
    if c.get("num_key_value_heads", heads) != heads:
        odd.append(f"num_key_value_heads={c['num_key_value_heads']!r} (supported: {heads}, as many as query heads)")
    _refuse(c, LATENT_ONLY, where, odd)
    own = {"first_k_dense_replace": 3, **{k: c[k] for k in LATENT_FIELDS if k in c}}
    if "n_routed_experts" not in c and "num_local_experts" in c:  # transformers' other name of it
        own["n_routed_experts"] = c["num_local_experts"]
    own["num_nextn_predict_layers"] = c.get("num_nextn_predict_layers", c.get("num_mtp_layers", 0))
    if "aux_loss_alpha" in c:
        own |= {"router_aux_loss_coef": c["aux_loss_alpha"], "router_aux_loss_scope": "sequence" if c.get("seq_aux", True) else "micro_batch"}
    return DeepseekV3Config(**_decoder(c, theta, scaling), **own)


def _window(c: dict[str, Any], cls: type[LlamaConfig]) -> dict[str, Any]:
    """Mistral has a window unless it says null; Qwen2 only if it says so, in the layers from max_window_layers on."""
    if cls is MistralConfig:
        return {"sliding_window": c.get("sliding_window", 4096)}
    if cls is Qwen2Config and c.get("use_sliding_window", False):
        return {"sliding_window": c.get("sliding_window", 4096), "max_window_layers": c.get("max_window_layers", 28)}
    return {}


def _experts(c: dict[str, Any], cls: type[LlamaConfig]) -> dict[str, Any]:
    """transformers 5 spells the number of experts `num_local_experts` in every family."""
    if not issubclass(cls, ExpertsConfig):
        return {}
    common = {k: c[k] for k in ("num_experts_per_tok", "router_aux_loss_coef") if c.get(k) is not None}
    if cls in (MixtralConfig, GptOssConfig):
        return {**common, "num_local_experts": c.get("num_local_experts", cls.num_local_experts)}  # type: ignore[attr-defined]
    count = c["num_experts"] if "num_experts" in c else c["num_local_experts"]
    layers = tuple(c.get("mlp_only_layers") or ())
    return {
        **common, "num_experts": count, "moe_intermediate_size": c["moe_intermediate_size"], "norm_topk_prob": c.get("norm_topk_prob", False),
        "decoder_sparse_step": c.get("decoder_sparse_step", 1), "mlp_only_layers": layers,
    }  # fmt: skip


def _odd_layer_types(c: dict[str, Any]) -> list[str]:
    """transformers 5 writes the kind of each layer; it must say what the other keys say."""
    first = c.get("max_window_layers", 28) if c.get("use_sliding_window", False) and c.get("sliding_window", 4096) else c["num_hidden_layers"]
    expected = ["sliding_attention" if i >= first else "full_attention" for i in range(c["num_hidden_layers"])]
    given = c.get("layer_types")
    return [] if given in (None, expected) else [f"layer_types={given!r} (supported: {expected!r})"]


def _rope(c: dict[str, Any]) -> tuple[float, RopeScaling | None, list[str]]:
    """Base, scaling, and what of the rotary embedding we cannot compute. Both spellings are read; `type` is the old name of `rope_type`."""
    rope = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = float(rope.get("rope_theta", c.get("rope_theta", 10000.0)))
    odd = [] if kind in ("default", *ROPE_FIELDS) else [f"rope_type={kind!r} (supported: {_shown(('default', *ROPE_FIELDS))})"]
    if (rope.get("partial_rotary_factor") or 1.0) != 1.0:
        odd.append(f"partial_rotary_factor={rope['partial_rotary_factor']!r} (supported: 1.0)")
    if odd or kind == "default":
        return theta, None, odd
    needed, optional = ROPE_FIELDS[kind]
    longest = c.get("original_max_position_embeddings", c.get("max_position_embeddings", 2048))
    rope = {"original_max_position_embeddings": longest, **rope}
    given = {k: rope[k] for k in needed} | {k: rope[k] for k in optional if rope.get(k) is not None}
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    return theta, RopeScaling(rope_type=kind, **plain), []


def _gpt2(c: dict[str, Any], where: str) -> GPT2Config:
    dropout, embedding = c.get("resid_pdrop", 0.1), c.get("embd_pdrop", 0.1)
    odd = [] if dropout == embedding else [f"embd_pdrop={embedding!r} beside resid_pdrop={dropout!r} (supported: equal ones)"]
    _refuse(c, GPT2_ONLY, where, odd)
    return GPT2Config(
        vocab_size=c["vocab_size"], hidden_size=c["n_embd"], num_hidden_layers=c["n_layer"], num_attention_heads=c["n_head"],
        intermediate_size=c.get("n_inner"), max_position_embeddings=c.get("n_positions", 1024),
        layer_norm_epsilon=c.get("layer_norm_epsilon", 1e-5), dropout=dropout, attention_dropout=c.get("attn_pdrop", 0.1),
        initializer_range=c.get("initializer_range", 0.02),
    )  # fmt: skip


FAMILIES: dict[str, Callable[[dict[str, Any], str], ModelConfig]] = {
    **dict.fromkeys(LLAMAS, _llama), "gpt_oss": _gpt_oss, "deepseek_v3": _deepseek_v3, "gpt2": _gpt2,
}  # fmt: skip


def to_hf(model: ModelConfig, dtype: torch.dtype, token_ids: dict[str, Any] | None = None) -> dict[str, Any]:
    """config.json for a model whose weights are of `dtype`. Special tokens that are not given are none (not Hugging Face's defaults)."""
    ids = {name: (token_ids or {}).get(name) for name in TOKEN_IDS}
    kind = str(dtype).removeprefix("torch.")
    if isinstance(model, DeepseekV3Config):
        specific = _to_deepseek_v3(model)
    else:
        specific = _to_llama(model) if isinstance(model, LlamaConfig) else _to_gpt2(model)
    return {**specific, **ids, "dtype": kind, "torch_dtype": kind, "use_cache": True}


def generation_config(token_ids: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"_from_model_config": True, **{k: v for k, v in (token_ids or {}).items() if k in TOKEN_IDS}}


def _to_decoder(m: LlamaConfig) -> dict[str, Any]:
    return {
        "model_type": m.family, "vocab_size": m.vocab_size, "hidden_size": m.hidden_size, "intermediate_size": m.intermediate_size,
        "num_hidden_layers": m.num_hidden_layers, "num_attention_heads": m.num_attention_heads,
        "num_key_value_heads": m.num_key_value_heads or m.num_attention_heads, "max_position_embeddings": m.max_position_embeddings,
        "rms_norm_eps": m.rms_norm_eps, **_to_rope(m.rope_theta, m.rope_scaling), "tie_word_embeddings": m.tie_word_embeddings,
        "initializer_range": m.initializer_range, "hidden_act": "silu", "attention_dropout": 0.0,
    }  # fmt: skip


def _to_llama(m: LlamaConfig) -> dict[str, Any]:
    head_dim = m.head_dim or m.hidden_size // m.num_attention_heads
    biases = {} if isinstance(m, Qwen2Config) else {"attention_bias": isinstance(m, GptOssConfig)}  # Qwen2 has no such key
    own = {**biases, "mlp_bias": False, **_to_window(m), **_to_experts(m)}
    return {"architectures": [LLAMAS[m.family][1]], **_to_decoder(m), "head_dim": head_dim, **own}


def _to_deepseek_v3(m: DeepseekV3Config) -> dict[str, Any]:
    own: dict[str, Any] = {k: getattr(m, k) for k in LATENT_FIELDS}
    own |= {"aux_loss_alpha": m.router_aux_loss_coef, "seq_aux": m.router_aux_loss_scope == "sequence"}
    own |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "attention_bias": False}
    own["num_nextn_predict_layers"] = m.num_nextn_predict_layers
    return {"architectures": ["DeepseekV3ForCausalLM"], **_to_decoder(m), **own}


def _to_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Rotary parameters in both spellings: transformers 5 reads `rope_parameters`, others `rope_theta` and `rope_scaling`."""
    used = {} if scaling is None else {k: getattr(scaling, k) for names in ROPE_FIELDS[scaling.rope_type] for k in names}
    written = {k: list(v) if isinstance(v, tuple) else v for k, v in used.items() if v is not None}
    old = None if scaling is None else {"rope_type": scaling.rope_type, **written}
    return {"rope_theta": theta, "rope_scaling": old, "rope_parameters": {"rope_theta": theta, **(old or {"rope_type": "default"})}}


def _to_window(m: LlamaConfig) -> dict[str, Any]:
    if isinstance(m, MistralConfig):
        return {"sliding_window": m.sliding_window}
    if isinstance(m, GptOssConfig):
        kinds = ["full_attention" if m.window(i) is None else "sliding_attention" for i in range(m.num_hidden_layers)]
        return {"sliding_window": m.sliding_window, "layer_types": kinds}
    if isinstance(m, Qwen2Config):
        return {"use_sliding_window": m.sliding_window is not None, "sliding_window": m.sliding_window, "max_window_layers": m.max_window_layers}
    return {}


def _to_experts(m: LlamaConfig) -> dict[str, Any]:
    if not isinstance(m, ExpertsConfig):
        return {}
    common = {"num_experts_per_tok": m.num_experts_per_tok, "router_aux_loss_coef": m.router_aux_loss_coef, "output_router_logits": False}
    if isinstance(m, GptOssConfig):
        gate = {"swiglu_alpha": m.swiglu_alpha, "swiglu_limit": m.swiglu_limit}
        return {**common, "num_local_experts": m.num_local_experts, **gate, "experts_per_token": m.num_experts_per_tok}
    if not isinstance(m, Qwen3MoEConfig):
        return {**common, "num_local_experts": m.routed_experts, "router_jitter_noise": 0.0}
    return {
        **common, "num_experts": m.num_experts, "moe_intermediate_size": m.moe_intermediate_size, "norm_topk_prob": m.norm_topk_prob,
        "decoder_sparse_step": m.decoder_sparse_step, "mlp_only_layers": list(m.mlp_only_layers),
    }  # fmt: skip


def _to_gpt2(m: GPT2Config) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": m.vocab_size, "n_embd": m.hidden_size,
        "n_layer": m.num_hidden_layers, "n_head": m.num_attention_heads, "n_inner": m.intermediate_size,
        "n_positions": m.max_position_embeddings, "n_ctx": m.max_position_embeddings,  # the same: llama.cpp's converter asks for the latter
        "layer_norm_epsilon": m.layer_norm_epsilon, "resid_pdrop": m.dropout,
        "embd_pdrop": m.dropout, "attn_pdrop": m.attention_dropout, "initializer_range": m.initializer_range,
        "activation_function": "gelu_new", "scale_attn_weights": True, "tie_word_embeddings": True,
    }  # fmt: skip


def resolved(model: dict[str, Any]) -> dict[str, Any]:
    """A model config's dict with the defaults that depend on other fields filled in, so that two spellings of one model are equal."""
    m = dict(model)
    if m.get("family") in LLAMAS:  # deepseek_v3 has neither
        m["num_key_value_heads"] = m.get("num_key_value_heads") or m.get("num_attention_heads")
        m["head_dim"] = m.get("head_dim") or m["hidden_size"] // m["num_attention_heads"]
    if m.get("family") == "gpt2":
        m["intermediate_size"] = m.get("intermediate_size") or 4 * m["hidden_size"]
    return m


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """`field old -> new` of every field in which two model configs differ, those that a run may change left out."""
    may_change = {"dropout", "attention_dropout", "initializer_range", *BALANCE}
    if new.get("family") != "gpt2":
        may_change.add("max_position_embeddings")  # of rotary positions it is no shape
    a, b = resolved(old), resolved(new)
    return [f"model.{k} {a.get(k)} -> {b.get(k)}" for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k) and k not in may_change]

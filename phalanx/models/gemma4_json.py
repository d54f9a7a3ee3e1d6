"""The config.json of Gemma 4's text models, in both directions. Its fields: gemma4_text.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.base.errors import CheckpointError
from phalanx.models.config_json import (
    LIST_OR_NULL,
    NONE,
    ConfigJson,
    HfKey,
    integer,
    integer_or_null,
    number_or_null,
    switch,
    text,
)
from phalanx.models.decoder_config import DECODER_KEYS, SIZES, LayerType, heads_to_hf, layer_types_of
from phalanx.models.mixed_layers import pattern
from phalanx.models.rope import RopeFound, RopeOf, read_rope

TEXT_TYPE, WITH_TOWERS = "gemma4_text", "gemma4"  # model_type
PERIOD = 6  # of six layers in a row the last has no window
ROPES: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
BY_LAYER = "per_layer"  # what text_keys makes of per_layer_config
KEYS = {
    **{name: key for name, key in DECODER_KEYS.items() if name != "hidden_act"},
    "num_key_value_heads": integer(4),
    "head_dim": integer(256),
    "global_head_dim": integer(512),
    "num_global_key_value_heads": integer_or_null(),
    "attention_k_eq_v": switch(False),
    "max_position_embeddings": integer(131072),
    "hidden_activation": text("gelu_pytorch_tanh"),
    "tie_word_embeddings": switch(True),
    "attention_bias": switch(False),
    "attention_dropout": number_or_null(0.0),
    "sliding_window": integer(512),
    "layer_types": LIST_OR_NULL,
    "final_logit_softcapping": number_or_null(None),
    "use_bidirectional_attention": HfKey((str, NONE), None),
    "hidden_size_per_layer_input": integer(256),
    "vocab_size_per_layer_input": integer(262144),
    "num_kv_shared_layers": integer(0),
    "use_double_wide_mlp": switch(False),
    "enable_moe_block": switch(False),
    "num_experts": integer_or_null(),
    "top_k_experts": integer_or_null(),
    "moe_intermediate_size": integer_or_null(),
    "router_aux_loss_coef": HfKey((float, int, NONE), None),
}
ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_dropout": (0.0, None),
    "use_bidirectional_attention": (None, "vision"),  # of text alone the second is causal too
}


def usual_types(layers: int) -> tuple[LayerType, ...]:
    return (*pattern(layers, PERIOD)[:-1], "full_attention")


def text_keys(config: dict[str, Any]) -> dict[str, Any]:
    """The text model's part of a folder of Gemma 4, which may have towers too. What single layers have otherwise is
    read here, and refused elsewhere."""
    if config.get("model_type") == WITH_TOWERS:
        text = config.get("text_config")
        kind = text.get("model_type", TEXT_TYPE) if isinstance(text, dict) else None
        if not isinstance(text, dict) or kind != TEXT_TYPE:
            raise CheckpointError(f"text_config={text!r} (supported: an object with model_type={TEXT_TYPE!r})")
        beside = ("tie_word_embeddings", "quantization_config")
        config = {**text, **{key: config[key] for key in beside if key in config}}
    if "per_layer_config" not in config:
        return config
    return {**config, "per_layer_config": None, BY_LAYER: config["per_layer_config"] or {}}


def config_fields(found: ConfigJson) -> dict[str, Any] | None:
    """The fields of the config; None: something in the file is not supported, and recorded."""
    v, types = found.values, types_of(found)
    own = whole_layers(found, types) if not found.odd else {}
    own |= expert_fields(found) | shared_fields(found)
    if found.odd:
        return None
    ropes = {kind: rope_of_kind(found, kind, own["global_head_dim"]) for kind in ROPES}
    for kind, rope in ropes.items():
        found.odd += [f"{odd} (of {kind})" for odd in rope.odd]
    full, sliding = ropes["full_attention"], ropes["sliding_attention"]
    if sliding.scaling is not None:
        found.odd.append(f"rope_type={sliding.scaling.rope_type!r} of sliding_attention (supported: 'default')")
    if found.odd:
        return None
    same = found.pick(*SIZES, "num_key_value_heads", "head_dim", "attention_bias", "final_logit_softcapping")
    said: dict[str, Any] = {} if types == usual_types(len(types)) else {"layer_types": types}
    window: dict[str, Any] = {"sliding_window": v["sliding_window"]} if "sliding_attention" in types else {}
    bases: dict[str, Any] = {
        "rope_theta": full.theta,
        "rope_scaling": full.scaling,
        "rope_local_base_freq": sliding.theta,
    }
    return {**same, **said, **window, **bases, **own}


def shared_fields(found: ConfigJson) -> dict[str, Any]:
    """Of inputs that layers have of their own, and of keys that they share."""
    v = found.values
    shared, width, rows = v["num_kv_shared_layers"], v["hidden_size_per_layer_input"], v["vocab_size_per_layer_input"]
    return {
        "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": rows if width and rows != v["vocab_size"] else None,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": v["use_double_wide_mlp"] and shared > 0,
    }


def expert_fields(found: ConfigJson) -> dict[str, Any]:
    v, names = found.values, ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not v["enable_moe_block"]:
        return {}
    missing = [name for name in names if v[name] is None]
    found.odd += [f"{name}=null with enable_moe_block=true (supported: a number)" for name in missing]
    balance = v["router_aux_loss_coef"]
    return {
        "num_experts": v["num_experts"],
        "num_experts_per_tok": v["top_k_experts"],
        "moe_intermediate_size": v["moe_intermediate_size"],
        **({} if balance is None else {"router_aux_loss_coef": balance}),
    }


def types_of(found: ConfigJson) -> tuple[LayerType, ...]:
    """The kinds of layers, of which transformers makes the last one whole."""
    layers = found.values["num_hidden_layers"]
    types: Any = layer_types_of(found)
    if types is None:
        return usual_types(layers)
    return (*types[:-1], "full_attention")


def whole_layers(found: ConfigJson, types: Sequence[str]) -> dict[str, Any]:
    """Heads of layers without a window, which all have the same."""
    v = found.values
    same = v["attention_k_eq_v"]
    if BY_LAYER not in found.stated:
        heads = v["num_global_key_value_heads"] if same else None
        return {"global_head_dim": v["global_head_dim"], "num_global_key_value_heads": heads, "attention_k_eq_v": same}
    given = found.stated[BY_LAYER]
    keys = ("head_dim", "num_key_value_heads")
    every = given if isinstance(given, dict) else {"": given}
    whole = [every.get(str(i), {}) for i, kind in enumerate(types) if kind == "full_attention"]
    others = set(every) - {str(i) for i, kind in enumerate(types) if kind == "full_attention"}
    good = isinstance(whole[0], dict) and all(one == whole[0] for one in whole) and set(whole[0]) <= set(keys)
    if others or not good or not all(type(value) is int for value in whole[0].values()):
        wanted = "head_dim and num_key_value_heads, the same in all layers of full_attention and in no others"
        found.odd.append(f"per_layer_config={given!r} (supported: {wanted})")
        return {}
    return {
        "global_head_dim": whole[0].get("head_dim", v["head_dim"]),
        "num_global_key_value_heads": whole[0].get("num_key_value_heads"),
        "attention_k_eq_v": same,
    }


def rope_of_kind(found: ConfigJson, kind: str, width: int) -> RopeFound:
    """The rotary embedding of a kind of layers. width: of a head in those without a window."""
    v, stated = found.values, found.stated
    theta = ROPES[kind]["rope_theta"]
    given = stated.get("rope_parameters")
    given = ROPES if given is None else given
    flat = [key for key in ("rope_scaling", "rope_theta", "partial_rotary_factor") if stated.get(key) is not None]
    if flat:
        return RopeFound(theta, None, [f"{key}={stated[key]!r} beside rope_parameters" for key in flat])
    one = given.get(kind) if set(given) == set(ROPES) else None
    if not isinstance(one, dict) or not {"rope_type", "rope_theta"} <= set(one):
        wanted = "full_attention and sliding_attention, each with rope_type and rope_theta"
        return RopeFound(theta, None, [f"rope_parameters={given!r} (supported: {wanted})"])
    features = width if kind == "full_attention" else v["head_dim"]
    return read_rope({"rope_parameters": one}, RopeOf(theta, features, v["max_position_embeddings"]))


def config_keys(config: Any) -> dict[str, Any]:
    """What config.json says of a config."""
    c, written = config, heads_to_hf(config)
    for key in ("hidden_act", "rope_scaling", "rope_theta"):  # transformers would put them in rope_parameters' place
        written.pop(key, None)
    local = {"rope_type": "default", "rope_theta": c.rope_local_base_freq}
    own: dict[str, Any] = {"head_dim": c.whole_width}
    if c.num_global_key_value_heads is not None:
        own["num_key_value_heads"] = c.num_global_key_value_heads
    return {
        **written,
        "rope_parameters": {"full_attention": written["rope_parameters"], "sliding_attention": local},
        "layer_types": list(c.types),
        "sliding_window": c.sliding_window,
        "per_layer_config": {str(i): own for i, kind in enumerate(c.types) if kind == "full_attention"},
        "attention_k_eq_v": c.attention_k_eq_v,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": c.attention_bias,
        "final_logit_softcapping": c.final_logit_softcapping,
        "hidden_size_per_layer_input": c.hidden_size_per_layer_input,
        "vocab_size_per_layer_input": c.vocab_size_per_layer_input or c.vocab_size,
        "num_kv_shared_layers": c.num_kv_shared_layers,
        "use_double_wide_mlp": c.use_double_wide_mlp,
        "enable_moe_block": c.num_experts > 0,
        **(expert_keys(c) if c.num_experts else {}),
    }


def expert_keys(config: Any) -> dict[str, Any]:
    return {
        "num_experts": config.num_experts,
        "top_k_experts": config.num_experts_per_tok,
        "moe_intermediate_size": config.moe_intermediate_size,
        "router_aux_loss_coef": config.router_aux_loss_coef,
    }

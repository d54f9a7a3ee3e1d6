"""The keys of config.json, family by family: the JSON types that transformers 5 takes for each, and what it takes
where one is missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.base.errors import CheckpointError


@dataclass(frozen=True)
class HfKey:
    """types: what a value may be. default: what is taken where the key is missing; NEEDED: then the config is
    refused."""

    types: tuple[type, ...]
    default: Any

    def takes(self, value: Any) -> bool:
        """Whether a JSON value is of these types; true and false are no numbers."""
        return isinstance(value, self.types) and (bool in self.types or not isinstance(value, bool))

    @property
    def wanted(self) -> str:
        return " or ".join(dict.fromkeys(NAMES[kind] for kind in self.types))


NONE = type(None)
NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
    NONE: "null",
}
NEEDED = object()  # transformers would take the sizes of some published model; a folder says its own


def integer(default: Any) -> HfKey:
    return HfKey((int,), default)


def integer_or_null(default: Any = None) -> HfKey:
    return HfKey((int, NONE), default)


def number(default: Any) -> HfKey:
    return HfKey((float, int), default)


def number_or_null(default: Any) -> HfKey:
    return HfKey((float, int, NONE), default)


def switch(default: bool) -> HfKey:
    return HfKey((bool,), default)


def text(default: str) -> HfKey:
    return HfKey((str,), default)


LIST_OR_NULL = HfKey((list, NONE), None)
DECODER = {
    "vocab_size": integer(NEEDED),
    "hidden_size": integer(NEEDED),
    "intermediate_size": integer(NEEDED),
    "num_hidden_layers": integer(NEEDED),
    "num_attention_heads": integer(NEEDED),
    "hidden_act": text("silu"),
    "initializer_range": number(0.02),
    "tie_word_embeddings": switch(False),
    "attention_dropout": number(0.0),
    "rms_norm_eps": number(1e-6),
    "rope_parameters": HfKey((dict, NONE), None),
}
UPPER_WINDOW = {
    "use_sliding_window": switch(False),
    "sliding_window": integer_or_null(4096),
    "max_window_layers": integer(28),
    "layer_types": LIST_OR_NULL,
}
ROUTER = {"output_router_logits": switch(False), "router_aux_loss_coef": number(0.001)}
MISTRAL = {
    **DECODER,
    "num_key_value_heads": integer(8),
    "head_dim": integer_or_null(),
    "max_position_embeddings": integer(131072),
    "sliding_window": integer_or_null(4096),
    "layer_types": LIST_OR_NULL,
}
KEYS: dict[str, dict[str, HfKey]] = {
    "llama": {
        **DECODER,
        "num_key_value_heads": integer_or_null(),
        "head_dim": integer_or_null(),
        "max_position_embeddings": integer(2048),
        "attention_bias": switch(False),
        "mlp_bias": switch(False),
        "attention_dropout": number_or_null(0.0),
    },
    "mistral": MISTRAL,
    "ministral": MISTRAL,
    "qwen2": {
        **DECODER,
        **UPPER_WINDOW,
        "num_key_value_heads": integer_or_null(32),
        "head_dim": integer_or_null(),
        "max_position_embeddings": integer(32768),
    },
    "qwen3": {
        **DECODER,
        **UPPER_WINDOW,
        "num_key_value_heads": integer_or_null(32),
        "head_dim": integer(128),
        "max_position_embeddings": integer(32768),
        "attention_bias": switch(False),
    },
    "mixtral": {
        **DECODER,
        **ROUTER,
        "num_key_value_heads": integer(8),
        "head_dim": integer_or_null(),
        "max_position_embeddings": integer(131072),
        "rms_norm_eps": number(1e-5),
        "sliding_window": integer_or_null(),
        "num_experts_per_tok": integer(2),
        "num_local_experts": integer(8),
        "router_jitter_noise": number(0.0),
    },
    "qwen3_moe": {
        **DECODER,
        **ROUTER,
        "num_key_value_heads": integer(4),
        "head_dim": integer_or_null(),
        "max_position_embeddings": integer(32768),
        "attention_bias": switch(False),
        "use_sliding_window": switch(False),
        "sliding_window": integer_or_null(4096),
        "decoder_sparse_step": integer(1),
        "moe_intermediate_size": integer(768),
        "num_experts_per_tok": integer(8),
        "num_experts": integer(128),
        "norm_topk_prob": switch(False),
        "mlp_only_layers": LIST_OR_NULL,
    },
    "gpt_oss": {
        **{name: key for name, key in DECODER.items() if name != "hidden_act"},
        **ROUTER,
        "num_key_value_heads": integer(8),
        "head_dim": integer(64),
        "max_position_embeddings": integer(131072),
        "rms_norm_eps": number(1e-5),
        "sliding_window": integer_or_null(128),
        "layer_types": LIST_OR_NULL,
        "attention_bias": switch(True),
        "num_experts_per_tok": integer(4),
        "num_local_experts": integer(128),
        "swiglu_alpha": number(1.702),
        "swiglu_limit": number(7.0),
    },
    "deepseek_v3": {
        **DECODER,
        "num_key_value_heads": integer_or_null(128),
        "max_position_embeddings": integer(4096),
        "attention_bias": switch(False),
        "attention_dropout": number_or_null(0.0),
        "moe_intermediate_size": integer(2048),
        "n_shared_experts": integer(1),
        "n_routed_experts": integer(256),
        "routed_scaling_factor": number(2.5),
        "kv_lora_rank": integer(512),
        "q_lora_rank": integer_or_null(1536),
        "qk_rope_head_dim": integer(64),
        "v_head_dim": integer(128),
        "qk_nope_head_dim": integer(128),
        "n_group": integer(8),
        "topk_group": integer(4),
        "num_experts_per_tok": integer(8),
        "first_k_dense_replace": integer(3),
        "norm_topk_prob": HfKey((bool, NONE), True),
        "rope_interleave": HfKey((bool, NONE), True),
        "num_mtp_layers": integer(0),
        "aux_loss_alpha": number(0.0),
        "seq_aux": switch(True),
    },
    "gpt2": {
        "vocab_size": integer(NEEDED),
        "n_embd": integer(NEEDED),
        "n_layer": integer(NEEDED),
        "n_head": integer(NEEDED),
        "n_positions": integer(1024),
        "n_inner": integer_or_null(),
        "activation_function": text("gelu_new"),
        "resid_pdrop": number(0.1),
        "embd_pdrop": number(0.1),
        "attn_pdrop": number(0.1),
        "layer_norm_epsilon": number(1e-5),
        "initializer_range": number(0.02),
        "scale_attn_weights": switch(True),
        "scale_attn_by_inverse_layer_idx": switch(False),
        "add_cross_attention": switch(False),
        "tie_word_embeddings": switch(True),
    },
}
THETA = {"mixtral": 1000000.0, "gpt_oss": 150000.0}  # of families whose base is not 10000 where a config says none
# key -> its other name, which has the last word where both are there
OTHER_NAMES: dict[str, dict[str, str]] = {
    "mixtral": {"num_local_experts": "num_experts"},
    "gpt_oss": {"num_local_experts": "num_experts"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
    "deepseek_v3": {"n_routed_experts": "num_local_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    "gpt2": {
        "n_embd": "hidden_size",
        "n_positions": "max_position_embeddings",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
    },
}


def values_of(config: dict[str, Any], family: str, where: str) -> dict[str, Any]:
    """Every key that the family reads, with its value or what transformers takes where it is missing;
    CheckpointError names all that are wrong."""
    names = OTHER_NAMES.get(family, {})
    found: dict[str, Any] = {}
    odd = []
    for name, key in KEYS[family].items():
        said = next((n for n in (names.get(name, name), name) if n in config), None)
        value = key.default if said is None else config[said]
        if value is NEEDED:
            odd.append(f"{name} is missing")
        elif said is not None and not key.takes(value):
            odd.append(f"{said}={value!r} (it must be {key.wanted})")
        found[name] = value
    if odd:
        raise CheckpointError(f"{where}: {'; '.join(odd)}")
    return found

"""Rules of the `model` section: shapes against each other, against tensor parallelism and against the sequence
length."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, divisors, multiples, no_effect, problem, within
from phalanx.models.config import ROPE_FIELDS, GPT2Config, LlamaConfig, RopeScaling, UpperWindowConfig
from phalanx.models.deepseek_config import DeepseekV3Config
from phalanx.models.moe_config import ExpertsConfig, GptOssConfig, Qwen3MoEConfig


def check(config: LlamaConfig | GPT2Config, *, tp: int, seq_length: int) -> list[Problem]:
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    )
    found = at_least("model", config, 1, *sizes) + within("model", config, "initializer_range", "[0, inf)")
    family = check_llama(config) if isinstance(config, LlamaConfig) else check_gpt2(config, seq_length)
    found += family
    if not found and tp >= 1:
        found += check_tensor_parallel(config, tp)
    return found


def check_llama(config: LlamaConfig) -> list[Problem]:
    found = at_least("model", config, 1, "num_key_value_heads", "head_dim")
    found += within("model", config, "rms_norm_eps", "(0, inf)") + within("model", config, "rope_theta", "(0, inf)")
    if config.rope_scaling is not None:
        heads_known = min(config.hidden_size, config.num_attention_heads) >= 1
        found += check_rope_scaling(config.rope_scaling, rotated_features(config) if heads_known else 0)
    found += check_rope_base(config) + check_window(config) + check_biases(config)
    if isinstance(config, ExpertsConfig):
        found += check_experts(config)
    if isinstance(config, DeepseekV3Config):
        return found + check_latent(config)
    if found or min(config.hidden_size, config.num_attention_heads) < 1:
        return found
    return check_heads(config) + check_head_dim(config)


def check_heads(config: LlamaConfig) -> list[Problem]:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    if heads % kv_heads == 0:
        return []
    because = {"model.num_attention_heads": heads}
    return [
        problem(
            "model",
            config,
            "num_key_value_heads",
            "must divide num_attention_heads",
            because,
            divisors(kv_heads, heads),
        )
    ]


def check_head_dim(config: LlamaConfig | GPT2Config) -> list[Problem]:
    """Rotary embeddings turn pairs of features, so a head has an even number of them."""
    heads, given, rotary = (
        config.num_attention_heads,
        getattr(config, "head_dim", None),
        isinstance(config, LlamaConfig),
    )
    because = {"model.num_attention_heads": heads}
    valid = multiples(config.hidden_size, 2 * heads if rotary else heads)
    if given is not None:
        rule = "must be even (rotary embedding turns pairs)"
        return [problem("model", config, "head_dim", rule, {}, multiples(given, 2))] if given % 2 else []
    if config.hidden_size % heads:
        unless = " unless head_dim is set" if rotary else ""
        return [
            problem(
                "model", config, "hidden_size", f"must be a multiple of num_attention_heads{unless}", because, valid
            )
        ]
    if rotary and config.hidden_size // heads % 2:
        because["head_dim"] = config.hidden_size // heads
        return [
            problem(
                "model",
                config,
                "hidden_size",
                "must give an even head_dim (rotary embedding turns pairs)",
                because,
                valid,
            )
        ]
    return []


def rotated_features(config: LlamaConfig) -> int:
    if isinstance(config, DeepseekV3Config):
        return config.qk_rope_head_dim
    return config.head_dim or config.hidden_size // config.num_attention_heads


def check_latent(config: DeepseekV3Config) -> list[Problem]:
    found = at_least("model", config, 1, "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
    dim = config.qk_rope_head_dim
    if dim < 2 or dim % 2:
        rule = "must be even and >= 2 (rotary embedding turns pairs)"
        found.append(problem("model", config, "qk_rope_head_dim", rule, {}, multiples(dim, 2) if dim > 2 else (2,)))
    found += at_least("model", config, 0, "num_nextn_predict_layers") + within(
        "model", config, "mtp_loss_weight", "[0, inf)", (0.3,)
    )
    if config.num_nextn_predict_layers == 0:
        found += no_effect(
            "model",
            config,
            ["mtp_loss_weight"],
            "model.num_nextn_predict_layers",
            {"model.num_nextn_predict_layers": 0},
        )
    return found + no_effect(
        "model",
        config,
        ["num_key_value_heads", "head_dim"],
        "heads of their own (deepseek_v3 makes them from latents)",
        {},
    )


ROPE_EXAMPLES: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "partial_rotary_factor": 0.5,
}


def check_rope_scaling(config: RopeScaling, dim: int) -> list[Problem]:
    """`dim`: rotated features per head; 0 where that is itself wrong."""
    at, because = "model.rope_scaling", {"model.rope_scaling.rope_type": config.rope_type}
    needed, optional = ROPE_FIELDS[config.rope_type]
    found = []
    for name in needed:
        if getattr(config, name) is None:
            example = ROPE_EXAMPLES.get(name, (1.0,) * (dim // 2))
            found.append(
                problem(
                    at,
                    config,
                    name,
                    f"is needed by rope_type {config.rope_type}",
                    because,
                    (example,) if example else (),
                )
            )
    others = [f.name for f in fields(config) if f.name not in ("rope_type", *needed, *optional)]
    of_type = {name: [kind for kind, names in ROPE_FIELDS.items() if name in names[0] + names[1]] for name in others}
    for name in others:
        found += no_effect(at, config, [name], f"rope_type {' or '.join(of_type[name])}", because)
    return found + check_rope_values(config, dim)


def check_rope_values(config: RopeScaling, dim: int) -> list[Problem]:
    at = "model.rope_scaling"
    found = at_least(at, config, 1, "original_max_position_embeddings")
    for name in ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow"):
        found += within(at, config, name, "(0, inf)", (ROPE_EXAMPLES.get(name, 1.0),))
    for name in ("short_factor", "long_factor"):
        given = getattr(config, name)
        if given is not None and dim and len(given) != dim // 2:
            found.append(
                problem(
                    at,
                    config,
                    name,
                    "must have a number per pair of rotated features",
                    {"pairs": dim // 2},
                    ((1.0,) * (dim // 2),),
                )
            )
        elif given is not None and not all(0 < x < math.inf for x in given):
            found.append(problem(at, config, name, "must be numbers in (0, inf)", {}, ((1.0,) * len(given),)))
    found += within(at, config, "partial_rotary_factor", "[0, 1]", (0.5,))
    if config.rope_type == "longrope" and config.original_max_position_embeddings == 1:
        found.append(
            problem(at, config, "original_max_position_embeddings", "must be > 1 (its logarithm divides)", {}, (4096,))
        )
    low, high = config.low_freq_factor, config.high_freq_factor
    if not found and low is not None and high is not None and high <= low:
        found.append(
            problem(
                at, config, "high_freq_factor", "must be > low_freq_factor", {f"{at}.low_freq_factor": low}, (4 * low,)
            )
        )
    if not found and config.beta_fast < config.beta_slow:
        because = {f"{at}.beta_slow": config.beta_slow}
        found.append(problem(at, config, "beta_fast", "must be >= beta_slow", because, (32 * config.beta_slow,)))
    return found


def check_rope_base(config: LlamaConfig) -> list[Problem]:
    """YaRN divides by the logarithm of the base; dynamic scaling by the rotated features less two."""
    scaling = config.rope_scaling
    if scaling is None or min(config.hidden_size, config.num_attention_heads) < 1:
        return []
    because = {"model.rope_scaling.rope_type": scaling.rope_type}
    if scaling.rope_type == "yarn" and config.rope_theta == 1.0:
        return [problem("model", config, "rope_theta", "must not be 1", because, (10000.0,))]
    if scaling.rope_type == "dynamic" and rotated_features(config) == 2:
        rule = "must not be dynamic for heads with two rotated features"
        return [problem("model.rope_scaling", scaling, "rope_type", rule, {"rotated features": 2}, ("linear",))]
    return []


def check_window(config: LlamaConfig) -> list[Problem]:
    """Of the families that have one, in all layers or in some."""
    names = {f.name for f in fields(config)}
    if "sliding_window" not in names:
        return []
    found = at_least("model", config, 1, "sliding_window")
    window, types = getattr(config, "sliding_window"), getattr(config, "layer_types", None)  # noqa: B009
    if isinstance(config, UpperWindowConfig):
        found += at_least("model", config, 0, "max_window_layers")
        if types is not None:
            found += no_effect(
                "model", config, ["max_window_layers"], "model.layer_types=null", {"model.layer_types": types}
            )
        elif window is None:
            found += no_effect(
                "model", config, ["max_window_layers"], "model.sliding_window", {"model.sliding_window": None}
            )
    return found if types is None else found + check_layer_types(config, types, window)


def check_layer_types(config: LlamaConfig, types: tuple[str, ...], window: int | None) -> list[Problem]:
    layers = config.num_hidden_layers
    if len(types) != layers >= 1:
        rule, because = "must have one kind per layer", {"kinds": len(types), "model.num_hidden_layers": layers}
        whole = (types * layers)[:layers]
        return [problem("model", config, "layer_types", rule, because, (*((whole,) if whole else ()), None))]
    if "sliding_attention" not in types:
        return no_effect(
            "model", config, ["sliding_window"], "a layer of sliding_attention", {"model.layer_types": types}
        )
    if window is None:
        return [
            problem(
                "model",
                config,
                "sliding_window",
                "must be set for layers of sliding_attention",
                {"model.layer_types": types},
                (4096,),
            )
        ]
    return []


WITH_ATTENTION_BIAS = ("llama", "qwen3", "qwen3_moe", "gpt_oss")


def check_biases(config: LlamaConfig) -> list[Problem]:
    """Which families may have them: those whose published code has the switch."""
    because = {"model.family": config.family}
    found = []
    if config.family not in WITH_ATTENTION_BIAS:
        found += no_effect(
            "model", config, ["attention_bias"], f"model.family {' or '.join(WITH_ATTENTION_BIAS)}", because
        )
    return found + (
        no_effect("model", config, ["mlp_bias"], "model.family llama", because) if config.family != "llama" else []
    )


def check_experts(config: ExpertsConfig) -> list[Problem]:
    name = next(n for n in ("num_local_experts", "num_experts", "n_routed_experts") if hasattr(config, n))
    count = getattr(config, name)
    found = at_least("model", config, 1, name, "num_experts_per_tok")
    found += within("model", config, "router_aux_loss_coef", "[0, inf)") + within(
        "model", config, "router_z_loss_coef", "[0, inf)"
    )
    found += within("model", config, "expert_capacity_factor", "(0, inf)", (1.25,))
    if config.expert_capacity_factor is None:
        found += no_effect(
            "model",
            config,
            ["expert_capacity_drop"],
            "model.expert_capacity_factor",
            {"model.expert_capacity_factor": None},
        )
    if config.router_aux_loss_coef == 0:
        found += no_effect(
            "model", config, ["router_aux_loss_scope"], "model.router_aux_loss_coef", {"model.router_aux_loss_coef": 0}
        )
    if not found and config.num_experts_per_tok > count:
        because = {f"model.{name}": count}
        found.append(problem("model", config, "num_experts_per_tok", f"must be <= {name}", because, (count,)))
    if isinstance(config, DeepseekV3Config):
        found += check_deepseek_experts(config, found)
    if isinstance(config, GptOssConfig):
        found += check_gpt_oss(config)
    return found + (check_qwen3_moe(config) if isinstance(config, Qwen3MoEConfig) else [])


DEEPSEEK_EXPERTS = (
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "moe_intermediate_size",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "norm_topk_prob",
    "router_bias_update_rate",
    "router_aux_loss_coef",
    "router_aux_loss_scope",
    "router_z_loss_coef",
    "expert_capacity_factor",
    "router_forced_balance",
)


def check_deepseek_experts(config: DeepseekV3Config, before: list[Problem]) -> list[Problem]:
    """Groups are equal, and those that a token chooses in have as many experts as it goes to."""
    c = config
    if not c.routed_experts:
        because = {
            "model.first_k_dense_replace": c.first_k_dense_replace,
            "model.num_hidden_layers": c.num_hidden_layers,
        }
        return no_effect("model", c, DEEPSEEK_EXPERTS, "layers with experts", because)
    found = at_least("model", c, 1, "n_group", "topk_group", "moe_intermediate_size")
    found += at_least("model", c, 0, "first_k_dense_replace", "n_shared_experts")
    found += within("model", c, "routed_scaling_factor", "(0, inf)", (2.5,)) + within(
        "model", c, "router_bias_update_rate", "[0, inf)", (0.001,)
    )
    if found or before:
        return found
    experts = {"model.n_routed_experts": c.n_routed_experts}
    if c.n_routed_experts % c.n_group:
        return [
            problem(
                "model", c, "n_group", "must divide n_routed_experts", experts, divisors(c.n_group, c.n_routed_experts)
            )
        ]
    if c.topk_group > c.n_group:
        return [problem("model", c, "topk_group", "must be <= n_group", {"model.n_group": c.n_group}, (c.n_group,))]
    room = c.n_routed_experts // c.n_group * c.topk_group
    if c.num_experts_per_tok > room:
        because = {
            **experts,
            "model.n_group": c.n_group,
            "model.topk_group": c.topk_group,
            "experts in topk_group groups": room,
        }
        return [
            problem(
                "model",
                c,
                "num_experts_per_tok",
                "must be <= the number of experts in topk_group groups",
                because,
                (room,),
            )
        ]
    return []


def check_gpt_oss(config: GptOssConfig) -> list[Problem]:
    return within("model", config, "swiglu_alpha", "(0, inf)") + within("model", config, "swiglu_limit", "(0, inf]")


def check_qwen3_moe(config: Qwen3MoEConfig) -> list[Problem]:
    layers = config.num_hidden_layers
    found = at_least("model", config, 1, "moe_intermediate_size", "decoder_sparse_step")
    if not all(0 <= i < layers for i in config.mlp_only_layers):
        kept = tuple(i for i in config.mlp_only_layers if 0 <= i < layers)
        rule = "must be numbers of layers, from 0"
        found.append(problem("model", config, "mlp_only_layers", rule, {"model.num_hidden_layers": layers}, (kept,)))
    elif not found and layers and not any(map(config.has_experts, range(layers))):
        because = {"model.decoder_sparse_step": config.decoder_sparse_step, "model.num_hidden_layers": layers}
        found.append(problem("model", config, "mlp_only_layers", "must leave a layer with experts", because, ((),)))
    return found


def check_gpt2(config: GPT2Config, seq_length: int) -> list[Problem]:
    found = within("model", config, "layer_norm_epsilon", "(0, inf)")
    for name in ("dropout", "attention_dropout"):
        found += within("model", config, name, "[0, 1)", (0.0, 0.1))
    if min(config.hidden_size, config.num_attention_heads) >= 1:
        found += check_head_dim(config)
    if seq_length > config.max_position_embeddings >= 1:
        because = {"model.max_position_embeddings": config.max_position_embeddings}
        rule = "must be <= max_position_embeddings (positions are learned)"
        found.append(Problem("train.seq_length", seq_length, rule, because, (config.max_position_embeddings,)))
    return found


def check_tensor_parallel(config: LlamaConfig | GPT2Config, tp: int) -> list[Problem]:
    """Heads are cut whole; few key/value heads are shared by runs of ranks; each rank holds part of the vocabulary
    and of the MLP."""
    found = []
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % tp:
        because = {"model.num_attention_heads": heads}
        found.append(Problem("layout.tp", tp, "must divide num_attention_heads", because, divisors(tp, heads)))
    if kv_heads != heads and kv_heads % tp and tp % kv_heads:
        because = {"model.num_key_value_heads": kv_heads}
        found.append(
            Problem(
                "layout.tp", tp, "must divide num_key_value_heads or be a multiple of it", because, divisors(tp, heads)
            )
        )
    dense = not isinstance(config, ExpertsConfig) or not all(map(config.has_experts, range(config.num_hidden_layers)))
    for name in ("vocab_size", *(("intermediate_size",) if dense else ())):
        size = getattr(config, name)
        if size is not None and size < tp:
            found.append(Problem("layout.tp", tp, f"must be <= {name}", {f"model.{name}": size}, divisors(tp, heads)))
    if (
        isinstance(config, DeepseekV3Config)
        and config.routed_experts
        and 0 < config.n_shared_experts * config.moe_intermediate_size < tp
    ):
        because = {
            "model.n_shared_experts": config.n_shared_experts,
            "model.moe_intermediate_size": config.moe_intermediate_size,
        }
        found.append(
            Problem("layout.tp", tp, "must be <= the width of the shared experts", because, divisors(tp, heads))
        )
    return found

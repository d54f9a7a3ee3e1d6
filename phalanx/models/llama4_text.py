"""Llama 4's text model: attention in chunks where positions are rotary, over everything where there are none, and
experts whose input is weighed. Meta, "The Llama 4 herd", 2025."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, no_effect, problem, within
from phalanx.models.config_json import LIST_OR_NULL, ConfigJson, integer, integer_or_null, number, switch
from phalanx.models.decoder_config import (
    DECODER_KEYS,
    DECODER_ONLY,
    common_rules,
    decoder_fields,
    heads_to_hf,
    shrink_decoder,
    with_head_rules,
)
from phalanx.models.experts import (
    ROUTER_KEYS,
    ExpertsConfig,
    expert_rules,
    router_fields,
    router_to_hf,
    shrink_local_experts,
)
from phalanx.models.family import Family
from phalanx.models.model_config import SmallSizes
from phalanx.models.rope import LayerRope
from phalanx.models.rotary_layers import (
    ROTARY_LAYER_KEYS,
    RotaryLayersConfig,
    by_interval,
    check_rotary_layers,
    rotary_layers_from_hf,
    rotary_layers_to_hf,
    small_rotary_layers,
)

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.attention import Attention
    from phalanx.nn.env import Env
    from phalanx.nn.mlp import SwiGLU
    from phalanx.nn.moe import MoE


@dataclass(frozen=True, kw_only=True)
class Llama4TextConfig(RotaryLayersConfig, ExpertsConfig):
    """Llama's fields; intermediate_size is the width of an expert and of the shared one."""

    family: Literal["llama4_text"] = "llama4_text"
    """Which model this section describes: llama4_text."""
    head_dim: int | None = 128
    """Width of a head; null: hidden_size / num_attention_heads."""
    rope_theta: float = 500000.0
    """Base of the rotary embedding."""
    intermediate_size_mlp: int
    """Width of the MLP of layers without experts."""
    num_local_experts: int = 16
    """Experts per layer that tokens choose among, beside a shared one."""
    num_experts_per_tok: int = 1
    """Experts that each token goes to, each of which gets it times its score."""
    interleave_moe_layer_step: int = 1
    """Every so many layers, the last one has experts."""
    moe_layers: tuple[int, ...] | None = None
    """The layers with experts, by number from 0; unset: by interleave_moe_layer_step."""
    use_qk_norm: bool = True
    """In layers with a rotary embedding, queries and keys are normalized head by head, without a weight."""
    attention_chunk_size: int | None = 8192
    """In layers with a rotary embedding, a token reads only its chunk of so many tokens of its document; unset: all
    before it."""
    attn_temperature_tuning: bool = True
    """In layers without a rotary embedding, queries are multiplied by 1 + attn_scale * log(1 + floor((position + 1) /
    floor_scale))."""
    floor_scale: int = 8192
    """Positions that have the same temperature."""
    attn_scale: float = 0.1
    """How fast the temperature grows."""

    biases: ClassVar[tuple[str, ...]] = ("attention_bias",)

    @property
    def routed_experts(self) -> int:
        return self.num_local_experts if any(map(self.has_experts, range(self.num_hidden_layers))) else 0

    def has_experts(self, layer: int) -> bool:
        given = self.moe_layers
        return (layer + 1) % max(1, self.interleave_moe_layer_step) == 0 if given is None else layer in given

    def rope(self, layer: int) -> LayerRope | None:
        found = super().rope(layer)
        return None if found is None else replace(found, interleaved=True)


# functions that build blocks import torch themselves, because reading a config must not
def blocks(config: Llama4TextConfig, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.decoder import DecoderLayer, decoder_blocks

    return decoder_blocks(config, env, partial(DecoderLayer, make_attention=make_attention, make_mlp=make_mlp))


def make_attention(config: Llama4TextConfig, env: Env, layer: int) -> Attention:
    """The norm of heads stands before the rotation here, which keeps lengths, so that the order makes no difference."""
    from phalanx.models.decoder import attention
    from phalanx.nn.query_temperature import QueryTemperature
    from phalanx.ops.attention.kind import AttentionKind

    c = config
    if c.rotates(layer):
        kind = AttentionKind(chunk=c.attention_chunk_size)
        return attention(c, env, layer, kind=kind, unit_norm=c.rms_norm_eps if c.use_qk_norm else None)
    temperature = QueryTemperature(c.floor_scale, c.attn_scale) if c.attn_temperature_tuning else None
    return attention(c, env, layer, temperature=temperature)


def make_mlp(config: Llama4TextConfig, env: Env, layer: int) -> MoE | SwiGLU:
    from phalanx.models.decoder import balance_of, router_of
    from phalanx.nn.mlp import SwiGLU
    from phalanx.nn.moe import HalvedNames, MoE

    c, at = config, f"{config.base}layers.{layer}.feed_forward"
    std, width = c.initializer_range, c.hidden_size
    if not c.has_experts(layer):
        return SwiGLU(env, matrices(at), width, c.intermediate_size_mlp, std)
    stacks = f"{at}.experts.gate_up_proj", f"{at}.experts.down_proj"
    names = HalvedNames(router=f"{at}.router.weight", gate_up=stacks[0], down=stacks[1], weigh="inputs")
    router = replace(router_of(c, renormalize=False, order="after"), score="sigmoid")
    shared = SwiGLU(env, matrices(f"{at}.shared_expert"), width, c.intermediate_size, std)
    return MoE(env, names, router, width, c.intermediate_size, std, balance_of(c), shared, layer)


def matrices(at: str) -> tuple[str, str, str]:
    """Global names of an MLP's matrices."""
    return f"{at}.gate_proj.weight", f"{at}.up_proj.weight", f"{at}.down_proj.weight"


def rules(config: Llama4TextConfig, seq_length: int) -> list[Problem]:
    c = config
    found = common_rules(c) + expert_rules(c, "num_local_experts") + check_rotary_layers(c)
    found += at_least("model", c, 1, "intermediate_size_mlp", "attention_chunk_size", "floor_scale")
    found += within("model", c, "attn_scale", "[0, inf)", (0.1,)) + check_expert_layers(c)
    return with_head_rules(c, found or check_kinds_of_layers(c))


def check_expert_layers(config: Llama4TextConfig) -> list[Problem]:
    given, layers = config.moe_layers, config.num_hidden_layers
    if given is None:
        return at_least("model", config, 1, "interleave_moe_layer_step")
    because = {"model.moe_layers": given}
    found = no_effect("model", config, ["interleave_moe_layer_step"], "model.moe_layers=null", because)
    kept = tuple(i for i in given if 0 <= i < layers)
    if kept != given:
        rule = "must be numbers of layers, from 0"
        found.append(problem("model", config, "moe_layers", rule, {"model.num_hidden_layers": layers}, (kept, None)))
    return found


def check_kinds_of_layers(config: Llama4TextConfig) -> list[Problem]:
    """What is said of layers with and without rotary embedding, or with experts, has an effect."""
    c, layers = config, range(config.num_hidden_layers)
    rotates, found = [c.rotates(i) for i in layers], list[Problem]()
    said = "no_rope_layer_interval" if c.no_rope_layers is None else "no_rope_layers"
    because = {f"model.{said}": getattr(c, said)}
    if layers and not any(rotates):
        found += no_effect(
            "model", c, ["attention_chunk_size", "use_qk_norm"], "a layer with rotary embedding", because
        )
    if layers and all(rotates):
        tuning = ["attn_temperature_tuning", "floor_scale", "attn_scale"]
        found += no_effect("model", c, tuning, "a layer without rotary embedding", because)
    elif not c.attn_temperature_tuning:
        off = {"model.attn_temperature_tuning": False}
        found += no_effect("model", c, ["floor_scale", "attn_scale"], "model.attn_temperature_tuning", off)
    scaling = c.rope_scaling
    if scaling is not None and scaling.rope_type in ("yarn", "longrope") and c.use_qk_norm:
        rule, why = "must keep the lengths of queries and keys, which are normalized", {"model.use_qk_norm": True}
        found.append(problem("model.rope_scaling", scaling, "rope_type", rule, why, ("linear",)))
    if layers and not any(map(c.has_experts, layers)):
        layers_in_all = {"model.num_hidden_layers": len(layers)}
        field = "interleave_moe_layer_step" if c.moe_layers is None else "moe_layers"
        valid: tuple[Any, ...] = (1,) if c.moe_layers is None else (None,)
        found.append(problem("model", c, field, "must leave a layer with experts", layers_in_all, valid))
    return found


CHUNKED, FULL, CHUNK = "chunked_attention", "full_attention", 8192
KEYS = {
    **DECODER_KEYS,
    **ROUTER_KEYS,
    **ROTARY_LAYER_KEYS,
    "num_key_value_heads": integer(8),
    "head_dim": integer(128),
    "max_position_embeddings": integer(131072),
    "rms_norm_eps": number(1e-5),
    "intermediate_size_mlp": integer(16384),
    "num_experts_per_tok": integer(1),
    "num_local_experts": integer(16),
    "moe_layers": LIST_OR_NULL,
    "interleave_moe_layer_step": integer(1),
    "router_jitter_noise": number(0.0),
    "use_qk_norm": switch(True),
    "attention_chunk_size": integer_or_null(CHUNK),
    "layer_types": LIST_OR_NULL,
    "attn_temperature_tuning": switch(True),
    "floor_scale": integer(8192),
    "attn_scale": number(0.1),
    "attention_bias": switch(False),
}
SAME = ("intermediate_size_mlp", "num_local_experts", "attention_bias")


def from_hf(found: ConfigJson) -> Llama4TextConfig | None:
    same, rotary = decoder_fields(found, theta=500000.0), rotary_layers_from_hf(found, empty_is_unset=True)
    if found.odd:
        return None
    own = {**router_fields(found), **found.pick(*SAME), **expert_layers(found), **attention_fields(found, rotary)}
    return None if found.odd else Llama4TextConfig(**same, **rotary, **own)


def expert_layers(found: ConfigJson) -> dict[str, Any]:
    """Which layers have experts, in the shortest form."""
    given, step, layers = (found.values[k] for k in ("moe_layers", "interleave_moe_layer_step", "num_hidden_layers"))
    if given is None:
        return {"interleave_moe_layer_step": step}
    kept = tuple(i for i in given if i in range(layers))  # other numbers refer to no layer
    if step >= 1 and kept == tuple(range(step - 1, layers, step)):
        return {"interleave_moe_layer_step": step}
    return {"moe_layers": kept}


def attention_fields(found: ConfigJson, rotary: dict[str, Any]) -> dict[str, Any]:
    """Norms and chunks of layers with rotary embedding, temperature of those without, as far as there are such."""
    v, layers = found.values, found.values["num_hidden_layers"]
    rotates = rotary.get("no_rope_layers") or by_interval(rotary["no_rope_layer_interval"], layers)
    usual = [CHUNKED if one else FULL for one in rotates]
    types = usual if v["layer_types"] is None else v["layer_types"]
    own: dict[str, Any] = {}
    if any(rotates):
        own |= {"use_qk_norm": v["use_qk_norm"], "attention_chunk_size": v["attention_chunk_size"]}
    if v["attention_chunk_size"] is None:
        found.odd.append("attention_chunk_size=None (supported: a number of tokens)")
    if types == [FULL] * layers:
        own |= {"attention_chunk_size": None} if any(rotates) else {}
    elif types != usual:
        wanted = f"{CHUNKED!r} for each of {layers} layers with rotary embedding, {FULL!r} for others or for all"
        found.odd.append(f"layer_types={types!r} (supported: {wanted})")
    if not all(rotates):
        own["attn_temperature_tuning"] = v["attn_temperature_tuning"]
        own |= found.pick("floor_scale", "attn_scale") if v["attn_temperature_tuning"] else {}
    return own


def to_hf(config: Llama4TextConfig) -> dict[str, Any]:
    c, layers = config, range(config.num_hidden_layers)
    chunked = [c.rotates(i) and c.attention_chunk_size is not None for i in layers]
    return {
        **heads_to_hf(c),
        **router_to_hf(c),
        **rotary_layers_to_hf(c),
        **{name: getattr(c, name) for name in SAME},
        "moe_layers": [i for i in layers if c.has_experts(i)],
        "interleave_moe_layer_step": c.interleave_moe_layer_step,
        "router_jitter_noise": 0.0,
        "use_qk_norm": c.use_qk_norm,
        "attention_chunk_size": c.attention_chunk_size or CHUNK,  # transformers needs one, even if no layer has it
        "layer_types": [CHUNKED if one else FULL for one in chunked],
        "attn_temperature_tuning": c.attn_temperature_tuning,
        "floor_scale": c.floor_scale,
        "attn_scale": c.attn_scale,
    }


def shrink(config: Llama4TextConfig, small: SmallSizes) -> Llama4TextConfig:
    """Chunks and steps of the temperature that are shorter than the sequence stay so; so do all kinds of layers."""
    chunk, step = config.attention_chunk_size, config.floor_scale
    changed: dict[str, Any] = small_rotary_layers(config, small)
    if config.moe_layers is None:
        changed["interleave_moe_layer_step"] = min(config.interleave_moe_layer_step, small.layers)
    else:
        changed["moe_layers"] = tuple(i for i in config.moe_layers if i < small.layers) or (small.layers - 1,)
    if chunk is not None and chunk < small.given_length:
        changed["attention_chunk_size"] = 5
    if step < small.given_length:
        changed["floor_scale"] = 3
    return replace(shrink_decoder(config, small), intermediate_size_mlp=small.intermediate_size, **changed)


def least_layers(config: Llama4TextConfig) -> int:
    """Enough for one layer with experts, and one without rotary embedding."""
    layers = range(config.num_hidden_layers)
    first = [next((i for i in layers if kind(i)), 0) for kind in (config.has_experts, lambda i: not config.rotates(i))]
    return max(2, *(i + 1 for i in first))


FAMILY = Family(
    "llama4_text",
    Llama4TextConfig,
    blocks,
    architecture="Llama4ForCausalLM",
    headless="Llama4TextModel",
    rules=rules,
    keys=KEYS,
    only={**DECODER_ONLY, "router_jitter_noise": (0.0,)},
    from_hf=from_hf,
    to_hf=to_hf,
    shrink=shrink,
    shrink_experts=shrink_local_experts,
    least_layers=least_layers,
)

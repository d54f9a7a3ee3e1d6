"""OLMo Hybrid: linear attention by the gated delta rule in three layers of four, whose states may change their sign;
OLMo 3's attention, without positions as published, in the fourth. Team OLMo, "OLMo Hybrid", 2026."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import no_effect, problem, within
from phalanx.models.config_json import ConfigJson, integer, integer_or_null, number, switch
from phalanx.models.decoder_config import (
    DECODER_KEYS,
    common_rules,
    decoder_fields,
    decoder_tensors,
    heads_to_hf,
    shrink_decoder,
    with_head_rules,
)
from phalanx.models.delta_layers import (
    DELTA_KEYS,
    DeltaKind,
    DeltaLayersConfig,
    check_delta_layers,
    check_kinds,
    delta_least_layers,
    delta_to_hf,
    gated_delta,
    one_after_the_other,
    one_tensor_each,
    pattern,
    small_delta,
    split_delta_heads,
)
from phalanx.models.family import Family
from phalanx.models.model_config import SmallSizes
from phalanx.models.rope import LayerRope

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env
    from phalanx.nn.gated_delta import GatedDelta
    from phalanx.nn.module import Block


@dataclass(frozen=True, kw_only=True)
class OlmoHybridConfig(DeltaLayersConfig):
    """Llama's fields and those of linear attention."""

    family: Literal["olmo_hybrid"] = "olmo_hybrid"
    """Which model this section describes: olmo_hybrid."""
    max_position_embeddings: int = 65536
    """Longest sequence the model is meant for."""
    rms_norm_eps: float = 1e-6
    """Epsilon of RMSNorm (of the norm of heads in linear attention it is always 1e-5)."""
    use_rope: bool = False
    """Layers with attention have a rotary embedding; false, as published: they have no positions."""
    linear_num_key_heads: int = 30
    """Heads of keys and queries in a layer with linear attention."""
    linear_num_value_heads: int = 30
    """Heads of values there, each with a state; groups of them share a head of keys and queries."""
    linear_key_head_dim: int = 96
    """Width of a head of keys and queries there."""
    linear_value_head_dim: int = 192
    """Width of a head of values there."""
    linear_allow_neg_eigval: bool = True
    """What is written under a key may replace up to twice what is held there (beta up to 2 in place of 1), so that
    states can change their sign."""
    linear_a_log_min: float = 0.0
    """Smallest decay rate of a head at the start of training."""
    linear_a_log_max: float = 16.0
    """Largest decay rate of a head at the start of training."""
    linear_dt_min: float = 0.001
    """Smallest step of a head, by which its rate is multiplied, at the start of training."""
    linear_dt_max: float = 0.1
    """Largest step of a head at the start of training."""
    linear_dt_init_floor: float = 1e-4
    """Steps at the start of training are at least this."""

    biases: ClassVar[tuple[str, ...]] = ("attention_bias",)

    @property
    def types(self) -> tuple[DeltaKind, ...]:
        """Unset, every fourth layer has attention, or else the last."""
        if self.layer_types is not None:
            return self.layer_types
        usual = pattern(self.num_hidden_layers, self.period)
        return usual if "full_attention" in usual else (*usual[:-1], "full_attention")

    @property
    def rotary(self) -> bool:
        return self.use_rope

    def rope(self, layer: int) -> LayerRope | None:
        return super().rope(layer) if self.use_rope else None


# functions that build blocks import torch themselves, because reading a config must not
def blocks(config: OlmoHybridConfig, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.decoder import decoder_blocks

    return decoder_blocks(config, env, layer)


def layer(config: OlmoHybridConfig, env: Env, number: int) -> Block:
    """Norms come behind attention and its MLP, and before linear attention and its MLP."""
    from phalanx.models.decoder import DecoderLayer, PostNormLayer, width_norm_attention

    if config.types[number] == "full_attention":
        return PostNormLayer(config, env, number, make_attention=width_norm_attention)
    return DecoderLayer(config, env, number, make_attention=linear_attention)


def linear_attention(config: OlmoHybridConfig, env: Env, number: int) -> GatedDelta:
    from phalanx.nn.gated_delta import DeltaRows, RowsOfHeads
    from phalanx.nn.initial import LogUniform, TimeStep

    c, at = config, f"{config.base}layers.{number}.linear_attn"
    values, width = c.linear_num_value_heads, c.linear_value_head_dim
    rows = DeltaRows(
        *one_tensor_each(c, [f"{at}.{n}_proj.weight" for n in "qkv"]),
        one_after_the_other(c, f"{at}.conv1d.weight"),
        RowsOfHeads.whole(f"{at}.b_proj.weight", values, 1),
        RowsOfHeads.whole(f"{at}.a_proj.weight", values, 1),
        RowsOfHeads.whole(f"{at}.g_proj.weight", values, width),
    )
    steps = TimeStep(low=c.linear_dt_min, high=c.linear_dt_max, floor=c.linear_dt_init_floor)
    return gated_delta(
        c,
        env,
        at,
        rows,
        out=f"{at}.o_proj",
        norm=f"{at}.o_norm",
        eps=1e-5,
        most=2.0 if c.linear_allow_neg_eigval else 1.0,
        init=(LogUniform(low=c.linear_a_log_min, high=c.linear_a_log_max), steps),
    )


def rules(config: OlmoHybridConfig, seq_length: int) -> list[Problem]:
    c = config
    found = common_rules(c) + check_delta_layers(c) + within("model", c, "linear_a_log_min", "[0, inf)")
    for name in ("linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"):
        found += within("model", c, name, "(0, inf)")
    if not c.use_rope:
        because = {"model.use_rope": False}
        found += no_effect("model", c, ["rope_theta", "rope_scaling"], "model.use_rope", because)
    if found:
        return found
    for low, high in (("linear_a_log_min", "linear_a_log_max"), ("linear_dt_min", "linear_dt_max")):
        most = getattr(c, high)
        if getattr(c, low) > most:
            found.append(problem("model", c, low, f"must be <= {high}", {f"model.{high}": most}, (most,)))
    if len(set(c.types)) < 2:
        usual = (None,) if c.num_hidden_layers > 1 else ()
        found.append(problem("model", c, "layer_types", "must have layers of both kinds", {}, usual))
    return with_head_rules(c, found)


STARTS = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
SAME = ("attention_bias", "linear_allow_neg_eigval", *STARTS)
KEYS = {
    **DECODER_KEYS,
    **{name: key for name, key in DELTA_KEYS.items() if name != "full_attention_interval"},
    **{name: integer_or_null() for name in DELTA_KEYS if name.endswith(("_heads", "_head_dim"))},
    "num_key_value_heads": integer_or_null(),
    "head_dim": integer_or_null(),
    "max_position_embeddings": integer(65536),
    "attention_bias": switch(False),
    "linear_allow_neg_eigval": switch(True),
    **{name: number(default) for name, default in zip(STARTS, (0.0, 16.0, 0.001, 0.1, 1e-4))},
}


def from_hf(found: ConfigJson) -> OlmoHybridConfig | None:
    stated, v = found.stated, found.values
    rope = stated.get("rope_parameters") or stated.get("rope_scaling") or {}
    base = rope.get("rope_theta", stated.get("rope_theta", 10000.0)) if isinstance(rope, dict) else 10000.0
    beside = ("rope_theta", "rope_parameters", "rope_scaling")
    if base is None:  # nothing is rotated
        stated = {key: value for key, value in stated.items() if key not in beside}
    same = decoder_fields(replace(found, stated=stated, odd=found.odd))
    heads = max(1, v["num_attention_heads"])
    keys, values = (
        heads if v[name] is None else v[name] for name in ("linear_num_key_heads", "linear_num_value_heads")
    )
    key = int(0.75 * v["hidden_size"] / max(1, keys)) if v["linear_key_head_dim"] is None else v["linear_key_head_dim"]
    own = {
        **found.pick(*SAME, "linear_conv_kernel_dim"),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": key,
        "linear_value_head_dim": 2 * key if v["linear_value_head_dim"] is None else v["linear_value_head_dim"],
    }
    if v["layer_types"] is not None:
        check_kinds(found, tuple(v["layer_types"]), "layer_types")
    if found.odd:
        return None
    made = OlmoHybridConfig(**same, **own, use_rope=base is not None)
    kinds = made.types if v["layer_types"] is None else tuple(v["layer_types"])
    made = made if kinds == made.types else replace(made, layer_types=kinds)
    return made if made.use_rope else replace(made, rope_theta=OlmoHybridConfig.rope_theta)


def to_hf(config: OlmoHybridConfig) -> dict[str, Any]:
    same = {**heads_to_hf(config), **delta_to_hf(config), **{name: getattr(config, name) for name in SAME}}
    if config.use_rope:
        return same
    return {**same, "rope_theta": None, "rope_parameters": {"rope_theta": None, "rope_type": "default"}}


def shrink(config: OlmoHybridConfig, small: SmallSizes) -> OlmoHybridConfig:
    return replace(shrink_decoder(config, small), **small_delta(config, small))


FAMILY = Family(
    "olmo_hybrid",
    OlmoHybridConfig,
    blocks,
    architecture="OlmoHybridForCausalLM",
    tensors=replace(
        decoder_tensors,
        also=("model.layers.0.linear_attn.g_proj.weight",),
        renames={  # of published folders
            "attention_layer_norm.weight": "input_layernorm.weight",
            "feedforward_layer_norm.weight": "post_attention_layernorm.weight",
        },
    ),
    rules=rules,
    split_rules=split_delta_heads,
    keys=KEYS,
    from_hf=from_hf,
    to_hf=to_hf,
    shrink=shrink,
    least_layers=delta_least_layers,
)

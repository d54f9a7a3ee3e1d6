"""MiniMax-M2: half of each head rotated, queries and keys normalized over their whole width, experts chosen by sigmoid
scores and a bias. MiniMax, "MiniMax-M2", 2025; the choice of experts is that of DeepSeek-V3 without groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import within
from phalanx.models.config_json import ConfigJson, integer, integer_or_null, number
from phalanx.models.decoder_config import (
    DECODER_KEYS,
    DECODER_ONLY,
    PartialRotaryConfig,
    common_rules,
    decoder_fields,
    heads_to_hf,
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

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env
    from phalanx.nn.moe import MoE


@dataclass(frozen=True, kw_only=True)
class MiniMaxM2Config(PartialRotaryConfig, ExpertsConfig):
    """Llama's fields; intermediate_size is the width of an expert."""

    family: Literal["minimax_m2"] = "minimax_m2"
    """Which model this section describes: minimax_m2."""
    head_dim: int | None = 128
    """Width of a head; null: hidden_size / num_attention_heads."""
    partial_rotary_factor: float = 0.5
    """The fraction of each head that is rotated (rotary_dim / head_dim), its first features; the rest carries no
    position."""
    rms_norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    rope_theta: float = 5000000.0
    """Base of the rotary embedding."""
    num_local_experts: int = 256
    """Experts per layer."""
    num_experts_per_tok: int = 8
    """Experts that each token goes to."""
    router_bias_update_rate: float = 0.001
    """After a step, the bias by which experts are chosen moves by this: up for experts with less than the mean load,
    down for the others; 0: it does not move."""

    @property
    def routed_experts(self) -> int:
        return self.num_local_experts


# functions that build blocks import torch themselves, because reading a config must not
def blocks(config: MiniMaxM2Config, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.decoder import DecoderLayer, decoder_blocks, width_norm_attention

    return decoder_blocks(config, env, partial(DecoderLayer, make_attention=width_norm_attention, make_mlp=experts))


def experts(config: MiniMaxM2Config, env: Env, layer: int) -> MoE:
    from phalanx.models.decoder import balance_of, router_of
    from phalanx.nn.moe import ExpertNames, MoE

    c, at = config, f"model.layers.{layer}.block_sparse_moe"
    gate, down, up = (f"{at}.experts.{{}}.{w}.weight" for w in ("w1", "w2", "w3"))
    return MoE(
        env,
        ExpertNames(f"{at}.gate.weight", gate, up, down, bias=f"{at}.e_score_correction_bias"),
        replace(router_of(c), score="sigmoid"),
        c.hidden_size,
        c.intermediate_size,
        c.initializer_range,
        replace(balance_of(c), bias_rate=c.router_bias_update_rate),
        layer=layer,
    )


def rules(config: MiniMaxM2Config, seq_length: int) -> list[Problem]:
    found = common_rules(config) + expert_rules(config, "num_local_experts")
    found += within("model", config, "router_bias_update_rate", "[0, inf)", (0.001,))
    return with_head_rules(config, found)


KEYS = {
    **DECODER_KEYS,
    **ROUTER_KEYS,
    "num_key_value_heads": integer(8),
    "head_dim": integer(128),
    "max_position_embeddings": integer(196608),
    "num_experts_per_tok": integer(8),
    "num_local_experts": integer(256),
    "router_jitter_noise": number(0.0),
    "rotary_dim": integer_or_null(),
}
# the last ones are read by the published code and not by transformers
ONLY: dict[str, tuple[Any, ...]] = {
    **DECODER_ONLY,
    "router_jitter_noise": (0.0,),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "shared_intermediate_size": (0,),
}


def from_hf(found: ConfigJson) -> MiniMaxM2Config | None:
    v = found.values
    part = 1.0 if v["rotary_dim"] is None else v["rotary_dim"] / max(1, v["head_dim"])
    same = decoder_fields(found, theta=5000000.0, partial=part)
    own = {**found.pick("num_local_experts"), **router_fields(found)}
    return None if found.odd else MiniMaxM2Config(**same, **own)


def to_hf(config: MiniMaxM2Config) -> dict[str, Any]:
    return {
        **heads_to_hf(config),
        **router_to_hf(config),
        "num_local_experts": config.num_local_experts,
        "router_jitter_noise": 0.0,
        "rotary_dim": config.rotated_features,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    }


FAMILY = Family(
    "minimax_m2",
    MiniMaxM2Config,
    blocks,
    architecture="MiniMaxM2ForCausalLM",
    rules=rules,
    keys=KEYS,
    other_names={"num_local_experts": "num_experts"},
    only=ONLY,
    from_hf=from_hf,
    to_hf=to_hf,
    shrink_experts=shrink_local_experts,
)

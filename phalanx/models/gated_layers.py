"""Layers of Qwen3-Next and Qwen3.5: gated attention beside linear attention, and experts beside a gated shared one.
Fields of the `model` section, rules, blocks, config.json in both directions, a small copy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, divisors
from phalanx.models.config_json import ConfigJson, integer, switch
from phalanx.models.decoder_config import (
    DECODER_KEYS,
    PartialRotaryConfig,
    decoder_fields,
    heads_to_hf,
    shrink_decoder,
)
from phalanx.models.delta_layers import (
    DELTA_KEYS,
    DeltaLayersConfig,
    delta_fields,
    delta_to_hf,
    small_delta,
    split_delta_heads,
)
from phalanx.models.experts import ROUTER_KEYS, ExpertsConfig, expert_rules
from phalanx.models.model_config import SmallExperts, SmallSizes

if TYPE_CHECKING:
    from phalanx.nn.attention import Attention
    from phalanx.nn.env import Env
    from phalanx.nn.moe import MoE


@dataclass(frozen=True, kw_only=True)
class GatedAttentionConfig(PartialRotaryConfig, DeltaLayersConfig):
    """Llama's fields and those of linear attention; layers with attention gate what they have read."""

    head_dim: int | None = 256
    """Width of a head of attention; null: hidden_size / num_attention_heads."""
    partial_rotary_factor: float = 0.25
    """The fraction of each head that is rotated, its first features; the rest carries no position."""
    rms_norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    rope_theta: float = 10000000.0
    """Base of the rotary embedding."""

    biases: ClassVar[tuple[str, ...]] = ("attention_bias",)
    offset_norms: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class GatedExpertsConfig(ExpertsConfig):
    """Experts beside a shared one that has a gate."""

    num_experts: int = 512
    """Experts per layer that tokens choose among."""
    num_experts_per_tok: int = 10
    """Experts that each token goes to."""
    moe_intermediate_size: int = 512
    """Width of an expert."""
    shared_expert_intermediate_size: int = 512
    """Width of the expert that every token goes to; its output is multiplied by a gate, one number for each
    token."""

    @property
    def routed_experts(self) -> int:
        return self.num_experts

    @property
    def expert_size(self) -> int:
        return self.moe_intermediate_size


# ---- blocks; functions that build them import torch themselves, because reading a config must not


def gated_attention(config: GatedAttentionConfig, env: Env, layer: int) -> Attention:
    from phalanx.models.decoder import head_norm_attention

    return head_norm_attention(config, env, layer, gated=True)


def gated_experts(config: GatedExpertsConfig, env: Env, layer: int, renormalize: bool) -> MoE:
    from phalanx.models.decoder import balance_of, router_of
    from phalanx.nn.mlp import SwiGLU
    from phalanx.nn.moe import ExpertNames, MoE
    from phalanx.nn.shared_expert import GatedExpert

    c, at, std = config, f"{config.base}layers.{layer}.mlp", config.initializer_range
    gate, up, down = (f"{at}.shared_expert.{n}_proj.weight" for n in ("gate", "up", "down"))
    shared = SwiGLU(env, (gate, up, down), c.hidden_size, c.shared_expert_intermediate_size, std)
    names = ExpertNames(f"{at}.gate.weight", *(f"{at}.experts.{{}}.{n}_proj.weight" for n in ("gate", "up", "down")))
    return MoE(
        env,
        names,
        router_of(c, renormalize),
        c.hidden_size,
        c.moe_intermediate_size,
        std,
        balance_of(c),
        GatedExpert(env, f"{at}.shared_expert_gate.weight", shared, c.hidden_size, std),
        layer,
    )


# ---- rules ---------------------------------------------------------------------------------------


def check_gated_experts(config: GatedExpertsConfig) -> list[Problem]:
    found = at_least("model", config, 1, "moe_intermediate_size", "shared_expert_intermediate_size")
    return expert_rules(config, "num_experts") + found


def split_gated(config: Any, tp: int) -> list[Problem]:
    found, width = split_delta_heads(config, tp), config.shared_expert_intermediate_size
    if width < tp:
        because, valid = {"model.shared_expert_intermediate_size": width}, divisors(tp, config.num_attention_heads)
        rule = "must be <= shared_expert_intermediate_size"
        found.append(Problem("layout.tp", tp, rule, because, valid))
    return found


# ---- config.json ---------------------------------------------------------------------------------

GATED_ATTENTION_KEYS = {
    **DECODER_KEYS,
    **DELTA_KEYS,
    "num_key_value_heads": integer(4),
    "head_dim": integer(256),
    "max_position_embeddings": integer(32768),
    "attention_bias": switch(False),
}
GATED_EXPERT_KEYS = {
    **ROUTER_KEYS,
    "num_experts": integer(512),
    "num_experts_per_tok": integer(10),
    "moe_intermediate_size": integer(512),
    "shared_expert_intermediate_size": integer(512),
}
OF_EXPERTS = ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size")


def gated_attention_fields(found: ConfigJson) -> dict[str, Any]:
    """Fields of both kinds of layers. Sections of the rotary embedding say where images are, which texts have not."""
    return {**decoder_fields(found, partial=0.25), **delta_fields(found), **found.pick("attention_bias")}


def gated_attention_to_hf(config: GatedAttentionConfig) -> dict[str, Any]:
    return {**heads_to_hf(config), **delta_to_hf(config), "attention_bias": config.attention_bias}


# ---- a small copy --------------------------------------------------------------------------------


def shrink_gated(config: Any, small: SmallSizes) -> Any:
    return replace(shrink_decoder(config, small), **small_delta(config, small))


def shrink_gated_experts(config: Any, small: SmallExperts) -> Any:
    return replace(
        config,
        num_experts=small.count,
        moe_intermediate_size=small.width,
        shared_expert_intermediate_size=small.width,
        num_experts_per_tok=small.chosen,
    )

"""Qwen3.5 with experts: the dense model's layers, each with many narrow experts beside a gated shared one. Qwen Team,
"Qwen3.5", 2026."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import no_effect
from phalanx.models.config_json import ConfigJson, integer, integer_or_null
from phalanx.models.decoder_config import common_rules, with_head_rules
from phalanx.models.delta_layers import delta_least_layers
from phalanx.models.experts import router_fields, router_to_hf
from phalanx.models.family import Family
from phalanx.models.gated_layers import (
    GATED_ATTENTION_KEYS,
    GATED_EXPERT_KEYS,
    OF_EXPERTS,
    GatedAttentionConfig,
    GatedExpertsConfig,
    check_gated_experts,
    check_gated_layers,
    gated_attention_fields,
    gated_attention_to_hf,
    gated_blocks,
    gated_experts,
    shrink_gated,
    shrink_gated_experts,
    split_gated,
    with_predictors,
)
from phalanx.models.model_config import SmallSizes
from phalanx.models.qwen3_5_text import NAMES, mixer, text_keys

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env
    from phalanx.nn.moe import MoE


@dataclass(frozen=True, kw_only=True)
class Qwen35MoETextConfig(GatedAttentionConfig, GatedExpertsConfig):
    family: Literal["qwen3_5_moe_text"] = "qwen3_5_moe_text"
    """Which model this section describes: qwen3_5_moe_text."""
    intermediate_size: int | None = None  # type: ignore[assignment]
    """Not read: all layers have experts, of moe_intermediate_size and shared_expert_intermediate_size."""
    num_experts: int = 256
    """Experts per layer that tokens choose among."""
    num_experts_per_tok: int = 8
    """Experts that each token goes to."""


# functions that build blocks import torch themselves, because reading a config must not
def blocks(config: Qwen35MoETextConfig, env: Env) -> Sequence[BlockMaker]:
    return gated_blocks(config, env, mixer, make_mlp)


def make_mlp(config: Qwen35MoETextConfig, env: Env, layer: int) -> MoE:
    return gated_experts(config, env, layer, renormalize=True)


def rules(config: Qwen35MoETextConfig, seq_length: int) -> list[Problem]:
    found = common_rules(config) + check_gated_layers(config) + check_gated_experts(config)
    found += no_effect(
        "model", config, ["intermediate_size"], "layers without experts", {"model.family": config.family}
    )
    return with_head_rules(config, found)


KEYS = {
    **GATED_ATTENTION_KEYS,
    **GATED_EXPERT_KEYS,
    "intermediate_size": integer_or_null(),
    "num_key_value_heads": integer(2),
    "num_experts": integer(256),
    "num_experts_per_tok": integer(8),
}


def from_hf(found: ConfigJson) -> Qwen35MoETextConfig | None:
    fields = gated_attention_fields(found) | found.pick(*OF_EXPERTS) | router_fields(found)
    return None if found.odd else Qwen35MoETextConfig(**fields | {"intermediate_size": None})


def to_hf(config: Qwen35MoETextConfig) -> dict[str, Any]:
    own = {**router_to_hf(config), **{name: getattr(config, name) for name in OF_EXPERTS}}
    return {key: value for key, value in {**gated_attention_to_hf(config), **own}.items() if key != "intermediate_size"}


def shrink(config: Qwen35MoETextConfig, small: SmallSizes) -> Qwen35MoETextConfig:
    return replace(shrink_gated(config, small), intermediate_size=None)  # type: ignore[no-any-return]


FAMILY = Family(
    "qwen3_5_moe_text",
    Qwen35MoETextConfig,
    blocks,
    architecture="Qwen3_5MoeForCausalLM",
    tensors=NAMES,
    rules=rules,
    split_rules=split_gated,
    keys=KEYS,
    from_hf=from_hf,
    to_hf=to_hf,
    with_predictors=with_predictors,
    text_keys=text_keys,
    also=("qwen3_5_moe",),
    shrink=shrink,
    shrink_experts=shrink_gated_experts,
    least_layers=delta_least_layers,
)

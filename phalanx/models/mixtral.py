"""Mixtral: Llama's blocks with experts for MLPs. Jiang et al., "Mixtral of experts", 2024."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.models.config_json import ConfigJson, integer, integer_or_null, number
from phalanx.models.decoder_config import (
    DECODER_KEYS,
    DECODER_ONLY,
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
class MixtralConfig(ExpertsConfig):
    """Llama's fields; intermediate_size is the width of an expert."""

    family: Literal["mixtral"] = "mixtral"
    """Which model this section describes: mixtral."""
    num_local_experts: int = 8
    """Experts per layer."""
    rope_theta: float = 1000000.0
    """Base of the rotary embedding."""
    sliding_window: int | None = None
    """A token reads this many tokens: itself and those before it; unset: all before it."""

    def window(self, layer: int) -> int | None:
        return self.sliding_window

    @property
    def routed_experts(self) -> int:
        return self.num_local_experts


# functions that build blocks import torch themselves, because reading a config must not
def blocks(config: MixtralConfig, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.decoder import DecoderLayer, decoder_blocks

    return decoder_blocks(config, env, partial(DecoderLayer, make_mlp=experts))


def experts(config: MixtralConfig, env: Env, layer: int) -> MoE:
    from phalanx.models.decoder import balance_of, router_of
    from phalanx.nn.moe import ExpertNames, MoE

    at = f"model.layers.{layer}.block_sparse_moe"
    names = ExpertNames(f"{at}.gate.weight", *(f"{at}.experts.{{}}.{w}.weight" for w in ("w1", "w3", "w2")))
    return MoE(
        env,
        names,
        router_of(config),
        config.hidden_size,
        config.intermediate_size,
        config.initializer_range,
        balance_of(config),
        layer=layer,
    )


def rules(config: MixtralConfig, seq_length: int) -> list[Problem]:
    return with_head_rules(config, common_rules(config) + expert_rules(config, "num_local_experts"))


KEYS = {
    **DECODER_KEYS,
    **ROUTER_KEYS,
    "num_key_value_heads": integer(8),
    "head_dim": integer_or_null(),
    "max_position_embeddings": integer(131072),
    "rms_norm_eps": number(1e-5),
    "sliding_window": integer_or_null(),
    "num_experts_per_tok": integer(2),
    "num_local_experts": integer(8),
    "router_jitter_noise": number(0.0),
}


def from_hf(found: ConfigJson) -> MixtralConfig | None:
    same = decoder_fields(found, theta=1000000.0)
    own = {**found.pick("sliding_window", "num_local_experts"), **router_fields(found)}
    return None if found.odd else MixtralConfig(**same, **own)


def to_hf(config: MixtralConfig) -> dict[str, Any]:
    own = {"num_local_experts": config.num_local_experts, "router_jitter_noise": 0.0}
    return {**heads_to_hf(config), **router_to_hf(config), **own, "sliding_window": config.sliding_window}


FAMILY = Family(
    "mixtral",
    MixtralConfig,
    blocks,
    architecture="MixtralForCausalLM",
    rules=rules,
    keys=KEYS,
    other_names={"num_local_experts": "num_experts"},
    only={**DECODER_ONLY, "router_jitter_noise": (0.0,)},
    from_hf=from_hf,
    to_hf=to_hf,
    shrink_experts=shrink_local_experts,
)

"""GLM-4.5: grouped-query attention with half of each head rotated, DeepSeek-V3's experts and multi-token prediction.
GLM-4.5 Team, "GLM-4.5: Agentic, reasoning, and coding (ARC) foundation models", 2025."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.models.config_json import ConfigJson, integer, integer_or_null, number, switch
from phalanx.models.decoder_config import (
    DECODER_KEYS,
    PartialRotaryConfig,
    common_rules,
    decoder_fields,
    heads_to_hf,
    shrink_decoder,
    with_head_rules,
)
from phalanx.models.family import Family
from phalanx.models.grouped_experts import (
    GROUPED_KEYS,
    GROUPED_NAMES,
    GroupedExpertsConfig,
    check_grouped_experts,
    dense_if_all_are,
    grouped_fields,
    grouped_to_hf,
    make_depth,
    mlp,
    predictor_tensors,
    shrink_experts,
    small_dense_layers,
    split_rules,
    with_predictors,
)
from phalanx.models.model_config import SmallSizes
from phalanx.models.predictors import check_predictors, predictor_block

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.attention import Attention
    from phalanx.nn.env import Env


@dataclass(frozen=True, kw_only=True)
class Glm4MoEConfig(PartialRotaryConfig, GroupedExpertsConfig):
    """Llama's fields and those of DeepSeek-V3's experts; intermediate_size is the width of dense layers."""

    family: Literal["glm4_moe"] = "glm4_moe"
    """Which model this section describes: glm4_moe."""
    head_dim: int | None = 128
    """Width of a head; null: hidden_size / num_attention_heads."""
    partial_rotary_factor: float = 0.5
    """The fraction of each head that is rotated, its first features; the rest carries no position."""
    use_qk_norm: bool = False
    """Normalize every query and key head before it is rotated (GLM-4.5: yes; GLM-4.5-Air: no)."""
    n_routed_experts: int = 128
    """Experts per layer that tokens choose among."""
    moe_intermediate_size: int = 1408
    """Width of an expert."""
    n_group: int = 1
    """Experts are divided into this many equal groups, in order."""
    topk_group: int = 1
    """A token chooses its experts in this many groups: those with the highest sum of two scores."""
    routed_scaling_factor: float = 1.0
    """Factor of the weights of the chosen experts."""

    biases: ClassVar[tuple[str, ...]] = ("attention_bias",)


# functions that build blocks import torch themselves, because reading a config must not
def blocks(config: Glm4MoEConfig, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.decoder import DecoderLayer, decoder_blocks

    layer = partial(DecoderLayer, make_attention=make_attention, make_mlp=mlp)
    make_mtp = partial(predictor_block, partial(make_depth, make_attention)) if config.predict_layers else None
    return decoder_blocks(config, env, layer, make_mtp)


def make_attention(config: Glm4MoEConfig, env: Env, layer: int) -> Attention:
    from phalanx.models.decoder import attention, head_norm_attention

    make = head_norm_attention if config.use_qk_norm else attention
    return make(config, env, layer, bias="qkv" if config.attention_bias else "none")


def rules(config: Glm4MoEConfig, seq_length: int) -> list[Problem]:
    return with_head_rules(config, common_rules(config) + check_grouped_experts(config) + check_predictors(config))


KEYS = {
    **DECODER_KEYS,
    **GROUPED_KEYS,
    "num_key_value_heads": integer(8),
    "head_dim": integer_or_null(),
    "max_position_embeddings": integer(131072),
    "rms_norm_eps": number(1e-5),
    "attention_bias": switch(False),
    "use_qk_norm": switch(False),
    "moe_intermediate_size": integer(1408),
    "n_routed_experts": integer(128),
    "routed_scaling_factor": number(1.0),
    "n_group": integer(1),
    "topk_group": integer(1),
    "first_k_dense_replace": integer(1),
    "norm_topk_prob": switch(True),
}


def from_hf(found: ConfigJson) -> Glm4MoEConfig | None:
    same, own = decoder_fields(found, partial=0.5), grouped_fields(found)
    if found.odd:
        return None
    return dense_if_all_are(Glm4MoEConfig(**same, **own, **found.pick("attention_bias", "use_qk_norm")))


def to_hf(config: Glm4MoEConfig) -> dict[str, Any]:
    return {
        **heads_to_hf(config),
        **grouped_to_hf(config),
        "attention_bias": config.attention_bias,
        "use_qk_norm": config.use_qk_norm,
    }


def shrink(config: Glm4MoEConfig, small: SmallSizes) -> Glm4MoEConfig:
    return replace(shrink_decoder(config, small), first_k_dense_replace=small_dense_layers(config, small))


FAMILY = Family(
    "glm4_moe",
    Glm4MoEConfig,
    blocks,
    architecture="Glm4MoeForCausalLM",
    tensors=predictor_tensors,
    rules=rules,
    split_rules=split_rules,
    keys=KEYS,
    other_names=GROUPED_NAMES,
    from_hf=from_hf,
    to_hf=to_hf,
    with_predictors=with_predictors,
    shrink=shrink,
    shrink_experts=shrink_experts,
)

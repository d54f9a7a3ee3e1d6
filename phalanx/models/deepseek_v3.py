"""DeepSeek-V3: Llama's blocks with latent attention and experts. Experts are chosen within groups by sigmoid scores and
a bias, in addition to shared ones.

DeepSeek-AI, "DeepSeek-V3 technical report", 2024. The first `first_k_dense_replace` layers have a dense MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, multiples, no_effect, problem
from phalanx.models.config_json import (
    NONE,
    ConfigJson,
    HfKey,
    integer,
    integer_or_null,
    number_or_null,
    other_values,
    switch,
)
from phalanx.models.decoder_config import (
    DECODER_KEYS,
    common_rules,
    decoder_to_hf,
    rope_of,
    sizes_from_hf,
    small_positions,
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
from phalanx.models.rope import small_scaling, with_factors

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env
    from phalanx.nn.mla import LatentAttention


@dataclass(frozen=True, kw_only=True)
class LatentConfig(GroupedExpertsConfig):
    """Llama's fields without num_key_value_heads and head_dim, because heads are computed from latents.
    intermediate_size is the width of dense layers."""

    max_position_embeddings: int = 4096
    """Longest sequence the model is meant for."""
    rms_norm_eps: float = 1e-6
    """Epsilon of RMSNorm (of the latents' norms it is always 1e-6)."""
    q_lora_rank: int | None = 1536
    """Width of the latent from which queries are computed; null: they are computed from the layer's input."""
    kv_lora_rank: int = 512
    """Width of the latent from which keys and values are computed."""
    qk_nope_head_dim: int = 128
    """Features of a query or key head that are not rotated."""
    qk_rope_head_dim: int = 64
    """Features of a query or key head that are rotated; all heads share the key's."""
    v_head_dim: int = 128
    """Width of a value head."""
    rope_interleave: bool = True
    """Whether the weights pair rotated features 2i and 2i + 1 (as published); false: i and i + half, like Llama's."""

    @property
    def kv_heads(self) -> int:
        return self.num_attention_heads

    @property
    def head_widths(self) -> tuple[int, int]:
        return self.qk_nope_head_dim + self.qk_rope_head_dim, self.v_head_dim

    @property
    def rotated_features(self) -> int:
        return self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(LatentConfig):
    family: Literal["deepseek_v3"] = "deepseek_v3"
    """Which model this section describes: deepseek_v3."""


# functions that build blocks import torch themselves, because reading a config must not
def blocks(config: LatentConfig, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.decoder import DecoderLayer, decoder_blocks

    layer = partial(DecoderLayer, make_attention=attention, make_mlp=mlp)
    make_mtp = partial(predictor_block, partial(make_depth, attention)) if config.predict_layers else None
    return decoder_blocks(config, env, layer, make_mtp)


def attention(config: LatentConfig, env: Env, layer: int) -> LatentAttention:
    from phalanx.nn.mla import LatentAttention, LatentSizes
    from phalanx.ops.attention.kind import AttentionKind
    from phalanx.ops.dense.rope_scaling import Rotation

    c = config
    sizes = LatentSizes(c.q_lora_rank, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim)
    rotation = Rotation(c.qk_rope_head_dim, c.rope_theta, c.rope_scaling, c.max_position_embeddings)
    return LatentAttention(
        env,
        f"{c.base}layers.{layer}.self_attn",
        c.hidden_size,
        c.num_attention_heads,
        sizes,
        c.initializer_range,
        rotation,
        AttentionKind(scale=score_scale(c)),
        c.rope_interleave,
    )


def score_scale(config: LatentConfig) -> float:
    """1 / sqrt(width of a query), times the square of YaRN's factor if `mscale_all_dim` applies it there rather than to
    cos and sin."""
    from phalanx.ops.dense.rope_scaling import yarn_mscale

    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    scaling = config.rope_scaling
    if scaling is None or not scaling.mscale_all_dim or scaling.factor is None:
        return scale
    return scale * yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2


def rules(config: LatentConfig, seq_length: int) -> list[Problem]:
    return common_rules(config) + check_grouped_experts(config) + check_latent(config)


def check_latent(config: LatentConfig) -> list[Problem]:
    found = at_least("model", config, 1, "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
    dim = config.qk_rope_head_dim
    if dim < 2 or dim % 2:
        rule = "must be even and >= 2 (rotary embedding turns pairs)"
        found.append(problem("model", config, "qk_rope_head_dim", rule, {}, multiples(dim, 2) if dim > 2 else (2,)))
    found += check_predictors(config)
    return found + no_effect(
        "model",
        config,
        ["num_key_value_heads", "head_dim"],
        f"heads of their own ({config.family} makes them from latents)",
        {},
    )


KEYS = {
    **DECODER_KEYS,
    "num_key_value_heads": integer_or_null(128),
    "max_position_embeddings": integer(4096),
    "attention_bias": switch(False),
    "attention_dropout": number_or_null(0.0),
    **GROUPED_KEYS,
    "kv_lora_rank": integer(512),
    "q_lora_rank": integer_or_null(1536),
    "qk_rope_head_dim": integer(64),
    "v_head_dim": integer(128),
    "qk_nope_head_dim": integer(128),
    "rope_interleave": HfKey((bool, NONE), True),
}
LATENT_FIELDS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_interleave",
)


def from_hf(found: ConfigJson) -> Any:
    config, v, odd = found.stated, found.values, found.odd
    heads, rotated = v["num_attention_heads"], v["qk_rope_head_dim"]
    kv_heads = heads if v["num_key_value_heads"] is None else v["num_key_value_heads"]
    if kv_heads < 1 or heads // kv_heads != 1:
        odd.append(f"num_key_value_heads={kv_heads!r} (supported: {heads}, as many as query heads)")
    if config.get("head_dim", rotated) != rotated:
        odd.append(f"head_dim={config['head_dim']!r} (supported: {rotated}, as qk_rope_head_dim, or none)")
    same = sizes_from_hf(found, rope_of(found, 10000.0, rotated, scores=True))
    odd += other_values(config, {"attention_bias": (False,)})
    own = found.pick(*LATENT_FIELDS) | {"rope_interleave": bool(v["rope_interleave"])} | grouped_fields(found)
    return None if odd else dense_if_all_are(found.config(**same, **own))


def to_hf(config: LatentConfig) -> dict[str, Any]:
    return {
        **decoder_to_hf(config),
        **{name: getattr(config, name) for name in LATENT_FIELDS},
        **grouped_to_hf(config),
        "attention_bias": False,
    }


def fill(model: dict[str, Any]) -> dict[str, Any]:
    """All fields are already explicit."""
    return model


def shrink(config: LatentConfig, small: SmallSizes) -> LatentConfig:
    """Latents and all three kinds of head features stay; so do layers with and without a dense MLP."""
    scaling = small_scaling(config.rope_scaling, small.seq_length, small.given_length)
    return replace(
        config,
        vocab_size=small.vocab_size,
        hidden_size=small.hidden_size,
        intermediate_size=small.intermediate_size,
        num_attention_heads=small.heads,
        num_hidden_layers=small.layers,
        first_k_dense_replace=small_dense_layers(config, small),
        q_lora_rank=6 if config.q_lora_rank else None,
        kv_lora_rank=5,
        qk_nope_head_dim=3,
        qk_rope_head_dim=4,
        v_head_dim=5,
        rope_scaling=with_factors(scaling, 2),
        **small_positions(config, small),
    )


FAMILY = Family(
    "deepseek_v3",
    DeepseekV3Config,
    blocks,
    architecture="DeepseekV3ForCausalLM",
    tensors=predictor_tensors,
    rules=rules,
    split_rules=split_rules,
    keys=KEYS,
    other_names=GROUPED_NAMES,
    from_hf=from_hf,
    to_hf=to_hf,
    fill=fill,
    with_predictors=with_predictors,
    shrink=shrink,
    shrink_experts=shrink_experts,
)

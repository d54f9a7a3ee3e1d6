"""Qwen3-Next: linear attention by the gated delta rule in three layers of four and gated attention in the fourth, with
many narrow experts beside a gated shared one. Qwen Team, "Qwen3-Next", 2025."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, divisors
from phalanx.models.config_json import LIST_OR_NULL, ConfigJson, integer, switch
from phalanx.models.decoder_config import (
    DECODER_KEYS,
    PartialRotaryConfig,
    common_rules,
    decoder_fields,
    decoder_tensors,
    heads_to_hf,
    shrink_decoder,
    with_head_rules,
)
from phalanx.models.delta_layers import (
    DELTA_KEYS,
    DeltaLayersConfig,
    check_delta_layers,
    delta_fields,
    delta_least_layers,
    delta_to_hf,
    gated_delta,
    one_after_the_other,
    small_delta,
    split_delta_heads,
)
from phalanx.models.experts import ROUTER_KEYS, ExpertsConfig, expert_rules, router_fields, router_to_hf
from phalanx.models.family import Family
from phalanx.models.model_config import SmallExperts, SmallSizes
from phalanx.models.qwen3_moe import SparseStepConfig, check_layers
from phalanx.models.qwen3_moe import least_layers as layers_with_experts

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env
    from phalanx.nn.mlp import SwiGLU
    from phalanx.nn.module import Module
    from phalanx.nn.moe import MoE


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


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(PartialRotaryConfig, SparseStepConfig, GatedExpertsConfig, DeltaLayersConfig):
    """Qwen3's fields, those of linear attention and of experts; intermediate_size is the width of dense layers."""

    family: Literal["qwen3_next"] = "qwen3_next"
    """Which model this section describes: qwen3_next."""
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


# functions that build blocks import torch themselves, because reading a config must not
def blocks(config: Qwen3NextConfig, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.decoder import DecoderLayer, decoder_blocks

    return decoder_blocks(config, env, partial(DecoderLayer, make_attention=mixer, make_mlp=make_mlp))


def mixer(config: Any, env: Env, layer: int) -> Module:
    """Gated attention, or linear attention whose projections two tensors hold, key head after key head."""
    from phalanx.models.decoder import head_norm_attention
    from phalanx.nn.gated_delta import DeltaRows, HeadRows

    c = config
    if c.types[layer] == "full_attention":
        return head_norm_attention(c, env, layer, gated=True)
    at, keys, key, value = f"{c.base}layers.{layer}.linear_attn", *sizes(c)
    group = c.linear_num_value_heads // keys
    size, step = keys * (2 * key + 2 * group * value), 2 * key + 2 * group * value
    projected, gates = f"{at}.in_proj_qkvz.weight", f"{at}.in_proj_ba.weight"
    rows = DeltaRows(
        HeadRows(projected, size, 0, key, 1, step),
        HeadRows(projected, size, key, key, 1, step),
        HeadRows(projected, size, 2 * key, value, group, step),
        one_after_the_other(c, f"{at}.conv1d.weight"),
        HeadRows(gates, 2 * keys * group, 0, 1, group, 2 * group),
        HeadRows(gates, 2 * keys * group, group, 1, group, 2 * group),
        HeadRows(projected, size, 2 * key + group * value, value, group, step),
    )
    return gated_delta(c, env, at, rows)


def sizes(config: DeltaLayersConfig) -> tuple[int, int, int]:
    """Heads of keys, and the widths of a key and of a value."""
    return config.linear_num_key_heads, config.linear_key_head_dim, config.linear_value_head_dim


def make_mlp(config: Qwen3NextConfig, env: Env, layer: int) -> MoE | SwiGLU:
    from phalanx.models.decoder import dense_mlp

    return (
        experts(config, env, layer, config.norm_topk_prob)
        if config.has_experts(layer)
        else dense_mlp(config, env, layer)
    )


def experts(config: GatedExpertsConfig, env: Env, layer: int, renormalize: bool) -> MoE:
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


def rules(config: Qwen3NextConfig, seq_length: int) -> list[Problem]:
    found = common_rules(config) + check_delta_layers(config) + check_experts(config) + check_layers(config)
    return with_head_rules(config, found)


def check_experts(config: GatedExpertsConfig) -> list[Problem]:
    found = at_least("model", config, 1, "moe_intermediate_size", "shared_expert_intermediate_size")
    return expert_rules(config, "num_experts") + found


def split_rules(config: Any, tp: int) -> list[Problem]:
    found, width = split_delta_heads(config, tp), config.shared_expert_intermediate_size
    if width < tp:
        because, valid = {"model.shared_expert_intermediate_size": width}, divisors(tp, config.num_attention_heads)
        rule = "must be <= shared_expert_intermediate_size"
        found.append(Problem("layout.tp", tp, rule, because, valid))
    return found


GATED_EXPERT_KEYS = {
    **ROUTER_KEYS,
    "num_experts": integer(512),
    "num_experts_per_tok": integer(10),
    "moe_intermediate_size": integer(512),
    "shared_expert_intermediate_size": integer(512),
}
KEYS = {
    **DECODER_KEYS,
    **DELTA_KEYS,
    **GATED_EXPERT_KEYS,
    "num_key_value_heads": integer(2),
    "head_dim": integer(256),
    "max_position_embeddings": integer(32768),
    "attention_bias": switch(False),
    "decoder_sparse_step": integer(1),
    "norm_topk_prob": switch(True),
    "mlp_only_layers": LIST_OR_NULL,
}
OF_EXPERTS = ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size")


def from_hf(found: ConfigJson) -> Qwen3NextConfig | None:
    same, own, v = decoder_fields(found, partial=0.25), delta_fields(found), found.values
    own |= found.pick("attention_bias", *OF_EXPERTS, "norm_topk_prob", "decoder_sparse_step") | router_fields(found)
    # other numbers refer to no layer
    dense = tuple(i for i in v["mlp_only_layers"] or () if i in range(v["num_hidden_layers"]))
    return None if found.odd else Qwen3NextConfig(**same, **own, mlp_only_layers=dense)


def to_hf(config: Qwen3NextConfig) -> dict[str, Any]:
    more = (*OF_EXPERTS, "attention_bias", "norm_topk_prob", "decoder_sparse_step")
    return {
        **heads_to_hf(config),
        **delta_to_hf(config),
        **router_to_hf(config),
        **{name: getattr(config, name) for name in more},
        "mlp_only_layers": list(config.mlp_only_layers),
    }


def shrink(config: Qwen3NextConfig, small: SmallSizes) -> Qwen3NextConfig:
    return replace(shrink_decoder(config, small), **small_delta(config, small))


def shrink_experts(config: Qwen3NextConfig, small: SmallExperts) -> Qwen3NextConfig:
    """Dense layers stay dense as long as one layer has experts: if stages are given, there may be too few."""
    return replace(
        config,
        num_experts=small.count,
        moe_intermediate_size=small.width,
        shared_expert_intermediate_size=small.width,
        num_experts_per_tok=small.chosen,
        mlp_only_layers=tuple(i for i in config.mlp_only_layers if i < config.num_hidden_layers - 1),
        decoder_sparse_step=min(config.decoder_sparse_step, config.num_hidden_layers),
    )


def least_layers(config: Qwen3NextConfig) -> int:
    """Layers of both kinds, and one with experts."""
    return max(delta_least_layers(config), layers_with_experts(config))


FAMILY = Family(
    "qwen3_next",
    Qwen3NextConfig,
    blocks,
    architecture="Qwen3NextForCausalLM",
    # published folders have a module of multi-token prediction, which transformers leaves out too
    tensors=replace(decoder_tensors, also=("model.layers.0.linear_attn.dt_bias",), others=r"mtp\..*"),
    rules=rules,
    split_rules=split_rules,
    keys=KEYS,
    from_hf=from_hf,
    to_hf=to_hf,
    shrink=shrink,
    shrink_experts=shrink_experts,
    least_layers=least_layers,
)

"""Qwen3-Next: linear attention by the gated delta rule in three layers of four and gated attention in the fourth, with
many narrow experts beside a gated shared one. Qwen Team, "Qwen3-Next", 2025."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.models.config_json import LIST_OR_NULL, ConfigJson, integer, switch
from phalanx.models.decoder_config import common_rules, with_head_rules
from phalanx.models.delta_layers import delta_least_layers, gated_delta, one_after_the_other
from phalanx.models.experts import router_fields, router_to_hf
from phalanx.models.family import Family
from phalanx.models.gated_layers import (
    GATED_ATTENTION_KEYS,
    GATED_EXPERT_KEYS,
    OF_EXPERTS,
    PREDICTORS,
    GatedAttentionConfig,
    GatedExpertsConfig,
    check_gated_experts,
    check_gated_layers,
    gated_attention,
    gated_attention_fields,
    gated_attention_to_hf,
    gated_blocks,
    gated_experts,
    gated_tensors,
    shrink_gated,
    shrink_gated_experts,
    split_gated,
    with_predictors,
)
from phalanx.models.model_config import SmallExperts
from phalanx.models.qwen3_moe import SparseStepConfig, check_layers
from phalanx.models.qwen3_moe import least_layers as layers_with_experts

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env
    from phalanx.nn.mlp import SwiGLU
    from phalanx.nn.module import Module
    from phalanx.nn.moe import MoE


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(GatedAttentionConfig, SparseStepConfig, GatedExpertsConfig):
    """Qwen3's fields, those of linear attention and of experts; intermediate_size is the width of dense layers."""

    family: Literal["qwen3_next"] = "qwen3_next"
    """Which model this section describes: qwen3_next."""

    def has_experts(self, layer: int) -> bool:
        """Modules of multi-token prediction count their layers from 0, as vLLM reads it."""
        return super().has_experts(layer if layer < self.num_hidden_layers else layer - self.num_hidden_layers)


# functions that build blocks import torch themselves, because reading a config must not
def blocks(config: Qwen3NextConfig, env: Env) -> Sequence[BlockMaker]:
    return gated_blocks(config, env, mixer, make_mlp)


def mixer(config: Qwen3NextConfig, env: Env, layer: int) -> Module:
    """Gated attention, or linear attention whose projections two tensors hold, key head after key head: its query, its
    key, and the values and gates of its group; beta and then decays of its group."""
    from phalanx.nn.gated_delta import DeltaRows, RowsOfHeads

    c, at = config, f"{config.layer_name(layer)}.linear_attn"
    if c.kind(layer) == "full_attention":
        return gated_attention(c, env, layer)
    keys, key, value = c.linear_num_key_heads, c.linear_key_head_dim, c.linear_value_head_dim
    group = c.linear_num_value_heads // keys
    step = 2 * key + 2 * group * value
    projected, gates = (f"{at}.in_proj_qkvz.weight", keys * step), (f"{at}.in_proj_ba.weight", keys * 2 * group)
    rows = DeltaRows(
        RowsOfHeads(*projected, 0, key, 1, step),
        RowsOfHeads(*projected, key, key, 1, step),
        RowsOfHeads(*projected, 2 * key, value, group, step),
        one_after_the_other(c, f"{at}.conv1d.weight"),
        RowsOfHeads(*gates, 0, 1, group, 2 * group),
        RowsOfHeads(*gates, group, 1, group, 2 * group),
        RowsOfHeads(*projected, 2 * key + group * value, value, group, step),
    )
    return gated_delta(c, env, at, rows)


def make_mlp(config: Qwen3NextConfig, env: Env, layer: int) -> MoE | SwiGLU:
    from phalanx.models.decoder import dense_mlp

    if not config.has_experts(layer):
        return dense_mlp(config, env, layer)
    return gated_experts(config, env, layer, config.norm_topk_prob)


def rules(config: Qwen3NextConfig, seq_length: int) -> list[Problem]:
    found = common_rules(config) + check_gated_layers(config) + check_gated_experts(config) + check_layers(config)
    return with_head_rules(config, found)


KEYS = {
    **GATED_ATTENTION_KEYS,
    **GATED_EXPERT_KEYS,
    "num_key_value_heads": integer(2),
    "decoder_sparse_step": integer(1),
    "norm_topk_prob": switch(True),
    "mlp_only_layers": LIST_OR_NULL,
}
OTHER_NAMES = {PREDICTORS: "num_nextn_predict_layers"}  # as vLLM reads it: published files do not mention the module
SAME = (*OF_EXPERTS, "norm_topk_prob", "decoder_sparse_step")


def from_hf(found: ConfigJson) -> Qwen3NextConfig | None:
    fields, v = gated_attention_fields(found) | found.pick(*SAME) | router_fields(found), found.values
    # other numbers refer to no layer
    dense = tuple(i for i in v["mlp_only_layers"] or () if i in range(v["num_hidden_layers"]))
    return None if found.odd else Qwen3NextConfig(**fields, mlp_only_layers=dense)


def to_hf(config: Qwen3NextConfig) -> dict[str, Any]:
    same = gated_attention_to_hf(config)
    return {
        **{OTHER_NAMES.get(name, name): value for name, value in same.items()},
        **router_to_hf(config),
        **{name: getattr(config, name) for name in SAME},
        "mlp_only_layers": list(config.mlp_only_layers),
    }


def shrink_experts(config: Qwen3NextConfig, small: SmallExperts) -> Qwen3NextConfig:
    """Dense layers stay dense as long as one layer has experts: if stages are given, there may be too few."""
    dense = tuple(i for i in config.mlp_only_layers if i < config.num_hidden_layers - 1)
    step = min(config.decoder_sparse_step, config.num_hidden_layers)
    made: Qwen3NextConfig = replace(
        shrink_gated_experts(config, small), mlp_only_layers=dense, decoder_sparse_step=step
    )
    return made


def least_layers(config: Qwen3NextConfig) -> int:
    """Layers of both kinds, and one with experts."""
    return max(delta_least_layers(config), layers_with_experts(config))


FAMILY = Family(
    "qwen3_next",
    Qwen3NextConfig,
    blocks,
    architecture="Qwen3NextForCausalLM",
    tensors=replace(gated_tensors, also=("model.layers.0.linear_attn.in_proj_qkvz.weight",)),
    rules=rules,
    split_rules=split_gated,
    keys=KEYS,
    other_names=OTHER_NAMES,
    from_hf=from_hf,
    to_hf=to_hf,
    with_predictors=with_predictors,
    shrink=shrink_gated,
    shrink_experts=shrink_experts,
    least_layers=least_layers,
)

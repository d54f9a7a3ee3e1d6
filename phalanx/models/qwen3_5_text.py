"""Qwen3.5, dense: Qwen3-Next's layers with MLPs in the place of experts, and the projections of linear attention in
tensors of their own. Qwen Team, "Qwen3.5", 2026.

Published folders also hold a vision tower (models/qwen3_5.py). With model.family=qwen3_5_text their text is trained, as
transformers' Qwen3_5ForCausalLM has it, and their module of multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError, Problem
from phalanx.models.config_json import ConfigJson
from phalanx.models.decoder_config import common_rules, with_head_rules
from phalanx.models.delta_layers import (
    delta_least_layers,
    gated_delta,
    one_after_the_other,
    split_delta_heads,
)
from phalanx.models.family import Family
from phalanx.models.gated_layers import (
    GATED_ATTENTION_KEYS,
    GatedAttentionConfig,
    check_gated_layers,
    gated_attention,
    gated_attention_fields,
    gated_attention_to_hf,
    gated_blocks,
    gated_tensors,
    shrink_gated,
    with_predictors,
)

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env
    from phalanx.nn.module import Module


@dataclass(frozen=True, kw_only=True)
class Qwen35TextConfig(GatedAttentionConfig):
    family: Literal["qwen3_5_text"] = "qwen3_5_text"
    """Which model this section describes: qwen3_5_text."""


# functions that build blocks import torch themselves, because reading a config must not
def blocks(config: Qwen35TextConfig, env: Env) -> Sequence[BlockMaker]:
    return gated_blocks(config, env, mixer)


def mixer(config: GatedAttentionConfig, env: Env, layer: int) -> Module:
    """Gated attention, or linear attention with queries, keys and values in one tensor."""
    from phalanx.nn.gated_delta import DeltaRows, RowsOfHeads

    c, at = config, f"{config.layer_name(layer)}.linear_attn"
    if c.kind(layer) == "full_attention":
        return gated_attention(c, env, layer)
    heads, value = c.linear_num_value_heads, c.linear_value_head_dim
    rows = DeltaRows(
        *one_after_the_other(c, f"{at}.in_proj_qkv.weight"),
        one_after_the_other(c, f"{at}.conv1d.weight"),
        RowsOfHeads.whole(f"{at}.in_proj_b.weight", heads, 1),
        RowsOfHeads.whole(f"{at}.in_proj_a.weight", heads, 1),
        RowsOfHeads.whole(f"{at}.in_proj_z.weight", heads, value),
    )
    return gated_delta(c, env, at, rows)


def rules(config: Qwen35TextConfig, seq_length: int) -> list[Problem]:
    return with_head_rules(config, common_rules(config) + check_gated_layers(config))


def text_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Those of text_config in a folder with a vision tower; whether head and embedding are one is said beside it."""
    if "text_config" not in config:
        return config
    text = config["text_config"]
    if not isinstance(text, dict):
        raise CheckpointError(f"text_config={text!r} (it must be an object)")
    beside = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}
    return {**text, **beside}


def from_hf(found: ConfigJson) -> Qwen35TextConfig | None:
    fields = gated_attention_fields(found)
    return None if found.odd else Qwen35TextConfig(**fields)


NAMES = replace(
    gated_tensors,
    also=("model.layers.0.linear_attn.in_proj_qkv.weight",),
    others=r"(mtp|visual|model\.visual)\..*",
    renames={"model.language_model.": "model."},
)
FAMILY = Family(
    "qwen3_5_text",
    Qwen35TextConfig,
    blocks,
    architecture="Qwen3_5ForCausalLM",
    tensors=NAMES,
    rules=rules,
    split_rules=split_delta_heads,
    keys=GATED_ATTENTION_KEYS,
    from_hf=from_hf,
    to_hf=gated_attention_to_hf,
    with_predictors=with_predictors,
    text_keys=text_keys,
    also=("qwen3_5",),
    shrink=shrink_gated,
    least_layers=delta_least_layers,
)

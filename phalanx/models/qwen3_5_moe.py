"""Qwen3.5 with experts and images: the tower of models/qwen3_5.py before the text of models/qwen3_5_moe_text.py. Qwen
Team, "Qwen3.5", 2026."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.models import qwen3_5_moe_text
from phalanx.models.config_json import ConfigJson
from phalanx.models.delta_layers import delta_least_layers
from phalanx.models.family import Family
from phalanx.models.gated_layers import shrink_gated_experts, split_gated
from phalanx.models.model_config import SmallSizes
from phalanx.models.qwen3_5 import (
    KEYS,
    NAMES,
    PicturedTextConfig,
    image_rules,
    pictured_from_hf,
    pictured_to_hf,
    shrink_pictured,
)
from phalanx.models.qwen3_5_text import mixer

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env


@dataclass(frozen=True, kw_only=True)
class Qwen35MoEConfig(qwen3_5_moe_text.Qwen35MoETextConfig, PicturedTextConfig):
    """The fields of the text, and of its images."""

    family: Literal["qwen3_5_moe"] = "qwen3_5_moe"  # type: ignore[assignment]
    """Which model this section describes: qwen3_5_moe."""


# functions that build blocks import torch themselves, because reading a config must not
def blocks(config: Qwen35MoEConfig, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.decoder import DecoderLayer
    from phalanx.models.qwen_vl_blocks import learned_tower_blocks

    def layer(config: Qwen35MoEConfig, env: Env, number: int) -> DecoderLayer:
        return DecoderLayer(config, env, number, make_attention=mixer, make_mlp=qwen3_5_moe_text.make_mlp)

    return learned_tower_blocks(config, env, layer)


def rules(config: Qwen35MoEConfig, seq_length: int) -> list[Problem]:
    return qwen3_5_moe_text.rules(config, seq_length) + image_rules(config)


def from_hf(found: ConfigJson) -> Qwen35MoEConfig | None:
    made: Qwen35MoEConfig | None = pictured_from_hf(found, qwen3_5_moe_text.FAMILY)
    return made


def to_hf(config: Qwen35MoEConfig) -> dict[str, Any]:
    return pictured_to_hf(config, qwen3_5_moe_text.FAMILY)


def shrink(config: Qwen35MoEConfig, small: SmallSizes) -> Qwen35MoEConfig:
    made: Qwen35MoEConfig = replace(shrink_pictured(config, small), intermediate_size=None)
    return made


FAMILY = Family(
    "qwen3_5_moe",
    Qwen35MoEConfig,
    blocks,
    architecture="Qwen3_5MoeForConditionalGeneration",
    tensors=NAMES,
    rules=rules,
    split_rules=split_gated,
    keys=KEYS,
    only={},
    from_hf=from_hf,
    to_hf=to_hf,
    shrink=shrink,
    shrink_experts=shrink_gated_experts,
    least_layers=delta_least_layers,
)

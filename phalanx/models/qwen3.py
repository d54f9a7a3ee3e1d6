"""Qwen3, dense: Llama's blocks with an RMSNorm on every query and key head. Yang et al., "Qwen3 technical report",
2025."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.base.dataclass import dataclass
from phalanx.models.config_json import ConfigJson, integer, integer_or_null, switch
from phalanx.models.decoder_config import (
    DECODER_KEYS,
    UPPER_WINDOW_KEYS,
    UpperWindowConfig,
    decoder_fields,
    layer_types_of,
    upper_window_fields,
    upper_window_to_hf,
)
from phalanx.models.family import Family

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(UpperWindowConfig):
    """Llama's fields. Queries and keys are normalized head by head before they are rotated."""

    family: Literal["qwen3"] = "qwen3"
    """Which model this section describes: qwen3."""
    head_dim: int | None = 128
    """Width of a head; null: hidden_size / num_attention_heads."""
    rms_norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    rope_theta: float = 1000000.0
    """Base of the rotary embedding."""

    biases: ClassVar[tuple[str, ...]] = ("attention_bias",)


def blocks(config: Qwen3Config, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.decoder import DecoderLayer, decoder_blocks, head_norm_attention  # torch: not to read a config

    return decoder_blocks(config, env, partial(DecoderLayer, make_attention=head_norm_attention))


KEYS = {
    **DECODER_KEYS,
    **UPPER_WINDOW_KEYS,
    "num_key_value_heads": integer_or_null(32),
    "head_dim": integer(128),
    "max_position_embeddings": integer(32768),
    "attention_bias": switch(False),
}


def from_hf(found: ConfigJson) -> Qwen3Config | None:
    types = layer_types_of(found)
    same, own = decoder_fields(found), upper_window_fields(found, types)
    return None if found.odd else Qwen3Config(**same, **own, **found.pick("attention_bias"))


def to_hf(config: Qwen3Config) -> dict[str, Any]:
    return {**upper_window_to_hf(config), "attention_bias": config.attention_bias}


FAMILY = Family("qwen3", Qwen3Config, blocks, architecture="Qwen3ForCausalLM", keys=KEYS, from_hf=from_hf, to_hf=to_hf)

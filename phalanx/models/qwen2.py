"""Qwen2 and Qwen2.5: Llama's blocks with biases in q, k and v; upper layers may use a window. Yang et al., "Qwen2
technical report", 2024."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from phalanx.base.dataclass import dataclass
from phalanx.models.config_json import ConfigJson, integer, integer_or_null
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
class Qwen2Config(UpperWindowConfig):
    """Llama's fields. Queries, keys and values have biases; upper layers may use a window."""

    family: Literal["qwen2"] = "qwen2"
    """Which model this section describes: qwen2."""
    rms_norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""


def blocks(config: Qwen2Config, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.decoder import DecoderLayer, attention, decoder_blocks  # torch: not for reading a config

    return decoder_blocks(config, env, partial(DecoderLayer, make_attention=partial(attention, bias="qkv")))


KEYS = {
    **DECODER_KEYS,
    **UPPER_WINDOW_KEYS,
    "num_key_value_heads": integer_or_null(32),
    "head_dim": integer_or_null(),
    "max_position_embeddings": integer(32768),
}


def from_hf(found: ConfigJson) -> Qwen2Config | None:
    types = layer_types_of(found)
    same, own = decoder_fields(found), upper_window_fields(found, types)
    return None if found.odd else Qwen2Config(**same, **own)


FAMILY = Family(
    "qwen2",
    Qwen2Config,
    blocks,
    architecture="Qwen2ForCausalLM",
    keys=KEYS,
    from_hf=from_hf,
    to_hf=upper_window_to_hf,
)

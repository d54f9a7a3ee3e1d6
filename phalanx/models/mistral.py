"""Mistral: Llama's blocks with attention in a sliding window, in all layers or in some. Jiang et al., "Mistral 7B",
2023."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.models.config_json import LIST_OR_NULL, ConfigJson, integer, integer_or_null
from phalanx.models.decoder_config import (
    DECODER_KEYS,
    DecoderConfig,
    LayerType,
    check_types,
    decoder_fields,
    heads_to_hf,
    layer_types_of,
    types_with_window,
)
from phalanx.models.family import Family

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env


@dataclass(frozen=True, kw_only=True)
class MistralConfig(DecoderConfig):
    """Llama's fields and a window."""

    family: Literal["mistral"] = "mistral"
    """Which model this section describes: mistral."""
    sliding_window: int | None = None
    """A token reads this many tokens: itself and those before it; unset: all before it."""
    layer_types: tuple[LayerType, ...] | None = None
    """Whether each layer has the window; unset: every layer."""

    def window(self, layer: int) -> int | None:
        return (
            self.sliding_window if self.layer_types is None or self.layer_types[layer] == "sliding_attention" else None
        )


def blocks(config: MistralConfig, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.decoder import decoder_blocks  # imports torch, which reading a config need not

    return decoder_blocks(config, env)


KEYS = {
    **DECODER_KEYS,
    "num_key_value_heads": integer(8),
    "head_dim": integer_or_null(),
    "max_position_embeddings": integer(131072),
    "sliding_window": integer_or_null(4096),
    "layer_types": LIST_OR_NULL,
}


def from_hf(found: ConfigJson) -> MistralConfig | None:
    types = layer_types_of(found)
    same, own = decoder_fields(found), window_fields(found, types)
    return None if found.odd else MistralConfig(**same, **own)


def window_fields(found: ConfigJson, types: list[str] | None) -> dict[str, Any]:
    """The window, and which layers have it unless all do."""
    window = found.values["sliding_window"]
    if types is None:
        types = types_with_window(found.values["num_hidden_layers"], window)
    slides = check_types(found, types, window)
    if not any(slides):
        return {"sliding_window": None}
    return {"sliding_window": window} if all(slides) else {"sliding_window": window, "layer_types": tuple(types)}


def to_hf(config: MistralConfig) -> dict[str, Any]:
    """With windows in only some layers, it is what transformers calls Ministral."""
    own = {**heads_to_hf(config), "sliding_window": config.sliding_window}
    if config.layer_types is None:
        return own
    kind = {"model_type": "ministral", "architectures": ["MinistralForCausalLM"]}
    return {**own, **kind, "layer_types": list(config.layer_types)}


FAMILY = Family(
    "mistral",
    MistralConfig,
    blocks,
    architecture="MistralForCausalLM",
    keys=KEYS,
    from_hf=from_hf,
    to_hf=to_hf,
    also=("ministral",),
)

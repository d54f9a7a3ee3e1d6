"""SmolLM3: Llama's blocks, of which every fourth layer has no rotary embedding. Bakouch et al., "SmolLM3", 2025; the
layers without it: Yang et al., "Rope to Nope and back again", 2025."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import no_effect
from phalanx.models.config_json import LIST_OR_NULL, ConfigJson, integer, integer_or_null, number_or_null, switch
from phalanx.models.decoder_config import (
    DECODER_KEYS,
    LAYER_TYPES,
    LayerType,
    check_types,
    common_rules,
    decoder_fields,
    heads_to_hf,
    layer_types_of,
    shrink_decoder,
    types_to_hf,
    with_head_rules,
)
from phalanx.models.family import Family
from phalanx.models.model_config import SmallSizes
from phalanx.models.rotary_layers import (
    ROTARY_LAYER_KEYS,
    RotaryLayersConfig,
    by_interval,
    check_rotary_layers,
    rotary_layers_from_hf,
    rotary_layers_to_hf,
    small_rotary_layers,
)

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(RotaryLayersConfig):
    """Llama's fields, and which layers have a rotary embedding and a window."""

    family: Literal["smollm3"] = "smollm3"
    """Which model this section describes: smollm3."""
    max_position_embeddings: int = 32768
    """Longest sequence the model is meant for."""
    rms_norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    rope_theta: float = 2000000.0
    """Base of the rotary embedding."""
    tie_word_embeddings: bool = True
    """Use the input embedding as output head."""
    sliding_window: int | None = None
    """In a layer with a window, a token reads this many tokens: itself and those before it; unset: all before it in
    every layer."""
    layer_types: tuple[LayerType, ...] | None = None
    """Whether each layer has the window; unset: those without a rotary embedding."""

    biases: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")

    def window(self, layer: int) -> int | None:
        given = self.layer_types
        slides = not self.rotates(layer) if given is None else given[layer] == "sliding_attention"
        return self.sliding_window if slides else None


def blocks(config: SmolLM3Config, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.decoder import decoder_blocks  # imports torch, which reading a config need not

    return decoder_blocks(config, env)


def rules(config: SmolLM3Config, seq_length: int) -> list[Problem]:
    found = common_rules(config) + check_rotary_layers(config)
    layers = range(config.num_hidden_layers)
    if not found and config.layer_types is None and all(map(config.rotates, layers)):
        because = {"model.no_rope_layer_interval": config.no_rope_layer_interval}
        found += no_effect("model", config, ["sliding_window"], "a layer without rotary embedding", because)
    return with_head_rules(config, found)


KEYS = {
    **DECODER_KEYS,
    **ROTARY_LAYER_KEYS,
    "num_key_value_heads": integer_or_null(4),
    "head_dim": integer_or_null(),
    "max_position_embeddings": integer(32768),
    "use_sliding_window": switch(False),
    "sliding_window": integer_or_null(),
    "layer_types": LIST_OR_NULL,
    "attention_bias": switch(False),
    "mlp_bias": switch(False),
    "attention_dropout": number_or_null(0.0),
    "tie_word_embeddings": switch(True),
}


def from_hf(found: ConfigJson) -> SmolLM3Config | None:
    types = layer_types_of(found)
    same, rotary = decoder_fields(found, theta=2000000.0), rotary_layers_from_hf(found)
    if found.odd:
        return None
    window = window_fields(found, types, rotary)
    own = found.pick("attention_bias", "mlp_bias")
    return None if found.odd else SmolLM3Config(**same, **rotary, **own, **window)


def window_fields(found: ConfigJson, types: list[str] | None, rotary: dict[str, Any]) -> dict[str, Any]:
    """The window, and which layers have it unless they are those without rotary embedding."""
    v = found.values
    window, layers = v["sliding_window"] if v["use_sliding_window"] else None, v["num_hidden_layers"]
    rotates = rotary.get("no_rope_layers") or by_interval(rotary["no_rope_layer_interval"], layers)
    usual = [LAYER_TYPES[1] if rotated or window is None else LAYER_TYPES[0] for rotated in rotates]
    types = usual if types is None else types
    if not any(check_types(found, types, window)):
        return {}
    return {"sliding_window": window, **({} if types == usual else {"layer_types": tuple(types)})}


def to_hf(config: SmolLM3Config) -> dict[str, Any]:
    return {
        **heads_to_hf(config),
        **rotary_layers_to_hf(config),
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "layer_types": types_to_hf(config),
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }


def shrink(config: SmolLM3Config, small: SmallSizes) -> SmolLM3Config:
    return replace(shrink_decoder(config, small), **small_rotary_layers(config, small))


FAMILY = Family(
    "smollm3",
    SmolLM3Config,
    blocks,
    architecture="SmolLM3ForCausalLM",
    rules=rules,
    keys=KEYS,
    from_hf=from_hf,
    to_hf=to_hf,
    shrink=shrink,
)

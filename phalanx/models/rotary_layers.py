"""Families of which some layers have no rotary embedding (SmolLM3, Llama 4): fields of the `model` section, rules,
config.json in both directions, a small copy."""

from __future__ import annotations

from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, no_effect, problem
from phalanx.models.config_json import LIST_OR_NULL, ConfigJson, integer
from phalanx.models.decoder_config import DecoderConfig, small_types
from phalanx.models.model_config import SmallSizes
from phalanx.models.rope import LayerRope


@dataclass(frozen=True, kw_only=True)
class RotaryLayersConfig(DecoderConfig):
    """Llama's fields, and which layers have a rotary embedding."""

    no_rope_layer_interval: int = 4
    """Every so many layers, the last one has no rotary embedding."""
    no_rope_layers: tuple[int, ...] | None = None
    """For each layer, 1 if it has a rotary embedding, 0 if it has none (so Hugging Face's name says the opposite);
    unset: by no_rope_layer_interval."""

    def rotates(self, layer: int) -> bool:
        if self.no_rope_layers is not None:
            return bool(self.no_rope_layers[layer])
        return (layer + 1) % self.no_rope_layer_interval != 0

    def rope(self, layer: int) -> LayerRope | None:
        return super().rope(layer) if self.rotates(layer) else None


def check_rotary_layers(config: RotaryLayersConfig) -> list[Problem]:
    given, layers = config.no_rope_layers, config.num_hidden_layers
    if given is None:
        return at_least("model", config, 1, "no_rope_layer_interval")
    because = {"model.no_rope_layers": given}
    found = no_effect("model", config, ["no_rope_layer_interval"], "model.no_rope_layers=null", because)
    if len(given) != layers >= 1 or not set(given) <= {0, 1}:
        rule = "must have a 0 or a 1 for each layer"
        found.append(problem("model", config, "no_rope_layers", rule, {"model.num_hidden_layers": layers}, (None,)))
    return found


ROTARY_LAYER_KEYS = {"no_rope_layers": LIST_OR_NULL, "no_rope_layer_interval": integer(4)}


def rotary_layers_from_hf(found: ConfigJson, empty_is_unset: bool = False) -> dict[str, Any]:
    """In the shortest form. `empty_is_unset`: the family takes an empty list for none."""
    given, interval, layers = (
        found.values[k] for k in ("no_rope_layers", "no_rope_layer_interval", "num_hidden_layers")
    )
    if given is None or (empty_is_unset and not given):
        if interval < 1:
            found.odd.append(f"no_rope_layer_interval={interval!r} (supported: 1 and more)")
        return {"no_rope_layer_interval": interval}
    if len(given) < layers or any(kind not in (0, 1) for kind in given):
        found.odd.append(f"no_rope_layers={given!r} (supported: a 0 or a 1 for each of {layers} layers)")
        return {}
    rotates = tuple(map(int, given[:layers]))
    if interval >= 1 and rotates == by_interval(interval, layers):
        return {"no_rope_layer_interval": interval}
    return {"no_rope_layers": rotates}


def by_interval(interval: int, layers: int) -> tuple[int, ...]:
    return tuple(int((i + 1) % interval != 0) for i in range(layers))


def rotary_layers_to_hf(config: RotaryLayersConfig) -> dict[str, Any]:
    return {
        "no_rope_layers": [int(config.rotates(i)) for i in range(config.num_hidden_layers)],
        "no_rope_layer_interval": config.no_rope_layer_interval,
    }


def small_rotary_layers(config: RotaryLayersConfig, small: SmallSizes) -> dict[str, Any]:
    """Layers with and without a rotary embedding stay."""
    if config.no_rope_layers is not None:
        return {"no_rope_layers": small_types(config.no_rope_layers, small.layers)}
    within = config.no_rope_layer_interval <= config.num_hidden_layers
    return {"no_rope_layer_interval": min(config.no_rope_layer_interval, small.layers)} if within else {}

"""Families whose layers with and without a window follow each other in a pattern, each kind with a rotary embedding of
its own or not (Gemma, OLMo 3, gpt-oss): fields of the `model` section, config.json in both directions, a small copy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import within
from phalanx.models.config_json import LIST_OR_NULL, ConfigJson, integer_or_null
from phalanx.models.decoder_config import (
    DecoderConfig,
    LayerType,
    check_types,
    decoder_fields,
    layer_types_of,
    shrink_decoder,
    small_types,
    types_to_hf,
)
from phalanx.models.model_config import SmallSizes
from phalanx.models.rope import LayerRope, RopeOf, read_rope


@dataclass(frozen=True, kw_only=True)
class MixedWindowConfig(DecoderConfig):
    """Llama's fields, and layers with and without a window that follow each other in a pattern."""

    sliding_window: int = 4096
    """In a layer with a window, a token reads this many tokens: itself and those before it."""
    layer_types: tuple[LayerType, ...] | None = None
    """Whether each layer has the window; unset: in the family's pattern."""

    period: ClassVar[int] = 2
    """Of so many layers in a row the last has no window."""

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.types[layer] == "sliding_attention" else None

    @property
    def types(self) -> tuple[LayerType, ...]:
        """The kind of each layer."""
        return pattern(self.num_hidden_layers, self.period) if self.layer_types is None else self.layer_types


@dataclass(frozen=True, kw_only=True)
class LocalRopeConfig(MixedWindowConfig):
    """The same with a rotary embedding for each kind of layer; the scaling is of layers without a window."""

    rope_local_base_freq: float = 10000.0
    """Base of the rotary embedding of layers with a window; rope_theta and rope_scaling are those of the others."""

    def rope(self, layer: int) -> LayerRope | None:
        if self.types[layer] == "full_attention":
            return super().rope(layer)
        return LayerRope(self.rope_local_base_freq, None, self.rotated_features)


def pattern(layers: int, period: int) -> tuple[LayerType, ...]:
    """The kinds of layers if each `period`-th has no window."""
    return tuple("sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers))


def check_local_rope(config: LocalRopeConfig) -> list[Problem]:
    return within("model", config, "rope_local_base_freq", "(0, inf)", (10000.0,))


# ---- config.json ---------------------------------------------------------------------------------

MIXED_WINDOW_KEYS = {"sliding_window": integer_or_null(4096), "layer_types": LIST_OR_NULL}


def mixed_window_fields(found: ConfigJson, period: int) -> dict[str, Any]:
    """The window, and which layers have it unless they follow the family's pattern; `period` is what the file says, or
    else the family's."""
    types, window = layer_types_of(found), found.values["sliding_window"]
    layers = found.values["num_hidden_layers"]
    types = [*pattern(layers, period)] if types is None else types
    slides = check_types(found, types, window)
    usual = pattern(layers, getattr(found.config, "period", period))
    said = {} if tuple(types) == usual else {"layer_types": tuple(types)}
    return {**said, **({"sliding_window": window} if any(slides) else {})}


def local_rope_fields(found: ConfigJson, local: tuple[str, float], theta: float) -> dict[str, Any]:
    """Fields of a model whose heads have one width, with the rotary embeddings of both kinds of layers, merged as
    transformers 5 merges them.

    local   the key of the base in layers with a window (in files of older versions), and its value if there is none
    theta   the base in the others if there is none
    """
    stated = found.stated
    given = stated.get("rope_parameters")
    nested = {} if given is None else given
    if not isinstance(nested, dict) or not set(nested) <= {"full_attention", "sliding_attention"}:
        rule = "supported: full_attention and sliding_attention in it, each with its own rotary embedding"
        found.odd.append(f"rope_parameters={given!r} ({rule})")
        nested = {}
    parts = [nested.get(kind) or {} for kind in ("full_attention", "sliding_attention")]
    scaling = stated.get("rope_scaling")
    if not all(isinstance(part, dict) for part in (*parts, scaling or {})):
        found.odd.append(f"rope_parameters={given!r}, rope_scaling={scaling!r} (each must be an object)")
        parts, scaling = [{}, {}], None
    outside = ("rope_parameters", "rope_scaling", "original_max_position_embeddings")
    rest = {key: value for key, value in stated.items() if key not in outside}
    same = decoder_fields(
        replace(found, stated={**rest, "rope_parameters": {**parts[0], **(scaling or {})}}, odd=found.odd), theta
    )
    rest["rope_theta"] = stated.get(*local)
    of = RopeOf(local[1], same["head_dim"], found.values["max_position_embeddings"])
    sliding = read_rope({**rest, "rope_parameters": parts[1]}, of)
    found.odd += [f"{odd} (of sliding_attention)" for odd in sliding.odd]
    if sliding.scaling is not None:
        found.odd.append(f"rope_type={sliding.scaling.rope_type!r} of sliding_attention (supported: 'default')")
    return {**same, "rope_local_base_freq": sliding.theta}


def mixed_window_to_hf(config: MixedWindowConfig) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window, "layer_types": types_to_hf(config)}


def local_rope_to_hf(config: LocalRopeConfig, written: dict[str, Any]) -> dict[str, Any]:
    """What was written for a model with one rotary embedding, with that of each kind of layer."""
    local = {"rope_type": "default", "rope_theta": config.rope_local_base_freq}
    both = {"full_attention": written["rope_parameters"], "sliding_attention": local}
    return {**written, "rope_parameters": both}


# ---- a small copy --------------------------------------------------------------------------------

Mixed = TypeVar("Mixed", bound=MixedWindowConfig)


def shrink_mixed(config: Mixed, small: SmallSizes) -> Mixed:
    """Layers of both kinds stay."""
    return replace(shrink_decoder(config, small), layer_types=small_types(config.types, small.layers))

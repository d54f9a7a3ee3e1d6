"""Qwen2.5-VL: a tower of RMSNorm, SwiGLU and attention in windows, whose squares of patches become tokens of a Qwen2
with positions by rows and columns. Bai et al., "Qwen2.5-VL technical report", 2025."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import at_least
from phalanx.models import qwen2
from phalanx.models.config_json import NEEDED, ConfigJson, HfKey, integer, switch, text
from phalanx.models.decoder_config import UpperWindowConfig, decoder_rules
from phalanx.models.family import Family
from phalanx.models.model_config import SmallSizes, TensorNames
from phalanx.models.qwen_vision import (
    TOKEN_KEYS,
    TOKENS,
    VISION_FIELDS,
    QwenVision,
    QwenVLConfig,
    check_layers,
    fields_for,
    inner_config,
    qwen_vl_rules,
    shrink_text,
    shrink_vision,
    text_to_hf,
    text_with_section,
    vision_fields_to_hf,
    vision_values,
)

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env


@dataclass(frozen=True, kw_only=True)
class Qwen25Vision(QwenVision):
    window_size: int = 112
    """Side of the windows of attention in pixels."""
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)
    """Layers without windows."""

    @property
    def window(self) -> int | None:
        side = self.spatial_merge_size
        return max(1, self.window_size // side // max(1, self.patch_size)) * side


@dataclass(frozen=True, kw_only=True)
class Qwen25VLConfig(QwenVLConfig, UpperWindowConfig):
    """Qwen2's fields for the text."""

    family: Literal["qwen2_5_vl"] = "qwen2_5_vl"
    """Which model this section describes: qwen2_5_vl."""
    vision: Qwen25Vision
    """The vision tower."""
    mrope_section: tuple[int, int, int] = (16, 24, 24)
    """How many pairs of a head's features are rotated by a token's position in time, by its row and by its column."""
    rope_theta: float = 1000000.0
    """Base of the rotary embedding."""


def blocks(config: Qwen25VLConfig, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.qwen_vl_blocks import qwen2_5_vl_blocks  # imports torch, which reading a config need not

    return qwen2_5_vl_blocks(config, env)


def rules(config: Qwen25VLConfig, seq_length: int) -> list[Problem]:
    found = decoder_rules(config, seq_length) + qwen_vl_rules(config)
    return found + at_least("model.vision", config.vision, 1, "window_size") + check_layers(config, LAYERS)


LAYERS = "fullatt_block_indexes"
KEYS = {
    "vision_config": HfKey((dict,), NEEDED),
    "text_config": HfKey((dict, type(None)), None),
    "tie_word_embeddings": switch(False),
    **TOKEN_KEYS,
}
VISION_KEYS = {
    "window_size": integer(112),
    LAYERS: HfKey((list,), [7, 15, 23, 31]),
    "hidden_act": text("silu"),
}


def from_hf(found: ConfigJson) -> Qwen25VLConfig | None:
    keys, section = text_with_section(found.stated, (16, 24, 24))
    keys.setdefault("rope_theta", 1000000.0)
    keys.setdefault("rms_norm_eps", 1e-5)
    if (found.values["text_config"] or {}).get("tie_word_embeddings"):  # where transformers 4 said so
        keys["tie_word_embeddings"] = True
    made = inner_config(qwen2.FAMILY, keys, found)
    width = keys.get("hidden_size", 0)
    values = vision_values(found.values["vision_config"], VISION_KEYS, {"hidden_act": ("silu",)}, width, found.odd)
    if made is None or found.odd:
        return None
    own = {name: values[name] for name in (*VISION_FIELDS.values(), "window_size")}
    vision = Qwen25Vision(**own, fullatt_block_indexes=tuple(values[LAYERS]))
    more: Any = {"vision": vision, "mrope_section": section, **found.pick(*TOKENS)}
    return Qwen25VLConfig(**{**fields_for(Qwen25VLConfig, made), **more})


def to_hf(config: Qwen25VLConfig) -> dict[str, Any]:
    v, vision = config.vision, vision_fields_to_hf(config.vision, config.hidden_size)
    own = {"window_size": v.window_size, LAYERS: list(v.fullatt_block_indexes), "hidden_act": "silu"}
    return {
        "text_config": text_to_hf(config, qwen2.FAMILY),
        "vision_config": {"model_type": "qwen2_5_vl_vision", **vision, **own, "tokens_per_second": 4},
        "tie_word_embeddings": config.tie_word_embeddings,
        **{name: getattr(config, name) for name in TOKENS},
    }


def shrink(config: Qwen25VLConfig, small: SmallSizes) -> Qwen25VLConfig:
    """A layer with windows, and one without."""
    made: Qwen25VLConfig = shrink_text(
        config, small, shrink_vision(config.vision, small, window_size=8, fullatt_block_indexes=(1,))
    )
    return made


FAMILY = Family(
    "qwen2_5_vl",
    Qwen25VLConfig,
    blocks,
    architecture="Qwen2_5_VLForConditionalGeneration",
    tensors=TensorNames(
        prefix="model.",
        embedding="model.embed_tokens.weight",
        layer="model.layers.{}",
        also=("visual.patch_embed.proj.weight",),
        constants=(".rotary_emb.inv_freq",),
        renames={"model.language_model.": "model.", "model.visual.": "visual."},
        modules={"visual.": "model.visual.", "model.": "model.language_model."},
    ),
    rules=rules,
    keys=KEYS,
    only={},
    from_hf=from_hf,
    to_hf=to_hf,
    shrink=shrink,
)

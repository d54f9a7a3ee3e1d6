"""Qwen3-VL: a tower with interpolated positions, whose squares of patches become tokens of a Qwen3 with positions by
rows and columns; what some of its layers compute is also added behind the text's first layers (DeepStack). Qwen team,
"Qwen3-VL technical report", 2025; Meng et al., "DeepStack", 2024."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import problem
from phalanx.models import qwen3
from phalanx.models.config_json import NEEDED, ConfigJson, HfKey, switch
from phalanx.models.decoder_config import UpperWindowConfig, decoder_rules
from phalanx.models.family import Family
from phalanx.models.model_config import SmallSizes, TensorNames
from phalanx.models.qwen_vision import (
    LEARNED_KEYS,
    TOKEN_KEYS,
    TOKENS,
    VISION_FIELDS,
    LearnedVision,
    QwenVLConfig,
    check_layers,
    check_positions,
    fields_for,
    inner_config,
    interleaved_axes,
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
class Qwen3Vision(LearnedVision):
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)
    """Layers whose output is also added to the text, after its first, second, ... layer (DeepStack)."""


@dataclass(frozen=True, kw_only=True)
class Qwen3VLConfig(QwenVLConfig, UpperWindowConfig):
    """Qwen3's fields for the text."""

    family: Literal["qwen3_vl"] = "qwen3_vl"
    """Which model this section describes: qwen3_vl."""
    vision: Qwen3Vision
    """The vision tower."""
    head_dim: int | None = 128
    """Width of a head; null: hidden_size / num_attention_heads."""
    rms_norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    mrope_section: tuple[int, int, int] = (24, 20, 20)
    """How many pairs of a head's features are rotated by a token's position in time, by its row and by its column; the
    three take turns."""
    rope_theta: float = 5000000.0
    """Base of the rotary embedding."""

    biases: ClassVar[tuple[str, ...]] = ("attention_bias",)
    body: ClassVar[str] = "model.language_model."

    @property
    def axes(self) -> tuple[int, ...]:
        return interleaved_axes(self.mrope_section)


def blocks(config: Qwen3VLConfig, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.qwen_vl_blocks import qwen3_vl_blocks  # imports torch, which reading a config need not

    return qwen3_vl_blocks(config, env)


LAYERS = "deepstack_visual_indexes"


def rules(config: Qwen3VLConfig, seq_length: int) -> list[Problem]:
    at, v = "model.vision", config.vision
    found = decoder_rules(config, seq_length) + qwen_vl_rules(config) + check_layers(config, LAYERS)
    found += check_positions(config, v)
    if len(v.deepstack_visual_indexes) > config.num_hidden_layers:
        rule, because = (
            "must be no more than the text has layers",
            {"model.num_hidden_layers": config.num_hidden_layers},
        )
        found.append(problem(at, v, LAYERS, rule, because, (v.deepstack_visual_indexes[: config.num_hidden_layers],)))
    if config.sliding_window is not None:
        rule = "is not of this family"
        found.append(problem("model", config, "sliding_window", rule, {"model.family": config.family}, (None,)))
    return found


KEYS = {
    "vision_config": HfKey((dict,), NEEDED),
    "text_config": HfKey((dict,), NEEDED),
    "tie_word_embeddings": switch(False),
    **TOKEN_KEYS,
}
VISION_KEYS = {**LEARNED_KEYS, LAYERS: HfKey((list,), [8, 16, 24])}


def from_hf(found: ConfigJson) -> Qwen3VLConfig | None:
    keys, section = text_with_section(found.stated, (24, 20, 20))
    keys.setdefault("rope_theta", 5000000.0)
    keys |= {"max_position_embeddings": keys.get("max_position_embeddings", 128000)}
    made = inner_config(qwen3.FAMILY, keys, found)
    only: dict[str, tuple[Any, ...]] = {"hidden_act": ("gelu_pytorch_tanh",)}
    values = vision_values(found.values["vision_config"], VISION_KEYS, only, keys.get("hidden_size", 0), found.odd)
    if made is None or found.odd:
        return None
    own = {name: values[name] for name in (*VISION_FIELDS.values(), "num_position_embeddings")}
    vision = Qwen3Vision(**own, deepstack_visual_indexes=tuple(values[LAYERS]))
    more: Any = {"vision": vision, "mrope_section": section, **found.pick(*TOKENS)}
    return Qwen3VLConfig(**{**fields_for(Qwen3VLConfig, made), **more})


def to_hf(config: Qwen3VLConfig) -> dict[str, Any]:
    v, vision = config.vision, vision_fields_to_hf(config.vision, config.hidden_size)
    text = text_to_hf(config, qwen3.FAMILY, mrope_interleaved=True)
    for key in ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"):
        del text[key]
    own = {"num_position_embeddings": v.num_position_embeddings, LAYERS: list(v.deepstack_visual_indexes)}
    return {
        "text_config": text,
        "vision_config": {"model_type": "qwen3_vl", **vision, **own, "hidden_act": "gelu_pytorch_tanh"},
        "tie_word_embeddings": config.tie_word_embeddings,
        **{name: getattr(config, name) for name in TOKENS},
    }


def shrink(config: Qwen3VLConfig, small: SmallSizes) -> Qwen3VLConfig:
    """Two layers, whose first is read twice if that was so."""
    deep = (0,) if config.vision.deepstack_visual_indexes else ()
    more: Any = {"num_position_embeddings": 9, "deepstack_visual_indexes": deep}
    made: Qwen3VLConfig = shrink_text(config, small, shrink_vision(config.vision, small, **more))
    return made


BASE = "model.language_model."
FAMILY = Family(
    "qwen3_vl",
    Qwen3VLConfig,
    blocks,
    architecture="Qwen3VLForConditionalGeneration",
    tensors=TensorNames(
        prefix="model.",
        embedding=f"{BASE}embed_tokens.weight",
        layer=BASE + "layers.{}",
        also=("model.visual.patch_embed.proj.weight",),
        constants=(".rotary_emb.inv_freq",),
    ),
    rules=rules,
    keys=KEYS,
    only={},
    from_hf=from_hf,
    to_hf=to_hf,
    shrink=shrink,
)

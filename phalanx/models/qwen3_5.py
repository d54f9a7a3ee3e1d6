"""Qwen3.5 with images: Qwen3-VL's tower without DeepStack, whose squares of patches become tokens of Qwen3.5's text
(models/qwen3_5_text.py), with positions by rows and columns in layers with attention. Qwen Team, "Qwen3.5", 2026.

Published folders also hold a module of multi-token prediction, which is left out here, as by transformers: it reads the
features of images too, and is trained with the text alone (models/qwen3_5_text.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import problem
from phalanx.models import qwen3_5_text
from phalanx.models.config_json import NEEDED, ConfigJson, HfKey, integer, switch
from phalanx.models.decoder_config import decoder_tensors
from phalanx.models.delta_layers import delta_least_layers, split_delta_heads
from phalanx.models.family import Family
from phalanx.models.gated_layers import PREDICTORS, shrink_gated
from phalanx.models.model_config import SmallSizes, TensorNames
from phalanx.models.qwen_vision import (
    LEARNED_KEYS,
    TOKENS,
    VISION_FIELDS,
    LearnedVision,
    QwenVLConfig,
    check_positions,
    fields_for,
    inner_config,
    interleaved_axes,
    qwen_vl_rules,
    shrink_vision,
    text_to_hf,
    text_with_section,
    vision_fields_to_hf,
    vision_values,
    with_small_tower,
)

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env


@dataclass(frozen=True, kw_only=True)
class PicturedTextConfig(QwenVLConfig):
    """What images add to the fields of the text, with experts or without."""

    vision: LearnedVision
    """The vision tower."""
    image_token_id: int = 248056
    """The token in whose places the features of images are."""
    video_token_id: int = 248057
    """The token of videos, which are not read; kept for the files."""
    vision_start_token_id: int = 248053
    """The token before an image; kept for the files."""
    vision_end_token_id: int = 248054
    """The token after an image; kept for the files."""
    mrope_section: tuple[int, int, int] = (11, 11, 10)
    """How many pairs of a head's rotated features are rotated by a token's position in time, by its row and by its
    column; the three take turns."""

    body: ClassVar[str] = "model.language_model."

    @property
    def axes(self) -> tuple[int, ...]:
        return interleaved_axes(self.mrope_section)


@dataclass(frozen=True, kw_only=True)
class Qwen35Config(qwen3_5_text.Qwen35TextConfig, PicturedTextConfig):
    """The fields of the text, and of its images."""

    family: Literal["qwen3_5"] = "qwen3_5"  # type: ignore[assignment]
    """Which model this section describes: qwen3_5."""


# functions that build blocks import torch themselves, because reading a config must not
def blocks(config: Qwen35Config, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.decoder import DecoderLayer
    from phalanx.models.qwen_vl_blocks import learned_tower_blocks

    def layer(config: Qwen35Config, env: Env, number: int) -> DecoderLayer:
        return DecoderLayer(config, env, number, make_attention=qwen3_5_text.mixer)

    return learned_tower_blocks(config, env, layer)


def rules(config: Qwen35Config, seq_length: int) -> list[Problem]:
    return qwen3_5_text.rules(config, seq_length) + image_rules(config)


def image_rules(config: Any) -> list[Problem]:
    found = qwen_vl_rules(config) + check_positions(config, config.vision)
    if config.num_nextn_predict_layers:
        rule = "must be 0 for texts with images, whose features the module would have to read"
        found.append(problem("model", config, "num_nextn_predict_layers", rule, {"model.family": config.family}, (0,)))
    return found


KEYS = {
    "vision_config": HfKey((dict,), NEEDED),
    "text_config": HfKey((dict,), NEEDED),
    "tie_word_embeddings": switch(False),
    "image_token_id": integer(248056),
    "video_token_id": integer(248057),
    "vision_start_token_id": integer(248053),
    "vision_end_token_id": integer(248054),
}
ONLY: dict[str, tuple[Any, ...]] = {"hidden_act": ("gelu_pytorch_tanh",)}


def pictured_from_hf(found: ConfigJson, text: Family) -> Any:
    """The config of a model whose text is that of another family."""
    keys, section = text_with_section(found.stated, (11, 11, 10))
    made = inner_config(text, {**keys, PREDICTORS: 0}, found)
    values = vision_values(found.values["vision_config"], LEARNED_KEYS, ONLY, keys.get("hidden_size", 0), found.odd)
    if made is None or found.odd:
        return None
    own = {name: values[name] for name in (*VISION_FIELDS.values(), "num_position_embeddings")}
    more: Any = {"vision": LearnedVision(**own), "mrope_section": section, **found.pick(*TOKENS)}
    return found.config(**{**fields_for(found.config, made), **more})


def from_hf(found: ConfigJson) -> Qwen35Config | None:
    made: Qwen35Config | None = pictured_from_hf(found, qwen3_5_text.FAMILY)
    return made


def pictured_to_hf(config: Any, text: Family) -> dict[str, Any]:
    vision = vision_fields_to_hf(config.vision, config.hidden_size)
    own = {"num_position_embeddings": config.vision.num_position_embeddings, "hidden_act": "gelu_pytorch_tanh"}
    return {
        "text_config": text_to_hf(config, text, mrope_interleaved=True),
        "vision_config": {"model_type": f"{config.family}_vision", **vision, **own},
        "tie_word_embeddings": config.tie_word_embeddings,
        **{name: getattr(config, name) for name in TOKENS},
    }


def to_hf(config: Qwen35Config) -> dict[str, Any]:
    return pictured_to_hf(config, qwen3_5_text.FAMILY)


def shrink_pictured(config: Any, small: SmallSizes) -> Any:
    vision = shrink_vision(config.vision, small, num_position_embeddings=9)
    return with_small_tower(shrink_gated(config, small), config, small, vision)


def shrink(config: Qwen35Config, small: SmallSizes) -> Qwen35Config:
    made: Qwen35Config = shrink_pictured(config, small)
    return made


BASE = "model.language_model."
NAMES: TensorNames = replace(
    decoder_tensors,
    embedding=f"{BASE}embed_tokens.weight",
    layer=BASE + "layers.{}",
    also=(f"{BASE}layers.0.linear_attn.in_proj_qkv.weight", "model.visual.patch_embed.proj.weight"),
    others=r"mtp\..*",
)
FAMILY = Family(
    "qwen3_5",
    Qwen35Config,
    blocks,
    architecture="Qwen3_5ForConditionalGeneration",
    tensors=NAMES,
    rules=rules,
    split_rules=split_delta_heads,
    keys=KEYS,
    only={},
    from_hf=from_hf,
    to_hf=to_hf,
    shrink=shrink,
    least_layers=delta_least_layers,
)

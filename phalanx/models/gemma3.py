"""Gemma 3 with images: a tower of SigLIP, whose features are averaged over squares and projected, and the text model,
in which the tokens of an image read each other. Gemma team, "Gemma 3 technical report", 2025."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isqrt
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import problem
from phalanx.models import gemma3_text
from phalanx.models.config_json import NEEDED, ConfigJson, HfKey, integer, number, switch
from phalanx.models.family import Family
from phalanx.models.gemma3_text import Gemma3TextConfig
from phalanx.models.mixed_layers import shrink_mixed
from phalanx.models.model_config import SmallSizes
from phalanx.models.qwen_vision import fields_for, inner_config, text_of
from phalanx.models.vision_config import (
    PREFIX,
    TowerFirst,
    VisionConfig,
    shrink_vision,
    tower_tensors,
    vision_from_hf,
    vision_rules,
    vision_to_hf,
)
from phalanx.sequence.patches import PatchForm, PictureSpec
from phalanx.sequence.sample import UnitStream

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env

BEGIN, IMAGE, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(TowerFirst, Gemma3TextConfig):
    """The fields of the text model, and the tower's in `vision`."""

    family: Literal["gemma3"] = "gemma3"  # type: ignore[assignment]
    """Which model this section describes: gemma3."""
    vision: VisionConfig
    """The vision tower, of SigLIP."""
    image_token_id: int
    """The token in whose places the features of images are."""
    boi_token_id: int
    """The token before an image (boi_token_index); kept for the files."""
    eoi_token_id: int
    """The token after an image (eoi_token_index); kept for the files."""
    mm_tokens_per_image: int = 256
    """Tokens of an image, a square number: features are averaged over as many squares of patches."""

    prefix: ClassVar[str] = PREFIX

    @property
    def side(self) -> int:
        """Patches along a side of the squares that are averaged."""
        return self.vision.grid // max(1, isqrt(max(1, self.mm_tokens_per_image)))

    @property
    def patch_form(self) -> PatchForm:
        return PatchForm(self.vision.patch_size, side=max(1, self.side), largest=self.vision.patches)

    @property
    def media(self) -> PictureSpec:
        edge = self.vision.image_size
        usual = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": edge, "width": edge}}
        written = (BEGIN, f"\n\n{BEGIN}{IMAGE}{END}\n\n")
        return PictureSpec(self.patch_form, self.image_token_id, (edge, edge), usual, written, together=True)

    @property
    def reads_units(self) -> tuple[UnitStream, ...]:
        return (self.patch_form.stream,)


def blocks(config: Gemma3Config, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.gemma3_blocks import gemma3_blocks  # imports torch, which reading a config need not

    return gemma3_blocks(config, env)


def rules(config: Gemma3Config, seq_length: int) -> list[Problem]:
    found = gemma3_text.rules(config, seq_length) + vision_rules(config.vision)
    for name in ("image_token_id", "boi_token_id", "eoi_token_id"):
        if not 0 <= getattr(config, name) < config.vocab_size:
            rule, because = "must be a token of the vocabulary", {"model.vocab_size": config.vocab_size}
            found.append(problem("model", config, name, rule, because, (config.vocab_size - 1,)))
    if config.vision.tower != "siglip":
        found.append(problem("model.vision", config.vision, "tower", "must be siglip", {}, ("siglip",)))
    grid, count = config.vision.grid, config.mm_tokens_per_image
    if count < 1 or isqrt(count) ** 2 != count or grid % isqrt(count):
        rule, because = "must be a square number whose root divides the patches along a side", {"patches": grid}
        found.append(problem("model", config, "mm_tokens_per_image", rule, because, (grid**2,)))
    return found


KEYS = {
    "text_config": HfKey((dict,), NEEDED),
    "vision_config": HfKey((dict,), NEEDED),
    "mm_tokens_per_image": integer(256),
    "boi_token_index": integer(255999),
    "eoi_token_index": integer(256000),
    "image_token_index": integer(262144),
    "initializer_range": number(0.02),
    "tie_word_embeddings": switch(True),
}
OTHER = {
    "boi_token_index": "boi_token_id",
    "eoi_token_index": "eoi_token_id",
    "image_token_index": "image_token_id",
}


def from_hf(found: ConfigJson) -> Gemma3Config | None:
    v = found.values
    keys = {**v["text_config"], "tie_word_embeddings": v["tie_word_embeddings"]}
    text = inner_config(gemma3_text.FAMILY, keys, found)
    kind = v["vision_config"].get("model_type", "siglip_vision_model")
    vision = vision_from_hf({**v["vision_config"], "model_type": kind}, found.odd)
    if text is None or vision is None or found.odd:
        return None
    return Gemma3Config(
        **fields_for(Gemma3Config, text),
        vision=vision,
        image_token_id=v["image_token_index"],
        boi_token_id=v["boi_token_index"],
        eoi_token_id=v["eoi_token_index"],
        mm_tokens_per_image=v["mm_tokens_per_image"],
    )


def to_hf(config: Gemma3Config) -> dict[str, Any]:
    text = gemma3_text.to_hf(text_of(config, gemma3_text.FAMILY))
    return {
        "text_config": {"model_type": "gemma3_text", **text},
        "vision_config": vision_to_hf(config.vision),
        "mm_tokens_per_image": config.mm_tokens_per_image,
        "boi_token_index": config.boi_token_id,
        "eoi_token_index": config.eoi_token_id,
        "image_token_index": config.image_token_id,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def shrink(config: Gemma3Config, small: SmallSizes) -> Gemma3Config:
    """Images of four tokens, of four patches each if they were averaged."""
    last = small.vocab_size - 1
    vision = replace(shrink_vision(config.vision, small), image_size=8 if config.side > 1 else 4)
    tokens = {name: min(getattr(config, name), last) for name in ("image_token_id", "boi_token_id", "eoi_token_id")}
    return replace(shrink_mixed(config, small), vision=vision, mm_tokens_per_image=4, **tokens)


FAMILY = Family(
    "gemma3",
    Gemma3Config,
    blocks,
    architecture="Gemma3ForConditionalGeneration",
    tensors=tower_tensors("mm_input_projection_weight"),
    rules=rules,
    keys=KEYS,
    other_names=OTHER,
    from_hf=from_hf,
    to_hf=to_hf,
    shrink=shrink,
)

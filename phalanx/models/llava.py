"""LLaVA: a vision tower of CLIP or SigLIP, two linears, and a Llama-like decoder that reads their features in place of
image tokens. Liu et al., "Visual instruction tuning", 2023; "Improved baselines with visual instruction tuning",
2024."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import problem
from phalanx.models import llama, mistral, qwen2
from phalanx.models.config_json import NEEDED, ConfigJson, HfKey, integer, other_values, switch, text, values_of
from phalanx.models.decoder_config import DecoderConfig, UpperWindowConfig, decoder_rules, shrink_decoder
from phalanx.models.family import Family
from phalanx.models.model_config import SmallSizes
from phalanx.models.vision_config import (
    PREFIX,
    TowerFirst,
    VisionConfig,
    shrink_vision,
    tower_tensors,
    usual_processor,
    vision_from_hf,
    vision_rules,
    vision_to_hf,
)
from phalanx.sequence.patches import PatchForm, PictureSpec
from phalanx.sequence.sample import UnitStream

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env

TEXTS = {"llama": llama.FAMILY, "mistral": mistral.FAMILY, "qwen2": qwen2.FAMILY}


@dataclass(frozen=True, kw_only=True)
class LlavaConfig(TowerFirst, UpperWindowConfig):
    """The fields of the text's decoder, and the tower's in `vision`."""

    family: Literal["llava"] = "llava"
    """Which model this section describes: llava."""
    text_family: Literal["llama", "mistral", "qwen2"] = "llama"
    """What the decoder is: llama, mistral or qwen2 (whose queries, keys and values have biases)."""
    vision: VisionConfig
    """The vision tower."""
    image_token_id: int
    """The token in whose places the features of images are; the text has one for each patch."""
    vision_feature_layer: int = -2
    """Whose output is read: 0 the tower's embedding, 1 its first layer, and so on; -1 the last layer, -2 the one before
    it."""
    vision_feature_select_strategy: Literal["default", "full"] = "default"
    """default: the class token is left out (CLIP); full: all that the tower has is read."""
    projector_bias: bool = True
    """Whether the projector's two linears have biases (multimodal_projector_bias)."""

    biases: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")
    prefix: ClassVar[str] = PREFIX

    @property
    def tower_layers(self) -> int:
        """Layers of the tower that are computed."""
        layer, count = self.vision_feature_layer, self.vision.num_hidden_layers
        return layer if layer >= 0 else count + 1 + layer

    @property
    def patch_form(self) -> PatchForm:
        v = self.vision
        reads = v.tower == "clip" and self.vision_feature_select_strategy == "full"
        return PatchForm(v.patch_size, classed=v.tower == "clip", reads_class=reads, largest=v.patches)

    @property
    def media(self) -> PictureSpec:
        side = self.vision.image_size
        return PictureSpec(self.patch_form, self.image_token_id, (side, side), usual_processor(self.vision))

    @property
    def reads_units(self) -> tuple[UnitStream, ...]:
        return (self.patch_form.stream,)


def blocks(config: LlavaConfig, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.llava_blocks import llava_blocks  # imports torch, which reading a config need not

    return llava_blocks(config, env)


def rules(config: LlavaConfig, seq_length: int) -> list[Problem]:
    found = decoder_rules(config, seq_length) + vision_rules(config.vision)
    layers = config.vision.num_hidden_layers
    if not 0 <= config.tower_layers <= layers:
        rule, because = "must name the embedding or a layer of the tower", {"model.vision.num_hidden_layers": layers}
        found.append(problem("model", config, "vision_feature_layer", rule, because, (-2, -1)))
    if not 0 <= config.image_token_id < config.vocab_size:
        rule, because = "must be a token of the vocabulary", {"model.vocab_size": config.vocab_size}
        found.append(problem("model", config, "image_token_id", rule, because, (config.vocab_size - 1,)))
    if config.vision.tower == "siglip" and config.vision_feature_select_strategy == "default":
        rule, tower = "leaves out a class token, and this tower has none", {"model.vision.tower": "siglip"}
        found.append(problem("model", config, "vision_feature_select_strategy", rule, tower, ("full",)))
    return found + check_text(config)


def check_text(config: LlavaConfig) -> list[Problem]:
    """Switches that the decoder's own family does not have."""
    because, found = {"model.text_family": config.text_family}, []
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name) and config.text_family != "llama":
            found.append(problem("model", config, name, "is llama's", because, (False,)))
    if config.text_family == "llama" and config.sliding_window is not None:
        found.append(problem("model", config, "sliding_window", "is mistral's and qwen2's", because, (None,)))
    return found


KEYS = {
    "text_config": HfKey((dict,), NEEDED),
    "vision_config": HfKey((dict,), NEEDED),
    "image_token_index": integer(32000),
    "vision_feature_layer": HfKey((int, list), -2),
    "vision_feature_select_strategy": text("default"),
    "projector_hidden_act": text("gelu"),
    "multimodal_projector_bias": switch(True),
    "tie_word_embeddings": switch(False),
}
ONLY: dict[str, tuple[Any, ...]] = {
    "projector_hidden_act": ("gelu",),
    "vision_feature_select_strategy": ("default", "full"),
}


def from_hf(found: ConfigJson) -> LlavaConfig | None:
    v = found.values
    text = text_from_hf(v["text_config"], found.odd)
    vision = vision_from_hf(v["vision_config"], found.odd)
    if not isinstance(v["vision_feature_layer"], int):
        found.odd.append(f"vision_feature_layer={v['vision_feature_layer']!r} (supported: one layer)")
    if text is None or vision is None or found.odd:
        return None
    return LlavaConfig(
        **{**text_fields(text), "tie_word_embeddings": v["tie_word_embeddings"] or text.tie_word_embeddings},
        text_family=text.family,  # type: ignore[arg-type]
        vision=vision,
        image_token_id=v["image_token_index"],
        vision_feature_layer=v["vision_feature_layer"],
        vision_feature_select_strategy=v["vision_feature_select_strategy"],
        projector_bias=v["multimodal_projector_bias"],
    )


def text_from_hf(config: dict[str, Any], odd: list[str]) -> DecoderConfig | None:
    """The decoder that text_config describes; what cannot be computed is added to `odd`."""
    kind = config.get("model_type", "llama")
    if not isinstance(kind, str) or kind not in TEXTS:
        odd.append(f"text_config: model_type={kind!r} (supported: {', '.join(map(repr, TEXTS))})")
        return None
    family = TEXTS[kind]
    values = values_of(config, family.json_keys, family.other_names, "text_config")
    inner = ConfigJson(kind, family.config, config, values, other_values(values, family.only))
    made = family.from_hf(inner)
    odd += [f"text_config: {each}" for each in inner.odd]
    if isinstance(made, mistral.MistralConfig) and made.layer_types is not None:
        odd.append("text_config: layer_types of mistral (supported: a window in all layers)")
        return None
    return made  # type: ignore[return-value]


def text_fields(text: DecoderConfig) -> dict[str, Any]:
    """Fields of a decoder's config that ours has too."""
    ours = {f.name for f in fields(LlavaConfig)} - {"family"}
    return {f.name: getattr(text, f.name) for f in fields(text) if f.name in ours}


def text_of(config: LlavaConfig) -> DecoderConfig:
    """The decoder's config as its own family has it."""
    kind: Any = TEXTS[config.text_family].config
    names = {f.name for f in fields(kind)} & {f.name for f in fields(config)} - {"family"}
    return kind(**{name: getattr(config, name) for name in sorted(names)})  # type: ignore[no-any-return]


def to_hf(config: LlavaConfig) -> dict[str, Any]:
    family = TEXTS[config.text_family]
    text = {"model_type": family.name, **family.to_hf(text_of(config))}
    return {
        "text_config": text,
        "vision_config": vision_to_hf(config.vision),
        "image_token_index": config.image_token_id,
        "image_seq_length": config.patch_form.tokens(config.vision.image_size, config.vision.image_size),
        "vision_feature_layer": config.vision_feature_layer,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": config.projector_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def shrink(config: LlavaConfig, small: SmallSizes) -> LlavaConfig:
    """The tower loses layers, but one that is not read stays."""
    vision = shrink_vision(config.vision, small)
    reads_last = config.tower_layers == config.vision.num_hidden_layers
    return replace(
        shrink_decoder(config, small),
        vision=vision,
        vision_feature_layer=-1 if reads_last else -2,
        image_token_id=min(config.image_token_id, small.vocab_size - 1),
    )


FAMILY = Family(
    "llava",
    LlavaConfig,
    blocks,
    architecture="LlavaForConditionalGeneration",
    tensors=tower_tensors("linear_1.weight"),
    rules=rules,
    keys=KEYS,
    other_names={"image_token_index": "image_token_id"},
    only=ONLY,
    from_hf=from_hf,
    to_hf=to_hf,
    shrink=shrink,
)

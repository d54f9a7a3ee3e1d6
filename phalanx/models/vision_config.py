"""Vision towers of CLIP and SigLIP: the part of a `model` section that describes one, its rules, and vision_config of
config.json in both directions.

Nothing here imports torch: configs are read before anything heavy is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError, Problem
from phalanx.base.rules import at_least, multiples, problem, within
from phalanx.models.config_json import NEEDED, HfKey, integer, number, other_values, switch, text, values_of
from phalanx.models.model_config import SmallSizes, TensorNames

Activation = Literal["quick_gelu", "gelu", "gelu_pytorch_tanh"]


PREFIX = "language_model."  # of tensors of the text, in LLaVA's form of checkpoints


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    tower: Literal["clip", "siglip"] = "clip"
    """The kind of tower: clip (a class token, a norm after the embedding) or siglip (neither)."""
    hidden_size: int
    """Width of its residual stream."""
    intermediate_size: int
    """Width of its MLPs."""
    num_hidden_layers: int
    """Number of its layers."""
    num_attention_heads: int
    """Number of its heads."""
    image_size: int
    """Side of its images in pixels; all have this size."""
    patch_size: int
    """Side of a patch in pixels."""
    hidden_act: Activation = "quick_gelu"
    """Activation of its MLPs: quick_gelu (CLIP), gelu, or gelu_pytorch_tanh (SigLIP)."""
    layer_norm_eps: float = 1e-5
    """Epsilon of its LayerNorms."""
    pooling_head: bool = False
    """Whether the weights hold SigLIP's pooling head. Nothing reads it; it is kept, frozen, for the files."""

    @property
    def grid(self) -> int:
        """Patches along a side of an image."""
        return self.image_size // max(1, self.patch_size)

    @property
    def patches(self) -> int:
        return self.grid**2

    @property
    def positions(self) -> int:
        """Learned positions: of the class token, and of patches."""
        return self.patches + (self.tower == "clip")


class TowerFirst:
    """The blocks of a model whose vision tower comes before its text: those of the tower, what embeds the text, the
    text's layers, the head."""

    vision: Any
    num_hidden_layers: int

    @property
    def tower_layers(self) -> int:
        """Layers of the tower that are computed."""
        count: int = self.vision.num_hidden_layers
        return count

    @property
    def embedding_block(self) -> int:
        return self.tower_layers + 1

    @property
    def layer_blocks(self) -> Sequence[int]:
        first = self.embedding_block + 1
        return (*range(1, self.embedding_block), *range(first, first + self.num_hidden_layers))

    @property
    def num_blocks(self) -> int:
        return self.tower_layers + self.num_hidden_layers + 3


def tower_tensors(projector: str) -> TensorNames:
    """Tensors of LLaVA's form of checkpoints: a text model, a vision tower and a projector, with the names of two
    releases of transformers. `projector`: one of its tensors."""
    return TensorNames(
        prefix=PREFIX,
        embedding=f"{PREFIX}model.embed_tokens.weight",
        layer=PREFIX + "model.layers.{}",
        head=f"{PREFIX}lm_head.weight",
        also=(f"multi_modal_projector.{projector}",),
        constants=(".rotary_emb.inv_freq", ".embeddings.position_ids"),
        renames={
            "vision_tower.vision_model.": "vision_tower.",
            "model.vision_tower.": "vision_tower.",
            "model.multi_modal_projector.": "multi_modal_projector.",
            "model.language_model.": f"{PREFIX}model.",
            "lm_head.": f"{PREFIX}lm_head.",
        },
        modules={
            f"{PREFIX}model.": "model.language_model.",
            "vision_tower.": "model.vision_tower.",
            "multi_modal_projector.": "model.multi_modal_projector.",
            f"{PREFIX}lm_head": "lm_head",
        },
    )


def vision_rules(vision: VisionConfig) -> list[Problem]:
    at = "model.vision"
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")
    found = at_least(at, vision, 1, *sizes) + within(at, vision, "layer_norm_eps", "(0, inf)", (1e-5,))
    if found:
        return found
    if vision.patch_size > vision.image_size:
        because = {f"{at}.image_size": vision.image_size}
        found.append(problem(at, vision, "patch_size", "must be <= image_size", because, (vision.image_size,)))
    if vision.hidden_size % vision.num_attention_heads:
        because = {f"{at}.num_attention_heads": vision.num_attention_heads}
        valid = multiples(vision.hidden_size, vision.num_attention_heads)
        found.append(problem(at, vision, "hidden_size", "must be a multiple of num_attention_heads", because, valid))
    if vision.pooling_head and vision.tower != "siglip":
        found.append(problem(at, vision, "pooling_head", "is SigLIP's", {f"{at}.tower": vision.tower}, (False,)))
    return found


KEYS = {
    "hidden_size": integer(NEEDED),
    "intermediate_size": integer(NEEDED),
    "num_hidden_layers": integer(NEEDED),
    "num_attention_heads": integer(NEEDED),
    "image_size": integer(NEEDED),
    "patch_size": integer(NEEDED),
    "num_channels": integer(3),
    "attention_dropout": number(0.0),
}
OF_TOWER: dict[str, dict[str, HfKey]] = {
    "clip": {**KEYS, "hidden_act": text("quick_gelu"), "layer_norm_eps": number(1e-5)},
    "siglip": {
        **KEYS,
        "hidden_act": text("gelu_pytorch_tanh"),
        "layer_norm_eps": number(1e-6),
        "vision_use_head": switch(True),
    },
}
ONLY: dict[str, tuple[Any, ...]] = {
    "num_channels": (3,),
    "attention_dropout": (0.0,),
    "hidden_act": ("quick_gelu", "gelu", "gelu_pytorch_tanh"),
}
TYPES = {"clip_vision_model": "clip", "siglip_vision_model": "siglip"}


def vision_from_hf(config: Any, odd: list[str]) -> VisionConfig | None:
    """The tower that vision_config describes; what cannot be computed is added to `odd`."""
    if not isinstance(config, dict):
        raise CheckpointError(f"vision_config={config!r} (it must be an object)")
    kind = config.get("model_type", "clip_vision_model")
    if not isinstance(kind, str) or kind not in TYPES:
        odd.append(f"vision_config: model_type={kind!r} (supported: {', '.join(map(repr, TYPES))})")
        return None
    tower = TYPES[kind]
    values = values_of(config, OF_TOWER[tower], {}, "vision_config")
    wrong = other_values(values, ONLY)
    odd += [f"vision_config: {each}" for each in wrong]
    if wrong:
        return None
    names = [name for name in OF_TOWER[tower] if name not in ("num_channels", "attention_dropout", "vision_use_head")]
    own: Any = {name: values[name] for name in names}
    return VisionConfig(tower=tower, pooling_head=values.get("vision_use_head", False), **own)  # type: ignore[arg-type]


def usual_processor(vision: VisionConfig) -> dict[str, Any]:
    """A preprocessor_config.json for a tower that is trained without one."""
    side = vision.image_size
    if vision.tower == "siglip":
        return {"image_processor_type": "SiglipImageProcessor", "size": {"height": side, "width": side}}
    crop = {"height": side, "width": side}
    return {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": side}, "crop_size": crop}


def vision_to_hf(vision: VisionConfig) -> dict[str, Any]:
    kinds = {tower: kind for kind, tower in TYPES.items()}
    found = {name: getattr(vision, name) for name in OF_TOWER[vision.tower] if hasattr(vision, name)}
    head = {"vision_use_head": vision.pooling_head} if vision.tower == "siglip" else {}
    return {"model_type": kinds[vision.tower], **found, "num_channels": 3, "attention_dropout": 0.0, **head}


def shrink_vision(vision: VisionConfig, small: SmallSizes) -> VisionConfig:
    """Images of four patches, and two layers."""
    return replace(
        vision,
        hidden_size=2 * small.head_dim * 2,
        intermediate_size=6 * small.head_dim,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=4,
        patch_size=2,
    )

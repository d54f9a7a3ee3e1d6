"""What Qwen2.5-VL, Qwen3-VL and Qwen3.5 share besides blocks (models/qwen_vl_blocks.py): the tower's part of a `model`
section, positions by rows and columns, rules, and config.json in both directions.

Nothing here imports torch: configs are read before anything heavy is loaded.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError, Problem
from phalanx.base.rules import at_least, multiples, problem
from phalanx.models.config_json import NEEDED, NONE, ConfigJson, HfKey, integer, other_values, shown, text, values_of
from phalanx.models.decoder_config import DecoderConfig, shrink_decoder
from phalanx.models.family import Family
from phalanx.models.model_config import ModelConfig, SmallSizes
from phalanx.models.rope import LayerRope
from phalanx.models.vision_config import TowerFirst
from phalanx.sequence.patches import PatchForm, PictureSpec
from phalanx.sequence.sample import UnitStream

USUAL_FEATURES = 1280  # of the largest image, unless a preprocessor_config.json says otherwise


@dataclass(frozen=True, kw_only=True)
class QwenVision:
    hidden_size: int
    """Width of the tower's residual stream."""
    intermediate_size: int
    """Width of its MLPs."""
    num_hidden_layers: int
    """Number of its layers (depth)."""
    num_attention_heads: int
    """Number of its heads (num_heads)."""
    patch_size: int
    """Side of a patch in pixels."""
    spatial_merge_size: int = 2
    """Squares of so many patches a side become one token of the text."""
    temporal_patch_size: int = 2
    """Frames in a patch: a still image is read as so many equal ones."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def window(self) -> int | None:
        """Side of the windows of attention, in patches; None: there are none."""
        return None

    @property
    def merged_size(self) -> int:
        """Features of the patches that become one token."""
        return self.hidden_size * self.spatial_merge_size**2


@dataclass(frozen=True, kw_only=True)
class LearnedVision(QwenVision):
    """A tower with learned positions, as Qwen3-VL and Qwen3.5 have it."""

    num_position_embeddings: int = 2304
    """Learned positions, a square of them; those of an image's patches are interpolated between them."""

    @property
    def position_side(self) -> int:
        return round(max(0, self.num_position_embeddings) ** 0.5)


@dataclass(frozen=True, kw_only=True)
class QwenVLConfig(TowerFirst, DecoderConfig):
    """The fields of the text's decoder that every such family has beside its own; the tower's are in `vision`."""

    vision: QwenVision
    """The vision tower."""
    image_token_id: int
    """The token in whose places the features of images are."""
    video_token_id: int = 151656
    """The token of videos, which are not read; kept for the files."""
    vision_start_token_id: int = 151652
    """The token before an image; kept for the files."""
    vision_end_token_id: int = 151653
    """The token after an image; kept for the files."""
    mrope_section: tuple[int, int, int]
    """How many pairs of a head's features are rotated by a token's position in time, by its row and by its column."""

    @property
    def axes(self) -> tuple[int, ...]:
        """For each pair of features, which of the three positions rotates it."""
        return tuple(axis for axis, count in enumerate(self.mrope_section) for _ in range(count))

    def rope(self, layer: int) -> LayerRope:
        return LayerRope(self.rope_theta, self.rope_scaling, self.rotated_features, axes=self.axes)

    @property
    def patch_form(self) -> PatchForm:
        v, largest = self.vision, USUAL_FEATURES * self.vision.spatial_merge_size**2
        form: dict[str, Any] = {"frames": v.temporal_patch_size, "side": v.spatial_merge_size, "window": v.window}
        return PatchForm(v.patch_size, largest=largest, **form)

    @property
    def media(self) -> PictureSpec:
        return PictureSpec(self.patch_form, self.image_token_id, None, usual_processor(self.vision), None, True)

    @property
    def reads_units(self) -> tuple[UnitStream, ...]:
        return (self.patch_form.stream,)


def usual_processor(vision: QwenVision) -> dict[str, Any]:
    """A preprocessor_config.json with 4 to USUAL_FEATURES tokens for an image."""
    pixels = (vision.patch_size * vision.spatial_merge_size) ** 2
    own = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size}
    size = {"shortest_edge": 4 * pixels, "longest_edge": USUAL_FEATURES * pixels}
    kind = {"image_processor_type": "Qwen2VLImageProcessor", "temporal_patch_size": vision.temporal_patch_size}
    return {**kind, **own, "size": size}


def qwen_vl_rules(config: QwenVLConfig) -> list[Problem]:
    """Rules of the tower, and of what ties it to the text."""
    at, v = "model.vision", config.vision
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size")
    found = at_least(at, v, 1, *names, "spatial_merge_size", "temporal_patch_size")
    if found:
        return found
    if v.hidden_size % (4 * v.num_attention_heads):
        because = {f"{at}.num_attention_heads": v.num_attention_heads}
        rule, valid = "must give heads of a multiple of 4 features", multiples(v.hidden_size, 4 * v.num_attention_heads)
        found.append(problem(at, v, "hidden_size", rule, because, valid))
    if not 0 <= config.image_token_id < config.vocab_size:
        because = {"model.vocab_size": config.vocab_size}
        rule = "must be a token of the vocabulary"
        found.append(problem("model", config, "image_token_id", rule, because, (config.vocab_size - 1,)))
    pairs = config.rotated_features // 2
    if len(config.mrope_section) != 3 or min(config.mrope_section) < 0 or sum(config.mrope_section) != pairs:
        rule, because = "must be three numbers whose sum is the pairs of a head's features", {"pairs": pairs}
        found.append(problem("model", config, "mrope_section", rule, because, (small_section(pairs),)))
    if config.rope_scaling is not None:
        rule = "is not built beside positions by rows and columns"
        found.append(problem("model", config, "rope_scaling", rule, {"model.family": config.family}, (None,)))
    return found


def check_positions(config: QwenVLConfig, v: LearnedVision) -> list[Problem]:
    """Learned positions are a square."""
    at = "model.vision"
    found = at_least(at, v, 1, "num_position_embeddings")
    if v.position_side**2 != v.num_position_embeddings:
        valid = (max(1, v.position_side) ** 2,)
        found.append(problem(at, v, "num_position_embeddings", "must be a square number", {}, valid))
    return found


def interleaved_axes(section: tuple[int, int, int]) -> tuple[int, ...]:
    """For each pair of features, which of the three positions rotates it, if the three take turns."""
    found = [0] * sum(section)
    for axis in (1, 2):
        for pair in range(axis, min(3 * section[axis], len(found)), 3):
            found[pair] = axis
    return tuple(found)


def small_section(pairs: int) -> tuple[int, int, int]:
    """A section for so many pairs."""
    rows, columns = max(pairs // 3, min(1, pairs - 1)), max(pairs // 3, min(1, pairs - 2), 0)
    return pairs - rows - columns, rows, columns


# ---- config.json

VISION_FIELDS = {
    "depth": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "patch_size": "patch_size",
    "spatial_merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
}
LEARNED_KEYS = {"num_position_embeddings": integer(2304), "hidden_act": text("gelu_pytorch_tanh")}
VISION_KEYS = {
    "depth": integer(NEEDED),
    "hidden_size": integer(NEEDED),
    "intermediate_size": integer(NEEDED),
    "num_heads": integer(NEEDED),
    "patch_size": integer(NEEDED),
    "spatial_merge_size": integer(2),
    "temporal_patch_size": integer(2),
    "in_channels": integer(3),
    "out_hidden_size": integer(NEEDED),
    "rope_parameters": HfKey((dict, NONE), None),
}
OTHER_VISION_NAMES = {"in_channels": "in_chans", "depth": "num_hidden_layers", "num_heads": "num_attention_heads"}
TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
TOKEN_KEYS = {
    "image_token_id": integer(151655),
    "video_token_id": integer(151656),
    "vision_start_token_id": integer(151652),
    "vision_end_token_id": integer(151653),
}
AXIAL = ({"rope_type": "axial", "rope_theta": 10000.0}, {"rope_type": "axial", "rope_theta": 10000}, None)


def vision_values(
    config: Any, keys: dict[str, HfKey], only: dict[str, tuple[Any, ...]], width: int, odd: list[str]
) -> dict[str, Any]:
    """The values of vision_config, and under the names of our fields those that every tower has. width: of the
    text."""
    if not isinstance(config, dict):
        raise CheckpointError(f"vision_config={config!r} (it must be an object)")
    values = values_of(config, {**VISION_KEYS, **keys}, OTHER_VISION_NAMES, "vision_config")
    usual: dict[str, tuple[Any, ...]] = {"in_channels": (3,), "out_hidden_size": (width,), "rope_parameters": AXIAL}
    odd += [f"vision_config: {each}" for each in other_values(values, {**usual, **only})]
    return {**values, **{name: values[key] for key, name in VISION_FIELDS.items()}}


def vision_fields_to_hf(vision: QwenVision, width: int) -> dict[str, Any]:
    own = {key: getattr(vision, name) for key, name in VISION_FIELDS.items()}
    rope = {"rope_type": "axial", "rope_theta": 10000.0}
    return {**own, "in_channels": 3, "out_hidden_size": width, "rope_parameters": rope}


def text_with_section(config: dict[str, Any], usual: tuple[int, int, int]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The keys of the text model without its mrope_section, and this. They stand in text_config, or, in older folders,
    beside the tower's."""
    own = config.get("text_config")
    keys = dict(own) if isinstance(own, dict) else {k: v for k, v in config.items() if k != "vision_config"}
    section: Any = usual
    for name in ("rope_scaling", "rope_parameters"):
        rope = keys.get(name)
        if isinstance(rope, dict):
            section = rope.get("mrope_section", section)
            left = {k: v for k, v in rope.items() if k not in ("mrope_section", "mrope_interleaved")}
            left = {k: "default" if k in ("type", "rope_type") and v == "mrope" else v for k, v in left.items()}
            keys[name] = left
    if isinstance(keys.get("rope_scaling"), dict) and set(keys["rope_scaling"]) <= {"type", "rope_type"}:
        if "default" in keys["rope_scaling"].values() or not keys["rope_scaling"]:
            keys["rope_scaling"] = None
    keys["tie_word_embeddings"] = config.get("tie_word_embeddings", False)
    numbers = isinstance(section, list | tuple) and all(isinstance(n, int) for n in section)
    if not numbers:
        raise CheckpointError(f"mrope_section={section!r} (it must be a list of three integers)")
    return keys, tuple(section)


def check_layers(config: QwenVLConfig, name: str) -> list[Problem]:
    """A field of the tower that names some of its layers."""
    at, v, layers = "model.vision", config.vision, getattr(config.vision, name)
    if all(0 <= layer < v.num_hidden_layers for layer in layers) and sorted(set(layers)) == list(layers):
        return []
    rule, because = "must be ascending numbers of layers", {f"{at}.num_hidden_layers": v.num_hidden_layers}
    kept = tuple(sorted({layer for layer in layers if 0 <= layer < v.num_hidden_layers}))
    return [problem(at, v, name, rule, because, (kept,))]


def inner_config(family: Family, keys: dict[str, Any], found: ConfigJson) -> ModelConfig | None:
    """The text's config as its own family reads it; what cannot be computed is added to `found.odd`."""
    kinds = tuple(dict.fromkeys((None, family.name, found.family, f"{found.family}_text")))
    if keys.get("model_type") not in kinds:  # transformers would look for tensors of other names
        found.odd.append(f"text_config: model_type={keys['model_type']!r} (supported: {shown(kinds)})")
        return None
    values = values_of(keys, family.json_keys, family.other_names, "text_config")
    inner = ConfigJson(family.name, family.config, keys, values, other_values(values, family.only))
    made = family.from_hf(inner) if not inner.odd else None
    found.odd += [f"text_config: {each}" for each in inner.odd]
    return made


def fields_for(config: type[Any], inner: ModelConfig) -> dict[str, Any]:
    """The fields of the text's config that ours has too."""
    ours = {f.name for f in fields(config)} - {"family"}
    return {f.name: getattr(inner, f.name) for f in fields(inner) if f.name in ours}


def text_of(config: ModelConfig, family: Family) -> Any:
    """The text's config as its own family has it."""
    kind: Any = family.config
    names = {f.name for f in fields(kind)} & set(vars(config)) - {"family"}
    return kind(**{name: getattr(config, name) for name in sorted(names)})


def text_to_hf(config: QwenVLConfig, family: Family, **more: Any) -> dict[str, Any]:
    keys = family.to_hf(text_of(config, family))
    rope = {**keys["rope_parameters"], "mrope_section": list(config.mrope_section), **more}
    found = {"model_type": f"{config.family}_text", **keys, "rope_parameters": rope}
    del found["tie_word_embeddings"]
    return found


def shrink_vision(vision: Any, small: SmallSizes, **more: Any) -> Any:
    """Two layers of narrow heads."""
    sizes = {"hidden_size": 16, "intermediate_size": 6 * small.head_dim, "num_hidden_layers": 2}
    return replace(vision, **sizes, num_attention_heads=2, patch_size=2, spatial_merge_size=2, **more)


def shrink_text(config: Any, small: SmallSizes, vision: Any) -> Any:
    return with_small_tower(shrink_decoder(config, small), config, small, vision)


def with_small_tower(made: Any, config: Any, small: SmallSizes, vision: Any) -> Any:
    """`made`: the config with the text's small sizes."""
    pairs = made.rotated_features // 2
    token = min(config.image_token_id, small.vocab_size - 1)
    return replace(made, vision=vision, mrope_section=small_section(pairs), image_token_id=token)

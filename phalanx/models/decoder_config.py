"""What Llama-like families share besides blocks (models/decoder.py): the `model` section, its rules, config.json in
both directions, names of tensors, and the sizes of a small copy for `phalanx verify`.

Nothing here imports torch: configs are read before anything heavy is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, fields, replace
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, divisors, multiples, no_effect, problem, within
from phalanx.models.config_json import (
    LIST_OR_NULL,
    NEEDED,
    NONE,
    ConfigJson,
    HfKey,
    integer,
    integer_or_null,
    number,
    shown,
    switch,
    text,
)
from phalanx.models.model_config import ModelConfig, SmallSizes, TensorNames, check_head_dim
from phalanx.models.rope import (
    LayerRope,
    RopeOf,
    RopeScaling,
    check_rope_base,
    check_rope_scaling,
    read_rope,
    rope_to_hf,
    small_scaling,
    with_factors,
)

# ---- the section ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    family: str
    """Which model this section describes: a family of Phalanx, or a package's (package.module:NAME)."""
    vocab_size: int
    """Size of the vocabulary; any size at any tp, padding never leaves the ranks."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of the gated MLP."""
    num_hidden_layers: int
    """Number of transformer layers."""
    num_attention_heads: int
    """Number of query heads."""
    num_key_value_heads: int | None = None
    """Number of key/value heads (grouped-query attention); unset: as many as query heads."""
    head_dim: int | None = None
    """Width of a head; unset: hidden_size / num_attention_heads."""
    max_position_embeddings: int = 131072
    """Longest sequence the model is meant for."""
    rms_norm_eps: float = 1e-5
    """Epsilon of RMSNorm."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary embedding for longer contexts; unset: none."""
    tie_word_embeddings: bool = False
    """Use the input embedding as output head."""
    initializer_range: float = 0.02
    """Standard deviation of initial weights."""
    attention_bias: bool = False
    """The projections of attention (q, k, v and output) have biases, in families that have this switch."""
    mlp_bias: bool = False
    """The three projections of the MLP have biases, in families that have this switch."""
    head: Literal["vocabulary", "none"] = "vocabulary"
    """What the head says: vocabulary (the next token), or none: the model ends with its hidden states, of which
    embeddings are made."""

    biases: ClassVar[tuple[str, ...]] = ()
    """Which of attention_bias and mlp_bias the family reads."""
    prefix: ClassVar[str] = ""
    """Of the names of all tensors, in families whose files hold other models beside the text's."""
    body: ClassVar[str] = "model."
    """What the names of all tensors but the head have after that."""
    offset_norms: ClassVar[bool] = False
    """Whether weights of RMSNorms are stored as their distance from one."""

    @property
    def base(self) -> str:
        """How the names of the text's tensors but the head begin."""
        return self.prefix + self.body

    def layer_name(self, layer: int) -> str:
        """How the names of a layer's tensors begin."""
        return f"{self.base}layers.{layer}"

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_widths(self) -> tuple[int, int]:
        width = self.head_dim or self.hidden_size // max(1, self.num_attention_heads)
        return width, width

    @property
    def embedding_scale(self) -> float:
        """What the input embedding is multiplied by."""
        return 1.0

    @property
    def logit_soft_cap(self) -> float | None:
        """The cap c of logits, which become c * tanh(logit / c)."""
        return None

    @property
    def rotated_features(self) -> int:
        """Features of a head that are rotated."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def rope(self, layer: int) -> LayerRope | None:
        """The rotary embedding of a layer; None: it has none."""
        return LayerRope(self.rope_theta, self.rope_scaling, self.rotated_features)


@dataclass(frozen=True, kw_only=True)
class PartialRotaryConfig(DecoderConfig):
    """Llama's fields, and a part of each head that is not rotated."""

    partial_rotary_factor: float = 1.0
    """The fraction of each head that is rotated, its first features; the rest carries no position."""

    @property
    def rotated_features(self) -> int:
        return int(super().rotated_features * self.partial_rotary_factor)


LayerType = Literal["sliding_attention", "full_attention"]
LAYER_TYPES = ("sliding_attention", "full_attention")


@dataclass(frozen=True, kw_only=True)
class UpperWindowConfig(DecoderConfig):
    """Llama's fields, and a window in the upper layers or in those that layer_types names."""

    sliding_window: int | None = None
    """In a layer with a window, a token reads this many tokens: itself and those before it; unset: all before it in
    every layer."""
    max_window_layers: int = 0
    """The first so many layers have no window."""
    layer_types: tuple[LayerType, ...] | None = None
    """Whether each layer has the window; unset: all from number max_window_layers on."""

    def window(self, layer: int) -> int | None:
        slides = (
            layer >= self.max_window_layers
            if self.layer_types is None
            else self.layer_types[layer] == "sliding_attention"
        )
        return self.sliding_window if slides else None


# ---- rules ---------------------------------------------------------------------------------------

WITH_SWITCH = "a model.family that has this switch, such as llama"


def decoder_rules(config: DecoderConfig, seq_length: int) -> list[Problem]:
    """The rules of every such model."""
    return with_head_rules(config, common_rules(config))


def with_head_rules(config: DecoderConfig, found: list[Problem]) -> list[Problem]:
    """Rules for heads that have one width, added if nothing else is wrong."""
    if found or min(config.hidden_size, config.num_attention_heads) < 1:
        return found
    return check_heads(config) + (check_head_dim(config) or check_part(config))


def check_part(config: DecoderConfig) -> list[Problem]:
    """For families that may rotate a part of each head: pairs of features, at least one."""
    if not isinstance(config, PartialRotaryConfig) or (
        config.rotated_features >= 2 and not config.rotated_features % 2
    ):
        return []
    width = config.head_widths[0]
    features = [n for n in multiples(config.rotated_features, 2) if 2 <= n <= width]
    rule = "must give an even number of rotated features of a head, at least 2"
    because = {"rotated features": config.rotated_features, "head_dim": width}
    return [
        problem("model", config, "partial_rotary_factor", rule, because, tuple(n / width for n in features) or (1.0,))
    ]


def common_rules(config: DecoderConfig) -> list[Problem]:
    """Rules that do not depend on how heads are defined."""
    found = at_least("model", config, 1, "num_key_value_heads", "head_dim")
    found += within("model", config, "rms_norm_eps", "(0, inf)") + within("model", config, "rope_theta", "(0, inf)")
    if isinstance(config, PartialRotaryConfig):
        found += within("model", config, "partial_rotary_factor", "(0, 1]", (0.5, 1.0))
    heads_known = min(config.hidden_size, config.num_attention_heads) >= 1
    if config.rope_scaling is not None:
        found += check_rope_scaling(config.rope_scaling, config.rotated_features if heads_known else 0)
    if heads_known:
        found += check_rope_base(config, config.rotated_features)
    return found + check_window(config) + check_biases(config)


def check_heads(config: DecoderConfig) -> list[Problem]:
    heads, kv_heads = config.num_attention_heads, config.kv_heads
    if heads % kv_heads == 0:
        return []
    because, rule = {"model.num_attention_heads": heads}, "must divide num_attention_heads"
    return [problem("model", config, "num_key_value_heads", rule, because, divisors(kv_heads, heads))]


def check_divided_width(config: DecoderConfig) -> list[Problem]:
    """For families whose folders transformers reads only if the heads divide the width, however wide they are."""
    heads, width = config.num_attention_heads, config.hidden_size
    if width % heads == 0:
        return []
    rule, because = "must be a multiple of num_attention_heads", {"model.num_attention_heads": heads}
    return [problem("model", config, "hidden_size", rule, because, multiples(width, heads))]


def check_window(config: DecoderConfig) -> list[Problem]:
    """For families that have a window, in all layers or in some."""
    names = {f.name for f in fields(config)}
    if "sliding_window" not in names:
        return []
    found = at_least("model", config, 1, "sliding_window")
    window, types = getattr(config, "sliding_window"), getattr(config, "layer_types", None)  # noqa: B009
    if isinstance(config, UpperWindowConfig):
        found += at_least("model", config, 0, "max_window_layers")
        if types is not None:
            found += no_effect(
                "model", config, ["max_window_layers"], "model.layer_types=null", {"model.layer_types": types}
            )
        elif window is None:
            found += no_effect(
                "model", config, ["max_window_layers"], "model.sliding_window", {"model.sliding_window": None}
            )
    return found if types is None else found + check_layer_types(config, types, window)


def check_layer_types(config: DecoderConfig, types: tuple[str, ...], window: int | None) -> list[Problem]:
    layers = config.num_hidden_layers
    if len(types) != layers >= 1:
        rule, because = "must have one kind per layer", {"kinds": len(types), "model.num_hidden_layers": layers}
        whole = (types * layers)[:layers]
        return [problem("model", config, "layer_types", rule, because, (*((whole,) if whole else ()), None))]
    if "sliding_attention" not in types:
        return no_effect(
            "model", config, ["sliding_window"], "a layer of sliding_attention", {"model.layer_types": types}
        )
    if window is None:
        rule = "must be set for layers of sliding_attention"
        return [problem("model", config, "sliding_window", rule, {"model.layer_types": types}, (4096,))]
    return []


def check_biases(config: DecoderConfig) -> list[Problem]:
    """Only families whose published code has the switch may have biases."""
    because = {"model.family": config.family}
    found = []
    if "attention_bias" not in config.biases:
        found += no_effect("model", config, ["attention_bias"], WITH_SWITCH, because)
    if "mlp_bias" not in config.biases:
        found += no_effect("model", config, ["mlp_bias"], WITH_SWITCH, because)
    return found


# ---- config.json ---------------------------------------------------------------------------------

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "initializer_range",
)
DECODER_KEYS = {
    "vocab_size": integer(NEEDED),
    "hidden_size": integer(NEEDED),
    "intermediate_size": integer(NEEDED),
    "num_hidden_layers": integer(NEEDED),
    "num_attention_heads": integer(NEEDED),
    "hidden_act": text("silu"),
    "initializer_range": number(0.02),
    "tie_word_embeddings": switch(False),
    "attention_dropout": number(0.0),
    "rms_norm_eps": number(1e-6),
    "rope_parameters": HfKey((dict, NONE), None),
}
UPPER_WINDOW_KEYS = {
    "use_sliding_window": switch(False),
    "sliding_window": integer_or_null(4096),
    "max_window_layers": integer(28),
    "layer_types": LIST_OR_NULL,
}
# if a key is absent, transformers uses the first value; values not listed are refused
DECODER_ONLY: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish"), "attention_dropout": (0.0, None)}


def sizes_from_hf(found: ConfigJson, of: RopeOf, default_rope: dict[str, Any] | None = None) -> dict[str, Any]:
    """Sizes and rotary embedding."""
    rope = read_rope(found.stated, of, default_rope)
    found.odd += rope.odd
    part = {} if of.partial is None else {"partial_rotary_factor": rope.partial}
    return {**found.pick(*SIZES), "rope_theta": rope.theta, "rope_scaling": rope.scaling, **part}


def rope_of(
    found: ConfigJson, theta: float, head_dim: int, scores: bool = False, partial: float | None = None
) -> RopeOf:
    types = found.stated.get("layer_types")
    longest = found.values["max_position_embeddings"]
    return RopeOf(theta, head_dim, longest, types if isinstance(types, list) else [], scores, partial)


def decoder_fields(
    found: ConfigJson,
    theta: float = 10000.0,
    default_rope: dict[str, Any] | None = None,
    partial: float | None = None,
) -> dict[str, Any]:
    """Fields of a model whose heads have one width, with derived values filled in.

    theta, default_rope   the family's base and scaling if the file has none
    partial               for a PartialRotaryConfig: the rotated part of each head if the file has none
    """
    v = found.values
    heads = max(1, v["num_attention_heads"])
    head_dim = v["hidden_size"] // heads if v["head_dim"] is None else v["head_dim"]
    kv_heads = heads if v["num_key_value_heads"] is None else v["num_key_value_heads"]
    same = sizes_from_hf(found, rope_of(found, theta, head_dim, partial=partial), default_rope)
    return {**same, "num_key_value_heads": kv_heads, "head_dim": head_dim}


def layer_types_of(found: ConfigJson) -> list[str] | None:
    """The kind of each layer, if the config states it; `attention` is an old name of full attention."""
    v = found.values
    if v["layer_types"] is None:
        return None
    types = ["full_attention" if kind == "attention" else kind for kind in v["layer_types"]]
    if len(types) != v["num_hidden_layers"] or any(kind not in LAYER_TYPES for kind in types):
        found.odd.append(
            f"layer_types={types!r} (supported: one of {shown(LAYER_TYPES)} for each of "
            f"{v['num_hidden_layers']} layers)"
        )
    return types


def types_with_window(layers: int, window: int | None, first: int = 0) -> list[str]:
    """The kinds of layers if all from number `first` on have the window."""
    return [LAYER_TYPES[0] if window is not None and i >= first else LAYER_TYPES[1] for i in range(layers)]


def check_types(found: ConfigJson, types: Sequence[str], window: int | None) -> list[bool]:
    """Which layers have the window; recorded as unsupported if they are to have one and there is none."""
    slides = [kind == LAYER_TYPES[0] for kind in types]
    if any(slides) and window is None:
        found.odd.append(
            "layer_types with 'sliding_attention' and no sliding_window in use (supported: a sliding_window, "
            "use_sliding_window=true)"
        )
    return slides


def upper_window_fields(found: ConfigJson, types: list[str] | None) -> dict[str, Any]:
    """The window and the layers that have it, in the shortest form. `types`: from `layer_types_of`."""
    v = found.values
    window = v["sliding_window"] if v["use_sliding_window"] else None
    if types is None:
        types = types_with_window(v["num_hidden_layers"], window, v["max_window_layers"])
    slides = check_types(found, types, window)
    if not any(slides):
        return {"sliding_window": None}
    first = slides.index(True)
    if not all(slides[first:]):
        return {"sliding_window": window, "layer_types": tuple(types)}
    return {"sliding_window": window, "max_window_layers": first}


def decoder_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The keys of every such family; the family's file adds its own."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads or config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        **rope_to_hf(config.rope_theta, config.rope_scaling, getattr(config, "partial_rotary_factor", None)),
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
    }


def heads_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """As `decoder_to_hf`, with the width of a head stated explicitly."""
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    return {**decoder_to_hf(config), "head_dim": head_dim}


def upper_window_to_hf(config: UpperWindowConfig) -> dict[str, Any]:
    first = config.num_hidden_layers if config.sliding_window is None else config.max_window_layers
    return {
        **heads_to_hf(config),
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "max_window_layers": first,
        "layer_types": types_to_hf(config),
    }


def types_to_hf(config: DecoderConfig) -> list[str]:
    windows = (config.window(i) for i in range(config.num_hidden_layers))
    return [LAYER_TYPES[1] if window is None else LAYER_TYPES[0] for window in windows]


def own_fields(config: type[Any]) -> list[Field[Any]]:
    """Fields that a family adds to those of every decoder, and the biases that it reads."""
    common = {f.name for f in fields(DecoderConfig)} - set(config.biases)
    return [f for f in fields(config) if f.name not in common]


def keys_of_fields(config: type[Any]) -> dict[str, HfKey]:
    """The keys of a family that does not define its own: those of its fields."""
    hints = get_type_hints(config)
    longest = next(f.default for f in fields(config) if f.name == "max_position_embeddings")
    return {
        **DECODER_KEYS,
        "num_key_value_heads": integer_or_null(),
        "head_dim": integer_or_null(),
        "max_position_embeddings": integer(NEEDED if longest is MISSING else longest),
        **{f.name: key_of(f, hints[f.name]) for f in own_fields(config)},
    }


JSON_TYPES: dict[Any, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (float, int),
    str: (str,),
    NONE: (NONE,),
    tuple: (list,),
    Literal: (str,),
}


def key_of(f: Field[Any], hint: Any) -> HfKey:
    """The key of a field, by its type; TypeError if JSON has no such type."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [get_origin(member) or member for member in members]
    unknown = [kind for kind in kinds if kind not in JSON_TYPES]
    if unknown:
        raise TypeError(f"{f.name}: {hint} has no form in config.json; give the family keys, from_hf and to_hf")
    default = f.default_factory() if f.default_factory is not MISSING else f.default
    types = tuple(kind for name in kinds for kind in JSON_TYPES[name])
    return HfKey(types, NEEDED if default is MISSING else default)


def fields_from_hf(found: ConfigJson) -> Any:
    """The config of a family that does not define from_hf."""
    values = found.pick(*(f.name for f in own_fields(found.config)))
    partial = values.pop("partial_rotary_factor") if issubclass(found.config, PartialRotaryConfig) else None
    own = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    same = decoder_fields(found, partial=partial)
    return None if found.odd else found.config(family=found.family, **same, **own)


def fields_to_hf(config: DecoderConfig) -> dict[str, Any]:
    own = {f.name: getattr(config, f.name) for f in own_fields(type(config))}
    return {**heads_to_hf(config), **{name: list(v) if isinstance(v, tuple) else v for name, v in own.items()}}


def fill_heads(model: dict[str, Any]) -> dict[str, Any]:
    """Fields of a config as plain values, with unset ones derived from others."""
    kv_heads = model.get("num_key_value_heads") or model.get("num_attention_heads")
    head_dim = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    return {**model, "num_key_value_heads": kv_heads, "head_dim": head_dim}


# ---- names of tensors ----------------------------------------------------------------------------

decoder_tensors = TensorNames(
    prefix="model.", embedding="model.embed_tokens.weight", layer="model.layers.{}", constants=(".rotary_emb.inv_freq",)
)

# ---- a small copy --------------------------------------------------------------------------------

Decoder = TypeVar("Decoder", bound=DecoderConfig)
Kind = TypeVar("Kind")  # of a layer


def shrink_decoder(config: Decoder, small: SmallSizes) -> Decoder:
    """A head width that is set is kept; windows and scaled rotary embeddings keep their relation to the sequence
    length."""
    own = config.head_dim is not None and config.head_dim * config.num_attention_heads != config.hidden_size
    part = getattr(config, "partial_rotary_factor", 1.0)
    own_dim = None
    if own:
        own_dim = small.head_dim + 2 if small.head_dim == 4 and part == 1.0 else small.head_dim
    scaling = small_scaling(config.rope_scaling, small.seq_length, small.given_length)
    return replace(
        config,
        vocab_size=small.vocab_size,
        hidden_size=small.hidden_size,
        intermediate_size=small.intermediate_size,
        num_hidden_layers=small.layers,
        num_attention_heads=small.heads,
        num_key_value_heads=small.kv_heads,
        head_dim=own_dim,
        rope_scaling=with_factors(scaling, int((own_dim or small.head_dim) * part) // 2),
        **small_positions(config, small),
        **small_window(config, small),
    )


def small_positions(config: DecoderConfig, small: SmallSizes) -> dict[str, Any]:
    """Sequences longer than the model is meant for stay longer: dynamic scaling enlarges the base for them."""
    beyond = small.given_length > config.max_position_embeddings
    return {"max_position_embeddings": small.seq_length - 1} if beyond else {}


def small_window(config: DecoderConfig, small: SmallSizes) -> dict[str, Any]:
    """A window shorter than the sequence stays shorter; layers with and without a window stay."""
    changed: dict[str, Any] = {}
    given, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if given is not None:
        changed["sliding_window"] = 5 if given < small.given_length else given
    if types:
        changed["layer_types"] = small_types(types, small.layers)
    if isinstance(config, UpperWindowConfig) and given is not None and not types:
        whole = config.max_window_layers >= config.num_hidden_layers
        changed["max_window_layers"] = min(config.max_window_layers, small.layers if whole else small.layers - 1)
    return changed


def small_types(types: Sequence[Kind], layers: int) -> tuple[Kind, ...]:
    """The kinds of the first layers; the last is of another kind if all would be the same."""
    kept = list(types[:layers])
    others = [kind for kind in types if kind not in kept]
    if others and layers > 1:
        kept[-1] = others[0]
    return tuple(kept)

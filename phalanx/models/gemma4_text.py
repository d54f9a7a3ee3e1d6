"""Gemma 4, its dense text model: Gemma 3 with wider heads, fewer keys and values that are the keys in layers without a
window, values normalized too, a factor for each layer. Google, "Gemma 4", 2026; names of `Gemma4ForCausalLM`.

Not here, and refused by name: inputs of each layer's own (`hidden_size_per_layer_input`), layers that read the keys of
others (`num_kv_shared_layers`), experts (`enable_moe_block`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, divisors, problem, within
from phalanx.models.config_json import (
    LIST_OR_NULL,
    NONE,
    ConfigJson,
    HfKey,
    integer,
    integer_or_null,
    number_or_null,
    switch,
    text,
)
from phalanx.models.decoder_config import (
    DECODER_KEYS,
    SIZES,
    LayerType,
    common_rules,
    heads_to_hf,
    layer_types_of,
    small_types,
)
from phalanx.models.family import Family
from phalanx.models.mixed_layers import LocalRopeConfig, check_local_rope, pattern, shrink_mixed
from phalanx.models.model_config import SmallSizes, check_head_dim
from phalanx.models.rope import LayerRope, RopeFound, RopeOf, read_rope

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.attention import Attention
    from phalanx.nn.env import Env


@dataclass(frozen=True, kw_only=True)
class Gemma4TextConfig(LocalRopeConfig):
    """Llama's fields. The input embedding is multiplied by the square root of its width."""

    family: Literal["gemma4_text"] = "gemma4_text"
    """Which model this section describes: gemma4_text."""
    head_dim: int | None = 256
    """Width of a head in layers with a window; null: hidden_size / num_attention_heads."""
    global_head_dim: int | None = None
    """Width of a head in layers without a window; unset: as in the others (published models: 512)."""
    num_global_key_value_heads: int | None = None
    """Number of key/value heads in layers without a window; unset: as in the others."""
    attention_k_eq_v: bool = False
    """In layers without a window, values are the keys, before these are normalized and rotated."""
    rms_norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    rope_theta: float = 1000000.0
    """Base of the rotary embedding of layers without a window."""
    tie_word_embeddings: bool = True
    """Use the input embedding as output head."""
    sliding_window: int = 512
    """In a layer with a window, a token reads this many tokens: itself and those before it."""
    final_logit_softcapping: float | None = None
    """Logits become cap * tanh(logit / cap); unset: they stay as they are."""

    biases: ClassVar[tuple[str, ...]] = ("attention_bias",)
    period: ClassVar[int] = 6

    @property
    def types(self) -> tuple[LayerType, ...]:
        """Of six layers in a row the last has no window, and the last of all has none."""
        return usual_types(self.num_hidden_layers) if self.layer_types is None else self.layer_types

    @property
    def kv_heads(self) -> int:
        """The fewest of a layer."""
        return min(self.kv_heads_of(kind) for kind in self.types or ("sliding_attention",))

    @property
    def embedding_scale(self) -> float:
        return self.hidden_size**0.5

    @property
    def logit_soft_cap(self) -> float | None:
        return self.final_logit_softcapping

    @property
    def whole_width(self) -> int:
        """Of a head in layers without a window."""
        return self.global_head_dim or self.head_widths[0]

    def kv_heads_of(self, kind: LayerType) -> int:
        usual = self.num_key_value_heads or self.num_attention_heads
        return usual if kind == "sliding_attention" else self.num_global_key_value_heads or usual

    def rope(self, layer: int) -> LayerRope | None:
        if self.types[layer] == "sliding_attention":
            return super().rope(layer)
        return LayerRope(self.rope_theta, self.rope_scaling, self.whole_width)


def usual_types(layers: int) -> tuple[LayerType, ...]:
    return (*pattern(layers, Gemma4TextConfig.period)[:-1], "full_attention")


# functions that build blocks import torch themselves, because reading a config must not
def blocks(config: Gemma4TextConfig, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.decoder import ScaledLayer, decoder_blocks, dense_mlp
    from phalanx.nn.mlp import GeGLU

    mlp = partial(dense_mlp, mlp=GeGLU)
    return decoder_blocks(config, env, partial(ScaledLayer, make_attention=attention, make_mlp=mlp))


def attention(config: Gemma4TextConfig, env: Env, layer: int) -> Attention:
    from phalanx.models.decoder import attention_spec, head_norm_attention
    from phalanx.ops.attention.kind import AttentionKind

    kind, names = config.types[layer], attention_spec(config, layer).names
    changes: dict[str, Any] = {"kv_heads": config.kv_heads_of(kind)}
    if kind == "full_attention":
        changes["head_dim"] = config.whole_width
        changes["names"] = (names[0], names[1], names[1] if config.attention_k_eq_v else names[2], names[3])
    how = AttentionKind(window=config.window(layer), scale=1.0)
    return head_norm_attention(config, env, layer, kind=how, value_norm=config.rms_norm_eps, **changes)


def rules(config: Gemma4TextConfig, seq_length: int) -> list[Problem]:
    found = common_rules(config) + check_local_rope(config)
    found += at_least("model", config, 1, "global_head_dim", "num_global_key_value_heads")
    found += within("model", config, "final_logit_softcapping", "(0, inf)", (30.0, None))
    if found or min(config.hidden_size, config.num_attention_heads, config.num_hidden_layers) < 1:
        return found
    return check_head_dim(config) + check_whole_layers(config)


def check_whole_layers(config: Gemma4TextConfig) -> list[Problem]:
    """Layers without a window, of which the last is one."""
    types, found = config.types, list[Problem]()
    if types[-1] != "full_attention":
        rule = "must end with full_attention, as transformers makes the last layer"
        found.append(problem("model", config, "layer_types", rule, {}, ((*types[:-1], "full_attention"), None)))
    if config.whole_width % 2:
        width = config.whole_width
        rule = "must be even (features are rotated in pairs)"
        found.append(problem("model", config, "global_head_dim", rule, {}, (width - 1, width + 1)))
    heads, rule = config.num_attention_heads, "must divide num_attention_heads"
    for name in ("num_key_value_heads", "num_global_key_value_heads"):
        kv_heads = getattr(config, name)
        if kv_heads is not None and heads % kv_heads:
            valid = divisors(kv_heads, heads)
            found.append(problem("model", config, name, rule, {"model.num_attention_heads": heads}, valid))
    return found


def split_rules(config: Gemma4TextConfig, tp: int) -> list[Problem]:
    """The heads of keys of layers with a window, too, are divided over the ranks of tp, or each is shared by some."""
    kv_heads, heads = config.kv_heads_of("sliding_attention"), config.num_attention_heads
    if heads % tp or not kv_heads % tp or not tp % kv_heads:
        return []
    because = {"model.num_key_value_heads": kv_heads}
    good = [n for n in divisors(tp, heads) if not kv_heads % n or not n % kv_heads]
    return [Problem("layout.tp", tp, "must divide num_key_value_heads or be a multiple of it", because, tuple(good))]


# ---- config.json

ROPES: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
BY_LAYER = "per_layer"  # what text_keys makes of per_layer_config
KEYS = {
    **{name: key for name, key in DECODER_KEYS.items() if name != "hidden_act"},
    "num_key_value_heads": integer(4),
    "head_dim": integer(256),
    "global_head_dim": integer(512),
    "num_global_key_value_heads": integer_or_null(),
    "attention_k_eq_v": switch(False),
    "max_position_embeddings": integer(131072),
    "hidden_activation": text("gelu_pytorch_tanh"),
    "tie_word_embeddings": switch(True),
    "attention_bias": switch(False),
    "attention_dropout": number_or_null(0.0),
    "sliding_window": integer(512),
    "layer_types": LIST_OR_NULL,
    "final_logit_softcapping": number_or_null(None),
    "use_bidirectional_attention": HfKey((str, NONE), None),
    "hidden_size_per_layer_input": integer(256),
    "num_kv_shared_layers": integer(0),
    "enable_moe_block": switch(False),
}
ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_dropout": (0.0, None),
    "use_bidirectional_attention": (None, "vision"),  # of text alone the second is causal too
    "hidden_size_per_layer_input": (0,),
    "num_kv_shared_layers": (0,),
    "enable_moe_block": (False,),
}


def text_keys(config: dict[str, Any]) -> dict[str, Any]:
    """What single layers have otherwise is read here, and refused elsewhere."""
    if "per_layer_config" not in config:
        return config
    return {**config, "per_layer_config": None, BY_LAYER: config["per_layer_config"] or {}}


def from_hf(found: ConfigJson) -> Gemma4TextConfig | None:
    v, types = found.values, types_of(found)
    own = whole_layers(found, types) if not found.odd else {}
    if found.odd:
        return None
    ropes = {kind: rope_of_kind(found, kind, own["global_head_dim"]) for kind in ROPES}
    for kind, rope in ropes.items():
        found.odd += [f"{odd} (of {kind})" for odd in rope.odd]
    full, sliding = ropes["full_attention"], ropes["sliding_attention"]
    if sliding.scaling is not None:
        found.odd.append(f"rope_type={sliding.scaling.rope_type!r} of sliding_attention (supported: 'default')")
    if found.odd:
        return None
    same = found.pick(*SIZES, "num_key_value_heads", "head_dim", "attention_bias", "final_logit_softcapping")
    said: dict[str, Any] = {} if types == usual_types(len(types)) else {"layer_types": types}
    window: dict[str, Any] = {"sliding_window": v["sliding_window"]} if "sliding_attention" in types else {}
    bases: dict[str, Any] = {
        "rope_theta": full.theta,
        "rope_scaling": full.scaling,
        "rope_local_base_freq": sliding.theta,
    }
    return Gemma4TextConfig(**same, **said, **window, **bases, **own)


def types_of(found: ConfigJson) -> tuple[LayerType, ...]:
    """The kinds of layers, of which transformers makes the last one whole."""
    layers = found.values["num_hidden_layers"]
    types: Any = layer_types_of(found)
    if types is None:
        return usual_types(layers)
    return (*types[:-1], "full_attention")


def whole_layers(found: ConfigJson, types: Sequence[str]) -> dict[str, Any]:
    """Heads of layers without a window, which all have the same."""
    v = found.values
    same = v["attention_k_eq_v"]
    if BY_LAYER not in found.stated:
        heads = v["num_global_key_value_heads"] if same else None
        return {"global_head_dim": v["global_head_dim"], "num_global_key_value_heads": heads, "attention_k_eq_v": same}
    given = found.stated[BY_LAYER]
    keys = ("head_dim", "num_key_value_heads")
    every = given if isinstance(given, dict) else {"": given}
    whole = [every.get(str(i), {}) for i, kind in enumerate(types) if kind == "full_attention"]
    others = set(every) - {str(i) for i, kind in enumerate(types) if kind == "full_attention"}
    good = isinstance(whole[0], dict) and all(one == whole[0] for one in whole) and set(whole[0]) <= set(keys)
    if others or not good or not all(type(value) is int for value in whole[0].values()):
        wanted = "head_dim and num_key_value_heads, the same in all layers of full_attention and in no others"
        found.odd.append(f"per_layer_config={given!r} (supported: {wanted})")
        return {}
    return {
        "global_head_dim": whole[0].get("head_dim", v["head_dim"]),
        "num_global_key_value_heads": whole[0].get("num_key_value_heads"),
        "attention_k_eq_v": same,
    }


def rope_of_kind(found: ConfigJson, kind: str, width: int) -> RopeFound:
    """The rotary embedding of a kind of layers. width: of a head in those without a window."""
    v, stated = found.values, found.stated
    theta = ROPES[kind]["rope_theta"]
    given = stated.get("rope_parameters")
    given = ROPES if given is None else given
    flat = [key for key in ("rope_scaling", "rope_theta", "partial_rotary_factor") if stated.get(key) is not None]
    if flat:
        return RopeFound(theta, None, [f"{key}={stated[key]!r} beside rope_parameters" for key in flat])
    one = given.get(kind) if set(given) == set(ROPES) else None
    if not isinstance(one, dict) or not {"rope_type", "rope_theta"} <= set(one):
        wanted = "full_attention and sliding_attention, each with rope_type and rope_theta"
        return RopeFound(theta, None, [f"rope_parameters={given!r} (supported: {wanted})"])
    features = width if kind == "full_attention" else v["head_dim"]
    return read_rope({"rope_parameters": one}, RopeOf(theta, features, v["max_position_embeddings"]))


def to_hf(config: Gemma4TextConfig) -> dict[str, Any]:
    c, written = config, heads_to_hf(config)
    for key in ("hidden_act", "rope_scaling", "rope_theta"):  # transformers would put them in rope_parameters' place
        written.pop(key, None)
    local = {"rope_type": "default", "rope_theta": c.rope_local_base_freq}
    own: dict[str, Any] = {"head_dim": c.whole_width}
    if c.num_global_key_value_heads is not None:
        own["num_key_value_heads"] = c.num_global_key_value_heads
    return {
        **written,
        "rope_parameters": {"full_attention": written["rope_parameters"], "sliding_attention": local},
        "layer_types": list(c.types),
        "sliding_window": c.sliding_window,
        "per_layer_config": {str(i): own for i, kind in enumerate(c.types) if kind == "full_attention"},
        "attention_k_eq_v": c.attention_k_eq_v,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": c.attention_bias,
        "final_logit_softcapping": c.final_logit_softcapping,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": False,
    }


def fill(model: dict[str, Any]) -> dict[str, Any]:
    heads = model["num_attention_heads"]
    width = model.get("head_dim") or model["hidden_size"] // heads
    kv_heads = model.get("num_key_value_heads") or heads
    return {
        **model,
        "head_dim": width,
        "num_key_value_heads": kv_heads,
        "global_head_dim": model.get("global_head_dim") or width,
        "num_global_key_value_heads": model.get("num_global_key_value_heads") or kv_heads,
    }


def shrink(config: Gemma4TextConfig, small: SmallSizes) -> Gemma4TextConfig:
    """Layers of both kinds stay, and so does what those without a window have otherwise."""
    made = shrink_mixed(config, small)
    types = (*small_types(config.types, small.layers)[:-1], "full_attention")
    wider = config.global_head_dim is not None and config.global_head_dim != config.head_widths[0]
    fewer = config.num_global_key_value_heads is not None and config.kv_heads_of("full_attention") != (
        config.num_key_value_heads or config.num_attention_heads
    )
    width = made.head_widths[0]
    return replace(
        made,
        layer_types=types,
        global_head_dim=2 * width if wider else None,
        num_global_key_value_heads=max(1, small.kv_heads // 2) if fewer else None,
    )


FAMILY = Family(
    "gemma4_text",
    Gemma4TextConfig,
    blocks,
    architecture="Gemma4ForCausalLM",
    rules=rules,
    split_rules=split_rules,
    keys=KEYS,
    only=ONLY,
    text_keys=text_keys,
    from_hf=from_hf,
    to_hf=to_hf,
    fill=fill,
    shrink=shrink,
)

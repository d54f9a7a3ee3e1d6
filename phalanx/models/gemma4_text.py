"""Gemma 4, its text models: Gemma 3 with wider heads, fewer keys and values that are the keys in layers without a
window, values normalized too, a factor for each layer; inputs of each layer's own, layers that read the keys of earlier
ones, experts beside the MLP. Google, "Gemma 4", 2026; names of `Gemma4ForCausalLM`. Its config.json: gemma4_json.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, divisors, no_effect, problem, within
from phalanx.models.decoder_config import LayerType, common_rules, decoder_tensors
from phalanx.models.experts import BALANCE, RoutingFields, expert_rules
from phalanx.models.family import Family
from phalanx.models.gemma4_json import (
    KEYS,
    ONLY,
    PERIOD,
    WITH_TOWERS,
    config_fields,
    config_keys,
    text_keys,
    usual_types,
)
from phalanx.models.mixed_layers import LocalRopeConfig, check_local_rope, shrink_mixed
from phalanx.models.model_config import SmallExperts, SmallSizes, check_head_dim
from phalanx.models.rope import LayerRope

if TYPE_CHECKING:
    from phalanx.models.config_json import ConfigJson
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env


@dataclass(frozen=True, kw_only=True)
class Gemma4TextConfig(RoutingFields, LocalRopeConfig):
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
    hidden_size_per_layer_input: int = 0
    """Features of an input that each layer has of its own, made of the token and of its embedding; 0: layers have
    none."""
    vocab_size_per_layer_input: int | None = None
    """Rows of the table of these inputs; unset: vocab_size."""
    num_kv_shared_layers: int = 0
    """So many last layers have queries alone, and read the keys and values of the last layer of their kind before
    them."""
    use_double_wide_mlp: bool = False
    """In layers without keys of their own, the MLP is twice as wide."""
    num_experts: int = 0
    """Experts per layer, beside the MLP; 0: none."""
    moe_intermediate_size: int | None = None
    """Width of an expert."""

    biases: ClassVar[tuple[str, ...]] = ("attention_bias",)
    period: ClassVar[int] = PERIOD

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

    @property
    def routed_experts(self) -> int:
        return self.num_experts

    @property
    def expert_size(self) -> int:
        return self.moe_intermediate_size or 0

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0

    def lender(self, layer: int) -> int | None:
        """The layer whose keys and values a layer reads; None: it has its own."""
        first, types = self.num_hidden_layers - self.num_kv_shared_layers, self.types
        if layer < first:
            return None
        return max(i for i in range(first) if types[i] == types[layer])

    def lends(self, layer: int) -> bool:
        """Whether later layers read its keys and values."""
        return any(self.lender(i) == layer for i in range(layer + 1, self.num_hidden_layers))

    def last_borrower(self, kind: LayerType) -> int:
        """The last layer of a kind that has no keys of its own; -1: all have."""
        found = [i for i, each in enumerate(self.types) if each == kind and self.lender(i) is not None]
        return max(found, default=-1)

    def mlp_width(self, layer: int) -> int:
        wide = self.use_double_wide_mlp and self.lender(layer) is not None
        return self.intermediate_size * (2 if wide else 1)

    def kv_heads_of(self, kind: LayerType) -> int:
        usual = self.num_key_value_heads or self.num_attention_heads
        return usual if kind == "sliding_attention" else self.num_global_key_value_heads or usual

    def rope(self, layer: int) -> LayerRope | None:
        if self.types[layer] == "sliding_attention":
            return super().rope(layer)
        return LayerRope(self.rope_theta, self.rope_scaling, self.whole_width)


# functions that build blocks import torch themselves, because reading a config must not
def blocks(config: Gemma4TextConfig, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.gemma4_blocks import gemma4_blocks

    return gemma4_blocks(config, env)


def rules(config: Gemma4TextConfig, seq_length: int) -> list[Problem]:
    found = common_rules(config) + check_local_rope(config)
    found += at_least("model", config, 1, "global_head_dim", "num_global_key_value_heads")
    found += within("model", config, "final_logit_softcapping", "(0, inf)", (30.0, None))
    found += check_inputs(config) + check_experts(config) + at_least("model", config, 0, "num_kv_shared_layers")
    if found or min(config.hidden_size, config.num_attention_heads, config.num_hidden_layers) < 1:
        return found
    return check_head_dim(config) + check_whole_layers(config) + check_shared_keys(config)


def check_inputs(config: Gemma4TextConfig) -> list[Problem]:
    """Of inputs that layers have of their own."""
    found = at_least("model", config, 0, "hidden_size_per_layer_input")
    rows, vocabulary = config.vocab_size_per_layer_input, {"model.vocab_size": config.vocab_size}
    if not config.hidden_size_per_layer_input:
        because = {"model.hidden_size_per_layer_input": 0}
        without = "model.hidden_size_per_layer_input"
        return found + no_effect("model", config, ["vocab_size_per_layer_input"], without, because)
    if rows is not None and rows < config.vocab_size:
        rule, valid = "must be >= vocab_size (each token has a row)", (config.vocab_size, None)
        found.append(problem("model", config, "vocab_size_per_layer_input", rule, vocabulary, valid))
    return found


def check_experts(config: Gemma4TextConfig) -> list[Problem]:
    if config.num_experts < 1:
        names = "num_experts_per_tok", "moe_intermediate_size", *BALANCE
        found = at_least("model", config, 0, "num_experts")
        return found + no_effect("model", config, names, "model.num_experts", {"model.num_experts": 0})
    found = expert_rules(config, "num_experts")
    if config.moe_intermediate_size is None or config.moe_intermediate_size < 1:
        rule, because = "must be set for experts, to at least 1", {"model.num_experts": config.num_experts}
        found.append(problem("model", config, "moe_intermediate_size", rule, because, (config.intermediate_size,)))
    return found


def check_shared_keys(config: Gemma4TextConfig) -> list[Problem]:
    """Each kind of layers has one with keys of its own."""
    shared, layers, types = config.num_kv_shared_layers, config.num_hidden_layers, config.types
    if not shared:
        because = {"model.num_kv_shared_layers": 0}
        return no_effect("model", config, ["use_double_wide_mlp"], "model.num_kv_shared_layers", because)
    most = layers - 1 - max(types.index(kind) for kind in set(types))
    if shared <= most:
        return []
    rule = "must leave a layer of each kind of layer_types with keys of its own"
    return [problem("model", config, "num_kv_shared_layers", rule, {"model.layer_types": types}, (most,))]


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


def from_hf(found: ConfigJson) -> Gemma4TextConfig | None:
    given = config_fields(found)
    return None if given is None else Gemma4TextConfig(**given)


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
    """Layers of both kinds stay, and so does what those without a window have otherwise; some share keys, if any do
    and there are enough."""
    made = shrink_mixed(config, small)
    wider = config.global_head_dim is not None and config.global_head_dim != config.head_widths[0]
    fewer = config.num_global_key_value_heads is not None and config.kv_heads_of("full_attention") != (
        config.num_key_value_heads or config.num_attention_heads
    )
    width, (types, shared) = made.head_widths[0], small_shared_keys(config, small.layers)
    return replace(
        made,
        layer_types=types,
        num_kv_shared_layers=shared,
        use_double_wide_mlp=config.use_double_wide_mlp and shared > 0,
        hidden_size_per_layer_input=small.head_dim if config.hidden_size_per_layer_input else 0,
        vocab_size_per_layer_input=None,
        global_head_dim=2 * width if wider else None,
        num_global_key_value_heads=max(1, small.kv_heads // 2) if fewer else None,
    )


def small_shared_keys(config: Gemma4TextConfig, layers: int) -> tuple[tuple[LayerType, ...], int]:
    """The kinds of so many layers, and how many of the last share keys: of each kind one, where there is room."""
    kinds = tuple(dict.fromkeys(config.types))
    if "full_attention" in kinds:  # the last of all
        kinds = (*(kind for kind in kinds if kind != "full_attention"), "full_attention")
    types = (kinds * layers)[:layers]
    shared = min(config.num_kv_shared_layers, max(0, layers - len(kinds)))
    return (*types[:-1], "full_attention"), shared


def shrink_experts(config: Gemma4TextConfig, small: SmallExperts) -> Gemma4TextConfig:
    return replace(
        config,
        num_experts=small.count,
        moe_intermediate_size=small.width,
        num_experts_per_tok=small.chosen,
    )


def least_layers(config: Gemma4TextConfig) -> int:
    """Both kinds, and both without keys of their own, if any are."""
    kinds = len(set(config.types))
    return max(2, 2 * kinds if config.num_kv_shared_layers else kinds)


TENSORS = replace(
    decoder_tensors,
    also=("model.layers.0.layer_scalar",),
    renames={"model.language_model.": "model."},
    # towers, and the keys of layers that read those of others
    unread=r"model\.((vision_tower|audio_tower|embed_vision|embed_audio)\..*|"
    r"layers\.\d+\.self_attn\.[kv]_(proj|norm)\.(weight|bias))",
)
FAMILY = Family(
    "gemma4_text",
    Gemma4TextConfig,
    blocks,
    architecture="Gemma4ForCausalLM",
    tensors=TENSORS,
    also=(WITH_TOWERS,),
    rules=rules,
    split_rules=split_rules,
    keys=KEYS,
    only=ONLY,
    text_keys=text_keys,
    from_hf=from_hf,
    to_hf=config_keys,
    fill=fill,
    shrink=shrink,
    shrink_experts=shrink_experts,
    least_layers=least_layers,
)

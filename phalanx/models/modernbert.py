"""ModernBERT: norms before each sub-layer, rotary positions, GELU with a gate, hardly any biases; two in three layers
read inside a window. Warner et al., "Smarter, better, faster, longer", 2024."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, problem, within
from phalanx.models.class_heads import (
    CLASS_KEYS,
    HEAD_FIELDS,
    HeadKind,
    architecture,
    class_fields,
    class_rules,
    classes_to_hf,
)
from phalanx.models.config_json import (
    GELUS,
    LIST_OR_NULL,
    NEEDED,
    NONE,
    ConfigJson,
    HfKey,
    equal_heads,
    integer,
    number,
    shown,
    switch,
    text,
)
from phalanx.models.decoder_config import LAYER_TYPES, LayerType, layer_types_of
from phalanx.models.family import Family
from phalanx.models.model_config import ModelConfig, SmallSizes, TensorNames, check_head_dim

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env

LOCAL, GLOBAL = LAYER_TYPES


@dataclass(frozen=True, kw_only=True)
class ModernBertConfig(ModelConfig):
    family: Literal["modernbert"] = "modernbert"
    """Which model this section describes: modernbert."""
    vocab_size: int
    """Size of the vocabulary."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of the gated MLP."""
    num_hidden_layers: int
    """Number of transformer layers."""
    num_attention_heads: int
    """Number of heads."""
    max_position_embeddings: int = 8192
    """Longest sequence the model is meant for."""
    local_attention: int = 128
    """In a layer with a window, a token reads half as many tokens on either side."""
    global_attn_every_n_layers: int = 3
    """One layer in so many has no window, the first one among them."""
    layer_types: tuple[LayerType, ...] | None = None
    """Whether each layer has the window; unset: by global_attn_every_n_layers."""
    global_rope_theta: float = 160000.0
    """Base of the rotary embedding in layers without a window."""
    local_rope_theta: float = 10000.0
    """Base of the rotary embedding in layers with a window."""
    norm_eps: float = 1e-5
    """Epsilon of LayerNorm."""
    norm_bias: bool = False
    """LayerNorms have biases."""
    attention_bias: bool = False
    """The projections of attention have biases."""
    mlp_bias: bool = False
    """The projections of the MLP have biases."""
    classifier_bias: bool = False
    """The dense layer of the head has a bias."""
    decoder_bias: bool = True
    """The logits have a bias."""
    hidden_activation: Literal["gelu", "gelu_new"] = "gelu"
    """Activation of the MLP: gelu (exact) or gelu_new (its tanh form)."""
    classifier_activation: Literal["gelu", "gelu_new"] = "gelu"
    """Activation of the head."""
    tie_word_embeddings: bool = True
    """Use the input embedding as output matrix; it is always so in ModernBERT."""
    initializer_range: float = 0.02
    """Standard deviation of initial weights; output projections use it / sqrt(2 * layers)."""
    head: HeadKind = "masked"
    """What the head says: masked (what hidden tokens were), sequence (the class of each text), token (of each token),
    or none: the model ends with its hidden states, of which embeddings are made."""
    labels: tuple[str, ...] = ()
    """Names of the classes of a head over classes, in the order of their numbers."""
    classifier_dropout: float = 0.0
    """Dropout before the classes of a head over classes."""

    @property
    def classes(self) -> tuple[str, ...]:
        return self.labels if self.head in ("sequence", "token") else ()

    @property
    def both_ways(self) -> bool:
        return True

    @property
    def types(self) -> tuple[str, ...]:
        """The kind of each layer."""
        every = self.global_attn_every_n_layers
        turns = tuple(LOCAL if i % every else GLOBAL for i in range(self.num_hidden_layers))
        return turns if self.layer_types is None else self.layer_types

    def window(self, layer: int) -> int | None:
        return self.local_attention // 2 + 1 if self.types[layer] == LOCAL else None

    def rope_base(self, layer: int) -> float:
        return self.local_rope_theta if self.types[layer] == LOCAL else self.global_rope_theta

    @property
    def std_out(self) -> float:
        """Of the initial weights of output projections."""
        return self.initializer_range / math.sqrt(2.0 * self.num_hidden_layers)


EMBEDDING = "model.embeddings.tok_embeddings.weight"


def blocks(config: ModernBertConfig, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.encoder import (  # imports torch
        HeadSpec,
        ModernBertEmbedding,
        ModernBertLayer,
        encoder_blocks,
    )

    if config.headless:
        states = HeadSpec(
            matrix=None,
            bias=None,
            last="model.final_norm",
            eps=config.norm_eps,
            norm_bias=config.norm_bias,
            std=config.std_out,
        )
        return encoder_blocks(config, env, ModernBertEmbedding, ModernBertLayer, states)
    over_classes = {"matrix": "classifier.weight", "bias": "classifier.bias", "classes": config.classes}
    over_ids = {"matrix": EMBEDDING, "bias": "decoder.bias" if config.decoder_bias else None}
    head = HeadSpec(
        dense="head.dense",
        norm="head.norm",
        last="model.final_norm",
        eps=config.norm_eps,
        norm_bias=config.norm_bias,
        dense_bias=config.classifier_bias,
        std=config.std_out,
        matrix_std=config.hidden_size**-0.5,
        activation=config.classifier_activation,
        **(over_ids if config.head == "masked" else over_classes),  # type: ignore[arg-type]
    )
    return encoder_blocks(config, env, ModernBertEmbedding, ModernBertLayer, head)


def rules(config: ModernBertConfig, seq_length: int) -> list[Problem]:
    found = within("model", config, "norm_eps", "(0, inf)")
    found += at_least("model", config, 1, "global_attn_every_n_layers")
    found += at_least("model", config, 2, "local_attention")
    for name in ("global_rope_theta", "local_rope_theta"):
        found += within("model", config, name, "(0, inf)")
    if not config.tie_word_embeddings:
        rule = "must be true: the head of ModernBERT is its input embedding"
        found.append(problem("model", config, "tie_word_embeddings", rule, {}, (True,)))
    found += class_rules(config)
    types, layers = config.layer_types, config.num_hidden_layers
    if types is not None and layers >= 1 and len(types) != layers:
        rule, because = "must have one entry for each layer", {"model.num_hidden_layers": layers}
        found.append(problem("model", config, "layer_types", rule, because, (None,)))
    if min(config.hidden_size, config.num_attention_heads) >= 1:
        found += check_head_dim(config)
    return found


KEYS = {
    **CLASS_KEYS,
    "classifier_pooling": text("cls"),
    "vocab_size": integer(NEEDED),
    "hidden_size": integer(NEEDED),
    "intermediate_size": integer(NEEDED),
    "num_hidden_layers": integer(NEEDED),
    "num_attention_heads": integer(NEEDED),
    "max_position_embeddings": integer(8192),
    "local_attention": integer(128),
    "sliding_window": integer(None),
    "global_attn_every_n_layers": integer(3),
    "layer_types": LIST_OR_NULL,
    "rope_parameters": HfKey((dict, NONE), None),
    "rope_scaling": HfKey((dict, NONE), None),
    "global_rope_theta": number(160000.0),
    "local_rope_theta": number(10000.0),
    "norm_eps": number(1e-5),
    "norm_bias": switch(False),
    "attention_bias": switch(False),
    "mlp_bias": switch(False),
    "classifier_bias": switch(False),
    "decoder_bias": switch(True),
    "hidden_activation": text("gelu"),
    "classifier_activation": text("gelu"),
    "attention_dropout": number(0.0),
    "embedding_dropout": number(0.0),
    "mlp_dropout": number(0.0),
    "initializer_range": number(0.02),
    "tie_word_embeddings": switch(True),
}
ONLY: dict[str, tuple[Any, ...]] = {
    "rope_scaling": (None,),
    "attention_dropout": (0.0,),
    "embedding_dropout": (0.0,),
    "mlp_dropout": (0.0,),
    "tie_word_embeddings": (True,),
}
SAME = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "local_attention",
    "norm_eps",
    "norm_bias",
    "attention_bias",
    "mlp_bias",
    "classifier_bias",
    "decoder_bias",
    "initializer_range",
)


def from_hf(found: ConfigJson) -> ModernBertConfig | None:
    gelus = {}
    equal_heads(found)
    for name in ("hidden_activation", "classifier_activation"):
        if found.values[name] not in GELUS:
            found.odd.append(f"{name}={found.values[name]!r} (supported: {shown(tuple(GELUS))})")
        else:
            gelus[name] = GELUS[found.values[name]]
    types, bases = layer_types_of(found), rope_bases(found)
    every = found.values["global_attn_every_n_layers"]
    if types is None and every < 1:
        found.odd.append(f"global_attn_every_n_layers={every!r} (supported: integers >= 1)")
    classes = class_fields(found, "ModernBert")
    pooling = found.values["classifier_pooling"]
    if classes.get("head") == "sequence" and pooling != "cls":
        found.odd.append(f"classifier_pooling={pooling!r} (supported: 'cls')")
    if found.odd:
        return None
    if found.values["sliding_window"] is not None:  # of one side; it takes precedence
        found.values["local_attention"] = 2 * found.values["sliding_window"]
    said = {"global_attn_every_n_layers": every} if types is None else shortest(types, every)
    same: dict[str, Any] = found.pick(*SAME)
    return ModernBertConfig(**same, **said, **bases, **gelus, **classes)  # type: ignore[arg-type]


def shortest(types: list[str], said: int) -> dict[str, Any]:
    """The fields that say which layers have the window: every so many (as many as are `said`, if that fits), or
    each."""
    for every in (*([said] if said >= 1 else []), *range(1, len(types) + 1)):
        if types == [LOCAL if i % every else GLOBAL for i in range(len(types))]:
            return {"global_attn_every_n_layers": every}
    return {"layer_types": tuple(types)}


def rope_bases(found: ConfigJson) -> dict[str, float]:
    """The base of each kind of layer: rope_parameters take precedence over the fields of transformers 4."""
    bases = found.pick("global_rope_theta", "local_rope_theta")
    stated = found.values["rope_parameters"] or {}
    for kind, name in ((GLOBAL, "global_rope_theta"), (LOCAL, "local_rope_theta")):
        given = stated.get(kind)
        if given is None:
            continue
        if not isinstance(given, dict):
            found.odd.append(f"rope_parameters.{kind}={given!r} (it must be an object)")
            continue
        if given.get("rope_type", given.get("type", "default")) != "default":
            found.odd.append(f"rope_parameters.{kind}={given!r} (supported: rope_type 'default')")
        base = given.get("rope_theta", bases[name])
        if not isinstance(base, int | float) or isinstance(base, bool):
            found.odd.append(f"rope_theta={base!r} in rope_parameters.{kind} (it must be a number)")
        bases[name] = base
        others = sorted(set(given) - {"rope_type", "type", "rope_theta"})
        if others:
            found.odd.append(f"{', '.join(others)} in rope_parameters.{kind} (supported: rope_type, rope_theta)")
    unknown = sorted(set(stated) - {LOCAL, GLOBAL})
    if unknown:
        found.odd.append(f"{', '.join(unknown)} in rope_parameters (supported: {LOCAL}, {GLOBAL})")
    return bases


def to_hf(config: ModernBertConfig) -> dict[str, Any]:
    bases = {GLOBAL: config.global_rope_theta, LOCAL: config.local_rope_theta}
    return {
        **{name: getattr(config, name) for name in SAME},
        "global_attn_every_n_layers": config.global_attn_every_n_layers,
        "layer_types": list(config.types),
        "global_rope_theta": config.global_rope_theta,
        "local_rope_theta": config.local_rope_theta,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        "hidden_activation": config.hidden_activation,
        "classifier_activation": config.classifier_activation,
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "mlp_dropout": 0.0,
        "tie_word_embeddings": True,
        "classifier_pooling": "cls",
        **classes_to_hf(config),
    }


def fill(model: dict[str, Any]) -> dict[str, Any]:
    return model


def shrink(config: ModernBertConfig, small: SmallSizes) -> ModernBertConfig:
    types = config.layer_types
    return replace(
        config,
        vocab_size=small.vocab_size,
        hidden_size=small.hidden_size,
        intermediate_size=small.intermediate_size,
        num_hidden_layers=small.layers,
        num_attention_heads=small.heads,
        max_position_embeddings=small.seq_length,
        local_attention=min(config.local_attention, max(2, small.seq_length // 2)),
        layer_types=None if types is None else types[: small.layers],
    )


FAMILY = Family(
    "modernbert",
    ModernBertConfig,
    blocks,
    architecture=partial(architecture, "ModernBert"),
    tensors=TensorNames(
        prefix="model.",
        embedding=EMBEDDING,
        layer="model.layers.{}",
        head="decoder.weight",
        others=r"head\..*|decoder\..*|classifier\..*",
    ),
    rules=rules,
    keys=KEYS,
    only=ONLY,
    from_hf=from_hf,
    to_hf=to_hf,
    fill=fill,
    head_fields=HEAD_FIELDS,
    shrink=shrink,
)

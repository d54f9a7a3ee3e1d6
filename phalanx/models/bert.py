"""BERT: norms after each sub-layer, learned positions, token types, GELU, biases; tokens read both ways. Devlin et al.,
2018."""

from __future__ import annotations

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
    OVER_CLASSES,
    architecture,
    class_fields,
    class_rules,
    classes_to_hf,
)
from phalanx.models.config_json import GELUS, NEEDED, ConfigJson, integer, integer_or_null, number, shown, switch, text
from phalanx.models.family import Family
from phalanx.models.model_config import ModelConfig, SmallSizes, TensorNames, check_head_dim, check_learned_positions

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env


@dataclass(frozen=True, kw_only=True)
class BertConfig(ModelConfig):
    family: Literal["bert"] = "bert"
    """Which model this section describes: bert."""
    vocab_size: int
    """Size of the vocabulary."""
    hidden_size: int
    """Width of the residual stream."""
    num_hidden_layers: int
    """Number of transformer layers."""
    num_attention_heads: int
    """Number of heads."""
    intermediate_size: int
    """Width of the MLP."""
    max_position_embeddings: int = 512
    """Number of learned positions."""
    type_vocab_size: int = 2
    """Number of segments that a document may have (token types)."""
    layer_norm_eps: float = 1e-12
    """Epsilon of LayerNorm."""
    hidden_act: Literal["gelu", "gelu_new"] = "gelu"
    """Activation of the MLP and of the head: gelu (exact) or gelu_new (its tanh form)."""
    tie_word_embeddings: bool = True
    """Use the input embedding as output matrix; it is always so in BERT."""
    dropout: float = 0.0
    """Dropout of embeddings and of each sub-layer's output, the same in every layout."""
    attention_dropout: float = 0.0
    """Dropout of attention probabilities (runs on the reference path)."""
    initializer_range: float = 0.02
    """Standard deviation of initial weights."""
    head: Literal["masked", "pretraining", "sequence", "token", "none"] = "masked"
    """What the head says: masked (what hidden tokens were), pretraining (that, and the class of each pair of texts),
    sequence (the class of each text), token (of each token), or none: the model ends with its hidden states, of which
    embeddings are made."""
    labels: tuple[str, ...] = ()
    """Names of the classes of a head over classes, in the order of their numbers."""
    classifier_dropout: float = 0.0
    """Dropout before the classes of a head over classes."""

    @property
    def rotary(self) -> bool:
        return False

    @property
    def classes(self) -> tuple[str, ...]:
        return self.labels if self.head in OVER_CLASSES else ()

    @property
    def pair_head(self) -> bool:
        return self.head == "pretraining"

    @property
    def both_ways(self) -> bool:
        return True

    @property
    def gated_mlp(self) -> bool:
        return False


PAIRS = ("in order", "not in order")  # the classes of a pair of texts
EMBEDDING = "bert.embeddings.word_embeddings.weight"


def blocks(config: BertConfig, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.encoder import (  # imports torch
        BertEmbedding,
        BertLayer,
        HeadSpec,
        encoder_blocks,
    )

    at = "cls.predictions"
    how: Any = {"eps": config.layer_norm_eps, "std": config.initializer_range}
    masked = HeadSpec(
        dense=f"{at}.transform.dense",
        norm=f"{at}.transform.LayerNorm",
        matrix=EMBEDDING,
        bias=f"{at}.bias",
        activation=config.hidden_act,
        **how,
    )
    classes = HeadSpec(matrix="classifier.weight", bias="classifier.bias", classes=config.classes, **how)
    pooled = replace(classes, dense="bert.pooler.dense", activation="tanh")
    headless = HeadSpec(matrix=None, bias=None, **how)
    pair = replace(pooled, matrix="cls.seq_relationship.weight", bias="cls.seq_relationship.bias", classes=PAIRS)
    heads = {"masked": masked, "pretraining": masked, "sequence": pooled, "token": classes, "none": headless}
    pairs = pair if config.pair_head else None
    return encoder_blocks(config, env, BertEmbedding, BertLayer, heads[config.head], pairs)


def rules(config: BertConfig, seq_length: int) -> list[Problem]:
    found = within("model", config, "layer_norm_eps", "(0, inf)") + at_least("model", config, 1, "type_vocab_size")
    found += class_rules(config)
    if config.pair_head and config.type_vocab_size == 1:
        because: dict[str, Any] = {"model.head": config.head}
        rule = "must be >= 2: each text of a pair has a token type"
        found.append(problem("model", config, "type_vocab_size", rule, because, (2,)))
    for name in ("dropout", "attention_dropout"):
        found += within("model", config, name, "[0, 1)", (0.0, 0.1))
    if not config.tie_word_embeddings:
        rule = "must be true: the head of BERT is its input embedding"
        found.append(problem("model", config, "tie_word_embeddings", rule, {}, (True,)))
    if min(config.hidden_size, config.num_attention_heads) >= 1:
        found += check_head_dim(config)
    return found + check_learned_positions(config, seq_length)


KEYS = {
    **CLASS_KEYS,
    "vocab_size": integer(NEEDED),
    "hidden_size": integer(NEEDED),
    "num_hidden_layers": integer(NEEDED),
    "num_attention_heads": integer(NEEDED),
    "intermediate_size": integer(NEEDED),
    "max_position_embeddings": integer(512),
    "type_vocab_size": integer(2),
    "layer_norm_eps": number(1e-12),
    "hidden_act": text("gelu"),
    "hidden_dropout_prob": number(0.1),
    "attention_probs_dropout_prob": number(0.1),
    "initializer_range": number(0.02),
    "tie_word_embeddings": switch(True),
    "is_decoder": switch(False),
    "add_cross_attention": switch(False),
    "position_embedding_type": text("absolute"),
    "chunk_size_feed_forward": integer_or_null(0),
}
ONLY: dict[str, tuple[Any, ...]] = {
    "tie_word_embeddings": (True,),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "position_embedding_type": ("absolute",),
}
# names of each form


def from_hf(found: ConfigJson) -> BertConfig | None:
    activation = found.values["hidden_act"]
    if activation not in GELUS:
        found.odd.append(f"hidden_act={activation!r} (supported: {shown(tuple(GELUS))})")
        return None
    same = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
        "type_vocab_size",
        "layer_norm_eps",
        "initializer_range",
    )
    return BertConfig(
        **found.pick(*same),
        hidden_act=GELUS[activation],  # type: ignore[arg-type]
        dropout=found.values["hidden_dropout_prob"],
        attention_dropout=found.values["attention_probs_dropout_prob"],
        **class_of_folder(found),
    )


def class_of_folder(found: ConfigJson) -> dict[str, Any]:
    """Without a dropout of its own, a head over classes has that of the layers."""
    own = class_fields(found, "Bert")
    if "labels" in own and found.values["classifier_dropout"] is None:
        own["classifier_dropout"] = found.values["hidden_dropout_prob"]
    return own


def to_hf(config: BertConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "type_vocab_size": config.type_vocab_size,
        "layer_norm_eps": config.layer_norm_eps,
        "hidden_act": config.hidden_act,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": True,
        **classes_to_hf(config),
    }


def fill(model: dict[str, Any]) -> dict[str, Any]:
    return model


def shrink(config: BertConfig, small: SmallSizes) -> BertConfig:
    return replace(
        config,
        vocab_size=small.vocab_size,
        hidden_size=small.hidden_size,
        num_hidden_layers=small.layers,
        num_attention_heads=small.heads,
        intermediate_size=small.intermediate_size,
        max_position_embeddings=small.seq_length,
    )


FAMILY = Family(
    "bert",
    BertConfig,
    blocks,
    architecture=partial(architecture, "Bert"),
    tensors=TensorNames(
        prefix="bert.",
        embedding=EMBEDDING,
        layer="bert.encoder.layer.{}",
        head="cls.predictions.decoder.weight",
        copies=r"cls\.predictions\.decoder\.bias",
        constants=("embeddings.position_ids",),
        others=r"(bert\.)?pooler\..*|cls\..*|classifier\..*",
        renames={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    ),
    rules=rules,
    keys=KEYS,
    only=ONLY,
    from_hf=from_hf,
    to_hf=to_hf,
    fill=fill,
    may_change=(),  # positions are learned: their number is a shape
    head_fields=HEAD_FIELDS,
    shrink=shrink,
)

"""T5: an encoder and a decoder with RMSNorm, relative positions added to scores, and ReLU (1.0) or gated GELU (1.1).
Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text transformer", 2020; Shazeer,
"GLU variants improve transformer", 2020."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, problem, within
from phalanx.models.config_json import (
    GELUS,
    NEEDED,
    ConfigJson,
    HfKey,
    integer,
    integer_or_null,
    number,
    switch,
    text,
)
from phalanx.models.family import Family
from phalanx.models.model_config import ModelConfig, SmallSizes, TensorNames

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env


@dataclass(frozen=True, kw_only=True)
class T5Config(ModelConfig):
    family: Literal["t5"] = "t5"
    """Which model this section describes: t5."""
    vocab_size: int
    """Size of the vocabulary, sentinels and padding included."""
    hidden_size: int
    """Width of the residual stream (d_model)."""
    intermediate_size: int
    """Width of the MLP (d_ff)."""
    num_hidden_layers: int
    """Number of layers of the encoder (num_layers)."""
    num_decoder_layers: int | None = None
    """Number of layers of the decoder; unset: as many as the encoder's."""
    num_attention_heads: int
    """Number of heads (num_heads)."""
    head_dim: int = 64
    """Width of a head (d_kv), whatever the width of the residual stream."""
    feed_forward_proj: Literal["relu", "gated-gelu"] = "gated-gelu"
    """The MLP: relu (T5 1.0) or gated-gelu (T5 1.1)."""
    relative_attention_num_buckets: int = 32
    """Buckets of distances between tokens; each has a number for each head that is added to scores."""
    relative_attention_max_distance: int = 128
    """Tokens farther apart than this are in the last bucket."""
    layer_norm_epsilon: float = 1e-6
    """Epsilon of RMSNorm."""
    tie_word_embeddings: bool = False
    """Use the input embedding as output head (T5 1.0)."""
    scale_decoder_outputs: bool | None = None
    """Multiply what the head reads by hidden_size ** -0.5; unset: if embeddings are tied."""
    decoder_start_token_id: int = 0
    """The token with which every text of the decoder begins."""
    dropout_rate: float = 0.0
    """Dropout of embeddings, attention probabilities, the MLP's inner features, and the output of each sub-layer and
    stack, the same in every layout. T5 1.1 was pretrained without, and is fine-tuned with 0.1."""
    max_position_embeddings: int = 512
    """Longest sequence the model is meant for; positions are relative, so it is no limit."""
    initializer_range: float = 1.0
    """Factor of the standard deviations of initial weights (initializer_factor)."""

    @property
    def head_widths(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim

    @property
    def rotary(self) -> bool:
        return False

    @property
    def gated_mlp(self) -> bool:
        """Its gate is a GELU: no SwiGLU."""
        return False

    @property
    def decoder_layers(self) -> int:
        return self.num_hidden_layers if self.num_decoder_layers is None else self.num_decoder_layers

    @property
    def scales_outputs(self) -> bool:
        return self.tie_word_embeddings if self.scale_decoder_outputs is None else self.scale_decoder_outputs

    @property
    def encoder_blocks(self) -> range:
        """The blocks that are layers of the encoder. After them comes the decoder's embedding."""
        return range(1, 1 + self.num_hidden_layers)

    @property
    def decoder_blocks(self) -> range:
        first = self.num_hidden_layers + 2
        return range(first, first + self.decoder_layers)

    @property
    def layer_blocks(self) -> Sequence[int]:
        return (*self.encoder_blocks, *self.decoder_blocks)

    @property
    def num_blocks(self) -> int:
        return self.num_hidden_layers + self.decoder_layers + 3

    @property
    def attention_dropout(self) -> float:
        return self.dropout_rate

    @property
    def decoder_start(self) -> int | None:
        return self.decoder_start_token_id

    @property
    def reads_beside(self) -> tuple[str, ...]:
        return ("encoder",)


def blocks(config: T5Config, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.encoder_decoder import t5_blocks  # imports torch, which reading a config need not

    return t5_blocks(config, env)


def rules(config: T5Config, seq_length: int) -> list[Problem]:
    names = ("head_dim", "num_decoder_layers", "relative_attention_max_distance")
    found = at_least("model", config, 1, *names) + at_least("model", config, 0, "decoder_start_token_id")
    found += within("model", config, "layer_norm_epsilon", "(0, inf)") + check_buckets(config)
    if config.decoder_start_token_id >= config.vocab_size:
        because = {"model.vocab_size": config.vocab_size}
        found.append(problem("model", config, "decoder_start_token_id", "must be < vocab_size", because, (0,)))
    return found + within("model", config, "dropout_rate", "[0, 1)", (0.0, 0.1))


def check_buckets(config: T5Config) -> list[Problem]:
    """The encoder's buckets are halved by direction, and half of these are of one distance each."""
    buckets, farthest = config.relative_attention_num_buckets, config.relative_attention_max_distance
    if buckets < 4 or buckets % 2:
        rule = "must be an even integer >= 4: half of them are of later tokens"
        return [problem("model", config, "relative_attention_num_buckets", rule, {}, (32,))]
    if 1 <= farthest <= buckets // 2:
        because = {"model.relative_attention_num_buckets": buckets}
        rule = "must be beyond the distances that have a bucket each (half of the buckets)"
        return [problem("model", config, "relative_attention_max_distance", rule, because, (4 * buckets,))]
    return []


# key of config.json -> field
FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "d_kv": "head_dim",
    "d_ff": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_decoder_layers": "num_decoder_layers",
    "num_heads": "num_attention_heads",
    "relative_attention_num_buckets": "relative_attention_num_buckets",
    "relative_attention_max_distance": "relative_attention_max_distance",
    "dropout_rate": "dropout_rate",
    "layer_norm_epsilon": "layer_norm_epsilon",
    "initializer_factor": "initializer_range",
    "tie_word_embeddings": "tie_word_embeddings",
}
KEYS = {
    "vocab_size": integer(NEEDED),
    "d_model": integer(NEEDED),
    "d_kv": integer(64),
    "d_ff": integer(NEEDED),
    "num_layers": integer(NEEDED),
    "num_decoder_layers": integer_or_null(),
    "num_heads": integer(NEEDED),
    "relative_attention_num_buckets": integer(32),
    "relative_attention_max_distance": integer(128),
    "dropout_rate": number(0.1),
    "layer_norm_epsilon": number(1e-6),
    "initializer_factor": number(1.0),
    "feed_forward_proj": text("relu"),
    "dense_act_fn": text(""),
    "is_gated_act": switch(False),
    "tie_word_embeddings": switch(True),
    "scale_decoder_outputs": HfKey((bool, type(None)), None),
    "decoder_start_token_id": integer_or_null(),
    "pad_token_id": integer_or_null(0),
    "is_encoder_decoder": switch(True),
    "is_decoder": switch(False),
}
ONLY: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (True,),
    "is_decoder": (False,),
}


def from_hf(found: ConfigJson) -> T5Config | None:
    """Without a decoder_start_token_id the decoder begins with the padding token, as T5's do. Whether outputs are
    scaled is said here, because a head in the files may be another one than tie_word_embeddings says."""
    v = found.values
    proj = feed_forward(found)
    if proj is None or found.odd:
        return None
    start = v["decoder_start_token_id"] if v["decoder_start_token_id"] is not None else v["pad_token_id"]
    said = "scale_decoder_outputs" in found.stated
    scales = bool(v["scale_decoder_outputs"]) if said else v["tie_word_embeddings"]
    decoder = None if v["num_decoder_layers"] == v["num_layers"] else v["num_decoder_layers"]
    return T5Config(
        **{name: v[key] for key, name in FIELDS.items() if key != "num_decoder_layers"},
        num_decoder_layers=decoder,
        feed_forward_proj=proj,
        scale_decoder_outputs=scales,
        decoder_start_token_id=start or 0,
    )


def feed_forward(found: ConfigJson) -> Literal["relu", "gated-gelu"] | None:
    """Of feed_forward_proj, or where the file has them (transformers lets them win) dense_act_fn and is_gated_act."""
    given = found.values["feed_forward_proj"]
    gated, activation = given.startswith("gated-"), given.removeprefix("gated-")
    if given == "gated-gelu":
        activation = "gelu_new"
    if "dense_act_fn" in found.stated:
        activation = found.values["dense_act_fn"]
    if "is_gated_act" in found.stated:
        gated = found.values["is_gated_act"]
    activation = GELUS.get(activation, activation)
    if (gated, activation) == (False, "relu"):
        return "relu"
    if (gated, activation) == (True, "gelu_new"):
        return "gated-gelu"
    wanted = "supported: 'relu', or 'gated-gelu' with dense_act_fn='gelu_new'"
    found.odd.append(f"feed_forward_proj={given!r}, is_gated_act={gated}, dense_act_fn={activation!r} ({wanted})")
    return None


def to_hf(config: T5Config) -> dict[str, Any]:
    gated = config.feed_forward_proj == "gated-gelu"
    return {
        **{key: getattr(config, name) for key, name in FIELDS.items()},
        "num_decoder_layers": config.decoder_layers,
        "feed_forward_proj": config.feed_forward_proj,
        "is_gated_act": gated,
        "dense_act_fn": "gelu_new" if gated else "relu",
        "scale_decoder_outputs": config.scales_outputs,
        "decoder_start_token_id": config.decoder_start_token_id,
        "is_encoder_decoder": True,
        "is_decoder": False,
        "classifier_dropout": 0.0,
    }


def fill(model: dict[str, Any]) -> dict[str, Any]:
    decoder, scales = model.get("num_decoder_layers"), model.get("scale_decoder_outputs")
    return {
        **model,
        "num_decoder_layers": model["num_hidden_layers"] if decoder is None else decoder,
        "scale_decoder_outputs": model.get("tie_word_embeddings", False) if scales is None else scales,
    }


def shrink(config: T5Config, small: SmallSizes) -> T5Config:
    """An encoder and a decoder of different depths stay different."""
    layers = max(1, small.layers - 1)
    return replace(
        config,
        vocab_size=small.vocab_size,
        hidden_size=small.hidden_size,
        intermediate_size=small.intermediate_size,
        num_hidden_layers=layers,
        num_decoder_layers=small.layers if config.decoder_layers != config.num_hidden_layers else None,
        num_attention_heads=small.heads,
        head_dim=small.head_dim,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=10,
        decoder_start_token_id=min(config.decoder_start_token_id, small.vocab_size - 1),
    )


FAMILY = Family(
    "t5",
    T5Config,
    blocks,
    architecture="T5ForConditionalGeneration",
    tensors=TensorNames(
        prefix="",
        embedding="shared.weight",
        layer="encoder.block.{}",
        copies=r"(encoder|decoder)\.embed_tokens\.weight",
        constants=(".EncDecAttention.relative_attention_bias.weight",),
    ),
    rules=rules,
    keys=KEYS,
    other_names={
        "d_model": "hidden_size",
        "num_heads": "num_attention_heads",
        "num_layers": "num_hidden_layers",
        "d_kv": "head_dim",
    },
    only=ONLY,
    from_hf=from_hf,
    to_hf=to_hf,
    fill=fill,
    shrink=shrink,
)

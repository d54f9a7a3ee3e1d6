"""Gemma 2: norms before and after each sub-layer, capped scores and logits, windows in every other layer, GeGLU. Gemma
team, "Gemma 2: improving open language models at a practical size", 2024."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, within
from phalanx.models.config_json import (
    NONE,
    ConfigJson,
    HfKey,
    integer,
    number_or_null,
    switch,
    text,
)
from phalanx.models.decoder_config import (
    DECODER_KEYS,
    check_divided_width,
    common_rules,
    decoder_fields,
    heads_to_hf,
    with_head_rules,
)
from phalanx.models.family import Family
from phalanx.models.mixed_layers import (
    MIXED_WINDOW_KEYS,
    MixedWindowConfig,
    mixed_window_fields,
    mixed_window_to_hf,
    shrink_mixed,
)

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.attention import Attention
    from phalanx.nn.env import Env


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(MixedWindowConfig):
    """Llama's fields. The input embedding is multiplied by the square root of its width."""

    family: Literal["gemma2"] = "gemma2"
    """Which model this section describes: gemma2."""
    head_dim: int | None = 256
    """Width of a head; null: hidden_size / num_attention_heads."""
    max_position_embeddings: int = 8192
    """Longest sequence the model is meant for."""
    rms_norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    tie_word_embeddings: bool = True
    """Use the input embedding as output head."""
    query_pre_attn_scalar: int = 256
    """Scores are divided by the square root of this."""
    attn_logit_softcapping: float | None = 50.0
    """Scores of attention become cap * tanh(score / cap); null: they stay as they are."""
    final_logit_softcapping: float | None = 30.0
    """Logits become cap * tanh(logit / cap); null: they stay as they are."""

    biases: ClassVar[tuple[str, ...]] = ("attention_bias",)
    offset_norms: ClassVar[bool] = True

    @property
    def embedding_scale(self) -> float:
        return self.hidden_size**0.5

    @property
    def logit_soft_cap(self) -> float | None:
        return self.final_logit_softcapping


# functions that build blocks import torch themselves, because reading a config must not
def blocks(config: Gemma2Config, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.decoder import SandwichLayer, decoder_blocks, dense_mlp
    from phalanx.nn.mlp import GeGLU

    mlp = partial(dense_mlp, mlp=GeGLU)
    return decoder_blocks(config, env, partial(SandwichLayer, make_attention=capped_attention, make_mlp=mlp))


def capped_attention(config: Gemma2Config, env: Env, layer: int) -> Attention:
    from phalanx.models.decoder import attention
    from phalanx.ops.attention.kind import AttentionKind

    kind = AttentionKind(
        window=config.window(layer), soft_cap=config.attn_logit_softcapping, scale=config.query_pre_attn_scalar**-0.5
    )
    return attention(config, env, layer, kind=kind)


def rules(config: Gemma2Config, seq_length: int) -> list[Problem]:
    found = common_rules(config) + at_least("model", config, 1, "query_pre_attn_scalar")
    for name, usual in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
        found += within("model", config, name, "(0, inf)", (usual, None))
    return with_head_rules(config, found) or check_divided_width(config)


KEYS = {
    **{name: key for name, key in DECODER_KEYS.items() if name != "hidden_act"},
    "num_key_value_heads": integer(4),
    "head_dim": integer(256),
    "max_position_embeddings": integer(8192),
    "hidden_activation": text("gelu_pytorch_tanh"),
    "tie_word_embeddings": switch(True),
    "attention_bias": switch(False),
    "attention_dropout": number_or_null(0.0),
    "query_pre_attn_scalar": integer(256),
    **MIXED_WINDOW_KEYS,
    "attn_logit_softcapping": number_or_null(50.0),
    "final_logit_softcapping": number_or_null(30.0),
    "use_bidirectional_attention": HfKey((bool, NONE), None),
}
ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_dropout": (0.0, None),
    "use_bidirectional_attention": (None, False),
}
OWN = ("attention_bias", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")


def from_hf(found: ConfigJson) -> Gemma2Config | None:
    same, own = decoder_fields(found), mixed_window_fields(found, Gemma2Config.period)
    return None if found.odd else Gemma2Config(**same, **own, **found.pick(*OWN))


def to_hf(config: Gemma2Config) -> dict[str, Any]:
    return {**gemma_to_hf(config), "attn_logit_softcapping": config.attn_logit_softcapping}


def gemma_to_hf(config: Any) -> dict[str, Any]:
    """The keys that Gemma 3 has too."""
    written = heads_to_hf(config)
    del written["hidden_act"]
    return {
        **written,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": config.attention_bias,
        "query_pre_attn_scalar": config.query_pre_attn_scalar,
        **mixed_window_to_hf(config),
        "final_logit_softcapping": config.final_logit_softcapping,
    }


FAMILY = Family(
    "gemma2",
    Gemma2Config,
    blocks,
    architecture="Gemma2ForCausalLM",
    rules=rules,
    keys=KEYS,
    only=ONLY,
    from_hf=from_hf,
    to_hf=to_hf,
    shrink=shrink_mixed,
)

"""Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Touvron et al. 2023; Llama 3, Grattafiori et
al. 2024."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.base.dataclass import dataclass
from phalanx.models.config_json import ConfigJson, integer, integer_or_null, number_or_null, switch
from phalanx.models.decoder_config import DECODER_KEYS, DecoderConfig, decoder_fields, heads_to_hf
from phalanx.models.family import Family

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    family: Literal["llama"] = "llama"
    """Which model this section describes: llama."""

    biases: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")


def blocks(config: LlamaConfig, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.decoder import decoder_blocks  # imports torch, which reading a config need not

    return decoder_blocks(config, env)


KEYS = {
    **DECODER_KEYS,
    "num_key_value_heads": integer_or_null(),
    "head_dim": integer_or_null(),
    "max_position_embeddings": integer(2048),
    "attention_bias": switch(False),
    "mlp_bias": switch(False),
    "attention_dropout": number_or_null(0.0),
}


def from_hf(found: ConfigJson) -> LlamaConfig | None:
    same = decoder_fields(found)
    return None if found.odd else LlamaConfig(**same, **found.pick("attention_bias", "mlp_bias"))


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    return {**heads_to_hf(config), "attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}


FAMILY = Family("llama", LlamaConfig, blocks, architecture="LlamaForCausalLM", keys=KEYS, from_hf=from_hf, to_hf=to_hf)

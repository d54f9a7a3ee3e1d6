"""OLMo 2: Llama's blocks with norms after attention and MLP instead of before them, and queries and keys normalized
over their whole width. Team OLMo, "2 OLMo 2 Furious", 2024."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.base.dataclass import dataclass
from phalanx.models.config_json import ConfigJson, integer, integer_or_null, number, switch
from phalanx.models.decoder_config import DECODER_KEYS, DecoderConfig, decoder_fields, heads_to_hf
from phalanx.models.family import Family

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(DecoderConfig):
    """Llama's fields. Each sub-layer's output is normalized before it joins the residual stream."""

    family: Literal["olmo2"] = "olmo2"
    """Which model this section describes: olmo2."""

    biases: ClassVar[tuple[str, ...]] = ("attention_bias",)


def blocks(config: Olmo2Config, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.decoder import PostNormLayer, decoder_blocks, width_norm_attention  # torch: not for a config

    return decoder_blocks(config, env, partial(PostNormLayer, make_attention=width_norm_attention))


KEYS = {
    **DECODER_KEYS,
    "num_key_value_heads": integer_or_null(),
    "head_dim": integer_or_null(),
    "max_position_embeddings": integer(2048),
    "rms_norm_eps": number(1e-5),
    "attention_bias": switch(False),
}


def from_hf(found: ConfigJson) -> Olmo2Config | None:
    same = decoder_fields(found)
    return None if found.odd else Olmo2Config(**same, **found.pick("attention_bias"))


def to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {**heads_to_hf(config), "attention_bias": config.attention_bias}


FAMILY = Family("olmo2", Olmo2Config, blocks, architecture="Olmo2ForCausalLM", keys=KEYS, from_hf=from_hf, to_hf=to_hf)

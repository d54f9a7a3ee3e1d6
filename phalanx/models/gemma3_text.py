"""Gemma 3, its text model: Gemma 2 with norms of heads in place of capped scores, a window in five layers of six, and
another rotary embedding in those. Gemma team, "Gemma 3 technical report", 2025."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, within
from phalanx.models.config_json import ConfigJson, integer, number_or_null
from phalanx.models.decoder_config import check_divided_width, common_rules, with_head_rules
from phalanx.models.family import Family
from phalanx.models.gemma2 import KEYS as GEMMA2_KEYS
from phalanx.models.gemma2 import ONLY as GEMMA2_ONLY
from phalanx.models.gemma2 import gemma_to_hf
from phalanx.models.mixed_layers import (
    LocalRopeConfig,
    check_local_rope,
    local_rope_fields,
    local_rope_to_hf,
    mixed_window_fields,
    shrink_mixed,
)

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.attention import Attention
    from phalanx.nn.env import Env


@dataclass(frozen=True, kw_only=True)
class Gemma3TextConfig(LocalRopeConfig):
    """Llama's fields. The input embedding is multiplied by the square root of its width."""

    family: Literal["gemma3_text"] = "gemma3_text"
    """Which model this section describes: gemma3_text."""
    head_dim: int | None = 256
    """Width of a head; null: hidden_size / num_attention_heads."""
    rms_norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    rope_theta: float = 1000000.0
    """Base of the rotary embedding of layers without a window."""
    tie_word_embeddings: bool = True
    """Use the input embedding as output head."""
    query_pre_attn_scalar: int = 256
    """Scores are divided by the square root of this."""
    final_logit_softcapping: float | None = None
    """Logits become cap * tanh(logit / cap); unset: they stay as they are."""

    biases: ClassVar[tuple[str, ...]] = ("attention_bias",)
    offset_norms: ClassVar[bool] = True
    period: ClassVar[int] = 6

    @property
    def embedding_scale(self) -> float:
        return self.hidden_size**0.5

    @property
    def logit_soft_cap(self) -> float | None:
        return self.final_logit_softcapping


# functions that build blocks import torch themselves, because reading a config must not
def blocks(config: Gemma3TextConfig, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.decoder import SandwichLayer, decoder_blocks, dense_mlp
    from phalanx.nn.mlp import GeGLU

    mlp = partial(dense_mlp, mlp=GeGLU)
    return decoder_blocks(config, env, partial(SandwichLayer, make_attention=scaled_attention, make_mlp=mlp))


def scaled_attention(config: Gemma3TextConfig, env: Env, layer: int) -> Attention:
    from phalanx.models.decoder import head_norm_attention
    from phalanx.ops.attention.kind import AttentionKind

    kind = AttentionKind(window=config.window(layer), scale=config.query_pre_attn_scalar**-0.5)
    return head_norm_attention(config, env, layer, kind=kind)


def rules(config: Gemma3TextConfig, seq_length: int) -> list[Problem]:
    found = common_rules(config) + check_local_rope(config) + at_least("model", config, 1, "query_pre_attn_scalar")
    found += within("model", config, "final_logit_softcapping", "(0, inf)", (30.0, None))
    return with_head_rules(config, found) or check_divided_width(config)


KEYS = {
    **GEMMA2_KEYS,
    "max_position_embeddings": integer(131072),
    "sliding_window_pattern": integer(6),
    "attn_logit_softcapping": number_or_null(None),
    "final_logit_softcapping": number_or_null(None),
}
# transformers reads a cap of scores and computes without it
ONLY: dict[str, tuple[Any, ...]] = {**GEMMA2_ONLY, "attn_logit_softcapping": (None,)}
OWN = ("attention_bias", "query_pre_attn_scalar", "final_logit_softcapping")


def from_hf(found: ConfigJson) -> Gemma3TextConfig | None:
    same = local_rope_fields(found, ("rope_local_base_freq", 10000.0), 1000000.0)
    period = found.values["sliding_window_pattern"]
    if period < 1:
        found.odd.append(f"sliding_window_pattern={period!r} (supported: 1 and more)")
        return None
    own = mixed_window_fields(found, period)
    return None if found.odd else Gemma3TextConfig(**same, **own, **found.pick(*OWN))


def to_hf(config: Gemma3TextConfig) -> dict[str, Any]:
    return {
        **local_rope_to_hf(config, gemma_to_hf(config)),
        "rope_local_base_freq": config.rope_local_base_freq,
        "attn_logit_softcapping": None,
    }


FAMILY = Family(
    "gemma3_text",
    Gemma3TextConfig,
    blocks,
    architecture="Gemma3ForCausalLM",
    headless="Gemma3TextModel",
    rules=rules,
    keys=KEYS,
    only=ONLY,
    from_hf=from_hf,
    to_hf=to_hf,
    shrink=shrink_mixed,
)

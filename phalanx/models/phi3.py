"""Phi-3 and Phi-4: Llama's blocks with fused matrices in files, LongRoPE, part of each head rotated. Abdin et al.,
"Phi-3 technical report", 2024; Microsoft, "Phi-4-Mini technical report", 2025."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import problem
from phalanx.models.config_json import ConfigJson, integer, integer_or_null, number
from phalanx.models.decoder_config import (
    DECODER_KEYS,
    DECODER_ONLY,
    PartialRotaryConfig,
    common_rules,
    decoder_fields,
    heads_to_hf,
    with_head_rules,
)
from phalanx.models.family import Family

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.attention import Attention
    from phalanx.nn.env import Env
    from phalanx.nn.mlp import SwiGLU


@dataclass(frozen=True, kw_only=True)
class Phi3Config(PartialRotaryConfig):
    """Llama's fields, a window, and a part of each head that is not rotated."""

    family: Literal["phi3"] = "phi3"
    """Which model this section describes: phi3."""
    max_position_embeddings: int = 4096
    """Longest sequence the model is meant for."""
    sliding_window: int | None = None
    """A token reads this many tokens: itself and those before it; unset: all before it."""

    def window(self, layer: int) -> int | None:
        return self.sliding_window


# functions that build blocks import torch themselves, because reading a config must not
def blocks(config: Phi3Config, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.decoder import DecoderLayer, decoder_blocks

    return decoder_blocks(config, env, partial(DecoderLayer, make_attention=fused_attention, make_mlp=fused_mlp))


def fused_attention(config: Phi3Config, env: Env, layer: int) -> Attention:
    from phalanx.models.decoder import attention

    at = f"model.layers.{layer}.self_attn"
    return attention(config, env, layer, names=(f"{at}.qkv_proj.weight",) * 3 + (f"{at}.o_proj.weight",))


def fused_mlp(config: Phi3Config, env: Env, layer: int) -> SwiGLU:
    from phalanx.nn.mlp import SwiGLU

    at = f"model.layers.{layer}.mlp"
    names = (f"{at}.gate_up_proj.weight",) * 2 + (f"{at}.down_proj.weight",)
    return SwiGLU(env, names, config.hidden_size, config.intermediate_size, config.initializer_range)


def rules(config: Phi3Config, seq_length: int) -> list[Problem]:
    found, scaling = common_rules(config), config.rope_scaling
    if scaling is not None and scaling.rope_type != "longrope":
        rule = "must be longrope, the only scaling of this family"
        found.append(problem("model.rope_scaling", scaling, "rope_type", rule, {"model.family": config.family}, ()))
    return with_head_rules(config, found)


KEYS = {
    **DECODER_KEYS,
    "num_key_value_heads": integer_or_null(),
    "head_dim": integer_or_null(),
    "max_position_embeddings": integer(4096),
    "original_max_position_embeddings": integer(4096),
    "rms_norm_eps": number(1e-5),
    "sliding_window": integer_or_null(),
    "resid_pdrop": number(0.0),
    "embd_pdrop": number(0.0),
}
ONLY: dict[str, tuple[Any, ...]] = {**DECODER_ONLY, "resid_pdrop": (0.0,), "embd_pdrop": (0.0,)}
OLD_NAMES = ("su", "yarn")  # of longrope, in files of the first versions


def from_hf(found: ConfigJson) -> Phi3Config | None:
    same = decoder_fields(replace(found, stated=with_longrope(found), odd=found.odd), partial=1.0)
    scaling = same["rope_scaling"]
    if scaling is not None and scaling.rope_type != "longrope":
        found.odd.append(f"rope_type={scaling.rope_type!r} (supported: 'default', 'longrope')")
    return None if found.odd else Phi3Config(**same, **found.pick("sliding_window"))


def with_longrope(found: ConfigJson) -> dict[str, Any]:
    """The file with today's name of LongRoPE, and with the length before the scaling, which has a default."""
    stated = {**found.stated, **found.pick("original_max_position_embeddings")}
    for key in ("rope_scaling", "rope_parameters"):
        rope = stated.get(key)
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in OLD_NAMES:
            stated[key] = {**rope, "rope_type": "longrope"}
    return stated


def to_hf(config: Phi3Config) -> dict[str, Any]:
    scaling = config.rope_scaling
    original = config.max_position_embeddings if scaling is None else scaling.original_max_position_embeddings
    return {
        **heads_to_hf(config),
        "original_max_position_embeddings": original,
        "sliding_window": config.sliding_window,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    }


FAMILY = Family(
    "phi3",
    Phi3Config,
    blocks,
    architecture="Phi3ForCausalLM",
    rules=rules,
    keys=KEYS,
    only=ONLY,
    from_hf=from_hf,
    to_hf=to_hf,
)

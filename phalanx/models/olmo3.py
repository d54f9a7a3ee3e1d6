"""OLMo 3: OLMo 2 with a window in three layers of four; scaling of the rotary embedding is for the fourth alone. Team
OLMo, "Olmo 3", 2025."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.models.config_json import ConfigJson
from phalanx.models.decoder_config import common_rules, with_head_rules
from phalanx.models.family import Family
from phalanx.models.mixed_layers import (
    MIXED_WINDOW_KEYS,
    LocalRopeConfig,
    check_local_rope,
    local_rope_fields,
    local_rope_to_hf,
    mixed_window_fields,
    mixed_window_to_hf,
    shrink_mixed,
)
from phalanx.models.olmo2 import KEYS as OLMO2_KEYS
from phalanx.models.olmo2 import blocks
from phalanx.models.olmo2 import to_hf as olmo2_to_hf


@dataclass(frozen=True, kw_only=True)
class Olmo3Config(LocalRopeConfig):
    """OLMo 2's fields, the window, and the rotary embedding of layers that have it."""

    family: Literal["olmo3"] = "olmo3"
    """Which model this section describes: olmo3."""
    rope_theta: float = 500000.0
    """Base of the rotary embedding of layers without a window."""
    rope_local_base_freq: float = 500000.0
    """Base of the rotary embedding of layers with a window; rope_theta and rope_scaling are those of the others."""

    biases: ClassVar[tuple[str, ...]] = ("attention_bias",)
    period: ClassVar[int] = 4


def rules(config: Olmo3Config, seq_length: int) -> list[Problem]:
    return with_head_rules(config, common_rules(config) + check_local_rope(config))


KEYS = {**OLMO2_KEYS, **MIXED_WINDOW_KEYS}


def from_hf(found: ConfigJson) -> Olmo3Config | None:
    same = local_rope_fields(found, ("", 500000.0), 500000.0)
    own = mixed_window_fields(found, Olmo3Config.period)
    return None if found.odd else Olmo3Config(**same, **own, **found.pick("attention_bias"))


def to_hf(config: Olmo3Config) -> dict[str, Any]:
    return {**local_rope_to_hf(config, olmo2_to_hf(config)), **mixed_window_to_hf(config)}


FAMILY = Family(
    "olmo3",
    Olmo3Config,
    blocks,
    architecture="Olmo3ForCausalLM",
    rules=rules,
    keys=KEYS,
    from_hf=from_hf,
    to_hf=to_hf,
    shrink=shrink_mixed,
)

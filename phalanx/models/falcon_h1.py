"""Falcon-H1: attention and a selective scan side by side in every layer, with multipliers that are not trained. Zuo et
al., "Falcon-H1", 2025."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, no_effect, problem, within
from phalanx.models.config_json import (
    LIST_OR_NULL,
    NONE,
    ConfigJson,
    HfKey,
    integer,
    integer_or_null,
    number,
    number_or_null,
    switch,
)
from phalanx.models.decoder_config import (
    DECODER_KEYS,
    DECODER_ONLY,
    DecoderConfig,
    decoder_fields,
    decoder_rules,
    heads_to_hf,
    shrink_decoder,
)
from phalanx.models.family import Family
from phalanx.models.model_config import SmallSizes, TensorNames
from phalanx.models.scan_fields import check_limits, check_scan_ranks, check_shares, limits_of

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env


@dataclass(frozen=True, kw_only=True)
class FalconH1Config(DecoderConfig):
    """Llama's fields, those of the scans, and the multipliers."""

    family: Literal["falcon_h1"] = "falcon_h1"
    """Which model this section describes: falcon_h1."""
    num_key_value_heads: int | None = 8
    """Number of key/value heads; null: as many as query heads."""
    max_position_embeddings: int = 8192
    """Longest sequence the model is meant for."""
    mamba_n_heads: int = 128
    """Heads of a scan."""
    mamba_d_head: int = 8
    """Width of a head of a scan."""
    mamba_d_state: int = 256
    """Features of the state of a scan's head."""
    mamba_n_groups: int = 1
    """Groups of heads of a scan that share what is written to their states and read from them."""
    mamba_d_conv: int = 4
    """Tokens that the convolution before a scan reads: each token and those before it."""
    mamba_conv_bias: bool = True
    """The convolution has a bias."""
    mamba_proj_bias: bool = False
    """The projection to what a scan reads has a bias."""
    projectors_bias: bool = False
    """The projection of what a scan returns has a bias."""
    mamba_rms_norm: bool = False
    """What a scan returns is normalized, by the features of each group; the gate is there in any case."""
    mamba_norm_before_gate: bool = True
    """The norm is before the gate, not after it."""
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    """Steps of a scan are kept within these two numbers."""
    embedding_multiplier: float = 1.0
    """What the input embedding is multiplied by."""
    lm_head_multiplier: float = 1.0
    """What logits are multiplied by."""
    key_multiplier: float = 1.0
    """What keys are multiplied by."""
    attention_in_multiplier: float = 1.0
    """What attention reads is multiplied by this."""
    attention_out_multiplier: float = 1.0
    """What attention returns is multiplied by this."""
    ssm_in_multiplier: float = 1.0
    """What the projection before a scan reads is multiplied by this."""
    ssm_out_multiplier: float = 1.0
    """What comes from a scan's output projection is multiplied by this."""
    ssm_multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """What the parts of the projection before a scan are multiplied by: gate, x, B, C and steps."""
    mlp_multipliers: tuple[float, float] = (1.0, 1.0)
    """What the gate of an MLP, and what the MLP returns, are multiplied by."""

    biases: ClassVar[tuple[str, ...]] = ("attention_bias",)

    @property
    def taps(self) -> int:
        return self.mamba_d_conv


def blocks(config: FalconH1Config, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.falcon_h1_blocks import falcon_h1_blocks  # imports torch, which reading a config need not

    return falcon_h1_blocks(config, env)


NUMBERS = (
    "embedding_multiplier",
    "lm_head_multiplier",
    "key_multiplier",
    "attention_in_multiplier",
    "attention_out_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
)
LISTS = {"ssm_multipliers": 5, "mlp_multipliers": 2}
SIZES = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
SWITCHES = ("mamba_conv_bias", "mamba_proj_bias", "projectors_bias", "mamba_rms_norm", "mamba_norm_before_gate")


def rules(config: FalconH1Config, seq_length: int) -> list[Problem]:
    c = config
    found = at_least("model", c, 1, *SIZES[:-1]) + at_least("model", c, 2, "mamba_d_conv") + check_limits(c)
    for name in NUMBERS:
        found += within("model", c, name, "(0, inf)")
    for name, count in LISTS.items():
        if not all(0 < number < math.inf for number in getattr(c, name)):
            found.append(problem("model", c, name, "must be numbers in (0, inf)", {}, ((1.0,) * count,)))
    if not c.mamba_rms_norm:
        because = {"model.mamba_rms_norm": False}
        found += no_effect("model", c, ["mamba_norm_before_gate"], "model.mamba_rms_norm=true", because)
    return decoder_rules(c, seq_length) + (found or check_shares(c, ("mamba_n_groups", "mamba_n_heads")))


def split_rules(config: FalconH1Config, tp: int) -> list[Problem]:
    """What the heads of scans say; those of attention are every model's."""
    return check_scan_ranks(config, tp, "mamba_n_heads", "mamba_n_groups")


KEYS = {
    **DECODER_KEYS,
    "num_key_value_heads": integer_or_null(8),
    "head_dim": integer_or_null(),
    "max_position_embeddings": integer(8192),
    "rms_norm_eps": number(1e-5),
    "attention_bias": switch(False),
    "attention_dropout": number_or_null(0.0),
    "mlp_bias": switch(False),
    "mamba_d_ssm": integer_or_null(1024),
    "mamba_expand": integer(2),
    "mamba_n_heads": integer(128),
    "mamba_d_head": HfKey((int, str), "auto"),
    "mamba_n_groups": integer(1),
    "mamba_d_state": integer(256),
    "mamba_d_conv": integer(4),
    "mamba_conv_bias": switch(True),
    "mamba_proj_bias": switch(False),
    "projectors_bias": switch(False),
    "mamba_rms_norm": switch(False),
    "mamba_norm_before_gate": switch(True),
    "mamba_use_mlp": switch(True),
    "attn_layer_indices": HfKey((list, NONE), None),
    "time_step_limit": HfKey((list,), [0.0, math.inf]),
    **{name: number(1.0) for name in NUMBERS},
    **dict.fromkeys(LISTS, LIST_OR_NULL),
}


def from_hf(found: ConfigJson) -> FalconH1Config | None:
    v, same, limits = found.values, decoder_fields(found), limits_of(found)
    own = found.pick(*SIZES, *SWITCHES, "attention_bias", *NUMBERS)
    width = v["mamba_expand"] * v["hidden_size"] if v["mamba_d_ssm"] is None else v["mamba_d_ssm"]
    head = width // max(1, v["mamba_n_heads"]) if v["mamba_d_head"] == "auto" else v["mamba_d_head"]
    if not isinstance(head, int) or head * v["mamba_n_heads"] != width:
        found.odd.append(f"mamba_d_head={v['mamba_d_head']!r} (mamba_n_heads of them must be {width} features)")
    if not v["mamba_rms_norm"]:  # it is then not read
        own["mamba_norm_before_gate"] = True
    for name, count in LISTS.items():
        given = (1.0,) * count if v[name] is None else tuple(v[name])
        if len(given) != count or not all(isinstance(n, int | float) and not isinstance(n, bool) for n in given):
            found.odd.append(f"{name}={v[name]!r} (it must be {count} numbers)")
        own[name] = given
    return None if found.odd else FalconH1Config(**same, **own | {"mamba_d_head": head}, time_step_limit=limits)


def to_hf(config: FalconH1Config) -> dict[str, Any]:
    c = config
    return {
        **heads_to_hf(c),
        "attention_bias": c.attention_bias,
        "mlp_bias": False,
        "mamba_d_ssm": c.mamba_n_heads * c.mamba_d_head,
        "mamba_expand": 2,
        **{name: getattr(c, name) for name in (*SIZES, *SWITCHES)},
        "mamba_chunk_size": 256,
        "time_step_limit": list(c.time_step_limit),
        **{name: getattr(c, name) for name in NUMBERS},
        **{name: list(getattr(c, name)) for name in LISTS},
    }


def shrink(config: FalconH1Config, small: SmallSizes) -> FalconH1Config:
    """Heads and groups keep their relation to the ranks."""
    return replace(
        shrink_decoder(config, small),
        mamba_n_heads=small.heads,
        mamba_d_head=small.head_dim,
        mamba_d_state=min(config.mamba_d_state, 6),
        mamba_n_groups=small.kv_heads,
        mamba_d_conv=min(config.mamba_d_conv, 3),  # chunks of a short sequence on many ranks have few tokens
    )


FAMILY = Family(
    "falcon_h1",
    FalconH1Config,
    blocks,
    architecture="FalconH1ForCausalLM",
    tensors=TensorNames(
        prefix="model.",
        embedding="model.embed_tokens.weight",
        layer="model.layers.{}",
        also=("model.layers.0.mamba.dt_bias",),
    ),
    rules=rules,
    split_rules=split_rules,
    keys=KEYS,
    only={**DECODER_ONLY, "mlp_bias": (False,), "mamba_use_mlp": (True,), "attn_layer_indices": (None,)},
    from_hf=from_hf,
    to_hf=to_hf,
    shrink=shrink,
)

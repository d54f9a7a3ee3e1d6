"""Layers of Qwen3-Next and Qwen3.5: gated attention beside linear attention, and experts beside a gated shared one.
Fields of the `model` section, rules, blocks, config.json in both directions, a small copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, divisors, problem
from phalanx.models.config_json import ConfigJson, integer, switch
from phalanx.models.decoder_config import (
    DECODER_KEYS,
    PartialRotaryConfig,
    decoder_fields,
    decoder_tensors,
    heads_to_hf,
    shrink_decoder,
)
from phalanx.models.delta_layers import (
    DELTA_KEYS,
    DeltaKind,
    DeltaLayersConfig,
    check_delta_layers,
    delta_fields,
    delta_to_hf,
    small_delta,
    split_delta_heads,
)
from phalanx.models.experts import ROUTER_KEYS, ExpertsConfig, expert_rules
from phalanx.models.model_config import SmallExperts, SmallSizes
from phalanx.models.predictors import PredictorsConfig, check_predictors, predictor_block

if TYPE_CHECKING:
    from phalanx.models.decoder import MakePart
    from phalanx.models.family import BlockMaker
    from phalanx.nn.attention import Attention
    from phalanx.nn.env import Env
    from phalanx.nn.moe import MoE
    from phalanx.nn.mtp import Depth


@dataclass(frozen=True, kw_only=True)
class GatedAttentionConfig(PartialRotaryConfig, DeltaLayersConfig, PredictorsConfig):
    """Llama's fields and those of linear attention; layers with attention gate what they have read. A module of
    multi-token prediction has such a layer too."""

    head_dim: int | None = 256
    """Width of a head of attention; null: hidden_size / num_attention_heads."""
    partial_rotary_factor: float = 0.25
    """The fraction of each head that is rotated, its first features; the rest carries no position."""
    rms_norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    rope_theta: float = 10000000.0
    """Base of the rotary embedding."""

    biases: ClassVar[tuple[str, ...]] = ("attention_bias",)
    offset_norms: ClassVar[bool] = True

    @property
    def attends(self) -> bool:
        return super().attends or self.predict_layers > 0

    def kind(self, layer: int) -> DeltaKind:
        """Of a layer, or of that of a module of multi-token prediction."""
        return self.types[layer] if layer < self.num_hidden_layers else "full_attention"

    def layer_name(self, layer: int) -> str:
        further = layer - self.num_hidden_layers
        return super().layer_name(layer) if further < 0 else f"{MODULE}.layers.{further}"


@dataclass(frozen=True, kw_only=True)
class GatedExpertsConfig(ExpertsConfig):
    """Experts beside a shared one that has a gate."""

    num_experts: int = 512
    """Experts per layer that tokens choose among."""
    num_experts_per_tok: int = 10
    """Experts that each token goes to."""
    moe_intermediate_size: int = 512
    """Width of an expert."""
    shared_expert_intermediate_size: int = 512
    """Width of the expert that every token goes to; its output is multiplied by a gate, one number for each
    token."""

    @property
    def routed_experts(self) -> int:
        return self.num_experts

    @property
    def expert_size(self) -> int:
        return self.moe_intermediate_size


# ---- blocks; functions that build them import torch themselves, because reading a config must not


def gated_blocks(
    config: GatedAttentionConfig, env: Env, mixer: MakePart, mlp: MakePart | None = None
) -> Sequence[BlockMaker]:
    """Of a text. mixer: attention or linear attention; mlp: in the place of the dense MLP."""
    from phalanx.models.decoder import DecoderLayer, decoder_blocks

    layer = partial(DecoderLayer, make_attention=mixer, make_mlp=mlp)
    make_mtp = partial(predictor_block, partial(make_depth, mlp)) if config.predict_layers else None
    return decoder_blocks(config, env, layer, make_mtp)


def make_depth(mlp: MakePart | None, config: GatedAttentionConfig, env: Env, number: int) -> Depth:
    """The module of multi-token prediction, as published: its layer has attention."""
    from phalanx.models.decoder import DecoderLayer, norm
    from phalanx.nn.mtp import Depth, DepthNames

    c, at = config, MODULE
    names = DepthNames(f"{at}.fc", f"{at}.pre_fc_norm_embedding", f"{at}.pre_fc_norm_hidden", f"{at}.norm")
    layer = DecoderLayer(c, env, number, gated_attention, mlp)
    return Depth(env, names, partial(norm, c, env), c.hidden_size, c.initializer_range, layer)


def gated_attention(config: GatedAttentionConfig, env: Env, layer: int) -> Attention:
    from phalanx.models.decoder import head_norm_attention

    return head_norm_attention(config, env, layer, gated=True)


def gated_experts(config: GatedExpertsConfig, env: Env, layer: int, renormalize: bool) -> MoE:
    from phalanx.models.decoder import balance_of, router_of
    from phalanx.nn.mlp import SwiGLU
    from phalanx.nn.moe import ExpertNames, MoE
    from phalanx.nn.shared_expert import GatedExpert

    c, at, std = config, f"{config.layer_name(layer)}.mlp", config.initializer_range
    gate, up, down = (f"{at}.shared_expert.{n}_proj.weight" for n in ("gate", "up", "down"))
    shared = SwiGLU(env, (gate, up, down), c.hidden_size, c.shared_expert_intermediate_size, std)
    names = ExpertNames(f"{at}.gate.weight", *(f"{at}.experts.{{}}.{n}_proj.weight" for n in ("gate", "up", "down")))
    return MoE(
        env,
        names,
        router_of(c, renormalize),
        c.hidden_size,
        c.moe_intermediate_size,
        std,
        balance_of(c),
        GatedExpert(env, f"{at}.shared_expert_gate.weight", shared, c.hidden_size, std),
        layer,
    )


# ---- rules ---------------------------------------------------------------------------------------


def check_gated_layers(config: GatedAttentionConfig) -> list[Problem]:
    found = check_delta_layers(config) + check_predictors(config)
    if config.num_nextn_predict_layers > 1:
        rule = "must be 0 or 1: in files of this family all modules would share one projection and its norms"
        found.append(problem("model", config, "num_nextn_predict_layers", rule, {}, (1,)))
    return found


def check_gated_experts(config: GatedExpertsConfig) -> list[Problem]:
    found = at_least("model", config, 1, "moe_intermediate_size", "shared_expert_intermediate_size")
    return expert_rules(config, "num_experts") + found


def split_gated(config: Any, tp: int) -> list[Problem]:
    found, width = split_delta_heads(config, tp), config.shared_expert_intermediate_size
    if width < tp:
        because, valid = {"model.shared_expert_intermediate_size": width}, divisors(tp, config.num_attention_heads)
        rule = "must be <= shared_expert_intermediate_size"
        found.append(Problem("layout.tp", tp, rule, because, valid))
    return found


# ---- config.json ---------------------------------------------------------------------------------

PREDICTORS = "mtp_num_hidden_layers"
MODULE = "mtp"  # how the names of its tensors begin, which are not among those of the text
GATED_ATTENTION_KEYS = {
    **DECODER_KEYS,
    **DELTA_KEYS,
    "num_key_value_heads": integer(4),
    "head_dim": integer(256),
    "max_position_embeddings": integer(32768),
    "attention_bias": switch(False),
    PREDICTORS: integer(0),
}
GATED_EXPERT_KEYS = {
    **ROUTER_KEYS,
    "num_experts": integer(512),
    "num_experts_per_tok": integer(10),
    "moe_intermediate_size": integer(512),
    "shared_expert_intermediate_size": integer(512),
}
OF_EXPERTS = ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size")


def gated_attention_fields(found: ConfigJson) -> dict[str, Any]:
    """Fields of both kinds of layers. Sections of the rotary embedding say where images are, which texts have not."""
    own = {**found.pick("attention_bias"), "num_nextn_predict_layers": found.values[PREDICTORS]}
    return {**decoder_fields(found, partial=0.25), **delta_fields(found), **own}


def gated_attention_to_hf(config: GatedAttentionConfig) -> dict[str, Any]:
    own = {"attention_bias": config.attention_bias, PREDICTORS: config.predict_layers}
    return {**heads_to_hf(config), **delta_to_hf(config), **own}


def with_predictors(config: Any, count: int) -> Any:
    return replace(config, num_nextn_predict_layers=count)


# ---- names of tensors ----------------------------------------------------------------------------

# a model without modules leaves those of a folder out, as transformers does
gated_tensors = replace(
    decoder_tensors, predictors=rf"{MODULE}\.layers\.(\d+)\.input_layernorm\.weight", others=rf"{MODULE}\..*"
)

# ---- a small copy --------------------------------------------------------------------------------


def shrink_gated(config: Any, small: SmallSizes) -> Any:
    return replace(shrink_decoder(config, small), **small_delta(config, small))


def shrink_gated_experts(config: Any, small: SmallExperts) -> Any:
    return replace(
        config,
        num_experts=small.count,
        moe_intermediate_size=small.width,
        shared_expert_intermediate_size=small.width,
        num_experts_per_tok=small.chosen,
    )

"""Qwen3 with experts: normalized heads as in the dense model, many narrow experts. Yang et al., "Qwen3 technical
report", 2025."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, problem
from phalanx.models.config_json import LIST_OR_NULL, ConfigJson, integer, integer_or_null, switch
from phalanx.models.decoder_config import DECODER_KEYS, common_rules, decoder_fields, heads_to_hf, with_head_rules
from phalanx.models.experts import ROUTER_KEYS, ExpertsConfig, expert_rules, router_fields, router_to_hf
from phalanx.models.family import Family
from phalanx.models.model_config import SmallExperts

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env
    from phalanx.nn.mlp import SwiGLU
    from phalanx.nn.moe import MoE


@dataclass(frozen=True, kw_only=True)
class SparseStepConfig(ExpertsConfig):
    """Some layers have experts, the others a dense MLP."""

    norm_topk_prob: bool = True
    """Divide the chosen experts' probabilities by their sum."""
    decoder_sparse_step: int = 1
    """Every so many layers, the last one has experts."""
    mlp_only_layers: tuple[int, ...] = ()
    """Further layers with a dense MLP."""

    def has_experts(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


@dataclass(frozen=True, kw_only=True)
class Qwen3MoEConfig(SparseStepConfig):
    """Qwen3's fields; intermediate_size is the width of dense layers."""

    family: Literal["qwen3_moe"] = "qwen3_moe"
    """Which model this section describes: qwen3_moe."""
    num_experts: int = 128
    """Experts per layer."""
    num_experts_per_tok: int = 8
    """Experts that each token goes to."""
    moe_intermediate_size: int
    """Width of an expert."""
    head_dim: int | None = 128
    """Width of a head; null: hidden_size / num_attention_heads."""
    rms_norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    rope_theta: float = 1000000.0
    """Base of the rotary embedding."""
    sliding_window: int | None = None
    """A token reads this many tokens: itself and those before it; unset: all before it."""

    biases: ClassVar[tuple[str, ...]] = ("attention_bias",)

    def window(self, layer: int) -> int | None:
        return self.sliding_window

    @property
    def routed_experts(self) -> int:
        return self.num_experts

    @property
    def expert_size(self) -> int:
        return self.moe_intermediate_size


# functions that build blocks import torch themselves, because reading a config must not
def blocks(config: Qwen3MoEConfig, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.decoder import DecoderLayer, decoder_blocks, head_norm_attention

    return decoder_blocks(config, env, partial(DecoderLayer, make_attention=head_norm_attention, make_mlp=make_mlp))


def make_mlp(config: Qwen3MoEConfig, env: Env, layer: int) -> MoE | SwiGLU:
    from phalanx.models.decoder import balance_of, dense_mlp, router_of
    from phalanx.nn.moe import ExpertNames, MoE

    if not config.has_experts(layer):
        return dense_mlp(config, env, layer)
    at = f"model.layers.{layer}.mlp"
    names = ExpertNames(f"{at}.gate.weight", *(f"{at}.experts.{{}}.{n}_proj.weight" for n in ("gate", "up", "down")))
    return MoE(
        env,
        names,
        router_of(config, config.norm_topk_prob),
        config.hidden_size,
        config.moe_intermediate_size,
        config.initializer_range,
        balance_of(config),
        layer=layer,
    )


def rules(config: Qwen3MoEConfig, seq_length: int) -> list[Problem]:
    found = common_rules(config) + expert_rules(config, "num_experts") + check_layers(config)
    return with_head_rules(config, found)


def check_layers(config: SparseStepConfig) -> list[Problem]:
    layers = config.num_hidden_layers
    found = at_least("model", config, 1, "moe_intermediate_size", "decoder_sparse_step")
    if not all(0 <= i < layers for i in config.mlp_only_layers):
        kept = tuple(i for i in config.mlp_only_layers if 0 <= i < layers)
        rule = "must be numbers of layers, from 0"
        found.append(problem("model", config, "mlp_only_layers", rule, {"model.num_hidden_layers": layers}, (kept,)))
    elif not found and layers and not any(map(config.has_experts, range(layers))):
        because = {"model.decoder_sparse_step": config.decoder_sparse_step, "model.num_hidden_layers": layers}
        found.append(problem("model", config, "mlp_only_layers", "must leave a layer with experts", because, ((),)))
    return found


KEYS = {
    **DECODER_KEYS,
    **ROUTER_KEYS,
    "num_key_value_heads": integer(4),
    "head_dim": integer_or_null(),
    "max_position_embeddings": integer(32768),
    "attention_bias": switch(False),
    "use_sliding_window": switch(False),
    "sliding_window": integer_or_null(4096),
    "decoder_sparse_step": integer(1),
    "moe_intermediate_size": integer(768),
    "num_experts_per_tok": integer(8),
    "num_experts": integer(128),
    "norm_topk_prob": switch(False),
    "mlp_only_layers": LIST_OR_NULL,
}


def from_hf(found: ConfigJson) -> Qwen3MoEConfig | None:
    same, v = decoder_fields(found), found.values
    own = {
        **found.pick("attention_bias", "num_experts", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step"),
        **router_fields(found),
        "sliding_window": v["sliding_window"] if v["use_sliding_window"] else None,
        # other numbers refer to no layer
        "mlp_only_layers": tuple(i for i in v["mlp_only_layers"] or () if i in range(v["num_hidden_layers"])),
    }
    return None if found.odd else Qwen3MoEConfig(**same, **own)


def to_hf(config: Qwen3MoEConfig) -> dict[str, Any]:
    return {
        **heads_to_hf(config),
        **router_to_hf(config),
        "attention_bias": config.attention_bias,
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "num_experts": config.num_experts,
        "moe_intermediate_size": config.moe_intermediate_size,
        "norm_topk_prob": config.norm_topk_prob,
        "decoder_sparse_step": config.decoder_sparse_step,
        "mlp_only_layers": list(config.mlp_only_layers),
    }


def shrink_experts(config: Qwen3MoEConfig, small: SmallExperts) -> Qwen3MoEConfig:
    """Dense layers stay dense as long as one layer has experts: if stages are given, there may be too few."""
    return replace(
        config,
        num_experts=small.count,
        moe_intermediate_size=small.width,
        num_experts_per_tok=small.chosen,
        mlp_only_layers=tuple(i for i in config.mlp_only_layers if i < config.num_hidden_layers - 1),
        decoder_sparse_step=min(config.decoder_sparse_step, config.num_hidden_layers),
    )


def least_layers(config: SparseStepConfig) -> int:
    """Enough for one layer with experts."""
    with_experts = [i for i in range(config.num_hidden_layers) if config.has_experts(i)]
    return max(2, with_experts[0] + 1) if with_experts else 2


FAMILY = Family(
    "qwen3_moe",
    Qwen3MoEConfig,
    blocks,
    architecture="Qwen3MoeForCausalLM",
    rules=rules,
    keys=KEYS,
    other_names={"num_experts": "num_local_experts"},
    from_hf=from_hf,
    to_hf=to_hf,
    shrink_experts=shrink_experts,
    least_layers=least_layers,
)

"""gpt-oss: layers with and without a window alternate, heads have sinks, experts have biases and a clamped gate.
OpenAI, "gpt-oss-120b & gpt-oss-20b model card", 2025."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import within
from phalanx.models.config_json import LIST_OR_NULL, ConfigJson, integer, integer_or_null, number, switch
from phalanx.models.decoder_config import (
    DECODER_KEYS,
    DECODER_ONLY,
    LayerType,
    common_rules,
    decoder_fields,
    heads_to_hf,
    types_to_hf,
    with_head_rules,
)
from phalanx.models.experts import ROUTER_KEYS, ExpertsConfig, expert_rules, router_to_hf, shrink_local_experts
from phalanx.models.family import Family
from phalanx.models.mixed_layers import mixed_window_fields

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.attention import Attention
    from phalanx.nn.env import Env
    from phalanx.nn.moe import MoE


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(ExpertsConfig):
    """Llama's fields; intermediate_size is the width of an expert. The experts and the router have biases, and heads
    have sinks."""

    family: Literal["gpt_oss"] = "gpt_oss"
    """Which model this section describes: gpt_oss."""
    num_local_experts: int = 128
    """Experts per layer."""
    num_experts_per_tok: int = 4
    """Experts that each token goes to."""
    head_dim: int | None = 64
    """Width of a head; null: hidden_size / num_attention_heads."""
    rope_theta: float = 150000.0
    """Base of the rotary embedding."""
    attention_bias: bool = True
    """The projections of attention (q, k, v and output) have biases."""
    sliding_window: int = 128
    """In a layer with a window, a token reads this many tokens: itself and those before it."""
    layer_types: tuple[LayerType, ...] | None = None
    """Whether each layer has the window; unset: layers alternate, and the first has it."""
    swiglu_alpha: float = 1.702
    """Gate of the experts: gate * sigmoid(alpha * gate) * (up + 1)."""
    swiglu_limit: float = 7.0
    """The gate is clamped from above at this, up from both sides."""

    biases: ClassVar[tuple[str, ...]] = ("attention_bias",)

    @property
    def routed_experts(self) -> int:
        return self.num_local_experts

    def window(self, layer: int) -> int | None:
        given = self.layer_types
        slides = layer % 2 == 0 if given is None else given[layer] == "sliding_attention"
        return self.sliding_window if slides else None


# functions that build blocks import torch themselves, because reading a config must not
def blocks(config: GptOssConfig, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.decoder import DecoderLayer, decoder_blocks

    return decoder_blocks(config, env, partial(DecoderLayer, make_attention=attention_with_sinks, make_mlp=experts))


def attention_with_sinks(config: GptOssConfig, env: Env, layer: int) -> Attention:
    from phalanx.models.decoder import attention

    return attention(config, env, layer, sinks=f"model.layers.{layer}.self_attn.sinks")


def experts(config: GptOssConfig, env: Env, layer: int) -> MoE:
    from phalanx.models.decoder import balance_of, router_of
    from phalanx.nn.moe import MoE, StackedNames
    from phalanx.ops.dense.gate import Gate

    at = f"model.layers.{layer}.mlp"
    stacks = (f"{at}.experts.{name}" for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"))
    gate = Gate(config.swiglu_alpha, config.swiglu_limit, shift=1.0, interleaved=True)
    return MoE(
        env,
        StackedNames(f"{at}.router.weight", f"{at}.router.bias", *stacks, activation=gate),
        router_of(config, renormalize=False, order="after"),  # a softmax over the chosen experts already sums to 1
        config.hidden_size,
        config.intermediate_size,
        config.initializer_range,
        balance_of(config),
        layer=layer,
    )


def rules(config: GptOssConfig, seq_length: int) -> list[Problem]:
    found = common_rules(config) + expert_rules(config, "num_local_experts")
    found += within("model", config, "swiglu_alpha", "(0, inf)") + within("model", config, "swiglu_limit", "(0, inf]")
    return with_head_rules(config, found)


KEYS = {
    **{name: key for name, key in DECODER_KEYS.items() if name != "hidden_act"},
    **ROUTER_KEYS,
    "num_key_value_heads": integer(8),
    "head_dim": integer(64),
    "max_position_embeddings": integer(131072),
    "rms_norm_eps": number(1e-5),
    "sliding_window": integer_or_null(128),
    "layer_types": LIST_OR_NULL,
    "attention_bias": switch(True),
    "num_experts_per_tok": integer(4),
    "num_local_experts": integer(128),
    "swiglu_alpha": number(1.702),
    "swiglu_limit": number(7.0),
}
# used if a config has no rotary embedding
ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def from_hf(found: ConfigJson) -> GptOssConfig | None:
    same, window = decoder_fields(found, theta=150000.0, default_rope=ROPE), mixed_window_fields(found, 2)
    own = found.pick("attention_bias", "swiglu_alpha", "swiglu_limit", "num_experts_per_tok", "num_local_experts")
    if found.values["output_router_logits"]:  # without those no loss is made of it; the published configs say 0.9
        own |= found.pick("router_aux_loss_coef")
    return None if found.odd else GptOssConfig(**same, **own, **window)


def to_hf(config: GptOssConfig) -> dict[str, Any]:
    return {
        **heads_to_hf(config),
        **router_to_hf(config),
        "num_local_experts": config.num_local_experts,
        "experts_per_token": config.num_experts_per_tok,
        "attention_bias": config.attention_bias,
        "swiglu_alpha": config.swiglu_alpha,
        "swiglu_limit": config.swiglu_limit,
        "sliding_window": config.sliding_window,
        "layer_types": types_to_hf(config),
    }


FAMILY = Family(
    "gpt_oss",
    GptOssConfig,
    blocks,
    architecture="GptOssForCausalLM",
    rules=rules,
    keys=KEYS,
    other_names={"num_local_experts": "num_experts"},
    only=DECODER_ONLY,
    from_hf=from_hf,
    to_hf=to_hf,
    packed=("mxfp4",),
    shrink_experts=shrink_local_experts,
)

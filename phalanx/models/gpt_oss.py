"""gpt-oss: layers with and without a window take turns, heads have sinks, experts have biases and a clamped gate.
OpenAI, "gpt-oss-120b & gpt-oss-20b model card", 2025."""

from __future__ import annotations

from phalanx.models import llama
from phalanx.models.mixtral import balance_of, router_of
from phalanx.models.moe_config import GptOssConfig
from phalanx.nn.attention import Attention
from phalanx.nn.env import Env
from phalanx.nn.module import Block
from phalanx.nn.moe import MoE, StackedNames
from phalanx.ops.dense.gate import Gate


def make_blocks(config: GptOssConfig, env: Env, which: range) -> list[Block]:
    """Blocks number `which` of layers + 2: embedding, layers, head."""
    return llama.make_blocks(config, env, which, make_attention=attention, make_mlp=experts)


def attention(config: GptOssConfig, env: Env, layer: int) -> Attention:
    sinks = f"model.layers.{layer}.self_attn.sinks"
    return llama.attention(config, env, layer, sinks=sinks)


def experts(config: GptOssConfig, env: Env, layer: int) -> MoE:
    at = f"model.layers.{layer}.mlp"
    stacks = (f"{at}.experts.{name}" for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"))
    gate = Gate(config.swiglu_alpha, config.swiglu_limit, shift=1.0, interleaved=True)
    names = StackedNames(f"{at}.router.weight", f"{at}.router.bias", *stacks, activation=gate)
    router = router_of(config, renormalize=False, order="after")  # a softmax of the chosen sums to 1 as it is
    return MoE(
        env,
        names,
        router,
        config.hidden_size,
        config.intermediate_size,
        config.initializer_range,
        balance_of(config),
        layer=layer,
    )

"""Qwen3 with experts: normalised heads as in the dense model, many narrow experts. Yang et al., "Qwen3 technical
report", 2025."""

from __future__ import annotations

from phalanx.models import llama, qwen3
from phalanx.models.mixtral import balance_of, router_of
from phalanx.models.moe_config import Qwen3MoEConfig
from phalanx.nn.env import Env
from phalanx.nn.mlp import SwiGLU
from phalanx.nn.module import Block
from phalanx.nn.moe import ExpertNames, MoE


def make_blocks(config: Qwen3MoEConfig, env: Env, which: range) -> list[Block]:
    """Blocks number `which` of layers + 2: embedding, layers, head."""
    return llama.make_blocks(config, env, which, make_attention=qwen3.attention, make_mlp=mlp)


def mlp(config: Qwen3MoEConfig, env: Env, layer: int) -> MoE | SwiGLU:
    if not config.has_experts(layer):
        return llama.mlp(config, env, layer)
    at = f"model.layers.{layer}.mlp"
    names = ExpertNames(f"{at}.gate.weight", *(f"{at}.experts.{{}}.{n}_proj.weight" for n in ("gate", "up", "down")))
    router = router_of(config, config.norm_topk_prob)
    return MoE(
        env,
        names,
        router,
        config.hidden_size,
        config.moe_intermediate_size,
        config.initializer_range,
        balance_of(config),
        layer=layer,
    )

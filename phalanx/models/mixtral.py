"""Mixtral: Llama's blocks with experts for MLPs. Jiang et al., "Mixtral of experts", 2024."""

from __future__ import annotations

from typing import Literal

from phalanx.models import llama
from phalanx.models.moe_config import ExpertsConfig, MixtralConfig
from phalanx.nn.env import Env
from phalanx.nn.module import Block
from phalanx.nn.moe import Balance, ExpertNames, MoE
from phalanx.ops.experts.router import Router


def make_blocks(config: MixtralConfig, env: Env, which: range) -> list[Block]:
    """Blocks number `which` of layers + 2: embedding, layers, head."""
    return llama.make_blocks(config, env, which, make_mlp=experts)


def experts(config: MixtralConfig, env: Env, layer: int) -> MoE:
    at = f"model.layers.{layer}.block_sparse_moe"
    names = ExpertNames(f"{at}.gate.weight", *(f"{at}.experts.{{}}.{w}.weight" for w in ("w1", "w3", "w2")))
    router = router_of(config)
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


def router_of(config: ExpertsConfig, renormalize: bool = True, order: Literal["before", "after"] = "before") -> Router:
    """Softmax over all experts, of which the best are kept; or over the logits of the best (order after)."""
    forced: Literal["none", "balanced"] = "balanced" if config.router_forced_balance else "none"
    return Router(
        config.num_experts_per_tok, config.routed_experts, order=order, renormalize=renormalize, forced=forced
    )


def balance_of(config: ExpertsConfig) -> Balance:
    return Balance(
        aux=config.router_aux_loss_coef,
        scope=config.router_aux_loss_scope,
        z=config.router_z_loss_coef,
        capacity=config.expert_capacity_factor,
        drop=config.expert_capacity_drop,
    )

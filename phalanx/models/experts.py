"""What families with experts share besides blocks: fields of the `model` section, rules, config.json, a small copy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, TypeVar

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, no_effect, problem, within
from phalanx.models.config_json import ConfigJson, number, switch
from phalanx.models.decoder_config import DecoderConfig
from phalanx.models.model_config import SmallExperts


@dataclass(frozen=True, kw_only=True)
class RoutingFields:
    """How tokens are distributed over experts; the same for every family."""

    num_experts_per_tok: int = 2
    """Experts that each token goes to."""
    router_aux_loss_coef: float = 0.001
    """Coefficient of the balancing loss E * sum f_i P_i of each layer (Switch Transformers); 0: none."""
    router_aux_loss_scope: Literal["micro_batch", "sequence", "global_batch"] = "micro_batch"
    """Tokens whose load the balancing loss evens out: micro_batch, sequence, or global_batch (the load of the whole
    previous step)."""
    router_z_loss_coef: float = 0.0
    """Coefficient of the mean squared log-sum-exp of the router's logits (ST-MoE); 0: none."""
    expert_capacity_factor: float | None = None
    """Tokens that an expert accepts from each sequence, as a multiple of its fair share; the rest are dropped. unset:
    no token is dropped."""
    expert_capacity_drop: Literal["probability", "position"] = "probability"
    """Which tokens a full expert drops: those with the smallest weights (probability), or the last (position)."""
    router_forced_balance: bool = False
    """For benchmarks: experts are drawn at random, all equally likely, instead of chosen."""


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(RoutingFields, DecoderConfig):
    """The fields of a Llama-like decoder and those of experts."""

    @property
    def expert_size(self) -> int:
        return self.intermediate_size

    def has_experts(self, layer: int) -> bool:
        return True


# how the load of experts is kept even: a run may continue with other settings
BALANCE = (
    "router_aux_loss_coef",
    "router_aux_loss_scope",
    "router_z_loss_coef",
    "expert_capacity_factor",
    "expert_capacity_drop",
    "router_forced_balance",
)


def expert_rules(config: RoutingFields, count: str) -> list[Problem]:
    """`count`: the field with the number of experts in a layer."""
    c = config
    found = at_least("model", c, 1, count, "num_experts_per_tok")
    found += within("model", c, "router_aux_loss_coef", "[0, inf)") + within(
        "model", c, "router_z_loss_coef", "[0, inf)"
    )
    found += within("model", c, "expert_capacity_factor", "(0, inf)", (1.25,))
    if c.expert_capacity_factor is None:
        because: dict[str, Any] = {"model.expert_capacity_factor": None}
        found += no_effect("model", c, ["expert_capacity_drop"], "model.expert_capacity_factor", because)
    if c.router_aux_loss_coef == 0:
        because = {"model.router_aux_loss_coef": 0}
        found += no_effect("model", c, ["router_aux_loss_scope"], "model.router_aux_loss_coef", because)
    experts = getattr(c, count)
    if not found and c.num_experts_per_tok > experts:
        rule = f"must be <= {count}"
        found.append(problem("model", c, "num_experts_per_tok", rule, {f"model.{count}": experts}, (experts,)))
    return found


ROUTER_KEYS = {"output_router_logits": switch(False), "router_aux_loss_coef": number(0.001)}


def router_fields(found: ConfigJson) -> dict[str, Any]:
    return found.pick("num_experts_per_tok", "router_aux_loss_coef")


def router_to_hf(config: ExpertsConfig) -> dict[str, Any]:
    return {
        "num_experts_per_tok": config.num_experts_per_tok,
        "router_aux_loss_coef": config.router_aux_loss_coef,
        "output_router_logits": False,
    }


Experts = TypeVar("Experts", bound=ExpertsConfig)


def shrink_local_experts(config: Experts, small: SmallExperts) -> Experts:
    """For families with num_local_experts experts, each as wide as intermediate_size."""
    sizes: dict[str, Any] = {"num_local_experts": small.count, "intermediate_size": small.width}
    return replace(config, num_experts_per_tok=small.chosen, **sizes)

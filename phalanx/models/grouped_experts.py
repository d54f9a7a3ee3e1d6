"""Experts in groups, chosen by sigmoid scores and a bias, beside shared ones, as DeepSeek-V3 and GLM-4.5 have them:
fields of the `model` section, rules, blocks, multi-token prediction, config.json, a small copy.

DeepSeek-AI, "DeepSeek-V3 technical report", 2024. The first `first_k_dense_replace` layers have a dense MLP.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, default_of, divisors, no_effect, problem, within
from phalanx.models.config_json import NONE, ConfigJson, HfKey, integer, number, other_values, switch
from phalanx.models.decoder_config import decoder_tensors
from phalanx.models.experts import ExpertsConfig, expert_rules
from phalanx.models.model_config import SmallExperts, SmallSizes
from phalanx.models.predictors import PredictorsConfig

if TYPE_CHECKING:
    from phalanx.models.decoder import MakePart
    from phalanx.nn.env import Env
    from phalanx.nn.mlp import SwiGLU
    from phalanx.nn.moe import MoE
    from phalanx.nn.mtp import Depth
    from phalanx.ops.experts.router import Router


@dataclass(frozen=True, kw_only=True)
class GroupedExpertsConfig(ExpertsConfig, PredictorsConfig):
    """intermediate_size is the width of dense layers."""

    first_k_dense_replace: int
    """The first so many layers have a dense MLP, all others experts."""
    n_routed_experts: int = 256
    """Experts per layer that tokens choose among."""
    num_experts_per_tok: int = 8
    """Experts that each token goes to."""
    n_shared_experts: int = 1
    """Experts that every token goes to, as one MLP of this many times moe_intermediate_size; 0: none."""
    moe_intermediate_size: int = 2048
    """Width of an expert."""
    n_group: int = 8
    """Experts are divided into this many equal groups, in order."""
    topk_group: int = 4
    """A token chooses its experts in this many groups: those with the highest sum of two scores."""
    routed_scaling_factor: float = 2.5
    """Factor of the weights of the chosen experts."""
    norm_topk_prob: bool = True
    """Divide the chosen experts' scores by their sum."""
    router_bias_update_rate: float = 0.001
    """After a step, the bias by which experts are chosen moves by this: up for experts with less than the mean load,
    down for the others; 0: it does not move."""
    router_aux_loss_coef: float = 0.0001
    """Coefficient of the balancing loss E * sum f_i P_i of each layer (technical report, equation 17); 0: none."""
    router_aux_loss_scope: Literal["micro_batch", "sequence", "global_batch"] = "sequence"
    """Tokens whose load the balancing loss evens out: micro_batch, sequence, or global_batch (the load of the whole
    previous step)."""

    @property
    def routed_experts(self) -> int:
        return self.n_routed_experts if self.has_experts(self.num_hidden_layers + self.predict_layers - 1) else 0

    @property
    def expert_size(self) -> int:
        return self.moe_intermediate_size

    def has_experts(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace


# functions that build blocks import torch themselves, because reading a config must not
def mlp(config: GroupedExpertsConfig, env: Env, layer: int) -> MoE | SwiGLU:
    """The MLP or experts of a layer."""
    from phalanx.models.decoder import balance_of, dense_mlp
    from phalanx.nn.mlp import SwiGLU
    from phalanx.nn.moe import ExpertNames, MoE

    c, at = config, f"{config.layer_name(layer)}.mlp"
    if not c.has_experts(layer):
        return dense_mlp(c, env, layer)
    names = ExpertNames(f"{at}.gate.weight", *matrices(f"{at}.experts.{{}}"), bias=f"{at}.gate.e_score_correction_bias")
    balance = replace(balance_of(c), bias_rate=c.router_bias_update_rate)
    shared = None
    if c.n_shared_experts:
        inner = c.n_shared_experts * c.moe_intermediate_size
        shared = SwiGLU(env, matrices(f"{at}.shared_experts"), c.hidden_size, inner, c.initializer_range)
    return MoE(
        env, names, router(c), c.hidden_size, c.moe_intermediate_size, c.initializer_range, balance, shared, layer
    )


def matrices(at: str) -> tuple[str, str, str]:
    """Global names of an MLP's matrices."""
    return f"{at}.gate_proj.weight", f"{at}.up_proj.weight", f"{at}.down_proj.weight"


def router(config: Any) -> Router:
    """Technical report, equations 12 to 16: sigmoid scores; chosen with the bias in the best groups, and weighted
    without it."""
    from phalanx.ops.experts.router import Router

    c = config
    return Router(
        c.num_experts_per_tok,
        c.n_routed_experts,
        score="sigmoid",
        renormalize=c.norm_topk_prob,
        scale=c.routed_scaling_factor,
        groups=c.n_group,
        top_groups=c.topk_group,
        forced="balanced" if c.router_forced_balance else "none",
    )


def make_depth(make_attention: MakePart, config: GroupedExpertsConfig, env: Env, number: int) -> Depth:
    """A multi-token prediction module, numbered as a layer after the last one."""
    from phalanx.models.decoder import DecoderLayer, norm
    from phalanx.nn.mtp import Depth, DepthNames

    c, at = config, config.layer_name(number)
    names = DepthNames(f"{at}.eh_proj", f"{at}.enorm", f"{at}.hnorm", f"{at}.shared_head.norm")
    layer = DecoderLayer(c, env, number, make_attention, mlp)
    return Depth(env, names, partial(norm, c, env), c.hidden_size, c.initializer_range, layer)


OF_EXPERTS = (
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "moe_intermediate_size",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "norm_topk_prob",
    "router_bias_update_rate",
    "router_aux_loss_coef",
    "router_aux_loss_scope",
    "router_z_loss_coef",
    "expert_capacity_factor",
    "router_forced_balance",
)


def check_grouped_experts(config: GroupedExpertsConfig) -> list[Problem]:
    return check_groups(config, expert_rules(config, "n_routed_experts"))


def check_groups(config: GroupedExpertsConfig, before: list[Problem]) -> list[Problem]:
    """Groups are equal, and the groups that a token chooses have at least as many experts as it goes to; added to what
    is wrong `before`."""
    c = config
    if not c.routed_experts:
        because = {
            "model.first_k_dense_replace": c.first_k_dense_replace,
            "model.num_hidden_layers": c.num_hidden_layers,
        }
        return before + no_effect("model", c, OF_EXPERTS, "layers with experts", because)
    return check_group_sizes(c, before + at_least("model", c, 0, "first_k_dense_replace", "n_shared_experts"))


def check_group_sizes(config: Any, before: list[Problem]) -> list[Problem]:
    """Rules of groups, added to `before`; those that compare sizes if nothing else is wrong."""
    c = config
    found = at_least("model", c, 1, "n_group", "topk_group", "moe_intermediate_size")
    found += within("model", c, "routed_scaling_factor", "(0, inf)", (2.5,)) + within(
        "model", c, "router_bias_update_rate", "[0, inf)", (0.001,)
    )
    if found or before:
        return before + found
    experts = {"model.n_routed_experts": c.n_routed_experts}
    if c.n_routed_experts % c.n_group:
        return [
            problem(
                "model", c, "n_group", "must divide n_routed_experts", experts, divisors(c.n_group, c.n_routed_experts)
            )
        ]
    if c.topk_group > c.n_group:
        return [problem("model", c, "topk_group", "must be <= n_group", {"model.n_group": c.n_group}, (c.n_group,))]
    room = c.n_routed_experts // c.n_group * c.topk_group
    if c.num_experts_per_tok > room:
        because = {
            **experts,
            "model.n_group": c.n_group,
            "model.topk_group": c.topk_group,
            "experts in topk_group groups": room,
        }
        return [
            problem(
                "model",
                c,
                "num_experts_per_tok",
                "must be <= the number of experts in topk_group groups",
                because,
                (room,),
            )
        ]
    return []


def split_rules(config: GroupedExpertsConfig, tp: int) -> list[Problem]:
    """The shared experts are one MLP, sharded like any other."""
    if not config.routed_experts or not 0 < config.n_shared_experts * config.moe_intermediate_size < tp:
        return []
    because = {
        "model.n_shared_experts": config.n_shared_experts,
        "model.moe_intermediate_size": config.moe_intermediate_size,
    }
    valid = divisors(tp, config.num_attention_heads)
    return [Problem("layout.tp", tp, "must be <= the width of the shared experts", because, valid)]


GROUPED_FIELDS = (
    "first_k_dense_replace",
    "n_routed_experts",
    "n_shared_experts",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "norm_topk_prob",
)
GROUPED_KEYS = {
    "moe_intermediate_size": integer(2048),
    "n_shared_experts": integer(1),
    "n_routed_experts": integer(256),
    "routed_scaling_factor": number(2.5),
    "n_group": integer(8),
    "topk_group": integer(4),
    "num_experts_per_tok": integer(8),
    "first_k_dense_replace": integer(3),
    "norm_topk_prob": HfKey((bool, NONE), True),
    "num_mtp_layers": integer(0),
    "aux_loss_alpha": number(0.0),
    "seq_aux": switch(True),
}
GROUPED_NAMES = {"n_routed_experts": "num_local_experts", "num_mtp_layers": "num_nextn_predict_layers"}
# keys that the published code reads and transformers does not
GROUPED_ONLY: dict[str, tuple[Any, ...]] = {
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}


def grouped_fields(found: ConfigJson) -> dict[str, Any]:
    """Fields of experts and of multi-token prediction."""
    v = found.values
    found.odd += other_values(found.stated, GROUPED_ONLY)
    own = found.pick(*GROUPED_FIELDS) | {"norm_topk_prob": bool(v["norm_topk_prob"])}
    own["num_nextn_predict_layers"] = v["num_mtp_layers"]
    return own | balance_fields(found)


def balance_fields(found: ConfigJson) -> dict[str, Any]:
    """Of the balancing loss, if the file says something of it."""
    if "aux_loss_alpha" not in found.stated:
        return {}
    scope = "sequence" if found.values["seq_aux"] else "micro_batch"
    return {"router_aux_loss_coef": found.values["aux_loss_alpha"], "router_aux_loss_scope": scope}


def grouped_to_hf(config: GroupedExpertsConfig) -> dict[str, Any]:
    return {
        **{name: getattr(config, name) for name in GROUPED_FIELDS},
        **balance_to_hf(config),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": config.num_nextn_predict_layers,
    }


def balance_to_hf(config: GroupedExpertsConfig) -> dict[str, Any]:
    return {
        "aux_loss_alpha": config.router_aux_loss_coef,
        "seq_aux": config.router_aux_loss_scope == "sequence",
    }


Grouped = TypeVar("Grouped", bound=GroupedExpertsConfig)
InGroups = TypeVar("InGroups")  # a config whose experts are in groups


def dense_if_all_are(config: Grouped) -> Grouped:
    """If all layers are dense, the config without its fields about experts, which nothing reads."""
    if config.routed_experts:
        return config
    return replace(config, **{name: default_of(type(config), name) for name in OF_EXPERTS})


def with_predictors(config: Grouped, count: int) -> Grouped:
    return dense_if_all_are(replace(config, num_nextn_predict_layers=count))


predictor_tensors = replace(
    decoder_tensors,
    copies=r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight",
    predictors=r"model\.layers\.(\d+)\.(enorm|hnorm|eh_proj|shared_head\.norm)\.weight",
)


def small_dense_layers(config: GroupedExpertsConfig, small: SmallSizes) -> int:
    """Layers with and without a dense MLP stay."""
    whole = config.first_k_dense_replace >= config.num_hidden_layers
    return small.layers if whole else min(config.first_k_dense_replace, small.layers - 1)


def shrink_experts(config: InGroups, small: SmallExperts) -> InGroups:
    """The number of groups stays."""
    c: Any = config
    sizes: dict[str, Any] = {"n_routed_experts": small.count, "moe_intermediate_size": small.width}
    if c.n_group == 1:
        return replace(c, num_experts_per_tok=small.chosen, **sizes)
    groups = 2 if small.count % 2 == 0 else small.count
    top = 1 if c.topk_group < c.n_group else groups
    chosen = max(1, min(small.chosen, small.count // groups * top))
    return replace(c, n_group=groups, topk_group=top, num_experts_per_tok=chosen, **sizes)

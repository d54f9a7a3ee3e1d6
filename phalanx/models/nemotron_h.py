"""Nemotron-H: selective scans, a few layers of attention without positions, and MLPs or experts with a squared ReLU,
one to a layer. NVIDIA, "Nemotron-H", 2025; "Nemotron 3 Nano", 2025."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, divisors, no_effect, problem, within
from phalanx.models.config_json import (
    LIST_OR_NULL,
    NEEDED,
    NONE,
    ConfigJson,
    HfKey,
    integer,
    integer_or_null,
    number,
    other_values,
    shown,
    switch,
    text,
)
from phalanx.models.decoder_config import small_types
from phalanx.models.experts import BALANCE, RoutingFields, expert_rules
from phalanx.models.family import Family
from phalanx.models.grouped_experts import check_group_sizes, shrink_experts
from phalanx.models.model_config import ModelConfig, SmallSizes, TensorNames
from phalanx.models.scan_fields import check_scan_ranks, check_shares, check_steps

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env
    from phalanx.nn.module import Module

LayerKind = Literal["linear_attention", "full_attention", "mlp", "moe"]
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(RoutingFields, ModelConfig):
    family: Literal["nemotron_h"] = "nemotron_h"
    """Which model this section describes: nemotron_h."""
    vocab_size: int
    """Size of the vocabulary; any size at any tp, padding never leaves the ranks."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of an MLP."""
    num_hidden_layers: int
    """Number of layers."""
    layers_block_type: tuple[LayerKind, ...]
    """What each layer is: linear_attention (a selective scan), full_attention, mlp or moe (experts)."""
    num_attention_heads: int
    """Query heads of a layer of attention."""
    num_key_value_heads: int = 8
    """Key/value heads of a layer of attention."""
    head_dim: int = 128
    """Width of a head of attention."""
    mamba_num_heads: int = 128
    """Heads of a scan."""
    mamba_head_dim: int = 64
    """Width of a head of a scan."""
    ssm_state_size: int = 128
    """Features of the state of a scan's head."""
    n_groups: int = 8
    """Groups of heads of a scan that share what is written to their states and read from them."""
    conv_kernel: int = 4
    """Tokens that the convolution before a scan reads: each token and those before it."""
    layer_norm_epsilon: float = 1e-5
    """Epsilon of RMSNorm."""
    use_bias: bool = False
    """The two projections of a scan's layer have biases."""
    use_conv_bias: bool = True
    """The convolution has a bias."""
    mlp_bias: bool = False
    """The two projections of an MLP have biases, those of shared experts and of latents too."""
    time_step_min: float = 0.001
    """Smallest step of a head, at the start of training and ever after."""
    time_step_max: float = 0.1
    """Largest step of a head at the start of training."""
    time_step_floor: float = 1e-4
    """Steps at the start of training are at least this."""
    initializer_range: float = 0.02
    """Standard deviation of initial weights."""
    max_position_embeddings: int = 4096
    """Longest text that is generated or embedded. No layer has positions: this bounds tables, not the model."""
    n_routed_experts: int = 8
    """Experts per layer that tokens choose among."""
    moe_intermediate_size: int = 7688
    """Width of an expert."""
    moe_shared_expert_intermediate_size: int = 7688
    """Width of the expert that every token goes to."""
    moe_latent_size: int | None = None
    """Experts work on tokens of this width, to and from which two matrices of the layer project; unset: hidden_size."""
    n_group: int = 1
    """Experts are divided into this many equal groups, in order."""
    topk_group: int = 1
    """A token chooses its experts in this many groups: those with the highest sum of two scores."""
    routed_scaling_factor: float = 1.0
    """Factor of the weights of the chosen experts."""
    norm_topk_prob: bool = True
    """Divide the chosen experts' scores by their sum."""
    router_bias_update_rate: float = 0.001
    """After a step, the bias by which experts are chosen moves by this: up for experts with less than the mean load,
    down for the others; 0: it does not move."""
    router_aux_loss_coef: float = 0.0001
    """Coefficient of the balancing loss E * sum f_i P_i of each layer; 0: none."""
    router_aux_loss_scope: Literal["micro_batch", "sequence", "global_batch"] = "sequence"
    """Tokens whose load the balancing loss evens out: micro_batch, sequence, or global_batch (the load of the whole
    previous step)."""

    @property
    def routed_experts(self) -> int:
        return self.n_routed_experts if "moe" in self.layers_block_type else 0

    @property
    def expert_size(self) -> int:
        return self.moe_intermediate_size

    def has_experts(self, layer: int) -> bool:
        return self.layers_block_type[layer] == "moe"

    @property  # type: ignore[misc]
    def tie_word_embeddings(self) -> bool:
        """No published model is tied, and transformers has no such form."""
        return False

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads

    @property
    def head_widths(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim

    @property
    def rotary(self) -> bool:
        return False

    @property
    def attends(self) -> bool:
        return "full_attention" in self.layers_block_type

    @property
    def taps(self) -> int:
        return self.conv_kernel if "linear_attention" in self.layers_block_type else 0

    @property
    def gated_mlp(self) -> bool:
        return False


# functions that build blocks import torch themselves, because reading a config must not
def blocks(config: NemotronHConfig, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.mixer_decoder import mixer_blocks

    return mixer_blocks(config, env, NAMES, "model.norm_f", mixer)


def mixer(config: NemotronHConfig, env: Env, layer: int) -> Module:
    made = {"linear_attention": scan, "full_attention": attention, "mlp": mlp, "moe": experts}
    return made[config.layers_block_type[layer]](config, env, f"{NAMES.layer.format(layer)}.mixer", layer)


def scan(config: NemotronHConfig, env: Env, name: str, layer: int) -> Module:
    from phalanx.nn.state_space import StateSpace, StateSpaceSpec

    c = config
    spec = StateSpaceSpec(
        name=name,
        width=c.hidden_size,
        heads=c.mamba_num_heads,
        head_dim=c.mamba_head_dim,
        groups=c.n_groups,
        state=c.ssm_state_size,
        taps=c.conv_kernel,
        eps=c.layer_norm_epsilon,
        std=c.initializer_range,
        steps=(c.time_step_min, c.time_step_max, c.time_step_floor),
        limits=(c.time_step_min, math.inf),
        bias=c.use_bias,
        out_bias=c.use_bias,
        conv_bias=c.use_conv_bias,
    )
    return StateSpace(env, spec)


def attention(config: NemotronHConfig, env: Env, name: str, layer: int) -> Module:
    from phalanx.nn.attention import Attention, AttentionSpec

    c, (q, k, v, o) = config, (f"{name}.{n}_proj.weight" for n in "qkvo")
    spec = AttentionSpec(
        names=(q, k, v, o),
        width=c.hidden_size,
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        std=c.initializer_range,
        layer=layer,
    )
    return Attention(env, spec)


def mlp(config: NemotronHConfig, env: Env, name: str, layer: int, inner: int | None = None) -> Module:
    """`inner`: its width, if it is another."""
    from phalanx.nn.mlp import GeluMLP

    c, names = config, (f"{name}.up_proj", f"{name}.down_proj")
    sizes = c.hidden_size, inner or c.intermediate_size, c.initializer_range, c.initializer_range
    return GeluMLP(env, names, *sizes, "relu2", transposed=False, bias=c.mlp_bias)


def experts(config: NemotronHConfig, env: Env, name: str, layer: int) -> Module:
    from phalanx.models.decoder import balance_of
    from phalanx.models.grouped_experts import router
    from phalanx.nn.moe import Latents, MoE, UngatedNames

    c, each, latents = config, f"{name}.experts.{{}}", None
    bias = f"{name}.gate.e_score_correction_bias"
    names = UngatedNames(f"{name}.gate.weight", f"{each}.up_proj.weight", f"{each}.down_proj.weight", bias)
    if c.moe_latent_size is not None:
        both = f"{name}.fc1_latent_proj.weight", f"{name}.fc2_latent_proj.weight"
        latents = Latents(env, both, c.hidden_size, c.moe_latent_size, c.initializer_range, c.mlp_bias)
    sizes = c.hidden_size, c.moe_intermediate_size, c.initializer_range
    shared = mlp(c, env, f"{name}.shared_experts", layer, c.moe_shared_expert_intermediate_size)
    balance = replace(balance_of(c), bias_rate=c.router_bias_update_rate)
    return MoE(env, names, router(c), *sizes, balance, shared, layer, latents)


def rules(config: NemotronHConfig, seq_length: int) -> list[Problem]:
    c = config
    found = at_least("model", c, 1, "num_key_value_heads", "head_dim", "mamba_num_heads", "mamba_head_dim")
    found += at_least("model", c, 1, "ssm_state_size", "n_groups") + at_least("model", c, 2, "conv_kernel")
    found += within("model", c, "layer_norm_epsilon", "(0, inf)") + check_steps(c)
    if found:
        return found
    layers, kinds = c.num_hidden_layers, c.layers_block_type
    if len(kinds) != layers:
        because = {"kinds": len(kinds), "model.num_hidden_layers": layers}
        whole = (kinds * layers)[:layers]
        found.append(
            problem("model", c, "layers_block_type", "must have one kind per layer", because, (whole,) if whole else ())
        )
    found += check_shares(c, ("n_groups", "mamba_num_heads"), ("num_key_value_heads", "num_attention_heads"))
    if not c.routed_experts:
        return found + no_effect("model", c, OF_EXPERTS, "layers of moe", {"model.layers_block_type": kinds})
    widths = at_least("model", c, 1, "moe_shared_expert_intermediate_size", "moe_latent_size")
    return found + check_group_sizes(c, expert_rules(c, "n_routed_experts") + widths)


def split_rules(config: NemotronHConfig, tp: int) -> list[Problem]:
    """What the heads of scans and the shared experts say; heads of attention are every model's."""
    found, inner = (
        check_scan_ranks(config, tp, "mamba_num_heads", "n_groups"),
        config.moe_shared_expert_intermediate_size,
    )
    if config.routed_experts and inner < tp:
        because = {"model.moe_shared_expert_intermediate_size": inner}
        valid = tuple(ranks for ranks in divisors(tp, config.num_attention_heads) if ranks <= inner)
        found.append(Problem("layout.tp", tp, "must be <= moe_shared_expert_intermediate_size", because, valid))
    return found


SAME = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "mamba_num_heads",
    "mamba_head_dim",
    "ssm_state_size",
    "n_groups",
    "conv_kernel",
    "layer_norm_epsilon",
    "use_bias",
    "use_conv_bias",
    "mlp_bias",
    "time_step_min",
    "time_step_max",
    "time_step_floor",
    "initializer_range",
    "max_position_embeddings",
)
EXPERT_SAME = (
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "moe_latent_size",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "norm_topk_prob",
)
OF_EXPERTS = (*EXPERT_SAME, "router_bias_update_rate", *BALANCE)
KEYS = {
    "vocab_size": integer(NEEDED),
    "hidden_size": integer(NEEDED),
    "intermediate_size": integer(NEEDED),
    "num_hidden_layers": integer_or_null(),
    "layers_block_type": LIST_OR_NULL,
    "hybrid_override_pattern": HfKey((str, NONE), None),
    "num_attention_heads": integer(NEEDED),
    "num_key_value_heads": integer_or_null(8),
    "head_dim": integer(128),
    "mamba_num_heads": integer(128),
    "mamba_head_dim": integer(64),
    "ssm_state_size": integer(128),
    "n_groups": integer(8),
    "conv_kernel": integer(4),
    "layer_norm_epsilon": number(1e-5),
    "use_bias": switch(False),
    "use_conv_bias": switch(True),
    "mlp_bias": switch(False),
    "mlp_hidden_act": text("relu2"),
    "mamba_hidden_act": text("silu"),
    "attention_dropout": number(0.0),
    "tie_word_embeddings": switch(False),
    "num_nextn_predict_layers": integer(0),
    "time_step_min": number(0.001),
    "time_step_max": number(0.1),
    "time_step_floor": number(1e-4),
    "initializer_range": number(0.02),
    "max_position_embeddings": integer(4096),
    "n_routed_experts": integer(8),
    "n_shared_experts": integer(1),
    "num_experts_per_tok": integer(2),
    "moe_intermediate_size": integer(7688),
    "moe_shared_expert_intermediate_size": integer(7688),
    "moe_latent_size": integer_or_null(),
    "n_group": integer(1),
    "topk_group": integer(1),
    "routed_scaling_factor": number(1.0),
    "norm_topk_prob": switch(True),
    "aux_loss_alpha": number(0.0),
    "seq_aux": switch(True),
}


def from_hf(found: ConfigJson) -> NemotronHConfig | None:
    v, pattern = found.values, found.values["hybrid_override_pattern"]
    kinds = v["layers_block_type"]
    if kinds is None and pattern is not None:
        kinds = [LETTERS.get(letter, letter) for letter in pattern]
    kinds = [OLD_KINDS.get(kind, kind) for kind in kinds or ()]
    known = get_args(LayerKind)
    bad = next((i for i, kind in enumerate(kinds) if kind not in known), None)
    if bad is not None or not kinds:
        what = "there are none" if bad is None else f"layer {bad} is {kinds[bad]!r}"
        found.odd.append(f"layers_block_type: {what} (supported: {shown(known)})")
    if kinds and v["num_hidden_layers"] not in (None, len(kinds)):
        found.odd.append(f"layers_block_type has {len(kinds)} kinds (supported: one for each of num_hidden_layers)")
    heads = v["num_attention_heads"] if v["num_key_value_heads"] is None else v["num_key_value_heads"]
    own = found.pick(*SAME) | {"num_key_value_heads": heads}
    if "moe" in kinds:
        own |= found.pick(*EXPERT_SAME)
        found.odd += other_values(v, {"n_shared_experts": (1,)})
        if "aux_loss_alpha" in found.stated:
            scope = "sequence" if v["seq_aux"] else "micro_batch"
            own |= {"router_aux_loss_coef": v["aux_loss_alpha"], "router_aux_loss_scope": scope}
    if found.odd:
        return None
    return NemotronHConfig(**own, layers_block_type=tuple(kinds), num_hidden_layers=len(kinds))


def to_hf(config: NemotronHConfig) -> dict[str, Any]:
    of_experts: dict[str, Any] = {}
    if config.routed_experts:
        of_experts = {
            **{name: getattr(config, name) for name in EXPERT_SAME},
            "n_shared_experts": 1,
            "aux_loss_alpha": config.router_aux_loss_coef,
            "seq_aux": config.router_aux_loss_scope == "sequence",
        }
    return {
        **{name: getattr(config, name) for name in SAME},
        **of_experts,
        "layers_block_type": list(config.layers_block_type),
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
    }


def fill(model: dict[str, Any]) -> dict[str, Any]:
    """All fields are already explicit."""
    return model


def shrink(config: NemotronHConfig, small: SmallSizes) -> NemotronHConfig:
    """Layers of all kinds stay; heads and groups keep their relation to the ranks."""
    of_experts: dict[str, Any] = {}
    if config.routed_experts:
        latent = None if config.moe_latent_size is None else small.hidden_size // 2
        of_experts = {"moe_shared_expert_intermediate_size": small.intermediate_size, "moe_latent_size": latent}
    return replace(
        config,
        **of_experts,
        vocab_size=small.vocab_size,
        hidden_size=small.hidden_size,
        intermediate_size=small.intermediate_size,
        num_hidden_layers=small.layers,
        layers_block_type=small_types(config.layers_block_type, small.layers),
        num_attention_heads=small.heads,
        num_key_value_heads=small.kv_heads,
        head_dim=small.head_dim,
        mamba_num_heads=small.heads,
        mamba_head_dim=small.head_dim,
        ssm_state_size=min(config.ssm_state_size, 6),
        n_groups=small.kv_heads,
        conv_kernel=min(config.conv_kernel, 3),
    )


def least_layers(config: NemotronHConfig) -> int:
    """Layers until each kind has come once."""
    kinds = config.layers_block_type
    return max(kinds.index(kind) for kind in set(kinds)) + 1


NAMES = TensorNames(
    prefix="model.",
    embedding="model.embeddings.weight",
    layer="model.layers.{}",
    renames={"backbone.": "model."},
)
FAMILY = Family(
    "nemotron_h",
    NemotronHConfig,
    blocks,
    architecture="NemotronHForCausalLM",
    tensors=NAMES,
    rules=rules,
    split_rules=split_rules,
    keys=KEYS,
    other_names={"layers_block_type": "layer_types", "n_routed_experts": "num_local_experts"},
    only={
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu", "swish"),
        "attention_dropout": (0.0,),
        "tie_word_embeddings": (False,),
        "num_nextn_predict_layers": (0,),
    },
    from_hf=from_hf,
    to_hf=to_hf,
    fill=fill,
    shrink=shrink,
    shrink_experts=shrink_experts,
    least_layers=least_layers,
)

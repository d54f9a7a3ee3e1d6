"""Kimi Linear: linear attention by a delta rule with a decay for each feature of a key, and latent attention without
positions in every fourth layer; DeepSeek-V3's experts. Kimi Team, "Kimi Linear", 2025."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, no_effect, problem
from phalanx.models.config_json import NONE, ConfigJson, HfKey, integer, integer_or_null, number, switch, text
from phalanx.models.decoder_config import (
    DECODER_KEYS,
    DECODER_ONLY,
    SIZES,
    common_rules,
    decoder_tensors,
    decoder_to_hf,
    small_types,
)
from phalanx.models.delta_layers import (
    DELTA_KEYS,
    DeltaSizes,
    LinearLayersConfig,
    check_kinds,
    check_kinds_of_layers,
    delta_least_layers,
    gated_delta,
    one_tensor_each,
    pattern,
    split_delta_heads,
)
from phalanx.models.family import Family
from phalanx.models.grouped_experts import (
    GroupedExpertsConfig,
    balance_fields,
    balance_to_hf,
    check_grouped_experts,
    dense_if_all_are,
    matrices,
    router,
    shrink_experts,
    small_dense_layers,
    split_rules,
)
from phalanx.models.model_config import SmallSizes

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env
    from phalanx.nn.mlp import SwiGLU
    from phalanx.nn.module import Module
    from phalanx.nn.moe import MoE


@dataclass(frozen=True, kw_only=True)
class KimiLinearConfig(GroupedExpertsConfig, LinearLayersConfig):
    """Fields of linear attention, of latent attention and of DeepSeek-V3's experts; intermediate_size is the width of
    dense layers. No layer has a rotary embedding."""

    family: Literal["kimi_linear"] = "kimi_linear"
    """Which model this section describes: kimi_linear."""
    max_position_embeddings: int = 1048576
    """Longest sequence the model is meant for. No layer has positions: this bounds tables, not the model."""
    linear_num_heads: int = 32
    """Heads of linear attention, each with a state."""
    linear_head_dim: int = 128
    """Width of a head of linear attention: of its queries, keys and values, and of the latents of its decays and its
    gate."""
    q_lora_rank: int | None = None
    """Width of the latent from which queries are computed; null: they are computed from the layer's input."""
    kv_lora_rank: int = 512
    """Width of the latent from which keys and values of attention are computed."""
    qk_nope_head_dim: int = 128
    """Features of a query or key of attention that each head has of its own."""
    qk_rope_head_dim: int = 64
    """Features of a query or key of attention that are the same for all heads in keys; nothing is rotated."""
    v_head_dim: int = 128
    """Width of a value head of attention."""
    first_k_dense_replace: int = 1
    """The first so many layers have a dense MLP, all others experts."""
    moe_intermediate_size: int = 1024
    """Width of an expert."""
    n_group: int = 1
    """Experts are divided into this many equal groups, in order."""
    topk_group: int = 1
    """A token chooses its experts in this many groups: those with the highest sum of two scores."""
    routed_scaling_factor: float = 2.446
    """Factor of the weights of the chosen experts."""

    heads_fields: ClassVar[tuple[str, str]] = ("linear_num_heads", "linear_num_heads")

    @property
    def delta_sizes(self) -> DeltaSizes:
        heads, width = self.linear_num_heads, self.linear_head_dim
        return DeltaSizes(heads, heads, width, width)

    @property
    def kv_heads(self) -> int:
        return self.num_attention_heads

    @property
    def head_widths(self) -> tuple[int, int]:
        return self.qk_nope_head_dim + self.qk_rope_head_dim, self.v_head_dim

    @property
    def rotary(self) -> bool:
        return False


# functions that build blocks import torch themselves, because reading a config must not
def blocks(config: KimiLinearConfig, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.decoder import DecoderLayer, decoder_blocks

    return decoder_blocks(config, env, partial(DecoderLayer, make_attention=mixer, make_mlp=make_mlp))


def mixer(config: KimiLinearConfig, env: Env, layer: int) -> Module:
    """Latent attention, or linear attention with a tensor for each projection."""
    from phalanx.nn.gated_delta import DeltaRows, GateLatents, RowsOfHeads
    from phalanx.nn.initial import LogUniform, TimeStep
    from phalanx.nn.mla import LatentAttention, LatentSizes
    from phalanx.ops.attention.kind import CAUSAL

    c, at = config, f"{config.base}layers.{layer}.self_attn"
    if c.types[layer] == "full_attention":
        latent = LatentSizes(c.q_lora_rank, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim)
        return LatentAttention(env, at, c.hidden_size, c.num_attention_heads, latent, c.initializer_range, None, CAUSAL)
    heads, width = c.linear_num_heads, c.linear_head_dim
    rows = DeltaRows(
        *one_tensor_each(c, [f"{at}.{n}_proj.weight" for n in "qkv"]),
        one_tensor_each(c, [f"{at}.{n}_conv1d.weight" for n in "qkv"]),
        RowsOfHeads.whole(f"{at}.b_proj.weight", heads, 1),
    )
    made = (RowsOfHeads.whole(f"{at}.{n}_b_proj.weight", heads, width) for n in "fg")
    return gated_delta(
        c,
        env,
        at,
        rows,
        latents=GateLatents((f"{at}.f_a_proj.weight", f"{at}.g_a_proj.weight"), width, *made),
        out=f"{at}.o_proj",
        norm=f"{at}.o_norm",
        rate_shape=(1, 1, heads, 1),
        gate="sigmoid",
        init=(LogUniform(low=1.0, high=16.0), TimeStep(low=1e-3, high=0.1, floor=1e-4)),
    )


def make_mlp(config: KimiLinearConfig, env: Env, layer: int) -> MoE | SwiGLU:
    from phalanx.models.decoder import balance_of, dense_mlp
    from phalanx.nn.mlp import SwiGLU
    from phalanx.nn.moe import ExpertNames, MoE

    c, at, std = config, f"{config.base}layers.{layer}.block_sparse_moe", config.initializer_range
    if not c.has_experts(layer):
        return dense_mlp(c, env, layer)
    gate, down, up = (f"{at}.experts.{{}}.{w}.weight" for w in ("w1", "w2", "w3"))
    names = ExpertNames(f"{at}.gate.weight", gate, up, down, bias=f"{at}.gate.e_score_correction_bias")
    balance = replace(balance_of(c), bias_rate=c.router_bias_update_rate)
    shared = None
    if c.n_shared_experts:
        inner = c.n_shared_experts * c.moe_intermediate_size
        shared = SwiGLU(env, matrices(f"{at}.shared_experts"), c.hidden_size, inner, std)
    return MoE(env, names, router(c), c.hidden_size, c.moe_intermediate_size, std, balance, shared, layer)


def rules(config: KimiLinearConfig, seq_length: int) -> list[Problem]:
    c = config
    found = common_rules(c) + check_grouped_experts(c) + check_kinds_of_layers(c)
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    found += at_least("model", c, 1, "linear_num_heads", "linear_head_dim", "q_lora_rank", *sizes)
    family = {"model.family": c.family}
    found += no_effect("model", c, ["rope_theta", "rope_scaling"], "layers with a rotary embedding", family)
    found += no_effect("model", c, ["num_nextn_predict_layers", "mtp_loss_weight"], "multi-token prediction", family)
    heads = "heads of their own (kimi_linear makes them from latents)"
    found += no_effect("model", c, ["num_key_value_heads", "head_dim"], heads, {})
    if c.tie_word_embeddings:
        rule = "must be false: transformers has no such form of this family"
        found.append(problem("model", c, "tie_word_embeddings", rule, family, (False,)))
    return found


def split(config: KimiLinearConfig, tp: int) -> list[Problem]:
    return split_delta_heads(config, tp) + split_rules(config, tp)


KEYS = {
    **{name: key for name, key in DECODER_KEYS.items() if name != "rope_parameters"},
    **{name: DELTA_KEYS[name] for name in ("layer_types", "linear_conv_kernel_dim")},
    "num_key_value_heads": integer_or_null(32),
    "max_position_embeddings": integer(1048576),
    "rms_norm_eps": number(1e-5),
    "attention_bias": switch(False),
    "linear_attn_config": HfKey((dict, NONE), None),
    "linear_num_heads": integer(32),
    "linear_head_dim": integer(128),
    "mla_use_nope": switch(True),
    "q_lora_rank": integer_or_null(),
    "kv_lora_rank": integer(512),
    "qk_nope_head_dim": integer(128),
    "qk_rope_head_dim": integer(64),
    "v_head_dim": integer(128),
    "mlp_layer_types": DELTA_KEYS["layer_types"],
    "first_k_dense_replace": integer(1),
    "num_local_experts": integer(256),
    "num_experts_per_tok": integer(8),
    "n_shared_experts": integer(1),
    "moe_intermediate_size": integer(1024),
    "n_group": integer(1),
    "topk_group": integer(1),
    "routed_scaling_factor": number(2.446),
    "norm_topk_prob": switch(True),
    "moe_router_activation_func": text("sigmoid"),
    "moe_layer_freq": integer(1),
    "num_nextn_predict_layers": integer(0),
    "aux_loss_alpha": number(0.0),
    "seq_aux": switch(True),
}
PUBLISHED = {
    "max_position_embeddings": "model_max_length",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
}
ONLY: dict[str, tuple[Any, ...]] = {
    **DECODER_ONLY,
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
    "mla_use_nope": (True,),
    "moe_router_activation_func": ("sigmoid",),
    "moe_layer_freq": (1,),
    "num_nextn_predict_layers": (0,),
}
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
OF_EXPERTS = (
    "num_experts_per_tok",
    "n_shared_experts",
    "moe_intermediate_size",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "norm_topk_prob",
)


def from_hf(found: ConfigJson) -> KimiLinearConfig | None:
    v, heads = found.values, found.values["num_attention_heads"]
    kv_heads = heads if v["num_key_value_heads"] is None else v["num_key_value_heads"]
    if kv_heads != heads:
        found.odd.append(f"num_key_value_heads={kv_heads!r} (supported: {heads}, as many as query heads)")
    linear, dense = linear_fields(found), dense_layers(found)
    own = found.pick(*SIZES, *LATENT, *OF_EXPERTS) | {"n_routed_experts": v["num_local_experts"]}
    own |= balance_fields(found)
    if found.odd:
        return None
    return dense_if_all_are(KimiLinearConfig(**own, **linear, first_k_dense_replace=dense))


def linear_fields(found: ConfigJson) -> dict[str, Any]:
    """Sizes of linear attention and kinds of layers, which published files say in linear_attn_config, counting layers
    from 1."""
    v, layers = found.values, found.values["num_hidden_layers"]
    given = v["linear_attn_config"] or {}
    names = {"linear_num_heads": "num_heads", "linear_head_dim": "head_dim"}
    names["linear_conv_kernel_dim"] = "short_conv_kernel_size"
    own = {name: given.get(other, v[name]) for name, other in names.items()}
    found.odd += [f"linear_attn_config: {names[n]}={size!r}" for n, size in own.items() if not KEYS[n].takes(size)]
    types = v["layer_types"]
    if types is None and {"full_attn_layers", "kda_layers"} <= set(given):
        full, linear = given["full_attn_layers"], given["kda_layers"]
        if not (isinstance(full, list) and isinstance(linear, list)):
            found.odd.append("linear_attn_config: full_attn_layers and kda_layers must be lists of layers, from 1")
            return own
        of = {n: "full_attention" for n in full} | {n: "linear_attention" for n in linear}
        types = [of.get(n, "none") for n in range(1, layers + 1)]
    if types is None:
        types = ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(layers)]
    check_kinds(found, tuple(types), "layer_types")
    usual = pattern(layers, KimiLinearConfig.period)
    return own if tuple(types) == usual else {**own, "layer_types": tuple(types)}


def dense_layers(found: ConfigJson) -> int:
    """How many layers have a dense MLP, which must be the first ones."""
    kinds, layers = found.values["mlp_layer_types"], found.values["num_hidden_layers"]
    if kinds is None:
        return found.values["first_k_dense_replace"]  # type: ignore[no-any-return]
    count = kinds.count("dense")
    if kinds != ["dense"] * count + ["sparse"] * (layers - count):
        found.odd.append(f"mlp_layer_types={kinds!r} (supported: 'dense' for the first layers, 'sparse' for the rest)")
    return count


def to_hf(config: KimiLinearConfig) -> dict[str, Any]:
    """As published, and which layers are dense as transformers says it."""
    c, layers = config, range(1, config.num_hidden_layers + 1)
    of = {kind: [n for n in layers if c.types[n - 1] == kind] for kind in ("full_attention", "linear_attention")}
    written = {
        **{name: value for name, value in decoder_to_hf(c).items() if not name.startswith("rope_")},
        **{name: getattr(c, name) for name in (*LATENT, *OF_EXPERTS)},
        "num_local_experts": c.n_routed_experts,
    }
    return {
        **{PUBLISHED.get(name, name): value for name, value in written.items()},
        "num_key_value_heads": c.num_attention_heads,
        "attention_bias": False,
        "linear_attn_config": {
            "full_attn_layers": of["full_attention"],
            "kda_layers": of["linear_attention"],
            "num_heads": c.linear_num_heads,
            "head_dim": c.linear_head_dim,
            "short_conv_kernel_size": c.linear_conv_kernel_dim,
        },
        "mla_use_nope": True,
        "first_k_dense_replace": c.first_k_dense_replace,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        "num_nextn_predict_layers": 0,
        **balance_to_hf(c),
    }


def fill(model: dict[str, Any]) -> dict[str, Any]:
    """All fields are already explicit."""
    return model


def shrink(config: KimiLinearConfig, small: SmallSizes) -> KimiLinearConfig:
    """Layers of all kinds stay."""
    return replace(
        config,
        vocab_size=small.vocab_size,
        hidden_size=small.hidden_size,
        intermediate_size=small.intermediate_size,
        num_hidden_layers=small.layers,
        num_attention_heads=small.heads,
        layer_types=small_types(config.types, small.layers),
        first_k_dense_replace=small_dense_layers(config, small),
        linear_num_heads=small.heads,
        linear_head_dim=4,
        linear_conv_kernel_dim=min(config.linear_conv_kernel_dim, 3),
        q_lora_rank=6 if config.q_lora_rank else None,
        kv_lora_rank=5,
        qk_nope_head_dim=3,
        qk_rope_head_dim=4,
        v_head_dim=5,
    )


FAMILY = Family(
    "kimi_linear",
    KimiLinearConfig,
    blocks,
    architecture="KimiLinearForCausalLM",
    tensors=replace(
        decoder_tensors,
        also=("model.layers.0.self_attn.A_log",),
        # transformers saves dense MLPs under the name of experts
        renames={f"block_sparse_moe.{n}_proj.weight": f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")},
        modules={
            ".self_attn.f_": ".self_attn.forget_gate.f_",
            ".block_sparse_moe.shared_experts.": ".mlp.shared_experts.",
        },
    ),
    rules=rules,
    split_rules=split,
    keys=KEYS,
    other_names=PUBLISHED,
    only=ONLY,
    from_hf=from_hf,
    to_hf=to_hf,
    fill=fill,
    shrink=shrink,
    shrink_experts=shrink_experts,
    least_layers=delta_least_layers,
)

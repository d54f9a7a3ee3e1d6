"""DeepSeek-V3: Llama's blocks with latent attention and experts. Experts are chosen within groups by sigmoid scores and
a bias, in addition to shared ones.

DeepSeek-AI, "DeepSeek-V3 technical report", 2024. The first `first_k_dense_replace` layers have a dense MLP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, default_of, divisors, multiples, no_effect, problem, within
from phalanx.models.config_json import (
    NONE,
    ConfigJson,
    HfKey,
    integer,
    integer_or_null,
    number,
    number_or_null,
    other_values,
    switch,
)
from phalanx.models.decoder_config import (
    DECODER_KEYS,
    common_rules,
    decoder_tensors,
    decoder_to_hf,
    rope_of,
    sizes_from_hf,
    small_positions,
)
from phalanx.models.experts import ExpertsConfig, expert_rules
from phalanx.models.family import Family
from phalanx.models.model_config import SmallExperts, SmallSizes
from phalanx.models.rope import small_scaling, with_factors

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env
    from phalanx.nn.mla import LatentAttention
    from phalanx.nn.mlp import SwiGLU
    from phalanx.nn.moe import MoE
    from phalanx.nn.mtp import MultiTokenPrediction
    from phalanx.nn.parameter import Parameter
    from phalanx.ops.experts.router import Router


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(ExpertsConfig):
    """Llama's fields without num_key_value_heads and head_dim, because heads are computed from latents.
    intermediate_size is the width of dense layers."""

    family: Literal["deepseek_v3"] = "deepseek_v3"
    """Which model this section describes: deepseek_v3."""
    max_position_embeddings: int = 4096
    """Longest sequence the model is meant for."""
    rms_norm_eps: float = 1e-6
    """Epsilon of RMSNorm (of the latents' norms it is always 1e-6)."""
    q_lora_rank: int | None = 1536
    """Width of the latent from which queries are computed; null: they are computed from the layer's input."""
    kv_lora_rank: int = 512
    """Width of the latent from which keys and values are computed."""
    qk_nope_head_dim: int = 128
    """Features of a query or key head that are not rotated."""
    qk_rope_head_dim: int = 64
    """Features of a query or key head that are rotated; all heads share the key's."""
    v_head_dim: int = 128
    """Width of a value head."""
    rope_interleave: bool = True
    """Whether the weights pair rotated features 2i and 2i + 1 (as published); false: i and i + half, like Llama's."""
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
    num_nextn_predict_layers: int = 0
    """Multi-token prediction modules after the last layer, each with a layer of its own; in training each predicts one
    token further ahead (DeepSeek-V3: 1)."""
    mtp_loss_weight: float = 0.3
    """Weight of the mean of their losses, relative to the main loss."""

    @property
    def kv_heads(self) -> int:
        return self.num_attention_heads

    @property
    def head_widths(self) -> tuple[int, int]:
        return self.qk_nope_head_dim + self.qk_rope_head_dim, self.v_head_dim

    @property
    def rotated_features(self) -> int:
        return self.qk_rope_head_dim

    @property
    def routed_experts(self) -> int:
        return self.n_routed_experts if self.has_experts(self.num_hidden_layers + self.predict_layers - 1) else 0

    @property
    def predict_layers(self) -> int:
        return self.num_nextn_predict_layers

    @property
    def expert_size(self) -> int:
        return self.moe_intermediate_size

    def has_experts(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace


# functions that build blocks import torch themselves, because reading a config must not
def blocks(config: DeepseekV3Config, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.decoder import DecoderLayer, decoder_blocks

    layer = partial(DecoderLayer, make_attention=attention, make_mlp=mlp)
    return decoder_blocks(config, env, layer, make_mtp if config.num_nextn_predict_layers else None)


def attention(config: DeepseekV3Config, env: Env, layer: int) -> LatentAttention:
    from phalanx.nn.mla import LatentAttention, LatentSizes
    from phalanx.ops.attention.kind import AttentionKind
    from phalanx.ops.dense.rope_scaling import Rotation

    c = config
    sizes = LatentSizes(c.q_lora_rank, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim)
    rotation = Rotation(c.qk_rope_head_dim, c.rope_theta, c.rope_scaling, c.max_position_embeddings)
    return LatentAttention(
        env,
        f"model.layers.{layer}.self_attn",
        c.hidden_size,
        c.num_attention_heads,
        sizes,
        c.initializer_range,
        rotation,
        AttentionKind(scale=score_scale(c)),
        c.rope_interleave,
    )


def score_scale(config: DeepseekV3Config) -> float:
    """1 / sqrt(width of a query), times the square of YaRN's factor if `mscale_all_dim` applies it there rather than to
    cos and sin."""
    from phalanx.ops.dense.rope_scaling import yarn_mscale

    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    scaling = config.rope_scaling
    if scaling is None or not scaling.mscale_all_dim or scaling.factor is None:
        return scale
    return scale * yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2


def mlp(config: DeepseekV3Config, env: Env, layer: int) -> MoE | SwiGLU:
    """The MLP or experts of a layer."""
    from phalanx.models.decoder import balance_of, dense_mlp
    from phalanx.nn.mlp import SwiGLU
    from phalanx.nn.moe import ExpertNames, MoE

    c, at = config, f"model.layers.{layer}.mlp"
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


def router(config: DeepseekV3Config) -> Router:
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


def make_mtp(config: DeepseekV3Config, env: Env, made: Mapping[str, Parameter]) -> MultiTokenPrediction:
    """The multi-token prediction modules, numbered as layers after the last one."""
    from phalanx.models.decoder import DecoderLayer, embedding_replicas, make_head
    from phalanx.nn.embedding import Embedding
    from phalanx.nn.mtp import Depth, MultiTokenPrediction
    from phalanx.nn.norm import RMSNorm

    c, name = config, decoder_tensors.embedding
    replicas = embedding_replicas(c, env)
    embed = Embedding(env, name, c.vocab_size, c.hidden_size, c.initializer_range, replicas, made.get(name))
    head = make_head(c, env, {name: embed.weight})
    depths = [
        Depth(
            env,
            f"model.layers.{n}",
            c.hidden_size,
            c.rms_norm_eps,
            c.initializer_range,
            DecoderLayer(c, env, n, attention, mlp),
        )
        for n in range(c.num_hidden_layers, c.num_hidden_layers + c.num_nextn_predict_layers)
    ]
    return MultiTokenPrediction(
        env, RMSNorm(env, "model.norm", c.hidden_size, c.rms_norm_eps), embed, head, depths, c.mtp_loss_weight
    )


def rules(config: DeepseekV3Config, seq_length: int) -> list[Problem]:
    experts = expert_rules(config, "n_routed_experts")
    return common_rules(config) + experts + check_groups(config, experts) + check_latent(config)


def check_latent(config: DeepseekV3Config) -> list[Problem]:
    found = at_least("model", config, 1, "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
    dim = config.qk_rope_head_dim
    if dim < 2 or dim % 2:
        rule = "must be even and >= 2 (rotary embedding turns pairs)"
        found.append(problem("model", config, "qk_rope_head_dim", rule, {}, multiples(dim, 2) if dim > 2 else (2,)))
    found += at_least("model", config, 0, "num_nextn_predict_layers") + within(
        "model", config, "mtp_loss_weight", "[0, inf)", (0.3,)
    )
    if config.num_nextn_predict_layers == 0:
        found += no_effect(
            "model",
            config,
            ["mtp_loss_weight"],
            "model.num_nextn_predict_layers",
            {"model.num_nextn_predict_layers": 0},
        )
    return found + no_effect(
        "model",
        config,
        ["num_key_value_heads", "head_dim"],
        "heads of their own (deepseek_v3 makes them from latents)",
        {},
    )


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


def check_groups(config: DeepseekV3Config, before: list[Problem]) -> list[Problem]:
    """Groups are equal, and the groups that a token chooses have at least as many experts as it goes to."""
    c = config
    if not c.routed_experts:
        because = {
            "model.first_k_dense_replace": c.first_k_dense_replace,
            "model.num_hidden_layers": c.num_hidden_layers,
        }
        return no_effect("model", c, OF_EXPERTS, "layers with experts", because)
    found = at_least("model", c, 1, "n_group", "topk_group", "moe_intermediate_size")
    found += at_least("model", c, 0, "first_k_dense_replace", "n_shared_experts")
    found += within("model", c, "routed_scaling_factor", "(0, inf)", (2.5,)) + within(
        "model", c, "router_bias_update_rate", "[0, inf)", (0.001,)
    )
    if found or before:
        return found
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


def split_rules(config: DeepseekV3Config, tp: int) -> list[Problem]:
    """The shared experts are one MLP, sharded like any other."""
    if not config.routed_experts or not 0 < config.n_shared_experts * config.moe_intermediate_size < tp:
        return []
    because = {
        "model.n_shared_experts": config.n_shared_experts,
        "model.moe_intermediate_size": config.moe_intermediate_size,
    }
    valid = divisors(tp, config.num_attention_heads)
    return [Problem("layout.tp", tp, "must be <= the width of the shared experts", because, valid)]


KEYS = {
    **DECODER_KEYS,
    "num_key_value_heads": integer_or_null(128),
    "max_position_embeddings": integer(4096),
    "attention_bias": switch(False),
    "attention_dropout": number_or_null(0.0),
    "moe_intermediate_size": integer(2048),
    "n_shared_experts": integer(1),
    "n_routed_experts": integer(256),
    "routed_scaling_factor": number(2.5),
    "kv_lora_rank": integer(512),
    "q_lora_rank": integer_or_null(1536),
    "qk_rope_head_dim": integer(64),
    "v_head_dim": integer(128),
    "qk_nope_head_dim": integer(128),
    "n_group": integer(8),
    "topk_group": integer(4),
    "num_experts_per_tok": integer(8),
    "first_k_dense_replace": integer(3),
    "norm_topk_prob": HfKey((bool, NONE), True),
    "rope_interleave": HfKey((bool, NONE), True),
    "num_mtp_layers": integer(0),
    "aux_loss_alpha": number(0.0),
    "seq_aux": switch(True),
}
# keys that DeepSeek's own code reads and transformers does not
LATENT_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}
LATENT_FIELDS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_interleave",
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


def from_hf(found: ConfigJson) -> DeepseekV3Config | None:
    config, v, odd = found.stated, found.values, found.odd
    heads, rotated = v["num_attention_heads"], v["qk_rope_head_dim"]
    kv_heads = heads if v["num_key_value_heads"] is None else v["num_key_value_heads"]
    if kv_heads < 1 or heads // kv_heads != 1:
        odd.append(f"num_key_value_heads={kv_heads!r} (supported: {heads}, as many as query heads)")
    if config.get("head_dim", rotated) != rotated:
        odd.append(f"head_dim={config['head_dim']!r} (supported: {rotated}, as qk_rope_head_dim, or none)")
    same = sizes_from_hf(found, rope_of(found, 10000.0, rotated, scores=True))
    odd += other_values(config, LATENT_ONLY)
    own = found.pick(*LATENT_FIELDS) | {k: bool(v[k]) for k in ("norm_topk_prob", "rope_interleave")}
    own["num_nextn_predict_layers"] = v["num_mtp_layers"]
    if "aux_loss_alpha" in config:
        scope = "sequence" if v["seq_aux"] else "micro_batch"
        own |= {"router_aux_loss_coef": v["aux_loss_alpha"], "router_aux_loss_scope": scope}
    return None if odd else dense_if_all_are(DeepseekV3Config(**same, **own))


def dense_if_all_are(config: DeepseekV3Config) -> DeepseekV3Config:
    """If all layers are dense, the config without its fields about experts, which nothing reads."""
    if config.routed_experts:
        return config
    return replace(config, **{name: default_of(DeepseekV3Config, name) for name in OF_EXPERTS})


def without_predictors(config: DeepseekV3Config) -> DeepseekV3Config:
    return dense_if_all_are(replace(config, num_nextn_predict_layers=0))


def to_hf(config: DeepseekV3Config) -> dict[str, Any]:
    return {
        **decoder_to_hf(config),
        **{name: getattr(config, name) for name in LATENT_FIELDS},
        "aux_loss_alpha": config.router_aux_loss_coef,
        "seq_aux": config.router_aux_loss_scope == "sequence",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "attention_bias": False,
        "num_nextn_predict_layers": config.num_nextn_predict_layers,
    }


def fill(model: dict[str, Any]) -> dict[str, Any]:
    """All fields are already explicit."""
    return model


def shrink(config: DeepseekV3Config, small: SmallSizes) -> DeepseekV3Config:
    """Latents and all three kinds of head features stay; so do layers with and without a dense MLP."""
    whole = config.first_k_dense_replace >= config.num_hidden_layers
    scaling = small_scaling(config.rope_scaling, small.seq_length, small.given_length)
    return replace(
        config,
        vocab_size=small.vocab_size,
        hidden_size=small.hidden_size,
        intermediate_size=small.intermediate_size,
        num_attention_heads=small.heads,
        num_hidden_layers=small.layers,
        first_k_dense_replace=small.layers if whole else min(config.first_k_dense_replace, small.layers - 1),
        q_lora_rank=6 if config.q_lora_rank else None,
        kv_lora_rank=5,
        qk_nope_head_dim=3,
        qk_rope_head_dim=4,
        v_head_dim=5,
        rope_scaling=with_factors(scaling, 2),
        **small_positions(config, small),
    )


def shrink_experts(config: DeepseekV3Config, small: SmallExperts) -> DeepseekV3Config:
    """The number of groups stays."""
    sizes: dict[str, Any] = {"n_routed_experts": small.count, "moe_intermediate_size": small.width}
    if config.n_group == 1:
        return replace(config, num_experts_per_tok=small.chosen, **sizes)
    groups = 2 if small.count % 2 == 0 else small.count
    top = 1 if config.topk_group < config.n_group else groups
    chosen = max(1, min(small.chosen, small.count // groups * top))
    return replace(config, n_group=groups, topk_group=top, num_experts_per_tok=chosen, **sizes)


FAMILY = Family(
    "deepseek_v3",
    DeepseekV3Config,
    blocks,
    architecture="DeepseekV3ForCausalLM",
    tensors=replace(
        decoder_tensors,
        copies=r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight",
        predictors=r"model\.layers\.(\d+)\.(enorm|hnorm|eh_proj|shared_head\.norm)\.weight",
    ),
    rules=rules,
    split_rules=split_rules,
    keys=KEYS,
    other_names={"n_routed_experts": "num_local_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    from_hf=from_hf,
    to_hf=to_hf,
    fill=fill,
    without_predictors=without_predictors,
    shrink=shrink,
    shrink_experts=shrink_experts,
)

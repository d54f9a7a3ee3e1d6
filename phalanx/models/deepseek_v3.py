"""DeepSeek-V3: Llama's blocks with latent attention, and experts chosen by sigmoid scores and a bias within groups,
beside shared ones.

DeepSeek-AI, "DeepSeek-V3 technical report", 2024. The first `first_k_dense_replace` layers have a dense MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phalanx.models import llama
from phalanx.models.deepseek_config import DeepseekV3Config
from phalanx.models.mixtral import balance_of
from phalanx.nn.embedding import Embedding
from phalanx.nn.env import Env
from phalanx.nn.mla import LatentAttention, LatentSizes
from phalanx.nn.mlp import SwiGLU
from phalanx.nn.module import Block
from phalanx.nn.moe import ExpertNames, MoE
from phalanx.nn.mtp import Depth, MultiTokenPrediction
from phalanx.nn.norm import RMSNorm
from phalanx.nn.parameter import Parameter
from phalanx.ops.attention.attention import Kind
from phalanx.ops.dense.rope_scaling import Rotation, yarn_mscale
from phalanx.ops.experts.router import Router


def attention(config: DeepseekV3Config, env: Env, layer: int) -> LatentAttention:
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
        Kind(scale=score_scale(c)),
        c.rope_interleave,
    )


def score_scale(config: DeepseekV3Config) -> float:
    """1 / sqrt(width of a query), times the square of YaRN's factor where `mscale_all_dim` puts it there rather than
    into cos and sin."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    scaling = config.rope_scaling
    if scaling is None or not scaling.mscale_all_dim or scaling.factor is None:
        return scale
    return scale * yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2


def mlp(config: DeepseekV3Config, env: Env, layer: int) -> MoE | SwiGLU:
    """What a layer has for an MLP."""
    c, at = config, f"model.layers.{layer}.mlp"
    if not c.has_experts(layer):
        return llama.mlp(c, env, layer)
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
    """Technical report, equations 12 to 16: sigmoid scores, chosen with the bias in the best groups and weighed
    without it."""
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


def make_mtp(config: DeepseekV3Config, env: Env, embedding: Parameter | None) -> MultiTokenPrediction:
    """The modules that predict tokens further ahead, numbered as layers after the last one."""
    c = config
    embed = Embedding(
        env,
        "model.embed_tokens.weight",
        c.vocab_size,
        c.hidden_size,
        c.initializer_range,
        llama.embedding_replicas(c, env),
        embedding,
    )
    head = llama.make_head(c, env, embed.weight if c.tie_word_embeddings else None)
    depths = [
        Depth(
            env,
            f"model.layers.{n}",
            c.hidden_size,
            c.rms_norm_eps,
            c.initializer_range,
            llama.LlamaLayer(c, env, n, attention, mlp),
        )
        for n in range(c.num_hidden_layers, c.num_hidden_layers + c.num_nextn_predict_layers)
    ]
    return MultiTokenPrediction(
        env, RMSNorm(env, "model.norm", c.hidden_size, c.rms_norm_eps), embed, head, depths, c.mtp_loss_weight
    )


def make_blocks(config: DeepseekV3Config, env: Env, which: Sequence[int]) -> list[Block]:
    """Blocks number `which`: embedding, layers, what predicts tokens further ahead (if anything), head."""
    mtp = make_mtp if config.num_nextn_predict_layers else None
    return llama.make_blocks(config, env, which, make_attention=attention, make_mlp=mlp, make_mtp=mtp)

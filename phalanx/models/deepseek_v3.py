"""DeepSeek-V3: Llama's blocks with latent attention. DeepSeek-AI, "DeepSeek-V3 technical report", 2024.

The first `first_k_dense_replace` layers have a dense MLP. Layers with experts come in through `mlp`.
"""

from __future__ import annotations

from phalanx.models import llama
from phalanx.models.deepseek_config import DeepseekV3Config
from phalanx.nn.env import Env
from phalanx.nn.mla import LatentAttention, LatentSizes
from phalanx.nn.module import Block, Module
from phalanx.ops.attention import Kind
from phalanx.ops.rope_scaling import Rotation, yarn_mscale


def attention(config: DeepseekV3Config, env: Env, layer: int) -> LatentAttention:
    c = config
    sizes = LatentSizes(c.q_lora_rank, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim)
    rotation = Rotation(c.qk_rope_head_dim, c.rope_theta, c.rope_scaling, c.max_position_embeddings)
    return LatentAttention(
        env, f"model.layers.{layer}.self_attn", c.hidden_size, c.num_attention_heads, sizes, c.initializer_range, rotation,
        Kind(scale=score_scale(c)), c.rope_interleave,
    )  # fmt: skip


def score_scale(config: DeepseekV3Config) -> float:
    """1 / sqrt(width of a query), times the square of YaRN's factor where `mscale_all_dim` puts it there rather than into cos and sin."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    scaling = config.rope_scaling
    if scaling is None or not scaling.mscale_all_dim or scaling.factor is None:
        return scale
    return scale * yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2


def mlp(config: DeepseekV3Config, env: Env, layer: int) -> Module:
    """What a layer has for an MLP. The rules let no config come here in which `layer` has experts."""
    return llama.mlp(config, env, layer)


def make_blocks(config: DeepseekV3Config, env: Env, which: range) -> list[Block]:
    """Blocks number `which` of layers + 2: embedding, layers, head."""
    return llama.make_blocks(config, env, which, make_attention=attention, make_mlp=mlp)

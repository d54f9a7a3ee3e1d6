"""Qwen3, dense: Llama's blocks with an RMSNorm on every query and key head. Yang et al., "Qwen3 technical report",
2025."""

from __future__ import annotations

from phalanx.models import llama
from phalanx.models.config import LlamaConfig, Qwen3Config
from phalanx.nn.attention import Attention
from phalanx.nn.env import Env
from phalanx.nn.module import Block


def attention(config: LlamaConfig, env: Env, layer: int) -> Attention:
    at = f"model.layers.{layer}.self_attn"
    return llama.attention(config, env, layer, head_norm=(f"{at}.q_norm", f"{at}.k_norm", config.rms_norm_eps))


def make_blocks(config: Qwen3Config, env: Env, which: range) -> list[Block]:
    """Blocks number `which` of layers + 2: embedding, layers, head."""
    return llama.make_blocks(config, env, which, make_attention=attention)

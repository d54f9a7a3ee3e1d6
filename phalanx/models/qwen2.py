"""Qwen2 and Qwen2.5: Llama's blocks with biases of q, k and v; upper layers may read in a window. Yang et al.,
"Qwen2 technical report", 2024."""

from __future__ import annotations

from phalanx.models import llama
from phalanx.models.config import Qwen2Config
from phalanx.nn.attention import Attention
from phalanx.nn.env import Env
from phalanx.nn.module import Block


def attention(config: Qwen2Config, env: Env, layer: int) -> Attention:
    return llama.attention(config, env, layer, bias="qkv")


def make_blocks(config: Qwen2Config, env: Env, which: range) -> list[Block]:
    """Blocks number `which` of layers + 2: embedding, layers, head."""
    return llama.make_blocks(config, env, which, make_attention=attention)

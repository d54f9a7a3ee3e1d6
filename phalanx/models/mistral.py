"""Mistral: Llama's blocks whose attention reads in a sliding window, in all layers or in some. Jiang et al.,
"Mistral 7B", 2023."""

from __future__ import annotations

from phalanx.models import llama
from phalanx.models.config import MistralConfig
from phalanx.nn.env import Env
from phalanx.nn.module import Block


def make_blocks(config: MistralConfig, env: Env, which: range) -> list[Block]:
    """Blocks number `which` of layers + 2: embedding, layers, head."""
    return llama.make_blocks(config, env, which)

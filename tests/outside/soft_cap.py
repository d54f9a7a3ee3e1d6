"""Llama whose attention caps its scores, and reads inside chunks in every other layer: a family of another package that
asks for a kind of attention by its fields."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phalanx.models.decoder import attention, decoder_blocks, dense_mlp
from phalanx.models.family import BlockMaker, Family
from phalanx.nn.env import Env
from phalanx.nn.module import Block
from phalanx.nn.norm import RMSNorm
from phalanx.ops.attention.kind import AttentionKind
from phalanx.sequence.batch import Batch
from tests.outside.plain import PlainConfig


class CappedLayer(Block):
    def __init__(self, config: PlainConfig, env: Env, layer: int):
        super().__init__(env)
        at, width, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        kind = AttentionKind(soft_cap=config.final_logit_softcapping, chunk=5 if layer % 2 else None)
        self.attention_norm = RMSNorm(env, f"{at}.input_layernorm", width, eps)
        self.attention = attention(config, env, layer, kind=kind)
        self.mlp_norm = RMSNorm(env, f"{at}.post_attention_layernorm", width, eps)
        self.mlp = dense_mlp(config, env, layer)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = x + self.attention(self.attention_norm(x), batch)
        return x + self.mlp(self.mlp_norm(x))


def blocks(config: PlainConfig, env: Env) -> Sequence[BlockMaker]:
    return decoder_blocks(config, env, CappedLayer)


FAMILY = Family("soft_cap", PlainConfig, blocks, architecture="SoftCapForCausalLM")

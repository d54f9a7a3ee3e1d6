"""Plain: Llama with squared ReLU, post-norms and soft-capped logits. A family of a package that is not Phalanx: this
file and nothing else.

    model: {family: "tests.outside.plain:FAMILY", hidden_size: 512, ...}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.models.decoder import attention, decoder_blocks, make_head
from phalanx.models.decoder_config import DecoderConfig
from phalanx.models.family import BlockMaker, Family
from phalanx.nn import Block, ColumnLinear, Env, Head, Module, OutputRows, RMSNorm, RowLinear
from phalanx.nn.initial import Normal
from phalanx.sequence.batch import Batch


@dataclass(frozen=True, kw_only=True)
class PlainConfig(DecoderConfig):
    """Hugging Face's names; DecoderConfig brings vocabulary, widths, heads, rotary embedding and tying."""

    final_logit_softcapping: float | None = None
    """Logits become cap * tanh(logits / cap); unset: they stay as they are."""

    @property
    def gated_mlp(self) -> bool:
        return False


class SquaredReLU(Module):
    """down(relu(up(x)) ** 2); the inner features are cut over tp."""

    def __init__(self, config: PlainConfig, env: Env, layer: int):
        super().__init__(env)
        at, inner, width = f"model.layers.{layer}.mlp", config.intermediate_size, config.hidden_size
        first, stop = env.cut(inner)
        init = Normal(config.initializer_range)
        self.up = ColumnLinear(env, [OutputRows(f"{at}.up_proj.weight", inner, first, stop)], width, init)
        self.down = RowLinear(env, f"{at}.down_proj.weight", width, inner, (first, stop), init)
        self.num_weights = 2 * width * inner

    def forward(self, x: Tensor) -> Tensor:
        """x (T / tp, D) -> (T / tp, D)."""
        up = self.env.recompute.op("up", self.up, x)
        hidden = self.env.recompute.op("activation", lambda x: torch.relu(x).square(), up)
        return self.down(hidden)

    def flops(self, seq_length: int) -> float:
        return 2.0 * self.num_weights


class PlainLayer(Block):
    def __init__(self, config: PlainConfig, env: Env, layer: int):
        super().__init__(env)
        at, width, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        self.attention = attention(config, env, layer)
        self.attention_norm = RMSNorm(env, f"{at}.post_attention_layernorm", width, eps)
        self.mlp = SquaredReLU(config, env, layer)
        self.mlp_norm = RMSNorm(env, f"{at}.post_feedforward_layernorm", width, eps)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = x + self.attention_norm(self.attention(x, batch))
        return x + self.mlp_norm(self.mlp(x))


class CappedHead(Head):
    """The head with cap * tanh(logits / cap) for logits."""

    def __init__(self, *arguments: Any, cap: float | None):
        super().__init__(*arguments)
        self.cap = cap

    def transform(self, logits: Tensor) -> Tensor:
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def blocks(config: PlainConfig, env: Env) -> Sequence[BlockMaker]:
    def head(config: PlainConfig, env: Env, made: Mapping[str, nn.Parameter]) -> Head:
        return make_head(config, env, made, partial(CappedHead, cap=config.final_logit_softcapping))

    return decoder_blocks(config, env, PlainLayer, head=head)


FAMILY = Family("plain", PlainConfig, blocks, architecture="PlainForCausalLM")

"""Llama whose layers attend in different ways: a family of another package that asks for kinds of attention by their
fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from phalanx.models.decoder import DecoderEmbedding, DecoderHead, attention_spec, dense_mlp, make_head
from phalanx.models.family import BlockMaker, Family
from phalanx.nn.attention import Attention
from phalanx.nn.env import Env
from phalanx.nn.module import Block
from phalanx.nn.norm import RMSNorm
from phalanx.nn.objective import TokenObjective, cross_entropy
from phalanx.nn.parameter import Parameter
from phalanx.nn.query_temperature import QueryTemperature
from phalanx.nn.relative_bias import BiasSpec, RelativeBiasTable
from phalanx.ops.attention.kind import AttentionKind, RelativeBias
from phalanx.sequence.batch import Batch
from tests.outside.plain import PlainConfig

TABLE = BiasSpec("model.relative_bias.weight", 4, RelativeBias(8, 12, True), 0.5)
LAYERS = (
    AttentionKind("prefix", soft_cap=0.5),
    AttentionKind(chunk=5, soft_cap=0.5),
    AttentionKind("both", window=6, bias=TABLE.bias),
    AttentionKind("both", scale=1.0, bias=TABLE.bias),
)
"""By the number of the layer."""
TEMPERATURES = {1: QueryTemperature(3, 0.4)}


class KindsLayer(Block):
    def __init__(self, config: PlainConfig, env: Env, layer: int, made: Mapping[str, Parameter]):
        super().__init__(env)
        at, width, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        spec = replace(attention_spec(config, layer), kind=LAYERS[layer], temperature=TEMPERATURES.get(layer))
        table = None if spec.kind.bias is None else RelativeBiasTable(env, TABLE, (), made)
        self.attention_norm = RMSNorm(env, f"{at}.input_layernorm", width, eps)
        self.attention = Attention(env, spec, table)
        self.mlp_norm = RMSNorm(env, f"{at}.post_attention_layernorm", width, eps)
        self.mlp = dense_mlp(config, env, layer)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = x + self.attention(self.attention_norm(x), batch)
        return x + self.mlp(self.mlp_norm(x))


def blocks(config: PlainConfig, env: Env) -> Sequence[BlockMaker]:
    def layer(number: int) -> BlockMaker:
        return lambda made: KindsLayer(config, env, number, made)

    head: BlockMaker = lambda made: DecoderHead(config, env, make_head(config, env, made))  # noqa: E731
    return [lambda made: DecoderEmbedding(config, env), *map(layer, range(len(LAYERS))), head]


class Prefixed(TokenObjective):
    """The next token, of batches with prefixes."""

    makes_prefix = True
    token_loss = staticmethod(cross_entropy)


FAMILY = Family("kinds", PlainConfig, blocks, architecture="KindsForCausalLM")

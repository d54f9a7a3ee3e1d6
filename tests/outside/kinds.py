"""Llama whose layers attend in different ways: a family of another package that asks for kinds of attention by their
fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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

BIAS = RelativeBias(8, 12, True)
KINDS = {
    "prefix": AttentionKind("prefix", soft_cap=0.5),
    "chunk": AttentionKind(chunk=5, soft_cap=0.5),
    "window": AttentionKind("both", window=6, bias=BIAS),
    "both": AttentionKind("both", scale=1.0, bias=BIAS),
}
TEMPERATURES = {"chunk": QueryTemperature(3, 0.4)}


@dataclass(frozen=True, kw_only=True)
class KindsConfig(PlainConfig):
    attends: str = "chunk window"
    """The kinds of its layers, in turn."""


class KindsLayer(Block):
    def __init__(self, config: KindsConfig, env: Env, layer: int, made: Mapping[str, Parameter]):
        super().__init__(env)
        at, width, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        kinds = config.attends.split()
        name = kinds[layer % len(kinds)]
        spec = replace(attention_spec(config, layer), kind=KINDS[name], temperature=TEMPERATURES.get(name))
        table = None if spec.kind.bias is None else table_of(config, env, made)
        self.attention_norm = RMSNorm(env, f"{at}.input_layernorm", width, eps)
        self.attention = Attention(env, spec, table)
        self.mlp_norm = RMSNorm(env, f"{at}.post_attention_layernorm", width, eps)
        self.mlp = dense_mlp(config, env, layer)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = x + self.attention(self.attention_norm(x), batch)
        return x + self.mlp(self.mlp_norm(x))


def table_of(config: KindsConfig, env: Env, made: Mapping[str, Parameter]) -> RelativeBiasTable:
    """All layers with a bias share one."""
    kinds, layers = config.attends.split(), range(config.num_hidden_layers)
    blocks = [1 + layer for layer in layers if KINDS[kinds[layer % len(kinds)]].bias is not None]
    spec = BiasSpec("model.relative_bias.weight", config.num_attention_heads, BIAS, 0.5)
    return RelativeBiasTable(env, spec, env.shared_by(blocks), made)


def blocks(config: KindsConfig, env: Env) -> Sequence[BlockMaker]:
    def layer(number: int) -> BlockMaker:
        return lambda made: KindsLayer(config, env, number, made)

    head: BlockMaker = lambda made: DecoderHead(config, env, make_head(config, env, made))  # noqa: E731
    return [lambda made: DecoderEmbedding(config, env), *map(layer, range(config.num_hidden_layers)), head]


class Prefixed(TokenObjective):
    """The next token, of batches with prefixes."""

    makes_prefix = True
    token_loss = staticmethod(cross_entropy)


FAMILY = Family("kinds", KindsConfig, blocks, architecture="KindsForCausalLM")

"""Blocks of decoders whose layers have one sub-layer each behind a norm: a scan, attention or an MLP.

`config` has the fields of ModelConfig, and layer_norm_epsilon.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from phalanx.layout.param import Role
from phalanx.models.family import BlockMaker
from phalanx.models.model_config import TensorNames
from phalanx.nn.embedding import Embedding
from phalanx.nn.env import Env
from phalanx.nn.head import Head, HeadBlock
from phalanx.nn.module import Block, Module
from phalanx.nn.norm import RMSNorm
from phalanx.nn.parameter import Parameter
from phalanx.sequence.batch import Batch

MakeMixer = Callable[[Any, Env, int], Module]  # (config, env, layer) -> a module called with (x, batch)


class NamedEmbedding(Block):
    """The input embedding, under the family's name."""

    def __init__(self, config: Any, env: Env, names: TensorNames):
        super().__init__(env)
        c, replicas = config, env.tied() if config.tie_word_embeddings else ()
        self.embed = Embedding(env, names.embedding, c.vocab_size, c.hidden_size, c.initializer_range, replicas)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.embed(batch.tokens)


class MixerLayer(Block):
    """x + mixer(norm(x))."""

    def __init__(self, config: Any, env: Env, layer: int, names: TensorNames, make_mixer: MakeMixer):
        super().__init__(env)
        at = names.layer.format(layer)
        self.norm = RMSNorm(env, f"{at}.norm", config.hidden_size, config.layer_norm_epsilon)
        self.mixer = make_mixer(config, env, layer)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x, normed = self.norm.add(x, reader=self.mixer)
        return x + self.mixer(normed, batch)


class NamedHead(HeadBlock):
    """The last norm and the head, under the family's names."""

    def __init__(self, config: Any, env: Env, names: TensorNames, last_norm: str, made: Mapping[str, Parameter]):
        super().__init__(env)
        c, tied = config, config.tie_word_embeddings
        name, replicas = (names.embedding, env.tied()) if tied else (names.head, ())
        role: Role = "embedding" if tied else "head"
        self.norm = RMSNorm(env, last_norm, c.hidden_size, c.layer_norm_epsilon)
        self.head = Head(env, name, c.vocab_size, c.hidden_size, c.initializer_range, replicas, made.get(name), role)


def mixer_blocks(
    config: Any, env: Env, names: TensorNames, last_norm: str, make_mixer: MakeMixer
) -> Sequence[BlockMaker]:
    """Embedding, layers, head."""

    def layer(number: int, made: Mapping[str, Parameter]) -> Block:
        return MixerLayer(config, env, number, names, make_mixer)

    return [
        lambda made: NamedEmbedding(config, env, names),
        *(partial(layer, number) for number in range(config.num_hidden_layers)),
        lambda made: NamedHead(config, env, names, last_norm, made),
    ]

"""Blocks of decoders with LayerNorm, GELU, biases and dropout: GPT-2's, with learned positions, and GPT-NeoX's, with
rotary ones and sub-layers side by side. `config` has the fields of the one or the other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from phalanx.layout.box import Box
from phalanx.layout.param import ParamSpec, Piece, Role
from phalanx.models.decoder import rotation
from phalanx.models.family import BlockMaker
from phalanx.models.model_config import TensorNames
from phalanx.nn.attention import Attention, AttentionSpec
from phalanx.nn.embedding import Embedding
from phalanx.nn.env import Env
from phalanx.nn.head import Head, HeadBlock
from phalanx.nn.initial import Normal
from phalanx.nn.mlp import GeluMLP
from phalanx.nn.module import Block
from phalanx.nn.norm import LayerNorm
from phalanx.nn.parameter import Parameter
from phalanx.ops.dense.dropout import dropout_mask
from phalanx.ops.dense.embedding import learned_positions
from phalanx.ops.dense.rows import ROWS
from phalanx.sequence.batch import Batch


class Dropping(Block):
    """A block with dropout at a few sites, keyed by the global position of each of this rank's tokens."""

    def drop(self, x: Tensor, batch: Batch, p: float, layer: int, site: int) -> Tensor:
        if p == 0.0 or not self.training:
            return x
        a, b = self.env.cut(batch.num_tokens)
        rows = (batch.samples[a:b], batch.places[a:b])
        return x * self.env.recompute.op(
            "dropout", lambda: dropout_mask(p, self.env.seed, layer, site, rows, x.shape[-1], x.dtype)
        )


class LearnedEmbedding(Dropping):
    def __init__(self, config: Any, env: Env):
        super().__init__(env)
        c, n = config, config.max_position_embeddings
        replicas = env.tied() if c.tie_word_embeddings else ()
        self.p = c.dropout
        self.embed = Embedding(
            env, "transformer.wte.weight", c.vocab_size, c.hidden_size, c.initializer_range, replicas
        )
        whole = Piece(
            "transformer.wpe.weight",
            (n, c.hidden_size),
            Box.full((n, c.hidden_size)),
            (slice(0, n), slice(0, c.hidden_size)),
            Normal(c.initializer_range),
            replicas=env.everyone,
        )
        self.positions = self.param(ParamSpec(whole.shape, (whole,), role="embedding"))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        a, b = self.env.cut(batch.num_tokens)
        positions = learned_positions(batch.positions[a:b], self.positions, self.env.ops.by_config(ROWS))
        x = self.embed(batch.tokens) + positions
        return self.drop(x, batch, self.p, 0, 1)


class LayerNormLayer(Dropping):
    def __init__(self, config: Any, env: Env, layer: int):
        super().__init__(env)
        c, at = config, f"transformer.h.{layer}"
        self.p, self.layer = c.dropout, layer
        std, std_out = c.initializer_range, c.initializer_range / math.sqrt(2 * c.num_hidden_layers)
        fused = f"{at}.attn.c_attn.weight"
        heads = c.num_attention_heads
        self.norm1 = LayerNorm(env, f"{at}.ln_1", c.hidden_size, c.layer_norm_epsilon)
        spec = AttentionSpec(
            names=(fused, fused, fused, f"{at}.attn.c_proj.weight"),
            width=c.hidden_size,
            heads=heads,
            kv_heads=heads,
            head_dim=c.hidden_size // heads,
            std=std,
            std_out=std_out,
            bias="all",
            transposed=True,
            dropout=c.attention_dropout,
            layer=layer,
        )
        self.attention = Attention(env, spec)
        self.norm2 = LayerNorm(env, f"{at}.ln_2", c.hidden_size, c.layer_norm_epsilon)
        inner = c.intermediate_size or 4 * c.hidden_size
        self.mlp = GeluMLP(
            env, (f"{at}.mlp.c_fc", f"{at}.mlp.c_proj"), c.hidden_size, inner, std, std_out, c.activation_function
        )

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x, normed = self.norm1.add(x)
        delta = self.attention(normed, batch)
        x, normed = self.norm2.add(x, self.drop(delta, batch, self.p, self.layer, 2))
        return x + self.drop(self.mlp(normed), batch, self.p, self.layer, 3)


class LayerNormHead(HeadBlock):
    """`names`: of the input embedding, which is the head of a tied model, and of the head of an untied one."""

    def __init__(self, config: Any, env: Env, made: Mapping[str, Parameter], norm: LayerNorm, names: TensorNames):
        super().__init__(env)
        c = config
        self.norm = norm
        tied = c.tie_word_embeddings
        name, replicas = (names.embedding, env.tied()) if tied else (names.head, ())
        role: Role = "embedding" if tied else "head"
        self.head = Head(env, name, c.vocab_size, c.hidden_size, c.initializer_range, replicas, made.get(name), role)


def layer_norm_blocks(config: Any, env: Env, names: TensorNames) -> Sequence[BlockMaker]:
    """GPT-2's embedding, layers, head."""

    def layer(number: int, made: Mapping[str, Parameter]) -> Block:
        return LayerNormLayer(config, env, number)

    def head(made: Mapping[str, Parameter]) -> Block:
        norm = LayerNorm(env, "transformer.ln_f", config.hidden_size, config.layer_norm_epsilon)
        return LayerNormHead(config, env, made, norm, names)

    return [
        lambda made: LearnedEmbedding(config, env),
        *(partial(layer, i) for i in range(config.num_hidden_layers)),
        head,
    ]


class DroppedEmbedding(Dropping):
    """The input embedding, with dropout and without positions."""

    def __init__(self, config: Any, env: Env, name: str):
        super().__init__(env)
        c = config
        replicas = env.tied() if c.tie_word_embeddings else ()
        self.p = c.dropout
        self.embed = Embedding(env, name, c.vocab_size, c.hidden_size, c.initializer_range, replicas)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.drop(self.embed(batch.tokens), batch, self.p, 0, 1)


class ParallelLayer(Dropping):
    """Attention and MLP side by side, each of the layer's input through a LayerNorm of its own; or one after the
    other, without `use_parallel_residual`."""

    def __init__(self, config: Any, env: Env, layer: int):
        super().__init__(env)
        c, at = config, f"gpt_neox.layers.{layer}"
        self.p, self.layer, self.parallel = c.dropout, layer, c.use_parallel_residual
        std, fused = c.initializer_range, f"{at}.attention.query_key_value.weight"
        self.norm1 = LayerNorm(env, f"{at}.input_layernorm", c.hidden_size, c.layer_norm_eps)
        spec = AttentionSpec(
            names=(fused, fused, fused, f"{at}.attention.dense.weight"),
            fused_by="head",
            width=c.hidden_size,
            heads=c.num_attention_heads,
            kv_heads=c.num_attention_heads,
            head_dim=c.hidden_size // c.num_attention_heads,
            std=std,
            rotation=rotation(c, layer),
            bias="all" if c.attention_bias else "none",
            dropout=c.attention_dropout,
            layer=layer,
        )
        self.attention = Attention(env, spec)
        self.norm2 = LayerNorm(env, f"{at}.post_attention_layernorm", c.hidden_size, c.layer_norm_eps)
        names = (f"{at}.mlp.dense_h_to_4h", f"{at}.mlp.dense_4h_to_h")
        self.mlp = GeluMLP(
            env, names, c.hidden_size, c.intermediate_size, std, std, c.activation_function, transposed=False
        )

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x, normed = self.norm1.add(x)
        delta = self.drop(self.attention(normed, batch), batch, self.p, self.layer, 2)
        if self.parallel:
            _, normed = self.norm2.add(x)
            x = x + delta
        else:
            x, normed = self.norm2.add(x, delta)
        return x + self.drop(self.mlp(normed), batch, self.p, self.layer, 3)


def parallel_blocks(config: Any, env: Env, names: TensorNames) -> Sequence[BlockMaker]:
    """GPT-NeoX's embedding, layers, head."""

    def layer(number: int, made: Mapping[str, Parameter]) -> Block:
        return ParallelLayer(config, env, number)

    def head(made: Mapping[str, Parameter]) -> Block:
        norm = LayerNorm(env, "gpt_neox.final_layer_norm", config.hidden_size, config.layer_norm_eps)
        return LayerNormHead(config, env, made, norm, names)

    return [
        lambda made: DroppedEmbedding(config, env, names.embedding),
        *(partial(layer, i) for i in range(config.num_hidden_layers)),
        head,
    ]

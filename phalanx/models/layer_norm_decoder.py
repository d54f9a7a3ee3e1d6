"""Blocks of GPT-2-like decoders: LayerNorm, learned positions, GELU, biases and dropout. `config` has GPT-2's
fields."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from phalanx.layout.box import Box
from phalanx.layout.param import Init, ParamSpec, Piece, Role
from phalanx.models.family import BlockMaker
from phalanx.nn.attention import Attention, AttentionSpec
from phalanx.nn.embedding import Embedding
from phalanx.nn.env import Env
from phalanx.nn.head import Head
from phalanx.nn.mlp import GeluMLP
from phalanx.nn.module import Block
from phalanx.nn.norm import LayerNorm
from phalanx.nn.parameter import Parameter
from phalanx.ops.dense.dropout import dropout_mask
from phalanx.ops.dense.embedding import learned_positions
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
            Init("normal", c.initializer_range),
            replicas=env.everyone,
        )
        self.positions = self.param(ParamSpec(whole.shape, (whole,), role="embedding"))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        a, b = self.env.cut(batch.num_tokens)
        x = self.embed(batch.tokens) + learned_positions(batch.positions[a:b], self.positions)
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


class LayerNormHead(Block):
    recomputable = False

    def __init__(self, config: Any, env: Env, made: Mapping[str, Parameter]):
        super().__init__(env)
        c = config
        self.norm = LayerNorm(env, "transformer.ln_f", c.hidden_size, c.layer_norm_epsilon)
        tied = c.tie_word_embeddings
        name, replicas = ("transformer.wte.weight", env.tied()) if tied else ("lm_head.weight", ())
        role: Role = "embedding" if tied else "head"
        self.head = Head(env, name, c.vocab_size, c.hidden_size, c.initializer_range, replicas, made.get(name), role)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.head.loss(self.norm(x), batch)

    def logits(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.head.logits(self.norm(x), rows)

    def log_probs(self, x: Tensor, batch: Batch, top: int = 0) -> Tensor:
        return self.head.log_probs(self.norm(x), batch, top)


def layer_norm_blocks(config: Any, env: Env) -> Sequence[BlockMaker]:
    """Embedding, layers, head."""

    def layer(number: int, made: Mapping[str, Parameter]) -> Block:
        return LayerNormLayer(config, env, number)

    return [
        lambda made: LearnedEmbedding(config, env),
        *(partial(layer, i) for i in range(config.num_hidden_layers)),
        lambda made: LayerNormHead(config, env, made),
    ]

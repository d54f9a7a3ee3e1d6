"""Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Touvron et al. 2023; Llama 3, Grattafiori et
al. 2024."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from phalanx.layout.param import Replica
from phalanx.models.config import LlamaConfig
from phalanx.nn.attention import Attention
from phalanx.nn.embedding import Embedding
from phalanx.nn.env import Env
from phalanx.nn.head import Head
from phalanx.nn.mlp import SwiGLU
from phalanx.nn.module import Block, Module
from phalanx.nn.mtp import MultiTokenPrediction
from phalanx.nn.norm import RMSNorm
from phalanx.nn.parameter import Parameter
from phalanx.ops.attention.attention import Kind
from phalanx.ops.dense.rope_scaling import Rotation
from phalanx.sequence.batch import Batch

MakePart = Callable[[Any, Env, int], Module]  # (config, env, layer) -> what is called with (x, batch)
MakeMtp = Callable[
    [Any, Env, Parameter | None], MultiTokenPrediction
]  # (config, env, the embedding's weight if it is on this rank)


def embedding_replicas(config: LlamaConfig, env: Env) -> tuple[Replica, ...]:
    """Who else holds the input embedding: a tied head, and what predicts tokens further ahead."""
    first, last = env.tied_stages
    return env.shared(first, last if config.tie_word_embeddings else None, env.mtp_stage)


def make_head(config: LlamaConfig, env: Env, weight: Parameter | None) -> Head:
    """`weight`: the head's (of a tied model the embedding's) where another block on this rank has it."""
    c, tied = config, config.tie_word_embeddings
    replicas = embedding_replicas(c, env) if tied else env.shared(env.tied_stages[1], env.mtp_stage)
    return Head(
        env,
        "model.embed_tokens.weight" if tied else "lm_head.weight",
        c.vocab_size,
        c.hidden_size,
        c.initializer_range,
        replicas,
        weight,
    )


class LlamaEmbedding(Block):
    def __init__(self, config: LlamaConfig, env: Env):
        super().__init__(env)
        c, replicas = config, embedding_replicas(config, env)
        self.embed = Embedding(
            env, "model.embed_tokens.weight", c.vocab_size, c.hidden_size, c.initializer_range, replicas
        )

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.embed(batch.tokens)


class LlamaLayer(Block):
    """`make_attention`, `make_mlp`: what a family has instead of Llama's."""

    def __init__(
        self,
        config: LlamaConfig,
        env: Env,
        layer: int,
        make_attention: MakePart | None = None,
        make_mlp: MakePart | None = None,
    ):
        super().__init__(env)
        c, at = config, f"model.layers.{layer}"
        self.norm1 = RMSNorm(env, f"{at}.input_layernorm", c.hidden_size, c.rms_norm_eps)
        self.attention = (make_attention or attention)(config, env, layer)
        self.norm2 = RMSNorm(env, f"{at}.post_attention_layernorm", c.hidden_size, c.rms_norm_eps)
        self.mlp = (make_mlp or mlp)(config, env, layer)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x, normed = self.norm1.add(x, reader=self.attention)
        delta = self.attention(normed, batch)
        x, normed = self.norm2.add(x, delta, reader=self.mlp)
        return x + self.mlp(normed, batch)


class LlamaHead(Block):
    """`normed`: the block before has the model's last norm."""

    recomputable = False

    def __init__(self, config: LlamaConfig, env: Env, tied: Parameter | None, normed: bool = False):
        super().__init__(env)
        self.norm = nn.Identity() if normed else RMSNorm(env, "model.norm", config.hidden_size, config.rms_norm_eps)
        self.head = make_head(config, env, tied)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.head.loss(self.norm(x), batch)

    def logits(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.head.logits(self.norm(x), rows)


def attention(config: LlamaConfig, env: Env, layer: int, **more: Any) -> Attention:
    """The attention of a layer; `more`: what a family adds to it (norms of heads, biases of its own, sinks)."""
    c, at = config, f"model.layers.{layer}.self_attn"
    head_dim = c.head_dim or c.hidden_size // c.num_attention_heads
    return Attention(
        env,
        (f"{at}.q_proj.weight", f"{at}.k_proj.weight", f"{at}.v_proj.weight", f"{at}.o_proj.weight"),
        c.hidden_size,
        c.num_attention_heads,
        c.num_key_value_heads or c.num_attention_heads,
        head_dim,
        c.initializer_range,
        c.initializer_range,
        Rotation(head_dim, c.rope_theta, c.rope_scaling, c.max_position_embeddings),
        layer=layer,
        kind=Kind(window=c.window(layer)),
        **{"bias": "all" if c.attention_bias else "none", **more},
    )


def mlp(config: LlamaConfig, env: Env, layer: int) -> SwiGLU:
    """The dense MLP of a layer."""
    names = tuple(f"model.layers.{layer}.mlp.{n}_proj.weight" for n in ("gate", "up", "down"))
    return SwiGLU(env, names, config.hidden_size, config.intermediate_size, config.initializer_range, config.mlp_bias)  # type: ignore[arg-type]


def make_blocks(
    config: LlamaConfig,
    env: Env,
    which: Sequence[int],
    make_attention: MakePart | None = None,
    make_mlp: MakePart | None = None,
    make_mtp: MakeMtp | None = None,
) -> list[Block]:
    """Blocks number `which`, those of one rank: embedding, layers, what predicts tokens further ahead (if anything),
    head.

    `make_attention`, `make_mlp`: what layers have instead of Llama's.
    """
    made: list[Block] = []
    embedding: Parameter | None = None  # weights that blocks on this rank share
    head: Parameter | None = None
    for i in which:
        if i == 0:
            made.append(first := LlamaEmbedding(config, env))
            embedding = first.embed.weight
            head = embedding if config.tie_word_embeddings else None
        elif i <= config.num_hidden_layers:
            made.append(LlamaLayer(config, env, i - 1, make_attention, make_mlp))
        elif make_mtp is not None and i == config.num_hidden_layers + 1:
            made.append(mtp := make_mtp(config, env, embedding))
            head = mtp.head.weight
        else:
            made.append(LlamaHead(config, env, head, normed=make_mtp is not None))
    return made

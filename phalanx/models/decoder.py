"""Blocks of Llama-like decoders: RMSNorm, rotary positions, grouped-query attention, SwiGLU or experts. A family passes
in what its layers have instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from phalanx.layout.box import Box
from phalanx.layout.param import ParamSpec, Piece, Replica, Role
from phalanx.models.decoder_config import DecoderConfig
from phalanx.models.experts import ExpertsConfig, RoutingFields
from phalanx.models.family import BlockMaker
from phalanx.nn.attention import Attention, AttentionSpec
from phalanx.nn.embedding import Embedding
from phalanx.nn.env import Env
from phalanx.nn.head import Head, HeadBlock
from phalanx.nn.initial import ONES
from phalanx.nn.mlp import SwiGLU
from phalanx.nn.module import Block, Module
from phalanx.nn.moe import Balance
from phalanx.nn.mtp import MultiTokenPrediction
from phalanx.nn.norm import OffsetRMSNorm, RMSNorm
from phalanx.nn.parameter import Parameter
from phalanx.nn.pooled_head import TextStates
from phalanx.ops.attention.kind import AttentionKind
from phalanx.ops.dense.rope_scaling import Rotation
from phalanx.ops.experts.router import Router
from phalanx.sequence.batch import Batch

MakePart = Callable[[Any, Env, int], Module]  # (config, env, layer) -> a module called with (x, batch)
MakeLayer = Callable[[Any, Env, int], Block]
MakeMtp = Callable[[Any, Env, Mapping[str, Parameter]], MultiTokenPrediction]
MakeHead = Callable[[Any, Env, Mapping[str, Parameter]], Head]


def embedding_replicas(config: DecoderConfig, env: Env) -> tuple[Replica, ...]:
    """Where else the input embedding is held: by a tied head, and by multi-token prediction."""
    stages, block = env.weights.stages, config.embedding_block
    first = stages[block] if len(stages) > block else stages[0]
    tied = config.tie_word_embeddings and not config.headless
    return env.shared(first, stages[-1] if tied else None, env.weights.mtp_stage)


def make_head(
    config: DecoderConfig, env: Env, made: Mapping[str, Parameter], head: type[Head] = Head, **more: Any
) -> Head:
    """`made`: parameters of the blocks on this rank, by global name; the head's (in a tied model, the embedding's) may
    be among them. `head`, `more`: another class, and its additional arguments."""
    c, tied = config, config.tie_word_embeddings
    name = f"{c.base}embed_tokens.weight" if tied else f"{c.prefix}lm_head.weight"
    replicas = embedding_replicas(c, env) if tied else env.shared(env.weights.tied_stages[1], env.weights.mtp_stage)
    role: Role = "embedding" if tied else "head"
    sizes = c.vocab_size, c.hidden_size, c.initializer_range
    if c.logit_soft_cap is not None:
        more["soft_cap"] = c.logit_soft_cap
    return head(env, name, *sizes, replicas, made.get(name), role, **more)


def norm(config: DecoderConfig, env: Env, name: str) -> RMSNorm:
    """A norm of the residual stream, or of what joins it."""
    return norm_class(config)(env, name, config.hidden_size, config.rms_norm_eps)


def norm_class(config: DecoderConfig) -> type[RMSNorm]:
    return OffsetRMSNorm if config.offset_norms else RMSNorm


class DecoderEmbedding(Block):
    def __init__(self, config: DecoderConfig, env: Env):
        super().__init__(env)
        c, replicas = config, embedding_replicas(config, env)
        # rounded to the dtype of the weights, as published models are
        self.scale = float(torch.tensor(config.embedding_scale, dtype=env.weights.dtype))
        self.embed = Embedding(
            env, f"{c.base}embed_tokens.weight", c.vocab_size, c.hidden_size, c.initializer_range, replicas
        )

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = self.embed(batch.tokens)
        return x if self.scale == 1.0 else x * self.scale


class DecoderLayer(Block):
    """`make_attention`, `make_mlp`: what a family has instead of Llama's."""

    def __init__(
        self,
        config: DecoderConfig,
        env: Env,
        layer: int,
        make_attention: MakePart | None = None,
        make_mlp: MakePart | None = None,
    ):
        super().__init__(env)
        c, at = config, config.layer_name(layer)
        self.norm1 = norm(c, env, f"{at}.input_layernorm")
        self.attention = (make_attention or attention)(config, env, layer)
        self.norm2 = norm(c, env, f"{at}.post_attention_layernorm")
        self.mlp = (make_mlp or dense_mlp)(config, env, layer)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x, normed = self.norm1.add(x, reader=self.attention)
        delta = self.attention(normed, batch)
        x, normed = self.norm2.add(x, delta, reader=self.mlp)
        return x + self.mlp(normed, batch)


class PostNormLayer(Block):
    """Norms after attention and MLP, none before them; `make_attention` as in DecoderLayer."""

    def __init__(self, config: DecoderConfig, env: Env, layer: int, make_attention: MakePart | None = None):
        super().__init__(env)
        c, at = config, config.layer_name(layer)
        self.attention = (make_attention or attention)(config, env, layer)
        self.norm1 = norm(c, env, f"{at}.post_attention_layernorm")
        self.mlp = dense_mlp(config, env, layer)
        self.norm2 = norm(c, env, f"{at}.post_feedforward_layernorm")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = x + self.norm1(self.attention(x, batch))
        return x + self.norm2(self.mlp(x, batch))


class SandwichLayer(Block):
    """Norms before and after attention and MLP. Ding et al., "CogView", 2021; Gemma 2.

    make_attention, make_mlp   what a family has instead of Llama's
    """

    def __init__(
        self,
        config: DecoderConfig,
        env: Env,
        layer: int,
        make_attention: MakePart | None = None,
        make_mlp: MakePart | None = None,
    ):
        super().__init__(env)
        c, at = config, config.layer_name(layer)
        self.norm1 = norm(c, env, f"{at}.input_layernorm")
        self.attention = (make_attention or attention)(config, env, layer)
        self.after1 = norm(c, env, f"{at}.post_attention_layernorm")
        self.norm2 = norm(c, env, f"{at}.pre_feedforward_layernorm")
        self.mlp = (make_mlp or dense_mlp)(config, env, layer)
        self.after2 = norm(c, env, f"{at}.post_feedforward_layernorm")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x, normed = self.norm1.add(x, reader=self.attention)
        delta = self.after1(self.attention(normed, batch))
        x, normed = self.norm2.add(x, delta, reader=self.mlp)
        return x + self.after2(self.mlp(normed, batch))


class ScaledLayer(SandwichLayer):
    """The same, and what comes out is multiplied by a number that is not trained (Gemma 4)."""

    def __init__(self, config: DecoderConfig, env: Env, layer: int, **parts: MakePart):
        super().__init__(config, env, layer, **parts)
        name = f"{config.prefix}model.layers.{layer}.layer_scalar"
        whole = Piece(name, (1,), Box.full((1,)), (slice(0, 1),), ONES, decay=False, replicas=env.everyone)
        self.scalar = self.param(ParamSpec((1,), (whole,), trained=False, role="norm"))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return super().forward(x, batch) * self.scalar.to(x.dtype)


class DecoderHead(HeadBlock):
    """`normed`: the block before it has applied the model's last norm."""

    def __init__(self, config: DecoderConfig, env: Env, head: Head, normed: bool = False):
        super().__init__(env)
        self.norm = nn.Identity() if normed else norm(config, env, f"{config.base}norm")
        self.head = head


def rotation(config: DecoderConfig, layer: int) -> Rotation | None:
    """The rotary embedding of a layer, as the config's `rope` says."""
    rope = config.rope(layer)
    if rope is None:
        return None
    return Rotation(
        rope.features, rope.theta, rope.scaling, config.max_position_embeddings, rope.interleaved, axes=rope.axes
    )


def attention_spec(config: DecoderConfig, layer: int) -> AttentionSpec:
    """The attention of a layer in Llama."""
    c, at = config, f"{config.layer_name(layer)}.self_attn"
    head_dim = c.head_dim or c.hidden_size // c.num_attention_heads
    return AttentionSpec(
        names=(f"{at}.q_proj.weight", f"{at}.k_proj.weight", f"{at}.v_proj.weight", f"{at}.o_proj.weight"),
        width=c.hidden_size,
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads or c.num_attention_heads,
        head_dim=head_dim,
        std=c.initializer_range,
        rotation=rotation(c, layer),
        bias="all" if c.attention_bias else "none",
        layer=layer,
        kind=AttentionKind(window=c.window(layer)),
    )


def attention(config: DecoderConfig, env: Env, layer: int, **changes: Any) -> Attention:
    """The attention of a layer; `changes`: fields of AttentionSpec in which a family differs."""
    return Attention(env, replace(attention_spec(config, layer), **changes))


def dense_mlp(config: DecoderConfig, env: Env, layer: int, mlp: type[SwiGLU] = SwiGLU) -> SwiGLU:
    """The dense MLP of a layer; `mlp`: another class."""
    at = f"{config.layer_name(layer)}.mlp"
    names = tuple(f"{at}.{n}_proj.weight" for n in ("gate", "up", "down"))
    return mlp(env, names, config.hidden_size, config.intermediate_size, config.initializer_range, config.mlp_bias)  # type: ignore[arg-type]


def head_norm_attention(config: DecoderConfig, env: Env, layer: int, **changes: Any) -> Attention:
    """Attention with an RMSNorm on every query and key head."""
    at = f"{config.layer_name(layer)}.self_attn"
    names = f"{at}.q_norm", f"{at}.k_norm"
    return attention(config, env, layer, head_norm=(*names, config.rms_norm_eps), norm=norm_class(config), **changes)


def width_norm_attention(config: DecoderConfig, env: Env, layer: int) -> Attention:
    """Attention with an RMSNorm over all query heads together, and one over all key heads."""
    at = f"{config.layer_name(layer)}.self_attn"
    return attention(config, env, layer, width_norm=(f"{at}.q_norm", f"{at}.k_norm", config.rms_norm_eps))


def router_of(config: ExpertsConfig, renormalize: bool = True, order: Literal["before", "after"] = "before") -> Router:
    """Softmax over all experts, of which the best are kept; or over the logits of the best (order "after")."""
    forced: Literal["none", "balanced"] = "balanced" if config.router_forced_balance else "none"
    return Router(
        config.num_experts_per_tok, config.routed_experts, order=order, renormalize=renormalize, forced=forced
    )


def balance_of(config: RoutingFields) -> Balance:
    return Balance(
        aux=config.router_aux_loss_coef,
        scope=config.router_aux_loss_scope,
        z=config.router_z_loss_coef,
        capacity=config.expert_capacity_factor,
        drop=config.expert_capacity_drop,
    )


def decoder_blocks(
    config: DecoderConfig,
    env: Env,
    layer: MakeLayer = DecoderLayer,
    make_mtp: MakeMtp | None = None,
    head: MakeHead = make_head,
) -> list[BlockMaker]:
    """Embedding, layers, multi-token prediction (if any), head."""

    def make_layer(number: int, made: Mapping[str, Parameter]) -> Block:
        return layer(config, env, number)

    def last(made: Mapping[str, Parameter]) -> Block:
        if config.headless:
            return TextStates(env, norm(config, env, f"{config.base}norm"))
        return DecoderHead(config, env, head(config, env, made), normed=make_mtp is not None)

    makers: list[BlockMaker] = [lambda made: DecoderEmbedding(config, env)]
    makers += [partial(make_layer, number) for number in range(config.num_hidden_layers)]
    if make_mtp is not None:
        makers.append(partial(make_mtp, config, env))
    return [*makers, last]

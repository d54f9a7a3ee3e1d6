"""Blocks of T5: an encoder and a decoder as one chain. The encoder's last norm makes the memory, which then travels
beside the decoder's layers; each of them reads it. `config` has T5's fields.

    embedding ─▶ encoder layers ──hidden──▶ decoder's embedding ──hidden, memory──▶ decoder layers ──hidden──▶ head
     encoder's text                           decoder's text                            both
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from phalanx.base.rng import keep_columns, key_of
from phalanx.layout.param import Replica, Role
from phalanx.models.family import BlockMaker
from phalanx.models.layer_norm_decoder import Dropping
from phalanx.nn.attention import Attention, AttentionSpec
from phalanx.nn.cross_attention import CrossAttention
from phalanx.nn.embedding import Embedding
from phalanx.nn.env import Env
from phalanx.nn.head import Head
from phalanx.nn.initial import Normal
from phalanx.nn.linear import ColumnLinear, RowLinear
from phalanx.nn.mlp import run_mlp
from phalanx.nn.module import Block, Module, OutputRows
from phalanx.nn.norm import RMSNorm
from phalanx.nn.parameter import Parameter
from phalanx.nn.relative_bias import BiasSpec, RelativeBiasTable
from phalanx.ops.attention.kind import AttentionKind, Direction, RelativeBias
from phalanx.ops.dense.activation import GATED, swiglu
from phalanx.ops.dense.gate import GEGLU
from phalanx.sequence.batch import ENCODER, TEXT, Batch
from phalanx.sequence.streams import HIDDEN, Border, Streams, StreamSpec

MEMORY = "memory"
# sites of dropout in a block; those of probabilities are 0 and nn.cross_attention.DROPOUT_SITE
EMBEDDED, ATTENDED, READ, TRANSFORMED, NORMED, INNER = range(1, 7)
Made = Mapping[str, Parameter]


def encoder_rows(batch: Batch, tp: int) -> int:
    """One row for each token of the encoder's text, sharded over tp."""
    return batch.beside[ENCODER].num_tokens // tp


def shared_embedding(config: Any, env: Env, made: Made) -> Embedding:
    """The input embedding, which the encoder, the decoder and a tied head share."""
    c, name = config, "shared.weight"
    return Embedding(
        env, name, c.vocab_size, c.hidden_size, c.initializer_range, embedding_replicas(c, env), made.get(name)
    )


def embedding_replicas(config: Any, env: Env) -> tuple[Replica, ...]:
    readers = [0, config.encoder_blocks.stop]
    return env.shared_by([*readers, -1] if config.tie_word_embeddings else readers)


class T5MLP(Module):
    """wo(relu(wi x)), or wo(gelu(wi_0 x) * wi_1 x) with both stacked in one matrix; no biases."""

    first_in_memory = ("up.weight", "down.weight")

    def __init__(self, config: Any, env: Env, at: str, block: int):
        super().__init__(env)
        self.p, self.block = config.dropout_rate, block
        width, inner, factor = config.hidden_size, config.intermediate_size, config.initializer_range
        self.inner = range(*env.cut(inner))
        first, stop = env.cut(inner)
        self.gated = config.feed_forward_proj == "gated-gelu"
        names = ("wi_0", "wi_1") if self.gated else ("wi",)
        rows = [OutputRows(f"{at}.{name}.weight", inner, first, stop) for name in names]
        self.up = ColumnLinear(env, rows, width, Normal(factor * width**-0.5))
        out = Normal(factor * inner**-0.5)
        self.down = RowLinear(env, f"{at}.wo.weight", width, inner, (first, stop), out)
        self.num_weights = (len(names) + 1) * width * inner

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x (T / tp, D) -> (T / tp, D). With dropout all tokens at once: masks are of all."""
        if self.p > 0 and self.training:
            return self._of_rows(x, partial(self._dropped, batch))
        return run_mlp(self, self._of_rows, x, self.up, self.down)

    def _of_rows(self, x: Tensor, drop: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        recompute = self.env.recompute
        hidden = recompute.op("activation", self._activated, recompute.op("up", self.up, x))
        return self.down(hidden if drop is None else drop(hidden))

    def _dropped(self, batch: Batch, x: Tensor) -> Tensor:
        """x (T, inner features of this rank)."""

        def mask() -> Tensor:
            key, word = key_of(self.env.seed, "dropout"), (self.block << 20) | (INNER << 16)
            keep = keep_columns(self.p, key, (batch.samples, batch.places), self.inner, word)
            return keep.to(x.dtype).mul_(1.0 / (1.0 - self.p))

        return x * self.env.recompute.op("dropout", mask)

    def _activated(self, x: Tensor) -> Tensor:
        if not self.gated:
            return x.relu()
        return swiglu(x, self.env.kernels_for(GATED), GEGLU)

    def flops(self, seq_length: int) -> float:
        return 2.0 * self.num_weights


class T5Embedding(Dropping):
    """Of the encoder's text, in the model's first block."""

    def __init__(self, config: Any, env: Env, made: Made):
        super().__init__(env)
        self.p = config.dropout_rate
        self.embed, self.width = shared_embedding(config, env, made), config.hidden_size

    def streams(self, given: Border) -> Border:
        return (StreamSpec(HIDDEN, self.width, encoder_rows),)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        encoder = batch.beside[ENCODER]
        return self.drop(self.embed(encoder.tokens), encoder, self.p, 0, EMBEDDED)


class T5EncoderLayer(Dropping):
    works_on = ENCODER

    def __init__(self, config: Any, env: Env, layer: int, made: Made):
        super().__init__(env)
        at, norm = f"encoder.block.{layer}.layer", partial(t5_norm, config, env)
        self.p, self.block = config.dropout_rate, config.encoder_blocks[layer]
        self.norm1 = norm(f"{at}.0.layer_norm")
        self.attention = self_attention(config, env, "encoder", layer, made)
        self.norm2 = norm(f"{at}.1.layer_norm")
        self.mlp = T5MLP(config, env, f"{at}.1.DenseReluDense", self.block)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        encoder = batch.beside[ENCODER]
        x, normed = self.norm1.add(x)
        x, normed = self.norm2.add(x, self.drop(self.attention(normed, encoder), encoder, self.p, self.block, ATTENDED))
        return x + self.drop(self.mlp(normed, encoder), encoder, self.p, self.block, TRANSFORMED)

    def flops_per_token(self, lengths: Mapping[str, int], mixing: bool = True) -> float:
        length = lengths[ENCODER]
        return self.flops(length if mixing else 0) * length / lengths[TEXT]


class T5DecoderEmbedding(Dropping):
    """The encoder's last norm, whose output is the memory from here on, and the embedding of the decoder's text."""

    takes_streams = True

    def __init__(self, config: Any, env: Env, made: Made):
        super().__init__(env)
        self.p, self.block = config.dropout_rate, config.encoder_blocks.stop
        self.norm = t5_norm(config, env, "encoder.final_layer_norm")
        self.embed, self.width = shared_embedding(config, env, made), config.hidden_size

    def streams(self, given: Border) -> Border:
        return StreamSpec(HIDDEN, self.width), StreamSpec(MEMORY, self.width, encoder_rows)

    def forward(self, streams: Streams, batch: Batch) -> Streams:
        x = self.drop(self.embed(batch.tokens), batch, self.p, self.block, EMBEDDED)
        memory = self.drop(self.norm(streams[HIDDEN]), batch.beside[ENCODER], self.p, self.block, NORMED)
        return {HIDDEN: x, MEMORY: memory}


class T5DecoderLayer(Dropping):
    """`last`: no layer after it reads the memory."""

    takes_streams = True

    def __init__(self, config: Any, env: Env, layer: int, made: Made):
        super().__init__(env)
        at, norm = f"decoder.block.{layer}.layer", partial(t5_norm, config, env)
        self.p, self.block = config.dropout_rate, config.decoder_blocks[layer]
        self.norm1 = norm(f"{at}.0.layer_norm")
        self.attention = self_attention(config, env, "decoder", layer, made)
        self.norm2 = norm(f"{at}.1.layer_norm")
        self.reading = cross_attention(config, env, layer)
        self.norm3 = norm(f"{at}.2.layer_norm")
        self.mlp = T5MLP(config, env, f"{at}.2.DenseReluDense", self.block)
        self.last = layer == config.decoder_layers - 1

    def streams(self, given: Border) -> Border:
        return tuple(spec for spec in given if spec.name != MEMORY) if self.last else given

    def forward(self, streams: Streams, batch: Batch) -> Streams:
        x, memory = streams[HIDDEN], streams[MEMORY]
        x, normed = self.norm1.add(x)
        x, normed = self.norm2.add(x, self.drop(self.attention(normed, batch), batch, self.p, self.block, ATTENDED))
        x, normed = self.norm3.add(x, self.drop(self.reading(normed, memory, batch), batch, self.p, self.block, READ))
        x = x + self.drop(self.mlp(normed, batch), batch, self.p, self.block, TRANSFORMED)
        return {HIDDEN: x} if self.last else {HIDDEN: x, MEMORY: memory}

    def flops_per_token(self, lengths: Mapping[str, int], mixing: bool = True) -> float:
        length = lengths[TEXT]
        own = self.attention.flops(length if mixing else 0) + self.mlp.flops(length)
        return own + self.reading.flops_beside(length, lengths[ENCODER], mixing)


class T5Head(Dropping):
    recomputable = False

    def __init__(self, config: Any, env: Env, made: Made):
        super().__init__(env)
        self.p, self.block = config.dropout_rate, config.num_blocks - 1
        c, tied = config, config.tie_word_embeddings
        name = "shared.weight" if tied else "lm_head.weight"
        role: Role = "embedding" if tied else "head"
        self.norm = t5_norm(config, env, "decoder.final_layer_norm")
        replicas = embedding_replicas(c, env) if tied else ()
        # of an untied head as T5X draws it: logits begin near 0
        std = c.initializer_range * (1.0 if tied else c.hidden_size**-0.5)
        self.head = Head(env, name, c.vocab_size, c.hidden_size, std, replicas, made.get(name), role)
        self.scale = c.hidden_size**-0.5 if c.scales_outputs else 1.0

    def read(self, x: Tensor) -> Tensor:
        """What the head reads."""
        x = self.norm(x)
        return x * self.scale if self.scale != 1.0 else x

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.head.loss(self.drop(self.read(x), batch, self.p, self.block, NORMED), batch)

    def logits(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.head.logits(self.read(x), rows)

    def log_probs(self, x: Tensor, batch: Batch, top: int = 0) -> Tensor:
        return self.head.log_probs(self.read(x), batch, top)


def encoder_text(batch: Batch) -> Batch:
    return batch.beside[ENCODER]


def cross_attention(config: Any, env: Env, layer: int) -> CrossAttention:
    """Of a layer of the decoder, to the memory."""
    spec = attention_spec(config, f"decoder.block.{layer}.layer.1.EncDecAttention", config.decoder_blocks[layer])
    return CrossAttention(env, spec, encoder_text)


def self_attention(config: Any, env: Env, stack: str, layer: int, made: Made) -> Attention:
    """Of a layer of the encoder, both ways, or of the decoder. All layers of a stack share its first layer's table."""
    own = config.encoder_blocks if stack == "encoder" else config.decoder_blocks
    buckets, farthest = config.relative_attention_num_buckets, config.relative_attention_max_distance
    first = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    bias = RelativeBias(buckets, farthest, bidirectional=stack == "encoder")
    std = config.initializer_range * config.hidden_size**-0.5
    table = RelativeBiasTable(env, BiasSpec(first, config.num_attention_heads, bias, std), env.shared_by(own), made)
    direction: Direction = "both" if stack == "encoder" else "causal"
    spec = attention_spec(config, f"{stack}.block.{layer}.layer.0.SelfAttention", own[layer])
    return Attention(env, replace(spec, kind=AttentionKind(direction=direction, scale=1.0)), table)


def attention_spec(config: Any, at: str, block: int) -> AttentionSpec:
    """`block`: the number of the layer's block, a key of its dropout."""
    c, factor = config, config.initializer_range
    return AttentionSpec(
        names=(f"{at}.q.weight", f"{at}.k.weight", f"{at}.v.weight", f"{at}.o.weight"),
        width=c.hidden_size,
        heads=c.num_attention_heads,
        kv_heads=c.num_attention_heads,
        head_dim=c.head_dim,
        std=factor * c.hidden_size**-0.5,
        std_q=factor * (c.hidden_size * c.head_dim) ** -0.5,
        std_out=factor * (c.num_attention_heads * c.head_dim) ** -0.5,
        dropout=c.dropout_rate,
        layer=block,
        kind=AttentionKind(direction="both", scale=1.0),
    )


def t5_norm(config: Any, env: Env, name: str) -> RMSNorm:
    return RMSNorm(env, name, config.hidden_size, config.layer_norm_epsilon)


def t5_blocks(config: Any, env: Env) -> Sequence[BlockMaker]:
    """Embedding, encoder layers, the decoder's embedding, decoder layers, head."""

    def make(block: Any, made: Made) -> Block:
        found: Block = block(config, env, made=made)
        return found

    return [
        partial(make, T5Embedding),
        *(partial(make, partial(T5EncoderLayer, layer=i)) for i in range(config.num_hidden_layers)),
        partial(make, T5DecoderEmbedding),
        *(partial(make, partial(T5DecoderLayer, layer=i)) for i in range(config.decoder_layers)),
        partial(make, T5Head),
    ]

"""Blocks of Whisper: convolutions over frames of sound, an encoder, and a decoder that reads its result, the memory, as
one chain.

    convolutions ─▶ encoder layers ──hidden──▶ decoder's embedding ──hidden, memory──▶ decoder layers ──hidden──▶ head
     the recordings                              the text                                both
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.layout.box import Box
from phalanx.layout.param import Init, ParamSpec, Piece, Replica, Role
from phalanx.models.family import BlockMaker
from phalanx.nn.attention import Attention, AttentionSpec
from phalanx.nn.cross_attention import CrossAttention
from phalanx.nn.embedding import Embedding
from phalanx.nn.env import Env
from phalanx.nn.head import Head, HeadBlock
from phalanx.nn.initial import ZEROS, Normal, Sinusoids
from phalanx.nn.mlp import GeluMLP
from phalanx.nn.module import Block
from phalanx.nn.norm import LayerNorm
from phalanx.nn.parameter import Parameter
from phalanx.ops.attention.kind import AttentionKind, Direction
from phalanx.ops.dense.activation import gelu
from phalanx.ops.dense.embedding import learned_positions
from phalanx.ops.dense.patches import patch_embedding
from phalanx.ops.dense.rows import ROWS
from phalanx.sequence.batch import TEXT, Batch
from phalanx.sequence.frames import FRAMES
from phalanx.sequence.sample import SOUND
from phalanx.sequence.streams import HIDDEN, Border, Streams, StreamSpec

MEMORY = "memory"
TAPS = 3  # inputs that an output of a convolution reads
Made = Mapping[str, Parameter]


def sound_rows(batch: Batch, tp: int) -> int:
    """One row for each row of the recordings, sharded over tp."""
    return batch.beside[SOUND].num_tokens // tp


def sound_of(batch: Batch) -> Batch:
    return batch.beside[SOUND]


def everywhere(env: Env, name: str, shape: Sequence[int], init: Init, role: Role, frozen: bool = False) -> ParamSpec:
    """A tensor that each tp rank holds whole, stored as its file has it, and reads with rows of its own."""
    shape, decay = tuple(shape), role not in ("bias", "norm")
    local = tuple(slice(0, n) for n in shape)
    piece = Piece(name, shape, Box.full(shape), local, init, decay, replicas=env.everyone)
    return ParamSpec(shape, (piece,), role=role, frozen=frozen)


class SoundEmbedding(Block):
    """Two convolutions over frames, each with GELU, and fixed positions: sines and cosines. The second has a stride of
    two, so two frames become a row.

    A row of the batch has its two frames and those around them that it depends on, zeros beyond the recording, so each
    rank computes its own rows and nothing is sent."""

    def __init__(self, config: Any, env: Env):
        super().__init__(env)
        at, width, bands, std = "model.encoder", config.hidden_size, config.num_mel_bins, config.initializer_range
        normal, whole = Normal(std), partial(everywhere, env)
        self.conv1 = self.param(whole(f"{at}.conv1.weight", (width, bands, TAPS), normal, "conv"))
        self.bias1 = self.param(whole(f"{at}.conv1.bias", (width,), ZEROS, "bias"))
        self.conv2 = self.param(whole(f"{at}.conv2.weight", (width, width, TAPS), normal, "conv"))
        self.bias2 = self.param(whole(f"{at}.conv2.bias", (width,), ZEROS, "bias"))
        table = config.max_source_positions, width
        waves = Sinusoids()
        self.positions = self.param(whole(f"{at}.embed_positions.weight", table, waves, "embedding", frozen=True))
        self.width, self.bands, self.num_positions = width, bands, config.max_source_positions

    def streams(self, given: Border) -> Border:
        return (StreamSpec(HIDDEN, self.width, sound_rows),)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        sound = batch.beside[SOUND]
        if sound.idle:
            return self.conv1.new_zeros(sound.num_tokens // self.env.grid.tp, self.width)
        if sound.values is None:
            raise TypeError("the batch has no frames of sound")
        first, stop = self.env.cut(sound.num_tokens)
        frames, positions = sound.values[first:stop], sound.positions[first:stop]
        recompute = self.env.recompute
        inner = recompute.op("up", self._first, frames, positions)
        y = recompute.op("activation", partial(gelu, exact=True), self._second(inner))
        # documents of padding may be longer than a recording
        return y + self.positions[positions.clamp(max=self.num_positions - 1)]

    def _first(self, frames: Tensor, positions: Tensor) -> Tensor:
        """The first convolution's outputs (rows, TAPS, D) that the second one reads for each row: those of the frame
        before its two, and of these. Beyond the recording they are zero."""
        windows = frames.unflatten(1, (FRAMES, self.bands)).unfold(1, TAPS, 1)  # rows, TAPS, bands, TAPS
        y = patch_embedding(windows.flatten(2).flatten(0, 1), self.conv1, self.bias1)
        y = gelu(y, exact=True).unflatten(0, (-1, TAPS))
        place = torch.arange(TAPS, device=y.device)
        outside = (positions == 0).unsqueeze(1) & (place == 0)
        return y.masked_fill(outside.unsqueeze(2), 0.0)

    def _second(self, inner: Tensor) -> Tensor:
        return patch_embedding(inner.transpose(1, 2).flatten(1), self.conv2, self.bias2)

    def flops_per_token(self, lengths: Mapping[str, int], mixing: bool = True) -> float:
        weights = TAPS * self.conv1.numel() + self.conv2.numel()
        return 2.0 * weights * lengths[SOUND] / lengths[TEXT]


class SoundLayer(Block):
    """A layer of the encoder: rows of a recording read each other both ways."""

    works_on = SOUND

    def __init__(self, config: Any, env: Env, layer: int):
        super().__init__(env)
        at, norm = f"model.encoder.layers.{layer}", partial(layer_norm, config, env)
        self.norm1 = norm(f"{at}.self_attn_layer_norm")
        self.attention = Attention(env, attention_spec(config, f"{at}.self_attn", "both"))
        self.norm2 = norm(f"{at}.final_layer_norm")
        self.mlp, self.longest = mlp_of(config, env, at), config.max_source_positions

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x, normed = self.norm1.add(x)
        x, normed = self.norm2.add(x, self.attention(normed, batch.beside[SOUND]))
        return x + self.mlp(normed)

    def flops_per_token(self, lengths: Mapping[str, int], mixing: bool = True) -> float:
        length = lengths[SOUND]
        return self.flops(min(length, self.longest) if mixing else 0) * length / lengths[TEXT]


class TextEmbedding(Block):
    """The encoder's last norm, whose output is the memory from here on, and the embedding of the text with learned
    positions."""

    takes_streams = True

    def __init__(self, config: Any, env: Env, made: Made):
        super().__init__(env)
        c = config
        self.norm = layer_norm(c, env, "model.encoder.layer_norm")
        std, replicas = c.initializer_range, embedding_replicas(c, env)
        self.embed = Embedding(env, EMBEDDING, c.vocab_size, c.hidden_size, std, replicas, made.get(EMBEDDING))
        table = c.max_position_embeddings, c.hidden_size
        self.positions = self.param(
            everywhere(env, "model.decoder.embed_positions.weight", table, Normal(std), "embedding")
        )
        self.width, self.num_positions = c.hidden_size, c.max_position_embeddings

    def streams(self, given: Border) -> Border:
        return StreamSpec(HIDDEN, self.width), StreamSpec(MEMORY, self.width, sound_rows)

    def forward(self, streams: Streams, batch: Batch) -> Streams:
        first, stop = self.env.cut(batch.num_tokens)
        # documents of padding may be longer than a text
        places = batch.positions[first:stop].clamp(max=self.num_positions - 1)
        x = self.embed(batch.tokens) + learned_positions(places, self.positions, self.env.ops.by_config(ROWS))
        return {HIDDEN: x, MEMORY: self.norm(streams[HIDDEN])}


class TextLayer(Block):
    """A layer of the decoder. `last`: no layer after it reads the memory."""

    takes_streams = True

    def __init__(self, config: Any, env: Env, layer: int):
        super().__init__(env)
        at, norm = f"model.decoder.layers.{layer}", partial(layer_norm, config, env)
        self.norm1 = norm(f"{at}.self_attn_layer_norm")
        self.attention = Attention(env, attention_spec(config, f"{at}.self_attn", "causal"))
        self.norm2 = norm(f"{at}.encoder_attn_layer_norm")
        self.reading = CrossAttention(env, attention_spec(config, f"{at}.encoder_attn", "both"), sound_of)
        self.norm3 = norm(f"{at}.final_layer_norm")
        self.mlp, self.longest = mlp_of(config, env, at), config.max_source_positions
        self.last = layer == config.decoder_layers - 1

    def streams(self, given: Border) -> Border:
        return tuple(spec for spec in given if spec.name != MEMORY) if self.last else given

    def forward(self, streams: Streams, batch: Batch) -> Streams:
        x, memory = streams[HIDDEN], streams[MEMORY]
        x, normed = self.norm1.add(x)
        x, normed = self.norm2.add(x, self.attention(normed, batch))
        x, normed = self.norm3.add(x, self.reading(normed, memory, batch))
        x = x + self.mlp(normed)
        return {HIDDEN: x} if self.last else {HIDDEN: x, MEMORY: memory}

    def flops_per_token(self, lengths: Mapping[str, int], mixing: bool = True) -> float:
        """A text reads its own recording; keys and values are made of all."""
        length, rows = lengths[TEXT], lengths[SOUND]
        own = self.attention.flops(length if mixing else 0) + self.mlp.flops(length)
        read = self.reading.flops_beside(length, rows, mixing=False)
        if mixing:
            read += 4.0 * min(rows, self.longest) * self.reading.all_heads * self.reading.head_dim
        return own + read


class TextHead(HeadBlock):
    def __init__(self, config: Any, env: Env, made: Made):
        super().__init__(env)
        c, tied = config, config.tie_word_embeddings
        name, role = (EMBEDDING, "embedding") if tied else ("proj_out.weight", "head")
        replicas = embedding_replicas(c, env) if tied else ()
        self.norm = layer_norm(c, env, "model.decoder.layer_norm")
        std = c.initializer_range
        self.head = Head(env, name, c.vocab_size, c.hidden_size, std, replicas, made.get(name), role)  # type: ignore[arg-type]


EMBEDDING = "model.decoder.embed_tokens.weight"


def embedding_replicas(config: Any, env: Env) -> tuple[Replica, ...]:
    """The decoder's embedding and a tied head share a matrix."""
    return env.shared_by([config.embedding_block, -1]) if config.tie_word_embeddings else ()


def attention_spec(config: Any, at: str, direction: Direction) -> AttentionSpec:
    c, heads = config, config.num_attention_heads
    q, k, v, out = (f"{at}.{name}_proj.weight" for name in ("q", "k", "v", "out"))
    return AttentionSpec(
        names=(q, k, v, out),
        width=c.hidden_size,
        heads=heads,
        kv_heads=heads,
        head_dim=c.hidden_size // heads,
        std=c.initializer_range,
        bias="not keys",
        kind=AttentionKind(direction=direction),
    )


def mlp_of(config: Any, env: Env, at: str) -> GeluMLP:
    c, names = config, (f"{at}.fc1", f"{at}.fc2")
    std = c.initializer_range
    return GeluMLP(env, names, c.hidden_size, c.intermediate_size, std, std, "gelu", transposed=False)


def layer_norm(config: Any, env: Env, name: str) -> LayerNorm:
    return LayerNorm(env, name, config.hidden_size, 1e-5)


def whisper_blocks(config: Any, env: Env) -> Sequence[BlockMaker]:
    """Convolutions, encoder layers, the decoder's embedding, decoder layers, head."""

    def plain(layer: Any, number: int, made: Made) -> Block:
        found: Block = layer(config, env, number)
        return found

    return [
        lambda made: SoundEmbedding(config, env),
        *(partial(plain, SoundLayer, i) for i in range(config.num_hidden_layers)),
        lambda made: TextEmbedding(config, env, made),
        *(partial(plain, TextLayer, i) for i in range(config.decoder_layers)),
        lambda made: TextHead(config, env, made),
    ]

"""A running memory: Llama whose layers pass more than "hidden" on. A family of a package that is not Phalanx: this
file and nothing else.

    model: {family: "tests.outside.memory:FAMILY", memory_size: 24, ...}

hidden   (T / tp, D)             as everywhere
memory   (T / tp, memory_size)   every odd layer writes to it and reads it; even layers are Llama's, it passes them by
gist     (T / tp / 2, 8)         made of the embedding of each pair of tokens; read by the last two odd layers only
even     (T / tp, 1) int64       whether a token's position is even: it has no gradient
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.base.rng import fill_normal_
from phalanx.layout.param import Init, Piece
from phalanx.models.decoder import DecoderEmbedding, DecoderHead, DecoderLayer, make_head
from phalanx.models.decoder_config import DecoderConfig
from phalanx.models.family import BlockMaker, Family
from phalanx.nn.env import Env
from phalanx.nn.linear import ColumnLinear, ReplicatedLinear, RowLinear
from phalanx.nn.module import Block, OutputRows
from phalanx.nn.norm import RMSNorm
from phalanx.sequence.batch import Batch
from phalanx.sequence.streams import Border, Streams, StreamSpec

GIST = 8


@dataclass(frozen=True)
class HalfNormal(Init):
    """Initial values of its own kind: |normal|, drawn by each element's place in the whole tensor."""

    std: float

    def fill(self, out: Tensor, piece: Piece, seed: int) -> None:
        fill_normal_(out, self.std, piece.shape, piece.box.start, seed, piece.name)
        out.abs_()


INIT = HalfNormal(0.02)


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(DecoderConfig):
    memory_size: int = 24
    """Width of the memory."""

    @property
    def first_reader(self) -> int:
        """The first layer that reads the gist."""
        return self.num_hidden_layers - 3


def pairs(batch: Batch, tp: int) -> int:
    return batch.num_tokens // tp // 2


def whole(env: Env, name: str, outputs: int, inputs: int) -> ReplicatedLinear:
    return ReplicatedLinear(env, [OutputRows(f"{name}.weight", outputs, 0, outputs, env.everyone)], inputs, INIT)


class MemoryEmbedding(DecoderEmbedding):
    takes_streams = True

    def __init__(self, config: MemoryConfig, env: Env):
        super().__init__(config, env)
        self.memory = whole(env, "model.memory", config.memory_size, config.hidden_size)
        self.gist = whole(env, "model.gist", GIST, config.hidden_size)
        self.width = config.memory_size

    def streams(self, given: Border) -> Border:
        memory, gist = StreamSpec("memory", self.width), StreamSpec("gist", GIST, pairs)
        return (*given, memory, gist, StreamSpec("even", 1, dtype=torch.int64))

    def forward(self, streams: Streams, batch: Batch) -> Streams:
        x = self.embed(batch.tokens)
        first = self.env.at.tp * len(x)
        even = (batch.positions[first : first + len(x)] + 1) % 2
        gist = self.gist(x.unflatten(0, (-1, 2)).mean(1))
        return {"hidden": x, "memory": self.memory(x), "gist": gist, "even": even.unsqueeze(1)}


class MemoryLayer(Block):
    """Llama's layer, before which the memory is written and read."""

    takes_streams = True

    def __init__(self, config: MemoryConfig, env: Env, layer: int):
        super().__init__(env)
        at, width, inner = f"model.layers.{layer}", config.hidden_size, config.intermediate_size
        first, stop = env.cut(inner)
        self.layer = DecoderLayer(config, env, layer)
        self.norm = RMSNorm(env, f"{at}.memory_layernorm", width, config.rms_norm_eps)
        self.up = ColumnLinear(env, [OutputRows(f"{at}.memory.up.weight", inner, first, stop)], width, INIT)
        self.write = RowLinear(env, f"{at}.memory.write.weight", config.memory_size, inner, (first, stop), INIT)
        self.read = whole(env, f"{at}.memory.read", width, config.memory_size)
        self.reads_gist, self.last = layer >= config.first_reader, layer == config.num_hidden_layers - 1
        self.read_gist = whole(env, f"{at}.memory.read_gist", width, GIST) if self.reads_gist else None

    def streams(self, given: Border) -> Border:
        return tuple(spec for spec in given if spec.name not in ("gist", "even")) if self.last else given

    def forward(self, streams: Streams, batch: Batch) -> Streams:
        x, memory = streams["hidden"], streams["memory"]
        memory = memory + self.write(torch.relu(self.up(self.norm(x))).square())
        x = x + self.read(memory)
        if self.read_gist is not None:
            x = x + self.read_gist(streams["gist"]).repeat_interleave(2, 0) * streams["even"]
        made = streams | {"hidden": self.layer(x, batch), "memory": memory}
        return {name: made[name] for name in ("hidden", "memory")} if self.last else made


def blocks(config: MemoryConfig, env: Env) -> Sequence[BlockMaker]:
    def layer(number: int) -> BlockMaker:
        return lambda made: (MemoryLayer if number % 2 else DecoderLayer)(config, env, number)

    layers = [layer(number) for number in range(config.num_hidden_layers)]
    head: BlockMaker = lambda made: DecoderHead(config, env, make_head(config, env, made))  # noqa: E731
    return [lambda made: MemoryEmbedding(config, env), *layers, head]


FAMILY = Family("memory", MemoryConfig, blocks, architecture="MemoryForCausalLM")

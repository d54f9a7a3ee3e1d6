"""Blocks of LLaVA: a vision tower, a projector whose features take the places of image tokens, and a decoder, in one
chain.

    embedding of patches ─▶ tower's layers ──hidden (patches)──▶ projector and embedding of the text ──hidden──▶ decoder
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from phalanx.models.decoder import DecoderEmbedding, DecoderLayer, attention, decoder_blocks
from phalanx.models.family import BlockMaker
from phalanx.models.vision_tower import Unread, tower_blocks, unread_shapes
from phalanx.nn.env import Env
from phalanx.nn.initial import Normal
from phalanx.nn.linear import ColumnLinear, RowLinear
from phalanx.nn.module import OutputRows
from phalanx.nn.units import Features
from phalanx.ops.dense.activation import gelu
from phalanx.sequence.batch import TEXT, Batch
from phalanx.sequence.patches import PATCHES
from phalanx.sequence.streams import HIDDEN, Border, StreamSpec


class LlavaEmbedding(DecoderEmbedding):
    """The text's embedding, with features of images where their tokens are: two linears and GELU, of the patches of
    this rank's images."""

    def __init__(self, config: Any, env: Env):
        super().__init__(config, env)
        own, at = env.whole(), "multi_modal_projector"
        width, vision, std, bias = config.hidden_size, config.vision, config.initializer_range, config.projector_bias
        rows = [OutputRows(f"{at}.linear_1.weight", width, 0, width)]
        self.linear1 = ColumnLinear(own, rows, vision.hidden_size, Normal(std), bias=bias)
        name = f"{at}.linear_2.weight"
        self.linear2 = RowLinear(own, name, width, width, (0, width), Normal(std), bias=bias)
        self.unread = Unread(own, unread_shapes(vision, config.tower_layers), std)
        self.features, self.width = Features(PATCHES, config.image_token_id), width
        self.num_weights = width * (width + vision.hidden_size)

    def streams(self, given: Border) -> Border:
        return (StreamSpec(HIDDEN, self.width),)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if batch.beside[PATCHES].idle:
            return super().forward(x, batch)
        recompute = self.env.recompute
        hidden = recompute.op("activation", partial(gelu, exact=True), recompute.op("up", self.linear1, x))
        return self.features.put(super().forward(x, batch), self.linear2(hidden), batch, self.env)

    def flops_per_token(self, lengths: Mapping[str, int], mixing: bool = True) -> float:
        return 2.0 * self.num_weights * lengths.get(PATCHES, 0) / lengths[TEXT]


def llava_blocks(config: Any, env: Env) -> Sequence[BlockMaker]:
    bias = "qkv" if config.text_family == "qwen2" else "all" if config.attention_bias else "none"
    layer = partial(DecoderLayer, make_attention=partial(attention, bias=bias))
    decoder = decoder_blocks(config, env, layer)
    tower = tower_blocks(config.vision, env, config.tower_layers, config.initializer_range)
    return [*tower, lambda made: LlavaEmbedding(config, env), *decoder[1:]]

"""Blocks of Gemma 3 with images: SigLIP's tower, its last norm, features averaged over squares of patches and
projected, which take the places of image tokens, and the text model's layers, in one chain.

    embedding of patches ─▶ tower's layers ──hidden (patches)──▶ projector and embedding of the text ──hidden──▶ decoder
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from phalanx.models.decoder import DecoderEmbedding, SandwichLayer, decoder_blocks, dense_mlp, head_norm_attention
from phalanx.models.family import BlockMaker
from phalanx.models.vision_tower import TOWER, Unread, head_shapes, tower_blocks
from phalanx.nn.attention import Attention
from phalanx.nn.env import Env
from phalanx.nn.initial import Normal
from phalanx.nn.linear import UnadaptedColumnLinear
from phalanx.nn.mlp import GeGLU
from phalanx.nn.module import OutputRows
from phalanx.nn.norm import LayerNorm, OffsetRMSNorm
from phalanx.nn.units import Features
from phalanx.ops.attention.kind import AttentionKind
from phalanx.sequence.batch import TEXT, Batch
from phalanx.sequence.patches import PATCHES
from phalanx.sequence.streams import HIDDEN, Border, StreamSpec

PROJECTOR = "multi_modal_projector"


class Gemma3Embedding(DecoderEmbedding):
    """The text's embedding, with features of images where their tokens are: the tower's last norm, means over squares,
    a norm and a matrix, of the patches of this rank's images."""

    def __init__(self, config: Any, env: Env):
        super().__init__(config, env)
        own, vision, std = env.whole(), config.vision, config.initializer_range
        self.last = LayerNorm(own, f"{TOWER}.post_layernorm", vision.hidden_size, vision.layer_norm_eps)
        self.norm = OffsetRMSNorm(own, f"{PROJECTOR}.mm_soft_emb_norm", vision.hidden_size, vision.layer_norm_eps)
        rows = [OutputRows(f"{PROJECTOR}.mm_input_projection_weight", config.hidden_size, 0, config.hidden_size)]
        self.project = UnadaptedColumnLinear(own, rows, vision.hidden_size, Normal(std), transposed=True)
        self.unread = Unread(own, head_shapes(vision), std) if vision.pooling_head else None
        self.features, self.width = Features(PATCHES, config.image_token_id), config.hidden_size
        self.joined = config.patch_form.joined

    def streams(self, given: Border) -> Border:
        return (StreamSpec(HIDDEN, self.width),)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if batch.beside[PATCHES].idle:
            return super().forward(x, batch)
        means = self.last(x).unflatten(0, (-1, self.joined)).mean(1)
        return self.features.put(super().forward(x, batch), self.project(self.norm(means)), batch, self.env)

    def flops_per_token(self, lengths: Mapping[str, int], mixing: bool = True) -> float:
        return 2.0 * self.project.weight.numel() * lengths.get(PATCHES, 0) / self.joined / lengths[TEXT]


def image_attention(config: Any, env: Env, layer: int) -> Attention:
    """As the text model's, but the tokens of an image read each other."""
    kind = AttentionKind(
        window=config.window(layer), together=config.image_token_id, scale=config.query_pre_attn_scalar**-0.5
    )
    return head_norm_attention(config, env, layer, kind=kind)


def gemma3_blocks(config: Any, env: Env) -> Sequence[BlockMaker]:
    mlp = partial(dense_mlp, mlp=GeGLU)
    layer = partial(SandwichLayer, make_attention=image_attention, make_mlp=mlp)
    decoder = decoder_blocks(config, env, layer)
    tower = tower_blocks(config.vision, env, config.vision.num_hidden_layers, config.initializer_range)
    return [*tower, lambda made: Gemma3Embedding(config, env), *decoder[1:]]

"""Blocks of Qwen2.5-VL, Qwen3-VL and Qwen3.5: a vision tower whose squares of patches become features, and a decoder
that has them in place of image tokens, in one chain. Qwen3-VL's first layers of the text also get what some layers of
the tower have made (DeepStack), which travels beside the hidden states until then.

    patches ─▶ tower's layers ──hidden, deep 0, deep 1──▶ merger and embedding of the text ──hidden, deep 0, deep 1──▶
    layer 0 ──hidden, deep 1──▶ layer 1 ──hidden──▶ layer 2 ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.models.decoder import (
    DecoderEmbedding,
    DecoderLayer,
    MakeLayer,
    attention,
    decoder_blocks,
    head_norm_attention,
)
from phalanx.models.family import BlockMaker
from phalanx.models.vision_tower import whole_spec
from phalanx.nn.attention import Attention, AttentionSpec
from phalanx.nn.env import Env
from phalanx.nn.initial import ZEROS, Normal
from phalanx.nn.linear import ColumnLinear, RowLinear
from phalanx.nn.mlp import GeluMLP, SwiGLU
from phalanx.nn.module import Block, Module, OutputRows
from phalanx.nn.norm import LayerNorm, RMSNorm
from phalanx.nn.units import Features, UnitRows
from phalanx.ops.attention.kind import AttentionKind
from phalanx.ops.dense.activation import gelu
from phalanx.ops.dense.embedding import learned_positions
from phalanx.ops.dense.patches import patch_embedding
from phalanx.ops.dense.rope_scaling import Rotation
from phalanx.sequence.batch import TEXT, Batch, PerBatch
from phalanx.sequence.patches import COLUMN, COLUMNS, PATCHES, ROW, ROWS, WINDOW, PatchForm
from phalanx.sequence.streams import HIDDEN, Border, Streams, StreamSpec

EPS = 1e-6
WINDOWS = PerBatch[Batch]()
TAPS = PerBatch[tuple[Tensor, Tensor]]()


def deep(number: int) -> str:
    """The stream of features that are added after this layer of the text."""
    return f"deep {number}"


def coordinates_of(batch: Batch) -> Tensor:
    """(rows, AXES) of this rank's patches."""
    at = batch.beside[PATCHES].coordinates
    if at is None:
        raise TypeError("the batch has no patches")
    return at


def in_windows(patches: Batch, form: PatchForm) -> Batch:
    """The same patches with a document for each window. Rows of an image are sorted by window; padding has documents as
    long as a window."""
    return WINDOWS.of(patches, lambda: _in_windows(patches, form))


def _in_windows(patches: Batch, form: PatchForm) -> Batch:
    documents, at, real = patches.documents, patches.coordinates, patches.real
    if documents is None or at is None or real is None or form.window is None:
        raise TypeError("the batch has no patches with windows")
    pairs = torch.stack((documents, at[:, WINDOW]), 1)
    first = (pairs != pairs.roll(1, 0)).any(1)
    first[:1] = True
    rows, size = len(first), form.window**2
    first |= (real == 0) & (torch.arange(rows, device=first.device) % size == 0)
    # Known without reading from the device.
    most = min(form.windows(rows) + patches.room_for_documents + -(-rows // size), rows)
    return replace(patches, documents=first.cumsum(0) - 1, most_documents=most, longest_document=size, _made={})


class QwenPatchEmbedding(Block):
    """Patches; in Qwen3-VL with a bias, and learned positions that are interpolated in both directions."""

    def __init__(self, config: Any, env: Env, base: str, learned: bool):
        super().__init__(env.whole())
        v, std, at = config.vision, config.initializer_range, f"{base}patch_embed.proj"
        shape = (v.hidden_size, 3, v.temporal_patch_size, v.patch_size, v.patch_size)
        self.patch = self.param(whole_spec(f"{at}.weight", shape, Normal(std)))
        self.bias = self.param(whole_spec(f"{at}.bias", (v.hidden_size,), ZEROS, "bias")) if learned else None
        self.width, self.side = v.hidden_size, v.position_side if learned else 0
        table = (self.side**2, v.hidden_size)
        name = f"{base}pos_embed.weight"
        self.positions = self.param(whole_spec(name, table, Normal(std))) if learned else None
        self.num_weights = self.patch.numel()

    def streams(self, given: Border) -> Border:
        return (StreamSpec(HIDDEN, self.width, UnitRows(PATCHES)),)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        patches = batch.beside[PATCHES]
        if patches.values is None:
            raise TypeError("the batch has no patches")
        x = patch_embedding(patches.values, self.patch, self.bias)
        if self.positions is None:
            return x
        at, weights = TAPS.of(batch, lambda: taps(coordinates_of(batch), self.side))
        found = learned_positions(at.flatten(), self.positions).unflatten(0, at.shape)
        return x + (found * weights.to(x.dtype).unsqueeze(-1)).sum(1)

    def flops_per_token(self, lengths: Mapping[str, int], mixing: bool = True) -> float:
        return 2.0 * self.num_weights * lengths.get(PATCHES, 0) / lengths[TEXT]


def taps(at: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """(N, 4) which learned positions of a square of side x side each patch lies between, and float64 how much it has of
    each: an image's corners lie on the square's."""
    found = []
    for index, size in ((at[:, ROW], at[:, ROWS]), (at[:, COLUMN], at[:, COLUMNS])):
        place = index.double() * (side - 1) / (size - 1).clamp(min=1)
        low = place.floor()
        part = place - low
        pair = torch.stack((low, low + 1), 1).long().clamp(0, side - 1)
        found.append((pair, torch.stack((1 - part, part), 1)))
    (rows, by_row), (columns, by_column) = found
    index = rows.unsqueeze(2) * side + columns.unsqueeze(1)
    return index.flatten(1), (by_row.unsqueeze(2) * by_column.unsqueeze(1)).flatten(1)


class Merger(Module):
    """Squares of patches -> features of the text: a norm of each patch, or of all of a square, and two linears.

    names: of the norm and of the two linears"""

    def __init__(self, config: Any, env: Env, names: tuple[str, str, str], layer_norm: bool, of_square: bool = False):
        super().__init__(env)
        v, init = config.vision, Normal(config.initializer_range)
        self.merged, self.of_square = v.merged_size, of_square
        width = self.merged if of_square else v.hidden_size
        self.norm = (LayerNorm if layer_norm else RMSNorm)(env, names[0], width, EPS)
        rows = [OutputRows(f"{names[1]}.weight", self.merged, 0, self.merged)]
        self.up = ColumnLinear(env, rows, self.merged, init, bias=True)
        name, out = f"{names[2]}.weight", config.hidden_size
        self.down = RowLinear(env, name, out, self.merged, (0, self.merged), init, bias=True)
        self.out, self.num_weights = out, self.merged * (self.merged + out)

    def nothing(self, x: Tensor) -> Tensor:
        """As many features, of rows that nobody reads: zeros."""
        return x.new_zeros(x.numel() // self.merged, self.out)

    def forward(self, x: Tensor) -> Tensor:
        """x (rows, D of the tower) -> (rows / joined, D of the text)."""
        square = x.reshape(-1, self.merged)
        normed = self.norm(square) if self.of_square else self.norm(x).reshape(-1, self.merged)
        recompute = self.env.recompute
        return self.down(recompute.op("activation", partial(gelu, exact=True), recompute.op("up", self.up, normed)))


class QwenVisionLayer(Block):
    """Attention in an image or in windows of it, rotated by rows and columns, and an MLP, each after a norm.

    merger: makes features that are added after layer `number` of the text; None: nothing is"""

    works_on = PATCHES

    def __init__(self, config: Any, env: Env, base: str, layer: int, norm: type[LayerNorm] | type[RMSNorm]):
        super().__init__(env.whole())
        v, at, std = config.vision, f"{base}blocks.{layer}", config.initializer_range
        width, head_dim, qkv = v.hidden_size, v.head_dim, f"{at}.attn.qkv.weight"
        axes = (ROW,) * (head_dim // 4) + (COLUMN,) * (head_dim // 4)
        spec = AttentionSpec(
            names=(qkv, qkv, qkv, f"{at}.attn.proj.weight"),
            width=width,
            heads=v.num_attention_heads,
            kv_heads=v.num_attention_heads,
            head_dim=head_dim,
            std=std,
            rotation=Rotation(head_dim, 10000.0, axes=axes, axial=True),
            bias="all",
            layer=layer,
            kind=AttentionKind(direction="both"),
        )
        self.norm1, self.norm2 = (norm(self.env, f"{at}.norm{i}", width, EPS) for i in (1, 2))
        self.attention = Attention(self.env, spec)
        self.mlp = self.make_mlp(config, at, std)
        self.windowed, self.form = False, config.patch_form
        self.rows_of_window, self.rows_of_image = (v.window or 0) ** 2, config.patch_form.largest
        self.merger: Merger | None = None
        self.number, self.out, self.joined = 0, config.hidden_size, v.spatial_merge_size**2

    def make_mlp(self, config: Any, at: str, std: float) -> Module:
        v, names = config.vision, tuple(f"{at}.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
        return SwiGLU(self.env, names, v.hidden_size, v.intermediate_size, std, True)  # type: ignore[arg-type]

    def forward(self, x: Tensor | Streams, batch: Batch) -> Tensor | Streams:
        if isinstance(x, Tensor):
            return self._layer(x, batch)
        if self.is_idle(batch):
            more = {} if self.merger is None else {deep(self.number): self.merger.nothing(x[HIDDEN])}
            return {**x, **more}
        hidden = self._layer(x[HIDDEN], batch)
        more = {} if self.merger is None else {deep(self.number): self.merger(hidden)}
        return {**x, HIDDEN: hidden, **more}

    def _layer(self, x: Tensor, batch: Batch) -> Tensor:
        patches = batch.beside[PATCHES]
        x, normed = self.norm1.add(x)
        x, normed = self.norm2.add(
            x, self.attention(normed, in_windows(patches, self.form) if self.windowed else patches)
        )
        return x + self.mlp(normed)

    def flops_per_token(self, lengths: Mapping[str, int], mixing: bool = True) -> float:
        rows = lengths.get(PATCHES, 0)
        length = min(rows, self.rows_of_window if self.windowed else self.rows_of_image)
        own = self.attention.flops(length if mixing else 0) + self.mlp.flops(length)
        own += 0.0 if self.merger is None else 2.0 * self.merger.num_weights / self.joined
        return own * rows / lengths[TEXT]


class Qwen3VisionLayer(QwenVisionLayer):
    """`number`: of the features that it makes for DeepStack; None: it makes none."""

    def __init__(self, config: Any, env: Env, base: str, layer: int, number: int | None):
        super().__init__(config, env, base, layer, LayerNorm)
        if number is not None:
            at = f"{base}deepstack_merger_list.{number}"
            names = (f"{at}.norm", f"{at}.linear_fc1", f"{at}.linear_fc2")
            self.merger, self.number = Merger(config, self.env, names, True, of_square=True), number
            self.takes_streams = True

    def make_mlp(self, config: Any, at: str, std: float) -> Module:
        v, names = config.vision, (f"{at}.mlp.linear_fc1", f"{at}.mlp.linear_fc2")
        return GeluMLP(self.env, names, v.hidden_size, v.intermediate_size, std, std, "gelu_new", transposed=False)

    def streams(self, given: Border) -> Border:
        if self.merger is None:
            return given
        return (*given, StreamSpec(deep(self.number), self.out, UnitRows(PATCHES, self.joined)))


class QwenVLEmbedding(DecoderEmbedding):
    """The text's embedding, with features of images where their tokens are."""

    def __init__(self, config: Any, env: Env, names: tuple[str, str, str], layer_norm: bool):
        super().__init__(config, env)
        self.merger = Merger(config, env.whole(), names, layer_norm)
        self.features, self.width = Features(PATCHES, config.image_token_id), config.hidden_size
        self.joined = config.vision.spatial_merge_size**2

    def streams(self, given: Border) -> Border:
        return tuple(StreamSpec(HIDDEN, self.width) if spec.name == HIDDEN else spec for spec in given)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if batch.beside[PATCHES].idle:
            return super().forward(x, batch)
        return self.features.put(super().forward(x, batch), self.merger(x), batch, self.env)

    def flops_per_token(self, lengths: Mapping[str, int], mixing: bool = True) -> float:
        return 2.0 * self.merger.num_weights * lengths.get(PATCHES, 0) / self.joined / lengths[TEXT]


class DeepStackLayer(DecoderLayer):
    """A layer of the text after which features of a layer of the tower are added."""

    takes_streams = True

    def __init__(self, config: Any, env: Env, layer: int):
        super().__init__(config, env, layer, make_attention=head_norm_attention)
        self.name, self.features = deep(layer), Features(PATCHES, config.image_token_id)

    def streams(self, given: Border) -> Border:
        return tuple(spec for spec in given if spec.name != self.name)

    def forward(self, streams: Streams, batch: Batch) -> Streams:  # type: ignore[override]
        x = super().forward(streams[HIDDEN], batch)
        rest = {name: each for name, each in streams.items() if name not in (HIDDEN, self.name)}
        if batch.beside[PATCHES].idle:
            return {HIDDEN: x, **rest}
        return {HIDDEN: self.features.add(x, streams[self.name], batch, self.env), **rest}


def qwen2_5_vl_blocks(config: Any, env: Env) -> Sequence[BlockMaker]:
    base = "visual."

    def layer(number: int, made: Mapping[str, Any]) -> Block:
        block = QwenVisionLayer(config, env, base, number, RMSNorm)
        block.windowed = number not in config.vision.fullatt_block_indexes
        return block

    names = (f"{base}merger.ln_q", f"{base}merger.mlp.0", f"{base}merger.mlp.2")
    decoder = decoder_blocks(config, env, partial(DecoderLayer, make_attention=partial(attention, bias="qkv")))
    return [
        lambda made: QwenPatchEmbedding(config, env, base, learned=False),
        *(partial(layer, number) for number in range(config.vision.num_hidden_layers)),
        lambda made: QwenVLEmbedding(config, env, names, layer_norm=False),
        *decoder[1:],
    ]


def qwen3_vl_blocks(config: Any, env: Env) -> Sequence[BlockMaker]:
    stacked = config.vision.deepstack_visual_indexes

    def text_layer(config: Any, env: Env, number: int) -> Block:
        if number < len(stacked):
            return DeepStackLayer(config, env, number)
        return DecoderLayer(config, env, number, make_attention=head_norm_attention)

    return learned_tower_blocks(config, env, text_layer, stacked)


def learned_tower_blocks(
    config: Any, env: Env, text_layer: MakeLayer, stacked: Sequence[int] = ()
) -> Sequence[BlockMaker]:
    """A tower with learned positions before a decoder of such layers. stacked: layers of the tower whose output layers
    of the text also take."""
    base = "model.visual."

    def layer(number: int, made: Mapping[str, Any]) -> Block:
        place = stacked.index(number) if number in stacked else None
        return Qwen3VisionLayer(config, env, base, number, place)

    at = f"{base}merger"
    names = (f"{at}.norm", f"{at}.linear_fc1", f"{at}.linear_fc2")
    return [
        lambda made: QwenPatchEmbedding(config, env, base, learned=True),
        *(partial(layer, number) for number in range(config.vision.num_hidden_layers)),
        lambda made: QwenVLEmbedding(config, env, names, layer_norm=True),
        *decoder_blocks(config, env, text_layer)[1:],
    ]

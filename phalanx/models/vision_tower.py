"""Blocks of CLIP's and SigLIP's vision towers. Every rank of tp holds them whole and runs them on images of its own
(sequence.units), so nothing is sent between ranks before features are read.

    embedding ──hidden──▶ layer ──hidden──▶ layer ──hidden──▶ what reads its features
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.layout.box import Box
from phalanx.layout.param import Init, ParamSpec, Piece, Role
from phalanx.models.vision_config import VisionConfig
from phalanx.nn.attention import Attention, AttentionSpec
from phalanx.nn.env import Env
from phalanx.nn.initial import ZEROS, Normal
from phalanx.nn.mlp import GeluMLP
from phalanx.nn.module import Block, Module
from phalanx.nn.norm import LayerNorm
from phalanx.nn.units import UnitRows
from phalanx.ops.attention.kind import AttentionKind
from phalanx.ops.dense.embedding import learned_positions
from phalanx.ops.dense.patches import patch_embedding
from phalanx.sequence.batch import TEXT, Batch
from phalanx.sequence.patches import COLUMN, COLUMNS, PATCHES, ROW
from phalanx.sequence.streams import HIDDEN, Border, StreamSpec

TOWER = "vision_tower"
ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_new"}


def whole_spec(
    name: str, shape: Sequence[int], init: Init, role: Role = "embedding", frozen: bool = False
) -> ParamSpec:
    """A tensor of any shape, stored as its file has it."""
    shape = tuple(shape)
    decay = role not in ("bias", "norm")
    piece = Piece(name, shape, Box.full(shape), tuple(slice(0, n) for n in shape), init, decay)
    return ParamSpec(shape, (piece,), role=role, frozen=frozen)


class Unread(Module):
    """Tensors of a published file that nothing computes with, such as layers above those whose features are read. They
    are kept, frozen, so that what is exported has them."""

    def __init__(self, env: Env, shapes: Mapping[str, Sequence[int]], std: float):
        super().__init__(env)
        for number, (name, shape) in enumerate(shapes.items()):
            role: Role = "linear" if len(shape) > 1 else "bias" if name.endswith("bias") else "norm"
            spec = whole_spec(name, shape, Normal(std), role, frozen=True)
            self.register_parameter(f"tensor{number}", self.param(spec))


class VisionEmbedding(Block):
    """Patches, CLIP's class token, and learned positions."""

    def __init__(self, vision: VisionConfig, env: Env, std: float):
        super().__init__(env.whole())
        own, at, width = self.env, f"{TOWER}.embeddings", vision.hidden_size
        clip, self.width = vision.tower == "clip", width
        shape = (width, 3, vision.patch_size, vision.patch_size)
        self.patch = self.param(whole_spec(f"{at}.patch_embedding.weight", shape, Normal(std)))
        bias = whole_spec(f"{at}.patch_embedding.bias", (width,), ZEROS, "bias")
        self.bias = None if clip else self.param(bias)
        first = whole_spec(f"{at}.class_embedding", (width,), Normal(std), "bias")
        self.first = self.param(first) if clip else None
        table = whole_spec(f"{at}.position_embedding.weight", (vision.positions, width), Normal(std))
        self.positions = self.param(table)
        self.norm = LayerNorm(own, f"{TOWER}.pre_layrnorm", width, vision.layer_norm_eps) if clip else None
        self.num_weights = self.patch.numel()

    def streams(self, given: Border) -> Border:
        return (StreamSpec(HIDDEN, self.width, UnitRows(PATCHES)),)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        patches = batch.beside[PATCHES]
        values, at = patches.values, patches.coordinates
        if values is None or at is None:
            raise TypeError("the batch has no patches")
        number = at[:, ROW] * at[:, COLUMNS] + at[:, COLUMN]
        x = patch_embedding(values, self.patch, self.bias)
        if self.first is not None:
            classes = at[:, ROW] < 0
            x = torch.where(classes.unsqueeze(1), self.first, x)
            number = (number + 1).where(~classes, 0)
        x = x + learned_positions(number, self.positions)
        return x if self.norm is None else self.norm(x)

    def flops_per_token(self, lengths: Mapping[str, int], mixing: bool = True) -> float:
        return 2.0 * self.num_weights * lengths.get(PATCHES, 0) / lengths[TEXT]


class VisionLayer(Block):
    """Attention among all patches of an image, and an MLP, both after a LayerNorm."""

    works_on = PATCHES

    def __init__(self, vision: VisionConfig, env: Env, layer: int, std: float):
        super().__init__(env.whole())
        at, width = f"{TOWER}.encoder.layers.{layer}", vision.hidden_size
        q, k, v, out = (f"{at}.self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "out_proj"))
        spec = AttentionSpec(
            names=(q, k, v, out),
            width=width,
            heads=vision.num_attention_heads,
            kv_heads=vision.num_attention_heads,
            head_dim=width // vision.num_attention_heads,
            std=std,
            bias="all",
            layer=layer,
            kind=AttentionKind(direction="both"),
        )
        norm = partial(LayerNorm, self.env, width=width, eps=vision.layer_norm_eps)
        self.norm1 = norm(f"{at}.layer_norm1")
        self.attention = Attention(self.env, spec)
        self.norm2 = norm(f"{at}.layer_norm2")
        names, activation = (f"{at}.mlp.fc1", f"{at}.mlp.fc2"), ACTIVATIONS[vision.hidden_act]
        self.mlp = GeluMLP(self.env, names, width, vision.intermediate_size, std, std, activation, transposed=False)
        self.length = vision.positions

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x, normed = self.norm1.add(x)
        x, normed = self.norm2.add(x, self.attention(normed, batch.beside[PATCHES]))
        return x + self.mlp(normed)

    def flops_per_token(self, lengths: Mapping[str, int], mixing: bool = True) -> float:
        return self.flops(self.length if mixing else 0) * lengths.get(PATCHES, 0) / lengths[TEXT]


def layer_shapes(vision: VisionConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer in a file."""
    at, width, inner = f"{TOWER}.encoder.layers.{layer}", vision.hidden_size, vision.intermediate_size
    found: dict[str, tuple[int, ...]] = {}
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        found |= linear_shapes(f"{at}.self_attn.{name}", width, width)
    for name in ("layer_norm1", "layer_norm2"):
        found |= norm_shapes(f"{at}.{name}", width)
    return found | linear_shapes(f"{at}.mlp.fc1", inner, width) | linear_shapes(f"{at}.mlp.fc2", width, inner)


def linear_shapes(at: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{at}.weight": (outputs, inputs), f"{at}.bias": (outputs,)}


def norm_shapes(at: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{at}.weight": (width,), f"{at}.bias": (width,)}


def unread_shapes(vision: VisionConfig, layers: int) -> dict[str, tuple[int, ...]]:
    """The tensors above the first `layers` layers: further layers, the last norm, SigLIP's pooling head."""
    width, found = vision.hidden_size, dict[str, tuple[int, ...]]()
    for layer in range(layers, vision.num_hidden_layers):
        found |= layer_shapes(vision, layer)
    found |= norm_shapes(f"{TOWER}.post_layernorm", width)
    return found | head_shapes(vision) if vision.pooling_head else found


def head_shapes(vision: VisionConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of SigLIP's pooling head."""
    width, found = vision.hidden_size, dict[str, tuple[int, ...]]()
    at, inner = f"{TOWER}.head", vision.intermediate_size
    found |= {f"{at}.probe": (1, 1, width)}
    found |= {f"{at}.attention.in_proj_weight": (3 * width, width), f"{at}.attention.in_proj_bias": (3 * width,)}
    found |= linear_shapes(f"{at}.attention.out_proj", width, width) | norm_shapes(f"{at}.layernorm", width)
    return found | linear_shapes(f"{at}.mlp.fc1", inner, width) | linear_shapes(f"{at}.mlp.fc2", width, inner)


def tower_blocks(vision: VisionConfig, env: Env, layers: int, std: float) -> list[Any]:
    """Makers of the embedding and of the first `layers` layers."""

    def make_embedding(made: Mapping[str, Any]) -> Block:
        return VisionEmbedding(vision, env, std)

    def make_layer(layer: int, made: Mapping[str, Any]) -> Block:
        return VisionLayer(vision, env, layer, std)

    return [make_embedding, *(partial(make_layer, layer) for layer in range(layers))]

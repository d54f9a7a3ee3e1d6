"""Blocks of Gemma 4's text model: layers with inputs of their own, layers that read the keys and values of earlier
ones, experts beside the MLP. What layers share travels beside the hidden states:

    embedding ──hidden, inputs of all layers──▶ layer ──hidden, inputs of the rest, keys that it lends──▶ layer ... head

`config` has the fields of models/gemma4_text.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.models.decoder import (
    DecoderEmbedding,
    ScaledLayer,
    attention_spec,
    balance_of,
    decoder_blocks,
    norm,
    router_of,
)
from phalanx.models.family import BlockMaker
from phalanx.nn.attention import Attention, AttentionSpec
from phalanx.nn.embedding import Embedding
from phalanx.nn.env import Env
from phalanx.nn.initial import ONES, Normal
from phalanx.nn.linear import ReplicatedLinear
from phalanx.nn.mlp import GeGLU
from phalanx.nn.module import Module, OutputRows
from phalanx.nn.moe import HalvedNames, MoE
from phalanx.nn.norm import RMSNorm
from phalanx.nn.shared_keys import BorrowingAttention, flat, lend, lent_streams
from phalanx.ops.attention.kind import AttentionKind
from phalanx.ops.dense.activation import gelu
from phalanx.ops.dense.gate import GEGLU
from phalanx.ops.dense.norm import NORM, rms_norm
from phalanx.sequence.batch import Batch
from phalanx.sequence.streams import HIDDEN, Border, Streams, StreamSpec

INPUTS = "layer_inputs"


@dataclass(frozen=True)
class InputRows:
    """Rows of the inputs of so many layers: those of a layer's tokens, then those of the next layer."""

    layers: int

    def __call__(self, batch: Batch, tp: int) -> int:
        return self.layers * batch.num_tokens // tp


def whole_linear(env: Env, name: str, inputs: int, outputs: int, std: float) -> ReplicatedLinear:
    return ReplicatedLinear(env, [OutputRows(name, outputs, 0, outputs, env.everyone)], inputs, Normal(std))


class LayerInputs(Module):
    """Inputs of each layer of its own: of a token's id, and of its embedding x.

    (norm(project(x) / sqrt(D)) + table[id] * sqrt(P)) / sqrt(2), with P features for each layer
    """

    def __init__(self, config: Any, env: Env):
        super().__init__(env)
        c, self.layers, self.width = config, config.num_hidden_layers, config.hidden_size_per_layer_input
        name, size = f"{c.base}embed_tokens_per_layer.weight", self.layers * self.width
        self.table = Embedding(env, name, c.vocab_size_per_layer_input or c.vocab_size, size, c.initializer_range)
        name = f"{c.base}per_layer_model_projection.weight"
        self.project = whole_linear(env, name, c.hidden_size, size, c.initializer_range)
        self.norm = RMSNorm(env, f"{c.base}per_layer_projection_norm", self.width, c.rms_norm_eps)
        self.num_weights, self.narrower = c.hidden_size * size, c.hidden_size**-0.5
        # rounded to the dtype of the weights, as published models are
        self.scale = float(torch.tensor(self.width**0.5, dtype=env.weights.dtype))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x (T / tp, D) -> (layers * T / tp, P): a layer's tokens, then those of the next one."""
        projected = self.norm((self.project(x) * self.narrower).view(-1, self.width)).view(len(x), self.layers, -1)
        stored = self.table(batch.tokens).view_as(projected) * self.scale
        return ((projected + stored) * 2**-0.5).transpose(0, 1).flatten(0, 1)

    def flops(self, seq_length: int) -> float:
        return 2.0 * self.num_weights


class Gemma4Embedding(DecoderEmbedding):
    """With the inputs of all layers beside it."""

    takes_streams = True

    def __init__(self, config: Any, env: Env):
        super().__init__(config, env)
        self.inputs, self.width = LayerInputs(config, env), config.hidden_size

    def streams(self, given: Border) -> Border:
        return StreamSpec(HIDDEN, self.width), StreamSpec(INPUTS, self.inputs.width, InputRows(self.inputs.layers))

    def forward(self, streams: Streams, batch: Batch) -> Streams:  # type: ignore[override]
        x = super().forward(streams[HIDDEN], batch)
        return {HIDDEN: x, INPUTS: self.inputs(x, batch)}


class OwnInput(Module):
    """What a layer makes of its own input (T / tp, P): norm(project(gelu(gate x) * input))."""

    def __init__(self, config: Any, env: Env, layer: int):
        super().__init__(env)
        c, at, width = config, f"{config.base}layers.{layer}", config.hidden_size_per_layer_input
        self.gate = whole_linear(env, f"{at}.per_layer_input_gate.weight", c.hidden_size, width, c.initializer_range)
        self.project = whole_linear(env, f"{at}.per_layer_projection.weight", width, c.hidden_size, c.initializer_range)
        self.norm = norm(c, env, f"{at}.post_per_layer_input_norm")
        self.num_weights = 2 * c.hidden_size * width

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        def gated(x: Tensor, own: Tensor) -> Tensor:
            return gelu(x, False) * own

        return self.norm(self.project(self.env.recompute.op("activation", gated, self.gate(x), own)))

    def flops(self, seq_length: int) -> float:
        return 2.0 * self.num_weights


class ExpertsBeside(Module):
    """Experts beside a layer's MLP. Both read the same hidden states, each through a norm of its own; so does the
    router, through one whose weight is its `scale`."""

    def __init__(self, config: Any, env: Env, layer: int):
        super().__init__(env)
        c, at = config, f"{config.base}layers.{layer}"
        stacks = f"{at}.experts.gate_up_proj", f"{at}.experts.down_proj"
        names = HalvedNames(
            router=f"{at}.router.proj.weight", gate_up=stacks[0], down=stacks[1], transposed=False, activation=GEGLU
        )
        sizes = c.hidden_size, c.moe_intermediate_size, c.initializer_range
        factors = f"{at}.router.per_expert_scale"
        self.moe = MoE(env, names, router_of(c), *sizes, balance_of(c), layer=layer, factors=factors)
        self.before, self.after = (norm(c, env, f"{at}.{n}_feedforward_layernorm_2") for n in ("pre", "post"))
        self.scale = self.replicated(f"{at}.router.scale", c.hidden_size, ONES, "norm")
        self.eps, self.narrower = c.rms_norm_eps, c.hidden_size**-0.5
        self.beside = norm(c, env, f"{at}.post_feedforward_layernorm_1")

    def forward(self, x: Tensor, dense: Tensor, batch: Batch) -> Tensor:
        """The sum of what experts make of x (T / tp, D), and of `dense`, what the MLP has made of it."""
        scored = rms_norm(x, self.scale, self.eps, self.env.kernels_for(NORM)) * self.narrower
        return self.beside(dense) + self.after(self.moe(self.before(x), batch, scored))


class Gemma4Layer(ScaledLayer):
    takes_streams = True

    def __init__(self, config: Any, env: Env, layer: int):
        super().__init__(config, env, layer, make_attention=attention, make_mlp=mlp)
        kind = config.types[layer]
        self.shared = f"{kind}_keys", f"{kind}_values"
        self.spec = spec_of(config, layer)
        self.lends, self.last = config.lends(layer), layer == config.last_borrower(kind)
        self.experts = ExpertsBeside(config, env, layer) if config.num_experts else None
        self.own_input = OwnInput(config, env, layer) if config.hidden_size_per_layer_input else None
        self.after = config.num_hidden_layers - layer - 1  # so many layers follow

    def streams(self, given: Border) -> Border:
        found = [spec for spec in given if not (self.last and spec.name in self.shared)]
        found = [replace(spec, rows=InputRows(self.after)) if spec.name == INPUTS else spec for spec in found]
        lent = lent_streams(self.shared, self.spec) if self.lends else ()
        return (*(spec for spec in found if self.after or spec.name != INPUTS), *lent)

    def forward(self, streams: Streams, batch: Batch) -> Streams:  # type: ignore[override]
        rest = dict(streams)
        x, normed = self.norm1.add(rest.pop(HIDDEN), reader=self.attention)
        delta = self._attend(normed, rest, batch)
        x, normed = self.norm2.add(x, self.after1(delta), reader=self.mlp)
        made = self.mlp(normed, batch)
        x = x + self.after2(made if self.experts is None else self.experts(x, made, batch))
        if self.own_input is not None:
            x = x + self.own_input(x, self._own(rest, len(x)))
        return {HIDDEN: x * self.scalar.to(x.dtype), **rest}

    def _attend(self, normed: Tensor, rest: Streams, batch: Batch) -> Tensor:
        """Takes keys and values from the streams, or adds those that it lends."""
        if isinstance(self.attention, BorrowingAttention):
            delta: Tensor = self.attention(normed, *(rest[name] for name in self.shared), batch)
            if self.last:
                for name in self.shared:
                    del rest[name]
            return delta
        own: Attention = self.attention  # type: ignore[assignment]
        if not self.lends:
            return own(normed, batch)
        delta, *lent = own.with_keys(normed, batch)
        rest.update(zip(self.shared, map(flat, lent)))
        return delta

    def _own(self, rest: Streams, tokens: int) -> Tensor:
        """Takes this layer's input from the streams: their first rows, as a view."""
        own, *after = rest.pop(INPUTS).split([tokens, self.after * tokens])
        if self.after:
            rest[INPUTS] = after[0]
        return own


def attention(config: Any, env: Env, layer: int) -> Attention | BorrowingAttention:
    spec, lender = spec_of(config, layer), config.lender(layer)
    if lender is not None:
        return BorrowingAttention(env, spec, f"layer {lender}")
    made = Attention(env, spec)
    return lend(made, f"layer {layer}") if config.lends(layer) else made


def spec_of(config: Any, layer: int) -> AttentionSpec:
    spec, kind, at = attention_spec(config, layer), config.types[layer], f"{config.base}layers.{layer}.self_attn"
    spec = replace(
        spec,
        kv_heads=config.kv_heads_of(kind),
        head_norm=(f"{at}.q_norm", f"{at}.k_norm", config.rms_norm_eps),
        value_norm=config.rms_norm_eps,
        kind=AttentionKind(window=config.window(layer), scale=1.0),
    )
    if kind != "full_attention":
        return spec
    q, k, v, out = spec.names
    return replace(spec, head_dim=config.whole_width, names=(q, k, k if config.attention_k_eq_v else v, out))


def mlp(config: Any, env: Env, layer: int) -> GeGLU:
    at = f"{config.base}layers.{layer}.mlp"
    gate, up, down = (f"{at}.{name}_proj.weight" for name in ("gate", "up", "down"))
    return GeGLU(env, (gate, up, down), config.hidden_size, config.mlp_width(layer), config.initializer_range)


def gemma4_blocks(config: Any, env: Env) -> Sequence[BlockMaker]:
    def embedding(made: Mapping[str, Any]) -> DecoderEmbedding:
        return (Gemma4Embedding if config.hidden_size_per_layer_input else DecoderEmbedding)(config, env)

    return [embedding, *decoder_blocks(config, env, Gemma4Layer)[1:]]

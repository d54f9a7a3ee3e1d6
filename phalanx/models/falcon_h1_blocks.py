"""Blocks of Falcon-H1: attention and a selective scan read one norm, side by side, and an MLP follows. Numbers that are
not trained multiply what most matrices read or return.

Some of them cost nothing here: the keys' is in the scale of the scores, those of x, B and C in the weight of the
convolution, the gate's in the activation, and the MLP's output is multiplied as it is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.models.decoder import DecoderEmbedding, DecoderHead, attention, decoder_blocks, make_head, norm
from phalanx.models.family import BlockMaker
from phalanx.nn.attention import Attention
from phalanx.nn.env import Env
from phalanx.nn.mlp import SwiGLU
from phalanx.nn.module import Block
from phalanx.nn.norm import RMSNorm
from phalanx.nn.parameter import Parameter
from phalanx.nn.pooled_head import TextStates
from phalanx.nn.state_space import PartScales, StateSpace, StateSpaceSpec
from phalanx.ops.attention.kind import AttentionKind
from phalanx.ops.dense.gate import Gate
from phalanx.sequence.batch import Batch

STEPS = (0.001, 0.1, 1e-4)  # at the start of training: Mamba-2's


def scaled(x: Tensor, by: float) -> Tensor:
    return x if by == 1.0 else x * by


class ScaledEmbedding(DecoderEmbedding):
    def __init__(self, config: Any, env: Env):
        super().__init__(config, env)
        self.scale = config.embedding_multiplier


class ScaledRMSNorm(RMSNorm):
    """The last norm, times what logits are multiplied by."""

    def __init__(self, env: Env, name: str, width: int, eps: float, scale: float):
        super().__init__(env, name, width, eps)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return scaled(super().forward(x), self.scale)


class ScaledGateMLP(SwiGLU):
    """silu(scale * g) is scale * g sigmoid(scale * g): the MLP without this first factor."""

    def __init__(self, env: Env, names: tuple[str, str, str], width: int, inner: int, std: float, scale: float):
        super().__init__(env, names, width, inner, std)
        self.gate = Gate(alpha=scale)


class HybridLayer(Block):
    """With n = norm1(x): x += scan(n) + attention(n), then x += mlp(norm2(x)), with their multipliers."""

    def __init__(self, config: Any, env: Env, layer: int):
        super().__init__(env)
        c, at = config, f"{config.base}layers.{layer}"
        self.scan_in, self.scan_out = c.ssm_in_multiplier, c.ssm_out_multiplier
        self.attention_in, self.attention_out = c.attention_in_multiplier, c.attention_out_multiplier
        gate, down = c.mlp_multipliers
        self.mlp_out = gate * down
        self.norm1 = norm(c, env, f"{at}.input_layernorm")
        self.scan = scan(c, env, f"{at}.mamba")
        self.attention = keyed_attention(c, env, layer)
        self.norm2 = norm(c, env, f"{at}.pre_ff_layernorm")
        up, gated, last = (f"{at}.feed_forward.{n}_proj.weight" for n in ("up", "gate", "down"))
        sizes = c.hidden_size, c.intermediate_size, c.initializer_range
        self.mlp = ScaledGateMLP(env, (gated, up, last), *sizes, gate)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x, normed = self.norm1.add(x)
        scanned = self.scan(scaled(normed, self.scan_in), batch)
        attended = self.attention(scaled(normed, self.attention_in), batch)
        delta = torch.add(scaled(scanned, self.scan_out), attended, alpha=self.attention_out)
        x, normed = self.norm2.add(x, delta, reader=self.mlp)
        return torch.add(x, self.mlp(normed, batch), alpha=self.mlp_out)


def keyed_attention(config: Any, env: Env, layer: int) -> Attention:
    """Keys are multiplied by a number, which the scale of the scores has as well."""
    width = config.head_widths[0]
    return attention(config, env, layer, kind=AttentionKind(scale=width**-0.5 * config.key_multiplier))


def scan(config: Any, env: Env, name: str) -> StateSpace:
    c, order = config, "norm first" if config.mamba_norm_before_gate else "gate first"
    scales = PartScales(*c.ssm_multipliers)
    spec = StateSpaceSpec(
        name=name,
        width=c.hidden_size,
        heads=c.mamba_n_heads,
        head_dim=c.mamba_d_head,
        groups=c.mamba_n_groups,
        state=c.mamba_d_state,
        taps=c.mamba_d_conv,
        norm=order if c.mamba_rms_norm else None,  # type: ignore[arg-type]
        eps=c.rms_norm_eps,
        std=c.initializer_range,
        steps=STEPS,
        limits=c.time_step_limit,
        scales=None if set(scales) == {1.0} else scales,
        bias=c.mamba_proj_bias,
        out_bias=c.projectors_bias,
        conv_bias=c.mamba_conv_bias,
    )
    return StateSpace(env, spec)


def falcon_h1_blocks(config: Any, env: Env) -> Sequence[BlockMaker]:
    def last(made: Mapping[str, Parameter]) -> Block:
        name, sizes = f"{config.base}final_layernorm", (config.hidden_size, config.rms_norm_eps)
        if config.headless:
            return TextStates(env, RMSNorm(env, name, *sizes))
        head = DecoderHead(config, env, make_head(config, env, made), normed=True)
        head.norm = ScaledRMSNorm(env, name, *sizes, config.lm_head_multiplier)
        return head

    layers = decoder_blocks(config, env, HybridLayer)[1:-1]
    return [lambda made: ScaledEmbedding(config, env), *layers, last]

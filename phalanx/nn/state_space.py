"""Mamba-2's layer: one fused projection, a short convolution, the selective scan, a gated norm and the output
projection, with heads sharded over tp.

Groups of B and C are shared as key-value heads are: with fewer of them than tp ranks, several ranks hold one.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.layout.param import MatrixOutputs, ParamSpec
from phalanx.nn.attention import Heads
from phalanx.nn.env import Env
from phalanx.nn.initial import ONES, LogCount, Normal, TimeStep
from phalanx.nn.linear import ColumnLinear, RowLinear
from phalanx.nn.memory import StateSpec
from phalanx.nn.module import Module, OutputRows, bias_spec, own_states
from phalanx.nn.short_conv import conv_spec, convolve_chunks
from phalanx.ops.dense.activation import GATED, swiglu
from phalanx.ops.scan.carried import CARRIED, carried_output
from phalanx.ops.scan.context import chunks_of, states_before
from phalanx.ops.scan.gated_norm import GATED_NORM, NormGroups, Order, gated_norm
from phalanx.ops.scan.remembered import convolve_remembered, scan_remembered
from phalanx.ops.scan.scan import (
    SCAN,
    ScanInputs,
    decay_rates,
    scan,
    steps_of,
    whole_decay,
    wide_values,
)
from phalanx.ops.scan.step import CONV1D_STEP, SCAN_STEP, StepInputs
from phalanx.sequence.batch import Batch


class PartScales(NamedTuple):
    """Numbers that are not trained, one for each part of what the input projection returns."""

    gate: float
    x: float
    b: float
    c: float
    dt: float


@dataclass(frozen=True, kw_only=True)
class StateSpaceSpec:
    """Everything that defines such a layer.

    name        how the names of its tensors begin
    width       of the model
    heads       of head_dim features; groups: that share B and C; state: features of a state
    taps        of the convolution
    norm        whether the gate comes before the norm over the features of a group; None: there is only the gate
    eps         of that norm
    steps       smallest and largest step at the start, and the least that is drawn
    limits      of steps
    std         of the initial weights of the projections
    scales      what the parts of the input projection's output are multiplied by
    bias        whether the input projection has one; out_bias: the output projection; conv_bias: the convolution
    """

    name: str
    width: int
    heads: int
    head_dim: int
    groups: int
    state: int
    taps: int
    eps: float
    std: float
    steps: tuple[float, float, float] = (0.001, 0.1, 1e-4)
    limits: tuple[float, float] = (0.0, math.inf)
    norm: Order | None = "gate first"
    scales: PartScales | None = None
    bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True


@dataclass(frozen=True)
class ScanShard:
    """The features of a rank, and where they are among all: of the gate and of x those of its heads, of B and C those
    of its groups."""

    spec: StateSpaceSpec
    own: Heads

    @property
    def heads(self) -> int:
        return self.own.q1 - self.own.q0

    @property
    def groups(self) -> int:
        return self.own.k1 - self.own.k0

    @property
    def inner(self) -> int:
        return self.heads * self.spec.head_dim

    @property
    def mixed(self) -> int:
        """Features that are convolved: x, B and C."""
        return self.inner + 2 * self.groups * self.spec.state

    def of_heads(self, name: str, size: int, at: int, width: int, matrix: str = "") -> OutputRows:
        """Rows of this rank's heads in a tensor of `size` rows, where those of all heads begin at `at`; they are of the
        matrix of this name."""
        outputs = (MatrixOutputs(matrix, width, heads=width > 1),)
        return OutputRows(name, size, at + self.own.q0 * width, at + self.own.q1 * width, outputs=outputs)

    def convolved(self, name: str, size: int, at: int) -> list[OutputRows]:
        """Rows of x, B and C in a tensor of `size` rows, where they begin at `at`."""
        s, own = self.spec, self.own
        found, at = [self.of_heads(name, size, at, s.head_dim, "x")], at + s.heads * s.head_dim
        for matrix, first in (("B", at), ("C", at + s.groups * s.state)):
            rows = first + own.k0 * s.state, first + own.k1 * s.state
            outputs = (MatrixOutputs(matrix, s.state, heads=True),)
            found.append(OutputRows(name, size, *rows, own.replicas, outputs=outputs))
        return found


class StateSpace(Module):
    """x (T / tp, D) -> (T / tp, D)."""

    def __init__(self, env: Env, spec: StateSpaceSpec):
        super().__init__(env)
        env.refuse_invariance("a scan")
        s, shard = spec, ScanShard(spec, Heads.of(env, spec.heads, spec.groups))
        self.spec, self.shard = spec, shard
        inner, mixed = s.heads * s.head_dim, s.heads * s.head_dim + 2 * s.groups * s.state
        name, size, init = f"{s.name}.in_proj.weight", inner + mixed + s.heads, Normal(s.std)
        rows = [
            shard.of_heads(name, size, 0, s.head_dim, "gate"),
            *shard.convolved(name, size, inner),
            shard.of_heads(name, size, inner + mixed, 1, "dt"),
        ]
        self.in_proj = ColumnLinear(env, rows, s.width, init, bias=s.bias)
        self.conv = self.param(conv_spec(shard.convolved(f"{s.name}.conv1d.weight", mixed, 0), s.taps))
        biases = shard.convolved(f"{s.name}.conv1d.bias", mixed, 0)
        self.conv_bias = self.param(bias_spec(biases)) if s.conv_bias else None
        low, high, floor = s.steps
        inits = {
            "A_log": LogCount(),
            "D": ONES,
            "dt_bias": TimeStep(low=low, high=high, floor=floor),
        }
        vectors = {
            n: self.param(bias_spec([shard.of_heads(f"{s.name}.{n}", s.heads, 0, 1)], each))
            for n, each in inits.items()
        }
        self.a_log, self.d, self.dt_bias = vectors["A_log"], vectors["D"], vectors["dt_bias"]
        norm = bias_spec([shard.of_heads(f"{s.name}.norm.weight", inner, 0, s.head_dim)], ONES)
        self.norm = None if s.norm is None else self.param(ParamSpec(norm.shape, norm.pieces, role="norm"))
        self.groups = None if s.norm is None else _norm_groups(shard, s.norm)
        features = shard.own.q0 * s.head_dim, shard.own.q1 * s.head_dim
        self.out = RowLinear(env, f"{s.name}.out_proj.weight", s.width, inner, features, init, bias=s.out_bias)
        self.num_weights = s.width * (size + inner)
        self.keeps = StateSpec(shard.heads, s.head_dim, s.state, shard.mixed, s.taps)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        recompute = self.env.recompute
        projected = recompute.op("qkv", self.in_proj, x)
        gate, mixed, dt = projected.split((self.shard.inner, self.shard.mixed, self.shard.heads), -1)
        if self.spec.scales is not None:  # those of x, B and C are in the convolution's weight
            gate, dt = gate * self.spec.scales.gate, dt * self.spec.scales.dt
        if batch.paged is not None:
            return self.out(self._normed(self._remembered(batch, mixed, dt), gate))
        mixed = recompute.op("conv", partial(self._convolved, batch), mixed)
        y = recompute.op("scan", partial(self._scanned, batch), mixed, dt)
        return self.out(recompute.op("norm", self._normed, y, gate))

    def takes_lazy(self, x: Tensor) -> bool:
        return not any(map(self.env.recompute.recomputes, ("norm", "qkv"))) and self.in_proj.takes_lazy(x)

    @property
    def _taps(self) -> Tensor:
        """The convolution's weight, times what its inputs are multiplied by."""
        s, shard = self.spec, self.shard
        if s.scales is None:
            return self.conv
        parts = wide_values(self.conv).split((shard.inner, *(shard.groups * s.state,) * 2))
        return torch.cat([part * scale for part, scale in zip(parts, (s.scales.x, s.scales.b, s.scales.c))])

    def _convolved(self, batch: Batch, mixed: Tensor) -> Tensor:
        """(T, features of x, B and C) -> the same, convolved and activated."""
        return convolve_chunks(mixed, batch, self._taps, self.conv_bias, self.env)

    def _parts(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (..., H, P), B and C (..., G, N)."""
        s, shard = self.spec, self.shard
        x, b, c = mixed.split((shard.inner, *(shard.groups * s.state,) * 2), -1)
        return x.unflatten(-1, (-1, s.head_dim)), b.unflatten(-1, (-1, s.state)), c.unflatten(-1, (-1, s.state))

    def _scanned(self, batch: Batch, mixed: Tensor, dt: Tensor) -> Tensor:
        """(T, features of x, B and C), (T, heads) -> (T, heads * P)."""
        by_sequence = (batch.num_sequences, -1)
        x, b, c = self._parts(mixed.unflatten(0, by_sequence))
        steps, a = steps_of(dt, self.dt_bias, self.spec.limits).unflatten(0, by_sequence), decay_rates(self.a_log)
        chunks, kernels = chunks_of(batch), self.env.kernels_for(SCAN)
        pieces = [
            ScanInputs(x[:, k.rows], steps[:, k.rows], a, b[:, k.rows], c[:, k.rows], self.d, k.numbers) for k in chunks
        ]
        found = [scan(piece, kernels) for piece in pieces]
        made = [y for y, _ in found]
        if len(chunks) > 1:
            decays = [whole_decay(piece.dt, a) for piece in pieces]
            before = states_before([state for _, state in found], decays, batch, self.env.axes.cp)
            kernels = self.env.kernels_for(CARRIED)
            made = [carried_output(*each, kernels) for each in zip(made, pieces, before)]
        y = torch.cat(made, 1) if len(made) > 1 else made[0]
        if self.watch is not None:
            self.watch.look(y, (mixed, dt), batch, self.shard.own.q0)
        return y.flatten(2).flatten(0, 1)

    def _normed(self, y: Tensor, gate: Tensor) -> Tensor:
        if self.norm is None or self.groups is None:
            return swiglu(torch.cat((gate, y), -1), self.env.kernels_for(GATED))
        return gated_norm(y, gate, self.norm, self.groups, self.env.tp, self.env.kernels_for(GATED_NORM))

    def _remembered(self, batch: Batch, mixed: Tensor, dt: Tensor) -> Tensor:
        """(T / cp, features of x, B and C), (T / cp, heads) of sequences that go on -> (T / cp, heads * P)."""
        memory = own_states(self)
        spans = memory.spans_of(batch)
        mixed, dt = memory.all_tokens(mixed), memory.all_tokens(dt)
        by_conv, by_scan = self.env.kernels_for(CONV1D_STEP), self.env.kernels_for(SCAN_STEP)
        mixed = convolve_remembered(mixed, memory.tokens, spans, self._taps, self.conv_bias, by_conv)
        x, b, c = self._parts(mixed)
        inputs = StepInputs(x, dt, b, c, self.dt_bias, self.a_log, self.d, self.spec.limits)
        y = scan_remembered(inputs, memory.states, spans, by_scan)
        return memory.own_tokens(y.flatten(1))

    def flops(self, seq_length: int) -> float:
        """The recurrence: a state takes a decay and an outer product, and is read once."""
        s = self.spec
        mixed = s.heads * s.head_dim + 2 * s.groups * s.state
        return 2.0 * self.num_weights + 2.0 * s.taps * mixed + 6.0 * s.heads * s.head_dim * s.state


def _norm_groups(shard: ScanShard, order: Order) -> NormGroups:
    s, own = shard.spec, shard.own
    width = s.heads * s.head_dim // s.groups
    return NormGroups(shard.groups, width, s.eps, own.k0, s.groups, bool(own.replicas), order)

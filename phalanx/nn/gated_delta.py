"""Linear attention by the gated delta rule: projections, a short convolution, the rule, a gated norm of each head and
the output projection, with heads sharded over tp. Yang et al., "Gated delta networks", 2025; with a decay for each
feature of a key, Kimi Team, "Kimi Linear", 2025.

Key heads are shared by groups of value heads as in grouped-query attention: with fewer of them than tp ranks, several
ranks hold one. Files hold the matrices fused in different ways; RowsOfHeads says where the rows of each head are.

What is narrow (beta and decays, one number of each head and token, or the latents of which decays and gate are made) is
computed by each tp rank for its own tokens and all heads, never in FP8. Then it is gathered, and a rank keeps its
heads.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.layout.box import Box
from phalanx.layout.param import Init, MatrixOutputs, ParamSpec, Piece, Replica
from phalanx.nn.attention import Heads
from phalanx.nn.env import Env
from phalanx.nn.initial import ONES, Normal
from phalanx.nn.linear import ColumnLinear, ReplicatedLinear, RowLinear
from phalanx.nn.memory import StateSpec
from phalanx.nn.module import Module, OutputRows, bias_spec, own_states
from phalanx.nn.short_conv import conv_spec, convolve_chunks
from phalanx.ops.delta.context import delta_over_ranks
from phalanx.ops.delta.delta import DELTA, DeltaInputs
from phalanx.ops.delta.remembered import delta_remembered
from phalanx.ops.delta.step import DELTA_STEP
from phalanx.ops.dense.activation import widened
from phalanx.ops.experts.exchange import gather
from phalanx.ops.scan.norm_gate import NORM_GATE, HeadGate, norm_gate
from phalanx.ops.scan.remembered import convolve_remembered
from phalanx.ops.scan.scan import decay_rates, steps_of
from phalanx.ops.scan.step import CONV1D_STEP
from phalanx.sequence.batch import Batch


@dataclass(frozen=True)
class RowsOfHeads:
    """Where the rows of heads are in a global tensor of `size` rows.

    first  the row with which those of head 0 begin
    each   rows of a head
    group  heads that follow one another without a gap; step: rows from one group to the next
    """

    name: str
    size: int
    first: int
    each: int
    group: int
    step: int

    @staticmethod
    def whole(name: str, heads: int, each: int, first: int = 0, size: int | None = None) -> RowsOfHeads:
        """Of heads that follow one another, from row `first` of a tensor of `size` rows; None: the tensor has no
        others."""
        return RowsOfHeads(name, heads * each if size is None else size, first, each, heads, 0)

    def of(self, matrix: str, start: int, stop: int, replicas: tuple[Replica, ...] = ()) -> list[OutputRows]:
        """Rows of the heads start..stop, which are of the matrix of this name."""
        outputs = (MatrixOutputs(matrix, self.each, heads=self.each > 1),)
        found = list[OutputRows]()
        for head in range(start, stop):
            at = self.first + head // self.group * self.step + head % self.group * self.each
            if found and found[-1].stop == at:
                found[-1] = replace(found[-1], stop=at + self.each)
            else:
                found.append(OutputRows(self.name, self.size, at, at + self.each, replicas, outputs=outputs))
        return found


@dataclass(frozen=True)
class DeltaRows:
    """Where files have the rows of queries, keys and values; of the channels of their convolution; of beta; and, where
    these are projections of the layer's input, of decays and of the gate."""

    query: RowsOfHeads
    key: RowsOfHeads
    value: RowsOfHeads
    convolved: tuple[RowsOfHeads, RowsOfHeads, RowsOfHeads]
    beta: RowsOfHeads
    decay: RowsOfHeads | None = None
    gate: RowsOfHeads | None = None


@dataclass(frozen=True)
class GateLatents:
    """Decays and gate as projections of latents of the layer's input, one decay for each feature of a key.

    names  of the two matrices that make `width` features of the input, first those of decays
    decay  rows of heads in the matrix that makes decays of the first latent; gate: in the one that makes the gate of
           the second
    """

    names: tuple[str, str]
    width: int
    decay: RowsOfHeads
    gate: RowsOfHeads


@dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec:
    """Everything that defines such a layer.

    rows         of its tensors in files; latents: how decays and gate are made, if not of the layer's input
    out, norm    names of the output matrix and of the norm of heads (without `.weight`)
    rate, shift  names of the logarithms of decay rates, and of what is added to decays before their softplus;
                 rate_shape: of the former, if it is no vector
    width        of the model
    keys, values numbers of heads; key, value: their widths
    taps         of the convolution
    eps          of the norm
    std          of the initial weights of the projections
    init         of rate and of shift
    gate         the activation of the gate
    most         of beta: 1, or 2 for states that may change their sign
    """

    rows: DeltaRows
    latents: GateLatents | None = None
    out: str
    norm: str
    rate: str
    shift: str
    rate_shape: tuple[int, ...] | None = None
    width: int
    keys: int
    values: int
    key: int
    value: int
    taps: int
    eps: float
    std: float
    init: tuple[Init, Init]
    gate: HeadGate = "silu"
    most: float = 1.0

    @property
    def by_feature(self) -> bool:
        """Whether each feature of a key has a decay of its own."""
        return self.latents is not None

    @property
    def decays(self) -> int:
        """Decays of a head."""
        return self.key if self.by_feature else 1


class GatedDelta(Module):
    """x (T / tp, D) -> (T / tp, D)."""

    def __init__(self, env: Env, spec: GatedDeltaSpec):
        super().__init__(env)
        env.refuse_invariance("a delta rule")
        s, own, rows = spec, Heads.of(env, spec.values, spec.keys), spec.rows
        self.spec, self.keys, self.values, self.first = s, own.k1 - own.k0, own.q1 - own.q0, own.q0
        init, keys, values = Normal(s.std), (own.k0, own.k1, own.replicas), (own.q0, own.q1)
        mixed = [*rows.query.of("q", *keys), *rows.key.of("k", *keys), *rows.value.of("v", *values)]
        gate = [] if rows.gate is None else rows.gate.of("gate", *values)
        self.in_proj = ColumnLinear(env, [*mixed, *gate], s.width, init)
        self.narrow = ReplicatedLinear(env, narrow_rows(s, env), s.width, init)
        self.latents = None if s.latents is None else LatentGates(env, s, s.latents, values)
        q, k, v = rows.convolved
        self.conv = self.param(conv_spec([*q.of("q", *keys), *k.of("k", *keys), *v.of("v", *values)], s.taps))
        rates, shifts = s.init
        count = s.values * s.decays
        shift = [OutputRows(s.shift, count, own.q0 * s.decays, own.q1 * s.decays)]
        self.rate = self.param(_rate_spec(s, values, rates))
        self.shift = self.param(bias_spec(shift, shifts))
        self.norm = self.replicated(f"{s.norm}.weight", s.value, ONES, "norm")
        features = own.q0 * s.value, own.q1 * s.value
        self.out = RowLinear(env, f"{s.out}.weight", s.width, s.values * s.value, features, init)
        self.channels = 2 * self.keys * s.key + self.values * s.value
        self.keeps = StateSpec(self.values, s.key, s.value, self.channels, s.taps)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        recompute = self.env.recompute
        mixed, gate, beta, decay = recompute.op("qkv", self._projected, x)
        if batch.paged is not None:
            return self.out(self._normed(self._remembered(batch, mixed, beta, decay), gate))
        mixed = recompute.op("conv", partial(self._convolved, batch), mixed)
        y = recompute.op("delta", partial(self._recurrence, batch), mixed, beta, decay)
        return self.out(recompute.op("norm", self._normed, y, gate))

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """x (T / tp, D) -> what is convolved (T, channels), gate (T, values * value), beta before its activation (T,
        values), decays before theirs (T, values * decays)."""
        projected, narrow, own = self.in_proj(x), self.narrow(x), slice(self.first, self.first + self.values)
        if self.latents is not None:
            latents, beta = narrow.split((narrow.shape[1] - self.spec.values, self.spec.values), -1)
            decay, gate = self.latents(latents)
            return projected, gate, gather(beta.contiguous(), self.env.tp)[:, own], decay
        mixed, gate = projected.split((self.channels, projected.shape[1] - self.channels), -1)
        beta, decay = gather(narrow, self.env.tp).unflatten(-1, (2, -1))[..., own].unbind(1)
        return mixed, gate, beta, decay

    def _convolved(self, batch: Batch, mixed: Tensor) -> Tensor:
        return convolve_chunks(mixed, batch, self.conv, None, self.env)

    def _inputs(self, mixed: Tensor, beta: Tensor, decay: Tensor) -> DeltaInputs:
        """Of tokens (...,): what the rule reads of what was convolved, and of beta and decays before their
        activations."""
        s = self.spec
        of_keys = self.keys * s.key
        q, k, v = mixed.split((of_keys, of_keys, self.values * s.value), -1)
        steps, rates = steps_of(decay, self.shift, (0.0, math.inf)), decay_rates(self.rate.flatten())
        return DeltaInputs(
            q.unflatten(-1, (-1, s.key)),
            k.unflatten(-1, (-1, s.key)),
            v.unflatten(-1, (-1, s.value)),
            steps.unflatten(-1, (-1, s.key)) * rates.unsqueeze(-1) if s.by_feature else steps * rates,
            s.most * torch.sigmoid(widened(beta)),
            scale=s.key**-0.5,
            normalize=True,
        )

    def _recurrence(self, batch: Batch, mixed: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        """-> (T, values * value)."""
        by_sequence = (batch.num_sequences, -1)
        inputs = self._inputs(*(t.unflatten(0, by_sequence) for t in (mixed, beta, decay)))
        y = delta_over_ranks(inputs, batch, self.env.axes.cp, self.env.kernels_for(DELTA))
        if self.watch is not None:
            self.watch.look(y, (mixed, beta, decay), batch, self.first)
        return y.flatten(2).flatten(0, 1)

    def _remembered(self, batch: Batch, mixed: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        """The same of tokens (T / cp, ...) of sequences that go on."""
        memory = own_states(self)
        spans = memory.spans_of(batch)
        mixed, beta, decay = (memory.all_tokens(t) for t in (mixed, beta, decay))
        by_conv, by_delta = self.env.kernels_for(CONV1D_STEP), self.env.kernels_for(DELTA_STEP)
        mixed = convolve_remembered(mixed, memory.tokens, spans, self.conv, None, by_conv)
        y = delta_remembered(self._inputs(mixed, beta, decay), memory.states, spans, by_delta)
        return memory.own_tokens(y.flatten(1))

    def _normed(self, y: Tensor, gate: Tensor) -> Tensor:
        """y and gate (T, values * value) -> the same."""
        s, by_head = self.spec, (-1, self.spec.value)
        kernels = self.env.kernels_for(NORM_GATE)
        heads = norm_gate(y.unflatten(-1, by_head), gate.unflatten(-1, by_head), self.norm, s.eps, s.gate, kernels)
        return heads.flatten(1)

    def flops(self, seq_length: int) -> float:
        """The recurrence: a state decays, is read twice (by its key and its query), and takes an outer product."""
        s = self.spec
        channels, gated = 2 * s.keys * s.key + s.values * s.value, s.values * s.value
        weights = s.width * (channels + s.values + gated)  # and the output's
        if s.latents is None:
            weights += s.width * (gated + s.values)
        else:
            weights += 2 * s.width * s.latents.width + s.latents.width * (s.values * s.key + gated)
        return 2.0 * weights + 2.0 * s.taps * channels + 8.0 * s.values * s.key * s.value


class LatentGates(Module):
    """Both latents (T / tp, 2 * width) -> decays (T, heads * key) and gate (T, heads * value) of the heads
    start..stop."""

    def __init__(self, env: Env, spec: GatedDeltaSpec, latents: GateLatents, heads: tuple[int, int]):
        super().__init__(env)
        init = Normal(spec.std)
        self.decay = ColumnLinear(env, latents.decay.of("decay", *heads), latents.width, init)
        self.gate = ColumnLinear(env, latents.gate.of("gate", *heads), latents.width, init)

    def forward(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        decay, gate = latents.chunk(2, -1)
        return self.decay(decay.contiguous()), self.gate(gate.contiguous())


def narrow_rows(spec: GatedDeltaSpec, env: Env) -> list[OutputRows]:
    """Of all heads: latents of decays and of the gate, if there are such, and beta; or beta and decays."""
    rows, everyone, heads = spec.rows, env.everyone, (0, spec.values)
    beta = rows.beta.of("beta", *heads, everyone)
    if spec.latents is not None:
        width = spec.latents.width
        return [*(OutputRows(name, width, 0, width, everyone) for name in spec.latents.names), *beta]
    if rows.decay is None:
        raise TypeError("a layer without latents has decays of its input")
    return [*beta, *rows.decay.of("decay", *heads, everyone)]


def _rate_spec(spec: GatedDeltaSpec, heads: tuple[int, int], init: Init) -> ParamSpec:
    """Storage (heads here,) of a vector, or of the one dim of a tensor in which heads follow each other."""
    first, last = heads
    if spec.rate_shape is None:
        return bias_spec([OutputRows(spec.rate, spec.values, first, last)], init)
    ends = [(first, last) if size == spec.values else (0, size) for size in spec.rate_shape]
    box = Box(tuple(start for start, _ in ends), tuple(stop for _, stop in ends))
    whole = Piece(spec.rate, spec.rate_shape, box, Box.full(box.shape).slices(), init, decay=False)
    return ParamSpec(box.shape, (whole,), role="bias")

"""Mixture of experts: a router, experts spread over ranks (the ep and etp axes), shared experts, and what keeps the
load even.

Tokens stay sharded over tp as between blocks: each rank routes its own. Fedus et al., "Switch transformers", 2021; Dai
et al., "DeepSeekMoE", 2024. T tokens of this rank, D model, E experts, K chosen, F width of an expert, S sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.base.dataclass import dataclass
from phalanx.layout.box import Box, cut
from phalanx.layout.param import Init, MatrixOutputs, ParamSpec, Piece
from phalanx.nn.env import Env
from phalanx.nn.initial import ONES, ZEROS, Normal
from phalanx.nn.linear import GroupedLinear, ReplicatedLinear, UnadaptedGroupedLinear, gradient_of
from phalanx.nn.linear_method import FusedOp
from phalanx.nn.module import Module, OutputRows
from phalanx.nn.objective import Objective
from phalanx.nn.parameter import Parameter
from phalanx.ops.dense.activation import GATED, gated_rows
from phalanx.ops.dense.gate import SWIGLU, Gate
from phalanx.ops.dense.matmul import local_matmul, wide_matmul
from phalanx.ops.dense.relu2 import RELU2, relu2_rows
from phalanx.ops.experts import route as ops
from phalanx.ops.experts.exchange import EXCHANGES, Dispatch, Weigh, weighed_rows
from phalanx.ops.experts.grouped import Later
from phalanx.ops.experts.permute import PERMUTE
from phalanx.ops.experts.route import BalanceSums, Choice
from phalanx.ops.experts.router import Router
from phalanx.sequence.batch import Batch, PerBatch

Scope = Literal["micro_batch", "sequence", "global_batch"]
# Sums over tokens: entropy (nats) of the router's probabilities, the losses, pairs dropped because their expert was
# full, pairs missing because its rank had no room (the step is then invalid and repeated), and 1.
TALLIED = ("entropy", "balance", "z", "dropped", "missing", "tokens")
SHARES, LOSS_PARTS = PerBatch[Tensor](), PerBatch[Tensor]()
MISSING = TALLIED.index("missing") - len(TALLIED)


@dataclass(frozen=True)
class Balance:
    """What keeps the load even: coefficients of losses, the step of the bias, and the capacity of experts.

    aux, scope      E sum f P over the tokens of a micro-batch or of each sequence, or with f from the whole previous
                    step
    z               of the mean squared log-sum-exp of the logits
    bias_rate       step of the bias by which experts are chosen
    capacity        tokens an expert accepts from a sequence, relative to its fair share; None: all of them
    drop            which tokens are dropped: the last ones, or those with the smallest weights
    """

    aux: float = 0.0
    scope: Scope = "micro_batch"
    z: float = 0.0
    bias_rate: float = 0.0
    capacity: float | None = None
    drop: Literal["position", "probability"] = "probability"


@dataclass(frozen=True)
class ExpertNames:
    """Global names of the router's matrix and of an expert's matrices, with `{}` for its number; and of the router's
    selection bias, the bias of the logits and the biases of the experts' outputs, where a family has them."""

    router: str
    gate: str
    up: str
    down: str
    bias: str = ""
    router_bias: str = ""
    down_bias: str = ""
    activation: Gate = field(default=SWIGLU, kw_only=True)
    weigh: ClassVar[Weigh] = "outputs"
    linear: ClassVar[type[GroupedLinear]] = GroupedLinear

    @property
    def stacks(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the matrices stored as gate and up, and of those stored as down."""
        return (self.gate, self.up), (self.down,)

    def matrices(self, part: ExpertShard, std: float) -> tuple[ParamSpec, ParamSpec, None]:
        """Storage of this shard of gate and up, (N, 2F, D), with all gates of an expert before its ups, and of down,
        (N, D, F)."""
        a, b, width, inner = part.first, part.stop, part.width, part.inner
        gate_up = _stack(
            part.experts,
            [(self.gate, 0), (self.up, b - a)],
            (inner, width),
            Box((a, 0), (b, width)),
            2 * (b - a),
            width,
            std,
        )
        return (
            gate_up,
            _stack(part.experts, [(self.down, 0)], (width, inner), Box((0, a), (width, b)), width, b - a, std),
            None,
        )


@dataclass(frozen=True)
class StackedNames:
    """The same where one tensor holds all experts of a layer (gpt-oss): gate_up (E, D, 2F) with gate and up
    interleaved, down (E, F, D), and their biases (E, 2F) and (E, D)."""

    router: str
    router_bias: str
    gate_up: str
    gate_up_bias: str
    down: str
    down_bias: str
    bias: str = ""
    activation: Gate = field(kw_only=True)
    weigh: ClassVar[Weigh] = "outputs"
    linear: ClassVar[type[GroupedLinear]] = GroupedLinear

    @property
    def stacks(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (self.gate_up,), (self.down,)

    def matrices(self, part: ExpertShard, std: float) -> tuple[ParamSpec, ParamSpec, ParamSpec]:
        """Storage of this shard of gate and up, (N, 2F, D) with interleaved rows, of down, (N, D, F), and of the bias
        of gate and up, (N, 2F)."""
        (e, f), (a, b), width, count = (
            (part.experts.start, part.experts.stop),
            (part.first, part.stop),
            part.width,
            part.count,
        )
        gate_up = _box(
            self.gate_up,
            (count, width, 2 * part.inner),
            Box((e, 0, 2 * a), (f, width, 2 * b)),
            Normal(std),
            transposed=True,
            outputs=(MatrixOutputs("gate", 1), MatrixOutputs("up", 1)),
        )
        down = _box(self.down, (count, part.inner, width), Box((e, a, 0), (f, b, width)), Normal(std), transposed=True)
        return gate_up, down, _box(self.gate_up_bias, (count, 2 * part.inner), Box((e, 2 * a), (f, 2 * b)), ZEROS)


@dataclass(frozen=True)
class ExpertShard:
    """What a rank holds of a layer's `count` experts: which experts, and their `inner` features first .. stop."""

    experts: range
    first: int
    stop: int
    count: int
    width: int
    inner: int

    @staticmethod
    def of(env: Env, count: int, width: int, inner: int) -> ExpertShard:
        at = env.grid.expert_coords(env.at)
        return ExpertShard(
            range(*cut(count, env.grid.ep)[at.ep]), *cut(inner, env.grid.etp)[at.etp], count, width, inner
        )


@dataclass(frozen=True, kw_only=True)
class HalvedNames:
    """The same where one tensor holds all experts of a layer without biases: gate_up (E, D, 2F) with all gates before
    all ups, down (E, F, D), stored transposed (Llama 4), or (E, 2F, D) and (E, D, F)."""

    router: str
    gate_up: str
    down: str
    transposed: bool = True
    weigh: Weigh = "outputs"
    bias: str = ""
    router_bias: str = ""
    down_bias: str = ""
    activation: Gate = SWIGLU
    linear: ClassVar[type[GroupedLinear]] = UnadaptedGroupedLinear

    @property
    def stacks(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (self.gate_up,), (self.down,)

    def matrices(self, part: ExpertShard, std: float) -> tuple[ParamSpec, ParamSpec, None]:
        """Storage of this shard of gate and up, (N, 2F, D), with all gates of an expert before its ups, and of down,
        (N, D, F)."""
        (e, f), (a, b), width = (part.experts.start, part.experts.stop), (part.first, part.stop), part.width
        init, rows = Normal(std), b - a

        def piece(name: str, outputs: int, inputs: int, box: Box, local: tuple[int, int], matrix: str = "") -> Piece:
            """Of a tensor (E, outputs, inputs), or of one that is stored transposed; `local`: its rows here."""
            shape: tuple[int, ...] = (part.count, outputs, inputs)
            if self.transposed:
                shape, box = _swapped(shape), Box(_swapped(box.start), _swapped(box.stop))
            stored = slice(0, f - e), slice(*local), slice(0, box.shape[1 if self.transposed else 2])
            made = (MatrixOutputs(matrix, part.inner),) if matrix else ()
            return Piece(name, shape, box, stored, init, transposed=self.transposed, outputs=made)

        halves = tuple(
            piece(
                self.gate_up,
                2 * part.inner,
                width,
                Box((e, first + a, 0), (f, first + b, width)),
                (row, row + rows),
                matrix,
            )
            for matrix, first, row in (("gate", 0, 0), ("up", part.inner, rows))
        )
        down = (piece(self.down, width, part.inner, Box((e, 0, a), (f, width, b)), (0, width)),)
        how: Any = {"summed_over": "edp", "role": "expert"}
        return ParamSpec((f - e, 2 * rows, width), halves, **how), ParamSpec((f - e, width, rows), down, **how), None


@dataclass(frozen=True)
class UngatedNames:
    """Experts without a gate, down(relu(up x)^2), as Nemotron-H has them."""

    router: str
    up: str
    down: str
    bias: str = ""
    router_bias: ClassVar[str] = ""
    down_bias: ClassVar[str] = ""
    activation: ClassVar[Literal["relu2"]] = "relu2"
    weigh: ClassVar[Weigh] = "outputs"
    linear: ClassVar[type[GroupedLinear]] = GroupedLinear

    @property
    def stacks(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (self.up,), (self.down,)

    def matrices(self, part: ExpertShard, std: float) -> tuple[ParamSpec, ParamSpec, None]:
        """Storage of this shard of up, (N, F, D), and of down, (N, D, F)."""
        a, b, width, inner = part.first, part.stop, part.width, part.inner
        up = _stack(part.experts, [(self.up, 0)], (inner, width), Box((a, 0), (b, width)), b - a, width, std)
        down = _stack(part.experts, [(self.down, 0)], (width, inner), Box((0, a), (width, b)), width, b - a, std)
        return up, down, None


AnyNames = ExpertNames | StackedNames | HalvedNames | UngatedNames


class Experts(Module):
    """This rank's experts: gate and up of each, (N, 2F, D), or up alone, (N, F, D), and down, (N, D, F). Sharded over
    ep by expert number and over etp by width."""

    first_in_memory = ("gate_up.weight", "down.weight", "gate_up.bias")

    def __init__(self, env: Env, names: AnyNames, count: int, width: int, inner: int, std: float):
        super().__init__(env)
        gate_up, down, bias = names.matrices(ExpertShard.of(env, count, width, inner), std)
        of_up, of_down = names.stacks
        self.gate_up = names.linear(env, gate_up, of_up, 0, count, bias)
        self.down = names.linear(env, down, of_down, 1, count)  # MoE adds its bias, once
        self.activation: Gate | Literal["relu2"] = names.activation
        self.weigh: Weigh = names.weigh

    def forward(
        self, x: Tensor, ends: Tensor, weights: Tensor | None = None, later: Later | None = None, source: int = 0
    ) -> Tensor:
        """x (R, D) sorted by expert, `ends` (N,) one past each expert's last row -> (R, D) times weights (R,); over
        etp, a partial sum; or of rows times weights, if experts' inputs are weighed. Gradients go to those of
        micro-batch number `source` (train.deterministic).

        Weights are applied before the last matmul, which is linear, so that backward does not need its output.
        """
        if self.weigh == "inputs" and weights is not None:
            x, weights = weighed_rows(x, ends, weights), None
        recompute, inputs = self.env.recompute, () if weights is None else (weights,)
        fused = self._fused(x)
        if fused is not None:
            up, down = gradient_of(self.gate_up.weight, source), gradient_of(self.down.weight, source)
            return fused(x, up, down, ends, weights, self.activation, self.env.kernels_for(GATED), later)
        gate_up = recompute.op("up", lambda x: self.gate_up(x, ends, source, later), x)
        hidden = recompute.op("activation", partial(self._activate, ends), gate_up, *inputs)
        return self.down(hidden, ends, source)

    def _fused(self, x: Tensor) -> FusedOp | None:
        """All of it as one op, if the method of the linears has one."""
        recomputes = self.env.recompute.recomputes
        if self.activation == "relu2" or self.gate_up.bias is not None:
            return None
        if recomputes("up") or recomputes("activation"):  # one op runs again as a whole
            return None
        kernels = self.env.kernels_for(GATED)
        return self.gate_up.method.fused_experts(self.gate_up.weight, self.down.weight, kernels, x)

    def takes_lazy(self, x: Tensor) -> bool:
        """For the rows that come in, and for the gradient of the rows that go out."""
        return self.weigh == "outputs" and self._fused(x) is not None and self.gate_up.takes_lazy(x)

    def _activate(self, ends: Tensor, gate_up: Tensor, weights: Tensor | None = None) -> Tensor:
        if self.activation == "relu2":
            return relu2_rows(gate_up, ends, weights, self.env.kernels_for(RELU2))
        return gated_rows(gate_up, ends, weights, self.activation, self.env.kernels_for(GATED))


def _stack(
    experts: range, names: list[tuple[str, int]], shape: tuple[int, int], box: Box, rows: int, columns: int, std: float
) -> ParamSpec:
    """Storage (experts, rows, columns): for each expert, the same box of matrices (name, first row) with a global
    `shape`."""
    height = box.shape[0]
    pieces = [
        Piece(name.format(e), shape, box, (i, slice(first, first + height), slice(0, columns)), Normal(std))
        for i, e in enumerate(experts)
        for name, first in names
    ]
    return ParamSpec((len(experts), rows, columns), tuple(pieces), summed_over="edp", role="expert")


def _swapped(dims: tuple[int, ...]) -> tuple[int, ...]:
    """The last two of three exchanged."""
    return dims[0], dims[2], dims[1]


def _box(
    name: str,
    shape: tuple[int, ...],
    box: Box,
    init: Init,
    transposed: bool = False,
    outputs: tuple[MatrixOutputs, ...] = (),
) -> ParamSpec:
    """Storage of one box of a tensor that holds all experts. Vectors have no weight decay."""
    stored = (*box.shape[:-2], box.shape[-1], box.shape[-2]) if transposed else box.shape
    how: Any = {"decay": transposed, "transposed": transposed, "outputs": outputs}
    piece = Piece(name, shape, box, Box.full(stored).slices(), init, **how)
    return ParamSpec(stored, (piece,), summed_over="edp", role="expert" if transposed else "bias")


class Latents(Module):
    """Experts that work on narrower tokens: what makes tokens (T, D) narrow before they travel, and their sums wide
    again. Every tp rank holds both matrices, whose names come in this order."""

    def __init__(self, env: Env, names: tuple[str, str], width: int, size: int, std: float, bias: bool):
        super().__init__(env)
        init, self.size = Normal(std), size
        narrow, wide = (OutputRows(n, rows, 0, rows, env.everyone) for n, rows in zip(names, (size, width)))
        self.narrow = ReplicatedLinear(env, [narrow], width, init, bias)
        self.wide = ReplicatedLinear(env, [wide], size, init, bias)
        self.num_weights = 2 * width * size


class MoE(Module):
    """x -> the weighted sum of the chosen experts' outputs (plus the shared expert's). `tally` counts over the
    micro-batches of a step.

    factors   global name of a learned factor of each expert's weight, applied after the choice; "": there are none
    """

    def __init__(
        self,
        env: Env,
        names: AnyNames,
        router: Router,
        width: int,
        inner: int,
        std: float,
        balance: Balance,
        shared: Module | None = None,
        layer: int = 0,
        latents: Latents | None = None,
        factors: str = "",
    ):
        super().__init__(env)
        self.router, self.balance, self.layer, self.inner = router, balance, layer, inner
        count = router.num_experts
        box = Box.full((count, width))
        piece = Piece(names.router, (count, width), box, box.slices(), Normal(std), replicas=env.everyone)
        self.gate = self.param(ParamSpec((count, width), (piece,), role="router"))
        self.gate_bias = self.replicated(names.router_bias, count, Normal(std)) if names.router_bias else None
        self.down_bias = self._down_bias(names.down_bias, count, width) if names.down_bias else None
        self.bias = self._per_expert(names.bias, ZEROS) if names.bias else None
        load = names.router.removesuffix(".weight") + ".load"  # of the previous step; not a Hugging Face tensor
        self.load = self._per_expert(load, ONES, ours=True) if balance.scope == "global_batch" else None
        self.factors = self.replicated(factors, count, ONES, "router") if factors else None
        self.experts = Experts(env, names, count, width if latents is None else latents.size, inner, std)
        self.shared, self.latents = shared, latents
        self.dispatch: Dispatch = env.ops.dispatch
        # (E + len(TALLIED),) float64: load of each expert, and sums; created by the training engine
        self.tally: Tensor | None = None

    def forward(self, x: Tensor, batch: Batch, scored: Tensor | None = None) -> Tensor:
        """x (T, D) -> (T, D). scored (T, D): what the router reads in place of x."""
        # in evaluation nothing repeats a step that ran out of room
        room = self.env.ops.expert_room if self.training else math.inf
        recompute, experts = self.env.recompute, self.router.num_experts
        sources, weigh = self.env.ops.sources, self.experts.weigh
        begin = partial(EXCHANGES[self.dispatch], axes=self.env.axes, room=room, sources=sources, weigh=weigh)
        rows = x if self.latents is None else recompute.op("up", self.latents.narrow, x)
        early = (
            None
            if recompute.recomputes("experts") or recompute.cuts_at("experts")
            else begin(self._filled(rows, batch))
        )
        logits = wide_matmul(x if scored is None else scored, self.gate, self.gate_bias)
        wanted, real = (
            ops.route(logits, self.router, self.bias, self._rows(batch), self.layer, self.env.kernels_for(ops.ROUTE)),
            self._real(batch),
        )
        if real is not None:  # padding goes to no expert
            wanted = ops.dropping(wanted, real.unsqueeze(-1) > 0, experts)
        limited = self.balance.capacity is not None and batch.paged is None  # else others' tokens would change a text
        choice = self._within_capacity(wanted, batch) if limited else wanted
        chosen = self._filled(choice.experts_TK, batch, experts)
        if early is not None:
            early.send(chosen, experts, self.env.kernels_for(PERMUTE))
        shared = None if self.shared is None else self.shared(x, batch)  # while the tokens travel

        def routed(batch: Batch, x: Tensor, weights_TK: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
            exchange = early
            if exchange is None:
                exchange = begin(self._filled(x, batch))
                exchange.send(chosen, experts, self.env.kernels_for(PERMUTE))
            lazy = self.experts.takes_lazy(x)
            y, missing = exchange(self._filled(weights_TK, batch), self.experts, self.env.kernels_for(PERMUTE), lazy)
            return y if len(y) == len(x) else y[: len(x)], missing

        likes = ((rows.shape, rows.dtype), ((), torch.int64))
        y, missing = recompute.by_batch("experts", routed, batch, likes, rows, self._weights(choice), chosen)
        y = y if self.latents is None else self.latents.wide(y)
        if self.down_bias is not None:
            y = y + local_matmul(spread(choice, self.router.num_experts).to(x.dtype), self.down_bias)
        if self.training:
            dropped = (choice.experts_TK != wanted.experts_TK).sum()
            y = self._balanced(y, wanted, logits, torch.stack((dropped, missing)), batch)
        return y if shared is None else y + shared

    def _weights(self, choice: Choice) -> Tensor:
        """(T, K) what the outputs of the chosen experts are multiplied by."""
        if self.factors is None:
            return choice.weights_TK
        # sums over tokens in a fixed order in backward; the last one is of pairs that were dropped
        each = torch.nn.functional.pad(self.factors, (0, 1)).expand(len(choice.experts_TK), -1)
        return choice.weights_TK * each.gather(1, choice.experts_TK).to(choice.weights_TK.dtype)

    def _per_expert(self, name: str, init: Init, ours: bool = False) -> Parameter:
        """(E,) numbers that are updated from the load instead of a gradient."""
        count = self.router.num_experts
        whole = Piece(
            name, (count,), Box.full((count,)), (slice(0, count),), init, decay=False, replicas=self.env.everyone
        )
        return self.param(ParamSpec((count,), (whole,), trained=False, exported=not ours, role="router"))

    def _down_bias(self, name: str, count: int, width: int) -> Parameter:
        """(D, E) biases of all experts' outputs, on every rank: their weighted sum needs only a token's choice, no
        exchange."""
        whole = Piece(
            name,
            (count, width),
            Box.full((count, width)),
            (slice(0, width), slice(0, count)),
            ZEROS,
            False,
            True,
            self.env.everyone,
        )
        return self.param(ParamSpec((width, count), (whole,), role="bias"))

    def flops(self, seq_length: int) -> float:
        count, width = self.gate.shape
        matrices, latents = 2 if self.experts.activation == "relu2" else 3, self.latents
        of_expert = matrices * (width if latents is None else latents.size) * self.inner
        routed = 2.0 * (count * width + self.router.top_k * of_expert)
        routed += 0.0 if latents is None else 2.0 * latents.num_weights
        return routed + (self.shared.flops(seq_length) if self.shared is not None else 0.0)

    def _filled(self, x: Tensor, batch: Batch, value: float = 0) -> Tensor:
        """This rank's tokens, padded to the same number of rows on every rank, as exchanges require. Needed if
        sequences do not divide by cp."""
        return batch.pad(x, self.env.tp.size, value)

    def _real(self, batch: Batch) -> Tensor | None:
        """(T,) which of this rank's tokens are not padding; None: all."""
        return None if batch.real is None else self.env.tp.own_rows(batch.real)

    def _rows(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sample and position of this rank's tokens: the keys of a forced random choice."""
        tp = self.env.tp
        return tp.own_rows(batch.samples), tp.own_rows(batch.places)

    def _within_capacity(self, choice: Choice, batch: Batch) -> Choice:
        """The choice without pairs beyond the capacity of their expert. Capacity is counted by document, or else by
        sequence, so it does not depend on the layout."""
        count, factor = self.router.num_experts, self.balance.capacity
        whole = replace(
            choice,
            experts_TK=self._everyones(choice.experts_TK, batch),
            weights_TK=self._everyones(choice.weights_TK.detach(), batch),
        )
        sequence, sequences = batch.uncut.runs
        limit: int | Tensor = ops.expert_capacity(self.router, batch.seq_length, factor)  # type: ignore[arg-type]
        if batch.documents is not None:
            lengths = torch.zeros(sequences, dtype=torch.int64, device=sequence.device).scatter_add_(
                0, sequence, torch.ones_like(sequence)
            )
            limit = ops.expert_capacities(self.router, lengths, factor)  # type: ignore[arg-type]
        kept = ops.within_capacity(whole, count, limit, self.balance.drop, sequence, sequences)
        return ops.dropping(choice, self.env.tp.own_rows(batch.take(kept)), count)

    def _everyones(self, x: Tensor, batch: Batch) -> Tensor:
        """x of this rank's tokens (T, ...) -> of all tokens of the micro-batch, in order."""
        everyones = self.env.axes.batch_group.all_gather(self._filled(x, batch)).wait()
        return batch.join(everyones.chunk(batch.part.count), batch.part.all)

    def _balanced(self, y: Tensor, choice: Choice, logits: Tensor, lost: Tensor, batch: Batch) -> Tensor:
        """y, whose backward also starts that of the balancing losses and counts the load (once, even if the layer is
        recomputed)."""
        b, real = self.balance, self._real(batch)
        balance, z = self._balance_loss(choice, batch), ops.z_loss(logits, real) / batch.num_real
        with torch.no_grad():
            tokens: int | Tensor = len(logits) if real is None else real.sum()
            counts = ops.expert_counts(choice.experts_TK, self.router.num_experts)[0].double()
            means = torch.stack([ops.entropy(choice, real), balance * tokens, z * batch.num_real])
            sums = torch.cat((means.double(), lost.double()))
        return Attach.apply(
            y,
            b.aux * balance + b.z * z,
            loss_weight(batch, self.env.objective),
            partial(self._count, counts, sums, tokens),
        )

    def _balance_loss(self, choice: Choice, batch: Batch) -> Tensor:
        """() the same on all ranks that share the micro-batch; its gradient goes to this rank's scores."""
        count = self.router.num_experts
        by_sequence = self.balance.scope == "sequence"
        sequence = self.env.tp.own_rows(batch.runs[0]) if by_sequence else None
        local = ops.balance_sums(choice, sequence, batch.runs[1] if by_sequence else 1, self._real(batch))
        packed = torch.cat((local.counts_SE, local.scores_SE.detach(), local.tokens_S.unsqueeze(1)), 1)
        counts, scores, tokens = self.env.axes.batch_group.all_reduce(packed).wait().split((count, count, 1), 1)
        if self.load is not None:
            counts = self.load.to(counts.dtype).unsqueeze(0)
        losses = ops.balance_loss(local, BalanceSums(counts, scores, tokens.squeeze(1)))
        return losses @ shares_of_runs(batch, self.env.objective).to(losses.dtype) if by_sequence else losses.sum()

    def _count(self, counts: Tensor, sums: Tensor, tokens: int | Tensor) -> None:
        if self.tally is not None:
            self.tally[: len(counts)] += counts
            self.tally[len(counts) : -1] += sums
            self.tally[-1] += tokens

    @torch.no_grad()
    def settle(self, counts: Tensor, skip: Tensor) -> None:
        """Called after a step with these loads (E,) of the whole global batch: updates the bias, unless the step was
        skipped."""
        if self.bias is not None and not self.bias.spec.frozen:
            moved = ops.updated_bias(self.bias, counts, self.balance.bias_rate)  # type: ignore[arg-type]
            self.bias.copy_(torch.where(skip > 0, self.bias, moved))
        if self.load is not None:
            self.load.copy_(counts)


def spread(choice: Choice, count: int) -> Tensor:
    """(T, E) the weight of each expert for a token: 0 for experts not chosen and for dropped pairs."""
    weights = choice.weights_TK
    return weights.new_zeros(len(weights), count + 1).scatter(1, choice.experts_TK, weights)[:, :count]


def shares_of_runs(batch: Batch, objective: Objective) -> Tensor:
    """(S,) float64: the share of each sequence (or document) in the micro-batch's loss: the weights of its tokens with
    a loss, divided by those of all sequences."""

    def shares() -> Tensor:
        number, runs = batch.uncut.runs
        counted, weights = batch.uncut.labelled.double(), objective.weights(batch.uncut)
        tokens = torch.zeros(runs, dtype=torch.float64, device=number.device)
        if weights is None:
            tokens.scatter_add_(0, number, counted)  # integers: any order gives the same sum
        else:
            tokens.index_put_((number,), weights.double().masked_fill(counted == 0, 0), accumulate=True)
        return tokens / tokens.sum().clamp_min(1 if weights is None else 1e-300)

    return SHARES.of(batch, shares)


def loss_weight(batch: Batch, objective: Objective) -> Tensor:
    """() the weight of this micro-batch's mean loss in the gradient: its share of the global batch's divisor (tokens
    with a loss)."""
    part = LOSS_PARTS.of(batch, lambda: objective.divisor(batch.uncut))
    return part if batch.loss_seed is None else part * batch.loss_seed


class Attach(Function):
    """x unchanged. Its backward also starts that of `loss`, with the gradient `weight`, and calls `then`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: Tensor, then: Callable[[], None]) -> Tensor:  # type: ignore[override]
        ctx.weight, ctx.then, ctx.dtype = weight, then, loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.then()
        return dx, ctx.weight.to(ctx.dtype), None, None

"""Self-attention with grouped query heads sharded over tp: one fused qkv matrix on each rank, separate Hugging Face
tensors in checkpoints."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.layout.param import MatrixOutputs, Replica
from phalanx.nn.env import Env
from phalanx.nn.initial import ONES, Normal
from phalanx.nn.linear import ColumnLinear, RowLinear, bias_name
from phalanx.nn.memory import PageSpec
from phalanx.nn.module import Module, OutputRows, bias_spec, own_memory
from phalanx.nn.norm import RMSNorm
from phalanx.nn.query_temperature import QueryTemperature
from phalanx.nn.relative_bias import RelativeBiasTable
from phalanx.nn.rotary import Rotary
from phalanx.nn.scored_attention import ScoredAttention, ScoreOutputs
from phalanx.ops.attention import context
from phalanx.ops.attention.attention import ATTENTION, ProbabilityDropout
from phalanx.ops.attention.kind import CAUSAL, PAGED, AttentionKind, Learned, refuse_unsupported
from phalanx.ops.dense.head_norm import NORM_ROPE, norm_rope
from phalanx.ops.dense.norm import NORM, rms_norm
from phalanx.ops.dense.rope import ROPE, rope
from phalanx.ops.dense.rope_scaling import Rotation
from phalanx.ops.dense.width_norm import WIDTH_NORM, HeadShard, width_norm
from phalanx.sequence.batch import Batch
from phalanx.sequence.paged import PagedSequences


@dataclass(frozen=True)
class Heads:
    """This rank's heads: query heads q0..q1, key/value heads k0..k1, and which other ranks hold those key/value
    heads."""

    q0: int
    q1: int
    k0: int
    k1: int
    replicas: tuple[Replica, ...]

    @staticmethod
    def of(env: Env, heads: int, kv_heads: int) -> Heads:
        """With fewer kv heads than tp ranks, tp / kv_heads consecutive ranks share one, and its gradient is summed over
        them."""
        q0, q1 = env.cut(heads)
        if max(kv_heads, env.grid.tp) % min(kv_heads, env.grid.tp):
            raise ValueError(f"{kv_heads} key-value heads neither divide layout.tp={env.grid.tp} nor are divided by it")
        if kv_heads >= env.grid.tp:
            return Heads(q0, q1, *env.cut(kv_heads), ())
        ranks_per_head = env.grid.tp // kv_heads
        k = env.at.tp // ranks_per_head
        return Heads(q0, q1, k, k + 1, (Replica("tp", tuple(range(k * ranks_per_head, (k + 1) * ranks_per_head))),))


def supported(kind: AttentionKind, env: Env, dropout: float = 0.0) -> AttentionKind:
    """The kind as a layer here has it: if the task makes prefixes, causal attention has them. UnsupportedAttention if
    no backend that could run the layer supports all of it."""
    if env.objective.makes_prefix and kind.direction == "causal":
        kind = replace(kind, direction="prefix")
    cut = env.grid.cp > env.grid.ulysses or env.grid.dynamic
    refuse_unsupported(kind, context.offers_of(env.ops.cp_attention, cut, dropout, env.kernels_for(ATTENTION)))
    return kind


def whole_only(kind: AttentionKind) -> str | None:
    """Why attention of a kind takes whole sequences alone; None: what it reads can be remembered while they go on."""
    lacking = sorted(kind.features - PAGED)
    later = " (tokens read later ones)" if lacking in (["direction"], ["prefix"]) else ""
    return f"attention to what is remembered has no {', no '.join(lacking)}{later}" if lacking else None


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Everything that defines a layer of attention.

    names       global names of q, k, v and output matrices; equal q, k, v names mean one fused global matrix, equal k
                and v names that values are the keys, before these are normalized and rotated
    fused_by    what comes first in a fused one: all queries, keys, values ("kind", GPT-2's c_attn), or each head's q, k
                and v ("head", GPT-NeoX's query_key_value; as many key heads as query heads)
    width       of the model; head_dim: of a head
    std         of the initial weights; std_out: of the output matrix, std_q: of the query matrix, if they differ
    rotation    rotary embedding, if any
    bias        which projections have one; "not keys": all but that of keys (Whisper)
    transposed  matrices are stored as (inputs, outputs)
    dropout     of the probabilities; layer: the layer number, a key of its random numbers
    head_norm   names of the RMSNorms of query heads and of key heads (one weight for all heads), and their epsilon
    width_norm  the same of RMSNorms over all query heads at once, and over all key heads
    unit_norm   epsilon of an RMSNorm of every query and key head that has no weight
    value_norm  epsilon of an RMSNorm of every value head that has no weight
    norm        the class of norms of heads
    kind        what is read and how; whether there are sinks and a bias is said by `sinks` and by the table that the
                layer is given
    temperature of queries by position, after the rotation
    sinks       global name of the sinks: one logit for each query head that joins the softmax
    gated       the matrix of queries also makes a gate: after each head's queries as many outputs, whose sigmoid
                multiplies what the head has read (Qwen3-Next)
    """

    names: tuple[str, str, str, str]
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    std: float
    std_out: float | None = None
    std_q: float | None = None
    fused_by: Literal["kind", "head"] = "kind"
    rotation: Rotation | None = None
    bias: Literal["none", "qkv", "not keys", "all"] = "none"
    transposed: bool = False
    dropout: float = 0.0
    layer: int = 0
    head_norm: tuple[str, str, float] | None = None
    width_norm: tuple[str, str, float] | None = None
    unit_norm: float | None = None
    value_norm: float | None = None
    norm: type[RMSNorm] = RMSNorm
    kind: AttentionKind = CAUSAL
    temperature: QueryTemperature | None = None
    sinks: str | None = None
    gated: bool = False

    @property
    def biased(self) -> tuple[str, ...]:
        """The matrices of q, k and v that have a bias."""
        q, k, v, _ = self.names
        return () if self.bias == "none" else (q, v) if self.bias == "not keys" else (q, k, v)


def score_outputs(spec: AttentionSpec) -> tuple[ScoreOutputs, ...]:
    """What the scores of its heads are made of. Queries and keys are scaled alike; if heads share a key head, it is
    left as it is (see nn.scored_attention)."""
    (q, k, _, _), width, dim = spec.names, spec.head_dim, int(spec.transposed)
    fused, own_keys = q == k, spec.kv_heads == spec.heads
    step = 3 * width if fused and spec.fused_by == "head" else width
    at = 0 if not fused else width if spec.fused_by == "head" else spec.heads * width
    found = [ScoreOutputs(q, 0, step, width, 0.5 if own_keys else 1.0, dim)]
    if own_keys:
        found.append(ScoreOutputs(k, at, step, width, 0.5, dim))
    return (*found, *(replace(each, name=bias_name(each.name), dim=0) for each in found if each.name in spec.biased))


def unclippable(spec: AttentionSpec) -> str | None:
    """As ScoredAttention.unclippable."""
    if spec.head_norm or spec.width_norm or spec.unit_norm is not None:
        return (
            "queries and keys are normalized after their projections, so scores do not follow the size of the weights"
        )
    if spec.dropout > 0:
        return "attention with dropout of its probabilities does not measure scores"
    return None


class WidthNorm(Module):
    """RMSNorm of all query heads at once, and of all key heads, both weights in one parameter."""

    def __init__(self, env: Env, spec: AttentionSpec, own: Heads):
        super().__init__(env)
        if spec.width_norm is None:
            raise TypeError("the layer has no norm over all heads")
        q_name, k_name, self.eps = spec.width_norm
        heads, kv_heads, width = spec.heads, spec.kv_heads, spec.head_dim
        rows = [
            OutputRows(f"{q_name}.weight", heads * width, own.q0 * width, own.q1 * width),
            OutputRows(f"{k_name}.weight", kv_heads * width, own.k0 * width, own.k1 * width, own.replicas),
        ]
        self.weight = self.param(replace(bias_spec(rows, ONES), role="norm"))
        copies = len(own.replicas[0].members) if own.replicas else 1
        self.shard = HeadShard(own.q1 - own.q0, own.k1 - own.k0, heads, kv_heads, width, copies)

    def forward(self, qkv: Tensor) -> Tensor:
        """qkv (T, (heads + 2 * kv_heads) * K) of this rank -> the same with q and k normalized, (T, heads + 2 *
        kv_heads, K)."""
        packed = qkv.unflatten(-1, (-1, self.shard.width))
        return width_norm(packed, self.weight, self.shard, self.eps, self.env.tp, self.env.kernels_for(WIDTH_NORM))


class Attention(ScoredAttention):
    """qkv -> norm of heads, or of all at once (if any) -> rotary (if any) -> attention as `kind` says -> output
    projection.

    table: of a relative bias, which becomes part of the kind."""

    first_in_memory = ("qkv.weight", "out.weight", "qkv.bias", "out.bias", "sinks")

    def __init__(self, env: Env, spec: AttentionSpec, table: RelativeBiasTable | None = None):
        super().__init__(env)
        heads, head_dim = spec.heads, spec.head_dim
        own = Heads.of(env, heads, spec.kv_heads)
        self.heads, self.kv_heads, self.head_dim, self.all_heads = own.q1 - own.q0, own.k1 - own.k0, head_dim, heads
        self.first_head, self.dropout, self.layer = own.q0, spec.dropout, spec.layer
        self.temperature = spec.temperature
        self.rotary = None if spec.rotation is None else Rotary(spec.rotation)
        kind = replace(spec.kind, sinks=spec.sinks is not None, bias=None if table is None else table.bias)
        self.kind, self.table = supported(kind, env, spec.dropout), table
        rows = self._rows(spec, own)
        self.gate_width = self.heads * head_dim if spec.gated else 0
        if spec.gated:
            rows[:1] = gated_rows(spec, own)
        if spec.std_q is not None:
            rows[0] = replace(rows[0], init=Normal(spec.std_q))
        init, transposed = Normal(spec.std), spec.transposed
        init_out = init if spec.std_out is None else Normal(spec.std_out)
        self.qkv = ColumnLinear(env, rows, spec.width, init, transposed=transposed, bias=spec.biased)
        features = own.q0 * head_dim, own.q1 * head_dim
        self.out = RowLinear(
            env,
            spec.names[3],
            spec.width,
            heads * head_dim,
            features,
            init_out,
            transposed=transposed,
            bias=spec.bias in ("all", "not keys"),
        )
        logits = [OutputRows(spec.sinks, heads, own.q0, own.q1)] if spec.sinks else []
        self.sinks = self.param(bias_spec(logits, init)) if logits else None
        norms = spec.head_norm
        self.q_norm = spec.norm(env, norms[0], head_dim, norms[2]) if norms else None
        self.k_norm = spec.norm(env, norms[1], head_dim, norms[2]) if norms else None
        self.width_norm = WidthNorm(env, spec, own) if spec.width_norm else None
        self.unit_norm, self.value_norm = spec.unit_norm, spec.value_norm
        self.values_are_keys = spec.names[0] != spec.names[1] == spec.names[2]
        of_queries = 3 if spec.gated else 2  # and the output's
        self.num_weights = spec.width * (of_queries * heads + (2 - self.values_are_keys) * spec.kv_heads) * head_dim
        self.remembers = PageSpec(self.kv_heads, head_dim, head_dim, window=self.kind.window)
        self.whole_only = whole_only(self.kind)
        self.score_outputs, self.unclippable = score_outputs(spec), unclippable(spec)

    def _rows(self, spec: AttentionSpec, own: Heads) -> list[OutputRows]:
        names, fused = spec.names, spec.names[0] == spec.names[1]
        sizes = tuple(n * spec.head_dim for n in (spec.heads, spec.kv_heads, spec.kv_heads))
        keys = own.k0, own.k1, own.replicas
        both = [keys] if not fused and names[1] == names[2] else [keys, keys]  # values may be the keys
        rows = []
        if fused and spec.fused_by == "head":
            places = [3 * head + i for i in range(3) for head in range(own.q0, own.q1)]
            return [
                OutputRows(
                    names[0],
                    sum(sizes),
                    at * self.head_dim,
                    (at + 1) * self.head_dim,
                    own.replicas,
                    outputs=(MatrixOutputs("qkv"[at % 3], self.head_dim, heads=True),),
                )
                for at in places
            ]
        for i, (first, last, replicas) in enumerate([(own.q0, own.q1, ()), *both]):
            base = sum(sizes[:i]) if fused else 0
            size = sum(sizes) if fused else sizes[i]
            heads = (MatrixOutputs("qkv"[i], self.head_dim, heads=True),)
            at = base + first * self.head_dim, base + last * self.head_dim
            rows.append(OutputRows(names[i], size, *at, replicas, outputs=heads))
        return rows

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x (T / tp, D) -> (T / tp, D)."""
        return self.with_keys(x, batch)[0]

    def with_keys(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The same, and the keys and values (sequences, own kv_heads, S, K) as its queries read them."""
        recompute = self.env.recompute
        qkv, gate = self._ungated(recompute.op("qkv", self.qkv, x))
        q, k, v = recompute.op("rope", partial(self._heads, batch), qkv)
        if batch.paged is not None:
            mixed = self._attend_memory(batch.paged, q, k, v)
        else:
            mixed = recompute.by_batch("attention", self._attend, batch, context.likes_of(q, v), q, k, v)
        return self.out(gated(mixed, gate)), k, v

    def takes_lazy(self, x: Tensor) -> bool:
        return not any(map(self.env.recompute.recomputes, ("norm", "qkv"))) and self.qkv.takes_lazy(x)

    def _ungated(self, projected: Tensor) -> tuple[Tensor, Tensor | None]:
        """What `qkv` makes (T, ...) -> queries, keys and values, and the gate (T, own heads * K) if there is one."""
        if not self.gate_width:
            return projected, None
        return projected[:, self.gate_width :], projected[:, : self.gate_width]

    def _heads(self, batch: Batch, qkv: Tensor) -> tuple[Tensor, ...]:
        """q, k and v as attention reads them."""
        q, k, v = self._rotated(batch, qkv)
        return q if self.temperature is None else self.temperature.applied(q, batch), k, v

    def _rotated(self, batch: Batch, qkv: Tensor) -> tuple[Tensor, ...]:
        """qkv (T, (heads + 2 * kv_heads) * K), of which the last part may be missing if values are the keys -> q, k, v
        (sequences, heads or kv_heads, S, K), normalized and rotated."""
        if self.values_are_keys or self.value_norm is not None:
            qkv = self._with_values(qkv)
        table = self.rotary.table(batch, qkv.dtype) if self.rotary else None
        shape = (self.heads, self.kv_heads, batch.num_sequences)
        head_norm = self._head_norm(qkv)
        if head_norm is not None:
            qkv = qkv.view(len(qkv), self.heads + 2 * self.kv_heads, self.head_dim)
            return norm_rope(qkv, *head_norm, *shape, table, self.env.kernels_for(NORM_ROPE))
        if self.width_norm is not None:
            return rope(self.width_norm(qkv), *shape, table, self.env.kernels_for(ROPE))
        whole = not self.values_are_keys and self.value_norm is None
        lazy_grad = (
            whole and self.qkv.bias is None and self.qkv.takes_lazy(qkv)
        )  # a bias needs the values of the gradient
        return rope(qkv, *shape, table, self.env.kernels_for(ROPE), lazy_grad)

    def _with_values(self, qkv: Tensor) -> Tensor:
        """qkv with values that are the keys, and normalized, where they are to be."""
        packed, keys = qkv.unflatten(-1, (-1, self.head_dim)), self.heads + self.kv_heads
        values = packed[:, self.heads : keys] if self.values_are_keys else packed[:, keys:]
        if self.value_norm is not None:
            ones, kernels = qkv.new_ones(self.head_dim), self.env.kernels_for(NORM)
            values = rms_norm(values.flatten(0, 1), ones, self.value_norm, kernels).view_as(values)
        return torch.cat((packed[:, :keys], values), 1).flatten(1)

    def _head_norm(self, qkv: Tensor) -> tuple[Tensor, Tensor, float] | None:
        """What normalized queries and keys are multiplied by, and epsilon; None: heads are not normalized."""
        if self.unit_norm is not None:
            ones = qkv.new_ones(self.head_dim)
            return ones, ones, self.unit_norm
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm.factor, self.k_norm.factor, self.q_norm.eps

    @property
    def learned(self) -> Learned:
        """Its parameters beside the matrices."""
        return Learned(self.sinks, None if self.table is None else self.table.weight)

    def _attend(self, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """-> (T, own heads * K)."""
        if self.dropout > 0 and self.training:
            self.env.refuse_invariance("dropout of attention's probabilities")
            dropout = ProbabilityDropout(self.dropout, self.env.seed, self.layer, self.first_head)
            return context.attention_with_dropout((q, k, v), batch, self.plan, self.learned, dropout)
        return context.attention(q, k, v, batch, self.plan_here, self.learned)

    def _attend_memory(self, paged: PagedSequences, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same of sequences that go on from what is remembered of them."""
        heads = q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1)
        mixed = own_memory(self).attend(heads, paged, self.kind, self.learned, self.env.kernels_for(ATTENTION))
        return mixed.flatten(1)

    def flops(self, seq_length: int) -> float:
        return 2.0 * self.num_weights + 4.0 * self.kind.keys_per_query(seq_length) * self.all_heads * self.head_dim


def gated_rows(spec: AttentionSpec, own: Heads) -> list[OutputRows]:
    """Rows of the gates of this rank's heads, then those of their queries, in the matrix that has a head's queries and
    its gate one after the other."""
    width, size = spec.head_dim, 2 * spec.heads * spec.head_dim
    return [
        OutputRows(
            spec.names[0],
            size,
            (2 * head + part) * width,
            (2 * head + part + 1) * width,
            outputs=(MatrixOutputs(matrix, width, heads=True),),
        )
        for part, matrix in ((1, "gate"), (0, "q"))
        for head in range(own.q0, own.q1)
    ]


def gated(mixed: Tensor, gate: Tensor | None) -> Tensor:
    """What heads have read (T, own heads * K), times the sigmoid of their gate."""
    return mixed if gate is None else mixed * torch.sigmoid(gate)

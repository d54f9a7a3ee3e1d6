"""Attention that has queries alone: its keys and values are those of an earlier layer, the lender, and travel beside
the hidden states (Brandon et al., "Reducing transformer key-value cache size with cross-layer attention", 2024; Gemma
4). While sequences go on, all of these layers read the pages of the lender."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from phalanx.layout.param import MatrixOutputs
from phalanx.nn.attention import Attention, AttentionSpec, Heads, supported, whole_only
from phalanx.nn.env import Env
from phalanx.nn.initial import Normal
from phalanx.nn.linear import ColumnLinear, RowLinear
from phalanx.nn.memory import PageSpec
from phalanx.nn.module import OutputRows, own_memory
from phalanx.nn.rotary import Rotary
from phalanx.nn.scored_attention import ScoredAttention
from phalanx.ops.attention import context
from phalanx.ops.attention.attention import ATTENTION
from phalanx.ops.attention.kind import NOTHING, UnsupportedAttention
from phalanx.ops.dense.head_norm import NORM_ROPE, norm_rope
from phalanx.sequence.batch import Batch
from phalanx.sequence.paged import PagedSequences
from phalanx.sequence.streams import StreamSpec

UNKNOWN = ("width_norm", "unit_norm", "temperature", "sinks")
"""Fields of AttentionSpec that attention with borrowed keys does not have."""


class BorrowingAttention(ScoredAttention):
    """q -> norm of heads -> rotary (if any) -> attention to the lender's keys and values -> output projection.

    spec    as of the layer that it would be with keys of its own; the names of these are not used
    lender  the name of the lending layer
    """

    first_in_memory = ("q.weight", "out.weight", "q.bias", "out.bias")

    def __init__(self, env: Env, spec: AttentionSpec, lender: str):
        super().__init__(env)
        odd = [name for name in UNKNOWN if getattr(spec, name) is not None]
        if odd or spec.gated or spec.dropout or spec.head_norm is None:
            raise UnsupportedAttention(f"attention that borrows its keys is not this one: {', '.join(odd) or spec}")
        own, width = Heads.of(env, spec.heads, spec.kv_heads), spec.head_dim
        self.heads, self.kv_heads, self.head_dim, self.all_heads = own.q1 - own.q0, own.k1 - own.k0, width, spec.heads
        self.first_head, self.rotary = own.q0, None if spec.rotation is None else Rotary(spec.rotation)
        self.kind = supported(spec.kind, env)
        features, init = (own.q0 * width, own.q1 * width), Normal(spec.std)
        rows = [
            OutputRows(spec.names[0], spec.heads * width, *features, outputs=(MatrixOutputs("q", width, heads=True),))
        ]
        self.q = ColumnLinear(env, rows, spec.width, init, bias=spec.biased)
        out = spec.heads * width, features, init
        self.out = RowLinear(env, spec.names[3], spec.width, *out, bias=spec.bias in ("all", "not keys"))
        self.q_norm = spec.norm(env, spec.head_norm[0], width, spec.head_norm[2])
        self.num_weights = 2 * spec.width * spec.heads * width
        self.remembers = PageSpec(self.kv_heads, width, width, window=self.kind.window, lender=lender)
        self.whole_only = whole_only(self.kind)
        self.unclippable = "its keys are another layer's"

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, batch: Batch) -> Tensor:
        """x (T / tp, D), keys and values as `lent` makes them -> (T / tp, D)."""
        recompute = self.env.recompute
        q = recompute.op("rope", partial(self._rotated, batch), recompute.op("qkv", self.q, x))
        k, v = (self._heads(t, batch) for t in (keys, values))
        if batch.paged is not None:
            return self.out(self._attend_memory(batch.paged, q, k, v))
        attend = partial(self._attend)
        return self.out(recompute.by_batch("attention", attend, batch, context.likes_of(q, v), q, k, v))

    def _rotated(self, batch: Batch, projected: Tensor) -> Tensor:
        """(T, own heads * K) -> (sequences, own heads, S, K), normalized and rotated."""
        table = self.rotary.table(batch, projected.dtype) if self.rotary else None
        packed, norm = projected.view(len(projected), self.heads, self.head_dim), self.q_norm
        alone = norm.factor, projected.new_ones(self.head_dim), norm.eps, self.heads, 0, batch.num_sequences
        return norm_rope(packed, *alone, table, self.env.kernels_for(NORM_ROPE))[0]

    def _heads(self, x: Tensor, batch: Batch) -> Tensor:
        """The inverse of `flat`."""
        return x.view(batch.num_sequences, -1, self.kv_heads, self.head_dim).transpose(1, 2)

    def _attend(self, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """-> (T, own heads * K)."""
        return context.attention(q, k, v, batch, self.plan_here)

    def _attend_memory(self, paged: PagedSequences, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same of sequences that go on."""
        heads = q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1)
        kernels = self.env.kernels_for(ATTENTION)
        return own_memory(self).attend(heads, paged, self.kind, NOTHING, kernels).flatten(1)

    def flops(self, seq_length: int) -> float:
        return 2.0 * self.num_weights + 4.0 * self.kind.keys_per_query(seq_length) * self.all_heads * self.head_dim


def lend(attention: Attention, name: str) -> Attention:
    """The same layer, whose pages other layers read too."""
    if attention.remembers is None:
        raise TypeError("a layer that lends its keys remembers them")
    attention.remembers = replace(attention.remembers, lender=name)
    return attention


def lent_rows(batch: Batch, tp: int) -> int:
    """Keys and values are of all tokens of the ranks that share heads, each rank's of its own heads."""
    return batch.num_tokens


def lent_streams(names: tuple[str, str], spec: AttentionSpec) -> tuple[StreamSpec, StreamSpec]:
    """Keys and values that a layer lends, (T, own kv_heads * K) each, under these names."""
    width, heads = spec.kv_heads * spec.head_dim, spec.kv_heads
    return tuple(StreamSpec(name, width, lent_rows, heads=heads) for name in names)  # type: ignore[return-value]


def flat(heads: Tensor) -> Tensor:
    """Keys or values (sequences, kv_heads, S, K) -> (T, kv_heads * K), as they travel."""
    return heads.transpose(1, 2).flatten(0, 1).flatten(1).contiguous()

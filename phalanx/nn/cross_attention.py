"""Cross-attention: the tokens of a stream read those of another, with grouped heads sharded over tp. The queries'
matrix is of the reading stream; keys and values are one fused matrix of the stream that is read, the memory."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from phalanx.layout.param import MatrixOutputs
from phalanx.nn.attention import AttentionSpec, Heads
from phalanx.nn.env import Env
from phalanx.nn.initial import Normal
from phalanx.nn.linear import ColumnLinear, RowLinear
from phalanx.nn.memory import PageSpec
from phalanx.nn.module import Module, OutputRows, own_memory
from phalanx.nn.scored_attention import attention_plan
from phalanx.ops.attention.attention import ProbabilityDropout
from phalanx.ops.attention.cross import FEATURES, cross_attention
from phalanx.ops.attention.kind import UnsupportedAttention, refuse_unsupported
from phalanx.ops.attention.paged import PAGED_ATTENTION
from phalanx.ops.dense.rope import split_heads
from phalanx.sequence.batch import Batch

DROPOUT_SITE = 7
"""A key of the random numbers of its dropout: a layer's own attention has site 0."""


class CrossAttention(Module):
    """spec: names are those of the matrices for queries, keys, values and output; there is no rotation, no norm of
    heads, no sinks and no fused global matrix, and of the kind only scale and soft cap. memory: gives, of a batch, the
    tokens of the stream that is read."""

    first_in_memory = ("q.weight", "kv.weight", "out.weight", "q.bias", "kv.bias", "out.bias")

    def __init__(self, env: Env, spec: AttentionSpec, memory: Callable[[Batch], Batch]):
        super().__init__(env)
        for field in ("rotation", "head_norm", "sinks"):
            if getattr(spec, field) is not None:
                raise UnsupportedAttention(f"cross-attention has no {field}")
        env.refuse_invariance("cross-attention")
        refuse_unsupported(spec.kind, {"cross-attention": FEATURES})
        heads, head_dim = spec.heads, spec.head_dim
        own = Heads.of(env, heads, spec.kv_heads)
        self.heads, self.kv_heads, self.head_dim, self.all_heads = own.q1 - own.q0, own.k1 - own.k0, head_dim, heads
        self.first_head, self.dropout, self.layer = own.q0, spec.dropout, spec.layer
        self.kind, self.memory_of = spec.kind, memory
        init, transposed = Normal(spec.std), spec.transposed
        init_out = init if spec.std_out is None else Normal(spec.std_out)
        first, last = own.q0 * head_dim, own.q1 * head_dim
        init_q = None if spec.std_q is None else Normal(spec.std_q)
        one_head = (MatrixOutputs("", head_dim, heads=True),)
        queries = [OutputRows(spec.names[0], heads * head_dim, first, last, init=init_q, outputs=one_head)]
        keys = (spec.kv_heads * head_dim, own.k0 * head_dim, own.k1 * head_dim, own.replicas)
        self.q = ColumnLinear(env, queries, spec.width, init, transposed=transposed, bias=spec.biased)
        rows = [OutputRows(name, *keys, outputs=one_head) for name in spec.names[1:3]]
        self.kv = ColumnLinear(env, rows, spec.width, init, transposed=transposed, bias=spec.biased)
        self.out = RowLinear(
            env,
            spec.names[3],
            spec.width,
            heads * head_dim,
            (first, last),
            init_out,
            transposed=transposed,
            bias=spec.bias in ("all", "not keys"),
        )
        self.plan = attention_plan(env, self.kind)
        self.remembers = PageSpec(self.kv_heads, head_dim, head_dim, source=True)
        self.reading_weights = 2 * spec.width * heads * head_dim
        self.memory_weights = 2 * spec.width * spec.kv_heads * head_dim

    def forward(self, x: Tensor, memory: Tensor, batch: Batch) -> Tensor:
        """x (T / tp, D), memory (M / tp, D) of this rank's tokens of the memory -> (T / tp, D)."""
        if batch.paged is not None:
            return self.out(self._attend_memory(x, memory, batch))
        recompute = self.env.recompute
        q, kv = recompute.op("qkv", lambda x, memory: (self.q(x), self.kv(memory)), x, memory)
        likes = (((len(q), self.heads * self.head_dim), q.dtype),)
        return self.out(recompute.by_batch("attention", self._attend, batch, likes, q, kv))

    def _attend(self, batch: Batch, q: Tensor, kv: Tensor) -> Tensor:
        """-> (T, own heads * K)."""
        memory = self.memory_of(batch)
        k, v, _ = split_heads(kv.unflatten(1, (-1, self.head_dim)), self.kv_heads, self.kv_heads, memory.num_sequences)
        q = q.unflatten(1, (-1, self.head_dim)).unflatten(0, (batch.num_sequences, -1)).transpose(1, 2)
        dropout = None
        if self.dropout > 0 and self.training:
            dropout = ProbabilityDropout(self.dropout, self.env.seed, self.layer, self.first_head, DROPOUT_SITE)
        return cross_attention((q, k, v), batch, memory, self.plan, dropout)

    def _attend_memory(self, x: Tensor, memory: Tensor, batch: Batch) -> Tensor:
        """The same of sequences that go on: keys and values of a memory are computed in the step in which its sequence
        begins, and remembered -> (T, own heads * K)."""
        if batch.paged is None or batch.paged.source is None:
            raise RuntimeError("a batch of generation says where the encoder's memory is")
        q, keys = self.q(x).unflatten(1, (-1, self.head_dim)), None
        if not self.memory_of(batch).idle:
            k, v = self.kv(memory).unflatten(1, (-1, self.head_dim)).split(self.kv_heads, 1)
            keys = k, v
        kernels = self.env.kernels_for(PAGED_ATTENTION)
        return own_memory(self).read(q, keys, batch.paged.source, self.kind, kernels).flatten(1)

    def flops(self, seq_length: int) -> float:
        """With a memory as long as the sequence."""
        return self.flops_beside(seq_length, seq_length) if seq_length else self.flops_beside(1, 1, mixing=False)

    def flops_beside(self, seq_length: int, memory_length: int, mixing: bool = True) -> float:
        """Forward FLOPs for each reading token, where sequences of `seq_length` tokens read `memory_length` tokens; not
        `mixing`: without attention."""
        read = 4.0 * memory_length * self.all_heads * self.head_dim if mixing else 0.0
        return 2.0 * self.reading_weights + 2.0 * self.memory_weights * memory_length / seq_length + read

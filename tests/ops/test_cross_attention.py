"""Cross-attention: what queries of one stream read of another, alone and over ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phalanx.comm.mesh import Mesh
from phalanx.layout.grid import Grid
from phalanx.nn.attention import AttentionSpec
from phalanx.nn.cross_attention import CrossAttention
from phalanx.nn.env import Env, WeightRules
from phalanx.ops.attention import cross
from phalanx.ops.attention.attention import ProbabilityDropout
from phalanx.ops.attention.context import AttentionPlan
from phalanx.ops.attention.cross import cross_attention
from phalanx.ops.attention.kind import AttentionKind, RelativeBias, UnsupportedAttention
from phalanx.ops.attention.segments import MaskedSegments
from phalanx.sequence.batch import Batch
from tests.harness.weights import with_memory
from tests.ops.test_ops import normal

HEADS, KV_HEADS, WIDTH, VALUE = 4, 2, 6, 5
# documents of the two streams, by number; 3 has no memory, and nobody reads 4
TEXT, MEMORY = (
    [0] * 4 + [1] * 3 + [3] * 5 + [5] * 2 + [6] * 10,
    [0] * 2 + [1] * 9 + [4] * 4 + [2] * 1 + [5] * 9 + [6] * 7,
)


def stream(numbers: list[int] | None, length: int) -> Batch:
    ids = torch.arange(2 * length)
    documents = None if numbers is None else torch.tensor(numbers)
    return Batch(ids, ids, ids % length, ids // length + 7, 2, length, documents)


def streams(documents: bool) -> tuple[Batch, Batch]:
    """Two sequences of 12 tokens, which read 16 tokens of memory."""
    return stream(TEXT if documents else None, 12), stream(sorted(MEMORY) if documents else None, 16)


def drawn() -> list[Tensor]:
    """q, k, v of flat tokens, and the gradient of the output."""
    shapes = ((24, HEADS, WIDTH), (32, KV_HEADS, WIDTH), (32, KV_HEADS, VALUE), (24, HEADS * VALUE))
    return [normal(*shape, seed=i) for i, shape in enumerate(shapes)]


def by_sequence(batch: Batch, x: Tensor) -> Tensor:
    return x.unflatten(0, (batch.num_sequences, -1)).transpose(1, 2)


def plain(q: Tensor, k: Tensor, v: Tensor, batch: Batch, memory: Batch, kind: AttentionKind) -> Tensor:
    """softmax(q k^T scale) v token by token; a query that reads nothing gets zeros."""
    rows, scale = [], WIDTH**-0.5 if kind.scale is None else kind.scale
    for t in range(batch.num_tokens):
        reads = [j for j in range(memory.num_tokens) if memory.runs[0][j] == batch.runs[0][t]]
        reads = [j for j in reads if j // memory.seq_length == t // batch.seq_length]
        for h in range(HEADS):
            g = h // (HEADS // KV_HEADS)
            if not reads:
                rows.append(torch.zeros(VALUE, dtype=q.dtype))
                continue
            scores = torch.stack([q[t, h] @ k[j, g] for j in reads]) * scale
            if kind.soft_cap is not None:
                scores = kind.soft_cap * torch.tanh(scores / kind.soft_cap)
            rows.append(torch.softmax(scores, 0) @ torch.stack([v[j, g] for j in reads]))
    return torch.stack(rows).view(batch.num_tokens, -1)


def truth_of(documents: bool, kind: AttentionKind) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    *inputs, dout = drawn()
    inputs = [x.requires_grad_() for x in inputs]
    out = plain(*inputs, *streams(documents), kind)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kind", [AttentionKind(), AttentionKind(scale=0.7, soft_cap=0.8)], ids=["plain", "soft cap"])
def test_every_query_reads_the_memory_of_its_document(monkeypatch, kind, documents, segments):
    """Truth: every query and key. Also by runs of queries and keys, as kernels on GPUs do it."""
    if segments:
        if kind.soft_cap is not None:
            pytest.skip("such kernels have no soft cap")
        monkeypatch.setitem(cross.SEGMENTS.__dict__, "fast", lambda *_, **__: MaskedSegments)
    *inputs, dout = drawn()
    inputs = [x.requires_grad_() for x in inputs]
    batch, memory = streams(documents)
    heads = [by_sequence(of, x) for of, x in zip((batch, memory, memory), inputs)]
    out = cross_attention(tuple(heads), batch, memory, AttentionPlan(kind))
    found = [out.detach(), *torch.autograd.grad(out, inputs, dout)]
    for mine, expected in zip(found, truth_of(documents, kind), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-11, atol=1e-12)


def on_rank(rank: int, world: int, documents: bool, ulysses: int, dynamic: bool, p: float | None) -> list[Tensor]:
    mesh = Mesh(Grid(cp=world, ulysses=ulysses, dynamic=dynamic), rank)
    *inputs, dout = drawn()
    batch, memory = (each.cut(mesh.part) for each in streams(documents))
    q, k, v = (of.take(x).requires_grad_() for of, x in zip((batch, memory, memory), inputs))
    heads = (by_sequence(batch, q), by_sequence(memory, k), by_sequence(memory, v))
    dropout = None if p is None else ProbabilityDropout(p, 1, 2, 0, 7)
    out = cross_attention(heads, batch, memory, AttentionPlan(axes=mesh.model), dropout)
    out.backward(batch.take(dout))
    places = [of.take(torch.arange(of.all_tokens)) for of in (batch, memory)]
    return [*places, out.detach(), q.grad, k.grad, v.grad]


def joined(found: list[list[Tensor]]) -> list[Tensor]:
    """Output and gradients of all tokens."""
    made = []
    for i, which in ((2, 0), (3, 0), (4, 1), (5, 1)):
        places = torch.cat([each[which] for each in found])
        made.append(torch.cat([each[i] for each in found])[places.argsort()])
    return made


@pytest.mark.parametrize(
    "world, documents, ulysses, dynamic",
    [(2, False, 1, False), (3, True, 1, False), (2, True, 2, False), (2, True, 1, True)],
)
def test_both_streams_are_cut(ranks, world, documents, ulysses, dynamic):
    found = ranks.run("tests.ops.test_cross_attention:on_rank", world, documents, ulysses, dynamic, None)
    for mine, expected in zip(joined(found), truth_of(documents, AttentionKind()), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-11, atol=1e-12)


def test_dropout_is_the_same_in_every_layout(ranks):
    alone = joined(ranks.run("tests.ops.test_cross_attention:on_rank", 1, True, 1, False, 0.3))
    for mine, expected in zip(
        joined(ranks.run("tests.ops.test_cross_attention:on_rank", 2, True, 1, False, 0.3)), alone, strict=True
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-11, atol=1e-12)
    assert not torch.allclose(alone[0], truth_of(True, AttentionKind())[0])
    for mine, expected in zip(
        joined(ranks.run("tests.ops.test_cross_attention:on_rank", 1, True, 1, False, 0.0)),
        truth_of(True, AttentionKind()),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-11, atol=1e-12)


def test_streams_that_do_not_belong_together_are_refused():
    (q, k, v, _), (batch, memory) = drawn(), streams(True)
    heads = (by_sequence(batch, q), by_sequence(memory, k), by_sequence(memory, v))
    with pytest.raises(ValueError, match="2 sequences cannot read the memory of 1"):
        cross_attention(heads, batch, replace(memory, num_sequences=1, seq_length=32), AttentionPlan())
    with pytest.raises(ValueError, match="only the queries have documents"):
        cross_attention(heads, batch, replace(memory, documents=None), AttentionPlan())
    with pytest.raises(UnsupportedAttention, match="cross-attention has no bias, no window"):
        cross_attention(heads, batch, memory, AttentionPlan(AttentionKind(window=3, bias=RelativeBias(8, 9))))


# ---- the module ----------------------------------------------------------------------------------

WEIGHTS = {"q": (24, 10), "k": (12, 10), "v": (12, 10), "o": (10, 24)}


def module_on_rank(rank: int, world: int, tp: int) -> list[Tensor]:
    """Rows of the output, gradients of both inputs, and of every global matrix (zero where it is not here)."""
    mesh = Mesh(Grid(tp=tp, cp=world // tp), rank)
    env = Env(grid=mesh.grid, at=mesh.at, axes=mesh.model, weights=WeightRules(dtype=torch.float64))
    spec = AttentionSpec(
        names=tuple(WEIGHTS), width=10, heads=HEADS, kv_heads=KV_HEADS, head_dim=WIDTH, std=0.1, bias="none"
    )
    batch, memory = (each.cut(mesh.part) for each in streams(True))
    layer = with_memory(CrossAttention(env, spec, lambda _: memory))
    matrices = {name: normal(*shape, seed=3) for name, shape in WEIGHTS.items()}
    for p in layer.parameters():
        for piece in p.spec.pieces:
            piece.of(p.data).copy_(matrices[piece.name][piece.box.slices()])
    x, m = (of.take(normal(of.all_tokens, 10, seed=i)) for i, of in ((1, batch), (2, memory)))
    x, m = (t.chunk(tp)[mesh.at.tp].clone().requires_grad_() for t in (x, m))
    dout = batch.take(normal(24, 10, seed=4)).chunk(tp)[mesh.at.tp]
    out = layer(x, m, batch)
    out.backward(dout)
    grads = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in WEIGHTS.items()}
    for p in layer.parameters():
        for piece in p.spec.pieces:
            grads[piece.name][piece.box.slices()] += piece.of(p.grad)
    places = [of.take(torch.arange(of.all_tokens)).chunk(tp)[mesh.at.tp] for of in (batch, memory)]
    return [*places, out.detach(), x.grad, m.grad, *grads.values()]


@pytest.mark.parametrize("world, tp", [(2, 2), (2, 1)])
def test_a_layer_is_the_same_on_ranks(ranks, world, tp):
    """Truth: one process, whose arithmetic the op's tests check."""
    (alone,) = ranks.run("tests.ops.test_cross_attention:module_on_rank", 1, 1)
    found = ranks.run("tests.ops.test_cross_attention:module_on_rank", world, tp)
    for i, which in ((2, 0), (3, 0), (4, 1)):
        places = torch.cat([each[which] for each in found])
        mine = torch.cat([each[i] for each in found])[places.argsort()]
        torch.testing.assert_close(mine, alone[i][alone[which].argsort()], rtol=1e-11, atol=1e-12)
    for i in range(5, 9):
        torch.testing.assert_close(sum(each[i] for each in found), alone[i], rtol=1e-11, atol=1e-12)

"""Attention of every kind over ranks of context parallelism: by ring, by all-gather, by heads, and over documents that
are balanced over ranks."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from phalanx.comm.mesh import Mesh
from phalanx.layout.grid import Grid
from phalanx.ops.attention import backends, context
from phalanx.ops.attention.attention import ProbabilityDropout
from phalanx.ops.attention.kind import AttentionKind, Learned, RelativeBias
from phalanx.sequence.batch import Batch
from phalanx.sequence.shard import SequenceShard
from tests.ops.test_ops import normal, plain_bucket

HEADS, KV_HEADS, WIDTH, LENGTH = 4, 2, 3, 22
DOCUMENTS = [0] * 13 + [1] * 5 + [2] * 4 + [3] * 3 + [4] * 19
PREFIX = [1] * 4 + [0] * 9 + [1] * 5 + [0] * 4 + [1] + [0] * 2 + [1] * 11 + [0] * 8

KINDS = {
    "both": AttentionKind("both"),
    "both, window": AttentionKind("both", window=5),
    "both, narrow window, sinks": AttentionKind("both", window=2, sinks=True),
    "prefix": AttentionKind("prefix"),
    "prefix, window, soft cap": AttentionKind("prefix", window=6, soft_cap=0.8),
    "chunk": AttentionKind(chunk=4),
    "chunk, both, window": AttentionKind("both", chunk=9, window=3, scale=0.9),
    "soft cap, sinks": AttentionKind(soft_cap=0.7, sinks=True),
    "bias": AttentionKind(bias=RelativeBias(6, 9), scale=1.0),
    "bias, both, sinks": AttentionKind("both", bias=RelativeBias(8, 9, True), sinks=True),
    "bias, both, window, soft cap": AttentionKind("both", window=7, bias=RelativeBias(8, 9, True), soft_cap=0.9),
}


def batch_of(documents: bool, prefix: bool = True) -> Batch:
    ids = torch.arange(2 * LENGTH)
    rows = torch.tensor(DOCUMENTS) if documents else None
    marks = torch.tensor(PREFIX) if prefix else None
    return Batch(ids, ids, ids % LENGTH, ids // LENGTH, 2, LENGTH, rows, most_documents=8 * documents, prefix=marks)


def drawn(kind: AttentionKind) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The packed q, k and v, the parameters that the kind has, and the gradient of the output."""
    shapes = {"sinks": (HEADS,)} if kind.sinks else {}
    shapes |= {} if kind.bias is None else {"bias": (kind.bias.buckets, HEADS)}
    packed = normal(2 * LENGTH, HEADS + 2 * KV_HEADS, WIDTH)
    learned = {name: normal(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    return packed, learned, normal(2 * LENGTH, HEADS * WIDTH, seed=8)


@cache
def pairs(kind: AttentionKind, documents: bool) -> tuple[Tensor, Tensor]:
    """Of every query and key: whether it is read, and the bucket of its distance. One pair at a time."""
    count = 2 * LENGTH
    number = [(t // LENGTH, DOCUMENTS[t] if documents else 0) for t in range(count)]
    seen, bucket = torch.zeros(count, count, dtype=torch.bool), torch.zeros(count, count, dtype=torch.int64)
    for t, j in product(range(count), repeat=2):
        start = number.index(number[t])
        ordered = j <= t or kind.direction == "both" or (kind.direction == "prefix" and PREFIX[j] == 1)
        near = kind.window is None or abs(t - j) < kind.window
        inside = kind.chunk is None or (t - start) // kind.chunk == (j - start) // kind.chunk
        seen[t, j] = number[t] == number[j] and ordered and near and inside
        bucket[t, j] = 0 if kind.bias is None else plain_bucket(j - t, kind.bias)
    return seen, bucket


@cache
def truth_of(name: str, documents: bool) -> list[Tensor]:
    """Every query and key: the output and the gradients of q, k, v and of the parameters."""
    kind = KINDS[name]
    packed, learned, dout = drawn(kind)
    inputs = [x.requires_grad_() for x in (packed, *learned.values())]
    named, (seen, bucket) = dict(zip(learned, inputs[1:])), pairs(kind, documents)
    q, k, v = packed.transpose(0, 1).split((HEADS, KV_HEADS, KV_HEADS))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
    scores = q @ k.mT * (WIDTH**-0.5 if kind.scale is None else kind.scale)
    if kind.soft_cap is not None:
        scores = kind.soft_cap * torch.tanh(scores / kind.soft_cap)
    if kind.bias is not None:
        scores = scores + named["bias"][bucket].permute(2, 0, 1)
    scores = scores.masked_fill(~seen, -torch.inf)
    if kind.sinks:
        scores = torch.cat((scores, named["sinks"].view(-1, 1, 1).expand(-1, len(packed), 1)), -1)
    out = (torch.softmax(scores, -1)[..., : len(packed)] @ v).transpose(0, 1).flatten(1)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def on_rank(rank: int, world: int, layout: dict, documents: bool, names: tuple[str, ...], p: float | None = None):
    """Of each kind: the places of this rank's tokens, output, gradients."""
    form = layout.pop("form")
    mesh = Mesh(Grid(cp=world, **layout), rank)
    batch = batch_of(documents).cut(mesh.part)
    sequences = 1 if batch.balanced is not None else 2
    found = []
    for name in names:
        packed, learned, dout = drawn(KINDS[name])
        mine = batch.take(packed).requires_grad_()
        given = Learned(**{key: value.requires_grad_() for key, value in learned.items()})
        heads = mine.unflatten(0, (sequences, -1)).transpose(1, 2).split((HEADS, KV_HEADS, KV_HEADS), 1)
        plan = context.AttentionPlan(KINDS[name], mesh.model, form)
        if p is None:
            out = context.attention(*heads, batch, plan, given)
        else:
            out = context.attention_with_dropout(heads, batch, plan, given, ProbabilityDropout(p, 1, 2, 0))
        out.backward(batch.take(dout))
        places = batch.take(torch.arange(2 * LENGTH))
        found.append([places, out.detach(), mine.grad, *(t.grad for t in learned.values())])
    return found


def joined(found: list[list[Tensor]]) -> list[Tensor]:
    """Rows of all tokens in their order; gradients of parameters summed."""
    order = torch.cat([each[0] for each in found]).argsort()
    rows = [torch.cat([each[i] for each in found])[order] for i in (1, 2)]
    return [*rows, *(sum(each[i] for each in found) for i in range(3, len(found[0])))]


LAYOUTS = [
    (2, dict(form="ring")),
    (3, dict(form="ring")),
    (3, dict(form="allgather")),
    (2, dict(form="ring", ulysses=2)),
    (4, dict(form="allgather", ulysses=2)),
    (2, dict(form="ring", dynamic=True)),
    (3, dict(form="allgather", dynamic=True)),
]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("world, layout", LAYOUTS, ids=str)
def test_every_kind_over_ranks(ranks, world, layout, documents):
    """Truth: every query and key of one process, in float64; outputs and every gradient."""
    if layout.get("dynamic") and not documents:
        pytest.skip("whole sequences are documents of their own: see the other case")
    found = ranks.run("tests.sequence.test_context_kinds:on_rank", world, layout, documents, tuple(KINDS))
    for i, name in enumerate(KINDS):
        truth = truth_of(name, documents)
        for mine, expected in zip(joined([each[i] for each in found]), truth, strict=True):
            assert (mine - expected).abs().max() <= 1e-12 * max(1, expected.abs().max()), name


def test_the_balanced_batch_is_one():
    """Both a document that ranks share and whole ones are among its pieces."""
    part = batch_of(True).cut(SequenceShard(0, 3, dynamic=True))
    assert part.balanced is not None and part.shared and len(part.pieces) > 1


@pytest.mark.parametrize("name", ["bias, both, sinks", "chunk, both, window", "prefix, window, soft cap"])
def test_dropout_takes_every_kind(ranks, name):
    """Dropping nothing, it is the same; dropping some, the same in every layout."""
    given = ("tests.sequence.test_context_kinds:on_rank",)
    (found,) = zip(*ranks.run(*given, 2, dict(form="ring"), True, (name,), 0.0))
    for mine, expected in zip(joined(found), truth_of(name, True), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)
    (alone,) = zip(*ranks.run(*given, 1, dict(form="ring"), True, (name,), 0.4))
    for layout in (dict(form="ring", ulysses=2), dict(form="ring", dynamic=True)):
        (found,) = zip(*ranks.run(*given, 2, layout, True, (name,), 0.4))
        for mine, expected in zip(joined(found), joined(alone), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [None, 1, 4, 11])
@pytest.mark.parametrize("length, count", [(16, 2), (23, 3), (41, 4), (5, 4)])
def test_blocks_hold_what_is_read_both_ways(length, count, window):
    """Truth: every pair of tokens."""
    kind = AttentionKind("both", window=window).within(length)
    for mine, theirs in product(SequenceShard(0, count).all, repeat=2):
        places = [torch.tensor([p for run in part.runs(length) for p in run]) for part in (mine, theirs)]
        near = (places[0].unsqueeze(-1) - places[1]).abs() < (window or length)
        block = context.block_of(mine, theirs, length, kind, False)
        assert (block is None) == (not near.any())
        if block is not None:
            inside = near[block.queries, block.keys]
            assert inside.sum() == near.sum() and (block.how == "mask") == (not inside.all())


@pytest.mark.parametrize("name", ["PLAIN", "ROWS"])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_cap_scores_and_add_a_bias(monkeypatch, causal, name):
    """Truth: softmax written out and autograd through it. Given the log-sum-exp and output of more keys, backward
    returns a share."""
    monkeypatch.setattr(backends, "ROW_ELEMENTS", 2 * 4 * 5 * 2)  # two queries at a time
    backend = getattr(backends, name)
    shapes = ((2, 4, 5, 6), (2, 2, 5, 6), (2, 2, 5, 6), (4, 5, 5), (2, 2, 3, 6), (2, 2, 3, 6))
    q, k, v, bias, more_k, more_v = (normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes))

    def scores(keys: Tensor) -> Tensor:
        return 0.7 * torch.tanh(q @ keys.repeat_interleave(2, 1).mT * 0.4 / 0.7)

    first = scores(k) + bias
    first = first.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf) if causal else first
    every = torch.cat((first, scores(more_k)), -1)
    joint = torch.softmax(every, -1) @ torch.cat((v, more_v), 2).repeat_interleave(2, 1)
    dout = normal(2, 4, 5, 6, seed=9)
    truth = torch.autograd.grad(joint, (q, k, v, bias), dout)
    with torch.no_grad():
        how, more = backends.Scoring(None, causal, 0.4, 0.7, bias), backends.Scoring(None, False, 0.4, 0.7)
        out, lse = backend.forward(q, k, v, how)
        torch.testing.assert_close(lse, first.logsumexp(-1), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(out, torch.softmax(first, -1) @ v.repeat_interleave(2, 1), rtol=1e-12, atol=1e-12)
        whole = (joint, every.logsumexp(-1))
        found = backend.backward(dout, backends.SavedBlock(q, k, v, *whole), how)
        other = backend.backward(dout, backends.SavedBlock(q, more_k, more_v, *whole), more)
    for mine, expected in zip((found.q + other.q, *found[1:]), truth, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)

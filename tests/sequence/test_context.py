"""Context parallelism: how sequences are cut, what each rank computes, sends and keeps; parity of whole models is in
tests/verifying/test_parity.py."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from phalanx.comm.mesh import Mesh
from phalanx.config.read import load_run
from phalanx.config.run import Run
from phalanx.data.config import DataConfig
from phalanx.data.loader import Prefetcher, train_loader, valid_loaders
from phalanx.engine.build import build
from phalanx.engine.evaluate import evaluate
from phalanx.forecast.data_table import pairs_read
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.layout.grid import Grid
from phalanx.ops.attention import attention as whole
from phalanx.ops.attention import backends, context, join_kernel
from phalanx.ops.attention.kind import CAUSAL, AttentionKind, Learned
from phalanx.ops.attention.segments import MaskedSegments
from phalanx.sequence.batch import Batch
from phalanx.sequence.shard import SequenceShard
from tests.harness.parity import base_run, random_weights, sample_batch
from tests.models.test_models import all_logits

# ---- how sequences are cut -----------------------------------------------------------------------


@pytest.mark.parametrize("length, count", [(16, 1), (16, 2), (16, 8), (17, 2), (6, 3), (23, 3), (31, 4), (1000003, 8)])
def test_parts_are_the_sequence(length, count):
    """Every place once; chunks as even as can be; chunk i and its mirror image together."""
    parts = SequenceShard(0, count).all
    runs = [run for part in parts for run in part.runs(length)]
    assert sum(map(len, runs)) == length and max(map(len, runs)) - min(map(len, runs)) <= 1
    starts = sorted((run.start, run.stop) for run in runs)
    assert starts[0][0] == 0 and starts[-1][1] == length and all(a[1] == b[0] for a, b in zip(starts, starts[1:]))
    for i, part in enumerate(parts):
        assert [starts.index((r.start, r.stop)) for r in part.runs(length)] == [i, 2 * count - 1 - i]


@pytest.mark.parametrize("length, count, run", [(48, 6, 2), (47, 6, 3), (33, 8, 4), (50, 4, 4)])
def test_neighbours_are_a_part_together(length, count, run):
    for part in SequenceShard(0, count).all:
        together = sorted(p for other in part.neighbours(run) for chunk in other.runs(length) for p in chunk)
        assert together == [p for chunk in part.among(run).runs(length) for p in chunk]


@pytest.mark.parametrize("length, count", [(16, 2), (23, 4), (13, 6)])
def test_cut_and_joined(length, count):
    rows = torch.arange(3 * length)
    batch = Batch(rows, rows + 1, rows + 2, rows + 3, 3, length, rows // 5)
    parts = [batch.cut(part) for part in SequenceShard(0, count).all]
    for part in parts:
        assert torch.equal(part.tokens % length, part.places) and torch.equal(part.labels, part.tokens + 1)
        assert torch.equal(part.documents, part.tokens // 5) and torch.equal(part.uncut.samples, batch.samples)
        assert len(part.tokens) == part.num_tokens <= part.most_tokens == max(p.num_tokens for p in parts)
    assert torch.equal(parts[1].join([part.pad(part.tokens) for part in parts], parts[1].part.all), rows)
    assert all(torch.equal(a, b.tokens) for a, b in zip(parts[0].split(rows, parts[0].part.all), parts))
    assert torch.equal(
        parts[1].among(2).tokens, parts[1].join([parts[0].tokens, parts[1].tokens], parts[1].part.neighbours(2))
    )


def test_cp_axes():
    """Neighbours exchange heads; ranks with equal places among their neighbours read each other's keys; sums are
    over dp x cp."""
    grid = Grid(pp=2, dp=2, cp=6, tp=2, ulysses=3)
    at = grid.coords(2 * (6 + 4) + 1)
    assert (at.dp, at.cp, at.tp) == (1, 4, 1)
    assert [grid.coords(r).cp for r in grid.cp_heads(at)] == [3, 4, 5] and [
        grid.coords(r).cp for r in grid.cp_keys(at)
    ] == [1, 4]
    assert {(c.pp, c.dp, c.tp) for c in map(grid.coords, grid.cp_heads(at) + grid.cp_keys(at))} == {(0, 1, 1)}
    assert grid.sum_size("dp") == 12 and grid.stage == 24


# ---- what is computed ----------------------------------------------------------------------------


def brute_force(length: int, count: int, window: int | None) -> np.ndarray:
    """(count, count) pairs of tokens: how many keys of each part the queries of each part read."""
    owner = np.empty(length, np.int64)
    for part in SequenceShard(0, count).all:
        for run in part.runs(length):
            owner[run.start : run.stop] = part.index
    found = np.zeros((count, count), np.int64)
    for place in range(length):
        first = 0 if window is None else max(0, place - window + 1)
        found[owner[place]] += np.bincount(owner[first : place + 1], minlength=count)
    return found


@pytest.mark.parametrize(
    "length, count, window",
    [(16, 2, None), (23, 3, None), (40, 4, 7), (40, 4, 40), (41, 4, 23), (64, 8, 1), (64, 8, 3)],
)
def test_blocks_hold_what_is_read(length, count, window):
    """Truth: every pair of tokens. A block has all pairs that are read, and says of itself what is true; where
    nothing is read there is none."""
    reads = brute_force(length, count, window)
    for mine, theirs in product(SequenceShard(0, count).all, repeat=2):
        kind = AttentionKind(window=window).within(length)
        block = context.block_of(mine, theirs, length, kind, False)
        assert (block is None) == (reads[mine.index, theirs.index] == 0)
        if block is None:
            continue
        q, k = ([p for run in part.runs(length) for p in run] for part in (mine, theirs))
        distance = np.array(q)[block.queries, None] - np.array(k)[None, block.keys]
        seen = (distance >= 0) & (distance < (window or length))
        assert seen.sum() == reads[mine.index, theirs.index]
        if block.how == "all":
            assert seen.all()
        if block.how == "causal":
            assert (seen == np.tri(*seen.shape, dtype=bool)).all()


@pytest.mark.parametrize("length", [4096, 4099, 65536, 999_983])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_every_rank_computes_as_much(length, count):
    """Within 2 %: tokens (matmuls) and pairs of query and key (attention), by the closed sum; and what kernels are
    given to do."""
    tokens = [part.size(length) for part in SequenceShard(0, count).all]
    pairs = [
        sum((run.start + run.stop + 1) * len(run) // 2 for run in part.runs(length))
        for part in SequenceShard(0, count).all
    ]
    assert sum(pairs) == length * (length + 1) // 2
    given = []
    for mine in SequenceShard(0, count).all:
        blocks = [context.block_of(mine, theirs, length, CAUSAL, False) for theirs in mine.all]
        area = [
            (b.queries.stop - b.queries.start) * (b.keys.stop - b.keys.start) / (2 if b.how == "causal" else 1)
            for b in blocks
            if b
        ]
        given.append(sum(area))
    for each in (tokens, pairs, given):
        assert max(each) <= 1.02 * min(each)
    assert sum(given) == pytest.approx(sum(pairs), rel=2 / length * count + 1e-3)


def test_what_packed_parts_read():
    """Truth: every pair of tokens of one sequence and document. Without documents parts read as much."""
    batch = sample_batch([5, 6, 11], documents=True)
    row = torch.arange(48) // 16
    seen = (
        (row[:, None] == row)
        & (batch.documents[:, None] == batch.documents)
        & torch.ones(48, 48, dtype=torch.bool).tril()
    )
    expected = [int(batch.cut(part).take(seen.sum(1)).sum()) for part in SequenceShard(0, 4).all]
    assert pairs_read(batch, SequenceShard(0, 4)) == expected and len(set(expected)) > 1
    both = (row[:, None] == row) & (batch.documents[:, None] == batch.documents)
    every = [int(batch.cut(part).take(both.sum(1)).sum()) for part in SequenceShard(0, 4).all]
    assert pairs_read(batch, SequenceShard(0, 4), True) == every
    assert len(set(pairs_read(sample_batch([5, 6], documents=False), SequenceShard(0, 4)))) == 1


KINDS = {"causal": AttentionKind(), "window": AttentionKind(window=5), "scaled": AttentionKind(scale=0.3)}


def attention_on_ranks(
    rank: int,
    world: int,
    ulysses: int,
    form: str,
    kind: AttentionKind,
    value: int,
    sinks: bool,
    documents: bool,
    dtype: torch.dtype,
):
    """Outputs and gradients of this rank's part, in float64; inputs are made from whole ones."""
    mesh = Mesh(Grid(cp=world, ulysses=ulysses), rank)
    batch, inputs, dout = attention_inputs(value, sinks, documents)
    batch = batch.cut(mesh.part)
    mine = [t.to(dtype) for t in inputs]
    q, k, v = (batch.take(t).unflatten(0, (2, -1)).transpose(1, 2).requires_grad_() for t in mine[:3])
    s = mine[3].requires_grad_() if sinks else None
    out = context.attention(
        q, k, v, batch, context.AttentionPlan(replace(kind, sinks=sinks), mesh.model, form), Learned(s)
    )
    out.backward(batch.take(dout).to(dtype))
    flat = [t.grad.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
    return [t.detach().double() for t in (out, *flat)] + ([s.grad.double()] if sinks else [])


def attention_inputs(value: int, sinks: bool, documents: bool):
    make = torch.Generator().manual_seed(3)
    length, heads, kv_heads, width = 22, 8, 4, 6

    def normal(*shape):
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    ids = torch.arange(2 * length)
    docs = torch.tensor([0, 1, 1, 1, 2] * 9)[: 2 * length].cumsum(0) if documents else None
    batch = Batch(ids, ids, ids % length, ids // length, 2, length, docs)
    inputs = [
        normal(2 * length, heads, width),
        normal(2 * length, kv_heads, width),
        normal(2 * length, kv_heads, value),
        normal(heads),
    ]
    return batch, inputs, normal(2 * length, heads * value)


CASES = [
    (2, 1, "ring", "causal", 6, False, False),
    (3, 1, "ring", "scaled", 4, False, False),
    (4, 1, "ring", "window", 6, True, False),
    (4, 1, "allgather", "causal", 6, True, False),
    (3, 1, "allgather", "window", 6, False, True),
    (4, 4, "ring", "causal", 6, True, True),
    (4, 2, "ring", "causal", 4, False, True),
    (4, 2, "allgather", "window", 6, True, False),
    (2, 2, "ring", "window", 6, True, False),
]


@pytest.mark.parametrize("world, ulysses, form, kind, value, sinks, documents", CASES)
def test_attention_over_ranks(ranks, world, ulysses, form, kind, value, sinks, documents):
    """Truth: the op of whole sequences, in float64; outputs and every gradient, uneven parts included. In bf16
    within a few roundings."""
    batch, inputs, dout = attention_inputs(value, sinks, documents)
    q, k, v = (t.unflatten(0, (2, -1)).transpose(1, 2).requires_grad_() for t in inputs[:3])
    s = inputs[3].requires_grad_() if sinks else None
    out = whole.attention(q, k, v, batch, replace(KINDS[kind], sinks=sinks), Learned(s))
    out.backward(dout)
    truth = [out.detach(), *(t.grad.transpose(1, 2).flatten(0, 1) for t in (q, k, v))]
    for dtype, bound in ((torch.float64, 1e-12), (torch.bfloat16, 0.04)):
        arguments = (ulysses, form, KINDS[kind], value, sinks, documents, dtype)
        found = ranks.run("tests.sequence.test_context:attention_on_ranks", world, *arguments)
        for i, expected in enumerate(truth):
            joined = batch.cut(SequenceShard(0, world)).join([f[i] for f in found], SequenceShard(0, world).all)
            assert (joined - expected).abs().max() <= bound * expected.abs().max()
        if sinks:
            assert (sum(f[-1] for f in found) - s.grad).abs().max() <= bound * s.grad.abs().max()


@pytest.mark.parametrize("kind", [CAUSAL, AttentionKind("both")], ids=["causal", "both"])
@pytest.mark.parametrize("length, count", [(16, 2), (17, 3), (50, 4)])
def test_segments_read_what_the_mask_shows(length, count, kind):
    """Documents as runs of queries and of keys, for kernels that have no masks: of every pair of parts, one-token
    documents included."""
    pick = torch.Generator().manual_seed(length)
    rows = torch.cat([(torch.rand(length, generator=pick) < 0.3).cumsum(0) + 100 * i for i in range(2)]).unique(
        return_inverse=True
    )[1]
    flat = torch.arange(2 * length)
    batch = Batch(flat, flat, flat % length, flat // length, 2, length, rows, most_documents=len(rows.unique()) + 3)
    for mine, source in product(SequenceShard(0, count).all, SequenceShard(0, count).all):
        block = context.block_of(mine, source, length, kind, True)
        if block is None:
            continue
        part = batch.cut(mine)
        mask, blind = context.mask_of(part, source, block, kind, torch.float64)
        segments, found_blind = context.segments_of(part, source, block)
        queries, keys = (
            torch.searchsorted(ends, torch.arange(int(ends[-1])), right=True)
            for ends in (segments.of_queries, segments.of_keys)
        )
        queries, keys = (side.view(2, -1) for side in (queries, keys))
        seen = queries.unsqueeze(-1) == keys.unsqueeze(-2)
        causal = mine == source and kind == CAUSAL
        if causal:
            seen &= torch.ones(seen.shape[1:], dtype=torch.bool).tril()
        assert torch.equal(seen.unsqueeze(1), mask == 0) and torch.equal(found_blind, blind)
        assert (
            max(segments.of_queries.diff()) <= segments.most_queries
            and max(segments.of_keys.diff()) <= segments.most_keys
        )
        given = [torch.randn(2, 2, side.shape[1], 4, generator=pick).double() for side in (queries, keys, keys)]
        by_mask = backends.PLAIN.forward(*given, backends.Scoring(mask, False, 0.5))
        by_segments = MaskedSegments(segments).forward(*given, backends.Scoring(None, causal, 0.5))
        for found, truth in zip(by_segments, by_mask):
            reads = ~blind.view(*blind.shape, *[1] * (found.dim() - 3)).expand_as(found)
            torch.testing.assert_close(found[reads], truth[reads], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal, masked", [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("name", ["PLAIN", "CPU"])
def test_backends(name, causal, masked):
    """Truth: softmax written out in float64, and autograd through it. Given the log-sum-exp and output of more keys,
    backward returns a share."""
    make = torch.Generator().manual_seed(1)
    shapes = ((4, 5), (2, 5), (2, 5), (2, 3), (2, 3))
    q, k, v, more_k, more_v = (
        torch.randn(2, h, n, 6, generator=make, dtype=torch.float64).requires_grad_() for h, n in shapes
    )
    mask = (
        torch.zeros(2, 1, 5, 5, dtype=torch.float64).masked_fill_(torch.arange(5) > 2, -torch.inf) if masked else None
    )

    def scores(keys):
        return q @ keys.repeat_interleave(2, 1).mT * 0.4

    first = scores(k)
    first = (
        first.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf)
        if causal
        else first
        if mask is None
        else first + mask
    )
    every = torch.cat((first, scores(more_k)), -1)
    values = torch.cat((v, more_v), 2).repeat_interleave(2, 1)
    joint, dout = torch.softmax(every, -1) @ values, torch.randn(2, 4, 5, 6, generator=make, dtype=torch.float64)
    truth = torch.autograd.grad(joint, (q, k, v), dout)
    backend = getattr(backends, name)
    with torch.no_grad():
        how, saved = backends.Scoring(mask, causal, 0.4), (joint, every.logsumexp(-1))
        out, lse, *kept = backend.forward(q, k, v, how)
        torch.testing.assert_close(out, torch.softmax(first, -1) @ v.repeat_interleave(2, 1), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse, first.logsumexp(-1), rtol=1e-12, atol=1e-12)
        dq, *rest = backend.backward(dout, backends.SavedBlock(q, k, v, *saved), how)
        more = backends.SavedBlock(q, more_k, more_v, *saved)
        other = backend.backward(dout, more, backends.Scoring(None, False, 0.4)).q
    for found, expected in zip((dq + other, *rest), truth):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("more_dtype, wide", [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)])
def test_joined_by_the_kernel(more_dtype, wide):
    """Truth: the reference implementation. Heads lie anywhere, widths and numbers of tokens are odd, some tokens have
    nothing to take in."""
    make = torch.Generator().manual_seed(2)
    out, lse = (
        torch.randn(2, 21, 3, 10, generator=make, dtype=wide).transpose(1, 2),
        torch.randn(2, 3, 21, generator=make, dtype=wide) * 4,
    )
    more = torch.randn(2, 17, 3, 12, generator=make).to(more_dtype).transpose(1, 2)[..., :10]
    more_lse = torch.randn(2, 3, 17, generator=make, dtype=wide).masked_fill_(torch.arange(17) % 5 == 0, -torch.inf)
    found, truth = (out.clone(), lse.clone()), (out.clone(), lse.clone())
    join_kernel.join_(*found, more, more_lse, 4)
    context.join_(*truth, more, more_lse, 4)
    bound = 1e-14 if wide == torch.float64 else 1e-6
    torch.testing.assert_close(found, truth, rtol=bound, atol=bound)
    assert torch.equal(found[0][:, :, :4], out[:, :, :4]) and not torch.equal(found[0][:, :, 5:], out[:, :, 5:])


# ---- documents stay apart ------------------------------------------------------------------------


def logits_twice(rank: int, world: int, run: Run) -> list[np.ndarray]:
    """Of two batches that differ in the tokens of the first document alone."""
    plan = make_plan(run, world)
    mesh = Mesh(plan.grid, rank)
    state = build(plan, mesh)
    random_weights(state.model)
    batch = sample_batch([5, 6], documents=True)
    first = batch.documents == 0
    other = replace(batch, tokens=torch.where(first, (batch.tokens + 7) % 131, batch.tokens))
    found = [all_logits(state, [b.cut(mesh.part)])[0] for b in (batch, other)]
    return [batch.cut(mesh.part).take(first).numpy(), *found]


@pytest.mark.parametrize(
    "model, layout",
    [
        ("llama", dict(cp=2, cp_attention="ring")),
        ("mistral", dict(cp=2, cp_attention="allgather")),
        ("llama", dict(cp=2, cp_ulysses=2)),
        ("deepseek_v3-dense", dict(cp=2, cp_attention="ring")),
        ("gpt2", dict(cp=2)),
    ],
)
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_documents_do_not_touch_each_other(ranks, model, layout, precision):
    """The tokens of one document change; the logits of every other one keep their bits, those of its own do not."""
    run = replace(base_run(model, precision=precision), layout=LayoutConfig(**layout))
    for first, before, after in ranks.run("tests.sequence.test_context:logits_twice", 2, run):
        assert first.any() and np.array_equal(before[~first], after[~first])
        assert not np.array_equal(before[first], after[first])


def attention_twice(rank: int, world: int, ulysses: int, form: str) -> list[np.ndarray]:
    """Outputs of this rank's part with sinks and a window, twice: the second time document 2 has other queries, keys
    and values."""
    mesh = Mesh(Grid(cp=world, ulysses=ulysses), rank)
    batch, inputs, _ = attention_inputs(6, True, True)
    changed, mine = batch.documents == 2, batch.cut(mesh.part)
    found = [mine.take(changed).numpy()]
    for factor in (1.0, 3.0):
        other = [torch.where(changed.view(-1, 1, 1), t * factor, t) for t in inputs[:3]]
        q, k, v = (mine.take(t).unflatten(0, (2, -1)).transpose(1, 2) for t in other)
        plan = context.AttentionPlan(AttentionKind(window=7, sinks=True), mesh.model, form)
        found.append(context.attention(q, k, v, mine, plan, Learned(inputs[3])).numpy())
    return found


@pytest.mark.parametrize("ulysses, form", [(1, "ring"), (1, "allgather"), (2, "ring")])
def test_documents_do_not_touch_each_other_with_sinks(ranks, ulysses, form):
    for changed, before, after in ranks.run("tests.sequence.test_context:attention_twice", 4, ulysses, form):
        assert np.array_equal(before[~changed], after[~changed])
        assert not changed.any() or not np.array_equal(before[changed], after[changed])


# ---- bytes and calls -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [
        dict(cp=4, cp_attention="ring"),
        dict(cp=4, cp_attention="allgather"),
        dict(cp=4, cp_ulysses=4),
        dict(cp=4, cp_ulysses=2, cp_attention="ring"),
        dict(cp=4, cp_ulysses=2, cp_attention="allgather", recompute="full"),
    ],
    ids=str,
)
def test_bytes_and_calls_are_the_formulas(ranks, layout):
    """Per layer and micro-batch. n sequences of S tokens, H heads, G kv heads of width K on a rank; c = cp, u =
    cp_ulysses, m = c / u parts.

    Exchange of heads: q, k, v there and outputs back, in forward and backward: 4 calls; T = nS/c tokens, (H + 2G)K
    and HK wide.
    Ring: part i sends m - 1 - i times one of its chunks (nS/2m tokens, 2GK/u wide) to parts that come after it and i
    times both to those before, in forward and again in backward, where it also sends home the gradients of what it
    read: i chunks and 2 (m - 1 - i). All-gather: its nS/m tokens, forward and backward, and m times as much into the
    reduce-scatter. Full recompute does forward twice.
    """
    recomputed = 2 if layout.get("recompute") == "full" else 1
    run = base_run("llama-tied", global_batch=6, micro_batch=2, recompute=layout.get("recompute", "none"))
    run = replace(run, layout=LayoutConfig(**{k: v for k, v in layout.items() if k != "recompute"}))
    c, u = run.layout.cp, run.layout.cp_ulysses
    m, times, word = c // u, 6 * 3, 8  # layers x micro-batches, float64
    n, s, heads, kv_heads, width = 2, 16, 4, 4, 8
    for rank, found in enumerate(ranks.run("tests.harness.traffic:context_traffic", 4, run, False)):
        expected: dict[tuple[str, str], tuple[int, int]] = {}
        if u > 1:
            tokens = n * s // c
            there, back = tokens * (heads + 2 * kv_heads) * width * word, tokens * heads * width * word
            expected["cp" if m == 1 else "cp heads", "all_to_all"] = (
                times * (2 * recomputed + 2),
                times * (recomputed + 1) * (there + back),
            )
        axis = "cp" if u == 1 else "cp keys"
        if m > 1 and run.layout.cp_attention == "ring":
            i, chunk = rank // u, n * s // (2 * m) * 2 * kv_heads // u * width * word
            keys = (m - 1 - i + 2 * i) * chunk
            expected[axis, "hop"] = (
                times * (recomputed + 2) * (m - 1),
                times * ((recomputed + 1) * keys + (i + 2 * (m - 1 - i)) * chunk),
            )
        elif m > 1:
            part = n * s // m * 2 * kv_heads // u * width * word
            expected[axis, "all_gather"] = (times * (recomputed + 1), times * (recomputed + 1) * part)
            expected[axis, "reduce_scatter"] = (times, times * m * part)
        assert found == expected


# ---- data and evaluation -------------------------------------------------------------------------


def test_the_prefetcher_cuts():
    run = load_run("recipes/tiny_llama.yaml")
    loader = train_loader(run.data, seq_length=64, seed=1, vocab_size=run.model.vocab_size, samples=8)
    with Prefetcher(loader, [[0, 1], [2, 3]], part=SequenceShard(1, 3)) as batches:
        for batch, samples in zip(batches, ([0, 1], [2, 3])):
            expected = loader.batch(samples)
            assert torch.equal(batch.tokens, expected.cut(SequenceShard(1, 3)).tokens) and torch.equal(
                batch.uncut.labels, expected.labels
            )


def evaluated(rank: int, world: int, run: Run) -> dict[str, float]:
    plan = make_plan(run, world)
    state = build(plan, Mesh(plan.grid, rank))
    random_weights(state.model)
    return evaluate(
        state.model, valid_loaders(run.data, seq_length=run.train.seq_length, seed=1, vocab_size=run.model.vocab_size)
    )


def test_evaluation_is_of_whole_sequences(ranks):
    """Truth: one process. Samples past the last one only fill the shape, on every part."""
    run = base_run("mistral", micro_batch=2, eval_interval=5, eval_samples=5)
    run = replace(run, data=DataConfig(mock=True, document_attention=True))
    (alone,) = ranks.run("tests.sequence.test_context:evaluated", 1, run)
    for found in ranks.run("tests.sequence.test_context:evaluated", 4, replace(run, layout=LayoutConfig(cp=2))):
        assert found == pytest.approx(alone, rel=1e-12)

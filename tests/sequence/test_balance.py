"""Which ranks share which documents: the choice itself, what batches become by it, what is sent; parity of models is
in tests/verifying/test_parity.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.layout.config import LayoutConfig
from phalanx.sequence.balance import EXCHANGE, Share, assign, degrees_of, loads
from phalanx.sequence.batch import SharedDocument
from phalanx.sequence.shard import SequenceShard
from tests.harness.parity import SEQ, base_run, sample_batch


def held(lengths, shares: list[Share], count: int) -> list[int]:
    """Tokens of each rank."""
    found = [0] * count
    for length, share in zip(lengths, shares):
        for rank, part in enumerate(share.parts, share.first):
            found[rank] += part.size(length)
    return found


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=30),
    count=st.sampled_from([2, 3, 4, 6, 8]),
    heads=st.sampled_from([1, 2]),
    slack=st.integers(0, 200),
)
def test_nobody_has_too_much(lengths, count, heads, slack):
    heads = heads if count % heads == 0 else 1
    degrees = degrees_of(count, heads)
    size = -(-sum(lengths) // count) + slack
    shares = assign(lengths, [size] * count, degrees)
    assert shares == assign(list(lengths), [size] * count, degrees)
    if shares is None:
        return  # only where there is hardly any room left
    assert max(held(lengths, shares, count)) <= size
    assert all(
        s.degree in degrees and s.first % s.degree == 0 and (s.degree == 1 or n >= 2 * s.degree)
        for n, s in zip(lengths, shares)
    )


def test_degrees():
    assert degrees_of(8) == (1, 2, 4, 8) and degrees_of(6) == (1, 2, 3, 6)
    assert degrees_of(8, 4) == (1, 2, 4, 8) and degrees_of(6, 2) == (1, 2, 6) and degrees_of(6, 3) == (1, 3, 6)


def test_short_documents_are_not_cut_and_long_ones_as_little_as_they_need():
    assert assign([100] * 40, [1000] * 4, (1, 2, 4)) is not None
    shares = assign([100] * 39, [1000] * 4, (1, 2, 4))
    assert shares is not None and all(s.degree == 1 for s in shares)
    long, *short = assign([1500, *[50] * 30], [1000] * 4, (1, 2, 4))  # does not fit on one rank
    assert long.degree == 2 and all(s.degree == 1 for s in short)


def test_a_document_is_cut_for_balance_where_that_is_worth_it():
    """One rank would have 60,000^2 / 2 pairs to read and the others next to none; over four each has a quarter and
    the exchange."""
    lengths = [60_000, *[1_000] * 150]
    shares = assign(lengths, [65_536] * 4, (1, 2, 4))
    each = loads(lengths, shares, 4)
    assert shares[0].degree == 4 and max(each) <= 1.1 * sum(each) / 4
    assert 60_000 * EXCHANGE < 60_000**2 / 8  # what it costs is less than what it saves
    two = assign(
        [60_000] * 2, [65_536] * 8, (1, 2, 4, 8)
    )  # each would fit on one rank, and only one of them can be cut over all
    assert [share.degree for share in two] == [4, 4] and len(set(loads([60_000] * 2, two, 8))) == 1


def test_one_document_fills_up_what_others_leave():
    """Whole documents that fill no rank to the last token: the longest is not cut for it, another is, into parts of
    any length."""
    lengths, sizes = [700, 500, 420, 380, 333, 300, 250, 217, 170, 130, 100], [875] * 4
    assert sum(lengths) == sum(sizes)
    shares = assign(lengths, sizes, (1, 2, 4))
    assert held(lengths, shares, 4) == sizes
    cut = [i for i, share in enumerate(shares) if share.degree > 1]
    assert cut and max(lengths[i] for i in cut) < 300 and any(len(set(shares[i].sizes)) > 1 for i in cut)


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(2, 40), min_size=2, max_size=8), run=st.sampled_from([1, 2, 4]))
def test_parts_of_any_sizes_are_a_document(sizes, run):
    """Every place once, in chunks that stand as those of equal parts do; neighbours together are a part as well."""
    parts, length = SequenceShard.of_sizes(sizes).all, sum(sizes)
    assert [part.size(length) for part in parts] == sizes and all(len(r) for part in parts for r in part.runs(length))
    chunks = [part.runs(length)[0] for part in parts] + [part.runs(length)[1] for part in reversed(parts)]
    assert [place for chunk in chunks for place in chunk] == list(range(length))
    if len(sizes) % run == 0:
        for first in range(0, len(sizes), run):
            together = parts[first].among(run).runs(length)
            for side in (0, 1):
                assert sorted(
                    place for part in parts[first].neighbours(run) for place in part.runs(length)[side]
                ) == list(together[side])


def test_loads_count_every_pair_once():
    lengths = [7, 20, 33, 1]
    shares = [Share(1, 0), Share(2, 2), Share(4, 0), Share(1, 3)]
    assert sum(loads(lengths, shares, 4)) == sum(n * (n + 1) / 2 for n in lengths)


def balanced(kind, count: int, heads: int = 1):
    batch = sample_batch([3, 6, 9, 12, 15, 18], kind)
    return batch, [batch.cut(SequenceShard(i, count, True, heads)) for i in range(count)]


def test_dealt_parts_are_the_micro_batch():
    """Every token once; a document's tokens are on as many ranks as share it; what is taken and joined is what was
    there."""
    pieces = 0
    for kind in (True, "packed"):
        for count in (2, 3, 4, 6):
            batch, parts = balanced(kind, count)
            rows = torch.arange(batch.num_tokens)
            assert torch.equal(torch.cat([p.take(rows) for p in parts]).sort().values, rows)
            for part in parts:
                assert part.num_tokens == len(part.tokens) == 6 * part.part.size(SEQ) and torch.equal(
                    part.tokens, part.take(batch.tokens)
                )
                assert torch.equal(part.uncut.labels, batch.labels) and torch.equal(part.places, part.take(rows) % SEQ)
                if part.balanced is None:
                    continue
                assert torch.equal(torch.cat([piece.tokens for piece in part.pieces]), part.tokens)
                docs = part.pieces[-1].documents
                assert docs is None or (docs.diff() >= 0).all()
            pads = [p.pad(p.take(rows)) for p in parts]
            assert torch.equal(parts[1].join(pads, parts[1].part.all), rows)
            pieces += sum(len(p.shared) for p in parts if p.balanced is not None)
    assert pieces


def test_what_parity_is_shown_of():
    """The micro-batches of the parity tests: documents on one rank, on two, on all four, and some that cannot be
    dealt."""
    seen = set()
    for i in range(16):
        parts = [sample_batch([i], "packed").cut(SequenceShard(rank, 4, True)) for rank in range(4)]
        seen |= (
            {"not dealt"}
            if parts[0].balanced is None
            else {piece.part.count for part in parts for piece in part.pieces}
        )
    assert seen == {1, 2, 4, "not dealt"}
    filling = [
        shared
        for i in range(4)
        for rank in range(4)
        for shared in sample_batch([i], "filling").cut(SequenceShard(rank, 4, True)).shared
    ]
    assert len(filling) == 16 and all(shared.part.borders for shared in filling)


def test_one_document_as_long_as_the_micro_batch_is_cut_over_all():
    batch = sample_batch([0], False)
    batch = type(batch)(
        batch.tokens, batch.labels, batch.positions, batch.samples, 1, SEQ, torch.zeros(SEQ, dtype=torch.int64)
    )
    part = batch.cut(SequenceShard(1, 4, True))
    assert [(s.length, s.part) for s in part.shared] == [(SEQ, SequenceShard(1, 4))] and len(part.pieces) == 1
    assert torch.equal(part.tokens, batch.cut(SequenceShard(1, 4)).tokens)


def test_documents_that_cannot_be_dealt_are_cut_as_ever():
    """Nine documents of 1 token and one of 7 on 4 ranks of 4 tokens: no rank may lack one, and parts of the long one
    have a chunk each."""
    batch = sample_batch([0], False)
    docs = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5])  # threes do not fill fours
    batch = type(batch)(batch.tokens, batch.labels, batch.positions, batch.samples, 1, SEQ, docs)
    parts = [batch.cut(SequenceShard(i, 4, True)) for i in range(4)]
    assert all(
        p.balanced is None
        and p.part == SequenceShard(i, 4)
        and torch.equal(p.tokens, batch.cut(SequenceShard(i, 4)).tokens)
        for i, p in enumerate(parts)
    )


def test_documents_do_not_touch_each_other(ranks):
    """The tokens of one document change, which every rank shares or which one has whole; the logits of every other
    one keep their bits."""
    run = replace(base_run("mistral"), layout=LayoutConfig(cp=2, cp_degree="dynamic"))
    for first, before, after in ranks.run("tests.sequence.test_context:logits_twice", 2, run):
        assert np.array_equal(before[~first], after[~first])
        assert not first.any() or not np.array_equal(before[first], after[first])


# ---- bytes and calls -----------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["ring", "allgather"])
def test_bytes_and_calls_are_the_formulas(ranks, form):
    """Per layer and document of n tokens that d ranks share; nothing for documents on one rank. A chunk is n / 2d
    tokens (those of a part differ by one at most), 2 G K wide.

    Ring: part i sends its early chunk to the d - 1 - i parts after it and both to the i parts before, in forward and
    again in backward, and home the gradients of what it read: the early chunk of the i parts before it, both of the
    others'. 3 (d - 1) calls. All-gather: as many tokens as the largest part has, forward and backward, and d times
    as many into the reduce-scatter. Micro-batches that cannot be dealt are one document of all ranks
    (tests/sequence/test_context.py).
    """
    run = replace(
        base_run("llama-tied", global_batch=8), layout=LayoutConfig(cp=4, cp_degree="dynamic", cp_attention=form)
    )
    layers, word, width = 6, 8, 2 * 4 * 8  # float64, kv heads x their width
    for rank, found in enumerate(ranks.run("tests.harness.traffic:context_traffic", 4, run, "packed")):
        calls: Counter[tuple[str, str]] = Counter()
        tokens: Counter[tuple[str, str]] = Counter()
        for sample in range(8):
            batch = sample_batch([sample], "packed").cut(SequenceShard(rank, 4, True))
            for doc in batch.shared if batch.balanced is not None else [SharedDocument(0, SEQ, SequenceShard(rank, 4))]:
                d, i = doc.part.count, doc.part.index
                early, late = (len(run) for run in doc.part.runs(doc.length))
                axis = "cp" if d == 4 else f"cp keys of {d}"
                if form == "ring":
                    home = sum(
                        sum(map(len, other.runs(doc.length)[: 1 if other.index < i else 2]))
                        for other in doc.part.all
                        if other != doc.part
                    )
                    calls[axis, "hop"] += 3 * (d - 1)
                    tokens[axis, "hop"] += 2 * ((d - 1) * early + i * late) + home
                else:
                    most = doc.part.most(doc.length)
                    calls[axis, "all_gather"] += 2
                    tokens[axis, "all_gather"] += 2 * most
                    calls[axis, "reduce_scatter"] += 1
                    tokens[axis, "reduce_scatter"] += d * most
        assert found == {key: (layers * calls[key], layers * tokens[key] * width * word) for key in calls}

"""Packing: which documents share a sequence, what is stored of it, and that a packed model computes what its
documents alone do."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.base.errors import DataError
from phalanx.cli.show import pack_text
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.data.check import check
from phalanx.data.config import DataConfig, SourceConfig
from phalanx.data.index import Corpus, CorpusWriter
from phalanx.data.loader import micro_batch_samples, spread, train_loader, valid_loaders
from phalanx.data.packing import first_fit, make_packing, packing_path, read_packing, write_packing
from phalanx.engine.build import build
from phalanx.engine.step import accumulate, update
from phalanx.forecast.data_table import data_table, row_of
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.sequence.batch import IGNORE, Batch
from tests.harness.parity import MODELS, VOCAB, assemble, base_run, parts_of, random_weights, same_tensors

# ---- which documents share a sequence ------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=0, max_size=40), capacity=st.integers(20, 33))
def test_first_fit_is_the_first_that_fits(lengths, capacity):
    """Truth: the rule, bin by bin."""
    rooms, truth = [], []
    for length in lengths:
        at = next((i for i, room in enumerate(rooms) if room >= length), len(rooms))
        if at == len(rooms):
            rooms.append(capacity)
        rooms[at] -= length
        truth.append(at)
    assert first_fit(np.array(lengths, np.int64), capacity).tolist() == truth


def fewest_bins(lengths: list[int], capacity: int) -> int:
    """By search: the least number of bins that hold all."""
    lengths = sorted(lengths, reverse=True)

    def fits(rooms: tuple[int, ...], i: int) -> bool:
        if i == len(lengths):
            return True
        tried = {room for room in rooms if room >= lengths[i]}
        return any(
            fits(tuple(sorted(rooms[:k] + (rooms[k] - lengths[i],) + rooms[k + 1 :])), i + 1)
            for k in (rooms.index(room) for room in tried)
        )

    return next(n for n in itertools.count(-(-sum(lengths) // capacity)) if fits((capacity,) * n, 0))


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=9))
def test_fill_is_within_the_closed_bounds(lengths):
    """Dosa and Sgall 2013: floor(1.7 x best); longest first, Dosa 2007: 11/9 x best + 6/9."""
    best = fewest_bins(lengths, 20)
    assert first_fit(np.array(lengths, np.int64), 20).max() + 1 <= math.floor(1.7 * best)
    assert first_fit(np.array(sorted(lengths, reverse=True), np.int64), 20).max() + 1 <= 11 / 9 * best + 6 / 9


def lognormal(count: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).lognormal(2.0, 1.2, count).astype(int).clip(1, 200).tolist()


def write(prefix, lengths, dtype=np.uint16) -> str:
    """Document d: tokens 100 d, 100 d + 1 ... (lengths up to 100 tell documents apart)."""
    with CorpusWriter(prefix, dtype) as writer:
        for d, length in enumerate(lengths):
            writer.add_document(np.arange(length) % 100 + 100 * (d % 600))
    return str(prefix)


def packed(prefix: str, **options) -> DataConfig:
    return DataConfig(paths=(prefix,), split="1,0,0", packing="online", **options)


def options(seq_length: int = 32, samples: int = 1) -> dict[str, int]:
    return {"seq_length": seq_length, "seed": 3, "vocab_size": 65536, "samples": samples}


@pytest.mark.parametrize("decreasing", [False, True])
def test_every_document_whole_and_once(tmp_path, decreasing):
    """Truth: the lengths. No document is cut unless it is longer than a sequence, and empty ones are left out."""
    lengths = [*lognormal(500), 0, 1, 32, 33, 64, 65, 1000, 0]
    corpus = Corpus(write(tmp_path / "c", lengths))
    packing = make_packing(corpus, 0, corpus.num_tokens, 32, decreasing, 100)
    found, whole = Counter(), [p for b in range(packing.num_bins) for p in packing.pieces(b)]
    for start, count, goes_on in whole:
        d = corpus.document_at(start)
        first, stop = corpus.document_start(d), corpus.document_start(d + 1)
        assert start + count <= stop and (start + count < stop) == goes_on and (count == 32 or not goes_on)
        assert start == first or (stop - first > 32 and (start - first) % 32 == 0)
        found[d] += count
    assert found == Counter({d: n for d, n in enumerate(lengths) if n})
    assert all(sum(n for _, n, _ in packing.pieces(b)) <= 32 for b in range(packing.num_bins))
    assert packing.fill == sum(lengths) / (32 * packing.num_bins) and packing.fill > (0.97 if decreasing else 0.9)


@pytest.mark.parametrize("inside", [None, False])
def test_nothing_lost_and_nothing_twice_in_an_epoch(tmp_path, inside):
    """Truth: every token of every document once, and every pair of neighbours in a document once with a loss;
    padding has none."""
    lengths = [*lognormal(300), 1, 1, 100]
    prefix = write(tmp_path / "c", lengths)
    loader = train_loader(packed(prefix, document_attention=inside), **options())
    for epoch in (0, 1):
        batch = loader.batch(range(epoch * loader.num_samples, (epoch + 1) * loader.num_samples))
        real = batch.real > 0
        documents = [np.arange(n) % 100 + 100 * (d % 600) for d, n in enumerate(lengths)]
        assert Counter(batch.tokens[real].tolist()) == Counter(np.concatenate(documents).tolist())
        pairs = list(zip(batch.tokens.tolist(), batch.labels.tolist()))
        assert Counter(p for p in pairs if p[1] != IGNORE) == Counter(
            (a, b) for doc in documents for a, b in itertools.pairwise(doc.tolist())
        )
        assert (batch.labels[~real] == IGNORE).all() and (batch.tokens[~real] == 0).all()


def test_ranks_get_equal_amounts_of_attention(tmp_path):
    """The micro-batches of a step are what they are, for every dp, and each once; which rank has which follows the
    pairs that attention reads."""
    prefix = write(tmp_path / "c", lognormal(400))
    loader = train_loader(packed(prefix), **options())
    samples = range(16, 80)
    truth = [int((b.positions + 1)[b.real > 0].sum()) for b in (loader.batch([s]) for s in samples)]
    assert loader.pairs(samples) == truth
    cost = dict(zip(samples, truth))
    for dp in (1, 2, 4, 8, 16):
        ranks = [micro_batch_samples(16, 64, 2, dp, rank, loader.pairs) for rank in range(dp)]
        assert sorted(s for runs in ranks for s in runs) == [[s, s + 1] for s in range(16, 80, 2)]
        assert [s for runs in ranks for s in runs] == micro_batch_samples(16, 64, 2, 1, 0, loader.pairs)
        plain = [micro_batch_samples(16, 64, 2, dp, rank) for rank in range(dp)]
        spread_by, in_order = (
            [sum(cost[s] for run in runs for s in run) for runs in found] for found in (ranks, plain)
        )
        assert dp == 1 or max(spread_by) < max(in_order)
        assert (
            dp > 4 or max(spread_by) < 1.05 * sum(truth) / dp
        )  # two micro-batches of a rank are not always to be had so


@pytest.mark.parametrize(("count", "blocks"), [(12, 3), (12, 6), (30, 5), (7, 7), (9, 3), (5, 1)])
def test_any_number_of_ranks(count, blocks):
    costs = np.random.default_rng(count).lognormal(3, 1, count).astype(int).tolist()
    order = spread(costs, blocks)
    assert sorted(order) == list(range(count))
    sums = np.array(costs)[order].reshape(blocks, -1).sum(1)
    assert max(sums) <= np.array(costs).reshape(blocks, -1).sum(1).max() and max(sums) - min(sums) <= max(costs)


def test_a_packed_batch_by_hand(tmp_path):
    prefix = write(tmp_path / "c", [3, 1, 9, 2])
    loader = train_loader(packed(prefix), **options(4))
    rows = [loader.batch([i]) for i in range(loader.num_samples)]
    told = sorted(
        (b.tokens.tolist(), b.labels.tolist(), b.positions.tolist(), b.documents.tolist(), b.real.tolist())
        for b in rows
    )
    i = IGNORE
    assert told == [
        ([0, 1, 2, 100], [1, 2, i, i], [0, 1, 2, 0], [0, 0, 0, 1], [1, 1, 1, 1]),
        ([200, 201, 202, 203], [201, 202, 203, 204], [0, 1, 2, 3], [0, 0, 0, 0], [1, 1, 1, 1]),
        ([204, 205, 206, 207], [205, 206, 207, 208], [0, 1, 2, 3], [0, 0, 0, 0], [1, 1, 1, 1]),
        ([208, 300, 301, 0], [i, 301, i, i], [0, 0, 1, 0], [0, 1, 1, 2], [1, 1, 1, 0]),
    ]
    across = train_loader(packed(prefix, document_attention=False), **options(4)).batch([0])
    assert across.documents is None and across.positions.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_order_depends_on_seed_and_sample_alone(tmp_path, dp):
    """The tokens of a step are the same for any number of ranks, from a loader opened anew in mid-run too; another
    seed, another order."""
    prefix = write(tmp_path / "c", lognormal(300))
    whole = train_loader(packed(prefix), **options()).batch(range(16, 24))
    loader = train_loader(packed(prefix), **options())
    lists = [samples for rank in range(dp) for samples in micro_batch_samples(16, 8, 2, dp, rank)]
    assert torch.equal(torch.cat([loader.batch(samples).tokens for samples in lists]), whole.tokens)
    stream = train_loader(DataConfig(paths=(prefix,), split="1,0,0"), **options())
    assert loader.order == train_loader(packed(prefix), **options()).order != stream.order
    other = train_loader(packed(prefix), **{**options(), "seed": 4})
    assert not torch.equal(other.batch(range(16, 24)).tokens, whole.tokens)


def test_parts_of_the_split_are_packed_apart(tmp_path):
    lengths = lognormal(400)
    prefix = write(tmp_path / "c", lengths)
    config = replace(packed(prefix, valid={"more": prefix}), split="80,20,0")
    loader = train_loader(config, **options())
    valid = valid_loaders(config, **{k: v for k, v in options().items() if k != "samples"})
    counts = [int(each.batch(range(each.num_samples)).real.sum()) for each in (loader, valid["valid"], valid["more"])]
    assert counts[0] + counts[1] == counts[2] == sum(lengths)


def test_sources_of_several_files(tmp_path):
    a, b, c = (write(tmp_path / name, lognormal(count, count)) for name, count in (("a", 50), ("b", 70), ("c", 60)))
    sources = {"web": SourceConfig(paths=(a, b)), "code": SourceConfig(paths=(c,))}
    loader = train_loader(DataConfig(sources=sources, split="1,0,0", packing="online"), **options(samples=8))
    web = loader.sources[0]
    batch = loader.read([place for place in loader.locate(range(40)) if place.source == 0][: web.windows])
    assert len(web.packings) == 2 and batch.real.sum() > 0
    row = row_of(loader, loader.locate([0])[0])
    assert row.filled == sum(p.count for p in row.passages) and row.passages[0].at == 0


# ---- stored beside the index ---------------------------------------------------------------------


CONFIG = """
model: {family: llama, vocab_size: 65536, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: 2}
train: {steps: 3, global_batch: 4, micro_batch: 2, seq_length: 32, eval_interval: 3}
data: {split: "80,20,0", packing: offline}
"""  # noqa: E501


def test_stored_packing_is_read_back(tmp_path):
    """`data pack` stores each part that a run reads; a run finds them, and says how full they are."""
    prefix = write(tmp_path / "c", lognormal(400))
    (tmp_path / "run.yaml").write_text(CONFIG)
    lines = list(pack_text(str(tmp_path / "run.yaml"), (f"data.paths={prefix}",)))
    assert len(lines) == 2 and len(list(tmp_path.glob("c.32.*.pack"))) == 2
    config = DataConfig(paths=(prefix,), split="80,20,0", packing="offline")
    loader = train_loader(config, **options())
    valid = valid_loaders(config, **{k: v for k, v in options().items() if k != "samples"})
    run = Run(model=MODELS["llama"], data=config, train=base_run("llama", eval_interval=3).train)
    assert (
        f"packed {prefix}: {loader.sources[0].packings[0].text}" in data_table(run, loader, valid)
        and "filled" in lines[0]
    )
    online = train_loader(replace(config, packing="online"), **options())
    assert loader.num_samples <= online.num_samples and loader.batch([0]).real.sum() > 0


def test_stored_packings_that_are_refused(tmp_path):
    corpus = Corpus(write(tmp_path / "c", lognormal(100)))
    stop = corpus.num_tokens
    with pytest.raises(DataError, match="no such file: `phalanx data pack CONFIG` makes it"):
        read_packing(corpus, 0, stop, 32)
    packing = make_packing(corpus, 0, stop, 32, True, 50)
    path = packing_path(corpus.prefix, 0, stop, 32)
    write_packing(path, packing, corpus, 0, stop)
    assert read_packing(corpus, 0, stop, 32).pieces(1) == packing.pieces(1)
    with pytest.raises(DataError, match=r"there are c.32"):
        read_packing(corpus, 0, stop, 64)
    good = path.read_bytes()
    for size in (0, 40, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(DataError, match="cut short|expected"):
            read_packing(corpus, 0, stop, 32)
    for at in range(72, len(good), 97):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(DataError, match="damaged"):
            read_packing(corpus, 0, stop, 32)
    path.write_bytes(good)
    lengths = lognormal(100)
    first, second = next((i, i + 1) for i in range(99) if lengths[i] != lengths[i + 1])
    lengths[first], lengths[second] = lengths[second], lengths[first]
    with pytest.raises(DataError, match="made of other documents"):
        read_packing(Corpus(write(tmp_path / "c", lengths)), 0, stop, 32)


def test_made_up_tokens_have_no_stored_packing():
    [found] = check(DataConfig(mock=True, packing="offline"), evaluates=False, files=False)
    assert found.field == "data.packing" and "needs token files" in found.rule and found.valid == ("online", "off")


# ---- a packed model computes what its documents alone do -----------------------------------------

PACK = [
    [5, 1, 3, 7],
    [13],
    [2, 9, 4],
]  # documents of each sequence of 16 places, one-token ones and odd lengths among them; the rest is padding


def document(number: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(number))


def packed_batch(places: int = 16) -> Batch:
    tokens, labels = torch.zeros(len(PACK), places, dtype=torch.int64), torch.full((len(PACK), places), IGNORE)
    positions, documents, real = (torch.zeros_like(tokens) for _ in range(3))
    number, names = 0, itertools.count()
    for row, lengths in enumerate(PACK):
        at = 0
        for length in [*lengths, places - sum(lengths)]:
            run = slice(at, at + length)
            positions[row, run], documents[row, run] = torch.arange(length), number
            if at < sum(lengths):
                tokens[row, run] = document(next(names), length)
                labels[row, at : at + length - 1], real[row, run] = tokens[row, at + 1 : at + length], 1
            number, at = number + (length > 0), at + length
    samples = torch.arange(len(PACK)).repeat_interleave(places)
    return Batch(
        *(t.flatten() for t in (tokens, labels, positions)),
        samples,
        len(PACK),
        places,
        documents.flatten(),
        real=real.flatten(),
    )


def unpacked_batch(places: int = 16) -> Batch:
    """A document in each sequence, filled up."""
    lengths = [n for row in PACK for n in row]
    count = len(lengths)
    tokens, labels = torch.zeros(count, places, dtype=torch.int64), torch.full((count, places), IGNORE)
    real = torch.zeros_like(tokens)
    for row, length in enumerate(lengths):
        tokens[row, :length], real[row, :length] = document(row, length), 1
        labels[row, : length - 1] = tokens[row, 1:length]
    samples, real = torch.arange(count).repeat_interleave(places), real.flatten()
    positions = torch.arange(places).repeat(count)
    return Batch(
        tokens.flatten(), labels.flatten(), positions, samples, count, places, samples * 2 + 1 - real, real=real
    )


def step_of(rank: int, world: int, run: Run, kind: str) -> dict:
    """A step on the packed micro-batch, or on its documents: padded rows of one micro-batch, or each as a
    micro-batch of its own."""
    mesh = Mesh(make_plan(run, world).grid, rank)
    state = build(make_plan(run, world), mesh)
    random_weights(state.model)
    state.model.train()
    if kind == "packed":
        batches = [packed_batch()]
    elif kind == "padded":
        batches = [unpacked_batch()]
    else:
        lengths = [n for row in PACK for n in row]
        batches = []
        for number, n in enumerate(lengths):
            tokens = document(number, n)
            labels = torch.cat((tokens[1:], torch.tensor([IGNORE])))
            batches.append(Batch(tokens, labels, torch.arange(n), torch.full((n,), number), 1, n))
    tokens = accumulate(state, [b.cut(mesh.part) for b in batches])
    grads = parts_of(state, "grad")
    result = update(state, tokens, lr=1e-2)
    routing = None if result.routing is None else result.routing[:, :-6].numpy()
    return {
        "loss": result.loss.item(),
        "ahead": 0.0 if result.mtp_loss is None else result.mtp_loss.item(),
        "grads": grads,
        "routing": routing,
    }


def run_of(model: str, **layout) -> Run:
    run = base_run(model, len(PACK), len(PACK))
    return replace(run, data=DataConfig(mock=True, packing="online"), layout=LayoutConfig(bucket_mb=0, **layout))


SEQUENCE = replace(MODELS["mixtral"], router_aux_loss_scope="sequence")
FULL = replace(MODELS["mixtral-full"], router_aux_loss_scope="sequence")
PACKED = {
    "llama tp2": ("llama", 2, dict(tp=2)),
    "llama pp2": ("llama", 2, dict(pp=2)),
    "llama cp2": ("llama", 2, dict(cp=2)),
    "gpt_oss cp4 by heads, ep2": ("gpt_oss", 4, dict(cp=4, cp_ulysses=2, ep=2)),
    "mixtral ep2 tp2": ("mixtral", 2, dict(tp=2, ep=2)),
    "mixtral by document, cp2 ep2": (SEQUENCE, 2, dict(cp=2, ep=2)),
    "room by document, cp2 tp2": (FULL, 4, dict(cp=2, tp=2)),
    "deepseek_v3 with two further tokens, cp2 pp2": ("deepseek_v3-mtp", 4, dict(cp=2, pp=2)),
    "deepseek_v3 cp2 ring": ("deepseek_v3", 2, dict(cp=2, cp_attention="ring")),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_is_unpacked(ranks, name):
    """Truth: the same documents in a micro-batch of padded rows on one process, in float64: loss, every gradient,
    loads of experts. And, where no loss is that of a micro-batch, each document as a micro-batch of its own."""
    model, world, layout = PACKED[name]
    run = run_of("llama", **layout)
    model = MODELS[model] if isinstance(model, str) else model
    run, alone = replace(run, model=model), replace(run_of("llama"), model=model)
    found = ranks.run("tests.sequence.test_packing:step_of", world, run, "packed")
    (truth,) = ranks.run("tests.sequence.test_packing:step_of", 1, alone, "padded")
    compare(found, truth)
    if getattr(model, "router_aux_loss_scope", "sequence") == "sequence" and not getattr(
        model, "router_z_loss_coef", 0.0
    ):
        (each,) = ranks.run("tests.sequence.test_packing:step_of", 1, alone, "each")
        compare([truth], each)


def compare(found: list[dict], truth: dict) -> None:
    for each in found:
        np.testing.assert_allclose((each["loss"], each["ahead"]), (truth["loss"], truth["ahead"]), rtol=1e-10)
        if truth["routing"] is not None:
            np.testing.assert_array_equal(each["routing"], truth["routing"])
    same_tensors(assemble([f["grads"] for f in found]), assemble([truth["grads"]]), "gradient of")

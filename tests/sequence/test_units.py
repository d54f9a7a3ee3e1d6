"""Streams of units: what a micro-batch carries of images, which rank has which of them, and where the text finds what
they become."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.base.errors import DataError
from phalanx.comm.axis import ModelAxes
from phalanx.config.run import Run
from phalanx.data.config import DataConfig
from phalanx.data.loader import Prefetcher, Reading, train_loader
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import _batch
from phalanx.layout.config import LayoutConfig
from phalanx.models.llama import LlamaConfig
from phalanx.nn.env import Env
from phalanx.nn.units import Features
from phalanx.sequence.balance import assign_whole
from phalanx.sequence.batch import Batch
from phalanx.sequence.sample import IGNORE, Sample, SampleTransform, UnitRoom, Units, UnitStream
from phalanx.sequence.shard import SequenceShard
from phalanx.sequence.units import feature_index, unit_batch
from tests.harness.parity import SEQ, base_run, sample_batch

STREAM = UnitStream("patches", width=3, axes=2, joined=2, largest=12)
TOKEN = 5
RANKS = [(1, 1), (2, 1), (1, 3), (2, 2), (3, 2)]  # cp, tp


def units_of(sample: int, sizes: tuple[int, ...]) -> Units:
    """Rows that say where they come from: (sample, unit, row). The first two rows of each unit are no feature."""
    rows = [(sample, unit, row) for unit, size in enumerate(sizes) for row in range(size)]
    values = np.array(rows, np.float32).reshape(-1, 3)
    begins = [i for i, (_, _, row) in enumerate(rows) if row % 2 == 0 and row > 0]
    coordinates = values[:, 1:].astype(np.int64)
    return Units(values, coordinates, sizes, np.array(begins, np.int64), 2, tuple(f"image {n}" for n in sizes))


def batch_of(per_sample: list[tuple[int, ...]]) -> Batch:
    """A micro-batch whose text has a token for each feature, at places of its own."""
    found = [units_of(number, sizes) for number, sizes in enumerate(per_sample)]
    text = sample_batch(list(range(len(per_sample))), True)
    tokens = text.tokens.where(text.tokens != TOKEN, 6).view(len(found), -1)
    for number, units in enumerate(found):
        tokens[number, torch.randperm(SEQ, generator=torch.Generator().manual_seed(number))[: len(units.features)]] = (
            TOKEN
        )
    stream = unit_batch(found, range(len(found)), UnitRoom(STREAM, 16, "data.room.patches"))
    return replace(text, tokens=tokens.flatten(), beside={"patches": stream})


def ranks_of(batch: Batch, cp: int, tp: int) -> list[Batch]:
    return [batch.cut(SequenceShard(i, cp, rank=j, ranks=tp)) for i in range(cp) for j in range(tp)]


PER_SAMPLE = st.lists(st.lists(st.sampled_from([2, 4, 6, 12]), max_size=3).map(tuple), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(per_sample=PER_SAMPLE, ranks=st.sampled_from(RANKS))
def test_every_unit_is_whole_on_one_rank_and_the_text_finds_it(per_sample, ranks):
    per_sample = [sizes if sum(sizes) <= 16 else sizes[:1] for sizes in per_sample]
    batch = batch_of(per_sample)
    cp, tp = ranks
    parts = ranks_of(batch, cp, tp)
    rows = {part.beside["patches"].num_tokens for part in parts}
    assert len(rows) == 1
    seen, most = [], max((n for sizes in per_sample for n in sizes), default=0)
    everyones = torch.cat([part.beside["patches"].values for part in parts])
    for part in parts:
        own = part.beside["patches"]
        real = own.real.bool()
        kept = own.values[real]
        assert not own.values[~real].any() and (own.samples[real] == kept[:, 0]).all()
        assert (own.positions[real] == kept[:, 2]).all() and (own.coordinates[real] == kept[:, 1:]).all()
        assert own.labels.eq(IGNORE).all() and (own.documents.diff() >= 0).all()
        for number in own.documents[real].unique():
            rows_of = own.values[own.documents == number]
            assert len(rows_of) == per_sample[int(rows_of[0, 0])][int(rows_of[0, 1])]
            seen.append(tuple(rows_of[0, :2].int().tolist()))
        mean = sum(map(sum, per_sample)) / len(parts)
        assert len(kept) <= mean + most
    assert sorted(seen) == [(s, u) for s, sizes in enumerate(per_sample) for u in range(len(sizes))]
    # the k-th token that stands for a feature finds the k-th feature, whichever rank has it
    expected = {s: iter(units_of(s, sizes).values[units_of(s, sizes).features]) for s, sizes in enumerate(per_sample)}
    slow = [next(expected[at // SEQ]) if token == TOKEN else None for at, token in enumerate(batch.tokens.tolist())]
    for i in range(cp):
        part = parts[i * tp]
        index = feature_index(part, "patches", TOKEN)
        for at, place in zip(part.take(torch.arange(len(slow))).tolist(), index.tolist()):
            assert (place < 0) == (slow[at] is None)
            if slow[at] is not None:
                assert everyones[2 * place].tolist() == slow[at].tolist()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 64), max_size=40), st.integers(1, 8))
def test_ranks_differ_by_no_more_than_one_unit(sizes, ranks):
    homes = assign_whole(sizes, ranks)
    loads = [sum(n for n, home in zip(sizes, homes) if home == rank) for rank in range(ranks)]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_features_are_put_or_added_where_their_tokens_are():
    batch = batch_of([(4, 2), (), (6,)])
    env, x = Env(axes=ModelAxes()), torch.zeros(3 * SEQ, 3)
    own = batch.beside["patches"].values.view(-1, 2, 3).sum(1)
    put, added = (f(x + 1, own, batch, env) for f in (Features("patches", TOKEN).put, Features("patches", TOKEN).add))
    here = batch.tokens == TOKEN
    assert (put[~here] == 1).all() and (added[~here] == 1).all() and here.sum() == 3
    assert (added[here] == put[here] + 1).all()
    assert put[here].sum(0).tolist() == [2 * 0 + 2 * 2 * 2, 0, (2 + 3) + (2 + 3) + (4 + 5)]


def test_too_many_rows_name_the_unit_and_a_setting_that_works():
    found = [units_of(0, (4,)), units_of(1, (6, 12))]
    with pytest.raises(
        DataError, match="image 12 has 12 patches and finds no room: there are 22 .*data.room.patches=11 has it"
    ):
        unit_batch(found, [0, 1], UnitRoom(STREAM, 10, "data.room.patches"))
    assert unit_batch(found, [0, 1], UnitRoom(STREAM, 11, "data.room.patches")).num_tokens == 22


class Drawn(SampleTransform):
    """One unit for each sample with an odd number, and frames of sound for all."""

    def __call__(self, sample: Sample) -> Sample:
        n = sample.number
        frames = np.full((len(sample.tokens), 2), n, np.float32)
        return replace(sample, values=frames, units={"patches": units_of(n, (4,))} if n % 2 else {})


def test_the_loader_makes_them_and_changes_travel_with_the_batch():
    reading = Reading(transform=Drawn(), units=(UnitRoom(STREAM, 4, "data.room.patches"),))
    options = {"seq_length": SEQ, "seed": 1, "vocab_size": 131, "samples": 8, "reading": reading}
    loader = train_loader(DataConfig(mock=True), **options)
    for part in (SequenceShard(0, 2, rank=1, ranks=2), SequenceShard(1, 2, rank=0, ranks=2)):
        with Prefetcher(loader, [[0, 1], [2, 4]], part=part) as batches:
            first, second = batches
        own = first.beside["patches"]
        assert own.num_tokens == 4 and own.real.sum() == 4 * (part.index == part.rank == 0)
        assert second.beside["patches"].num_tokens == 2 and not second.beside["patches"].real.any()
        assert (first.values[:, 0] == first.samples).all() and first.values.shape == (SEQ, 2)
    doubled = first.map(lambda t: t * 2)
    assert (doubled.beside["patches"].units.spots == 2 * own.units.spots).all()
    doubled.copy_from(first)
    assert (doubled.beside["patches"].units.spots == own.units.spots).all()
    assert any(t is own.units.spots for t in first.tensors)


def test_the_plan_has_the_most_rows_that_may_come(monkeypatch):
    monkeypatch.setattr(LlamaConfig, "reads_units", (STREAM,))
    run = replace(base_run("llama", micro_batch=2), data=DataConfig(mock=True, room={"patches": 40}))
    for layout, rows in (({}, 80), ({"tp": 2}, 52), ({"tp": 2, "cp": 2}, 32)):
        world = layout.get("tp", 1) * layout.get("cp", 1)
        made: Run = replace(run, layout=LayoutConfig(**layout))
        assert _batch(make_plan(made, world)).beside["patches"].values.shape == (rows, 3)

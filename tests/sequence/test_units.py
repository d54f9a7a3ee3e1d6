"""Streams of units: what a micro-batch carries of images, which rank has which of them, and where the text finds what
they become."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain, product

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
from phalanx.data.media import UnitSize, homes_of, shared_units
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import _batch, rank_uses
from phalanx.layout.config import LayoutConfig
from phalanx.models.llama import LlamaConfig
from phalanx.nn.env import Env
from phalanx.nn.units import Features
from phalanx.sequence.balance import assign_shared, assign_whole
from phalanx.sequence.batch import Batch
from phalanx.sequence.sample import IGNORE, Sample, SampleTransform, UnitRoom, Units, UnitStream
from phalanx.sequence.shard import SequenceShard
from phalanx.sequence.units import feature_index, shared_unit_batch, unit_batch
from tests.harness.parity import SEQ, base_run, sample_batch
from tests.harness.pictures import shared_among

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


def shared_parts(per_replica: list[list[tuple[int, ...]]], cp: int, tp: int) -> list[tuple[SequenceShard, Batch]]:
    """What each rank of all replicas has of their units. per_replica: of each sample, the rows of its units."""
    replicas, each = len(per_replica), len(per_replica[0])
    every = [(number, units_of(number, sizes)) for number, sizes in enumerate(chain(*per_replica))]
    alone = [(number, one) for number, units in every for one in units.singly]
    sizes = [[UnitSize(len(one.values), len(one.features)) for one in units.singly] for _, units in every]
    found = []
    for r, i, j in product(range(replicas), range(cp), range(tp)):
        part = SequenceShard(i, cp, rank=j, ranks=tp, replica=r, replicas=replicas)
        own = [pair for pair, home in zip(alone, homes_of(sizes, part)) if home == part.here]
        shared = shared_units(sizes, own, STREAM, part)
        assert len(sizes) == replicas * each
        found.append((part, shared_unit_batch(shared, STREAM, part)))
    return found


def exchanged(parts: list[tuple[SequenceShard, Batch]]) -> list[torch.Tensor]:
    """By replica, what its ranks have of its features after an all-to-all and a gather, one rank after another."""
    sent = []
    for part, own in parts:
        features = own.values.view(-1, STREAM.joined, 3)[:, 0]
        route = own.units.route
        assert part.everyone == len(parts) == len(route.send) and sum(route.send) == len(route.rows)
        sent.append(features[route.rows].split(list(route.send)))
    found: dict[int, list[torch.Tensor]] = {}
    for part, own in parts:
        route = own.units.route
        received = torch.cat([sent[source][part.here] for source in range(len(parts))])
        assert tuple(len(sent[source][part.here]) for source in range(len(parts))) == route.receive
        rows = torch.cat([received, torch.full((1, 3), -1.0)])[route.order]
        found.setdefault(part.replica, []).append(rows)
    return [torch.cat(found[replica]) for replica in sorted(found)]


UNITS = st.lists(st.integers(1, 32).map(lambda n: 2 * n), max_size=6).map(tuple)
REPLICAS = st.integers(1, 3).flatmap(
    lambda samples: st.lists(st.lists(UNITS, min_size=samples, max_size=samples), min_size=2, max_size=4)
)


@settings(max_examples=60, deadline=None)
@given(per_replica=REPLICAS, ranks=st.sampled_from(RANKS))
def test_replicas_share_their_units_and_each_text_finds_its_own(per_replica, ranks):
    """Units of 2 to 64 rows: no rank has more than an even share and what one unit may add to it (Graham, 1969: 1 - 1 /
    n of the largest for n ranks), nor more than one unit beyond another rank. What they become reaches the replica
    whose text it is, in the order of the text."""
    parts = shared_parts(per_replica, *ranks)
    sizes = [n for sizes in chain(*per_replica) for n in sizes]
    loads = [int(own.real.sum()) for _, own in parts]
    most = max(sizes, default=0)
    assert sum(loads) == sum(sizes) and max(loads) - min(loads) <= most
    assert max(loads) <= sum(sizes) / len(parts) + most * (1 - 1 / len(parts))
    seen = []
    for _, own in parts:
        real = own.real.bool()
        assert not own.values[~real].any() and (own.samples[real] == own.values[real][:, 0]).all()
        assert (own.positions[real] == own.values[real][:, 2]).all()
        for number in own.documents[real].unique():
            rows = own.values[own.documents == number]
            sample, unit = rows[0, :2].int().tolist()
            assert len(rows) == list(chain(*per_replica))[sample][unit]
            seen.append((sample, unit))
    everyone = enumerate(chain(*per_replica))
    assert sorted(seen) == [(s, u) for s, sizes in everyone for u in range(len(sizes))]
    count = len(per_replica[0])
    for replica, (found, samples) in enumerate(zip(exchanged(parts), per_replica)):
        units = [units_of(replica * count + n, sizes) for n, sizes in enumerate(samples)]
        wanted = np.concatenate([np.empty((0, 3)), *(each.values[each.features] for each in units)])
        own = next(own for part, own in parts if part.replica == replica)
        assert own.units.sizes == tuple(chain(*samples))
        assert (found[own.units.spots].numpy() == wanted).all() and len(own.units.spots) == len(wanted)
        assert (found[len(wanted) :] == -1).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 64), max_size=40), st.integers(1, 8))
def test_ranks_differ_by_no_more_than_one_unit(sizes, ranks):
    homes = assign_whole(sizes, ranks)
    loads = [sum(n for n, home in zip(sizes, homes) if home == rank) for rank in range(ranks)]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes, default=0)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.integers(1, 64), max_size=12), min_size=2, max_size=5), st.integers(1, 4))
def test_sharing_gives_no_rank_more_than_it_would_have_alone(sizes, ranks):
    """So the plan has as many rows with layout.media_group as without."""
    every = [size for each in sizes for size in each]
    homes, count = assign_shared(sizes, ranks), len(sizes) * ranks
    assert len(homes) == len(every)
    loads = [sum(n for n, home in zip(every, homes) if home == rank) for rank in range(count)]
    alone = [
        sum(n for n, home in zip(each, assign_whole(each, ranks)) if home == rank)
        for each in sizes
        for rank in range(ranks)
    ]
    assert max(loads) <= max(alone) and max(loads) - min(loads) <= max(every, default=0)


def test_replicas_that_are_even_give_nothing_away():
    """The largest first puts 5 and 3 on one rank and 4, 3 and 3 on the other, which are 8 and 10: each has 9 alone.
    Where one has nothing, others give to it."""
    assert assign_whole([3, 3, 3, 5, 4], 2) == [1, 0, 1, 0, 1]
    assert assign_shared([[3, 3, 3], [5, 4]], 1) == [0, 0, 0, 1, 1]
    assert assign_shared([[6, 6], [4, 4, 4], []], 1) == [0, 1, 2, 2, 0]


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
    layouts = [({}, 80), ({"tp": 2}, 46), ({"tp": 2, "cp": 2}, 30)]
    layouts += [({"media_group": 2}, 80), ({"media_group": 4, "tp": 2}, 46)]
    for layout, rows in layouts:
        world = math.prod(layout.get(name, 1) for name in ("tp", "cp", "media_group"))
        made: Run = replace(run, layout=LayoutConfig(**layout))
        assert _batch(make_plan(made, world)).beside["patches"].values.shape == (rows, 3)


def test_features_are_sent_once_and_their_gradients_back(ranks):
    """Of a step: each feature whose rank is not of the share that its text gives it, forward and backward, 8 bytes for
    each of its numbers; what stays on a rank is counted too. The forecast, of full rooms, is no less."""
    run = base_run("llava", global_batch=8, micro_batch=2)
    run = replace(run, layout=LayoutConfig(tp=2))
    found = ranks.run("tests.harness.traffic:context_traffic", 4, run, False)
    spec, width = run.model.media, run.model.hidden_size
    plan = make_plan(run, 4)
    for rank in range(4):
        part, expected = SequenceShard(rank=rank % 2, ranks=2, replica=rank // 2, replicas=2), 0
        for micro in range(2):
            ids = [[4 * r + 2 * micro, 4 * r + 2 * micro + 1] for r in range(2)]
            batch = shared_among(sample_batch(ids[part.replica], False), ids, spec, part)
            route = batch.beside["patches"].units.route
            expected += (sum(route.send) + sum(route.receive)) * width * 8
        assert found[rank]["tp x cp x dp", "all_to_all"] == (2 * 2, expected)
    forecast = rank_uses(plan, plan.num_micro_batches(8))[0][0].sent["dp"]
    without = rank_uses(make_plan(replace(run, layout=LayoutConfig(tp=2, media_group=1)), 4), 2)[0][0].sent["dp"]
    assert forecast - without >= max(each["tp x cp x dp", "all_to_all"][1] for each in found) * 3 / 4 > 0

"""Exchanges of whole matrices beside the work: gradients leave in backward, weights go back while others are updated,
with the same bits as without."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from phalanx.comm.mesh import Mesh
from phalanx.data_parallel.homes import MatrixHome
from phalanx.engine.build import build
from phalanx.engine.step import accumulate, train_step, update
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import most_travelling
from phalanx.layout.buckets import Slot
from phalanx.layout.config import LayoutConfig
from phalanx.layout.homes import nearer
from phalanx.optim.adamw import AdamWConfig
from phalanx.optim.muon import Muon, MuonConfig
from phalanx.optim.sharded import HomeRule
from phalanx.schedule.actions import Backward, Forward
from phalanx.verifying.compare import random_weights
from tests.harness import parity
from tests.harness.sample import rest_in_soak

HERE = __name__
LAYOUTS = {
    "dp2 ZeRO-1": ("llama", 2, {"sharding": 1}, {}),
    "dp2 ZeRO-3": ("llama", 2, {"sharding": 3}, {}),
    "cp2 ZeRO-2": ("llama", 2, {"cp": 2, "sharding": 2}, {}),
    "ZeRO-0, deterministic": ("llama", 2, {"sharding": 0}, {"deterministic": True}),
    "groups": ("llama", 4, {"sharding": 1, "shard_group": 2}, {}),
    "experts, pipeline": ("mixtral", 4, {"pp": 2, "ep": 2, "sharding": 2}, {}),
}
SAMPLE = {"dp2 ZeRO-3", "experts, pipeline"}


def made(rank: int, world: int, model: str, layout: dict, fields: dict, sizes: dict | None = None):
    run = parity.base_run(model, precision="fp32")
    run = replace(run, model=replace(run.model, **(sizes or {})))
    optim = MuonConfig(name="muon", lr=1e-2, clip_grad=0.05, fallback=AdamWConfig(lr=1e-2))
    run = replace(run, optim=optim, layout=LayoutConfig(bucket_mb=0, **layout), train=replace(run.train, **fields))
    plan = make_plan(run, world)
    state = build(plan, Mesh(plan.grid, rank))
    random_weights(state.model)
    state.model.train()
    return run, state


def both_ways(rank: int, world: int, model: str, layout: dict, fields: dict) -> dict:
    """Weights after three steps of `train_step`, of the same with something done after the update, before weights are
    packed, and of a loop that may change gradients before the update and reads weights after it; and how many buckets
    of matrices had left when backward was over."""
    found, left = [], []
    for early, after in ((True, None), (True, lambda shard, slots: None), (False, None)):
        run, state = made(rank, world, model, layout, fields)
        state.optimizer.updated = after
        finish = state.buffers.finish

        def finish_and_count(state=state, finish=finish) -> None:
            homes = state.buffers.homes.values()
            left.append((sum(len(home._coming) for home in homes), sum(len(home.order) for home in homes)))
            finish()

        state.buffers.finish = finish_and_count
        for step in range(3):
            batches = parity.step_batches(run, state.mesh, step, False)
            if early:
                train_step(state, batches, 1e-2)
            else:
                update(state, accumulate(state, batches), 1e-2)
                state.buffers.ready()
        state.buffers.ready()
        found.append(parity.parts_of(state, "master"))
    return {"weights": found, "left": left}


@pytest.mark.parametrize("case", rest_in_soak(LAYOUTS, SAMPLE))
def test_the_same_bits_as_without(ranks, case):
    """Gradients of all buckets but the first layers' have left when backward is over; in a loop of one's own none."""
    model, world, layout, fields = LAYOUTS[case]
    results = ranks.run(f"{HERE}:both_ways", world, model, layout, fields)
    early, *others = (parity.assemble([r["weights"][way] for r in results]) for way in range(3))
    assert all(np.array_equal(values, other[name]) for other in others for name, values in early.items())
    for result in results:
        assert all(buckets > 1 and sent >= buckets - 1 for sent, buckets in result["left"][:6])
        assert all(sent == 0 for sent, _ in result["left"][6:])


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
"""In proportion those of Llama-3-8B."""


def places(rank: int, world: int, layout: dict, after: bool) -> list[tuple[int, str, str]]:
    """Of each matrix that is updated: its elements, and where its gradient is read and its weights are written: where
    this rank stores them, where they arrived or leave, or elsewhere. after: something follows the update."""
    run, state = made(rank, world, "llama", layout, {}, SIZES)
    stored = [x.untyped_storage() for flat in state.buffers.flat for x in (flat.own_grad, flat.master)]
    bring, gradient, weights = MatrixHome.bring_gradients, MatrixHome.gradient, MatrixHome.weights
    arrived, found = list[torch.Tensor](), list[tuple[int, str, str]]()

    def brought(home: MatrixHome, bucket: int) -> None:
        arrived[:] = [home._coming[bucket].wait()]
        bring(home, bucket)

    def where(x: torch.Tensor | None, travels: torch.Tensor | None) -> str:
        if x is None:
            return "elsewhere"
        if any(x.untyped_storage().data_ptr() == each.data_ptr() for each in stored):
            return "stored"
        same = travels is not None and x.untyped_storage().data_ptr() == travels.untyped_storage().data_ptr()
        return "travels" if same else "elsewhere"

    def noted(home: MatrixHome, slot: Slot) -> torch.Tensor:
        found.append((slot.numel, where(gradient(home, slot), arrived[0]), "elsewhere"))
        return gradient(home, slot)

    def written(home: MatrixHome, slot: Slot) -> torch.Tensor | None:
        x = weights(home, slot)
        to_write.append(where(x, home._open.message))
        return x

    to_write = list[str]()
    if after:
        state.optimizer.updated = lambda shard, slots: None
    with pytest.MonkeyPatch.context() as patch:
        for name, made_of in (("bring_gradients", brought), ("gradient", noted), ("weights", written)):
            patch.setattr(MatrixHome, name, made_of)
        train_step(state, parity.step_batches(run, state.mesh, 0, False), 1e-2)
    return [(n, read, write) for (n, read, _), write in zip(found, to_write or ["elsewhere"] * len(found))]


@pytest.mark.parametrize(
    "layout", [{"sharding": 1}, {"sharding": 3}, {"sharding": 0, "tp": 2}, {"pp": 2, "sharding": 0}]
)
def test_what_one_rank_has_is_updated_there_and_whole_rows_are_not_copied(ranks, layout):
    """Of two ranks the first has q, k, v, o and gate of a layer, the second down, and both a part of up. Each is home
    to one of q and o, one of k and v, and gate or down. With tp, columns of some matrices are put together. A pipeline
    stage of one rank has all matrices whole. If something follows the update, weights are written when it is over."""
    found = [each for of_rank in ranks.run(f"{HERE}:places", 2, layout, False) for each in of_rank]
    stored = sum(n for n, *ways in found if ways == ["stored", "stored"]) / sum(n for n, *_ in found)
    ways = {tuple(each) for _, *each in found}
    if "tp" in layout:
        assert stored == 0 and ("elsewhere", "elsewhere") in ways
    elif "pp" in layout:
        assert stored == 1
    else:
        q = o = 64 * 64
        k = v = 16 * 64
        gate = up = down = 224 * 64
        assert stored == (gate + down + o + v) / (q + k + v + o + gate + up + down)
        assert ways == {("stored", "stored"), ("travels", "travels")}
    late = [each for of_rank in ranks.run(f"{HERE}:places", 2, layout, True) for each in of_rank]
    assert [(n, read) for n, read, _ in late] == [(n, read) for n, read, _ in found]
    assert all(write == "elsewhere" for *_, write in late)


def sent_home(rank: int, world: int, model: str, layout: dict, fields: dict, sizes: dict) -> tuple[int, int, int]:
    """This rank's stage, the elements of gradients that it sends in a step, and the most by the forecast."""
    run, state = made(rank, world, model, layout, fields, sizes)
    plan, pp = state.plan, state.mesh.at.pp
    found = [(n, sum(sum(e.sizes_to) for e in home._gradients.values())) for n, home in state.buffers.homes.items()]
    return pp, sum(sent for _, sent in found), sum(most_travelling(plan, pp, n) for n, _ in found)


TRAVELS = {**LAYOUTS, "as the 8B": ("llama", 2, {"sharding": 1}, {}), "dp3": ("llama", 3, {"sharding": 1}, {})}


@pytest.mark.parametrize("case", TRAVELS)
def test_no_rank_sends_more_than_the_forecast_says(ranks, case):
    """Equally much where both ranks are home to as many of each kind as they have whole."""
    model, world, layout, fields = TRAVELS[case]
    results = ranks.run(f"{HERE}:sent_home", world, model, layout, fields, SIZES if case == "as the 8B" else {})
    for stage in {pp for pp, *_ in results}:
        most = max(sent for pp, sent, _ in results if pp == stage)
        (forecast,) = {said for pp, _, said in results if pp == stage}
        assert most <= forecast
        assert case != "as the 8B" or most == forecast


def test_homes_near_to_what_they_have():
    """Each rank has as many of a kind as before."""
    homes, kinds, near = [0, 1, 0, 1, 0, 1], "aaabbb", [(1, 7), (1, 9), (0, 9), (0, 5), (0, 5), (0, 6)]
    found = nearer(homes, kinds, near)
    assert found == [0, 1, 0, 1, 1, 0] and sorted(zip(kinds, found)) == sorted(zip(kinds, homes))
    assert nearer(homes, kinds, [(home, 1) for home in homes]) == homes


def order_of_work(rank: int, world: int, sharding: int) -> list[str]:
    """What happens in two steps, in order: f forward of a segment, b its backward, l gradients of a bucket leave, c
    they have come, u its matrices are updated, w its weights go, a they arrive."""
    run, state = made(rank, world, "llama", {"sharding": sharding}, {})
    events = list[str]()

    def before(of: object, name: str, letter: str):
        real = getattr(of, name)
        patch.setattr(of, name, lambda *given, **named: (events.append(letter), real(*given, **named))[1])

    with pytest.MonkeyPatch.context() as patch:
        for name, letter in (("leave", "l"), ("bring_gradients", "c"), ("send_weights", "w"), ("_store", "a")):
            before(MatrixHome, name, letter)
        before(Muon, "update_stored", "u")
        real = dict(state.model.handlers)
        for kind, letter in ((Forward, "f"), (Backward, "b")):
            state.model.handlers[kind] = lambda i, kind=kind, letter=letter: (events.append(letter), real[kind](i))[1]
        for step in range(2):
            train_step(state, parity.step_batches(run, state.mesh, step, False), 1e-2)
    return events


@pytest.mark.parametrize("sharding", [1, 3])
def test_work_lies_between_exchanges(ranks, sharding):
    """Of the last micro-batch, gradients of a bucket leave before backward of the next but one. A bucket's gradients
    are waited for when its update begins, the first layers' after another update. Weights of each bucket go before the
    next is updated, and arrive after it; those of the last one when forward has begun, before it comes to them."""
    for events in ranks.run(f"{HERE}:order_of_work", 2, sharding):
        text = "".join(events)
        buckets = text.count("w") // 2
        first, after = text[: text.index("c")], text[text.index("f", text.index("c")) :]
        assert buckets >= 4 and text.count("l") == text.count("c") == text.count("a") + 1 == 2 * buckets
        assert len(first[: first.rindex("b") + 1].split("l")) >= buckets - 1, "all but two leave while backward runs"
        update = text[text.index("c") : text.index("f", text.index("c"))]
        assert update.replace("u", "") == "cw" + "cwa" * (buckets - 1) and "cw" not in update
        forward = after[: after.index("b")]
        assert forward.count("a") == 1 and forward.strip("f").strip("a") == "", "forward goes on around the arrival"


def without_gradients(rank: int, world: int) -> list:
    """Weights before and after a step whose gradients are set to zero before the update."""
    run, state = made(rank, world, "llama", {"sharding": 1}, {})
    before = parity.parts_of(state, "master")
    tokens = accumulate(state, parity.step_batches(run, state.mesh, 0, False))
    for flat in state.buffers.flat:
        flat.own_grad.zero_()
    update(state, tokens, 1e-2)
    state.buffers.ready()
    return [before, parity.parts_of(state, "master")]


def test_a_loop_of_ones_own_may_change_gradients(ranks):
    """Homes are given what it left: without gradients, matrices only decay."""
    results = ranks.run(f"{HERE}:without_gradients", 2)
    before, after = (parity.assemble([r[way] for r in results]) for way in (0, 1))
    name = "model.layers.0.mlp.down_proj.weight"
    np.testing.assert_allclose(after[name], before[name] * (1 - 1e-2 * 0.1), rtol=1e-6)


def repeated(rank: int, world: int) -> list:
    """Weights after a step whose backward ran twice, of other samples each time, with gradients on their way early and
    late."""
    found = []
    for early in (True, False):
        run, state = made(rank, world, "llama", {"sharding": 1}, {})
        with state.buffers.sending_early() if early else nullcontext():
            for step in (0, 1):
                tokens = accumulate(state, parity.step_batches(run, state.mesh, step, False))
        update(state, tokens, 1e-2)
        state.buffers.ready()
        found.append(parity.parts_of(state, "master"))
    return found


def test_of_a_repeated_backward_the_last_counts(ranks):
    """As where experts had too little room for their tokens: what left the first time is replaced."""
    results = ranks.run(f"{HERE}:repeated", 2)
    early, late = (parity.assemble([r[way] for r in results]) for way in (0, 1))
    assert all(np.array_equal(values, late[name]) for name, values in early.items())


def test_equal_matrices_are_grouped_within_a_bucket():
    """So that its weights can go before those of the next are updated."""
    _, state = made(0, 1, "llama", {"sharding": 0}, {})
    [rule] = [home for each in state.optimizer.rules for home in each.homes]
    assert isinstance(rule, HomeRule) and len(rule.groups) > 1
    for bucket, groups in rule.groups.items():
        grouped = [slot.offset for _, slots in groups for slot in slots]
        assert sorted(grouped) == sorted(slot.offset for slot in rule.exchange.slots(bucket)) and grouped
    every = [slot for groups in rule.groups.values() for _, slots in groups for slot in slots]
    assert len(every) == len(rule.shard.bucket.slots)

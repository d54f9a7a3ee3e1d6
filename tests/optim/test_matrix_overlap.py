"""Exchanges of whole matrices beside the work: gradients leave in backward, weights go back while others are updated,
with the same bits as without."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from phalanx.comm.mesh import Mesh
from phalanx.data_parallel.homes import MatrixHome
from phalanx.engine.build import build
from phalanx.engine.step import accumulate, train_step, update
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
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


def made(rank: int, world: int, model: str, layout: dict, fields: dict):
    run = parity.base_run(model, precision="fp32")
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


def copies(rank: int, world: int, layout: dict) -> list[tuple[bool, bool]]:
    """Of each bucket whose matrices are updated: whether gradients are read where they arrived, and whether weights are
    written into their message."""
    run, state = made(rank, world, "llama", layout, {})
    found = list[tuple[bool, bool]]()
    bring, send, arrived = MatrixHome.bring_gradients, MatrixHome.send_weights, list[int]()

    def brought(home: MatrixHome, bucket: int) -> None:
        arrived[:] = [home._coming[bucket].wait().data_ptr()]
        bring(home, bucket)

    def sent(home: MatrixHome, bucket: int) -> None:
        here = home._open
        if home.slots(bucket):
            found.append((here.gradient.data_ptr() in arrived, here.message is not None))
        send(home, bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MatrixHome, "bring_gradients", brought)
        patch.setattr(MatrixHome, "send_weights", sent)
        train_step(state, parity.step_batches(run, state.mesh, 0, False), 1e-2)
    return found


@pytest.mark.parametrize(
    "layout, none", [({"sharding": 1}, True), ({"sharding": 3}, True), ({"sharding": 0, "tp": 2}, False)]
)
def test_whole_rows_are_not_copied_at_home(ranks, layout, none):
    """Of ranks that have whole rows of matrices, one after the other; with tp, columns of some are put together."""
    found = [each for of_rank in ranks.run(f"{HERE}:copies", 2, layout) for each in of_rank]
    assert found and all(pair == (True, True) for pair in found) == none


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

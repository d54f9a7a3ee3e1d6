"""Fixed places for what comes and goes at sharding levels 2 and 3: no two buckets meet at one, and a bucket is
always found at its own."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from phalanx.comm.mesh import Mesh
from phalanx.config.run import RampConfig, Run
from phalanx.data.config import DataConfig
from phalanx.engine.build import build
from phalanx.engine.step import accumulate, evaluate_step, update
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.schedule.actions import Backward, Close, Flow, Forward, Free, Gather, Open, ScheduleError
from phalanx.schedule.generators import generate
from phalanx.schedule.lower import lower
from phalanx.schedule.memory_slots import MemorySlots, fits, make_slots, prove
from tests.harness.parity import base_run, compare, random_weights, step_batches, truth_of
from tests.harness.sample import rest_in_soak


def programs(number: int):
    """Instruction lists of a random pipeline with a bucket per segment, tied weights and experts, and the buckets'
    elements by rank."""
    pick = random.Random(number)
    pp, virtual, micro, segments = (
        pick.choice([1, 2, 3]),
        pick.choice([1, 2]),
        pick.choice([1, 2, 5]),
        pick.choice([1, 2, 5]),
    )
    virtual = virtual if pp > 1 else 1
    schedule = generate(pick.choice(["gpipe", "1f1b"]) if virtual == 1 else "interleaved", pp, virtual, micro)
    buckets = []
    for rank in range(pp):
        here = [(stage, segment) for stage in schedule.stages_of(rank) for segment in range(segments)]
        own = {i: frozenset({where}) for i, where in enumerate(here)}
        own |= {len(here): frozenset({here[0], here[-1]}), len(here) + 1: frozenset({here[len(here) // 2]})}
        buckets.append(own)
    flows = [{b: Flow(gathers=True, opens=True, closes=True) for b in own} for own in buckets]
    numel = [{b: pick.choice([1, 7, 64]) for b in own} for own in buckets]
    options = dict(bucket_prefetch=pick.choice([0, 1, 2, 3]), keep=pick.choice([False, False, True]))
    return lower(schedule, (segments,) * schedule.num_stages, buckets, flows_of_rank=flows, **options).lists, numel


@pytest.mark.parametrize("numbers", [range(i, i + 60) for i in range(0, 240, 60)], ids=str)
def test_no_two_buckets_meet(numbers):
    """Truth: the list followed by hand, place by place. A place is as large as the largest that comes there."""
    for number in numbers:
        lists, numel = programs(number)
        for instructions, sizes in zip(lists, numel):
            places = make_slots([instructions], sizes)
            weights, gradients = (places.weights, places.weight_sizes), (places.gradients, places.gradient_sizes)
            for come, go, (place, room) in ((Gather, Free, weights), (Open, Close, gradients)):
                taken: dict[int, int] = {}
                for i in instructions:
                    if isinstance(i, come):
                        assert place[i.bucket] not in taken and sizes[i.bucket] <= room[place[i.bucket]]
                        taken[place[i.bucket]] = i.bucket
                    elif isinstance(i, go):
                        assert taken.pop(place[i.bucket]) == i.bucket
                assert not taken
            prove([instructions], [places])
            for wrong in (replace(places, weights=dict.fromkeys(places.weights, 0)), replace(places, gradients={})):
                met = len(places.weight_sizes) > 1 or wrong.gradients == {}
                assert fits(instructions, wrong) == (not met)
                if met:
                    with pytest.raises(ScheduleError, match="at one place"):
                        prove([instructions], [wrong])


def test_layers_take_turns_at_few_places():
    """By hand: with one segment ahead, two places of a layer's size serve any number of layers, in both directions."""
    schedule = generate("1f1b", 1, 1, 3)
    flows = [{b: Flow(gathers=True, opens=True, closes=True) for b in range(9)}]
    [instructions] = lower(schedule, (9,), [{b: frozenset({(0, b)}) for b in range(9)}], flows_of_rank=flows).lists
    places = make_slots([instructions], dict.fromkeys(range(9), 5))
    assert places == MemorySlots({b: b % 2 for b in range(9)}, {b: b % 2 for b in range(9)}, (5, 5), (5, 5))


def fixed(run: Run, **layout) -> Run:
    """With places as CUDA graphs need them; on a CPU blocks run as they are."""
    layout = {"bucket_mb": 0, **layout}
    return replace(
        run, train=replace(run.train, cuda_graphs="on"), layout=LayoutConfig(**layout), data=DataConfig(mock=True)
    )


def addresses_on_rank(rank: int, world: int, run: Run) -> tuple[dict[tuple, set[int]], bool]:
    """Where weights and gradients of each segment lie whenever it computes, over three steps and an evaluation; whether
    any bucket shares."""
    plan = make_plan(run, world)
    state = build(plan, mesh := Mesh(plan.grid, rank))
    random_weights(state.model)
    state.model.train()
    seen: dict[tuple, set[int]] = {}

    def watched(kind, handler):
        def run_it(i):
            for n, p in enumerate(p for block in state.model.blocks[i.stage, i.segment] for p in block.parameters()):
                seen.setdefault((i.stage, i.segment, n, "weight"), set()).add(p.data_ptr())
                if kind is Backward and p.grad is not None:
                    seen.setdefault((i.stage, i.segment, n, "grad"), set()).add(p.grad.data_ptr())
            handler(i)

        return run_it

    state.model.handlers = {
        kind: watched(kind, h) if kind in (Forward, Backward) else h for kind, h in state.model.handlers.items()
    }
    for step in range(3):
        update(state, accumulate(state, step_batches(run, mesh, step, False)), lr=1e-3)
        evaluate_step(state.model, step_batches(run, mesh, step, False))
    state.buffers.ready()
    whole = {f.weight.untyped_storage().data_ptr() for f in state.buffers.flat}
    return seen, len(whole) < len(state.buffers.flat)


FIXED = {
    "level 3, dp2": ("llama", 2, dict(sharding=3)),
    "level 2, dp2, tied": ("llama-tied", 2, dict(sharding=2)),
    "level 3, pp2 x 2 virtual stages, dp2, tied, prefetch 2": (
        "llama-tied",
        4,
        dict(sharding=3, pp=2, virtual_stages=2, prefetch=2),
    ),
    "level 3, gpipe, pp2 dp2": ("llama", 4, dict(sharding=3, pp=2, schedule="gpipe")),
    "level 3, deepseek_v3 ep2, tp2 dp2, push": ("deepseek_v3", 4, dict(sharding=3, tp=2, ep=2, dispatch="push")),
    "level 3 in pairs of dp4, weights kept": ("llama", 4, dict(sharding=3, shard_group=2, reshard_after_forward=False)),
}


@pytest.mark.parametrize("name", rest_in_soak(FIXED, [name for name in FIXED if "gpipe" not in name]))
def test_layouts_with_fixed_slots(ranks, name):
    """They compute what one process does, and every weight and gradient lies at one address whenever a block reads
    or adds to it."""
    model, world, layout = FIXED[name]
    run = fixed(base_run(model), **layout)
    compare(ranks.run("tests.harness.parity:run_layout", world, run, 2), truth_of(ranks, run, 2, False), 2)
    for seen, shared in ranks.run("tests.layout.test_memory_slots:addresses_on_rank", world, run):
        assert seen and all(len(found) == 1 for found in seen.values())
        assert {"level 3, dp2": shared, "level 3 in pairs of dp4, weights kept": not shared}.get(name, True)


def test_a_growing_batch_has_the_same_places():
    """Steps of 1, 2 and 3 micro-batches, and evaluations of any number, are proved to fit."""
    run = fixed(base_run("llama-tied", 6), sharding=3, pp=2, virtual_stages=2)
    run = replace(run, train=replace(run.train, rampup=RampConfig(start=2, increment=2, samples=100)))
    plan = make_plan(run, 4)
    assert plan.step_sizes == {1, 2, 3}
    for m in (1, 2, 3):
        plan.proved_program(m)
    for m in range(1, 17):
        plan.proved_program(m, backward=False)


def test_only_graphs_keep_places():
    run = fixed(base_run("llama"), sharding=3)
    assert make_plan(run, 2).slots and not make_plan(run, 1).slots
    assert not make_plan(replace(run, train=replace(run.train, cuda_graphs="auto")), 2).slots
    assert not make_plan(replace(run, layout=replace(run.layout, sharding=1)), 2).slots

"""Activations that wait on the host: the same bits come back, at the right places of any schedule, and as many bytes
as the plan says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.comm.mesh import Mesh
from phalanx.config.read import load_run
from phalanx.config.run import Run
from phalanx.data.config import DataConfig
from phalanx.engine.build import build, init_weights
from phalanx.engine.step import accumulate
from phalanx.forecast.capacity import DoesNotFit, MachineMemory, check_capacity
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import rank_uses
from phalanx.forecast.text import plan_text
from phalanx.layout.config import LayoutConfig
from phalanx.nn.dry_run import Allocations
from phalanx.nn.offload import Mover, OffloadedActivations
from phalanx.schedule.actions import Backward, Fetch, Forward, Offload, Program, ScheduleError
from phalanx.schedule.generators import generate
from phalanx.schedule.lower import lower
from phalanx.schedule.simulate import simulate
from tests.harness.parity import MODELS, base_run, step_batches

CPU = torch.device("cpu")


def test_what_is_offloaded_comes_back_to_the_bit():
    """Views of one storage are copied once; what others keep alive anyway stays."""
    x, other = torch.randn(6, 4, dtype=torch.bfloat16), torch.randn(5)
    views = [x[1:], x.t(), x.as_strided((3, 2), (8, 1), 2)]
    truth = [v.clone() for v in views]
    offloaded = OffloadedActivations(Mover(CPU))
    saved, beside = [offloaded.put(v) for v in views], offloaded.put(other)
    assert len(offloaded.storages) == 2 and offloaded.to_host([other]) == x.nbytes
    assert offloaded.holds(x) and not offloaded.holds(other)
    x.zero_()
    with pytest.raises(RuntimeError, match="before it was fetched"):
        saved[0].tensor()
    offloaded.to_device()
    assert all(torch.equal(p.tensor(), t) and p.tensor().stride() == v.stride() for p, t, v in zip(saved, truth, views))
    assert beside.tensor().data_ptr() == other.data_ptr()


@pytest.mark.parametrize("name, pp, virtual", [("gpipe", 2, 1), ("1f1b", 4, 1), ("interleaved", 2, 2)])
def test_each_offload_has_its_fetch_under_compute(name, pp, virtual):
    schedule = generate(name, pp, virtual, 8)
    segments = (3,) * schedule.num_stages
    away = {(s, r) for s in range(schedule.num_stages) for r in (0, 1)}
    program = lower(schedule, segments, offloaded=away)
    simulate(program)
    for instructions in program.lists:
        compute = [i for i in instructions if isinstance(i, Forward | Backward)]
        left = [i for i in instructions if isinstance(i, Offload)]
        assert left and {(i.stage, i.segment) for i in left} <= away
        for i in left:
            fetch, where = instructions.index(Fetch(i.stage, i.segment, i.mb)), (i.stage, i.segment, i.mb)
            assert (
                instructions.index(Forward(*where))
                < instructions.index(i)
                < fetch
                < instructions.index(Backward(*where))
            )
            between = [j for j in instructions[fetch : instructions.index(Backward(*where))] if j in compute]
            assert len(between) == 1
    without = lower(schedule, segments)
    assert [[i for i in a if not isinstance(i, Offload | Fetch)] for a in program.lists] == [
        list(b) for b in without.lists
    ]


def test_what_would_come_straight_back_stays():
    """Of one block a stage, F0 F1 B0: the copy back would begin as F1 does, when nothing was computed yet."""
    first, second = lower(generate("1f1b", 2, 1, 4), (1, 1), offloaded={(0, 0), (1, 0)}).lists
    left = [i for i in first if isinstance(i, Offload)]
    assert left and not any(isinstance(i, Offload) for i in second)
    for i in left:
        assert any(
            isinstance(j, Forward | Backward)
            for j in first[first.index(i) : first.index(Fetch(i.stage, i.segment, i.mb))]
        )


@pytest.mark.parametrize("wrong, why", [(Offload, "is not on the host"), (Fetch, "its activations are on the host")])
def test_a_list_without_one_of_them_is_refused(wrong, why):
    program = lower(generate("gpipe", 1, 1, 2), (2,), offloaded={(0, 0)})
    lists = tuple(tuple(i for i in a if not isinstance(i, wrong)) for a in program.lists)
    with pytest.raises(ScheduleError, match=why):
        simulate(Program(program.schedule, program.segments_per_stage, program.buckets_of_rank, lists))


LAYOUTS = {
    "gpt2 tp2 pp2, dropout": ("gpt2", 4, LayoutConfig(tp=2, pp=2, bucket_mb=0), dict(offload_layers=2)),
    "llama pp2 x 2, selective recompute": (
        "llama-tied",
        2,
        LayoutConfig(pp=2, virtual_stages=2),
        dict(offload_layers=1, recompute="selective"),
    ),
    "qwen3_moe ep2, level 3": (
        "qwen3_moe",
        2,
        LayoutConfig(ep=2, sharding=3, bucket_mb=0),
        dict(offload_layers=3, recompute_ops=["norm", "up"]),
    ),
    "llama cp2, heads, level 3, all but attention again": (
        "llama",
        2,
        LayoutConfig(cp=2, cp_ulysses=2, sharding=3, bucket_mb=0),
        dict(offload_layers=3, recompute_ops=["layer"]),
    ),
    "deepseek_v3 with further tokens": ("deepseek_v3-mtp", 1, LayoutConfig(bucket_mb=0), dict(offload_layers=2)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_give_the_same_bits(ranks, name):
    model, world, layout, train = LAYOUTS[name]
    run = replace(base_run(model), layout=layout)
    truth = ranks.run("tests.harness.parity:run_layout", world, run, 2, True)
    found = ranks.run(
        "tests.harness.parity:run_layout", world, replace(run, train=replace(run.train, **train)), 2, True
    )
    for a, b in zip(truth, found):
        assert a["losses"] == b["losses"] and a["norms"] == b["norms"]
        for x, y in zip(a["weights"], b["weights"]):
            assert torch.equal(torch.from_numpy(x[3]).nan_to_num(7.0), torch.from_numpy(y[3]).nan_to_num(7.0)), x[0]


def offloaded_bytes(rank: int, world: int, run: Run) -> int:
    """What left for the host in one step."""
    plan = make_plan(run, world)
    state = build(plan, mesh := Mesh(plan.grid, rank))
    init_weights(state.model)
    state.model.train()
    accumulate(state, step_batches(run, mesh, 0, False))
    return state.model.stages.offloaded_bytes


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_plan_knows_the_bytes(ranks, recompute):
    """Truth: what really leaves in a step of gpipe. Of four micro-batches the first is on its way back when the last
    leaves."""
    run = base_run(
        "llama", 8, 2, recompute=recompute, offload_layers=2, precision="fp32"
    )  # of one sequence CPUs copy the output
    run = replace(run, layout=LayoutConfig(schedule="gpipe", bucket_mb=100), data=DataConfig(mock=True))
    (use,), _ = rank_uses(make_plan(run, 1), 4)
    (left,) = ranks.run("tests.nn.test_offload:offloaded_bytes", 1, run)
    assert left > 0 and use.host == pytest.approx(left * 3 / 4, rel=0.02)


class Elsewhere(Mover):
    """The host's memory is none of torch's, so that what torch counts is the device's."""

    def to_host(self, xs):
        return [x.numpy().copy() for x in xs]

    def to_device(self, hosts):
        return [torch.from_numpy(host).clone() for host in hosts], None


def device_bytes(rank: int, world: int, run: Run) -> int:
    """Most bytes of tensors at once in a step, but for what was there before."""
    plan = make_plan(run, world)
    state = build(plan, mesh := Mesh(plan.grid, rank))
    init_weights(state.model)
    state.model.train()
    state.model.stages._mover = Elsewhere(CPU)
    batches = step_batches(run, mesh, 0, False)
    with Allocations() as seen:
        accumulate(state, batches)
    return seen.peak


@pytest.mark.parametrize(
    "train", [dict(recompute="long", offload_layers=4), dict(recompute="long"), dict(offload_layers=2)], ids=str
)
def test_the_plan_knows_what_is_left_on_the_device(ranks, train):
    """Truth: the most bytes that a rank of a layout like that of the longest sequence ever has in a step, beside
    weights and gradients."""
    heads = MODELS["llama"].num_attention_heads  # shared keys are copied on a CPU
    model = replace(
        MODELS["llama"], num_hidden_layers=6, hidden_size=64, intermediate_size=512, num_key_value_heads=heads
    )
    run = base_run("llama", 2, 2, precision="fp32", seq_length=512, device="cpu", **train)
    run = replace(run, model=model, layout=LayoutConfig(bucket_mb=0), data=DataConfig(mock=True))
    (use,), _ = rank_uses(make_plan(run, 1), 1)
    (most,) = ranks.run("tests.nn.test_offload:device_bytes", 1, run)
    assert use.memory["activations"] + use.memory["working"] == pytest.approx(most, rel=0.02)


def test_the_plan_says_what_waits_where():
    run = load_run(
        "recipes/tiny_llama.yaml", ["train.offload_layers=2", "layout.schedule=gpipe", "train.micro_batch=1"]
    )
    stored = replace(run, train=replace(run.train, offload_layers=0))
    assert "of activations" in plan_text(run, 1) and "host" not in plan_text(stored, 1)
    here, all_here = (rank_uses(make_plan(r, 1), 8)[0][0].memory["activations"] for r in (run, stored))
    assert here < all_here


def test_a_host_with_too_little_memory_is_told():
    """As many ranks as share it count; what is proposed instead has room on the GPUs and on the host."""
    words = ["train.offload_layers=2", "layout.schedule=gpipe", "train.micro_batch=1", "train.global_batch=8"]
    run = load_run("recipes/tiny_llama.yaml", words)
    (use,), _ = rank_uses(make_plan(run, 1), 8)

    def machine(host: int, ranks: int = 1) -> MachineMemory:
        return MachineMemory(range(ranks), (2**40,) * ranks, host, started=True)

    assert check_capacity(run, 1, machine(2 * use.host)) is None
    with pytest.raises(
        DoesNotFit, match="this host has .*\nthe cheapest change that fits: train.offload_layers=1 "
    ) as refused:
        check_capacity(run, 1, machine(use.host // 2))
    fewer = load_run("recipes/tiny_llama.yaml", [*words, str(refused.value).split("that fits: ")[1].split()[0]])
    check_capacity(fewer, 1, machine(use.host // 2))
    twice = replace(run, train=replace(run.train, global_batch=16))
    assert check_capacity(twice, 2, machine(4 * use.host, 2)) is None
    with pytest.raises(DoesNotFit, match="its 2 ranks need"):
        check_capacity(twice, 2, machine(use.host, 2))


@pytest.mark.parametrize("recompute", ["none", "long", "full"])
def test_inputs_of_layers_leave_too(ranks, recompute):
    """Each layer a segment of its own: its input is the output of the one before, which is then freed too. Truth:
    what really leaves."""
    run = base_run("llama", 8, 2, recompute=recompute, offload_layers=2, precision="fp32")
    run = replace(run, layout=LayoutConfig(schedule="gpipe", bucket_mb=0), data=DataConfig(mock=True))
    (use,), _ = rank_uses(make_plan(run, 1), 4)
    (left,) = ranks.run("tests.nn.test_offload:offloaded_bytes", 1, run)
    assert left > 0 and use.host == pytest.approx(left, rel=0.02)

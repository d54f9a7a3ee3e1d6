"""Rows of graphs with ops between them (pipeline.segments), on the CPU: graphs are stood for by lists of torch's
operations on the same memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._C._distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.base import rng
from phalanx.comm import axis
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.engine.build import State, build
from phalanx.engine.step import train_step
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.layout.grid import Grid
from phalanx.nn.adapter import find_adapter
from phalanx.nn.recompute import Recompute
from phalanx.pipeline.graphs import ENOUGH, Eager, Graphs, _Captured, _Slot
from phalanx.pipeline.root import backward_from
from phalanx.pipeline.segments import CapturedSegment, GraphCuts, uncollected
from phalanx.planning.plan import Plan
from phalanx.sequence.batch import Batch
from tests.harness.parity import base_run, random_weights, sample_batch, step_batches

NO_WORK = (torch.ops.aten.empty, torch.ops.aten.set_)  # only say where a tensor lies
STEPS = 4  # the first without graphs, the second captures


@dataclass
class Pool:
    """Memory of graphs. As CUDA's, it takes no more graphs when those that it had are gone."""

    graphs: int | None = None

    def take(self) -> None:
        assert self.graphs != 0
        self.graphs = (self.graphs or 0) + 1


class Recorded:
    """What a CUDA graph is, but for being fast: operations that run again on the tensors that they ran on, and write
    where they wrote."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.calls: list[tuple[Any, ...]] = []
        self.before: dict[int, tuple[Any, Any]] = {}  # what was in memory that is written

    def add(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func._schema.is_mutable or func.namespace == "c10d":  # whose schemas do not say so
            for written in (t.untyped_storage() for t in tensors((args, kwargs))):
                self.before.setdefault(written.data_ptr(), (written, written.clone()))
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def undo(self) -> None:
        """A capture computes nothing."""
        for storage, before in self.before.values():
            storage.copy_(before)
        self.before.clear()

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            with torch.autograd._unsafe_preserve_version_counter(tuple(tensors((args, kwargs)))):
                made = func(*args, **kwargs)
                wait_for(made)
            for old, new in zip(tensors(out), tensors(made), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.data.copy_(new)

    def reset(self) -> None:
        self.calls.clear()
        assert self.pool.graphs is not None
        self.pool.graphs -= 1


def wait_for(made: Any) -> None:
    """The exchange that is among what an operation returned, if it is one: whoever waited for it at capture is not
    asked again."""
    for value in tree_leaves(made):
        if isinstance(value, torch.ScriptObject):
            Work.unbox(value).wait()


def tensors(values: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]


class Recorder(TorchDispatchMode):
    """In place of pipeline.segments.Cuda. It is one mode for all captures: autograd's backward brings back the modes
    that it began with.

    A capture ends, as CUDA's may, when all that this rank has asked of others is over.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now: Recorded | None = None
        self.posted: list[axis.Work] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Inside, what ranks exchange outside of captures is noted."""
        init = axis.Work.__init__

        def noted(work: axis.Work, result: torch.Tensor, handle: Any = None, finish: Any = None) -> None:
            init(work, result, handle, finish)
            if handle is not None and self.now is None:
                self.posted.append(work)

        with mock.patch.object(axis.Work, "__init__", noted):
            yield

    def on_hosts(self, post: Any) -> Any:
        """An exchange that is no matter of devices."""

        def posted(*args: Any) -> axis.Work:
            noted = len(self.posted)
            work = post(*args)
            del self.posted[noted:]
            return work

        return posted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (
            func(*args, **(kwargs or {}))
            if self.now is None or func.overloadpacket in NO_WORK
            else self.now.add(func, args, kwargs or {})
        )

    def pool(self) -> Pool:
        return Pool()

    def begin(self, pool: Pool) -> Recorded:
        assert not gc.isenabled()  # a finalizer that frees memory which other ranks map ends a capture
        pool.take()
        self.now = Recorded(pool)
        return self.now

    def end(self, graph: Recorded) -> None:
        assert graph is self.now
        self.now = None
        for work in self.posted:
            if work._handle is not None:
                work._handle.wait()  # gloo cannot wait twice
                work._handle = None
        self.posted.clear()
        graph.undo()

    @contextmanager
    def aside(self) -> Iterator[None]:
        with self:
            yield

    def wait(self) -> None: ...

    def tidy(self) -> None: ...


def trained(
    rank: int, world: int, run: Run, documents: str | bool, graphs: bool
) -> tuple[list[torch.Tensor], list[int], set[str]]:
    """Losses, norms and weights after some steps; how many parts the rows of graphs have, and the documents that
    were shared."""
    plan = make_plan(run, world)
    mesh = Mesh(plan.grid, rank)
    state = build(plan, mesh)
    random_weights(state.model)
    state.model.train()
    assert type(state.model.stages.runner) is Eager
    recorder = Recorder()
    with mock.patch.object(rng, "philox", philox_of_tensors), recorder.noting():
        return _trained(state, run, documents, recorder if graphs else None)


def captured_segments(plan: Plan, stage: int) -> list[int]:
    """Those of a stage that are captured."""
    return [n for n in range(len(plan.segments[stage])) if (stage, n) not in plan.varying_segments]


def philox_of_tensors(counter: tuple, key: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """As on a GPU: what numpy computes on the CPU is not recorded."""
    return rng.rounds(tuple(c if isinstance(c, torch.Tensor) else torch.full((), c) for c in counter), key)


def _trained(
    state: State, run: Run, documents: str | bool, recorder: Recorder | None
) -> tuple[list[torch.Tensor], list[int], set[str]]:
    plan, mesh = state.plan, state.mesh
    if recorder:
        recompute = next(iter(state.model.blocks.values()))[0].env.recompute
        memories = () if mesh.tp.memory is None else (mesh.tp.memory,)
        runner = Graphs(recorder, recompute, memories, state.plan.uncaptured, schedule=plan.schedule)
        runner.varying = plan.varying_segments
        state.model.stages.runner = runner
        mesh.prepare_pp_hosts()
        for name in ("send", "recv"):
            setattr(mesh.pp_hosts, name, recorder.on_hosts(getattr(mesh.pp_hosts, name)))
    found, seen = [], set()
    for step in range(STEPS):
        batches = step_batches(run, mesh, step, documents)
        seen |= {f"{s.length} {s.part.count}" for b in batches for s in b.shared}
        result = train_step(state, batches, 1e-3)
        found += [result.loss.clone(), result.grad_norm.clone()]
    runner = state.model.stages.runner
    if isinstance(runner, Graphs):  # every slot was foreseen, at the start of the step that got it
        mine = [s for s in plan.schedule(1).stages_of(mesh.at.pp) if captured_segments(plan, s)]
        assert {k: len(slots) for k, slots in runner._slots.items()} == {
            (s, *k): n for (s, k), n in runner._most.items() if s in mine
        }
    runs = (
        [run for slots in runner._slots.values() for slot in slots for run in slot.segments.values()]
        if isinstance(runner, Graphs)
        else []
    )
    parts = [len(row.parts) for run in runs for row in (run.forward, run.backward) if isinstance(row, CapturedSegment)]
    found += [flat.master.clone() for flat in state.buffers.flat]
    return found, parts, seen


@pytest.mark.parametrize(
    ("model", "layout", "recompute"),
    [
        ("llama-tied", dict(cp_ulysses=2), "none"),
        pytest.param("mistral", dict(), "none", marks=pytest.mark.soak),
        pytest.param("deepseek_v3-dense", dict(cp_attention="allgather"), "selective", marks=pytest.mark.soak),
        pytest.param("qwen3", dict(sharding=1), "full", marks=pytest.mark.soak),
    ],
)
def test_attention_between_graphs_changes_no_bit(ranks, model, layout, recompute):
    """Documents are dealt otherwise in each micro-batch, and what else a layer does is replayed."""
    run = base_run(model, global_batch=4, recompute=recompute)
    run = replace(run, layout=LayoutConfig(cp=4, cp_degree="dynamic", **layout))
    plain = ranks.run("tests.pipeline.test_graphs:trained", 4, run, "packed", False)
    rows = ranks.run("tests.pipeline.test_graphs:trained", 4, run, "packed", True)
    for (expected, *_), (found, parts, seen) in zip(plain, rows):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert max(parts) > 2 * run.model.num_hidden_layers and len(seen) > 1


@pytest.mark.parametrize(
    ("model", "world", "layout", "train"),
    [
        ("mixtral", 2, dict(ep=2, dispatch="alltoall"), {}),
        ("qwen3_moe", 4, dict(ep=2, etp=2, dispatch="alltoall"), dict(recompute_ops=["up", "norm"])),
        ("gpt_oss", 2, dict(tp=2, ep=2, dispatch="alltoall"), dict(recompute="full")),
        ("deepseek_v3", 2, dict(ep=2, dispatch="allgather", ep_overlap="off"), dict(recompute_ops=["experts"])),
    ],
)
def test_experts_between_graphs_change_no_bit(ranks, model, world, layout, train):
    """Where the host waits for sizes, or counts an expert's rows as plain products do; each model has at least two
    layers with experts."""
    run = replace(base_run(model, global_batch=4, **train), layout=LayoutConfig(**layout))
    plain = ranks.run("tests.pipeline.test_graphs:trained", world, run, False, False)
    rows = ranks.run("tests.pipeline.test_graphs:trained", world, run, False, True)
    for (expected, *_), (found, parts, *_) in zip(plain, rows):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert max(parts) > 2 * 2


@pytest.mark.parametrize(
    ("model", "world", "layout"),
    [
        (
            "llama",
            2,
            dict(pp=2, schedule="gpipe"),
        ),  # a gradient is received ahead of the last forward, which it depends on
        pytest.param("llama-tied", 4, dict(pp=4), marks=pytest.mark.soak),
        pytest.param("llama-tied", 4, dict(pp=2, virtual_stages=2), marks=pytest.mark.soak),
        ("llama-tied", 4, dict(pp=2, virtual_stages=2, schedule="gpipe", sharding=3)),
        pytest.param("mixtral", 4, dict(pp=2, tp=2, ep=2), marks=pytest.mark.soak),
    ],
)
def test_captures_that_wait_for_the_device_come_to_an_end(ranks, model, world, layout):
    """Nothing is under way there that another rank asks for only when it has what this one computes after the
    capture."""
    run = replace(
        base_run(model, global_batch=8, recompute="full", cuda_graphs="on"), layout=LayoutConfig(bucket_mb=0, **layout)
    )
    plain = ranks.run("tests.pipeline.test_graphs:trained", world, run, False, False)
    rows = ranks.run("tests.pipeline.test_graphs:trained", world, run, False, True)
    for (expected, *_), (found, *_) in zip(plain, rows):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    ("model", "world", "layout", "train"),
    [
        ("llava", 2, dict(pp=2, bucket_mb=0), {}),
        ("llava", 2, dict(sharding=1), dict(recompute="full")),  # ranks compute each other's images
        ("qwen3_vl", 2, dict(tp=2), dict(recompute="selective")),  # features go to layers of the text too
        pytest.param("gemma3", 2, dict(cp=2, cp_attention="allgather"), {}, marks=pytest.mark.soak),
        pytest.param("qwen2_5_vl", 4, dict(pp=2, tp=2, virtual_stages=2), {}, marks=pytest.mark.soak),
        pytest.param("qwen3_5", 2, dict(sharding=3, bucket_mb=0), {}, marks=pytest.mark.soak),
        pytest.param("qwen3_vl", 4, dict(pp=2, cp=2, cp_ulysses=2), {}, marks=pytest.mark.soak),
    ],
)
def test_text_is_captured_behind_a_tower_that_is_not(ranks, model, world, layout, train):
    """Micro-batches have other numbers of images, and none; each replay finds the features of its own."""
    run = replace(base_run(model, global_batch=4, cuda_graphs="on", **train), layout=LayoutConfig(**layout))
    plan = make_plan(run, world)
    plain = ranks.run("tests.pipeline.test_graphs:trained", world, run, True, False)
    rows = ranks.run("tests.pipeline.test_graphs:trained", world, run, True, True)
    for rank, ((expected, *_), (found, parts, _)) in enumerate(zip(plain, rows)):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        stages = plan.schedule(1).stages_of(rank * plan.grid.pp // world)
        assert plan.grid.pp > 1 or (plan.varying_segments and len(plan.segments[0]) > len(plan.varying_segments))
        assert bool(parts) == any(captured_segments(plan, stage) for stage in stages)


@pytest.mark.parametrize(
    ("layout", "train"),
    [
        (dict(tp=2, tp_overlap="off"), {}),
        pytest.param(dict(tp=2, tp_overlap="on"), {}, marks=pytest.mark.soak),
        pytest.param(dict(tp=2, tp_overlap="off"), dict(recompute="full"), marks=pytest.mark.soak),
        pytest.param(dict(sharding=1), {}, marks=pytest.mark.soak),
    ],
)
def test_adapters_in_graphs_change_no_bit(ranks, layout, train):
    """The layouts of benchmarks/fine_tuning.py on two GPUs. Nothing runs between graphs: what adapters exchange beside
    the matmul of a linear is begun and waited for inside one."""
    run = replace(base_run("llama", global_batch=4, **train), layout=LayoutConfig(**layout))
    run = replace(run, lora=find_adapter("lora").Config(method="lora", rank=3, alpha=5.0))
    plain = ranks.run("tests.pipeline.test_graphs:trained", 2, run, False, False)
    rows = ranks.run("tests.pipeline.test_graphs:trained", 2, run, False, True)
    for (expected, *_), (found, parts, *_) in zip(plain, rows):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert parts and set(parts) == {1}


def captured(rank: int, world: int, seldom: list[set[int]], agree: bool) -> set[int]:
    """Of three micro-batches those that are captured, where those in `seldom` of a rank have, after the first step,
    more documents than others have room for."""
    mesh = Mesh(Grid(dp=world), rank)
    runner = Graphs(Recorder(), Recompute(), hosts=mesh.prepare_hosts() if agree else None)
    for many in (set(), seldom[rank]):
        batches = [replace(sample_batch([mb], True), most_documents=99 if mb in many else 1) for mb in range(3)]
        runner.begin(torch.ones((), dtype=torch.float64), batches)
        for mb, batch in enumerate(batches):
            runner.forward((0, 1), mb, (torch.ones(2, dtype=torch.float64),), batch, lambda xs, *_: (2 * xs[0],))
        runner.end()
    return {mb for _, mb in runner._taken}


def test_ranks_that_exchange_tokens_capture_the_same_micro_batches(ranks):
    seldom: list[set[int]] = [{0}, {2}]
    assert ranks.run("tests.pipeline.test_graphs:captured", 2, seldom, False) == [{1, 2}, {0, 1}]
    assert ranks.run("tests.pipeline.test_graphs:captured", 2, seldom, True) == [{1}, {1}]
    layouts = (dict(ep=2), dict(ep=2, tp=2), dict(etp=4, cp=2), dict(sharding=1))
    runs = (replace(base_run("mixtral", global_batch=4), layout=LayoutConfig(**layout)) for layout in layouts)
    assert [make_plan(run, 4).experts.mixes_batches for run in runs] == [True, False, True, False]


def turns_of_memory(rank: int, world: int) -> bool:
    """Whether a run that is not captured ends its exchanges, an odd number of them, on the turn on which they began."""
    mesh = Mesh(Grid(tp=world), rank)
    assert mesh.overlap(mesh.tp, "on", 1024) == "on" and mesh.tp.memory is not None
    runner, x, before = (
        Graphs(Recorder(), Recompute(), (mesh.tp.memory,)),
        torch.ones(2, 3, dtype=torch.float64),
        mesh.tp.memory.turn,
    )

    def times_the_sum(xs: tuple[torch.Tensor, ...], _: Any) -> tuple[torch.Tensor, ...]:
        return (xs[0] * mesh.tp.gather(xs[0].detach()).wait().sum(),)

    xs, ys = runner.forward((0, 1), 0, (x,), None, times_the_sum)
    onward = mesh.tp.memory.turn
    (grad,) = runner.backward((0, 1), 0, xs, ys, (torch.ones_like(ys[0]),), True)
    return onward == before == mesh.tp.memory.turn and torch.equal(grad, torch.full_like(x, 6.0 * world))


def test_what_is_not_captured_ends_on_its_first_turn(ranks):
    assert all(ranks.run("tests.pipeline.test_graphs:turns_of_memory", 2))


def test_what_is_forgotten_is_captured_anew():
    """As when linears leave low precision: a step without graphs, then graphs of what runs compute now, in pools
    that take them."""
    runner, found = Graphs(Recorder(), Recompute()), []
    for step in range(8):
        if step in (3, 6):
            runner.forget()
        runner.begin(torch.ones((), dtype=torch.float64), [sample_batch([0], False)])
        factor = 2.0 if step < 3 else 5.0
        x = torch.full((2,), 1.0 + step, dtype=torch.float64)
        xs, ys = runner.forward((0, 1), 0, (x,), sample_batch([0], False), lambda xs, *_, f=factor: (f * xs[0],))
        (y,) = ys
        (dx,) = runner.backward((0, 1), 0, xs, ys, (torch.ones_like(y),), True)
        found.append((y[0].item(), dx[0].item(), sum(len(slots) for slots in runner._slots.values())))
        runner.end()
    slots = (0, 1, 1, 0, 1, 1, 0, 1)
    assert found == [
        ((2.0 if step < 3 else 5.0) * (1 + step), 2.0 if step < 3 else 5.0, slots[step]) for step in range(8)
    ]


def test_a_gradient_that_passes_through_a_segment_stays():
    """Autograd may hand on the memory of the gradient that it was given."""
    runner, gradient = Graphs(Recorder(), Recompute()), torch.ones(3)
    later, segment = (_Captured((torch.zeros(3, requires_grad=True),), (), CapturedSegment(None, None)) for _ in "ab")
    later.xs[0].grad, segment.xs[0].grad, segment.dys = gradient, gradient.view_as(gradient), (gradient,)
    runner._let_go(_Slot(sample_batch([0], False), None, {(0, 2): later, (0, 1): segment}), segment)
    assert later.xs[0].grad is None and segment.dys == (None,) and segment.xs[0].grad is not None


def test_backward_begins_as_torchs_does():
    """From one tensor or several, with given gradients."""
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    for make in (lambda x: (torch.sin(x),), lambda x: (torch.sin(x), (x**3).sum()), lambda x: ((x**3).sum(), x)):
        ys = make(x)
        dys = tuple(torch.randn_like(y) for y in ys)
        (truth,) = torch.autograd.grad(make(x), x, dys)
        x.grad = None
        backward_from(ys, dys)
        assert torch.equal(x.grad, truth)


class Ends:
    """A row that notes where graphs begin and end. late: as CapturedSegment has it."""

    late = False

    def __init__(self):
        self.seen: list[str] = []

    def begin(self) -> None:
        self.seen.append("begin")

    def end(self) -> None:
        self.seen.append("end")


@pytest.mark.trust(
    6, "An error between two graphs, or in a capture, left no graph begun, garbage uncollected", "each is put back"
)
def test_an_error_between_graphs_leaves_a_graph_begun():
    cuts = GraphCuts({"attention"})
    site = cuts.op(lambda batch: None, [])
    with pytest.raises(RuntimeError, match="while none is captured"), site.between():
        raise AssertionError("never")
    cuts.row = row = Ends()
    with pytest.raises(ValueError), site.between():
        assert row.seen == ["end"]
        raise ValueError
    assert row.seen == ["end", "begin"]
    for before in (True, False):
        (gc.enable if before else gc.disable)()
        with pytest.raises(ValueError), uncollected():
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() == before
    gc.enable()


def slots_after(steps: list[list[Batch]]) -> list[list[tuple[int, int]]]:
    """After each step with these micro-batches, the room of each slot: documents, and the longest."""
    runner, found = Graphs(Recorder(), Recompute()), []
    for batches in steps:
        runner.begin(torch.ones((), dtype=torch.float64), batches)
        for mb, batch in enumerate(batches):
            x = torch.ones(2, dtype=torch.float64)
            xs, ys = runner.forward((0, 1), mb, (x,), batch, lambda xs, *_: (2 * xs[0],))
            runner.backward((0, 1), mb, xs, ys, (torch.ones_like(ys[0]),), True)
        runner.end()
        found.append([(s.batch.most_documents, s.batch.longest) for slots in runner._slots.values() for s in slots])
    return found


def of_documents(most: int, longest: int) -> Batch:
    return replace(sample_batch([0], True, 64), most_documents=most, longest_document=longest)


def test_slots_have_room_for_documents_as_the_first_step_had_them():
    """Also for more of them than sequences of usual documents have: else short sequences are never captured."""
    assert slots_after([[of_documents(9, 5), of_documents(3, 7)], [of_documents(8, 16)]]) == [[], [(9, 16)]]
    assert slots_after([[of_documents(9, 5)], [of_documents(10, 5)], [of_documents(9, 17)]])[1:] == [[], []]
    assert slots_after([[of_documents(9, 50)], [of_documents(1, 64)]])[1:] == [[(9, 64)]]
    assert slots_after([[of_documents(0, 0)], [of_documents(64, 64)]])[1:] == [[(64, 64)]]  # not counted


def test_slots_are_made_anew_when_too_many_documents_do_not_fit():
    within, beyond = of_documents(3, 5), of_documents(12, 40)
    steps = [[within]] + [[within] * 3 + [beyond]] * (ENOUGH // 4 + 4)
    found = slots_after(steps)
    assert all(rooms == [(3, 16)] for rooms in found[1:])  # a quarter is not too many
    steps = [[within]] + [[within, beyond]] * (ENOUGH // 2 + 2)
    found = slots_after(steps)
    assert found[ENOUGH // 2 - 1] == [(3, 16)] and found[ENOUGH // 2] == [] and found[-1] == [(12, 64)]


def test_a_batch_with_more_labels_than_its_head_has_rows_for_is_not_captured():
    """Where tasks label few tokens, slots have few rows for them; elsewhere no batch has such a bound."""
    few, many = (replace(of_documents(3, 5), label_rows=rows) for rows in (32, 0))
    assert slots_after([[few], [many], [few], [many]])[1:] == [[], [(3, 16)], [(3, 16)]]
    assert slots_after([[few, many], [many]])[1:] == [[]]
    assert slots_after([[many], [many]])[1:] == [[(3, 16)]]


def test_a_slot_takes_the_gradients_of_fewer_texts():
    batch = replace(of_documents(5, 9), text_gradients=torch.ones(5, 3), text_sums=torch.ones(2))
    slot = batch.roomier(9, 9).map(torch.clone)
    assert slot.text_gradients.shape == (9, 3)
    slot.copy_from(replace(batch, text_gradients=torch.full((4, 3), 2.0)))
    assert torch.equal(slot.text_gradients, torch.tensor([2.0] * 4 + [0.0] * 5).unsqueeze(1).expand(9, 3))


@pytest.mark.parametrize("documents", [True, "packed"])
def test_an_encoder_and_its_decoder_are_captured(ranks, documents):
    """With documents whose number the step knows; each slot has more room than a micro-batch needs."""
    run = base_run("t5", global_batch=4)
    plain = ranks.run("tests.pipeline.test_graphs:trained", 1, run, documents, False)
    rows = ranks.run("tests.pipeline.test_graphs:trained", 1, run, documents, True)
    for (expected, *_), (found, parts, _) in zip(plain, rows):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert parts and set(parts) == {1}

"""Schedules: thousands of random ones through the simulator, orders against PyTorch's, closed forms, mutations,
drawings.

Set PHALANX_SEED to draw other cases.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from phalanx.schedule.actions import (
    Action,
    B,
    Backward,
    Close,
    F,
    Flow,
    Forward,
    Free,
    Gather,
    I,
    InputGrad,
    Open,
    Program,
    Ready,
    Recv,
    Reduce,
    Schedule,
    ScheduleError,
    Send,
    W,
    Wait,
    WeightGrad,
)
from phalanx.schedule.buckets import fullest
from phalanx.schedule.draw import draw
from phalanx.schedule.generators import generate
from phalanx.schedule.lower import lower
from phalanx.schedule.simulate import Costs, simulate
from tests.harness.sample import rest_in_soak

SEED = int(os.environ.get("PHALANX_SEED", "0"))


def random_buckets(
    rng: random.Random, schedule: Schedule, segments: list[int]
) -> list[dict[int, set[tuple[int, int]]]]:
    """Each segment in one to three buckets, so that buckets are shared by segments and stages of a rank (tied weights)
    as well."""
    buckets_of_rank = []
    for rank in range(schedule.pp):
        count = rng.randint(1, 4)
        buckets: dict[int, set[tuple[int, int]]] = {}
        for stage in schedule.stages_of(rank):
            for segment in range(segments[stage]):
                for bucket in rng.sample(range(count), rng.randint(1, min(3, count))):
                    buckets.setdefault(bucket, set()).add((stage, segment))
        buckets_of_rank.append(buckets)
    return buckets_of_rank


FLOWS = (
    Flow(),
    Flow(closes=True),
    Flow(opens=True, closes=True),
    Flow(gathers=True, opens=True, closes=True),
)  # sharding levels 0 to 3


def random_program(rng: random.Random, max_pp: int = 8, max_m: int = 33) -> Program:
    name = rng.choice(("gpipe", "1f1b", "interleaved", "interleaved", "forward", "auto", "zb_h1", "zb_h1"))
    pp, m = rng.randint(1, max_pp), rng.choice((rng.randint(1, max_pp), rng.randint(1, max_m)))
    v = 1 if name in ("1f1b", "zb_h1") else rng.randint(1, 4)
    schedule = generate(name, pp, v, m)
    if rng.random() < 0.3:
        schedule = with_some_split(rng, schedule)
    segments = [rng.randint(1, 3) for _ in range(pp * v)]
    buckets = random_buckets(rng, schedule, segments)
    flows = [{bucket: rng.choice(FLOWS) for bucket in of_rank} for of_rank in buckets]
    early = {(stage, segment) for stage in range(pp * v) for segment in range(segments[stage]) if rng.random() < 0.2}
    return lower(
        schedule,
        segments,
        buckets,
        rng.choice((0, 1, 1, 2, 5)),
        flows,
        early,
        rng.choice((0, 1, 1, 2, 5)),
        rng.random() < 0.2,
    )


def with_some_split(rng: random.Random, schedule: Schedule) -> Schedule:
    """Some backwards of any schedule as an I, and a W anywhere after it."""
    orders = []
    for order in schedule.orders:
        made = list(order)
        for action in [a for a in order if a.kind == "B" and rng.random() < 0.5]:
            at = made.index(action)
            made[at] = I(action.stage, action.mb)
            made.insert(rng.randint(at + 1, len(made)), W(action.stage, action.mb))
        orders.append(tuple(made))
    return replace(schedule, name=f"{schedule.name}, split", orders=tuple(orders))


def random_costs(rng: random.Random, num_stages: int) -> Costs:
    backward = tuple(rng.uniform(0.1, 4) for _ in range(num_stages))
    return Costs(
        tuple(rng.uniform(0.1, 2) for _ in range(num_stages)),
        backward,
        rng.uniform(0, 2),
        tuple(rng.uniform(0, b) for b in backward),
    )


@pytest.mark.parametrize("part", rest_in_soak(range(10), range(4)))
def test_random_programs_run_to_their_end(part: int) -> None:
    rng = random.Random(f"{SEED}-{part}")
    for _ in range(100):
        program = random_program(rng, max_m=rng.choice((6, 12, 33)))
        trace = simulate(program, random_costs(rng, program.schedule.num_stages))
        assert 0 <= trace.bubble < 1


def test_every_small_case_runs_to_its_end() -> None:
    for pp in range(1, 6):
        for v in range(1, 4):
            for m in range(1, 12):
                for name in ("gpipe", "interleaved", "forward", *(["1f1b", "zb_h1"] if v == 1 else [])):
                    simulate(lower(generate(name, pp, v, m)))


def test_one_stage_per_rank_needs_no_send_buffers() -> None:
    """Even when a Send stops the host until its receiver has posted (a stricter machine than ours)."""
    for pp in range(1, 9):
        for m in range(1, 20):
            for name in ("gpipe", "1f1b", "zb_h1", "forward"):
                simulate(lower(generate(name, pp, 1, m)), host_rendezvous=True)


def test_the_step_does_not_depend_on_runs_and_buckets() -> None:
    rng = random.Random(SEED)
    for _ in range(50):
        program = random_program(rng, max_m=10)
        costs = random_costs(rng, program.schedule.num_stages)
        plain = simulate(lower(program.schedule), costs)
        if all(segment == 1 for segment in program.segments_per_stage):
            flows = program.flows_of_rank
            assert (
                simulate(
                    lower(program.schedule, buckets_of_rank=program.buckets_of_rank, flows_of_rank=flows), costs
                ).makespan
                == plain.makespan
            )
        cut = simulate(lower(program.schedule, program.segments_per_stage, program.buckets_of_rank), costs)
        assert cut.makespan == pytest.approx(plain.makespan)
        assert cut.peak_live == plain.peak_live


# ---- Closed forms


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("v", [1, 2, 4])
@pytest.mark.parametrize("factor", [1, 2, 5])
def test_bubble_is_the_papers(pp: int, v: int, factor: int) -> None:
    """(p-1)/m for one stage per rank, (p-1)/(v m) interleaved (arXiv:2104.04473 section 2.2), for any ratio of B to
    F."""
    m = pp * factor
    for backward in (1.0, 2.0, 3.0):
        costs = Costs.uniform(pp * v, 1.0, backward)
        for name in ("interleaved", "gpipe", *(["1f1b"] if v == 1 else [])):
            assert simulate(lower(generate(name, pp, v, m)), costs).bubble_over_ideal == pytest.approx(
                (pp - 1) / (v * m)
            )


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_bubble_of_other_micro_batch_counts(pp: int) -> None:
    for m in range(1, 4 * pp):
        one = simulate(lower(generate("1f1b", pp, 1, m))).bubble_over_ideal
        assert one == pytest.approx((pp - 1) / m)
        for v in (2, 3):
            interleaved = simulate(lower(generate("interleaved", pp, v, m))).bubble_over_ideal
            # With fewer micro-batches than ranks a rank idles at every turn of the loop; else the closed form holds for
            # any m.
            assert interleaved == pytest.approx((pp - 1) / (v * m)) if m >= pp else interleaved <= one + 1e-9


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_bubble_of_zb_h1_is_the_papers(pp: int) -> None:
    """(p - 1)(F + I - W) beside the work, where 1F1B has (p - 1)(F + I + W) (arXiv:2401.10241, table 2), as long as
    there is a weight gradient for each idle time; less work waits for nobody with fewer micro-batches."""
    for m in (*range(1, pp), pp, 2 * pp, 4 * pp + 1):
        for forward, of_inputs, of_weights in ((1.0, 1.0, 1.0), (2.0, 2.0, 1.0), (1.0, 1.5, 0.5)):
            each, backward = forward + of_inputs + of_weights, of_inputs + of_weights
            costs = Costs((forward,) * pp, (backward,) * pp, weights=(of_weights,) * pp)
            split, whole = (simulate(lower(generate(name, pp, 1, m)), costs) for name in ("zb_h1", "1f1b"))
            assert whole.makespan == pytest.approx((m + pp - 1) * each)
            assert split.bubble < whole.bubble
            if m >= pp:
                assert split.makespan == pytest.approx(m * each + (pp - 1) * (forward + of_inputs - of_weights))


def test_zb_h1_keeps_nobody_waiting_for_longer_than_1f1b() -> None:
    """With any costs of stages: before a forward, or what a neighbour waits for, a rank does no more than in 1F1B."""
    rng = random.Random(SEED)
    for _ in range(150):
        pp, m = rng.randint(2, 8), rng.randint(1, 20)
        costs = replace(random_costs(rng, pp), send=0.0)
        split, whole = (simulate(lower(generate(name, pp, 1, m)), costs) for name in ("zb_h1", "1f1b"))
        for mine, theirs in zip(split.spans, whole.spans):
            starts = {(isinstance(s.instruction, Forward), s.instruction.mb): s.start for s in theirs}
            for span in (s for s in mine if not isinstance(s.instruction, WeightGrad)):
                before = starts[isinstance(span.instruction, Forward), span.instruction.mb]
                assert span.start <= before + 1e-9


def test_uneven_stages_wait_for_the_slowest() -> None:
    """A last stage of three times the cost (vocabulary head): the others idle two thirds of each turn."""
    m = 50
    trace = simulate(lower(generate("1f1b", 2, 1, m)), Costs((1.0, 3.0), (2.0, 6.0)))
    assert trace.makespan == pytest.approx(1 + 9 * m + 2)
    assert trace.busy == pytest.approx((3 * m, 9 * m))


def test_messages_hide_under_compute() -> None:
    """Of 16 micro-batches only the fill and the drain pay for messages; posting at the moment of use pays for all of
    them."""
    schedule, costs = generate("interleaved", 4, 2, 16), Costs.uniform(8, 1.0, 2.0, send=0.3)
    silent = simulate(lower(schedule)).makespan
    hidden = simulate(lower(schedule, prefetch=1), costs).makespan
    late = simulate(lower(schedule, prefetch=0), costs).makespan
    assert silent < hidden < silent + 0.3 * 16
    assert late > hidden + 10
    assert simulate(lower(schedule, prefetch=20), costs).makespan == pytest.approx(hidden)


def test_one_edge_carries_one_message_at_a_time() -> None:
    trace = simulate(lower(generate("forward", 2, 1, 3)), Costs.uniform(2, 1.0, send=10.0))
    assert trace.makespan == 1 + 3 * 10 + 1


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_live_activations(pp: int) -> None:
    for m in (1, 2, 3, pp, 3 * pp + 1):
        ranks = range(pp)
        assert simulate(lower(generate("1f1b", pp, 1, m))).peak_live == tuple(min(pp - rank, m) for rank in ranks)
        split = simulate(lower(generate("zb_h1", pp, 1, m)))  # alive or waiting: what 1F1B has on rank 0
        assert split.peak_live == (min(pp, m),) * pp
        assert split.peak_pending == tuple(min(rank + 1, m) if rank else 0 for rank in ranks)
        assert simulate(lower(generate("gpipe", pp, 1, m))).peak_live == (m,) * pp
        assert simulate(lower(generate("forward", pp, 2, m))).peak_live == (1,) * pp
        first_round = -(-m // max(1, m // pp))
        for v in (2, 4):
            warm_up = [(v - 1) * first_round + 2 * (pp - 1 - rank) for rank in ranks]
            assert simulate(lower(generate("interleaved", pp, v, m))).peak_live == tuple(
                min(v * m, n + 1) for n in warm_up
            )


def test_live_changes_and_stage_peaks() -> None:
    trace = simulate(lower(generate("1f1b", 2, 1, 2)))
    assert [(c.time, c.stage, c.live) for c in trace.live[0]] == [(0, 0, 1), (1, 0, 2), (6, 0, 1), (9, 0, 0)]
    assert trace.peak_live_of_stage == (2, 1)


def test_few_receives_wait() -> None:
    """One per action ahead and the one being waited for; one more where rounds of unequal size make the two ends
    differ in order."""
    for name, v in (("1f1b", 1), ("zb_h1", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 4), ("forward", 2)):
        for pp in (2, 4, 8):
            for m in (1, pp, 4 * pp, 4 * pp + 3):
                for prefetch in (1, 3):
                    trace = simulate(lower(generate(name, pp, v, m), prefetch=prefetch))
                    assert max(trace.peak_receives) <= prefetch + 1 + (m % pp > 0 and v > 1)


# ---- PyTorch's orders and validators (private API, read from the source of torch 2.13)


@pytest.fixture(scope="module")
def torch_schedules():
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for name in ("_Action", "_validate_schedule", "_simulate_comms_compute", "_add_send_recv"):
        if not hasattr(schedules, name):
            pytest.skip(f"this torch has no {name}")
    return schedules


def stub(index: int, pp: int, num_stages: int) -> SimpleNamespace:
    """As much of a PipelineStage as planning reads; no process group."""
    return SimpleNamespace(
        stage_index=index,
        num_stages=num_stages,
        is_first=index == 0,
        is_last=index == num_stages - 1,
        group_size=pp,
        group_rank=index % pp,
        device="cpu",
        has_backward=True,
        group=None,
        submod=None,
        dw_builder=None,
        stage_index_to_group_rank={s: s % pp for s in range(num_stages)},
    )


def compute(orders: dict[int, list]) -> list[list[tuple[str, int, int]]]:
    """PyTorch's orders without idle slots and reductions."""
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    actions = (
        [a for a in orders[rank] if a is not None and a.computation_type.name in kinds] for rank in sorted(orders)
    )
    return [[(kinds[a.computation_type.name], a.stage_index, a.microbatch_index) for a in row] for row in actions]


def ours(schedule: Schedule) -> list[list[tuple[str, int, int]]]:
    return [[tuple(action) for action in order] for order in schedule.orders]


def executed(schedule_class, rank: int, pp: int, m: int) -> list[tuple[str, int, int]]:
    """What PyTorch's loop does on one rank. (The table that it prints for 1F1B starts the last rank with micro-batch
    1.)"""
    seen: list[tuple[str, int, int]] = []
    stage = stub(rank, pp, pp)
    stage.forward_one_chunk = lambda mb, *_, **__: seen.append(("F", rank, mb))
    stage.backward_one_chunk = lambda mb, **__: seen.append(("B", rank, mb))
    stage.get_fwd_recv_ops = stage.get_fwd_send_ops = stage.get_bwd_recv_ops = stage.get_bwd_send_ops = lambda mb: []
    stage.perform_reduce_grad = lambda scale: None
    stage.release_fwd_send_outputs = lambda mb: None  # torch 2.15
    schedule = schedule_class(stage, m)
    schedule._initialize_stage = lambda *_: None
    schedule._step_microbatches()
    return seen


@pytest.mark.parametrize("pp", range(1, 9))
def test_orders_of_one_stage_per_rank_are_torchs(torch_schedules, pp: int) -> None:
    for m in (*range(pp, pp + 9), 24, 33):
        for name, theirs in (("1f1b", torch_schedules.Schedule1F1B), ("gpipe", torch_schedules.ScheduleGPipe)):
            assert ours(generate(name, pp, 1, m)) == [executed(theirs, rank, pp, m) for rank in range(pp)]


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 5, 8])
def test_interleaved_orders_are_torchs(torch_schedules, pp: int) -> None:
    compared = refused = 0
    for v in (1, 2, 3, 4):
        for m in (*range(1, 12), 16, 24, 33):
            schedule = generate("interleaved", pp, v, m)
            try:
                stages = [stub(s, pp, pp * v) for s in schedule.stages_of(0)]
                theirs = torch_schedules.ScheduleInterleaved1F1B(stages, m, loss_fn=len)
            except ValueError:  # micro-batches not a multiple of the rounds: only ours has an order
                refused += 1
                continue
            assert ours(schedule) == compute(theirs.pipeline_order), (v, m)
            compared += 1
    assert compared >= 30 and (refused > 0 or pp < 3)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_split_orders_are_torchs(torch_schedules, pp: int) -> None:
    """Rank 0 apart, which does in our order I and W of a micro-batch at once."""
    for m in (pp, pp + 1, 2 * pp, 3 * pp + 2):
        try:
            theirs = torch_schedules.ScheduleInterleavedZeroBubble([stub(0, pp, pp)], m, loss_fn=len)
        except ValueError:
            continue
        found = compute(theirs.pipeline_order)
        whole = [each for kind, s, mb in ours(generate("zb_h1", pp, 1, m))[0] for each in apart(kind, s, mb)]
        assert [whole, *ours(generate("zb_h1", pp, 1, m))[1:]] == found


def apart(kind: str, stage: int, mb: int) -> list[tuple[str, int, int]]:
    return [("I", stage, mb), ("W", stage, mb)] if kind == "B" else [(kind, stage, mb)]


def test_torchs_validators_accept_ours(torch_schedules) -> None:
    rng = random.Random(SEED)
    kind = torch_schedules._ComputationType
    kinds = {"F": kind.FORWARD, "B": kind.FULL_BACKWARD, "I": kind.BACKWARD_INPUT, "W": kind.BACKWARD_WEIGHT}
    for _ in range(40):
        schedule = random_program(rng, max_pp=5, max_m=9).schedule
        if not schedule.has_backward:
            continue
        actions = {
            rank: [torch_schedules._Action(a.stage, kinds[a.kind], a.mb) for a in order]
            for rank, order in enumerate(schedule.orders)
        }
        owners = torch_schedules._validate_schedule(
            actions, schedule.pp, schedule.num_stages, schedule.num_micro_batches
        )
        assert owners == dict(enumerate(schedule.stage_rank))
        with_messages = torch_schedules._add_send_recv(
            actions, lambda s, of=schedule.stage_rank: of[s], schedule.num_stages
        )
        torch_schedules._simulate_comms_compute(
            with_messages, lambda s, of=schedule.stage_rank: of[s], schedule.num_stages
        )


def test_interleaved_is_megatrons_table() -> None:
    """get_schedule_table(num_microbatches=4, num_model_chunks=2, microbatch_group_size=2) of megatron-core 0.16.1."""
    table = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    order = generate("interleaved", 2, 2, 4).orders[0]
    assert [(a.mb, a.stage // 2) for a in order if a.kind == "F"] == table
    assert [(a.mb, 1 - a.stage // 2) for a in order if a.kind == "B"] == table


# ---- Lowering


def test_a_lowered_list() -> None:
    buckets = [{0: {(0, 0)}, 1: {(0, 1)}}, {0: {(1, 0)}, 1: {(1, 1)}}]
    program = lower(generate("1f1b", 2, 1, 2), [2, 2], buckets)
    assert program.lists[0] == (
        Ready(0),
        Forward(0, 0, 0),
        Ready(1),
        Forward(0, 1, 0),
        Send("act", 0, 0, 1),
        Recv("grad", 0, 0, 1),
        Forward(0, 0, 1),
        Forward(0, 1, 1),
        Send("act", 0, 1, 1),
        Recv("grad", 0, 1, 1),
        Wait("grad", 0, 0),
        Backward(0, 1, 0),
        Backward(0, 0, 0),
        Wait("grad", 0, 1),
        Backward(0, 1, 1),
        Reduce(1),
        Backward(0, 0, 1),
        Reduce(0),
    )
    assert program.lists[1] == (
        Recv("act", 1, 0, 0),
        Wait("act", 1, 0),
        Ready(0),
        Forward(1, 0, 0),
        Ready(1),
        Forward(1, 1, 0),
        Recv("act", 1, 1, 0),
        Backward(1, 1, 0),
        Backward(1, 0, 0),
        Send("grad", 1, 0, 0),
        Wait("act", 1, 1),
        Forward(1, 0, 1),
        Forward(1, 1, 1),
        Backward(1, 1, 1),
        Reduce(1),
        Backward(1, 0, 1),
        Send("grad", 1, 1, 0),
        Reduce(0),
    )
    simulate(program)


def test_a_lowered_list_of_a_split_backward() -> None:
    """Rank 1 of 2: the gradient of the inputs is sent before weights get theirs; the head's segment (early) is done
    whole; buckets are open for W alone, and the weights are gone by then."""
    program = lower(
        generate("zb_h1", 2, 1, 2),
        [1, 2],
        [{0: {(0, 0)}}, {0: {(1, 0)}, 1: {(1, 1)}}],
        flows_of_rank=[{}, {0: SHARDED, 1: Flow()}],
        early={(1, 1)},
        bucket_prefetch=0,
    )
    simulate(program)
    assert program.lists[1] == (
        Gather(0),
        Recv("act", 1, 0, 0),
        Wait("act", 1, 0),
        Ready(0),
        Forward(1, 0, 0),
        Free(0),
        Ready(1),
        Forward(1, 1, 0),
        Recv("act", 1, 1, 0),
        Backward(1, 1, 0),
        Gather(0),
        Ready(0),
        InputGrad(1, 0, 0),
        Send("grad", 1, 0, 0),
        Wait("act", 1, 1),
        Forward(1, 0, 1),
        Free(0),
        Forward(1, 1, 1),
        Backward(1, 1, 1),
        Reduce(1),
        Gather(0),
        Ready(0),
        InputGrad(1, 0, 1),
        Send("grad", 1, 1, 0),
        Free(0),
        Open(0),
        WeightGrad(1, 0, 0),
        Reduce(0),
        Close(0, False),
        Open(0),
        WeightGrad(1, 0, 1),
        Reduce(0),
        Close(0, True),
    )
    assert not any(isinstance(i, InputGrad | WeightGrad) for i in program.lists[0])


def test_tied_weights_are_reduced_after_their_last_use() -> None:
    """One rank, two stages; bucket 7 holds the embedding (first segment) which the head (last segment) uses too."""
    program = lower(generate("auto", 1, 2, 2), [2, 1], [{7: {(0, 0), (1, 0)}, 8: {(0, 1)}}])
    (order,) = program.lists
    assert order[:2] == (Ready(7), Forward(0, 0, 0))
    assert order[-4:] == (Backward(0, 1, 1), Reduce(8), Backward(0, 0, 1), Reduce(7))
    assert not any(isinstance(i, Send | Recv | Wait) for i in order)
    simulate(program)


SHARDED = Flow(gathers=True, opens=True, closes=True)


def test_a_lowered_list_of_sharded_weights() -> None:
    """Three segments on one rank: weights come one segment ahead and go after each use, gradients are open for one
    backward and close one later.

    The last segment's weights serve its backward too, which comes next; so do the first segment's the next micro-batch.
    """
    (order,) = lower(
        generate("1f1b", 1, 1, 2),
        [3],
        [{b: {(0, b)} for b in range(3)}],
        flows_of_rank=[dict.fromkeys(range(3), SHARDED)],
    ).lists
    assert order == (
        Gather(0),
        Gather(1),
        Ready(0),
        Forward(0, 0, 0),
        Free(0),
        Gather(2),
        Ready(1),
        Forward(0, 1, 0),
        Free(1),
        Ready(2),
        Forward(0, 2, 0),
        Gather(1),
        Open(2),
        Backward(0, 2, 0),
        Free(2),
        Reduce(2),
        Gather(0),
        Ready(1),
        Open(1),
        Backward(0, 1, 0),
        Free(1),
        Reduce(1),
        Close(2, False),
        Ready(0),
        Open(0),
        Backward(0, 0, 0),
        Reduce(0),
        Close(1, False),
        Gather(1),
        Forward(0, 0, 1),
        Free(0),
        Close(0, False),
        Gather(2),
        Ready(1),
        Forward(0, 1, 1),
        Free(1),
        Ready(2),
        Forward(0, 2, 1),
        Gather(1),
        Open(2),
        Backward(0, 2, 1),
        Free(2),
        Reduce(2),
        Gather(0),
        Ready(1),
        Open(1),
        Backward(0, 1, 1),
        Free(1),
        Reduce(1),
        Close(2, True),
        Ready(0),
        Open(0),
        Backward(0, 0, 1),
        Free(0),
        Reduce(0),
        Close(1, True),
        Close(0, True),
    )


def test_a_head_that_makes_gradients_in_forward_has_them_open_there() -> None:
    """Bucket 0 is tied: open from the head's forward to the embedding's backward."""
    program = lower(
        generate("1f1b", 1, 1, 1),
        [2],
        [{0: {(0, 0), (0, 1)}}],
        flows_of_rank=[{0: Flow(opens=True, closes=True)}],
        early={(0, 1)},
    )
    assert program.lists[0] == (
        Ready(0),
        Forward(0, 0, 0),
        Open(0),
        Forward(0, 1, 0),
        Backward(0, 1, 0),
        Backward(0, 0, 0),
        Reduce(0),
        Close(0, True),
    )
    simulate(program)


@pytest.mark.parametrize("m", [1, 2, 5])
@pytest.mark.parametrize("segments", [3, 4, 9])
def test_calls_of_sharded_buckets(m: int, segments: int) -> None:
    """One stage, a bucket per segment: 2 gathers per micro-batch, but 1 of the last segment's and of the first's,
    which is gathered once more; kept: 1.

    Memory: with nothing ahead one bucket of weights and one of gradients, else as many more as are ahead.
    """
    buckets, flows, sizes = (
        [{b: {(0, b)} for b in range(segments)}],
        [dict.fromkeys(range(segments), SHARDED)],
        dict.fromkeys(range(segments), 100),
    )

    def of(bucket_prefetch: int, keep: bool = False) -> Program:
        program = lower(
            generate("1f1b", 1, 1, m),
            [segments],
            buckets,
            flows_of_rank=flows,
            bucket_prefetch=bucket_prefetch,
            keep=keep,
        )
        simulate(program)
        return program

    for bucket_prefetch in (0, 1):
        (order,) = of(bucket_prefetch).lists
        gathers = [sum(i == Gather(b) for i in order) for b in range(segments)]
        assert gathers == [m + 1, *[2 * m] * (segments - 2), m]
        assert [sum(i == Reduce(b) for i in order) for b in range(segments)] == [m] * segments
        weights, gradients = fullest(order, sizes, sizes, {})
        assert (weights, gradients) == (100 * (1 + bucket_prefetch), 100 * (1 + bucket_prefetch))
    (order,) = of(1, keep=True).lists
    assert [sum(i == Gather(b) for i in order) for b in range(segments)] == [1] * segments
    assert fullest(order, sizes, dict.fromkeys(range(segments), 0), {}) == (100 * segments, 0)


def test_neighbouring_stages_on_one_rank_exchange_nothing() -> None:
    """V placement (stage 1 and 2 on the same rank): placement is data, so lowering and simulator need no new rule."""
    stage_rank = (0, 1, 1, 0)
    orders = ([F(0, 0), F(3, 0), B(3, 0), B(0, 0)], [F(1, 0), F(2, 0), B(2, 0), B(1, 0)])
    program = lower(Schedule("v", 1, stage_rank, tuple(map(tuple, orders))))
    assert [sum(isinstance(i, Send) for i in instructions) for instructions in program.lists] == [2, 2]
    simulate(program, host_rendezvous=True)


def test_forward_only_has_no_gradients() -> None:
    program = lower(generate("forward", 2, 2, 3), None, [{0: {(0, 0), (2, 0)}}, {0: {(1, 0)}, 1: {(3, 0)}}])
    instructions = [i for instructions in program.lists for i in instructions]
    assert not any(isinstance(i, Backward | Reduce) or (isinstance(i, Send) and i.kind == "grad") for i in instructions)
    assert sum(isinstance(i, Ready) for i in instructions) == 3
    simulate(program)


@pytest.mark.parametrize(
    "arguments, names",
    [
        (("zigzag", 2, 1, 4), "zigzag"),
        (("1f1b", 0, 1, 4), "pp=0"),
        (("gpipe", 2, 1, 0), "num_micro_batches=0"),
        (("1f1b", 2, 2, 4), "virtual_stages=2"),
        (("zb_h1", 2, 2, 4), "virtual_stages=2"),
    ],
)
def test_impossible_schedules_are_refused(arguments: tuple, names: str) -> None:
    with pytest.raises(ScheduleError, match=names):
        generate(*arguments)


def test_lowering_refuses_what_does_not_fit() -> None:
    schedule = generate("1f1b", 2, 1, 2)
    for bad in (
        lambda: lower(schedule, [1]),
        lambda: lower(schedule, [1, 0]),
        lambda: lower(schedule, None, [{}]),
        lambda: lower(schedule, None, [{0: {(1, 0)}}, {}]),
        lambda: lower(schedule, None, [{0: set()}, {}]),
        lambda: lower(schedule, prefetch=-1),
        lambda: lower(schedule, bucket_prefetch=-1),
        lambda: lower(replace(schedule, orders=(schedule.orders[0], ()))),
        lambda: simulate(lower(replace(schedule, orders=((Action("W", 0, 0),), ())))),
        lambda: simulate(lower(schedule), Costs.uniform(3)),
    ):
        with pytest.raises(ScheduleError):
            bad()


# ---- Mutations: the simulator must be able to say no


def mutants(rng: random.Random, program: Program):
    """(what was done, broken program): each breaks a rule for certain."""
    rank = rng.randrange(program.schedule.pp)
    instructions = list(program.lists[rank])

    def put(changed: list) -> Program:
        return replace(program, lists=(*program.lists[:rank], tuple(changed), *program.lists[rank + 1 :]))

    i = rng.randrange(len(instructions))
    yield f"drop {instructions[i]} of rank {rank}", put(instructions[:i] + instructions[i + 1 :])
    yield f"repeat {instructions[i]} of rank {rank}", put(instructions[: i + 1] + instructions[i:])

    pairs = [(i, j) for i, a in enumerate(instructions) for j, b in enumerate(instructions) if i < j and conflict(a, b)]
    if pairs:
        i, j = rng.choice(pairs)
        changed = list(instructions)
        changed[i], changed[j] = changed[j], changed[i]
        yield f"swap {instructions[i]} and {instructions[j]} of rank {rank}", put(changed)


ORDERED = {(Gather, Ready), (Ready, Free), (Open, Reduce), (Reduce, Close)}


def conflict(a, b) -> bool:
    """Two instructions of one rank whose order is no matter of taste."""
    if isinstance(a, Recv) and isinstance(b, Recv):
        return a.peer == b.peer
    if isinstance(a, Send) and isinstance(b, Send):
        return a.peer == b.peer
    if isinstance(a, Forward) and isinstance(b, Backward | InputGrad):
        return (a.stage, a.mb) == (b.stage, b.mb)
    if isinstance(a, InputGrad) and isinstance(b, WeightGrad):
        return a == InputGrad(b.stage, b.segment, b.mb)
    if isinstance(a, Gather | Ready | Open | Reduce) and isinstance(b, Ready | Free | Reduce | Close):
        return a.bucket == b.bucket and (type(a), type(b)) in ORDERED
    if isinstance(a, Recv) and isinstance(b, Wait):
        return a.value == b.value
    if isinstance(a, Wait):
        reader = Forward if a.kind == "act" else Backward | InputGrad
        return isinstance(b, reader) and (a.stage, a.mb) == (b.stage, b.mb)
    if isinstance(b, Send):
        made_by = Forward if b.kind == "act" else Backward | InputGrad
        return isinstance(a, made_by) and (a.stage, a.mb) == (b.stage, b.mb)
    return False


def test_mutations_are_found() -> None:
    rng = random.Random(SEED)
    tried = 0
    for _ in range(250):
        program = random_program(rng, max_pp=4, max_m=5)
        simulate(program)
        for what, mutant in mutants(rng, program):
            tried += 1
            with pytest.raises(ScheduleError):
                simulate(mutant)
                pytest.fail(f"not found: {what} in {program.schedule}")
    assert tried > 500


def test_mutations_of_a_split_backward_are_found() -> None:
    """Each is refused, with the reason: a W that is dropped, done twice, or before its I; a bucket that is reduced
    before its last W; a backward done whole and split."""
    program = lower(generate("zb_h1", 2, 1, 3), [2, 2], [{0: {(0, 0), (0, 1)}}, {0: {(1, 0), (1, 1)}}])
    first, order = program.lists
    i, w, reduce = InputGrad(1, 0, 1), WeightGrad(1, 0, 1), Reduce(0)

    def without(*gone) -> list:
        return [x for x in order if x not in gone]

    def swapped(a, b) -> list:
        return [b if x == a else a if x == b else x for x in order]

    last = WeightGrad(1, 0, 2)
    whole = [Backward(1, 0, 1) if x == w else x for x in order]
    for changed, said in (
        (without(w), "rank 1 never runs WeightGrad"),
        (without(i), "rank 1, instruction"),
        (without(reduce), "never reduces buckets"),
        ([*order, w], "runs a second time"),
        (swapped(i, w), "the gradients of its inputs have not run"),
        (swapped(last, reduce), "adds gradients to bucket 0 after its reduction"),
        (whole, "its backward has run already"),
    ):
        with pytest.raises(ScheduleError, match=said):
            simulate(replace(program, lists=(first, tuple(changed))))


def test_swapped_actions_are_found_before_lowering_hides_them() -> None:
    """Backward before its forward, and an order in which the ranks wait for each other: lowering is faithful, the
    simulator objects."""
    schedule = generate("1f1b", 2, 1, 2)
    first, second = schedule.orders
    with pytest.raises(ScheduleError, match="its forward has not run"):
        simulate(lower(replace(schedule, orders=(first, (B(1, 0), *second[:1], *second[2:])))))
    crossed = (F(0, 0), B(0, 0), F(0, 1), B(0, 1)), (F(1, 1), F(1, 0), B(1, 0), B(1, 1))
    with pytest.raises(ScheduleError, match="deadlock") as error:
        simulate(lower(replace(schedule, orders=crossed)))
    assert "rank 0 stands at instruction" in str(error.value) and "Wait(kind='grad', stage=0, mb=0)" in str(error.value)
    assert "rank 1 stands at instruction" in str(error.value) and "Wait(kind='act', stage=1, mb=1)" in str(error.value)


def test_reordered_receives_name_the_edge() -> None:
    program = lower(generate("gpipe", 2, 1, 2))
    swapped = list(program.lists[1])
    i, j = [i for i, x in enumerate(swapped) if isinstance(x, Recv)]
    swapped[i], swapped[j] = swapped[j], swapped[i]
    with pytest.raises(ScheduleError, match="edge rank 0 -> rank 1: message 0 is sent as"):
        simulate(replace(program, lists=(program.lists[0], tuple(swapped))))


# ---- Drawings


def test_drawing_of_1f1b() -> None:
    """By hand: F is 2 columns (one second), B 4; rank 1 starts a second later; rank 0 waits for its gradients."""
    assert draw(simulate(lower(generate("1f1b", 2, 1, 3), [2, 2]))) == "\n".join(
        [
            "rank 0 |F0F1....B0==F2B1==..B2==",
            "rank 1 |..F0B0==F1B1==F2B2==....",
            "1f1b: 2 ranks, 3 micro-batches, bubble 25.0 % of the time",
            "F0 forward of micro-batch 0, B0== its backward, . idle",
        ]
    )


def test_drawing_of_a_split_backward() -> None:
    """By hand: I and W take a second each. Rank 1 does W0 after I1, and fills the end with the last two."""
    assert draw(simulate(lower(generate("zb_h1", 2, 1, 3), [2, 2]))) == "\n".join(
        [
            "rank 0 |F0F1..B0==F2B1==B2==",
            "rank 1 |..F0I0F1I1W0F2I2W1W2",
            "zb_h1: 2 ranks, 3 micro-batches, bubble 10.0 % of the time",
            "F0 forward of micro-batch 0, B0== its backward, I0== W0++ its gradients of inputs and of weights, . idle",
        ]
    )


def test_drawing_of_virtual_stages() -> None:
    """By hand: rank 1 warms up with two forwards; A1 of rank 0 ends at second 15, of which each rank works 12."""
    assert draw(simulate(lower(generate("interleaved", 2, 2, 2)))) == "\n".join(
        [
            "rank 0 |a0a1b0b1....B0==..B1==A0==A1==",
            "rank 1 |..a0a1b0B0==b1B1==A0==A1==....",
            "interleaved: 2 ranks, 2 virtual stages, 2 micro-batches, bubble 20.0 % of the time",
            "a0 b0 .. forward of micro-batch 0, A0== B0== .. its backward, a letter per virtual stage, . idle",
        ]
    )


@pytest.mark.parametrize("width", [40, 100, 200])
@pytest.mark.parametrize(
    "name, pp, v, m",
    [
        ("1f1b", 16, 1, 100),
        ("interleaved", 32, 3, 32),
        ("gpipe", 1, 1, 1),
        ("forward", 3, 2, 30),
        ("zb_h1", 16, 1, 100),
    ],
)
def test_drawings_fit(name: str, pp: int, v: int, m: int, width: int) -> None:
    *rows, summary, key = draw(simulate(lower(generate(name, pp, v, m))), width=width, max_rows=20).split("\n")
    assert len(rows) <= 20 and all(len(row) <= width for row in rows)
    assert len({len(row) for row in rows if not row.startswith("…")}) == 1
    assert "bubble" in summary and "idle" in key
    if name == "1f1b" and width == 100:
        assert all("…" in row and "B" in row and "F" in row for row in rows)


def test_drawing_of_uneven_costs() -> None:
    trace = simulate(lower(generate("1f1b", 3, 1, 4)), Costs((0.5, 1.0, 1.37), (0.0, 2.0, 3.1), 0.05))
    assert "B3" in draw(trace) and "1f1b" in draw(trace)

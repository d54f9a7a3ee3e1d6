"""Schedules that split backward (zb_h1), beside what the central test has: the same bits as 1F1B in FP8, with offload
and in a fixed order; what is kept for weight gradients that wait, forecast and real; plain torch ops on parameters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from phalanx.base.errors import ConfigError
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Fp8Config, Run
from phalanx.engine.build import build
from phalanx.engine.step import accumulate, update
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import OVERHEAD, block_uses, fullest_moment, most_pending, rank_uses
from phalanx.forecast.smaller import recompute_changes
from phalanx.layout.config import LayoutConfig
from phalanx.nn.dry_run import Allocations, FusedAttention, make_gradients, measure, measure_split
from phalanx.nn.env import Env, WeightRules
from phalanx.nn.recompute import PRESETS
from phalanx.nn.run_block import run_block
from phalanx.ops.dense.grads import GradientQueue, add_grad, queue_autograd
from phalanx.planning.blocks import make_blocks
from phalanx.schedule.actions import Backward, Forward, InputGrad, WeightGrad
from phalanx.sequence.batch import Batch
from tests.harness.parity import Parts, assemble, base_run, parts_of, random_weights, step_batches
from tests.planning.test_plan import MODELS


def trained(rank: int, world: int, run: Run) -> tuple[list[float], Parts, bool]:
    """Losses and norms of two steps, this rank's part of the weights; whether every W had something to do."""
    plan = make_plan(run, world)
    mesh = Mesh(plan.grid, rank)
    state = build(plan, mesh)
    random_weights(state.model)
    state.model.train()
    found, waited = [], []
    weight_grad = state.model.handlers[WeightGrad]

    def watched(i: WeightGrad) -> None:
        waited.append(len(state.model.stages._pending[i.stage, i.segment, i.mb]._work) > 0)
        weight_grad(i)

    state.model.handlers = {**state.model.handlers, WeightGrad: watched}
    for step in range(2):
        result = update(state, accumulate(state, step_batches(run, mesh, step, False)), lr=1e-2)
        found += [result.loss.item(), result.grad_norm.item()]
    state.buffers.ready()
    return found, parts_of(state, "master"), len(waited) > 0 and all(waited)


def bf16(model: str, **train) -> Run:
    run = base_run(model, 8, precision="bf16", **train)
    return replace(run, layout=LayoutConfig(pp=2, bucket_mb=0), optim=replace(run.optim, clip_grad=0.0))


CASES = {
    "FP8": (bf16("llama", fp8=Fp8Config(recipe="tensorwise")), 2),
    "offload of two layers of each stage": (bf16("llama", offload_layers=2), 2),
    "in a fixed order, dp2, tied": (bf16("llama-tied", deterministic=True), 4),
    "in a fixed order, ep2": (
        replace(bf16("mixtral", deterministic=True), layout=LayoutConfig(pp=2, ep=2, bucket_mb=0)),
        4,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_as_1f1b(ranks, name):
    """Of weights. (Norms are summed bucket by bucket, and those are others.)"""
    run, world = CASES[name]
    found = {}
    for schedule in ("1f1b", "zb_h1"):
        changed = replace(run, layout=replace(run.layout, schedule=schedule))
        rows = ranks.run("tests.pipeline.test_split_schedule:trained", world, changed)
        assert [waited for _, _, waited in rows] == [schedule == "zb_h1" and i >= world // 2 for i in range(world)]
        found[schedule] = rows[0][0], assemble([parts for _, parts, _ in rows])
    (losses, weights), (of_split, split) = found.values()
    assert losses == pytest.approx(of_split, rel=1e-12) and losses[::2] == of_split[::2]
    assert weights.keys() == split.keys()
    assert [name for name, values in weights.items() if not np.array_equal(values, split[name])] == []


# ---- memory


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_waits_is_measured_on_meta_as_on_a_device(recompute):
    env = Env(weights=WeightRules(dtype=torch.float32))

    def waiting(device: str) -> tuple[int, int]:
        (block,) = make_blocks(MODELS["llama"], env, range(1, 2))
        block.recomputed = frozenset(PRESETS[recompute])
        ids, params = torch.zeros(256, dtype=torch.int64, device=device), list(block.parameters())
        batch = Batch(ids, ids, ids, ids, 2, 128)
        for p in params if device == "cpu" else ():
            p.to_empty(torch.device(device))
            p.data = torch.zeros(p.spec.shape)

        def new_input():
            return torch.zeros(256, 64, device=device)

        def forward(x):
            return run_block(block, x, batch)

        with torch.no_grad(), FusedAttention():
            forward(new_input())
        if device == "meta":
            kept = measure(forward, new_input, params, torch.float32).kept
            return measure_split(forward, new_input, params, torch.float32, env.weights.gradients).pending, kept
        make_gradients(params, torch.float32)
        with Allocations() as seen, env.weights.gradients.open() as pending:
            x = new_input().requires_grad_()
            y = forward(x)
            torch.autograd.backward(y, torch.ones_like(y))
            del x, y
        live = seen.live
        pending.run()
        return live, seen.live

    (meta, kept), (real, left) = waiting("meta"), waiting("cpu")
    assert meta == pytest.approx(real, rel=0.02) and left < real / 100
    assert meta > kept if recompute == "full" else 0 < meta < 2 * kept


def test_the_fullest_moment_of_a_split_backward():
    """By hand: two segments that keep 10 and 20, work with 1 and 2 (in I with 3 and 4), and of which 5 and 6 wait."""
    segments, split = {0: [(10, 1), (20, 2)]}, {0: [(5, 3), (6, 4)]}
    order = [Forward(0, 0, 0), Forward(0, 1, 0), InputGrad(0, 1, 0), InputGrad(0, 0, 0)]
    then = [Forward(0, 0, 1), Forward(0, 1, 1), Backward(0, 1, 1), Backward(0, 0, 1)]
    late = [WeightGrad(0, 1, 0), WeightGrad(0, 0, 0)]
    assert fullest_moment(order + late + then, segments, {}, split) == (30, 4)
    assert fullest_moment(order + then + late, segments, {}, split) == (11 + 30, 2)
    assert most_pending(order + then + late, split) == 11 and most_pending(order[:3], split) == 6


def test_a_plan_counts_what_waits():
    run = replace(base_run("llama", 8, precision="bf16"), layout=LayoutConfig(pp=2, schedule="zb_h1"))
    plan = make_plan(run, 2)
    blocks = block_uses(plan)
    assert [use.split is None for use in blocks] == [False] * 5 + [True]  # the head's is not split
    split, trace = rank_uses(plan, 8, blocks)
    assert split[0].pending == 0 < split[1].pending and trace.peak_pending == (0, 2)
    whole, _ = rank_uses(make_plan(replace(run, layout=LayoutConfig(pp=2)), 2), 8)
    assert split[1].memory["activations"] > whole[1].memory["activations"]
    assert split[0].memory["activations"] == whole[0].memory["activations"]
    # the first to try where it does not fit
    assert next(recompute_changes(run))[0] == {"layout.schedule": "auto"}
    assert next(recompute_changes(replace(run, layout=LayoutConfig(pp=2))))[0] != {"layout.schedule": "auto"}


def test_a_budget_has_room_for_what_waits():
    """The least that a budget may be, by its own error, holds what is forecast."""
    run = replace(base_run("llama", 8, precision="bf16"), layout=LayoutConfig(pp=2, schedule="zb_h1"))
    run = replace(run, train=replace(run.train, recompute_budget_gib=1.0))
    with pytest.raises(ConfigError, match="with everything recomputed") as refused:
        make_plan(run, 2)
    (gib,) = refused.value.problems[0].valid
    uses, _ = rank_uses(make_plan(replace(run, train=replace(run.train, recompute_budget_gib=gib)), 2), 8)
    assert max(use.total for use in uses) + OVERHEAD <= gib * 2**30
    assert max(use.pending for use in uses) > 0


# ---- plain torch ops on a parameter


class Own(torch.nn.Parameter):
    queue: GradientQueue


class _Ours(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, param):
        ctx.param = param
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy, add_grad(ctx.param, 10 * dy.to(ctx.param.grad.dtype))


def test_gradients_of_plain_torch_ops_wait_too():
    """In order with those of our ops; the buffer is not touched before, and is the same tensor afterwards."""
    p = Own(torch.ones(3, dtype=torch.bfloat16))
    p.queue, p.grad_dtype = GradientQueue(), torch.float32
    p.grad = buffer = torch.zeros(3)
    queue_autograd(p)
    x = torch.ones(3, requires_grad=True)
    with p.queue.open() as pending:
        ((p * 3).sum() + _Ours.apply(x, p).sum()).backward()
        assert p.grad is buffer and not buffer.any()
    (p * 2).sum().backward()  # closed: at once
    assert p.grad is buffer and torch.equal(buffer, torch.full((3,), 2.0))
    pending.run()
    assert p.grad is buffer and torch.equal(buffer, torch.full((3,), 15.0))


def test_a_frozen_parameter_has_nothing_to_wait():
    p = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    queue_autograd(p)
    (p * torch.ones(3, requires_grad=True)).sum().backward()
    assert p.grad is None

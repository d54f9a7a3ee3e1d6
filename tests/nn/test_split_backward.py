"""Weight gradients through one queue: opened over the backward of blocks (I) and run later (W), they have the same bits
as if they had been added at once, and until then no gradient buffer of a weight is touched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.engine.build import State, build
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.nn.run_block import run_block
from phalanx.ops.dense.grads import GradientQueue, PendingGradients, account, add_grad
from phalanx.sequence.batch import Batch
from tests.harness import parity
from tests.nn.test_fp8 import low_run


def blocks_of(state: State) -> list:
    return [block for segment in state.model.blocks.values() for block in segment]


def forward(state: State, batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Input and output of each block, autograd cut at their borders."""
    found, x = [], torch.empty(0)
    for block in blocks_of(state):
        x = x.detach().requires_grad_()
        y = run_block(block, x, batch)
        found.append((x, y))
        x = y
    return found


def backward(state: State, borders: list, split: bool) -> PendingGradients | None:
    queue, dy = blocks_of(state)[0].env.weights.gradients, torch.ones_like(borders[-1][1])
    if not split:
        for x, y in reversed(borders):
            torch.autograd.backward(y, dy)
            dy = x.grad
        return None
    with queue.open() as pending:
        for x, y in reversed(borders):
            torch.autograd.backward(y, dy)
            dy = x.grad
    return pending


def gradients(state: State, batches: list[Batch], split: bool) -> dict[str, torch.Tensor]:
    """Summed over micro-batches. Split: the W of each comes after the I of the next."""
    state.buffers.zero_grads()
    waiting: list[PendingGradients] = []
    for batch in batches:
        before = [flat.grad.clone() for flat in state.buffers.flat]
        made = backward(state, forward(state, batch), split)
        if made is not None:
            assert all(torch.equal(a, flat.grad) for a, flat in zip(before, state.buffers.flat)), "added at once"
            waiting.append(made)
        if len(waiting) > 1:
            waiting.pop(0).run()
    for made in waiting:
        made.run()
    return {p.spec.name: p.grad.clone() for block in blocks_of(state) for p in block.parameters() if p.grad is not None}


def differing(rank: int, world: int, run: Run) -> list[str]:
    plan = make_plan(run, world)
    state = build(plan, Mesh(plan.grid, rank))
    parity.random_weights(state.model)
    state.buffers.publish()
    state.buffers.ready()
    state.model.train()
    if state.model.fp8 is not None:
        state.model.fp8.begin()
        for flat in state.buffers.flat:
            flat.storage.ready()
            state.model.fp8.refresh(flat.bucket.id)
    batches = parity.step_batches(run, state.mesh, 0, False)[:2]
    at_once = gradients(state, batches, split=False)
    later = gradients(state, batches, split=True)
    assert at_once.keys() == later.keys() and any(g.any() for g in at_once.values())
    return [name for name, grad in at_once.items() if not torch.equal(grad, later[name])]


def run_of(model: str, precision: str = "bf16", **layout) -> Run:
    return replace(parity.base_run(model, 4, precision=precision), layout=LayoutConfig(sharding=0, **layout))


def recomputing(what: str) -> Run:
    run = run_of("llama")
    return replace(run, train=replace(run.train, recompute=what))


CASES = {
    "llama": (run_of("llama"), 1),
    "recomputed": (recomputing("full"), 1),
    "recomputed by pieces": (recomputing("long"), 1),
    "gpt2": (run_of("gpt2", "fp32"), 1),
    "mixtral": (run_of("mixtral", "fp32"), 1),
    "gpt_oss": (run_of("gpt_oss"), 1),
    "deepseek_v3": (run_of("deepseek_v3", "fp32"), 1),
    "fp8": (
        replace(low_run("tensorwise", train=dict(precision="bf16", global_batch=4)), layout=LayoutConfig(sharding=0)),
        1,
    ),
    "tp2": (run_of("llama", tp=2), 2),
    "ep2": (run_of("mixtral", ep=2, tp=2), 2),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_that_wait_have_the_same_bits(ranks, case):
    run, world = CASES[case]
    for wrong in ranks.run("tests.nn.test_split_backward:differing", world, run):
        assert not wrong


def test_a_queue_is_closed_again_when_backward_fails():
    queue = GradientQueue()
    with pytest.raises(ZeroDivisionError):
        with queue.open():
            raise ZeroDivisionError
    assert queue.pending is None
    with queue.open():
        with pytest.raises(RuntimeError, match="open already"):
            with queue.open():
                pass


def test_work_is_done_once_and_in_order():
    pending, done = PendingGradients(), list[int]()
    for number in range(3):
        pending.append(lambda number=number: done.append(number))
    pending.run()
    pending.run()
    assert done == [0, 1, 2]


def test_tensors_without_a_queue_are_added_to_at_once():
    """A user's own parameters, and activations."""
    p = torch.nn.Parameter(torch.zeros(3))
    assert torch.equal(account(p, lambda buffer: buffer.add_(1.0)), torch.ones(3))
    p.grad = torch.zeros(3)
    assert add_grad(p, torch.ones(3)) is None and torch.equal(p.grad, torch.ones(3))

"""An encoder-decoder in a pipeline does what the plan says: what stages send, in which order, and the memory that a
step takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.comm.axis import Axis
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.data.config import DataConfig
from phalanx.engine.build import build
from phalanx.engine.step import train_step
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import message_bytes, rank_uses
from phalanx.layout.config import LayoutConfig
from phalanx.nn.dry_run import Allocations
from phalanx.nn.offload import Mover
from phalanx.planning.plan import Plan
from phalanx.schedule.actions import Send
from phalanx.sequence.streams import HIDDEN
from phalanx.verifying.compare import random_weights
from tests.harness.parity import ENCODER_SEQ, MODELS, SEQ, base_run, step_batches

FP32 = 4
PACKED = DataConfig(mock=True, packing="online")


def run_of(layout: dict[str, object], **train: object) -> Run:
    run = base_run("t5", **{"precision": "fp32", **train})
    return replace(run, layout=LayoutConfig(**layout), data=PACKED)


def sent_in_a_step(rank: int, world: int, run: Run) -> tuple[list[str], list[int]]:
    """The instructions that a rank carries out in one step, and the bytes of each message to another stage."""
    plan = make_plan(run, world)
    mesh, sizes, order = Mesh(plan.grid, rank), list[int](), list[str]()
    state, real = build(plan, mesh), Axis.send
    random_weights(state.model)

    def send(axis: Axis, x: torch.Tensor, to: int):
        sizes.append(x.nbytes)
        return real(axis, x, to)

    handlers = {
        kind: (lambda i, handle=handle: (order.append(repr(i)), handle(i)))
        for kind, handle in state.model.handlers.items()
    }
    state.model.handlers, Axis.send = handlers, send
    try:
        train_step(state, step_batches(run, mesh, 0, "packed"), 1e-3)
    finally:
        Axis.send = real
    return order, sizes


@pytest.mark.parametrize(
    ("world", "layout"),
    [(2, {"pp": 2, "virtual_stages": 2}), (3, {"pp": 3}), (4, {"pp": 4, "virtual_stages": 2}), (4, {"tp": 2, "pp": 2})],
    ids=str,
)
def test_order_and_bytes_are_those_of_the_plan(ranks, world, layout):
    """The plan's program is what runs; the encoder's stages send one stream, the decoder's two."""
    run = run_of(layout)
    plan = make_plan(run, world)
    messages = message_bytes(plan)
    program = plan.proved_program(plan.num_micro_batches(8))
    width = MODELS["t5"].hidden_size * FP32 // plan.grid.tp
    encoder, decoder = ENCODER_SEQ * width, SEQ * width
    found = ranks.run("tests.models.test_t5_pipeline:sent_in_a_step", world, run)
    for rank, (order, sizes) in enumerate(found):
        pp = rank // plan.grid.tp
        assert order == [repr(i) for i in program.lists[pp]]
        sends = [i for i in program.lists[pp] if isinstance(i, Send)]
        assert sum(sizes) == sum(messages[i.value._replace(mb=0)] for i in sends)
        last = [plan.borders[i.value.stage + (i.kind == "grad"), 0][-1].name for i in sends]
        streams = [[encoder] if name == HIDDEN and block(plan, i) <= 3 else [decoder] for name, i in zip(last, sends)]
        both = [[decoder, encoder] if name == "memory" else one for name, one in zip(last, streams)]
        assert sizes == [nbytes for message in both for nbytes in message]


def block(plan: Plan, i: Send) -> int:
    """The number of the block that reads a message forward; blocks up to 3 take the encoder's hidden states."""
    return plan.stages[i.value.stage + (i.kind == "grad")].start


class Elsewhere(Mover):
    """The host's memory is none of torch's, so that what torch counts is the device's."""

    def to_host(self, xs):
        return [x.numpy().copy() for x in xs]

    def to_device(self, hosts):
        return [torch.from_numpy(host).clone() for host in hosts], None


def device_bytes(rank: int, world: int, run: Run) -> int:
    """Most bytes of tensors at once in a step, but for what was there before."""
    from phalanx.engine.step import accumulate

    plan = make_plan(run, world)
    state = build(plan, mesh := Mesh(plan.grid, rank))
    random_weights(state.model)
    state.model.train()
    state.model.stages._mover = Elsewhere(torch.device("cpu"))
    batches = step_batches(run, mesh, 0, "packed")
    with Allocations() as seen:
        accumulate(state, batches)
    return seen.peak


@pytest.mark.parametrize(
    ("world", "layout", "train"),
    [
        (1, {}, {}),
        (1, {}, {"recompute": "full"}),
        (2, {"pp": 2, "schedule": "gpipe"}, {}),
    ],
    ids=str,
)
def test_memory_is_that_of_the_plan(ranks, world, layout, train):
    """Truth: the most bytes that each rank ever has in a step, beside weights and gradients. Between stages messages
    come on top."""
    model = replace(MODELS["t5"], hidden_size=128, intermediate_size=512, head_dim=32)
    run = run_of({"bucket_mb": 100, **layout}, global_batch=8, micro_batch=4, device="cpu", **train)
    run = replace(run, model=model)
    uses, _ = rank_uses(make_plan(run, world), 2)
    found = ranks.run("tests.models.test_t5_pipeline:device_bytes", world, run)
    for use, most in zip(uses, found, strict=True):
        expected = use.memory["activations"] + use.memory["working"]
        assert 0.95 * expected <= most <= 1.05 * expected + (use.memory["messages"] if world > 1 else 0)

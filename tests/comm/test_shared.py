"""What ranks of one host cut among them, exchanged through shared memory, against the collectives it stands for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.comm.axis import Axis
from phalanx.comm.mesh import Mesh
from phalanx.comm.overlap import SETS, PulledMemory, SharedExchange, SummedMemory, piece_bytes, sums_bytes
from phalanx.config.run import Fp8Config
from phalanx.engine.build import build, choices
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.layout.grid import Grid
from phalanx.layout.shards import Sharding
from tests.comm.test_symmetric import nothing_left
from tests.harness.parity import base_run
from tests.ops.test_ops import normal
from tests.optim.test_precision import SCALE, precision_run

ROUNDS = 6


def pulling(rank: int, world: int, within: bool) -> list[str]:
    """Rounds of changing two parts on each rank and pulling them several times; what was wrong. within: a part lies
    in the whole."""
    axis = Mesh(Grid(dp=world), rank).dp
    sizes, wrong = (5, 64), []
    memory = PulledMemory(axis, sum(n * 8 * (world if within else 1) + 64 for n in sizes), torch.device("cpu"))
    axis.shared = SharedExchange(axis, 0, 0, torch.device("cpu"))
    axis.shared.parts = memory
    wholes = [
        memory.place(n * world, torch.float64) if within else torch.empty(n * world, dtype=torch.float64) for n in sizes
    ]
    parts = [w[rank * n : (rank + 1) * n] if within else memory.place(n, torch.float64) for w, n in zip(wholes, sizes)]
    for number in range(ROUNDS):
        memory.open()
        for i, part in enumerate(parts):
            part.copy_(normal(len(part), seed=100 * number + 10 * i + rank))
        for recomputed in range(2):
            for i, (whole, part) in enumerate(zip(wholes, parts)):
                if not within:
                    whole.fill_(torch.nan)
                work = axis.all_gather_into(whole) if within else axis.all_gather_to(whole, part)
                truth = torch.cat([normal(sizes[i], seed=100 * number + 10 * i + r) for r in range(world)])
                wrong += [] if torch.equal(work.wait(), truth) else [f"part {i} in round {number}, time {recomputed}"]
    axis.barrier()
    return wrong


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_what_is_pulled_is_what_was_written(ranks, world, within):
    """Truth: the parts of all ranks, recomputed here. Every round has other numbers, so memory read too early or
    changed too early shows."""
    assert ranks.run("tests.comm.test_shared:pulling", world, within) == [[]] * world


def summing(rank: int, world: int, n: int, piece: int) -> list[str]:
    """Rounds of sums in place and onto others, in pieces of `piece` elements; what was wrong."""
    wrong: list[str] = []
    with nothing_left(wrong):
        summing_rounds(rank, world, n, piece, wrong)
    return wrong


def summing_rounds(rank: int, world: int, n: int, piece: int, wrong: list[str]) -> None:
    axis = Mesh(Grid(dp=world), rank).dp
    axis.shared = SharedExchange(axis, 0, 0, torch.device("cpu"))
    axis.shared.sums = SummedMemory(axis, piece * 8, torch.device("cpu"))
    for number in range(ROUNDS):
        x, kept = normal(world * n, seed=100 * number + rank), normal(n, seed=number)
        rows = [normal(world * n, seed=100 * number + r)[rank * n : (rank + 1) * n] for r in range(world)]
        truth = rows[0] + rows[1]
        for row in rows[2:]:
            truth = truth + row
        onto = number % 2 == 1
        found = axis.reduce_scatter_within(x, async_op=True, onto=kept if onto else None).wait()
        wrong += [] if found is (kept if onto else found) else ["not onto"]
        wrong += (
            [] if torch.equal(found, normal(n, seed=number) + truth if onto else truth) else [f"sum in round {number}"]
        )
    axis.barrier()


@pytest.mark.parametrize("world, n, piece", [(2, 1, 8), (3, 50, 16), (4, 33, 64)])
def test_sums_in_pieces(ranks, world, n, piece):
    """To the bit, added in rank order; 50 elements in pieces of 16 go through both sets, the last piece is shorter."""
    assert ranks.run("tests.comm.test_shared:summing", world, n, piece) == [[]] * world


def test_room_for_sums():
    assert piece_bytes(2, 1000) == 1024 and sums_bytes(2, 1000) == 2048  # as large as the largest part
    assert sums_bytes(8, 2**40) == pytest.approx(SETS, rel=1e-6) and sums_bytes(2, 2**40) == SETS


def test_more_parts_than_room_are_refused():
    axis = Axis("alone")
    memory = PulledMemory(axis, 128, torch.device("cpu"))
    memory.place(16, torch.float32)
    memory.place(8, torch.float64)
    with pytest.raises(ValueError, match="no room"):
        memory.place(1, torch.uint8)


def no_room(rank: int, world: int, mode: str) -> str:
    mesh = Mesh(Grid(dp=world), rank)
    mesh.prepare_sharding(Sharding(3))
    return mesh.share("dp", mode, 2**47, 64)


def test_no_room_is_said_on_every_rank(ranks):
    for text in ranks.run("tests.comm.test_shared:no_room", 2, "on"):
        assert text.startswith("off: no room for")
    assert ranks.run("tests.comm.test_shared:no_room", 2, "auto") == ["off"] * 2  # on CPUs only where it is asked for


def said(rank: int, world: int, mode: str) -> str:
    run = base_run("llama")
    plan = make_plan(replace(run, layout=LayoutConfig(dp_overlap=mode)), world)
    return choices(build(plan, Mesh(plan.grid, rank)))


def test_choices_are_said(ranks):
    for mode, word in (("on", "on"), ("auto", "off")):
        for text in ranks.run("tests.comm.test_shared:said", 2, mode):
            assert f"what is sharded over dp exchanged by copies {word}" in text


LAYOUTS = [
    dict(sharding=1),
    dict(sharding=2),
    dict(sharding=3),
    pytest.param(dict(sharding=3, prefetch=3), marks=pytest.mark.soak),
    dict(sharding=3, reshard_after_forward=False),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_overlap_changes_no_bit(ranks, layout):
    """Two ranks, whose sums have one order. In bf16, fp32 weights that are their own masters, and codes of weights."""
    for precision, options in (
        ("bf16", SCALE),
        ("fp32", SCALE),
        ("bf16", {**SCALE, "fp8": Fp8Config(recipe="tensorwise")}),
    ):
        found = [
            ranks.run(
                "tests.optim.test_precision:train",
                2,
                precision_run("llama", precision, 6, train=options, dp_overlap=mode, **layout),
                3,
            )
            for mode in ("on", "off")
        ]
        assert found[0] == found[1], (precision, options)

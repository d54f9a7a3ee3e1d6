"""Exchanges through shared memory, in parts, against the collectives they stand for; what a run says it chose."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from phalanx.comm import symmetric
from phalanx.comm.mesh import Mesh
from phalanx.comm.symmetric import PulledParts, PushedParts
from phalanx.engine.build import build, choices
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.layout.grid import Grid
from tests.harness.parity import base_run
from tests.ops.test_ops import normal

ROUNDS, WIDTH = 9, 3


@contextmanager
def nothing_left(wrong: list[str]) -> Iterator[None]:
    """Shared memory inside lies in a folder of this rank's own (other tests run beside this one); what is still
    there goes to `wrong`."""
    with tempfile.TemporaryDirectory(dir=symmetric.FOLDER) as folder, patch.object(symmetric, "FOLDER", folder):
        yield
        wrong += [f"left behind: {name}" for name in os.listdir(folder)]


def exchange(rank: int, world: int, rows: int, order: str) -> list[str]:
    """Rounds of gathering ("g"), scattering ("s"), both open at once ("b") and two gatherings ("d"); what was wrong."""
    wrong: list[str] = []
    with nothing_left(wrong):
        exchange_rounds(rank, world, rows, order, wrong)
    return wrong


def exchange_rounds(rank: int, world: int, rows: int, order: str, wrong: list[str]) -> None:
    mesh = Mesh(Grid(tp=world), rank)
    tp = mesh.tp
    assert mesh.overlap(tp, "on", world * rows * WIDTH * 8) == "on" and tp.memory is not None
    for number in range(ROUNDS):
        kind = order[number % len(order)]
        mine = normal(rows, WIDTH, seed=100 * number + rank)
        product = normal(world * rows, WIDTH, seed=1000 + 100 * number + rank)
        everyone = torch.cat([normal(rows, WIDTH, seed=100 * number + r) for r in range(world)])
        summed = sum(normal(world * rows, WIDTH, seed=1000 + 100 * number + r) for r in range(world))[
            rank * rows : (rank + 1) * rows
        ]
        gathering = tp.gather(mine) if kind in "gbd" else None
        recomputed = tp.gather(-mine) if kind == "d" else None
        scattering = tp.scatter(world * rows, WIDTH, product) if kind in "sb" else None
        assert isinstance(gathering, PulledParts | None) and isinstance(scattering, PushedParts | None)
        if scattering:
            for part, out in scattering.parts():
                out.copy_(product[part])
        if gathering:
            seen = torch.full_like(everyone, torch.nan)
            for part, values in gathering.parts():
                seen[part] = values
            wrong += [f"parts in round {number}"] if not torch.equal(seen, everyone) else []
            wrong += [f"whole in round {number}"] if not torch.equal(gathering.wait(), everyone) else []
        if recomputed and not torch.equal(recomputed.wait(), -everyone):
            wrong.append(f"second whole in round {number}")
        if scattering and not torch.allclose(scattering.wait(), summed, rtol=1e-14, atol=1e-14):
            wrong.append(f"sum in round {number}")
    tp.barrier()


@pytest.mark.parametrize("order", ["g", "s", "gs", "b", "ggs", "bsg", "dgs"])
@pytest.mark.parametrize("world, rows", [(2, 1), (3, 5), (4, 2)])
def test_exchanges_equal_their_collectives(ranks, world, rows, order):
    """Truth: the tensors of all ranks, recomputed here. Every round has other numbers, so memory used too early or
    late shows."""
    assert ranks.run("tests.comm.test_symmetric:exchange", world, rows, order) == [[]] * world


def too_large(rank: int, world: int) -> bool:
    mesh = Mesh(Grid(tp=world), rank)
    mesh.overlap(mesh.tp, "on", 64)
    x = normal(64, 2, seed=rank)
    whole = mesh.tp.gather(x)
    return not isinstance(whole, PulledParts) and torch.equal(whole.wait()[64 * rank : 64 * rank + 64], x)


def test_what_has_no_room_is_gathered_plainly(ranks):
    assert all(ranks.run("tests.comm.test_symmetric:too_large", 2))


def no_room(rank: int, world: int) -> str:
    mesh = Mesh(Grid(tp=world), rank)
    said = mesh.overlap(mesh.tp, "on", 2**45)  # 128 TiB and more: no machine has that
    assert mesh.tp.memory is None
    return said


def test_no_room_is_said_on_every_rank(ranks):
    for text in ranks.run("tests.comm.test_symmetric:no_room", 2):
        assert text.startswith("off: no room for")


def test_choices_are_said():
    run = base_run("llama")
    state = build(make_plan(run, 1), Mesh(Grid()))
    assert choices(state) == "kernels plain; CUDA graphs off (not a GPU)"
    off = replace(run, layout=LayoutConfig(tp_overlap="off"), train=replace(run.train, cuda_graphs="off"))
    assert choices(build(make_plan(off, 1), Mesh(Grid()))) == "kernels plain; CUDA graphs off"

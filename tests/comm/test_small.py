"""Exchanges of a few tokens, each one kernel, against the tensors of all ranks; kernels run in Triton's interpreter, on
memory that the processes map."""

from __future__ import annotations

import pytest
import torch

from phalanx.comm.mesh import Mesh
from phalanx.comm.small import CHANNEL, CHANNELS, Exchanged, SmallExchanges, ToSum
from phalanx.layout.grid import Grid
from tests.comm.test_symmetric import nothing_left
from tests.ops.test_ops import normal

pytest.importorskip("triton")
DTYPES = (torch.float64, torch.float32, torch.float16)  # the interpreter rounds bf16 its own way


def exchange(rank: int, world: int, rounds: int) -> list[str]:
    """Gathers and sums in turn, of other sizes and dtypes in every round; what was wrong."""
    wrong: list[str] = []
    with nothing_left(wrong):
        tp = Mesh(Grid(tp=world), rank).tp
        tp.memory = SmallExchanges(tp, torch.device("cpu"))
        for number in range(rounds):
            wrong += one_round(tp, number)
        tp.barrier()
    return wrong


def one_round(tp, number: int) -> list[str]:
    dtype, rows, width = DTYPES[number % 3], 1 + number % 2, (6, 700, 1030)[number // 2 % 3]
    mine = [normal(rows, width, seed=100 * number + r).to(dtype) for r in range(tp.size)]
    products = [normal(tp.size * rows, width, seed=9000 + 100 * number + r).to(dtype) for r in range(tp.size)]
    found = []
    gathering = tp.gather(mine[tp.index])
    assert isinstance(gathering, Exchanged)
    if not torch.equal(gathering.wait(), torch.cat(mine)):
        found.append(f"whole in round {number}")
    scattering = tp.scatter(tp.size * rows, width, mine[0])
    assert isinstance(scattering, ToSum)
    for part, out in scattering.parts():
        out.copy_(products[tp.index][part])
    total = torch.zeros(rows, width, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    for product in products:  # in rank order
        total += product[tp.index * rows : (tp.index + 1) * rows].to(total.dtype)
    if not torch.equal(scattering.wait(), total.to(dtype)):
        found.append(f"sum in round {number}")
    return found


@pytest.mark.parametrize("world, rounds", [(2, 9), (3, 6)])
def test_small_exchanges_equal_the_tensors_of_all_ranks(ranks, world, rounds):
    """To the bit. Every round has other numbers, so what is read too early or late shows."""
    assert ranks.run("tests.comm.test_small:exchange", world, rounds) == [[]] * world


def test_what_is_larger_stays_a_collective():
    most = CHANNEL * CHANNELS
    small = SmallExchanges.__new__(SmallExchanges)
    small.size = 4
    assert small.fits(4 * most) and not small.fits(4 * most + 16)
    assert not small.fits(4 * most - 8)  # no whole words of a rank


def outcome(rank: int, world: int) -> tuple[str, bool]:
    mesh = Mesh(Grid(tp=world), rank)
    return mesh.small_exchanges(mesh.tp), mesh.tp.memory is None


def test_cpus_keep_collectives(ranks):
    assert ranks.run("tests.comm.test_small:outcome", 2) == [("off", True)] * 2

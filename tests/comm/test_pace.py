"""Which rank the others wait for: by hand, and on ranks of which one works longer."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from phalanx.comm.health import waits
from phalanx.comm.health.pace import Pace, slow_ranks
from phalanx.comm.mesh import Mesh
from phalanx.layout.grid import Grid


def paces(*work_ms: float, stages: tuple[int, ...] | None = None, step_ms: float = 100.0) -> list[Pace]:
    return [
        Pace(r, stages[r] if stages else 0, w / 1e3, step_ms / 1e3, "nn/mlp.py:1 in forward")
        for r, w in enumerate(work_ms)
    ]


def test_who_works_longer_than_the_others_of_its_stage():
    assert slow_ranks(paces(40, 41, 90, 42)).keys() == {2} and slow_ranks(paces(40, 90)).keys() == {1}
    (slow,) = slow_ranks(paces(40, 41, 90, 42)).values()
    assert round(slow.ratio, 2) == round(90 / 41, 2) and str(slow).startswith(
        "works 90 ms of a step of 100 ms, the others 41 ms: they wait for it"
    )
    assert slow_ranks(paces(40, 50, 45, 42)) == {}, "under 1.3 times"
    assert slow_ranks(paces(4, 8, 4, 4)) == {}, "under a tenth of the step"
    assert slow_ranks(paces(1, 4, 1, step_ms=5)) == {}, "under 5 ms"
    assert slow_ranks(paces(80)) == {} and slow_ranks([]) == {}


def test_stages_may_differ():
    assert slow_ranks(paces(40, 41, 70, 71, stages=(0, 0, 1, 1))) == {}
    assert slow_ranks(paces(40, 41, 70, 95, stages=(0, 0, 1, 1))).keys() == {3}
    assert slow_ranks(paces(40, 70, stages=(0, 1))) == {} and slow_ranks(paces(40, 90, stages=(0, 1))).keys() == {1}


def work_and_wait(rank: int, world: int, folder: Path) -> float:
    """Seconds that this rank waited while rank 1 came late to two collectives, one of them begun early and waited
    for later. The clock of both stands still, but for the second that rank 1 works each time, once rank 0 is on its
    way to wait."""
    mesh, looks = Mesh(Grid(dp=world), rank), itertools.count()
    mesh.world.barrier()
    mesh.watch.waits.on = True

    def clock() -> float:
        now = len(list(folder.glob("second *")))
        (folder / f"look {next(looks)} of rank {rank}").touch()
        return float(now)

    with mock.patch.object(waits, "time", SimpleNamespace(perf_counter=clock)):
        for begin_early, look in (
            (False, 0),
            (True, 4),
        ):  # an early one is looked at around its beginning and around its end
            while rank == 1 and not (folder / f"look {look} of rank 0").exists():
                time.sleep(0.001)
            if rank == 1:
                (folder / f"second {look}").touch()
            mesh.world.all_reduce(torch.ones(4), async_op=begin_early).wait()
    return mesh.watch.waits.take().seconds()


def test_waiting_is_no_work(ranks, tmp_path):
    assert ranks.run("tests.comm.test_pace:work_and_wait", 2, tmp_path) == [2.0, 0.0]

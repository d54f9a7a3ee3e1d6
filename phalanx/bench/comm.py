"""`bench comm`: what the links between ranks carry, measured through the same axes and edges that training uses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from phalanx.base.placement import Placement
from phalanx.base.text_table import table
from phalanx.bench.timing import BATCH_S, Times, calls_in, measure
from phalanx.comm.axis import Axis
from phalanx.comm.mesh import Mesh, init_world, leave_world, local_device
from phalanx.layout.grid import Grid

TIMEOUT_S = 120.0
FAST = 500e9  # bytes/s that no link exceeds by much: from it all ranks know how many calls fill a measurement
# times (n - 1) / n: the share of the buffer on the busiest link
FACTORS = {
    "all_reduce": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
}


def bench_comm(placement: Placement, device: str, sizes: list[float], repeats: int, out: str | None) -> None:
    """One rank of the benchmark. sizes: MiB of the whole (gathered, or not yet scattered) buffer. Rank 0 prints and
    writes `out`."""
    here = local_device(device, placement.local_rank)
    init_world(placement.rank, placement.world_size, placement.init_method, here, TIMEOUT_S, placement.secret)
    mesh = Mesh(Grid(pp=placement.world_size), placement.rank, here, TIMEOUT_S)
    mesh.warm_up()
    rows = [row for mib in sizes for row in measure_size(mesh, round(mib * 2**20), repeats)]
    if placement.rank == 0:
        name = torch.cuda.get_device_name(here) if device == "cuda" else "CPU, gloo"
        print(
            f"{placement.world_size} x {name}, torch {torch.__version__}; bf16; medians of {repeats}, the "
            "slowest rank of each"
        )
        print(comm_table(rows), flush=True)
        if out:
            Path(out).write_text(
                json.dumps({"device": name, "ranks": placement.world_size, "rows": rows}, indent=1), encoding="utf-8"
            )
    mesh.close()
    leave_world()


def measure_size(mesh: Mesh, nbytes: int, repeats: int) -> list[dict[str, Any]]:
    """Rows of one size: collectives over the world, then rank 0 to rank 1 while the others wait."""
    n = mesh.world.size
    numel = max(n, nbytes // 2 // n * n)
    whole = torch.zeros(numel, dtype=torch.bfloat16, device=mesh.device)
    part = whole[: numel // n].clone()
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: mesh.world.all_reduce(whole).wait(),
        "all_gather": lambda: mesh.world.all_gather(part).wait(),
        "reduce_scatter": lambda: mesh.world.reduce_scatter(whole).wait(),
    }
    batch = calls_in(BATCH_S, nbytes / FAST)
    rows = []
    for op, call in calls.items():
        mesh.world.barrier()
        rows.append(
            _row(
                op,
                whole,
                slowest(mesh.world, measure(call, mesh.device, repeats=repeats, batch=batch)),
                FACTORS[op] * (n - 1) / n,
            )
        )
    mesh.world.barrier()
    times = (
        measure(lambda: _send(mesh, whole), mesh.device, repeats=repeats, batch=batch)
        if mesh.rank < 2
        else Times(0.0, 0.0, 0.0, repeats)
    )
    return [*rows, _row("send/recv", whole, slowest(mesh.world, times), 1.0)]


def _send(mesh: Mesh, x: torch.Tensor) -> None:
    edge = mesh.edge(0, 1)
    (edge.send(x, to=1) if edge.index == 0 else edge.recv(x, source=0)).wait()


def slowest(world: Axis, times: Times) -> Times:
    """Of each figure the largest of all ranks."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")
    gathered = torch.tensor([times.median, times.low, times.high], dtype=torch.float64, device=device)
    middle, low, high = world.all_reduce(gathered, "max").wait().tolist()
    return Times(middle, low, high, times.repeats)


def _row(op: str, whole: torch.Tensor, times: Times, factor: float) -> dict[str, Any]:
    nbytes = whole.numel() * whole.element_size()
    return {"op": op, "bytes": nbytes, **times.as_dict(), "bus_bytes_per_s": factor * nbytes / times.median}


def comm_table(rows: list[dict[str, Any]]) -> str:
    lines = [("op", "MiB", "ms", "min-max", "bus GB/s")]
    for r in rows:
        spread = f"{1e3 * r['low']:.3f}-{1e3 * r['high']:.3f}"
        lines.append(
            (
                r["op"],
                f"{r['bytes'] / 2**20:g}",
                f"{1e3 * r['median']:.3f}",
                spread,
                f"{r['bus_bytes_per_s'] / 1e9:.2f}",
            )
        )
    return table(lines, left=(0,))

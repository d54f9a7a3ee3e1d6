"""Exchanges of a few tokens over tensor-parallel ranks of one host: NCCL's beside our kernels (comm/small.py), each
replayed from a CUDA graph, as steps of generation are. Checks both against the sum and the whole first.

torchrun --nproc-per-node 2 benchmarks/small_exchanges.py [--width 4096]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.comm.mesh import Mesh, init_world, leave_world, local_device
from phalanx.launch.env import read_placement
from phalanx.layout.grid import Grid

TOKENS = (1, 4, 16, 64, 256)  # of the step: rows that a rank gives are a rank's share
CALLS = 32  # in one graph


def gathered(tp: Axis, x: Tensor) -> Tensor:
    return tp.gather(x).wait()


def summed(tp: Axis, product: Tensor) -> Tensor:
    scattering = tp.scatter(len(product), product.shape[1], product)
    for rows, out in scattering.parts():
        out.copy_(product[rows])
    return scattering.wait()


def microseconds(call: Callable[[], Tensor], tp: Axis) -> float:
    """Of one call in a graph of CALLS; the slowest rank's median."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(12):
        tp.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / CALLS)
    slowest = torch.tensor([median(times[2:])], device="cuda")
    return tp.all_reduce(slowest, op="max").wait().item()


def check(mesh: Mesh, width: int) -> list[str]:
    """What is wrong with 200 rounds of exchanges of random sizes."""
    tp, dice, wrong = mesh.tp, torch.Generator().manual_seed(0), list[str]()
    for number in range(200):
        rows = int(torch.randint(1, 130, (), generator=dice))
        everyone = torch.randn(tp.size, tp.size * rows, width, generator=dice).bfloat16().cuda()
        mine = everyone[tp.index, :rows].contiguous()
        if not torch.equal(gathered(tp, mine), everyone[:, :rows].reshape(-1, width)):
            wrong.append(f"whole in round {number}, {rows} rows")
        total = torch.zeros(rows, width, device="cuda")
        for product in everyone:
            total += product[tp.index * rows : (tp.index + 1) * rows].float()
        if not torch.equal(summed(tp, everyone[tp.index].contiguous()), total.bfloat16()):
            wrong.append(f"sum in round {number}, {rows} rows")
    return wrong


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--width", type=int, default=4096)
    asked = reader.parse_args()
    placement, problems = read_placement(os.environ)
    if placement is None or placement.world_size < 2:
        raise SystemExit(f"start it with torchrun on two GPUs or more {'; '.join(map(str, problems))}")
    device = local_device("cuda", placement.local_rank)
    init_world(placement.rank, placement.world_size, placement.init_method, device, 120.0)
    mesh = Mesh(Grid(tp=placement.world_size), placement.rank, device)
    mesh.warm_up()
    tp, found = mesh.tp, dict[tuple[int, str, str], float]()
    for by in ("NCCL", "ours"):
        if by == "ours":
            said = mesh.small_exchanges(tp)
            if said != "on":
                raise SystemExit(said)
            wrong = check(mesh, asked.width)
            print(f"rank {tp.index}: {wrong[:3] or '200 rounds of exchanges equal'}", flush=True)
        for tokens in TOKENS:
            rows = max(1, tokens // tp.size)
            x = torch.randn(rows, asked.width, device=device, dtype=torch.bfloat16)
            product = x.repeat(tp.size, 1)
            found[tokens, by, "gather"] = microseconds(lambda x=x: gathered(tp, x), tp)  # type: ignore[misc]
            found[tokens, by, "scatter"] = microseconds(lambda p=product: summed(tp, p), tp)  # type: ignore[misc]
    if tp.index == 0:
        print("tokens   gather us: NCCL   ours     copy, sum us: NCCL   ours")
        for t in TOKENS:
            row = [found[t, by, what] for what in ("gather", "scatter") for by in ("NCCL", "ours")]
            print(
                f"{t:6}            {row[0]:7.1f} {row[1]:6.1f}                 {row[2]:7.1f} {row[3]:6.1f}", flush=True
            )
    leave_world()


if __name__ == "__main__":
    main()

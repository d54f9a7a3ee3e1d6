"""Weights gathered and gradients summed by copies through shared memory, against the same by collectives, alone and
beside matmuls.

`torchrun --nproc-per-node 4 benchmarks/copies.py`: first that both give what they must, to the bit, over rounds of
other numbers while matmuls run; then a table of times. `--device cpu --params 1e5 --tokens 64` finds mistakes in the
script itself.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.base.text_table import table
from phalanx.bench.comm import slowest
from phalanx.bench.timing import measure
from phalanx.comm.mesh import Groups, Mesh, init_world, leave_world, local_device
from phalanx.launch.env import read_placement
from phalanx.layout.grid import Grid
from phalanx.layout.shards import Sharding


class Exchange:
    """A bucket of `params` parameters of one rank: bf16 weights cut over all ranks, fp32 gradients."""

    def __init__(self, mesh: Mesh, params: int):
        n, self.mesh = mesh.dp.size, mesh
        part = -(-params // (64 * n)) * 64
        shared = mesh.groups("dp").inner.shared
        self.own = torch.zeros(part, dtype=torch.bfloat16, device=mesh.device)
        if shared is not None and shared.parts is not None:
            self.own = shared.parts.place(part, torch.bfloat16)
        self.whole = torch.zeros(n * part, dtype=torch.bfloat16, device=mesh.device)
        self.grad = torch.zeros(n * part, device=mesh.device)
        self.kept = torch.zeros(part, device=mesh.device)

    @property
    def groups(self) -> Groups:
        return self.mesh.groups("dp")

    def gather(self) -> Any:
        return self.groups.gather.all_gather_to(self.whole, self.own, async_op=True)

    def reduce(self) -> Any:
        return self.groups.inner.reduce_scatter_within(self.grad, async_op=True, onto=self.kept)


def mesh_of(mesh: Mesh, params: int, mode: str) -> Mesh:
    mesh.prepare_sharding(Sharding(3))
    n = mesh.dp.size
    part = -(-params // (64 * n)) * 64
    mesh.share("dp", mode, 2 * part + 64, 4 * part)
    return mesh


def matmuls(device: torch.device, tokens: int, count: int) -> Callable[[], None]:
    x, w = (torch.randn(*shape, device=device).bfloat16() for shape in ((tokens, 4096), (4096, 14336)))
    y = torch.empty(tokens, 14336, dtype=torch.bfloat16, device=device)

    def run() -> None:
        for _ in range(count):
            torch.mm(x, w, out=y)

    return run


def wrong(exchange: Exchange, beside: Callable[[], None], rounds: int) -> list[str]:
    """Rounds of changing weights and gradients, gathering twice and summing once, while matmuls run; what was not as
    it must be."""
    mesh, found = exchange.mesh, []
    for number in range(rounds):
        shared = exchange.groups.inner.shared
        if shared is not None:
            shared.open()
        generator = torch.Generator(mesh.device).manual_seed(1000 * number + mesh.rank)
        exchange.own.copy_(torch.randn(len(exchange.own), generator=generator, device=mesh.device))
        exchange.grad.copy_(torch.randn(len(exchange.grad), generator=generator, device=mesh.device))
        exchange.kept.fill_(float(number))
        pieces = mesh.dp.all_to_all(exchange.grad).view(mesh.dp.size, -1)
        total = pieces[0] + pieces[1]
        for piece in pieces[2:]:
            total += piece
        truth = mesh.dp.all_gather(exchange.own).wait()
        exchange.whole.fill_(torch.nan)
        works = [exchange.gather(), exchange.reduce()]
        beside()
        works[0].wait()
        found += [] if torch.equal(exchange.whole, truth) else [f"gathered in round {number}"]
        exchange.whole.fill_(torch.nan)
        work = exchange.gather()
        if works[1].wait() is not exchange.kept:
            exchange.kept.add_(works[1].result)
        total += float(number)
        off = (exchange.kept - total).abs().max().item()
        sums = off == 0 if shared is not None else off < 1e-4  # collectives add in another order
        found += [] if sums else [f"summed in round {number}"]
        found += [] if torch.equal(work.wait(), truth) else [f"gathered again in round {number}"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--params", type=float, default=218e6, help="of a bucket; a layer of the 8B model")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--matmuls", type=int, default=12, help="beside an exchange, about 17 ms on an H200")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    place, problems = read_placement(os.environ)
    if place is None:
        raise SystemExit(f"start it with torchrun on two ranks or more {'; '.join(map(str, problems))}")
    device, params = local_device(options.device, place.local_rank), int(options.params)
    init_world(place.rank, place.world_size, place.init_method, device, 120.0)
    mesh = Mesh(Grid(dp=place.world_size), place.rank, device)
    mesh.warm_up()
    beside = matmuls(device, options.tokens, options.matmuls)
    rows, bad = [("exchange", "by", "alone, ms", "matmuls alone, ms", "together, ms", "lost, ms")], list[str]()

    def timed(call: Callable[[], Any]) -> float:
        mesh.world.barrier()
        return 1e3 * slowest(mesh.world, measure(call, device, warmup=2, repeats=5, batch=4)).median

    for mode in ("off", "on"):
        exchange = Exchange(mesh_of(mesh, params, mode), params)
        bad += [f"{mode}: {text}" for text in wrong(exchange, beside, options.rounds)]
        ways: dict[str, list[Callable[[], Any]]] = {
            "gather": [exchange.gather],
            "sum": [exchange.reduce],
            "both": [exchange.gather, exchange.reduce],
        }
        for name, starts in ways.items():
            alone, compute = timed(lambda: wait([start() for start in starts])), timed(beside)  # noqa: B023 (called at once)
            both = timed(lambda: together(starts, beside))  # noqa: B023
            figures = (f"{x:.2f}" for x in (alone, compute, both, both - compute))
            rows.append((name, {"off": "collectives", "on": "copies"}[mode], *figures))
    said = mesh.world.all_gather_text("; ".join(bad))
    if place.rank == 0:
        print(table(rows, left=(0, 1)))
        print("all as it must be" if not any(said) else f"WRONG, by rank: {said}", flush=True)
    mesh.close()
    leave_world()


def together(starts: list[Callable[[], Any]], beside: Callable[[], None]) -> None:
    works: list[Any] = [start() for start in starts]
    beside()
    wait(works)


def wait(works: list[Any]) -> list[Tensor]:
    return [work.wait() for work in works]


if __name__ == "__main__":
    main()

"""Mesh: the only creation of process groups; axes are handed to those who communicate, never looked up."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.base.errors import PeerLost
from phalanx.comm.axis import Axis
from phalanx.comm.debug import Watch
from phalanx.layout.grid import Grid
from phalanx.layout.param import Replica


def init_world(rank: int, world_size: int, init_method: str, device: torch.device, timeout_s: float) -> None:
    """Join the world: NCCL for GPUs, gloo for CPUs. A world of one needs none."""
    if world_size == 1 or dist.is_initialized():
        return
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "rank": rank, "world_size": world_size}
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, init_method=init_method, **options)
    except (RuntimeError, dist.DistError) as error:
        raise PeerLost(f"rank {rank} of {world_size} could not join the others at {init_method} within {timeout_s:g} s: {error}") from error


def leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class Mesh:
    """The axes of one rank.

    tp, dp, pp, world   whole axes; `sub` gives the part of an axis that shares a replica, `edge` a directed pair of stages.
    All groups of a rank are made in the same order on all their members, and only by their members.
    """

    def __init__(self, grid: Grid, rank: int = 0, device: torch.device | str = "cpu", timeout_s: float = 600.0):
        self.grid, self.rank, self.device = grid, rank, torch.device(device)
        self.at = grid.coords(rank)
        self.watch = Watch()
        self._timeout = timedelta(seconds=timeout_s)
        self._made: dict[tuple[str, tuple[int, ...]], Axis] = {}
        self.world = self._axis("world", tuple(range(grid.world)))
        self.tp = self._axis("tp", grid.ranks(self.at, ("tp",)))
        self.dp = self._axis("dp", grid.ranks(self.at, ("dp",)))
        self.pp = self._axis("pp", grid.ranks(self.at, ("pp",)))
        self._edges = self._make_edges()

    def _axis(self, name: str, ranks: tuple[int, ...]) -> Axis:
        if (name, ranks) not in self._made:
            group = None
            if len(ranks) > 1:
                group = dist.new_group(list(ranks), timeout=self._timeout, use_local_synchronization=True, group_desc=name)
            self._made[name, ranks] = Axis(name, ranks, ranks.index(self.rank), group, self.watch)
        return self._made[name, ranks]

    def _make_edges(self) -> dict[tuple[int, int], Axis]:
        """Directed edges between neighbouring pipeline ranks (a ring), each with a communicator of its own.

        Every rank walks the ring's edges in one order, so that both ends of each meet without a world-wide call.
        """
        n, edges = self.grid.pp, {}
        for source in range(n if n > 1 else 0):
            for a, b in ((source, (source + 1) % n), ((source + 1) % n, source)):
                if self.at.pp in (a, b) and (a, b) not in edges:
                    ranks = self.grid.members(self.at, "pp", (a, b))
                    edges[a, b] = self._axis(f"edge {a}->{b}", ranks)
        return edges

    def edge(self, source: int, to: int) -> Axis:
        """The communicator from pipeline rank `source` to pipeline rank `to`; source is its number 0."""
        return self._edges[source, to]

    def sub(self, replica: Replica) -> Axis:
        """The ranks that share a replica with this one."""
        return self._axis(f"{replica.axis} part", self.grid.members(self.at, replica.axis, replica.members))

    def prepare(self, replicas: set[Replica]) -> None:
        """Make the sub-axes that a model needs, in one order on all ranks."""
        for replica in sorted(replicas, key=lambda r: (r.axis, r.members)):
            self.sub(replica)

    def warm_up(self) -> None:
        """Open every connection before step 1, so that step 1 shows the peak of memory and no step waits for a handshake."""
        for axis in self._made.values():
            if axis.size > 1:
                axis.all_reduce(torch.zeros(1, device=self.device)).wait()

    def close(self) -> None:
        for axis in self._made.values():
            if axis.group is not None:
                dist.destroy_process_group(axis.group)
        self._made.clear()


def local_device(kind: str, local_rank: int) -> torch.device:
    """The device of this rank: GPU number `local_rank`, or the CPU."""
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")

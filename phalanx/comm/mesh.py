"""Mesh: the only place that creates process groups. Axes are passed to the code that communicates, never looked up."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import ConfigError, PeerLost, Problem
from phalanx.base.placement import Placement
from phalanx.comm.axis import Axis, ModelAxes, Overlap
from phalanx.comm.debug import Watch
from phalanx.comm.health.waits import Waits
from phalanx.comm.meeting import SignedStore, open_store, recognise
from phalanx.comm.overlap import SharedExchange
from phalanx.comm.small import SmallExchanges
from phalanx.comm.symmetric import Symmetric, first_line, made_by_all
from phalanx.layout.grid import ExpertAxis, Grid, SumAxis
from phalanx.layout.param import Replica
from phalanx.layout.shards import Sharding
from phalanx.sequence.balance import degrees_of
from phalanx.sequence.shard import SequenceShard

Mode = Literal["auto", "on", "off"]


def init_world(
    rank: int, world_size: int, init_method: str, device: torch.device, timeout_s: float, secret: str = ""
) -> SignedStore | None:
    """Join the world: NCCL for GPUs, gloo for CPUs. A world of one rank needs neither.

    init_method   as in `open_store`
    secret        of the run; ranks with another secret are rejected. If no rank has one, None is returned
    """
    return join_world(Placement(rank, 0, world_size, init_method, secret), device, timeout_s)


def join_world(
    placement: Placement,
    device: torch.device,
    timeout_s: float,
    before: Callable[[dist.Store, SignedStore | None], None] = lambda store, signed: None,
) -> SignedStore | None:
    """As `init_world`. before: called once all ranks have shown at the store that they know the secret, and before they
    connect to each other. What it raises ends the joining; a lost store is a lost peer."""
    rank, world_size = placement.rank, placement.world_size
    if world_size == 1 or dist.is_initialized():
        return None
    timeout = timedelta(seconds=timeout_s)
    began = time.monotonic()
    try:
        store = open_store(placement.init_method, rank, world_size, timeout)
        ours = dist.PrefixStore("phalanx", store)
        signed = recognise(ours, rank, world_size, placement.secret, began + timeout_s - time.monotonic())
        before(ours, signed)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=dist.PrefixStore("default_pg", store), timeout=timeout, rank=rank, world_size=world_size
        )
    except (RuntimeError, dist.DistError, PeerLost) as error:
        if "unsupported gloo device" in str(error):
            raise ConfigError([no_tls()]) from error
        where = f"at {placement.init_method} within {timeout_s:g} s"
        raise PeerLost(f"rank {rank} of {world_size} could not join the others {where}: {error}") from error
    return signed


def no_tls() -> Problem:
    rule = (
        "is no way to connect that this build of torch has: unset it and keep the network private, or use "
        "a torch with USE_GLOO_WITH_OPENSSL"
    )
    return Problem("GLOO_DEVICE_TRANSPORT", "TCP_TLS", rule, {"torch": torch.__version__}, (), "the environment")


def leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class Groups:
    """How the ranks of an axis share buckets (layout.shards): `inner` neighbours hold the shards of one, `outer` ranks
    hold the same shard.

    gather   the inner ranks with a separate communicator, so that weights do not queue behind gradients
    """

    inner: Axis
    outer: Axis
    gather: Axis


class Mesh:
    """The axes of one rank.

    tp, cp, dp, pp, world   whole axes; `sub` returns the part of an axis that shares a replica, `edge` a directed pair
                            of stages
    data                    dp x cp: the ranks that hold the same dense parameters and see different tokens
    model                   the axes that modules communicate over; those of the expert view after `prepare_experts`

    Groups are created by their members only, in phases: in each phase every rank creates exactly one group, if
    necessary with itself alone, because torch names such a group by the number of groups that a rank has created
    before.
    """

    def __init__(self, grid: Grid, rank: int = 0, device: torch.device | str = "cpu", timeout_s: float = 600.0):
        self.grid, self.rank, self.device = grid, rank, torch.device(device)
        self.at = grid.coords(rank)
        self.watch = Watch(waits=Waits(self.device.type == "cuda"))
        self._timeout = timedelta(seconds=timeout_s)
        self._axes: list[Axis] = []
        self.closing: list[Callable[[], None]] = []
        self.store: SignedStore | None = None  # what ranks exchange besides collectives
        self.overlapping: dict[str, str] = {}  # by axis: whether its exchanges overlap with matmuls, and why not
        self.exchanges: dict[SumAxis, str] = {}  # the same for buckets whose gradients are summed over an axis
        self._subs: dict[Replica, Axis] = {}
        self.world = self._phase("world", tuple(range(grid.world)))
        self.tp = self._phase("tp", grid.ranks(self.at, ("tp",)))
        self.dp = self._phase("dp", grid.ranks(self.at, ("dp",)))
        self.data = self._whole("dp x cp", grid.ranks(self.at, ("dp", "cp"))) if grid.cp > 1 else self.dp
        self.pp = self._phase("pp", grid.ranks(self.at, ("pp",)))
        self._edges = self._make_edges()
        batch_group = self._whole("tp x cp", grid.ranks(self.at, ("cp", "tp"))) if grid.cp > 1 else self.tp
        self.cp = self._whole("cp", grid.ranks(self.at, ("cp",)))
        heads = self.cp if grid.ulysses == grid.cp else self._whole("cp heads", grid.cp_heads(self.at))
        keys = self.cp if grid.ulysses == 1 else self._whole("cp keys", grid.cp_keys(self.at))
        self.model = ModelAxes(
            self.tp, cp=self.cp, heads=heads, keys=keys, batch_group=batch_group, groups=self._make_groups(heads)
        )
        if grid.media > 1:
            self.model = replace(self.model, media=self._whole("tp x cp x dp", grid.media_ranks(self.at)))
        self._edp: Axis | None = None
        self.pp_hosts: Axis | None = None
        self.dp_hosts: Axis | None = None
        self._groups: dict[SumAxis, Groups] = {}
        self.alone = Axis("alone", (rank,))
        self.stage = self.alone  # until `prepare_stage`

    @property
    def part(self) -> SequenceShard:
        """This rank's shard of every sequence."""
        grid, at = self.grid, self.at
        replica = at.dp % grid.media
        return SequenceShard(
            at.cp,
            grid.cp,
            grid.dynamic,
            grid.ulysses,
            rank=at.tp,
            ranks=grid.tp,
            replica=replica,
            replicas=grid.media,
        )

    def prepare_experts(self) -> None:
        """Create the axes of the expert view, which only models with experts need; once."""
        if self._edp is not None:
            return

        def phase(name: str, *axes: ExpertAxis) -> Axis:
            return self._phase(name, self.grid.expert_ranks(self.at, axes))

        self.model = replace(
            self.model, ep=phase("ep", "ep"), etp=phase("etp", "etp"), experts=phase("ep x etp", "ep", "etp")
        )
        self._edp = phase("edp", "edp")

    def prepare_stage(self) -> None:
        """Create the axis of all ranks of a pipeline stage, which only optimizers of whole matrices need."""
        ranks = self.grid.ranks(self.at, ("dp", "cp", "tp"))
        self.stage = self.world if len(ranks) == self.grid.world else self._phase("stage", ranks)

    def prepare_hosts(self) -> Axis:
        """The ranks of dp on a communicator of their hosts, for tensors in host memory; no device waits or is waited
        for. Made once."""
        if self.dp_hosts is None:
            self.dp_hosts = self._phase("hosts of dp", self.dp.ranks, backend="gloo")
        return self.dp_hosts

    def prepare_pp_hosts(self) -> None:
        """The same for pp, for messages between stages while devices must be idle."""
        self.pp_hosts = self._phase("hosts of pp", self.pp.ranks, backend="gloo")

    def along(self, axis: SumAxis) -> Axis:
        """The axis over which gradients of some parameters are summed."""
        if axis == "dp":
            return self.data
        if self._edp is None:
            raise RuntimeError("the axes of the expert view were not prepared")
        return self._edp

    def _make_groups(self, heads: Axis) -> dict[int, tuple[Axis, Axis]]:
        """By the number of neighbours that may share a document: those who exchange heads, and those who read each
        other's keys."""
        grid, groups = self.grid, {}
        for degree in degrees_of(grid.cp, grid.ulysses)[1:-1] if grid.dynamic else ():
            first, stride = self.at.cp // degree * degree, min(grid.ulysses, degree)
            inner = range(self.at.cp // stride * stride, self.at.cp // stride * stride + stride)
            same = range(first + self.at.cp % stride, first + degree, stride)
            exchange = (
                heads
                if stride == grid.ulysses
                else self._whole(f"cp heads of {degree}", grid.members(self.at, "cp", tuple(inner)))
            )
            groups[degree] = exchange, self._whole(f"cp keys of {degree}", grid.members(self.at, "cp", tuple(same)))
        return groups

    def _whole(self, name: str, ranks: tuple[int, ...]) -> Axis:
        """An axis that has the same size on every rank. A single rank needs no group."""
        return self._phase(name, ranks) if len(ranks) > 1 else Axis(name, ranks, watch=self.watch)

    def prepare_sharding(self, sharding: Sharding) -> None:
        """Create the groups over which buckets are sharded, after the axes of experts (if any); on all ranks alike."""
        axes: tuple[SumAxis, ...] = ("dp",) if self._edp is None else ("dp", "edp")
        for name in axes:
            whole = self.along(name)
            size = sharding.group_size(name, self.grid)
            inner, outer = (whole, self.alone) if size == whole.size else (self.alone, whole)
            if 1 < size < whole.size:
                first, mine = whole.index // size * size, whole.index % size
                inner = self._phase(f"{name} group", whole.ranks[first : first + size])
                outer = self._phase(f"{name} groups", whole.ranks[mine::size])
            gather = self._phase(f"{name} gather", inner.ranks) if sharding.level == 3 and size > 1 else inner
            self._groups[name] = Groups(inner, outer, gather)

    def groups(self, axis: SumAxis) -> Groups:
        """The groups of buckets whose gradients are summed over `axis`."""
        return self._groups[axis]

    def _phase(self, name: str, ranks: tuple[int, ...], backend: str | None = None) -> Axis:
        group = None
        if self.grid.world > 1:
            try:
                group = dist.new_group(
                    list(ranks), timeout=self._timeout, backend=backend, use_local_synchronization=True, group_desc=name
                )
            except (RuntimeError, dist.DistError) as error:
                raise PeerLost(
                    f"ranks {', '.join(map(str, ranks))} could not meet ({name}), so one of them died: {error}"
                ) from error
        axis = Axis(name, ranks, ranks.index(self.rank), group, self.watch)
        self._axes.append(axis)
        return axis

    def _make_edges(self) -> dict[tuple[int, int], Axis]:
        """Directed edges between neighbours on the ring of pipeline ranks, each with a separate communicator.

        A phase is a set of edges that share no rank: the even ones, the odd ones, and the closing edge of an odd ring.
        """
        n, edges = self.grid.pp, {}
        if n == 1:
            return {}
        ring = [(i, (i + 1) % n) for i in range(n if n > 2 else 1)]
        for phase in (ring[0 : n - n % 2 : 2], ring[1::2], ring[n - 1 :] if n % 2 else []):
            for backward in (False, True) if phase else ():
                directed = [(b, a) if backward else (a, b) for a, b in phase]
                mine = next((e for e in directed if self.at.pp in e), None)
                ranks = self.grid.members(self.at, "pp", mine) if mine else (self.rank,)
                axis = self._phase(f"edge {mine[0]}->{mine[1]}" if mine else "no edge", ranks)
                if mine:
                    edges[mine] = axis
        return edges

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Every communicator of this rank: whole axes, parts of them, edges."""
        return tuple(self._axes)

    def edge(self, source: int, to: int) -> Axis:
        """The communicator from pipeline rank `source`, its number 0, to pipeline rank `to`."""
        return self._edges[source, to]

    def sub(self, replica: Replica) -> Axis:
        """The ranks that share a replica with this one."""
        whole = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "etp": self.model.etp}[replica.axis]
        return whole if len(replica.members) == whole.size else self._subs[replica]

    def prepare(self, replicas: set[Replica]) -> None:
        """Create the sub-axes that a model needs. `replicas`: those of all pipeline ranks, so that all create equally
        many groups.

        Among those of one axis and size, groups without common ranks are created together (such as the groups of tp
        ranks that share a kv head). For pp all ranks are given the same replicas, for tp each rank its own.
        """
        parts = {(r.axis, len(r.members)) for r in replicas if r.axis != "etp"}  # an expert view's axis is never cut
        for axis, size in sorted(parts):
            if size == self.grid.size(axis):
                continue
            for disjoint in _disjoint(
                sorted((r for r in replicas if r.axis == axis and len(r.members) == size), key=lambda r: r.members)
            ):
                mine = next((r for r in disjoint if getattr(self.at, axis) in r.members), None)
                made = self._phase(
                    f"{axis} part", self.grid.members(self.at, axis, mine.members) if mine else (self.rank,)
                )
                if mine:
                    self._subs[mine] = made

    def overlap(self, axis: Axis, mode: Mode, whole: int) -> str:
        """Open memory shared over an axis for exchanges that overlap with computation, with room for a gathered tensor
        of `whole` bytes.

        `mode`: auto: if the axis is on GPUs of one host; on: wherever it is available; off. Returns the outcome on this
        axis: "on", "off" if none is wanted, or "off: " and the reason. Other groups may have another outcome; all ranks
        decide together what the run then does (engine.agree).
        """

        def make() -> None:
            axis.memory = Symmetric(axis, whole, self.device)

        self.overlapping[axis.name] = said = self._opened(axis, mode, make)
        if said != "on":
            axis.memory = None
        return said

    def small_exchanges(self, axis: Axis, mode: Mode = "auto") -> str:
        """The same for exchanges of a few tokens, each of them one kernel (comm.small), which Triton makes."""

        def make() -> None:
            axis.memory = SmallExchanges(axis, self.device)

        self.overlapping[axis.name] = said = self._opened(axis, mode, make)
        if said != "on":
            axis.memory = None
        return said

    def share(self, inner: SumAxis, mode: Mode, parts: int, largest: int) -> str:
        """Open memory in which the ranks that share buckets (`groups`) pull weights and sum gradients; `mode` and the
        result are as in `overlap`.

        parts, largest: bytes, as in overlap.SharedExchange; without any, nothing is opened.
        """
        groups = self.groups(inner)

        def make() -> None:
            groups.inner.shared = groups.gather.shared = SharedExchange(groups.inner, parts, largest, self.device)

        self.exchanges[inner] = said = self._opened(groups.inner, mode if parts or largest else "off", make)
        if said != "on":
            groups.inner.shared = groups.gather.shared = None
        return said

    def without_overlap(self, axis: Axis, why: str) -> None:
        """Free what `overlap` opened, because all ranks do without it."""
        axis.memory = None
        self.overlapping[axis.name] = why

    def without_exchange(self, inner: SumAxis, why: str) -> None:
        """The same for `share`."""
        groups = self.groups(inner)
        groups.inner.shared = groups.gather.shared = None
        self.exchanges[inner] = why

    def wants_memory(self, mode: Mode) -> bool:
        """Whether memory is to be shared where possible."""
        return mode == "on" or (mode == "auto" and self.device.type == "cuda")

    def _opened(self, axis: Axis, mode: Mode, make: Callable[[], None]) -> str:
        if axis.size == 1 or not self.wants_memory(mode):
            return "off"
        hosts = set(axis.all_gather_text(socket.gethostname()))
        if len(hosts) > 1:
            return f"off: the ranks are on {len(hosts)} hosts"
        try:
            made_by_all(axis, make)
        except OSError as error:
            return f"off: {first_line(error)}"
        return "on"

    @property
    def memories(self) -> tuple[Overlap, ...]:
        """The shared memory of axes."""
        return tuple(axis.memory for axis in self._axes if axis.memory is not None)

    @property
    def shared_bytes(self) -> int:
        """Bytes of this GPU's memory that others can read, which torch does not count as tensor memory; 0 on a CPU."""
        shared = {id(axis.shared): axis.shared.nbytes for axis in self._axes if axis.shared is not None}
        return (sum(m.nbytes for m in self.memories) + sum(shared.values())) if self.device.type == "cuda" else 0

    def warm_up(self) -> None:
        """Open every connection before step 1, so that step 1 shows the peak of memory and no step waits for a
        handshake.

        NCCL opens a channel between two ranks at their first send or receive, which blocks both hosts. Inside a
        schedule that could be a deadlock; in the phases in which groups were created it cannot.
        """
        for axis in self._axes:
            if axis.size > 1:
                axis.all_reduce(torch.zeros(1, device=axis.device)).wait()
        for edge in self._edges.values():
            x = torch.zeros(1, device=self.device)
            (edge.send(x, to=1) if edge.index == 0 else edge.recv(x, source=0)).wait()
        for keys in (self.model.keys, *(keys for _, keys in self.model.groups.values())):
            keys.all_to_all(torch.zeros(keys.size, device=self.device))
        if self.stage is not self.alone:
            self.stage.all_to_all(torch.zeros(self.stage.size, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Leave all groups. Whatever uses their communicators is freed first: CUDA graphs with collectives inside."""
        for let_go in self.closing:
            let_go()
        self.closing.clear()
        for axis in self._axes:
            axis.memory = axis.shared = None
            if axis.group is not None:
                dist.destroy_process_group(axis.group)
        self._axes.clear()


def many_queues() -> None:
    """Give the GPU as many hardware queues as it has, unless the user chose a number; before the first use of CUDA.

    Kernels of several NCCL communicators wait for peers at the same time. With few queues one can by chance queue
    behind another, and ranks then wait for each other in a ring.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def local_device(kind: str, local_rank: int) -> torch.device:
    """The device of this rank: GPU number `local_rank`, or the CPU."""
    if kind == "cuda":
        many_queues()
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def _disjoint(replicas: Iterable[Replica]) -> list[list[Replica]]:
    """Sorted into groups in which no two replicas have a member in common."""
    groups: list[list[Replica]] = []
    for r in replicas:
        home = next((g for g in groups if not any(set(r.members) & set(o.members) for o in g)), None)
        if home is None:
            groups.append([r])
        else:
            home.append(r)
    return groups

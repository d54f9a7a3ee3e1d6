"""A run on the nodes of a running Ray cluster: the part of `phalanx launch ray` that runs there, as its entry point.

A placement group takes one bundle on each of N nodes (STRICT_SPREAD). In each bundle an actor starts what a host of
`phalanx launch ssh` starts (node.py), with its place in the environment, and is the way to it: the same messages, logs
and verdict (ssh.py). A start that failed for a reason that may pass is followed by another.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import IO, Any

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import BadNode, PhalanxError, Preempted
from phalanx.base.placement import SECRET
from phalanx.launch.early import NOTHING_TO_SAVE
from phalanx.launch.job import FINAL, ClusterJob
from phalanx.launch.ray_core import WAITS, connected
from phalanx.launch.remote import KEPT, LOST, RemoteProcess
from phalanx.launch.ssh import HostLogs, HostsRefused, HostsRun, script_of
from phalanx.launch.submitted import logs_of

HEAR_S = 20.0  # an answer without news comes after this time
SAY_EVERY_S = 60.0  # while the cluster has not as many nodes
LOOK_S = 1.0
FREE_S = 5.0  # in which so many free nodes are placed, if there are so many; then a node less is asked for
MEMORY = re.compile(r"(\d+)([KMGT]?)")
UNITS = ("", "K", "M", "G", "T")
COLLECT_S = 0.2  # lines that are said shortly after each other travel together


class NodeProcess:
    """The actor on a node: a process, what it says, and how it ends. The process notices by its standard input that the
    actor is gone, and saves and stops."""

    def __init__(self, command: str) -> None:
        self._said: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            ["bash", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            # Ray sets it to the CPUs of the actor, which are those of all ranks
            env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
        )
        streams = ((1, self._process.stdout), (2, self._process.stderr))
        self._readers = [threading.Thread(target=self._read, args=one, daemon=True) for one in streams]
        for reader in self._readers:
            reader.start()

    def _read(self, number: int, stream: IO[bytes]) -> None:
        for line in stream:
            self._said.put((number, line))

    def send(self, order: bytes) -> None:
        """A line for its standard input; one that is gone need not know."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.write(order)
                self._process.stdin.flush()

    def hear(self) -> tuple[list[tuple[int, bytes]], int | None]:
        """(lines with the number of their stream, exit status once it is over and all is said)."""
        until = time.monotonic() + HEAR_S
        lines: list[tuple[int, bytes]] = []
        while time.monotonic() < until:
            over = not any(reader.is_alive() for reader in self._readers)
            with suppress(queue.Empty):
                while True:
                    lines.append(self._said.get(timeout=COLLECT_S))
            if over and self._said.empty():
                status = self._process.wait()
                return lines, status if status >= 0 else 128 - status
            if lines:
                break
        return lines, None


class ActorPipes:
    """The way to an actor's process, as that to a host over ssh. hear: called with each line of its standard error."""

    def __init__(self, ray: Any, actor: Any, hear: Callable[[str], None]):
        self._ray, self._actor, self._hear = ray, actor, hear
        orders, self._stdin = pipe()
        self._stdout, self._out = pipe()
        self._status: int | None = None
        self._over = threading.Event()
        threading.Thread(target=self._pass_orders_on, args=(orders,), daemon=True, name="phalanx-orders").start()
        self.listener = threading.Thread(target=self._listen, daemon=True, name="phalanx-ray")
        self.listener.start()

    @property
    def stdin(self) -> IO[bytes] | None:
        return self._stdin

    @property
    def stdout(self) -> IO[bytes] | None:
        return self._stdout

    def _pass_orders_on(self, orders: IO[bytes]) -> None:
        for line in orders:
            with suppress(self._ray.exceptions.RayError):
                self._actor.send.remote(line)

    def _listen(self) -> None:
        status: int | None = None
        try:
            while status is None:
                lines, status = self._ray.get(self._actor.hear.remote())
                for number, line in lines:
                    if number == 1:
                        self._out.write(line)
                    else:
                        self._hear(line.decode(errors="replace").rstrip("\r\n"))
        except self._ray.exceptions.RayError as error:
            self._hear(f"Ray lost the node or its process: {first_sentence(error)}")
            status = LOST
        self._status = status
        self._out.close()
        self._over.set()

    def wait(self, timeout: float | None = None) -> int:
        if not self._over.wait(timeout) or self._status is None:
            raise subprocess.TimeoutExpired("the node's process", timeout or 0.0)
        return self._status

    def kill(self) -> None:
        self._ray.kill(self._actor)
        with suppress(OSError):
            self._stdin.close()


def pipe() -> tuple[IO[bytes], IO[bytes]]:
    """(what reads, what writes). What is written is there at once."""
    reads, writes = os.pipe()
    return open(reads, "rb"), open(writes, "wb", buffering=0)


def first_sentence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


# ---- where it runs -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bundles:
    """What is asked of each node: CPUs, GPUs, and bytes of memory (0: no number of them). least, most: of nodes."""

    least: int
    most: int
    cpus: int
    gpus: int
    memory: int

    @property
    def each(self) -> dict[str, float]:
        asked = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory}
        return {name: float(value) for name, value in asked.items() if value}

    @property
    def text(self) -> str:
        gpus = f" and {self.gpus} GPU{'s' * (self.gpus != 1)}" if self.gpus else ""
        nodes = f"{self.least} nodes" if self.least == self.most else f"{self.least} to {self.most} nodes"
        return f"{nodes} with {self.cpus} CPU{'s' * (self.cpus != 1)}{gpus} each"


def bundles_of(job: ClusterJob) -> Bundles:
    """A CPU for each rank, unless the section `cluster` says another number."""
    c = job.cluster
    return Bundles(*job.nodes, c.cpus_per_node or c.ranks, c.gpus_per_node or 0, memory_bytes(c.memory or "0"))


def memory_bytes(text: str) -> int:
    """Of 500G, as SLURM writes it: powers of 1024, MiB without a letter."""
    found = MEMORY.fullmatch(text)
    return 0 if found is None else int(found[1]) * 1024 ** UNITS.index(found[2] or "M")


def stop_asked(*_: Any) -> None:
    raise Preempted(NOTHING_TO_SAVE)


@contextmanager
def placed(ray: Any, bundles: Bundles) -> Iterator[tuple[Any, int]]:
    """A placement group with one bundle on each node, and on how many: as many as are free, at most `bundles.most`. The
    fewest are waited for as long as it takes: a cluster may grow. Preempted if the job is stopped meanwhile."""
    from ray.util.placement_group import placement_group, remove_placement_group

    before = signal.signal(signal.SIGTERM, stop_asked)
    group: Any = None
    try:
        said = 0.0
        for count in counts(ray, bundles):
            group = placement_group([bundles.each] * count, strategy="STRICT_SPREAD")
            until = time.monotonic() + patience_s(bundles, count)
            ready = group.ready()
            while not (there := ray.wait([ready], timeout=LOOK_S)[0]) and time.monotonic() < until:
                if time.monotonic() > said + SAY_EVERY_S and count == bundles.least:
                    said = time.monotonic()
                    has = nodes_like(ray, bundles)
                    print(f"phalanx: {WAITS} {bundles.text} (the cluster has {has})", flush=True)
            if there:
                break
            remove_placement_group(group)
        signal.signal(signal.SIGTERM, before)
        yield group, count
    finally:
        signal.signal(signal.SIGTERM, before)
        if group is not None:
            remove_placement_group(group)


def counts(ray: Any, bundles: Bundles) -> Iterator[int]:
    """Numbers of nodes to ask for, one after the other and again and again: from as many as the cluster has to the
    fewest."""
    while True:
        yield from range(max(bundles.least, min(bundles.most, nodes_like(ray, bundles))), bundles.least - 1, -1)


def patience_s(bundles: Bundles, count: int) -> float:
    """For how long so many nodes are asked for before the next number is tried."""
    if bundles.least == bundles.most:
        return float("inf")
    return SAY_EVERY_S if count == bundles.least else FREE_S


def nodes_like(ray: Any, bundles: Bundles) -> int:
    """Nodes of the cluster that have what is asked for, busy or not."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(all(has.get(name, 0.0) >= wanted for name, wanted in bundles.each.items()) for has in alive)


def address_of_node() -> str:
    """What a task runs in a bundle: the address of its node."""
    import ray

    return str(ray.util.get_node_ip_address())


def in_bundle(group: Any, number: int) -> dict[str, Any]:
    """Options of a task or an actor that belongs to a bundle of the group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=number)
    return {"scheduling_strategy": where, "num_cpus": 0}


def in_layout(job: ClusterJob, count: int) -> ClusterJob:
    """The job on so many nodes, with the overrides for as many ranks."""
    words = (*job.words, *job.layouts.get(count * job.cluster.ranks, ()))
    return replace(job, nodes=(count, count), words=words)


def run_once(ray: Any, job: ClusterJob) -> tuple[PhalanxError | None, bool]:
    """One start on whatever nodes there are: how it ended (None: well), and whether somebody asked it to stop."""
    bundles = bundles_of(job)
    with placed(ray, bundles) as (group, count):
        job = in_layout(job, count)
        find = ray.remote(address_of_node)
        asked = [find.options(**in_bundle(group, number)).remote() for number in range(count)]
        try:
            names = tuple(str(name) for name in ray.get(asked))
        except ray.exceptions.RayError as error:
            return HostsRefused(f"a node was lost before anything was started: {first_sentence(error)}"), False
        start = ray.remote(NodeProcess)

        def reach(number: int, name: str, command: str, hear: Callable[[str], None]) -> RemoteProcess:
            options = {**in_bundle(group, number), "num_gpus": bundles.gpus, "max_concurrency": 4, "max_restarts": 0}
            said: deque[str] = deque(maxlen=KEPT)

            def listen(text: str) -> None:
                said.append(text.strip())
                hear(text)

            pipes = ActorPipes(ray, start.options(**options).remote(command), listen)
            return RemoteProcess(name, pipes, pipes.listener, said)

        logs = HostLogs(logs_of(job.folder), f"ray-{datetime.now(UTC):%Y%m%d-%H%M%S}", names)
        where = f"{job.worlds[0]} ranks on {len(names)} nodes ({', '.join(names)})"
        print(f"phalanx: {where}; logs in {logs.folder}", flush=True)
        run = HostsRun(replace(job, hosts=names), reach, script_of(job), os.environ.get(SECRET, ""), logs)
        try:
            run.run()
        except PhalanxError as error:
            return error, run.stop_asked
        finally:
            logs.close()
    return None, False


def run_until_done(job: ClusterJob) -> None:
    """Start after start, until the run is done, or ends in a way that would repeat itself or too often. A stop that
    nobody asked for, as of a node that its provider takes away, counts as no failure."""
    failures = 0
    with connected() as ray:
        while True:
            error, asked = run_once(ray, job)
            if error is None:
                return
            failures += error.exit_code != Preempted.exit_code
            lost = isinstance(error, HostsRefused) and error.exit_code == BadNode.exit_code  # others may be better
            if asked or (error.exit_code in FINAL and not lost) or failures > job.cluster.max_restarts:
                raise error
            print(
                f"phalanx: exit code {error.exit_code} ({error}); failure {failures} of at most "
                f"{job.cluster.max_restarts} that are started again",
                file=sys.stderr,
                flush=True,
            )

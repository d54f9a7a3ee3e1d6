"""Ranks on two hosts (network namespaces) with a bad cable between them: packets that come late, get lost, or no
longer come.

Two tunnel devices, one in each namespace, and a process that carries packets from one to the other as it likes;
ranks' connections know nothing of it. Needs root and /dev/net/tun (the kernel's own netem is a module that few
machines have).
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from phalanx.base.placement import Placement
from phalanx.comm.health.heartbeat import NO_STORE
from phalanx.config.run import Run
from tests.faults.runs import HANG_S, SECRET, _fork, end, said, until_step
from tests.harness.pool import free_port, join_network

SET_INTERFACE, TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
BETWEEN: list[tuple[int, dict]] = [
    (2, {}),
    (2, {"tp": 2}),
    (2, {"pp": 2}),
    (2, {"sharding": 3}),
    (4, {"sharding": 0}),
    (4, {"pp": 2}),
]


@dataclass(frozen=True)
class Hosts:
    """names: of the two namespaces, whose devices and addresses are known by their place here. carrier: the cable's
    process."""

    names: tuple[str, str]
    devices: tuple[str, str]
    carrier: int

    def cut(self) -> None:
        os.kill(self.carrier, signal.SIGUSR1)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@contextmanager
def hosts(delay_s: float, loss: float, seed: int) -> Iterator[Hosts]:
    """Both are removed again."""
    if os.geteuid() != 0 or not os.path.exists("/dev/net/tun") or shutil.which("ip") is None:
        pytest.skip("network namespaces and tunnels need root, /dev/net/tun and the command `ip`")
    names = tuple(f"phxnet{os.getpid()}{side}" for side in "ab")
    devices = tuple(f"phx{os.getpid()}{side}" for side in "ab")
    ends, carrier = [], 0
    try:
        for number, (name, device) in enumerate(zip(names, devices)):
            ends.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
            fcntl.ioctl(ends[-1], SET_INTERFACE, struct.pack("16sH", device.encode(), TUN_WITHOUT_HEADER))
            ip("netns", "add", name)
            ip("link", "set", device, "netns", name)
            ip("-n", name, "addr", "add", f"10.88.0.{number + 1}/24", "dev", device)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", device, "up")
        carrier = os.fork()
        if carrier == 0:
            carry(ends[0], ends[1], delay_s, loss, random.Random(seed))
        yield Hosts((names[0], names[1]), (devices[0], devices[1]), carrier)
    finally:
        if carrier:
            os.kill(carrier, signal.SIGKILL)
            os.waitpid(carrier, 0)
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)
        for number in ends:
            os.close(number)


def carry(one: int, two: int, delay_s: float, loss: float, pick: random.Random) -> None:
    """Packets both ways until the process is killed; after SIGUSR1 none."""
    whole = True

    def cut(*_: object) -> None:
        nonlocal whole
        whole = False

    signal.signal(signal.SIGUSR1, cut)
    under_way: list[tuple[float, int, int, bytes]] = []
    for number in range(1 << 62):
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for source in select.select([one, two], [], [], wait)[0]:
            packet = os.read(source, 65536)
            if whole and pick.random() >= loss:
                heapq.heappush(under_way, (time.monotonic() + delay_s, number, two if source == one else one, packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(under_way)
            if whole:
                os.write(to, packet)


def begin_on(hosts: Hosts, run: Run, world: int) -> list[int]:
    """Process numbers of ranks, half of them on each host."""
    for said_before in Path(run.dir).parent.glob("output-*.txt"):
        said_before.unlink()
    store = f"tcp://10.88.0.1:{free_port()}"
    sides = [2 * rank // world for rank in range(world)]
    first = [partial(enter, hosts.names[side], hosts.devices[side]) for side in sides]
    return [_fork(run, Placement(rank, rank, world, store, SECRET), first[rank]) for rank in range(world)]


def enter(name: str, device: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = device
    number = os.open(f"/run/netns/{name}", os.O_RDONLY)
    join_network(number)
    os.close(number)


def bad_cable(run: Run, world: int, pick: random.Random, seconds: float) -> int:
    """Every packet late (50 ms, with tensor parallelism 5), one in a hundred lost: the run takes longer, and that is
    all."""
    with hosts(0.005 if run.layout.tp > 1 else 0.05, 0.01, pick.randrange(1 << 30)) as between:
        codes = end(begin_on(between, run, world))
    assert codes == [0] * world, f"{codes}\n{said(run)}"
    return 1


def cut_cable(run: Run, world: int, pick: random.Random, seconds: float) -> int:
    """No packet more between the hosts, with no word of it to anybody: both sides end with 6 in time and name the
    other; none saves alone."""
    run = replace(run, train=replace(run.train, timeout_s=HANG_S))
    with hosts(0.0, 0.0, 0) as between:
        pids = begin_on(between, run, world)
        until_step(run, pick.randrange(1, 6))
        between.cut()
        codes = end(pids)
    text = said(run)
    assert codes == [6] * world, f"{codes}\n{text}"
    assert "silent: stopped, dead or cut off" in text and NO_STORE in text, text
    return 1

"""A small cluster on one machine: nodes are network namespaces with their own host names and mounts, joined by a switch
(a bridge in a namespace of its own) over cables of a chosen speed (tc's token bucket).

Needs root and the command `ip`, and Linux' modules for bridges and token buckets. What is done to a node (a full disk,
a library that lies about the time) happens to its processes alone, and is gone with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.harness.pool import join_network

NEW_MOUNTS, NEW_NAMES = 0x00020000, 0x04000000  # Linux' CLONE_NEWNS and CLONE_NEWUTS
BIND, PRIVATE, RECURSIVE, READ_ONLY, REMOUNT = 0x1000, 1 << 18, 0x4000, 1, 0x20
LIBC = ctypes.CDLL(None, use_errno=True)
ENDS_S = 90.0
SLOW = "40mbit"  # a tenth of the usual cable
PRIORITY = -10  # of nodes: whatever else the machine does is not part of the cluster
PORT = "29511"  # free: nothing else runs in a fresh namespace


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True, timeout=120)


def inside(namespace: str, *words: str) -> None:
    """Run a command in a namespace."""
    subprocess.run(["ip", "netns", "exec", namespace, *words], check=True, capture_output=True, timeout=120)


@dataclass(frozen=True)
class ClusterNode:
    """letter: a, b, ...; its device `eth0` leads to the port `port` of the switch."""

    letter: str
    address: str
    namespace: str
    port: str

    @property
    def name(self) -> str:
        return f"node-{self.letter}"


@dataclass
class Cluster:
    nodes: list[ClusterNode]
    switch: str
    rate: str

    def __getitem__(self, letter: str) -> ClusterNode:
        return next(node for node in self.nodes if node.letter == letter)

    @property
    def hosts(self) -> str:
        """The text of /etc/hosts."""
        return "\n".join(["127.0.0.1 localhost", *(f"{node.address} {node.name}" for node in self.nodes), ""])

    def cable(self, node: ClusterNode, rate: str) -> None:
        """The speed of a node's cable, both ways."""
        for namespace, device in ((node.namespace, "eth0"), (self.switch, node.port)):
            words = ["tc", "qdisc", "replace", "dev", device, "root", "tbf"]
            burst = "32kb" if rate == SLOW else "256kb"  # what passes at once; at least what a clock tick lets through
            inside(namespace, *words, "rate", rate, "burst", burst, "latency", "100ms")


@contextlib.contextmanager
def cluster(count: int, rate: str = "400mbit") -> Iterator[Cluster]:
    """Nodes that reach each other and nothing else; always removed again."""
    if os.geteuid() != 0 or not all(shutil.which(word) for word in ("ip", "tc")):
        pytest.skip("network namespaces need root and the commands `ip` and `tc` (package iproute2)")
    mine = f"phxc{os.getpid()}{secrets.token_hex(2)}"  # a process may have several clusters at a time
    names = [f"{mine}{letter}" for letter in "abcdefgh"[:count]]
    switch = f"{mine}switch"
    nodes = [ClusterNode(name[-1], f"10.79.0.{number + 1}", name, f"port{number}") for number, name in enumerate(names)]
    made = Cluster(nodes, switch, rate)
    try:
        try:
            build(made)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.decode().strip()}")
        yield made
    finally:
        for name in (*names, switch):
            ip("netns", "del", name, check=False)


def build(made: Cluster) -> None:
    ip("netns", "add", made.switch)
    ip("-n", made.switch, "link", "add", "bridge", "type", "bridge")
    ip("-n", made.switch, "link", "set", "bridge", "up")
    for node in made.nodes:
        ip("netns", "add", node.namespace)
        pair = ["link", "add", "eth0", "netns", node.namespace, "type", "veth"]
        ip(*pair, "peer", "name", node.port, "netns", made.switch)
        ip("-n", made.switch, "link", "set", node.port, "master", "bridge", "up")
        ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", node.namespace, "link", "set", device, "up")
        made.cable(node, made.rate)


# ---- in a node's process -------------------------------------------------------------------------


def checked(status: int, what: str) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), what)


def mount(source: str | Path, target: str | Path, kind: str = "", flags: int = BIND, options: str = "") -> None:
    """As the system call; by default `source` takes the place of `target`."""
    words = [str(word).encode() for word in (source, target, kind)]
    checked(LIBC.mount(*words, ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def enter(node: ClusterNode, hosts: str) -> None:
    """Make this process one of the node: its network, its host name, its /etc/hosts, mounts of its own."""
    number = os.open(f"/run/netns/{node.namespace}", os.O_RDONLY)
    join_network(number)
    os.close(number)
    checked(LIBC.unshare(NEW_MOUNTS | NEW_NAMES), "unshare")
    mount("none", "/", flags=RECURSIVE | PRIVATE)
    name = node.name.encode()
    checked(LIBC.sethostname(name, len(name)), "sethostname")
    replace_file("/etc/hosts", hosts)
    replace_file("/etc/nsswitch.conf", "hosts: files\n")


def replace_file(path: str | Path, text: str) -> None:
    """For this process, another text at this path."""
    with tempfile.NamedTemporaryFile("w", delete=False) as opened:  # it must stay: something may be mounted on it
        opened.write(text)
    mount(opened.name, path)


@dataclass
class Run:
    """What processes of the nodes did: exit codes and outputs by node, and seconds until all had ended."""

    codes: dict[str, int]
    said: dict[str, str]
    seconds: float


@dataclass
class Start:
    """How `phalanx WORDS` is started on each node: under srun's variables, one rank each.

    before    called in a node's process first, by its letter
    exec_env  nodes whose process is a new interpreter with these variables too
    missing   nodes that do not start
    world     ranks that srun says there are
    """

    words: Sequence[str]
    folder: Path
    before: Mapping[str, Callable[[ClusterNode], None]] = field(default_factory=dict)
    exec_env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    missing: Sequence[str] = ()
    pids: dict[str, int] = field(default_factory=dict)


def run_on(made: Cluster, start: Start, meanwhile: Callable[[Start], None] = lambda start: None) -> Run:
    """Start them, call `meanwhile`, and wait for all; those that do not end in time are killed."""
    began = time.monotonic()
    for number, node in enumerate(made.nodes):
        if node.letter not in start.missing:
            start.pids[node.letter] = fork(made, start, number)
    try:
        meanwhile(start)
        codes = {letter: wait(pid, began + ENDS_S) for letter, pid in start.pids.items()}
    finally:
        for pid in start.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    seconds = time.monotonic() - began
    said = {letter: (start.folder / f"{letter}.txt").read_text() for letter in start.pids}
    return Run(codes, said, seconds)


def wait(pid: int, until: float) -> int:
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -signal.SIGKILL


def fork(made: Cluster, start: Start, number: int) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = begin(made, start, number)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def begin(made: Cluster, start: Start, number: int) -> int:
    """In a node's process: become one of the node, and run the program."""
    import torch

    torch.set_num_threads(1)  # must be the first torch call after the fork: an inherited thread pool would hang
    node = made.nodes[number]
    out = open(start.folder / f"{node.letter}.txt", "w", buffering=1)
    for stream in (1, 2):
        os.dup2(out.fileno(), stream)
    sys.stdout = sys.stderr = out
    tempfile.tempdir = str(start.folder)
    if os.getpriority(os.PRIO_PROCESS, 0) <= 0:  # whoever lowers that of the tests means what they start, too
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    enter(node, made.hosts)
    os.environ |= {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(len(made.nodes)),
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(number),
        "SLURM_NNODES": str(len(made.nodes)),
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{len(made.nodes)})",
        "SLURM_NODELIST": ",".join(node.name for node in made.nodes),
        "MASTER_PORT": PORT,
        **start.env.get(node.letter, {}),
    }
    if node.letter in start.before:
        start.before[node.letter](node)
    if node.letter in start.exec_env:
        words = [sys.executable, "-m", "phalanx", *start.words]
        os.execve(sys.executable, words, {**os.environ, **start.exec_env[node.letter]})
    from phalanx.cli.main import main

    main(list(start.words))
    return 0

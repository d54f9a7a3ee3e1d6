"""docs/clusters.md, done: two "nodes" are two network namespaces joined by a cable that exists only in the
kernel. Each has a server of processes that begin with torch imported (tests/harness/warm.py).

Needs root and `ip` (package iproute2); skipped with the reason where they are missing. Nothing is installed here.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from phalanx.cli.main import cli
from tests.cli.test_cli import wait_for
from tests.harness.hostile import listeners
from tests.harness.warm import Warm

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "model": {
        "family": "llama",
        "vocab_size": 131,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "train": {"steps": 5, "global_batch": 4, "micro_batch": 1, "seq_length": 32, "device": "cpu"},
    "layout": {"tp": 2},
    "optim": {"lr": 3e-3},
    "data": {"mock": True},
    "log": {"report": False},
}
IN_OPEN, EVENT_BYTES = 0x20, 16  # of Linux's inotify, for a file
ASKED = 4  # look-ups of a pod, one a second, after which it is waiting for a name
OTHER_KINDS = [pytest.param(kind, marks=pytest.mark.soak) for kind in ("jobset", "trainjob")]
PORT = "29511"  # free: nothing else runs in a fresh namespace


@dataclass(frozen=True)
class Node:
    name: str
    device: str
    address: str
    warm: Warm


def node_of(letter: str, address: str) -> Node:
    name = f"phx{os.getpid()}{letter}"
    return Node(name, f"v{os.getpid()}{letter}", address, Warm(inside=("ip", "netns", "exec", name)))


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Node, Node]]:
    """Two namespaces that reach each other and nothing else; always removed again."""
    if os.geteuid() != 0:
        pytest.skip("making network namespaces needs root")
    if shutil.which("ip") is None:
        pytest.skip("no `ip` command: install the package iproute2")
    pair = node_of("a", "10.77.0.1"), node_of("b", "10.77.0.2")
    try:
        if refused := connect(pair):
            pytest.skip(f"network namespaces are not allowed here: {refused}")
        for node in pair:
            node.warm.start()
        yield pair
    finally:
        for node in pair:
            end_ranks(node)
            node.warm.close()
            ip("netns", "del", node.name, check=False)
            shutil.rmtree(Path("/etc/netns") / node.name, ignore_errors=True)


def connect(pair: tuple[Node, Node]) -> str:
    """What the system said if it refuses; else nothing."""
    a, b = pair
    try:
        for node in pair:
            ip("netns", "add", node.name)
        ip("link", "add", a.device, "netns", a.name, "type", "veth", "peer", "name", b.device, "netns", b.name)
    except subprocess.CalledProcessError as error:
        return error.stderr.strip()
    for node in pair:
        ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", node.device)
        ip("-n", node.name, "link", "set", "lo", "up")
        ip("-n", node.name, "link", "set", node.device, "up")
        # each node knows both names, its own host name means its own address, and nobody asks a DNS server that it
        # cannot reach
        etc = Path("/etc/netns") / node.name
        etc.mkdir(parents=True, exist_ok=True)
        names = [f"{n.address} node-{n.name[-1]}" for n in pair]
        (etc / "hosts").write_text(
            "\n".join(["127.0.0.1 localhost", f"{node.address} {os.uname().nodename}", *names, ""])
        )
        (etc / "nsswitch.conf").write_text("hosts: files\n")
    return ""


def inside(node: Node) -> list[str]:
    return ["ip", "netns", "exec", node.name]


def run_on(node: Node, words: list[str], program: list[str] | None = None, **more: str) -> subprocess.Popen:
    """`python -m WORDS` on a node, by its warm server unless by another program."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": node.device, **more}
    command = [*(program or [node.warm.python]), "-m", *words]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end_ranks(node: Node) -> None:
    """End what still runs in a namespace: ranks whose torchrun was killed after a failure."""
    for pid in ip("netns", "pids", node.name, check=False).stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def finish(processes: list[subprocess.Popen]) -> list[str]:
    """What each node printed; all of them must have ended well."""
    try:
        outputs = [p.communicate(timeout=120)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [0, 0], "\n----\n".join(outputs)
    return outputs


def losses(folder: Path) -> list[tuple[float, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(r["loss"], r["grad_norm"]) for r in rows if "loss" in r]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("multi-node") / "run.yaml"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def on_one_node(config, nodes, warm) -> list[tuple[float, float]]:
    """The same config on one machine, with the launcher of `phalanx train`. Asks for `nodes` so as not to run for
    nothing."""
    folder = config.parent / "one"
    done = warm.phalanx("train", str(config), f"dir={folder}")
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(folder)


SECRET = "5d1c7e" * 8  # of these runs
SLURM = {
    "SLURM_JOB_ID": "14511",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODELIST": "node-a,node-b",
}


def test_torchrun_on_two_nodes(nodes, config, on_one_node, tmp_path):
    """tp=2 over the cable: the same losses as on one machine, bit by bit; node 1 prints no step lines."""
    train = ["phalanx", "train", str(config), f"dir={tmp_path / 'run'}"]
    start = [
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--master-addr",
        "node-a",
        "--master-port",
        PORT,
    ]
    secret = {"PHALANX_RUN_SECRET": SECRET}
    outputs = finish(
        [run_on(node, [*start, "--node-rank", str(i), "-m", *train], **secret) for i, node in enumerate(nodes)]
    )
    assert losses(tmp_path / "run") == on_one_node and len(on_one_node) == CONFIG["train"]["steps"]
    assert "step=5 loss=" in outputs[0] and "step=" not in outputs[1] and "PHALANX_RUN_SECRET" not in outputs[0]


def test_slurm_variables_on_two_nodes(nodes, config, on_one_node, tmp_path):
    """What `srun phalanx train` sets: each process is a rank; the first name of the node list is where rank 0 is.
    Without a secret one warning."""
    words = ["phalanx", "train", str(config), f"dir={tmp_path / 'run'}"]
    outputs = finish([run_on(node, words, **SLURM, SLURM_PROCID=str(i)) for i, node in enumerate(nodes)])
    assert losses(tmp_path / "run") == on_one_node
    assert outputs[0].count("warning: PHALANX_RUN_SECRET is not set") == 1 and "PHALANX_RUN_SECRET" not in outputs[1]


@pytest.mark.trust(
    1,
    "start a rank on another machine with a wrong secret: it trained along",
    "all ranks refuse with exit 2 before they connect",
)
@pytest.mark.parametrize("other", ["another secret, of somebody else", None])
def test_a_rank_with_another_secret_is_refused(nodes, config, tmp_path, other):
    words = ["phalanx", "train", str(config), f"dir={tmp_path / 'run'}"]
    secrets = [{"PHALANX_RUN_SECRET": SECRET}, {"PHALANX_RUN_SECRET": other} if other else {}]
    ranks = [run_on(node, words, **SLURM, SLURM_PROCID=str(i), **secrets[i]) for i, node in enumerate(nodes)]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], outputs
    assert all(
        "config error: PHALANX_RUN_SECRET='(not shown)'" in text and "Traceback" not in text for text in outputs
    ), outputs
    assert not any(secret in text for text in outputs for secret in (SECRET, other or SECRET))


class Heard(threading.Thread):
    """What a process says: its lines, each with the seconds since `began`."""

    def __init__(self, process: subprocess.Popen[str], began: float) -> None:
        super().__init__(daemon=True)
        self._process, self._began = process, began
        self.lines: list[tuple[float, str]] = []
        self.start()

    def run(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append((time.monotonic() - self._began, line))

    def first(self, words: str) -> tuple[float, str] | None:
        return next((one for one in self.lines if words in one[1]), None)


@pytest.mark.soak
@pytest.mark.parametrize("starts", ["1", "2"])
def test_a_first_host_that_is_the_wrong_one_is_named_with_the_reason(nodes, config, tmp_path, starts):
    """An address that nobody has: each rank says so while it still imports, or the process that is to start it. Rank 0
    then ends; the others go on trying: a host may be late. By new interpreters, which import everything first."""
    words = ["phalanx", "train", str(config), f"dir={tmp_path / 'run'}"]
    env = {**SLURM, "PHALANX_RUN_SECRET": SECRET, "MASTER_ADDR": "10.77.0.99", "PHALANX_RANKS_PER_NODE": starts}
    env["SLURM_STEP_TASKS_PER_NODE"] = "1(x2)"
    began = time.monotonic()
    ranks = [
        run_on(node, words, program=[*inside(node), sys.executable], **env, SLURM_PROCID=str(i), SLURM_NODEID=str(i))
        for i, node in enumerate(nodes)
    ]
    heard = [Heard(rank, began) for rank in ranks]
    try:
        assert ranks[0].wait(120) == 2, heard[0].lines
        ended = time.monotonic() - began
        wait_for(lambda: heard[1].first("cannot reach rank 0 at 10.77.0.99:"))
    finally:
        for rank in ranks:
            rank.kill()
    heard[0].join(60)
    last = "".join(line for _, line in heard[0].lines)
    assert "MASTER_ADDR='10.77.0.99': must be the name or address of rank 0's host" in last, last
    assert "cannot be reached under that name" in last
    for one in heard:
        when, line = one.first("10.77.0.99") or (0.0, "")
        assert re.search(r"\((No route to host|timed out|Connection timed out)\)", line), one.lines
        print(f"host and reason after {when:.1f} s")
    print(f"rank 0 ended after {ended:.1f} s")


def listening_in(node: Node) -> set[tuple[str, int]]:
    return {found for pid in ip("netns", "pids", node.name).stdout.split() for found in listeners(of=pid)}


def can_reach(node: Node, address: str, port: int) -> bool:
    code = f"import socket; socket.create_connection(({address!r}, {port}), timeout=30)"
    return (
        subprocess.run(
            ["ip", "netns", "exec", node.name, sys.executable, "-S", "-c", code], capture_output=True, timeout=120
        ).returncode
        == 0
    )


def until_trained(folder: Path) -> None:
    wait_for(lambda: (folder / "log.txt").exists() and " step=2 " in (folder / "log.txt").read_text())


@pytest.mark.trust(
    1,
    "list the listening sockets of ranks on two machines: rank 0's store on all interfaces",
    "each on the chosen interface alone",
)
def test_between_nodes_ranks_listen_at_the_chosen_interface(nodes, config, tmp_path):
    """Which is chosen without a word by the way to rank 0, and by name."""
    words = ["phalanx", "train", str(config), f"dir={tmp_path / 'run'}", "train.steps=100000"]
    choices = [{}, {"PHALANX_INTERFACE": nodes[1].device, "GLOO_SOCKET_IFNAME": "lo"}]
    ranks = [
        run_on(node, words, **{**SLURM, "SLURM_PROCID": str(i), "PHALANX_RUN_SECRET": SECRET, **choices[i]})
        for i, node in enumerate(nodes)
    ]
    try:
        until_trained(tmp_path / "run")
        found = [listening_in(node) for node in nodes]
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    for node, sockets in zip(nodes, found):
        assert {address for address, _ in sockets} == {node.address}, (sockets, outputs)
    assert (nodes[0].address, 15000 + int(SLURM["SLURM_JOB_ID"]) % 15000) in found[0]
    assert [rank.returncode for rank in ranks] == [75, 75] and "PHALANX_RUN_SECRET" not in outputs[0], outputs


def test_ranks_of_one_node_cannot_be_reached_from_another(nodes, config, tmp_path):
    words = ["phalanx", "train", str(config), f"dir={tmp_path / 'run'}", "train.steps=100000"]
    launcher = run_on(nodes[0], words)  # with GLOO_SOCKET_IFNAME, which names the node's interface
    try:
        until_trained(tmp_path / "run")
        found = listening_in(nodes[0])
        reached = [can_reach(nodes[1], nodes[0].address, port) for _, port in found]
    finally:
        launcher.send_signal(signal.SIGTERM)
        said = launcher.communicate(timeout=120)[0]
    assert {address for address, _ in found} == {"127.0.0.1"} and len(found) > 2, found
    assert not any(reached) and launcher.returncode == 75, said


# ---- the pods of `phalanx launch k8s`, with what Kubernetes gives them ----------------------------


def pods_of(config: Path, folder: Path, kind: str, *overrides: str) -> tuple[list[str], dict[str, str], str]:
    """(words of a pod's command, its variables, name of the first pod), as the manifest has them. The volume is a
    folder here, and so is the place of the config."""
    out = folder / "run.k8s.yaml"
    words = ["launch", "k8s", str(config), "--kind", kind, "--nodes", "2", "--image", "i", "--dry", "-o", str(out)]
    settings = [f"cluster.mounts=[runs:{folder}]", "dir=run"]
    done = CliRunner().invoke(cli, [*words, *settings, *overrides])
    assert done.exit_code == 0, repr(done.exception)
    documents = list(yaml.safe_load_all(out.read_text()))
    if kind == "trainjob":
        [trainer] = [document["spec"]["trainer"] for document in documents if document["kind"] == "TrainJob"]
        variables = {row["name"]: row["value"] for row in trainer["env"] if "value" in row}
        pets = {"PET_NNODES": trainer["numNodes"], "PET_NPROC_PER_NODE": trainer["numProcPerNode"]}
        first = "run-node-0-0.run"
        variables |= {**{name: str(value) for name, value in pets.items()}, "PET_MASTER_ADDR": first}
        variables |= {"PET_MASTER_PORT": "29400", "PHALANX_RUN_SECRET": SECRET}
        return [word.replace("/etc/phalanx/", f"{config.parent}/") for word in trainer["command"]], variables, first
    [workload] = [document for document in documents if document["kind"] in ("Job", "JobSet")]
    if kind == "jobset":
        workload = workload["spec"]["replicatedJobs"][0]["template"]
    [container] = workload["spec"]["template"]["spec"]["containers"]
    assert container["workingDir"] == str(folder) and container["command"][0] == "phalanx"
    command = [word.replace("/etc/phalanx/", f"{config.parent}/") for word in container["command"]]
    variables = {row["name"]: row["value"] for row in container["env"] if "value" in row}
    assert [row["name"] for row in container["env"] if "valueFrom" in row] == ["PHALANX_RUN_SECRET"]
    return command, {**variables, "PHALANX_RUN_SECRET": SECRET}, variables["MASTER_ADDR"]


def start_pod(node: Node, index: int, command: list[str], env: dict[str, str]) -> subprocess.Popen:
    """JOB_COMPLETION_INDEX is what the Job controller adds, PET_NODE_RANK what Kubeflow's Trainer reads from it."""
    own = {"PET_NODE_RANK": str(index)} if "PET_NNODES" in env else {}
    return run_on(node, command, **env, **own, JOB_COMPLETION_INDEX=str(index))


def name_hosts(nodes: tuple[Node, Node], name: str) -> None:
    """The record of the first pod, in the file that a namespace sees as its own."""
    for node in nodes:
        with (Path("/etc/netns") / node.name / "hosts").open("a") as hosts:
            hosts.write(f"{nodes[0].address} {name}\n")


class Opened:
    """How often a namespace has opened its file of names, as the kernel counts it."""

    def __init__(self, node: Node) -> None:
        self._path, self._times = Path("/etc/netns") / node.name / "hosts", 0

    def __enter__(self) -> Opened:
        libc = ctypes.CDLL(None)
        self._events = libc.inotify_init1(os.O_NONBLOCK)
        assert libc.inotify_add_watch(self._events, bytes(self._path), IN_OPEN) > 0
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._events)

    def times(self) -> int:
        with contextlib.suppress(BlockingIOError):
            self._times += len(os.read(self._events, 1 << 16)) // EVENT_BYTES
        return self._times


@pytest.mark.parametrize(
    "kind", ["job", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("jobset", "trainjob"))]
)
def test_pods_meet_under_a_name_that_is_made_while_they_start(nodes, config, on_one_node, tmp_path, monkeypatch, kind):
    command, env, first = pods_of(config, tmp_path, kind)
    monkeypatch.chdir(tmp_path)
    with Opened(nodes[0]) as by_first, Opened(nodes[1]) as by_second:
        pods = [start_pod(node, i, command, env) for i, node in enumerate(nodes)]
        try:
            wait_for(
                lambda: min(by_first.times(), by_second.times()) >= ASKED or any(p.poll() is not None for p in pods)
            )
            assert [pod.poll() for pod in pods] == [None, None], [p.communicate()[0] for p in pods if p.poll()]
            name_hosts(nodes, first)
        except BaseException:
            for pod in pods:
                pod.kill()
            raise
    finish(pods)
    assert losses(tmp_path / "run") == on_one_node


def test_pods_that_are_taken_away_go_on_when_they_are_replaced(nodes, config, tmp_path, monkeypatch):
    command, env, first = pods_of(config, tmp_path, "job", "train.steps=100000", "checkpoint.interval=1000")
    name_hosts(nodes, first)
    monkeypatch.chdir(tmp_path)
    for start in range(2):
        until = len(losses(tmp_path / "run")) + 2 if start else 2
        pods = [start_pod(node, i, command, env) for i, node in enumerate(nodes)]
        try:
            wait_for(partial(has_steps, tmp_path / "run", until))
        finally:
            for pod in pods:
                pod.send_signal(signal.SIGTERM)
            outputs = [pod.communicate(timeout=120)[0] for pod in pods]
        assert [pod.returncode for pod in pods] == [75, 75], outputs
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "loss" in row]
    assert steps == list(range(1, len(steps) + 1))


def has_steps(folder: Path, count: int) -> bool:
    return (folder / "metrics.jsonl").exists() and len(losses(folder)) >= count

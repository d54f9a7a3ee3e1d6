"""`phalanx launch ssh` against a real sshd (tests/harness/sshd.py), which stands for several hosts of this machine.
Skipped with the reason where there is none."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.base.errors import CheckpointError
from phalanx.launch.remote import RemoteProcess
from phalanx.launch.ssh import HostEnd, HostLogs, RunHost, verdict
from tests.harness.cluster import Cluster, ClusterNode, cluster, ip
from tests.harness.slurm import WAIT_S, until
from tests.harness.sshd import Sshd, missing
from tests.harness.warm import ROOT, Warm

CONFIG = """\
model: {family: llama, vocab_size: 64, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2}
train: {steps: 100000, global_batch: 8, micro_batch: 1, seq_length: 16, device: cpu, timeout_s: 60}
data: {mock: true}
log: {report: false}
"""  # noqa: E501
SECRET = "0123456789abcdef" * 4
START_S = 400.0  # of four new interpreters, on two cores that others share
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    made = Warm().start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def sshd() -> Iterator[Sshd]:
    if why := missing():
        pytest.skip(why)
    made = Sshd(("n1", "n2"), getpass.getuser()).start()
    yield made
    made.close()


class Launched:
    """A run of this test on the hosts n1 and n2, and its launcher."""

    def __init__(self, sshd: Sshd, warm: Warm, place: Path):
        self.sshd, self.warm, self.place, self.folder = sshd, warm, place, place / "run"
        (place / "run.yaml").write_text(CONFIG)
        (place / "hosts.txt").write_text("n1\nn2  # the second\n")
        program = str(warm.folder / "phalanx")
        cluster = {"ranks_per_node": 1, "interface": "lo", "program": program, "environment": ENV, "grace_s": 60}
        (place / "cluster.yaml").write_text(json.dumps(cluster))
        self.process: subprocess.Popen[str] | None = None

    def words(self, *words: str) -> list[str]:
        return [
            "launch",
            "ssh",
            "run.yaml",
            f"dir={self.folder}",
            "--hosts",
            "hosts.txt",
            "--ssh",
            self.sshd.ssh,
            *words,
        ]

    def phalanx(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.warm.phalanx(*self.words(*words), cwd=self.place)

    def begin(self, *words: str, secret: str = "") -> subprocess.Popen[str]:
        env = {**os.environ, **{name: str(value) for name, value in ENV.items()}}
        self.process = subprocess.Popen(
            [self.warm.folder / "phalanx", *self.words(*words)],
            cwd=self.place,
            env={**env, "PHALANX_RUN_SECRET": secret} if secret else env,
            stdout=open(self.place / "out.txt", "w"),
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return self.process

    def said(self) -> str:
        return (self.place / "out.txt").read_text()

    def steps(self) -> list[int]:
        path = self.folder / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row["step"] for row in rows if "loss" in row]

    def until_step(self, step: int) -> None:
        until(lambda: self.steps()[-1:] >= [step], lambda: f"step {step}:\n{self.said()}")

    def on_host(self, number: int) -> list[int]:
        """The processes that ssh started on a host for this run, the session's sshd included."""
        there = [(pid, env) for pid, env in environments() if str(self.folder) in commands(pid)]
        ways = {
            word for _, env in there if f"PHALANX_NODE={number}" in env for word in env if "SSH_CONNECTION=" in word
        }
        found = [pid for pid, env in there if ways & set(env)]
        return found + [parent for pid in found if "sshd" in commands(parent := parent_of(pid))]

    def all_over(self) -> bool:
        return not self.on_host(0) and not self.on_host(1)


def environments() -> Iterator[tuple[int, list[str]]]:
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            yield int(path.parent.name), path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has just ended
        return 0


def commands(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def run(sshd, warm, tmp_path) -> Iterator[Launched]:
    made = Launched(sshd, warm, tmp_path)
    yield made
    if made.process is not None:
        made.process.kill()
        made.process.wait()
    until(made.all_over, lambda: "the ranks end when their launcher is gone")


def test_two_hosts_train_stop_when_asked_and_go_on(run):
    """TERM to the launcher reaches the ranks: saved, 75. A launcher that is killed leaves no run behind: the ranks save
    and end by themselves. Each step is done once."""
    launcher = run.begin(secret=SECRET)
    run.until_step(2)
    assert not [pid for pid, _ in environments() if SECRET in commands(pid)], "the secret is on a command line"
    state = run.warm.phalanx("status", str(run.folder)).stdout
    assert re.match(rf"runs  process \d+ on host \S+, since 20.*\nrun  {run.folder}\nstep  \d+\nlast  ", state), state
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(WAIT_S) == 75, run.said()
    assert run.warm.phalanx("status", str(run.folder)).stdout.startswith("run  ")
    stopped = run.steps()[-1]
    assert f"saved {run.folder}/checkpoints/step-{stopped:08}" in run.said()
    assert "layout world=2 dp=2" in run.said() and "PHALANX_RUN_SECRET is not set" not in run.said()
    launcher = run.begin()
    run.until_step(stopped + 2)
    # what a launcher has not passed on when it is killed is lost
    until(lambda: f"step={stopped + 1} loss=" in run.said(), run.said)
    launcher.kill()
    until(run.all_over, lambda: "the ranks end when their launcher is gone")
    steps = run.steps()
    assert (run.folder / f"checkpoints/step-{steps[-1]:08}/manifest.json").exists()
    assert steps == list(range(1, steps[-1] + 1))
    log = run.warm.phalanx("logs", str(run.folder)).stdout
    assert f"step={stopped} loss=" in log and f"step={stopped + 1} loss=" in log and "Traceback" not in log
    texts = [path.read_bytes() for path in run.folder.rglob("*") if path.is_file()]
    assert texts and not any(SECRET.encode() in text for text in texts)


def test_a_host_that_is_lost_ends_the_others(run):
    launcher = run.begin()
    run.until_step(2)
    there = run.on_host(1)
    assert len(there) == 3, [commands(pid) for pid in there]  # sshd, the node's process, and its rank
    for pid in there:
        os.kill(pid, signal.SIGKILL)
    assert launcher.wait(WAIT_S) == 6, run.said()
    last = run.said().splitlines()[-1]
    assert last.startswith("peer lost: n2: ") and "Traceback" not in run.said(), run.said()
    until(run.all_over, lambda: "the other host's ranks end")


def test_hosts_that_cannot_be_reached_are_one_line_each_and_nothing_starts(run, deaf):
    """A port where nothing listens, a key that is not the host's, a user whom the host does not let in."""
    other = run.place / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    (run.place / "known").write_text(f"phalanx-test {Path(f'{other}.pub').read_text()}")
    port = deaf.getsockname()[1]
    extra = f"Host down\n  Port {port}\nHost changed\n  UserKnownHostsFile {run.place}/known\n"
    extra += "Host stranger\n  User nobody-of-this-name\n"
    names = "n1 down changed stranger"
    (run.place / "config").write_text(extra + run.sshd.config.read_text().replace("Host n1 n2", f"Host {names}"))
    (run.place / "hosts.txt").write_text("n1\ndown\nchanged\nstranger\n")
    done = run.phalanx("--ssh", f"ssh -F {run.place}/config -o BatchMode=yes")
    assert done.returncode == 8 and done.stdout == "", done.stderr
    _, *tail = done.stderr.splitlines()
    assert len(tail) == 4, done.stderr
    assert tail[0].startswith("down: ssh: connect to host 127.0.0.1 port") and "Connection refused" in tail[0]
    assert tail[1].startswith("changed: Host key verification failed") and "`ssh changed`" in tail[1]
    assert tail[2].startswith("stranger: ") and "Permission denied" in tail[2] and "`ssh-copy-id stranger`" in tail[2]
    assert tail[3].startswith("nothing was started") and not run.steps()


def test_a_request_to_stop_that_comes_before_all_hosts_have_come(run):
    """`read` takes the line on which each host waits."""
    launcher = run.begin("cluster.setup=[read line]")
    until(lambda: "phalanx: 2 ranks on 2 hosts (n1, n2)" in run.said(), run.said)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(WAIT_S) == 75, run.said()
    assert "asked to stop before training began" in run.said() and not run.steps()


@pytest.mark.parametrize(
    "override, said",
    [
        ("cluster.program=/no/phalanx", "n1: bash: line"),
        ("cluster.setup=[exit 3]", "n1: no answer"),
        ("cluster.interface=eth77", "n1: config error: PHALANX_INTERFACE='eth77': must be a network interface of this"),
        ("cluster.image=some:1", "cluster.image='some:1': is not used over ssh"),
    ],
)
def test_what_a_host_refuses(run, override, said):
    done = run.phalanx(override)
    assert said in done.stderr and done.returncode in (2, 3, 8) and "Traceback" not in done.stderr, done.stderr


def test_what_would_run_is_shown_without_a_secret_and_is_a_script(run):
    done = run.phalanx("--dry", "cluster.secrets.HF_TOKEN=~/.hf", "cluster.environment.A=b c")
    assert done.returncode == 0, done.stderr
    assert 'export HF_TOKEN="$(< ~/.hf)"\n' in done.stdout and "export A='b c'\n" in done.stdout
    assert "PHALANX_RUN_SECRET" not in done.stdout and not run.folder.exists()
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True, capture_output=True).stderr == ""


# ---- two hosts with a network between them ----------------------------------------------------


@pytest.fixture
def apart(tmp_path) -> Iterator[tuple[Cluster, str]]:
    """Two hosts in network namespaces, each with its sshd; what reaches them from the first."""
    if why := missing():
        pytest.skip(why)
    with cluster(2) as made, contextlib.ExitStack() as opened:
        text = ""
        for node in made.nodes:
            inside = ("ip", "netns", "exec", node.namespace)
            server = Sshd((node.name,), getpass.getuser(), node.address, inside)
            opened.callback(server.close)
            text += server.start().config.read_text()
        (tmp_path / "ssh").write_text(text)
        (tmp_path / "hosts.txt").write_text("".join(f"{node.name}\n" for node in made.nodes))
        cluster_file = {"ranks_per_node": 2, "environment": ENV}
        (tmp_path / "cluster.yaml").write_text(json.dumps(cluster_file))
        yield made, f"ssh -F {tmp_path / 'ssh'} -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5"
        for node in made.nodes:
            for pid in processes_in(node.namespace):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def processes_in(namespace: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
    return [int(pid) for pid in done.stdout.split() if "sshd" not in commands(int(pid))]


def launch_from(node: ClusterNode, place: Path, ssh: str, *words: str) -> subprocess.Popen[str]:
    (place / "run.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "phalanx", "launch", "ssh", "run.yaml", "--hosts", "hosts.txt", "--ssh", ssh]
    return subprocess.Popen(
        ["ip", "netns", "exec", node.namespace, *command, *words],
        cwd=place,
        env={**os.environ, **{name: str(value) for name, value in ENV.items()}},
        stdout=open(place / "out.txt", "w"),
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.soak
def test_two_hosts_with_a_network_between_them_train_as_one_does(apart, tmp_path):
    """The names are known to ssh alone; two ranks on each host, the losses of four on one to the last bit."""
    made, ssh = apart
    launcher = launch_from(made["a"], tmp_path, ssh, "train.steps=6", "dir=two")
    assert launcher.wait(240) == 0, (tmp_path / "out.txt").read_text()
    assert "layout world=4 dp=4" in (tmp_path / "out.txt").read_text()
    one = [sys.executable, "-m", "phalanx", "train", "run.yaml", "train.steps=6", "dir=one", "--ranks", "4"]
    subprocess.run(one, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=240)
    rows = [
        [(row["loss"], row["grad_norm"]) for row in map(json.loads, text.splitlines()) if "loss" in row]
        for text in ((tmp_path / f"{name}/metrics.jsonl").read_text() for name in ("one", "two"))
    ]
    assert len(rows[0]) == 6 and rows[0] == rows[1]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_cable_that_is_pulled_ends_both_sides(apart, tmp_path):
    made, ssh = apart
    launcher = launch_from(made["a"], tmp_path, ssh, "dir=run", "train.timeout_s=20")
    metrics = tmp_path / "run/metrics.jsonl"
    out = (tmp_path / "out.txt").read_text
    until(lambda: metrics.exists() and '"step": 3' in metrics.read_text(), out, START_S)
    ip("-n", made.switch, "link", "set", made["b"].port, "down")
    assert launcher.wait(240) == 6, (tmp_path / "out.txt").read_text()
    said = (tmp_path / "out.txt").read_text()
    assert "peer lost" in said and "Traceback" not in said
    until(lambda: not processes_in(made["b"].namespace), lambda: "the ranks beyond the cable end too")


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_second_request_ends_ranks_that_hang(apart, tmp_path):
    made, ssh = apart
    launcher = launch_from(made["a"], tmp_path, ssh, "dir=run")
    metrics, out = tmp_path / "run/metrics.jsonl", tmp_path / "out.txt"
    until(lambda: metrics.exists() and '"step": 3' in metrics.read_text(), out.read_text, START_S)
    ranks = [pid for pid in processes_in(made["b"].namespace) if "phalanx.launch.worker" in commands(pid)]
    assert len(ranks) == 2
    os.kill(ranks[0], signal.SIGSTOP)
    [launching] = [pid for pid in processes_in(made["a"].namespace) if "launch\0ssh" in commands(pid)]
    os.kill(launching, signal.SIGTERM)
    until(lambda: "stopping: waiting for the ranks to save" in out.read_text(), out.read_text)
    os.kill(launching, signal.SIGINT)
    assert launcher.wait(WAIT_S) == 130, out.read_text()
    assert "stopped at once by a second Ctrl-C; the last step is not saved" in out.read_text()
    until(lambda: not processes_in(made["b"].namespace), lambda: "the ranks that hang are gone")


# ---- without an sshd -----------------------------------------------------------------------------


def hosts(*said: str) -> list[RunHost]:
    made = []
    for number, text in enumerate(said):
        process = subprocess.Popen(["true"])
        listener = threading.Thread(target=int)
        listener.start()
        made.append(RunHost(number, f"n{number}", RemoteProcess(f"n{number}", process, listener, deque([text]))))
    return made


@pytest.mark.parametrize(
    "ends, code",
    [
        ([(0, 0), (1, 0)], None),
        ([(1, 75), (0, 75)], 75),
        ([(1, 6), (0, 3)], 3),  # the cause, whichever was noticed first
        ([(1, 6), (0, 255)], 6),  # the way to a host is gone
        ([(0, 6), (1, 1)], 1),
        ([(0, 5), (1, 3)], 5),  # the first of two causes
        ([(1, 137), (0, 6)], 6),  # killed
        ([(0, 0)], 6),  # the other one did not end
    ],
)
def test_which_end_counts(tmp_path, ends, code):
    found = verdict(hosts("", "Connection closed"), [HostEnd(*end) for end in ends], tmp_path)
    assert (found and found.exit_code) == code


def test_a_full_disk_costs_lines_of_the_files_and_says_so_once(tmp_path, capsys):
    """/dev/full is what the system has for a disk without room."""
    (tmp_path / "ssh-1").mkdir()
    (tmp_path / "ssh-1/node-0-a.log").symlink_to("/dev/full")
    logs = HostLogs(tmp_path, "ssh-1", ("a", "b"))
    logs.error(0, "a", "Welcome to this host")
    logs.begun = True
    for step in range(3):
        logs.out(0, f"step={step}\n".encode())
    logs.out(1, b"not shown\n")
    for host in (0, 1):
        logs.error(host, "ab"[host], "warning: the same of all")
    logs.error(1, "b", "of b alone")
    logs.close()
    said = capsys.readouterr()
    assert said.out == "step=0\nstep=1\nstep=2\n"
    full, *others = said.err.splitlines()
    assert "No space left on device" in full and others == ["warning: the same of all", "b: of b alone"]
    assert (tmp_path / "ssh-1/node-1-b.log").read_text() == "not shown\nwarning: the same of all\nof b alone\n"
    assert (tmp_path / "ssh-1.log").read_text().count("step=") == 3


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "logs").write_text("")
    with pytest.raises(CheckpointError, match="choose a `dir` that can be written"):
        HostLogs(tmp_path / "logs", "ssh-1", ("a",))

"""Where a process is in a world that somebody else started, by the environments that launchers really set.

Those of SLURM were recorded with `srun` of slurm-wlm 22.05.8, those of Open MPI with `mpirun` 4.1.4; those of
Kubernetes are as its documentation and Kubeflow's name them.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

import phalanx as px
from phalanx.base.errors import ConfigError, PeerLost
from phalanx.comm import reach
from phalanx.launch import first_host, local
from phalanx.launch.env import Placement, read_placement
from phalanx.launch.environment import allowed_cpus, node_settings, parse_cpus, span_text
from phalanx.launch.hosts import expand
from phalanx.training.main import StopRequest
from tests.harness.pool import free_port
from tests.harness.slurm import until
from tests.harness.warm import ROOT

SECRET = "0123456789abcdef"
TWO_NODES = {  # srun -N2 --ntasks-per-node=1, on the second node
    "SLURMD_NODENAME": "n2",
    "SLURM_JOB_ID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
HETEROGENEOUS = {  # srun -w n2 -n1 : -w n1 -n2, the last task: the list is sorted, and task 0 is on n2
    "SLURMD_NODENAME": "n1",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NODELIST_PACK_GROUP_0": "n2",
    "SLURM_JOB_NODELIST_PACK_GROUP_1": "n1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1,2",
}
# What enroot's hook 50-slurm-pytorch.sh adds in a container of pyxis whose image has PYTORCH_VERSION (NVIDIA/enroot,
# conf/hooks/extra; NVIDIA/pyxis, tests/pytorch.bats): of the task of TWO_NODES
HOOK = {
    "PYTORCH_VERSION": "2.9.0a0",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "61001",
    "WORLD_SIZE": "2",
    "RANK": "1",
    "LOCAL_RANK": "0",
}
OPEN_MPI = {  # mpirun -n 2, the second process
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "PMIX_NAMESPACE": "825425921",
    "PMIX_RANK": "1",
}
MPI_PORT = 15000 + zlib.crc32(b"825425921") % 15000  # the same on all processes of one mpirun
INDEXED = {"JOB_COMPLETION_INDEX": "1", "PHALANX_NODES": "4", "MASTER_ADDR": "run-0.run", "MASTER_PORT": "29500"}
BY_HAND = {"PHALANX_NODE": "1", "PHALANX_NODES": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "15001"}
TRAIN_JOB = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "8",
    "PET_MASTER_ADDR": "run-node-0-0.run",
    "PET_MASTER_PORT": "29400",
}


def node(number: int, ranks: int, world: int, meeting: str) -> Placement:
    """One that starts the ranks of node `number`."""
    return Placement(number * ranks, 0, world, meeting, local_size=ranks, starts=ranks)


@pytest.mark.parametrize(
    "env, placement",
    [
        (TWO_NODES, Placement(1, 0, 2, "tcp://n1:15001", local_size=1)),
        ({**TWO_NODES, "PHALANX_RANKS_PER_NODE": "8"}, node(1, 8, 16, "tcp://n1:15001")),
        ({**TWO_NODES, "SLURM_GPUS_ON_NODE": "4"}, node(1, 4, 8, "tcp://n1:15001")),
        ({**TWO_NODES, "SLURM_GPUS_ON_NODE": "4", "PHALANX_RANKS_PER_NODE": "1"}, Placement(1, 0, 2, "tcp://n1:15001")),
        (TWO_NODES | HOOK, Placement(1, 0, 2, "tcp://n1:15001", local_size=1)),
        ({**TWO_NODES, **HOOK, "PHALANX_RANKS_PER_NODE": "8"}, node(1, 8, 16, "tcp://n1:15001")),
        ({**TWO_NODES, **HOOK, "SLURM_GPUS_ON_NODE": "4"}, node(1, 4, 8, "tcp://n1:15001")),
        # what somebody has set stays
        ({**TWO_NODES, **HOOK, "MASTER_ADDR": "n1-ib", "MASTER_PORT": "9"}, Placement(1, 0, 2, "tcp://n1-ib:9")),
        ({k: v for k, v in HOOK.items() if k != "MASTER_ADDR"} | TWO_NODES, Placement(1, 0, 2, "tcp://n1:15001")),
        (HETEROGENEOUS, Placement(2, 1, 3, "tcp://n2:15002", local_size=2)),
        (OPEN_MPI, Placement(1, 1, 2, f"tcp://127.0.0.1:{MPI_PORT}", local_size=2)),
        ({**OPEN_MPI, "MASTER_ADDR": "a", "MASTER_PORT": "9"}, Placement(1, 1, 2, "tcp://a:9", local_size=2)),
        (
            {**TWO_NODES, **OPEN_MPI},
            Placement(1, 1, 2, f"tcp://127.0.0.1:{MPI_PORT}", local_size=2),
        ),  # mpirun inside a step
        (INDEXED, Placement(1, 0, 4, "tcp://run-0.run:29500", local_size=1)),
        ({**INDEXED, "PHALANX_RANKS_PER_NODE": "8"}, node(1, 8, 32, "tcp://run-0.run:29500")),
        (BY_HAND, Placement(1, 0, 2, "tcp://10.0.0.1:15001", local_size=1)),
        ({**BY_HAND, "PHALANX_RANKS_PER_NODE": "8"}, node(1, 8, 16, "tcp://10.0.0.1:15001")),
        ({"PHALANX_NODE": "0", "PHALANX_NODES": "1"}, Placement(local_size=1)),
        ({"JOB_COMPLETION_INDEX": "3"}, None),  # an Indexed Job of runs that have nothing to do with each other
        (TRAIN_JOB, node(1, 8, 16, "tcp://run-node-0-0.run:29400")),
        ({**TRAIN_JOB, "RANK": "1", "WORLD_SIZE": "2"}, node(1, 8, 16, "tcp://run-node-0-0.run:29400")),  # PyTorchJob
        ({**TRAIN_JOB, "PET_NNODES": "1", "PET_NODE_RANK": "0"}, node(0, 8, 8, "")),
    ],
)
def test_the_place_of_a_process(env, placement):
    found, problems = read_placement(env)
    assert problems == []
    assert found == (placement if placement is None or placement.local_size else replace(placement, local_size=1))


def test_the_secret_is_taken_over_where_ranks_of_several_nodes_meet():
    found, _ = read_placement({**TWO_NODES, "PHALANX_RANKS_PER_NODE": "8", "PHALANX_RUN_SECRET": SECRET})
    assert found is not None and found.secret == SECRET


@pytest.mark.parametrize(
    "env, field, because",
    [
        # RANK and WORLD_SIZE left in a shell: every task would be rank 0
        ({**TWO_NODES, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "9"}, "RANK", "SLURM_PROCID"),
        ({**TWO_NODES, "RANK": "0", "WORLD_SIZE": "1"}, "RANK", "SLURM_STEP_NUM_TASKS"),
        ({**TWO_NODES, **OPEN_MPI, "SLURM_PROCID": "0"}, "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"),
        ({**HETEROGENEOUS, "PHALANX_RANKS_PER_NODE": "8"}, "PHALANX_RANKS_PER_NODE", "SLURM_PROCID"),
        ({k: v for k, v in OPEN_MPI.items() if "LOCAL_SIZE" not in k}, "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "MASTER_ADDR", "OMPI_COMM_WORLD_SIZE"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK", ""),
        ({**INDEXED, "JOB_COMPLETION_INDEX": "4"}, "JOB_COMPLETION_INDEX", "PHALANX_NODES"),
        ({**BY_HAND, "PHALANX_NODE": "2"}, "PHALANX_NODE", "PHALANX_NODES"),
        ({k: v for k, v in BY_HAND.items() if k != "MASTER_PORT"}, "MASTER_PORT", "PHALANX_NODE"),
        ({**BY_HAND, **TWO_NODES, "SLURM_PROCID": "0"}, "PHALANX_NODE", "SLURM_PROCID"),
        ({**TRAIN_JOB, "PET_NPROC_PER_NODE": "some"}, "PET_NPROC_PER_NODE", ""),
        ({**TRAIN_JOB, "PET_NNODES": "1:4"}, "PET_NNODES", ""),
        ({**TWO_NODES, "PHALANX_ENDS_AT": "soon"}, "PHALANX_ENDS_AT", ""),
    ],
)
def test_contradictions_are_one_error_with_all_variables(env, field, because):
    found, [problem] = read_placement(env)
    assert found is None and problem.field == field and problem.where == "the environment"
    assert because in str(problem) or because == "PMIX"


def test_torchrun_inside_a_launcher_of_one_task_per_node_is_no_contradiction():
    inner = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "9"}
    assert read_placement({**TWO_NODES, **inner, "TORCHELASTIC_RUN_ID": "none"})[0] == Placement(9, 1, 16, "tcp://a:9")
    assert read_placement({**TWO_NODES, **inner})[0] == Placement(9, 1, 16, "tcp://a:9")  # started by a script
    assert read_placement({**TWO_NODES, **HOOK, **inner})[0] == Placement(9, 1, 16, "tcp://a:9")


def test_a_host_file_gives_nodes_their_order(tmp_path):
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("n2 slots=8  # first\n\nn1\n")
    env = {**TWO_NODES, "PHALANX_HOST_FILE": str(hosts), "PHALANX_RANKS_PER_NODE": "8"}
    assert read_placement(env)[0] == node(0, 8, 16, "tcp://n2:15001")
    assert read_placement({**env, "SLURMD_NODENAME": "n1", "SLURM_PROCID": "0"})[0] == node(1, 8, 16, "tcp://n2:15001")
    # in a container of pyxis, whose runtime takes the first of SLURM's list
    assert read_placement(env | HOOK)[0] == node(0, 8, 16, "tcp://n2:15001")
    hosts.write_text(f"elsewhere\n{socket.gethostname()}\n")  # without a scheduler
    plain = {"PHALANX_HOST_FILE": str(hosts), "PHALANX_RANKS_PER_NODE": "2"}
    assert read_placement(plain)[0] == node(1, 2, 4, "tcp://elsewhere:29511")


@pytest.mark.parametrize(
    "text, said",
    [
        ("n1\nn2\nn3\n", "names 3 hosts, and must name the 2 nodes on which tasks were started"),
        ("n2\nn2\n", "must name each host once"),
        ("n3\nn4\n", "must name this host on one of its lines"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_a_host_file_that_cannot_be_right(tmp_path, text, said):
    hosts = tmp_path / "hosts.txt"
    if text is not None:
        hosts.write_text(text)
    found, [problem] = read_placement({**TWO_NODES, "PHALANX_HOST_FILE": str(hosts)})
    assert found is None and said in problem.rule


@pytest.mark.parametrize(
    "text, names",
    [
        ("n[1-3,7],x", ["n1", "n2", "n3", "n7", "x"]),
        ("n[07-10]", ["n07", "n08", "n09", "n10"]),
        ("rack[1-2]n[01-02]-ib", ["rack1n01-ib", "rack1n02-ib", "rack2n01-ib", "rack2n02-ib"]),
    ],
)
def test_lists_of_hosts(text, names):
    assert expand(text) == names


# ---- a wrong MASTER_ADDR -------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {family: llama, vocab_size: 64, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, "
        "num_attention_heads: 2}\ntrain: {steps: 9, global_batch: 2, micro_batch: 1, seq_length: 8, device: cpu}\n"
        "data: {mock: true}\nlog: {report: false}\n"
    )
    return str(path)


@pytest.mark.soak
def test_a_first_host_that_does_not_resolve_is_named_at_once(warm, config, tmp_path):
    """By the name service of this machine; tests/preflight/test_first_seconds.py asks none."""
    env = {**TWO_NODES, "MASTER_ADDR": "no-such-host.invalid"}
    done = warm.phalanx("train", config, f"dir={tmp_path / 'run'}", env=env)
    assert done.returncode == 2 and "MASTER_ADDR='no-such-host.invalid'" in done.stderr, done.stderr
    assert "must be the name or address of rank 0's host, but this host cannot reach it (" in done.stderr


def watching(env: dict[str, str]) -> list[threading.Thread]:
    first_host.watch_first_host(env)
    return [thread for thread in threading.enumerate() if thread.name == first_host.THREAD]


def test_a_rank_that_cannot_reach_rank_0_says_where_and_why(monkeypatch, capsys, deaf):
    """127.0.0.1 is not waited for, because there a launcher listens first; another name of this machine is."""
    monkeypatch.setattr(first_host, "SAY_S", 0.0)
    host, port = socket.gethostname(), deaf.getsockname()[1]
    with pytest.raises(PeerLost, match=f"rank 3 on host {host} cannot reach rank 0 at {host}:{port}"):
        reach.reach(host, port, 3, 0.1)
    there = {**BY_HAND, "MASTER_ADDR": host, "MASTER_PORT": str(port), "PHALANX_RANKS_PER_NODE": "8"}
    [watch] = watching(there)
    assert watching(there) == [watch]  # one process says it once
    heard: list[str] = []

    def line() -> bool:
        heard.append(capsys.readouterr().err)
        return heard[-1].endswith("\n")

    until(line, lambda: f"a line, but {heard}")
    said = "".join(heard)
    assert said.startswith(
        f"warning: rank 8 on host {host} cannot reach rank 0 at {host}:{port} (Connection refused); "
    )
    assert said.endswith("Is MASTER_ADDR rank 0's host, and is this port open there?\n")
    deaf.listen()
    watch.join(60)
    assert not watch.is_alive() and capsys.readouterr().err == ""


def test_where_rank_0_is_watched_for():
    """Only where others start processes on several hosts, and not where torchrun serves them."""
    for env, where in (
        (TWO_NODES, ("n1", 15001)),
        (BY_HAND, ("10.0.0.1", 15001)),
        ({**BY_HAND, "PHALANX_NODE": "0", "PHALANX_RANKS_PER_NODE": "8"}, ("10.0.0.1", 15001)),
        (OPEN_MPI, None),
        ({**TRAIN_JOB, "PET_NNODES": "1", "PET_NODE_RANK": "0"}, None),
        ({**INDEXED, "MASTER_ADDR": "localhost"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **HOOK}, None),
    ):
        placement, problems = read_placement(env)
        assert problems == [] and placement is not None
        assert first_host.first_host_of(placement, env) == where, env
    assert (
        "torch"
        not in subprocess.run(
            [sys.executable, "-c", "import sys, phalanx.launch.first_host; print(*sys.modules)"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
    )


def test_rank_0_is_told_at_once_if_its_name_leads_elsewhere(deaf):
    """A rank, and a node that starts its ranks: before it starts any."""
    with pytest.raises(ConfigError, match="MASTER_ADDR='127.0.0.2': must be the name or address of rank 0's host"):
        reach.reach_myself("127.0.0.2", deaf.getsockname()[1])
    node = Placement(0, 0, 4, f"tcp://127.0.0.2:{free_port()}?listen=127.0.0.1", starts=2)
    with pytest.raises(ConfigError, match="rank 0 listens, and cannot be reached under that name at port"):
        local.start("no.such:target", {}, 2, node=node)


# ---- the end of a job ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["layout.tp=1", "layout.tp=2"])
def test_a_run_stops_and_saves_before_its_job_ends(warm, config, tmp_path, layout):
    """In this process, and in ranks that it starts. The job is over already; a step is read when the next is done.
    What rank 0 says is in a file of its own too."""
    logs = tmp_path / "run/logs/ranks"
    env = {"PHALANX_ENDS_AT": str(int(time.time()) - 1), "PHALANX_RANK_LOGS": str(logs)}
    done = warm.phalanx("train", config, layout, f"dir={tmp_path / 'run'}", env=env)
    assert done.returncode == 75 and re.search("saved step [12];", done.stderr), done
    [first, *others] = sorted(path.name for path in logs.iterdir())
    assert first == "rank-00000.log" and others in ([], ["rank-00001.log"])
    said = warm.phalanx("logs", str(tmp_path / "run"), "--rank", "0").stdout.splitlines()
    assert said[0].startswith("--- start of 20") and "".join(said[1:]) in "".join(
        (done.stdout + done.stderr).split("\n")
    )
    nothing = warm.phalanx("logs", str(tmp_path / "run"), "--rank", "7")
    assert nothing.returncode == 1 and "rank 7 has said nothing yet" in nothing.stderr


def test_time_is_kept_for_the_last_save():
    stop = StopRequest(ends_at=time.time() + 10_000)
    try:
        assert not stop.asked()
        stop.reserve = lambda: 9_000.0
        assert not stop.asked()
        stop.reserve = lambda: 11_000.0
        assert stop.asked()
    finally:
        stop.restore()


def test_python_does_not_start_the_ranks_of_a_node(config, monkeypatch):
    for name, value in {**TWO_NODES, "PHALANX_RANKS_PER_NODE": "8"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="PHALANX_RANKS_PER_NODE=8: asks for ranks that this process would have to"):
        px.train(px.load(config))


# ---- what the ranks of a node run with -----------------------------------------------------------


def machine(root: Path, gpus: dict[str, str]) -> Path:
    """/proc and /sys of a machine with NVIDIA's GPUs: address -> CPUs of its NUMA node."""
    for number, (address, cpus) in enumerate(gpus.items()):
        about, device = root / "proc/driver/nvidia/gpus" / address, root / "sys/bus/pci/devices" / address
        about.mkdir(parents=True)
        device.mkdir(parents=True)
        (about / "information").write_text(f"Model: \t NVIDIA\nGPU UUID: \t GPU-{number}a\nDevice Minor: \t {number}\n")
        (device / "local_cpulist").write_text(f"{cpus}\n")
    return root


FOUR = {
    "0000:18:00.0": "0-7,16-23",
    "0000:3a:00.0": "0-7,16-23",
    "0000:86:00.0": "8-15,24-31",
    "0000:af:00.0": "8-15,24-31",
}


def test_each_rank_has_the_cpus_next_to_its_gpu(tmp_path):
    root, every = machine(tmp_path, FOUR), frozenset(range(32))
    found = node_settings({}, {"NCCL_SOCKET_IFNAME": "ib0"}, 4, every, root)
    assert [span_text(cpus) for cpus in found.cpus] == ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]
    assert found.chosen == {"OMP_NUM_THREADS": "8", "NCCL_SOCKET_IFNAME": "ib0"} and found.given == {}
    assert found.text("n1", 0).endswith("(no expandable segments: CUDA graphs and symmetric memory)")
    eager = node_settings({}, {}, 1, every, root, cuda_graphs=False)  # nothing is in the way: a command to try
    assert eager.text("n1", 0).endswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)")
    assert not any("ALLOC" in name for name in (*found.chosen, *eager.chosen))
    chosen = node_settings({}, {"CUDA_VISIBLE_DEVICES": "2,GPU-0a"}, 2, every, root)
    assert [span_text(cpus) for cpus in chosen.cpus] == ["8-15,24-31", "0-7,16-23"]
    part = node_settings({}, {}, 4, parse_cpus("2-5,8-15"), root)
    assert [span_text(cpus) for cpus in part.cpus] == ["2-3", "4-5", "8-11", "12-15"]
    assert node_settings({}, {}, 4, frozenset({0, 1}), root).cpus is None  # a rank would have none
    assert node_settings({}, {}, 5, every, root).cpus is None  # fewer GPUs than ranks


def test_what_the_user_has_set_wins_and_is_shown(tmp_path):
    mine = {"OMP_NUM_THREADS": "3", "OMP_PROC_BIND": "close", "GLOO_SOCKET_IFNAME": "eth1"}
    mine["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    found = node_settings(
        mine, {**mine, "NCCL_SOCKET_IFNAME": "eth0"}, 4, frozenset(range(32)), machine(tmp_path, FOUR)
    )
    assert found.cpus is None and found.chosen == {"NCCL_SOCKET_IFNAME": "eth0"} and found.given == mine
    yours = "OMP_NUM_THREADS=3", "GLOO_SOCKET_IFNAME=eth1", "OMP_PROC_BIND=close"
    shown = "; yours: ".join(("", *yours, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"))
    assert found.text("n1", 8).endswith(f"NCCL_SOCKET_IFNAME=eth0{shown}")
    assert allowed_cpus() and node_settings({}, {}, 2, allowed_cpus()).cpus is None  # this machine has no GPU
    assert found.allocator == node_settings({}, {}, 2, allowed_cpus()).allocator == ""

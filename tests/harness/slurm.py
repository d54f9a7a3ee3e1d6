"""A real SLURM on this machine: munged, slurmctld and two slurmd of the packages slurm-wlm and munge, in a temporary
folder, with ports of their own. No service of the system is used or changed.

The nodes `n1` and `n2` have a mount namespace in which their names mean this machine, and so has the server of warm
processes (tests/harness/warm.py) with which `program` starts phalanx. Needs root; `missing()` says what else lacks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from tests.harness.pool import free_ports
from tests.harness.warm import Warm

NODES = ("n1", "n2")
PROGRAMS = ("sbatch", "slurmctld", "slurmd", "munged")
WAIT_S = 150.0
CPUS = 4  # that each node claims to have
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=4000 State=UNKNOWN\n"
CONFIG = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=30
MessageTimeout=60
KillWait=5
MinJobAge=600
ReturnToService=2
SlurmdParameters=config_overrides
PropagateResourceLimitsExcept=NOFILE
{more}
PartitionName=main Nodes={nodes} Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=60 OverSubscribe=NO
PartitionName=high Nodes={nodes} MaxTime=30 State=UP PriorityTier=10 OverSubscribe=NO
"""


def missing() -> str:
    """Why there is no SLURM here; empty: there can be one."""
    if os.geteuid() != 0:
        return "a SLURM of one's own needs root"
    lacking = [name for name in (*PROGRAMS, "unshare") if which(name) is None]
    if lacking:
        return f"no {', '.join(lacking)}: apt-get install --no-install-recommends slurm-wlm munge"
    tried = subprocess.run(["unshare", "-m", "true"], capture_output=True, text=True)
    return f"mount namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else ""


def which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")


def until(done: Callable[[], object], what: Callable[[], str], seconds: float = WAIT_S) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"after {seconds:g} s still not: {what()}"
        time.sleep(0.05)


class Slurm:
    """The daemons; `env` is what clients need (SLURM_CONF), `program` what starts phalanx on a node. topology: a
    topology.conf; few_files: nodes on which a process may open only this many."""

    def __init__(
        self, nodes: tuple[str, ...] = NODES, topology: str = "", few_files: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        self.nodes, self._topology, self._few_files = nodes, topology, few_files
        self._place = tempfile.TemporaryDirectory(prefix="slurm-")
        self.folder = Path(self._place.name)
        self.env = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        hosts = self.folder / "hosts"
        hosts.write_text(f"127.0.0.1 localhost {' '.join(nodes)}\n")
        bind = f'mount --make-rprivate / && mount --bind {hosts} /etc/hosts && exec "$@"'
        self.inside = ("unshare", "-m", "sh", "-c", bind, "sh")
        self.warm = Warm(inside=self.inside)
        self.program = str(self.warm.folder / "phalanx")
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> Slurm:
        self.warm.start()
        ctld, *ports = free_ports(1 + len(self.nodes))
        host = socket.gethostname()
        more = "".join(NODE.format(name=name, host=host, port=port, cpus=CPUS) for name, port in zip(self.nodes, ports))
        if self._topology:
            more += "TopologyPlugin=topology/tree\n"
            (self.folder / "topology.conf").write_text(self._topology)
        (self.folder / "state").mkdir()
        names = ",".join(self.nodes)
        (self.folder / "slurm.conf").write_text(CONFIG.format(folder=self.folder, ctld=ctld, nodes=names, more=more))
        self._start_munge()
        self._daemon("slurmctld", "slurmctld", "-D")
        for name in self.nodes:
            self.start_node(name)
        until(lambda: self.states() == {"idle": len(self.nodes)}, lambda: f"all nodes idle ({self.states()})")
        return self

    def _start_munge(self) -> None:
        os.chmod(self.folder, 0o755)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        paths = {"key-file": key, "socket": self.folder / "munge.socket"}
        paths |= {f"{name}-file": self.folder / f"munged.{name}" for name in ("pid", "log", "seed")}
        self._daemon("munged", "munged", "-F", "--force", *(f"--{name}={path}" for name, path in paths.items()))
        until((self.folder / "munge.socket").exists, lambda: "munged listens")

    def _daemon(self, name: str, *words: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as out:
            self._daemons[name] = subprocess.Popen(
                [which(words[0]) or words[0], *words[1:]],
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def start_node(self, name: str) -> None:
        (self.folder / name).mkdir(exist_ok=True)
        few = self._few_files.get(name)
        limited = ("prlimit", f"--nofile={few}:{few}") if few else ()
        self._daemon(name, *self.inside, *limited, which("slurmd") or "slurmd", "-D", "-N", name)

    def kill_node(self, name: str) -> None:
        """As a power cut: the daemon and every process that it or its steps started are killed at once."""
        daemon = self._daemons[name]
        for pid in [*self._processes(f"SLURMD_NODENAME={name}"), daemon.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.wait()

    def lost(self) -> list[str]:
        """Nodes whose daemon was killed."""
        return [name for name in self.nodes if self._daemons[name].poll() is not None]

    def ask(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(
            words, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def states(self) -> dict[str, int]:
        rows = self.ask("sinfo", "-h", "-p", "main", "-o", "%D %T", check=False).splitlines()
        return {state: int(count) for count, state in map(str.split, rows)}

    def job(self, job: str) -> dict[str, str]:
        """A job as `scontrol show job` shows it."""
        text = self.ask("scontrol", "show", "job", "-o", job, check=False)
        return dict(word.partition("=")[::2] for word in text.split() if "=" in word)

    def tasks(self, job: str) -> list[int]:
        """Processes of the first step of a job."""
        return self._processes(f"SLURM_JOB_ID={job}", "SLURM_STEP_ID=0")

    def listening(self, port: int) -> bool:
        """Whether something listens at a port of this machine."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return any(row[3] == "0A" and row[1].endswith(f":{port:04X}") for row in rows)

    def over_on_nodes(self, job: str) -> bool:
        """Whether no daemon of a step of the job, or of its script, is left on a node."""
        with contextlib.suppress(OSError):  # one that has just ended
            words = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in self._processes()]
            return not any(text.startswith(f"slurmstepd: [{job}.".encode()) for text in words)
        return False

    def _processes(self, *marks: str) -> list[int]:
        """Processes of this SLURM, and of no other on this machine, whose environment has the marks: daemons and jobs
        have its SLURM_CONF, what runs on a node has SLURMD_NODENAME too."""
        wanted = {mark.encode() for mark in (f"SLURM_CONF={self.env['SLURM_CONF']}", *marks)}
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted <= set((path / "environ").read_bytes().split(b"\0")):
                    found.append(int(path.name))
        return found

    def what_is_there(self) -> str:
        """Jobs and nodes, and why they are so, for the message of a test."""
        jobs = self.ask("squeue", "--states=all", "--format=%i %T %r %S", check=False)
        return f"{jobs}\n{self.ask('sinfo', '--Node', '--format=%N %T %E', check=False)}"

    def close(self) -> None:
        self.ask("scancel", "--full", "--signal=KILL", "--user=root", check=False)
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for daemon in reversed(self._daemons.values()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()
        self.warm.close()
        self._place.cleanup()

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
from collections.abc import Callable
from pathlib import Path

from tests.harness.warm import Warm

NODES = ("n1", "n2")
PROGRAMS = ("sbatch", "slurmctld", "slurmd", "munged")
WAIT_S = 150.0
CPUS = 4  # that each node claims to have
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
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=5
MinJobAge=600
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1} CPUs={cpus} RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2} CPUs={cpus} RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=60 OverSubscribe=NO
PartitionName=high Nodes=n1,n2 MaxTime=30 State=UP PriorityTier=10 OverSubscribe=NO
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


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [s.getsockname()[1] for s in sockets]


def until(done: Callable[[], object], what: Callable[[], str], seconds: float = WAIT_S) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"after {seconds:g} s still not: {what()}"
        time.sleep(0.05)


class Slurm:
    """The daemons; `env` is what clients need (SLURM_CONF), `program` what starts phalanx on a node."""

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="slurm-")
        self.folder = Path(self._place.name)
        self.env = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        hosts = self.folder / "hosts"
        hosts.write_text(f"127.0.0.1 localhost {' '.join(NODES)}\n")
        bind = f'mount --make-rprivate / && mount --bind {hosts} /etc/hosts && exec "$@"'
        self.inside = ("unshare", "-m", "sh", "-c", bind, "sh")
        self.warm = Warm(inside=self.inside)
        self.program = str(self.warm.folder / "phalanx")
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> Slurm:
        self.warm.start()
        ports = dict(zip(("ctld", *NODES), free_ports(3)))
        host = socket.gethostname()
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(CONFIG.format(folder=self.folder, host=host, cpus=CPUS, **ports))
        self._start_munge()
        self._daemon("slurmctld", "slurmctld", "-D")
        for name in NODES:
            self.start_node(name)
        until(lambda: self.states() == {"idle": 2}, lambda: f"both nodes idle ({self.states()})")
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
        self._daemon(name, *self.inside, which("slurmd") or "slurmd", "-D", "-N", name)

    def kill_node(self, name: str) -> None:
        """As a power cut: the daemon and every process that it or its steps started are killed at once."""
        daemon = self._daemons[name]
        for pid in [*steps_of(name), daemon.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.wait()

    def lost(self) -> list[str]:
        """Nodes whose daemon was killed."""
        return [name for name in NODES if self._daemons[name].poll() is not None]

    def ask(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(
            words, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=30, check=False
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

    def over_on_nodes(self, job: str) -> bool:
        """Whether no daemon of a step of the job, or of its script, is left on a node."""
        words = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
        with contextlib.suppress(OSError):  # one that has just ended
            return not any(text.startswith(f"slurmstepd: [{job}.".encode()) for text in words)
        return False

    def what_is_there(self) -> str:
        """Jobs and nodes, and why they are so, for the message of a test."""
        jobs = self.ask("squeue", "--states=all", "--format=%i %T %r %S", check=False)
        return f"{jobs}\n{self.ask('sinfo', '--Node', '--format=%N %T %E', check=False)}"

    def close(self) -> None:
        self.ask("scancel", "--full", "--signal=KILL", "--user=root", check=False)
        for name in reversed(self._daemons):
            for pid in steps_of(name) if name in NODES else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            daemon = self._daemons[name]
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()
        self.warm.close()
        self._place.cleanup()


def steps_of(name: str) -> list[int]:
    """Processes of jobs on a node, by what SLURM puts into their environment, and the daemons of its steps."""
    mark, found = f"SLURMD_NODENAME={name}\0".encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(path.name) != os.getpid() and mark in (path / "environ").read_bytes() + b"\0":
                found.append(int(path.name))
    return found

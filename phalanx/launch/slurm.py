"""SLURM: the batch script of a job, what is asked of the scheduler before it is submitted, and its submission."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import ConfigError, Problem
from phalanx.base.placement import SECRET
from phalanx.config.cluster import seconds_of
from phalanx.config.validate import close_to
from phalanx.launch.ends import ENDS_AT
from phalanx.launch.env import PER_NODE
from phalanx.launch.hosts import HOST_FILE
from phalanx.launch.job import FINAL, SLURM, ClusterJob
from phalanx.launch.network import INTERFACE
from phalanx.launch.programs import SchedulerRefused, ask
from phalanx.launch.rank_log import FOLDER
from phalanx.launch.submitted import logs_of
from phalanx.launch.template import template
from phalanx.layout.positions import Positions, from_topology_conf

SWITCHES_WAIT = "1:00:00"  # for nodes that hang together, before others are taken
OWN_VARIABLES = (PER_NODE, INTERFACE, FOLDER, SECRET, ENDS_AT, HOST_FILE)  # that the script sets
PROGRAMS = ("sbatch", "squeue", "sinfo", "scontrol", "scancel")


def write(job: ClusterJob) -> str:
    """The batch script, to be read and kept."""
    nodes = "-".join(str(count + job.spares) for count in dict.fromkeys(job.nodes))
    return template("slurm.sbatch").render(
        job=job,
        nodes=nodes,
        options=options_of(job),
        logs=logs_of(job.folder),
        step_options=step_options(job),
        final=FINAL,
    )


def options_of(job: ClusterJob) -> list[str]:
    """Lines of #SBATCH that depend on the cluster."""
    c = job.cluster
    given = {
        "partition": c.partition,
        "account": c.account,
        "qos": c.qos,
        "constraint": c.constraint,
        "gpus-per-node": c.gpus_per_node,
        "cpus-per-task": c.cpus_per_node,
        "mem": c.memory,
        "switches": c.switches or (f"{job.switches}@{SWITCHES_WAIT}" if job.switches else None),
        "time": None if job.time_s is None else slurm_time(job.time_s),
        "nodelist": ",".join(job.hosts) or None,
        "comment": f"phalanx {job.folder}",
    }
    lines = [f"--{name}={shlex.quote(str(value))}" for name, value in given.items() if value is not None]
    return [*lines, "--exclusive"] if c.exclusive else lines


def step_options(job: ClusterJob) -> str:
    """Options of srun: CPUs, which since SLURM 22.05 it does not take over from the job, and a container (pyxis).

    Tasks per node are the step's: asked of the job, they would keep a range of nodes at its fewest.
    """
    c = job.cluster
    words = ["--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=60", "--cpu-bind=none"]
    if c.cpus_per_node is not None:
        words.append(f"--cpus-per-task={c.cpus_per_node}")
    if c.image is not None:
        seen = [job.workdir, job.folder, *(path for path in outside(job) if not path.is_relative_to(job.workdir))]
        mounts = [f"{path}:{path}" for path in dict.fromkeys(seen)] + c.mounts
        words += [f"--container-image={c.image}", f"--container-mounts={','.join(mounts)}"]
        words.append(f"--container-workdir={job.workdir}")
        # without it the values of an image win
        words.append(f"--container-env={','.join((*c.environment, *c.secrets, *OWN_VARIABLES))}")
    return shlex.join(words)


def outside(job: ClusterJob) -> list[Path]:
    """Files that steps read beside those of the working folder, if they lie elsewhere."""
    found = [Path(job.words[0])] if job.words else []
    found += [Path(job.topology)] if job.topology not in (None, SLURM) else []
    return [path for path in found if path.is_absolute()]


def slurm_time(seconds: int) -> str:
    """3661 -> 0-01:01:01; SLURM's own form, without rounding."""
    days, rest = divmod(seconds, 86400)
    return f"{days}-{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"


def least_switches(positions: Positions, nodes: int) -> int | None:
    """How few domains of the innermost level hold so many nodes; None if the nodes of the positions are too few, or
    those of one domain alone."""
    if not positions.levels:
        return None
    sizes = Counter(of for of in positions.of.values() if of[-1])
    left = nodes
    for count, (_, size) in enumerate(sizes.most_common(), 1):
        left -= size
        if left <= 0:
            return count
    return None


def topology_now() -> Positions:
    """Positions by the scheduler's own topology. SchedulerRefused or BadPositions if it has none."""
    return from_topology_conf(ask("scontrol", "show", "topology"))


# ---- asking the scheduler ------------------------------------------------------------------------


@dataclass(frozen=True)
class SlurmPartition:
    """A partition: its nodes, the longest time of a job (None: any), whether it is the default and takes jobs."""

    name: str
    nodes: int
    most_s: int | None
    default: bool = False
    up: bool = True


def partitions() -> list[SlurmPartition]:
    """What `sinfo` lists. PhalanxError if it does not answer."""
    rows: dict[str, SlurmPartition] = {}
    for line in ask("sinfo", "--noheader", "--format=%P|%a|%D|%l").splitlines():
        name, state, nodes, limit = (word.strip() for word in line.split("|"))
        before = rows.get(name)  # a row for each kind of node
        total = int(nodes) + (before.nodes if before else 0)
        rows[name] = SlurmPartition(name.rstrip("*"), total, seconds_of(limit), name.endswith("*"), state == "up")
    return list(rows.values())


def check_with_scheduler(job: ClusterJob, script: Path) -> None:
    """Whether the job can ever start, by what the scheduler says of itself. ConfigError with all problems at once."""
    known = partitions()
    wanted = job.cluster.partition
    found = [p for p in known if (p.default if wanted is None else p.name == wanted)]
    if wanted is not None and not found:
        names = tuple(p.name for p in known)
        rule = "is no partition of this cluster"
        raise ConfigError([Problem("cluster.partition", wanted, rule, {}, close_to(wanted, names) or names)])
    problems = [problem for partition in found for problem in check_partition(job, partition)]
    if not problems:
        problems = test_only(script)
    if problems:
        raise ConfigError(problems)


def check_partition(job: ClusterJob, partition: SlurmPartition) -> list[Problem]:
    because = {"partition": partition.name}
    found = []
    least = job.nodes[0] + job.spares
    if least > partition.nodes:
        rule = "must be <= the nodes of the partition"
        found.append(Problem("--nodes", least, rule, {**because, "its nodes": partition.nodes}, (partition.nodes,)))
    if job.time_s is not None and partition.most_s is not None and job.time_s > partition.most_s:
        most = slurm_time(partition.most_s)
        rule = "must be <= the time limit of the partition (the job is queued again until the run is done)"
        found.append(Problem("--time", slurm_time(job.time_s), rule, {**because, "its limit": most}, (most,)))
    if not partition.up:
        found.append(Problem("cluster.partition", partition.name, "takes no jobs now: it is not up"))
    return found


def test_only(script: Path) -> list[Problem]:
    """What `sbatch --test-only` refuses: accounts, features, limits of users."""
    try:
        ask("sbatch", "--test-only", str(script))
    except SchedulerRefused as error:
        return [Problem("sbatch", str(script), f"is refused by the scheduler: {error.said}")]
    return []


def submit(script: Path) -> str:
    """Submit a script; returns the job's number."""
    return ask("sbatch", "--parsable", str(script)).partition(";")[0]

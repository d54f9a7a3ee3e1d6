"""ClusterJob: what a run asks of a scheduler. Each writer (slurm.py, ...) turns one into a script or manifest; nothing
here talks to a scheduler."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import ConfigError, Problem
from phalanx.base.rules import default_of, no_effect
from phalanx.base.version import VERSION
from phalanx.config.cluster import ClusterConfig, seconds_of
from phalanx.config.run import Run

FINAL = (2, 3, 4, 5, 7, 8)  # exit codes of ends that a restart would meet again
SLURM = "slurm"  # for a topology: the scheduler is asked
KEPT_SAVES = 2  # times the slowest save: what the trainer keeps for the last one (training/main.py)
# Keys of the section `cluster` that not every way of launching reads, and which do.
READ_BY = {
    **dict.fromkeys(("partition", "account", "qos", "constraint", "exclusive", "switches"), ("slurm",)),
    "time": ("slurm", "ssh"),
    **dict.fromkeys(("namespace", "queue"), ("k8s", "rayjob")),
    **dict.fromkeys(("topology", "rdma", "nvlink_domain", "user"), ("k8s", "rayjob")),
    **dict.fromkeys(("image", "mounts"), ("slurm", "ssh", "k8s", "rayjob", "sky")),  # ssh says more of it itself
}
COMMANDS = {"rayjob": "ray --kind rayjob"}
MOST_LAYOUTS = 64  # numbers of nodes in a range, of which each is checked


@dataclass(frozen=True)
class ClusterJob:
    """
    typed       the command that asked for this job, which every generated file begins with
    folder      of the run, absolute
    workdir     where relative paths of the config lie
    words       what is trained: config and overrides, as they were typed
    nodes       fewest and most
    layouts     overrides for a number of ranks, where they differ from `words`
    time_s      longest time of one job; None: the scheduler's default
    chain       instead of requeueing itself, this many jobs one after the other; None: it requeues itself
    hosts       the nodes to take, in the order that ranks are to have; empty: the scheduler's choice and order
    preflight   the nodes are checked before ranks start
    spares      nodes that are asked for beyond `nodes`: the preflight leaves out bad ones
    topology    a file that says where nodes are, or SLURM: it is asked when the job starts. None: ranks have the
                scheduler's order
    switches    leaf switches that `nodes` need at least, by the topology; None: not known
    """

    typed: str
    folder: Path
    workdir: Path
    words: tuple[str, ...]
    nodes: tuple[int, int]
    cluster: ClusterConfig
    layouts: Mapping[int, tuple[str, ...]]
    time_s: int | None = None
    chain: int | None = None
    hosts: tuple[str, ...] = ()
    preflight: bool = False
    spares: int = 0
    topology: str | None = None
    switches: int | None = None

    @property
    def name(self) -> str:
        return re.sub(r"[^\w.-]", "-", self.folder.name) or "run"

    @property
    def worlds(self) -> list[int]:
        """Numbers of ranks that the job may have."""
        least, most = self.nodes
        return [nodes * self.cluster.ranks for nodes in range(least, most + 1)]

    @property
    def command(self) -> str:
        """The shell words that start one node's ranks."""
        return f"{self.cluster.program} {shlex.join(('train', *self.words))}"

    @property
    def header(self) -> list[str]:
        """The first lines of a generated file, without the mark of a comment."""
        return [
            self.typed,
            f"Written by phalanx {VERSION}. Read it, change it, keep it; it can be submitted without phalanx launch.",
        ]


@dataclass(frozen=True)
class JobOptions:
    """What `phalanx launch` was given beside the config; None: the section `cluster` says it. by: who launches,
    a name in READ_BY."""

    nodes: str = "1"
    time: str | None = None
    partition: str | None = None
    chain: int | None = None
    at: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    preflight: bool = False
    spares: int = 0
    topology: str | None = None
    by: str = "slurm"

    @property
    def in_pods(self) -> bool:
        """Whether it runs in pods of Kubernetes."""
        return self.by in ("k8s", "rayjob")

    @property
    def fixed(self) -> bool:
        """Whether it takes one number of nodes."""
        return self.by not in ("slurm", "k8s", "ray")


def job_of(typed: str, words: tuple[str, ...], run: Run, options: JobOptions) -> ClusterJob:
    """The job that trains `run`. ConfigError with all problems of the options."""
    cluster = run.cluster or ClusterConfig()
    if options.partition is not None:
        cluster = replace(cluster, partition=options.partition)
    workdir = working_folder_of_pods(cluster) if options.in_pods else Path.cwd()
    nodes, problems = node_range(options.nodes)
    if options.fixed and nodes[0] != nodes[1]:
        rule = f"must be one number: `phalanx launch {command_of(options.by)}` starts all of them together"
        problems.append(Problem("--nodes", options.nodes, rule, {}, nodes, "command line"))
    time = options.time or cluster.time
    time_s = None if time is None else seconds_of(time)
    if options.time is not None and time_s is None:
        rule = "must be a time with its unit (24h, 90m, 2d) or as SLURM writes it (1-12:00:00, 01:30:00)"
        problems.append(Problem("--time", options.time, rule, {}, ("24h",), "command line"))
    elif time_s is not None and time_s <= cluster.grace_s:
        rule = "must be longer than the time that is kept for the last save"
        because, near = {"cluster.grace_s": cluster.grace_s}, (f"{2 * cluster.grace_s}s",)
        problems.append(Problem("--time", time, rule, because, near, "command line"))
    if options.hosts and nodes != (len(options.hosts),) * 2:
        rule, because = "must be the number of hosts that are named", {"hosts": len(options.hosts)}
        problems.append(Problem("--nodes", options.nodes, rule, because, (len(options.hosts),), "command line"))
    problems += unread(cluster, options.by)
    if options.spares and nodes[0] != nodes[1]:
        rule = "is for one number of nodes: a range takes what is free"
        problems.append(Problem("--spares", options.spares, rule, {"--nodes": options.nodes}, (0,), "command line"))
    job = ClusterJob(
        typed,
        workdir / run.dir,
        workdir,
        words,
        nodes,
        cluster,
        {},
        time_s,
        options.chain,
        options.hosts,
        options.preflight,
        options.spares,
        options.topology,
    )
    layouts, wrong = layouts_at(options.at, job)
    if problems + wrong:
        raise ConfigError(problems + wrong)
    return replace(job, layouts=layouts)


def working_folder_of_pods(cluster: ClusterConfig) -> Path:
    """Where relative paths of a config lie in a pod: in its first volume."""
    first = next(iter(cluster.mounts), "")
    return Path(first.partition(":")[2] or "/")


def command_of(by: str) -> str:
    """What follows `phalanx launch`."""
    return COMMANDS.get(by, by)


def unread(cluster: ClusterConfig, by: str) -> list[Problem]:
    """Keys of the section that are set, and for which the way that was chosen has no place."""
    found = []
    for name, readers in READ_BY.items():
        if by == "ssh" and "slurm" in readers:
            continue  # a file that both share: over ssh nobody is asked for anything
        value, default = getattr(cluster, name), default_of(ClusterConfig, name)
        if value != default and by not in readers:
            others = " and ".join(f"`phalanx launch {command_of(reader)}`" for reader in readers)
            rule = (
                f"is not read by `phalanx launch {command_of(by)}`, only by {others}; --cluster FILE "
                "names another file of this section"
            )
            found.append(Problem(f"cluster.{name}", value, rule, {}, (default,)))
    if cluster.mounts and cluster.image is None and by != "sky":
        found += no_effect("cluster", cluster, ("mounts",), "cluster.image", {"cluster.image": None})
    return found


def node_range(text: str) -> tuple[tuple[int, int], list[Problem]]:
    """`16` -> (16, 16), `4-8` -> (4, 8)."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if 1 <= least <= most < least + MOST_LAYOUTS:
        return (least, most), []
    rule = f"must be a number of nodes, or a range of at most {MOST_LAYOUTS} such as 4-8"
    return (1, 1), [Problem("--nodes", text, rule, {}, ("1", "4-8"), "command line")]


def layouts_at(given: tuple[str, ...], job: ClusterJob) -> tuple[dict[int, tuple[str, ...]], list[Problem]]:
    """Of `8:layout.tp=2,layout.pp=2`: overrides by number of ranks."""
    found: dict[int, tuple[str, ...]] = {}
    problems = []
    for text in given:
        ranks, _, overrides = text.partition(":")
        valid = tuple(f"{world}:layout.tp=2" for world in job.worlds[:3])
        if not ranks.isdigit() or "=" not in overrides:
            rule = "must be RANKS:OVERRIDES"
            problems.append(Problem("--at", text, rule, {}, valid, "command line"))
        elif int(ranks) not in job.worlds or int(ranks) in found:
            rule = "must be for a number of ranks that the job may have, once for each"
            because = {"nodes": "-".join(map(str, dict.fromkeys(job.nodes))), "ranks of a node": job.cluster.ranks}
            problems.append(Problem("--at", text, rule, because, valid, "command line"))
        else:
            found[int(ranks)] = tuple(re.split(r",(?=[A-Za-z_.]+=)", overrides))
    return found, problems


def check_layouts(job: ClusterJob, check: Callable[[tuple[str, ...], int], list[Problem]]) -> None:
    """ConfigError unless the run can be trained on every number of nodes that the job may have. check: problems of a
    run with more overrides on a number of ranks."""
    found: dict[str, Problem] = {}
    for world in job.worlds:
        for problem in check(job.layouts.get(world, ()), world):
            if len(job.worlds) > 1:
                advice = (
                    f"on {world} ranks, which the range of nodes allows (--at {world}:... gives them another layout)"
                )
                problem = replace(problem, rule=f"{problem.rule} {advice}")
            found.setdefault(str(problem), problem)
    if found:
        raise ConfigError(list(found.values()))


def check_saves(job: ClusterJob) -> None:
    """ConfigError if the job's time is too short for the saves that the run has made so far, by its log."""
    slowest = slowest_save(job.folder / "log.txt")
    if job.time_s is not None and job.time_s <= KEPT_SAVES * slowest:
        rule = "must leave time for the last save"
        because = {"the slowest save so far, in s": slowest}
        near = (f"{round(4 * KEPT_SAVES * slowest)}s",)
        raise ConfigError([Problem("--time", f"{job.time_s}s", rule, because, near, "command line")])


def slowest_save(log: Path) -> float:
    """Seconds of the slowest save that a run's log tells of; 0 if there is none."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    return max((float(found) for found in re.findall(r" saved \S+ \(in (\d+(?:\.\d+)?) s", text)), default=0.0)

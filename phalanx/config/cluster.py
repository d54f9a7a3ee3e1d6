"""The section `cluster`: where and how `phalanx launch` starts a run. It says nothing of what is computed, so ranks do
not compare it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import field

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, no_effect, problem

FILE = "cluster.yaml"  # beside a config: a file that holds this section alone
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RESOURCE = re.compile(r"[a-z0-9][-a-z0-9.]*/[A-Za-z0-9][-A-Za-z0-9_.]*")
SECRET_NAME = re.compile(r"(?i)secret|passw|credential|api_?key|access_?key|(auth|access|hf|api|wandb)_?(token|key)")
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LEAST_GRACE_S = 5


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Where `phalanx launch` starts the run: nodes, queue, environment. It may also stand in a file cluster.yaml beside
    the config."""

    partition: str | None = None
    """SLURM partition; unset: the scheduler's default."""
    account: str | None = None
    """Account that is charged for the job; unset: the user's default."""
    qos: str | None = None
    """SLURM quality of service; unset: the default of the account."""
    constraint: str | None = None
    """Features that nodes must have, as SLURM writes them, such as h100&nvlink; unset: any node."""
    gpus_per_node: int | None = None
    """GPUs that are asked for on each node; unset: none."""
    ranks_per_node: int | None = None
    """Ranks that run on each node; unset: one for each of cluster.gpus_per_node, without GPUs one."""
    cpus_per_node: int | None = None
    """CPUs that are asked for on each node; unset: what the scheduler gives."""
    memory: str | None = None
    """Memory of each node as SLURM writes it, such as 500G; 0 (SLURM alone): all of it; unset: what the scheduler
    gives."""
    exclusive: bool = True
    """Share nodes with no other job."""
    switches: str | None = None
    """Most leaf switches that the nodes may hang on, and for how long the job waits for that: 1@6:00:00; unset: any
    number."""
    time: str | None = None
    """Longest time of a job, such as 24h, 90m or SLURM's 1-12:00:00; unset: the scheduler's default."""
    grace_s: int = 120
    """Seconds before the end of a job's time at which the run is asked to save and stop."""
    max_restarts: int = 10
    """Restarts after failures that may pass, such as a lost node. Preempted runs are started again without limit."""
    program: str = "phalanx"
    """Words that start phalanx on a node, such as "/shared/venv/bin/python -m phalanx"."""
    setup: list[str] = field(default_factory=list)
    """Lines of shell that the job runs first, such as "module load cuda"."""
    environment: dict[str, str | int | float] = field(default_factory=dict)
    """Environment variables of the job: name and value."""
    secrets: dict[str, str] = field(default_factory=dict)
    """Environment variables whose values are looked up when the job starts: name and file, on Kubernetes name and
    SECRET/KEY of a Secret there. Only the reference is written anywhere."""
    interface: str | None = None
    """Network interface between the nodes (PHALANX_INTERFACE); unset: the one by which rank 0 is reached."""
    image: str | None = None
    """Container image that the ranks run in (SLURM: with the plugin pyxis); unset: none."""
    mounts: list[str] = field(default_factory=list)
    """Folders of the node inside the container, as HOST:INSIDE; on Kubernetes volumes, as CLAIM:INSIDE, where relative
    paths of the config lie in the first; on clouds (SkyPilot) buckets or volumes, as s3://BUCKET:INSIDE."""
    namespace: str | None = None
    """Kubernetes namespace; unset: that of the context of kubectl."""
    queue: str | None = None
    """Kueue queue (LocalQueue) of the namespace; unset: the job is not queued."""
    topology: str | None = None
    """Node label, such as topology.kubernetes.io/rack, of which all pods should lie in one value (Kueue's preferred
    topology); unset: anywhere. In a file of this section also a map: where nodes are, for the order of hosts."""
    rdma: dict[str, int] = field(default_factory=dict)
    """RDMA devices of each pod, by the name of the cluster's device plugin, such as {rdma/ib: 8}."""
    nvlink_domain: bool = False
    """Let GPUs of all pods reach each other over NVLink (NVIDIA's ComputeDomain: GB200 NVL72 and the like)."""
    user: int | None = None
    """Number of the user and group of the processes in a pod; unset: the image's, which must be a number."""

    @property
    def ranks(self) -> int:
        """Ranks of each node."""
        return self.ranks_per_node or self.gpus_per_node or 1


def check_cluster(c: ClusterConfig | None) -> list[Problem]:
    """The rules of the section."""
    if c is None:
        return []
    found = at_least("cluster", c, 1, "gpus_per_node", "ranks_per_node", "cpus_per_node")
    found += at_least("cluster", c, 0, "max_restarts") + at_least("cluster", c, LEAST_GRACE_S, "grace_s")
    found += at_least("cluster", c, 1, "user")  # no pod of ours runs as root
    if c.gpus_per_node is not None and c.ranks_per_node is not None and c.ranks_per_node > c.gpus_per_node >= 1:
        rule, because = "must be <= the GPUs of a node", {"cluster.gpus_per_node": c.gpus_per_node}
        found.append(problem("cluster", c, "ranks_per_node", rule, because, (c.gpus_per_node,)))
    if c.time is not None and (seconds := seconds_of(c.time)) is None:
        rule = "must be a time with its unit (24h, 90m, 2d) or as SLURM writes it (1-12:00:00, 01:30:00)"
        found.append(problem("cluster", c, "time", rule, {}, ("24h",)))
    elif c.time is not None and seconds is not None and seconds <= c.grace_s:
        rule = "must be longer than the time that is kept for the last save"
        found.append(problem("cluster", c, "time", rule, {"cluster.grace_s": c.grace_s}, (f"{2 * c.grace_s}s",)))
    if not c.program.split():
        found.append(problem("cluster", c, "program", "must name a program", {}, ("phalanx",)))
    if c.topology is not None and c.queue is None:
        found += no_effect("cluster", c, ("topology",), "cluster.queue", {"cluster.queue": None})
    if c.nvlink_domain and c.gpus_per_node is None:
        found += no_effect("cluster", c, ("nvlink_domain",), "cluster.gpus_per_node", {"cluster.gpus_per_node": None})
    for name, devices in c.rdma.items():
        if devices < 1 or RESOURCE.fullmatch(name) is None:
            rule = "must be a resource of a device plugin, DOMAIN/NAME, and how many a pod gets"
            found.append(Problem(f"cluster.rdma.{name}", devices, rule, {}, ("rdma/ib: 1",)))
    return found + check_variables(c)


def check_variables(c: ClusterConfig) -> list[Problem]:
    """Names of environment variables, and no secret among the values, which are written into the job's script."""
    found = []
    for section, held in (("environment", c.environment), ("secrets", c.secrets)):
        for name in held:
            if NAME.fullmatch(name) is None:
                rule = "must be the name of an environment variable: letters, digits and _"
                found.append(Problem(f"cluster.{section}.{name}", "(not shown)", rule))
    for name in held_secrets(c.environment):
        rule = (
            f"looks like a secret, which must not be written into a script: cluster.secrets.{name}=FILE reads it there"
        )
        found.append(Problem(f"cluster.environment.{name}", "(not shown)", rule))
    return found


def held_secrets(environment: Iterable[str]) -> list[str]:
    return [name for name in environment if SECRET_NAME.search(name)]


def seconds_of(text: str) -> int | None:
    """Seconds of 24h, 90m, 45s or 2d, or of SLURM's hours:minutes:seconds with or without days; None if it is neither.
    A number without a unit is none: SLURM takes it for minutes, others for seconds."""
    if found := re.fullmatch(r"(\d+)\s*([smhd])", text.strip()):
        return int(found[1]) * UNITS_S[found[2]]
    if found := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d{1,2})(?::(\d{1,2}))?", text.strip()):
        days, first, second, third = (None if part is None else int(part) for part in found.groups())
        if days is not None and third is None:  # days-hours:minutes
            return days * 86400 + (first or 0) * 3600 + (second or 0) * 60
        if third is None:  # minutes:seconds
            return (first or 0) * 60 + (second or 0)
        return (days or 0) * 86400 + (first or 0) * 3600 + (second or 0) * 60 + third
    return None

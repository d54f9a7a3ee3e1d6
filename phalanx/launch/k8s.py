"""Kubernetes: the manifests of a job as an Indexed Job, a JobSet or a TrainJob of Kubeflow, as text. Talks to no server
(kube_api.py does)."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from textwrap import indent
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import ConfigError, Problem
from phalanx.base.placement import SECRET
from phalanx.base.rules import problem
from phalanx.launch.env import NODES, PER_NODE
from phalanx.launch.job import FINAL, ClusterJob
from phalanx.launch.rank_log import FOLDER
from phalanx.launch.ray_jobs import runtime_env
from phalanx.launch.submitted import logs_of

KINDS = ("job", "jobset", "trainjob", "rayjob")
PORT = 29500  # where node 0 listens: each pod has an address of its own
CONFIGS = "/etc/phalanx"  # where the config lies in a pod
LONGEST_NAME = 63  # characters of a host name
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")  # of DNS
DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
KEY = re.compile(r"[-._A-Za-z0-9]+")
NODE_LABEL = re.compile(r"([a-z0-9][-a-z0-9.]*/)?[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?")
MEMORY = re.compile(r"([1-9]\d*)([KMGT]?)")  # as SLURM writes it: powers of 1024, MiB without a letter
# The letter in brackets keeps grep from finding itself.
STOP = (
    "for p in /proc/[0-9]*; do grep -qs 'launch-nod[e]' $p/cmdline && kill -TERM ${p#/proc/}; done; "
    "while grep -qs 'launch-nod[e]' /proc/[0-9]*/cmdline; do sleep 1; done"
)
RUN_SECRET = "run-secret"  # key of the Secret that the pods of a run share


@dataclass(frozen=True)
class PodSpec:
    """What the pods of a job have in common, as the templates write it.

    name        of every object of the job
    count       pods, one for each node
    subdomain   of the pods' host names; empty where a controller sets it
    config      text of the run's config, and config_name the file's name
    command     what the container runs
    secrets     variable -> (Secret, key in it)
    mounts      (claim, folder inside) of each volume
    stop        of a pod whose first process is Ray's: words of a shell that ask the run to save, and wait for it
    least       fewest pods with which the job may be admitted (Kueue); None: all of them
    """

    name: str
    count: int
    subdomain: str
    config: str
    config_name: str
    command: list[str]
    environment: dict[str, str]
    secrets: dict[str, tuple[str, str]]
    mounts: list[tuple[str, str]]
    resources: dict[str, Any]
    labels: dict[str, str]
    make_secret: str
    stop: str = STOP
    final: tuple[int, ...] = FINAL
    least: int | None = None


def write(job: ClusterJob, kind: str, config: Path) -> str:
    """The manifests, to be read and kept. kind: one of KINDS. ConfigError with all problems."""
    if problems := check(job, kind, config):
        raise ConfigError(problems)
    env = Environment(
        loader=PackageLoader("phalanx.launch"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    env.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
    env.filters["literal"] = literal
    env.filters["combine"] = lambda first, second: {**first, **second}
    env.filters["block"] = block
    env.filters["join_quoted"] = shlex.join
    pods = pods_of(job, kind, config)
    return env.get_template(f"k8s_{kind}.yaml").render(job=job, pods=pods, runtime_env=runtime_env(job))


def pods_of(job: ClusterJob, kind: str, config: Path) -> PodSpec:
    c, name, count = job.cluster, name_of(job), job.nodes[1]
    first = f"{name}-0" if kind == "job" else f"{name}-node-0-0"
    environment = {"HOME": "/tmp"}
    if kind != "rayjob":
        environment |= {PER_NODE: str(c.ranks), FOLDER: str(logs_of(job.folder) / "ranks")}
    if kind in ("job", "jobset"):
        environment |= {} if ranged(job) else {NODES: str(count)}
        environment |= {"MASTER_ADDR": f"{first}.{name}", "MASTER_PORT": str(PORT)}
    if c.interface is not None:
        environment["PHALANX_INTERFACE"] = c.interface
    environment |= {key: str(value) for key, value in c.environment.items()}
    secrets = {} if kind == "rayjob" else {SECRET: (name, RUN_SECRET)}
    secrets |= {key: (where.partition("/")[0], where.partition("/")[2]) for key, where in c.secrets.items()}
    namespace = f" --namespace {c.namespace}" if c.namespace else ""
    return PodSpec(
        name,
        count,
        name if kind == "job" else "",
        config.read_text(encoding="utf-8"),
        config.name,
        driver_of(job) if kind == "rayjob" else [unexpanded(word) for word in command_of(job)],
        {key: unexpanded(value) for key, value in environment.items()},
        secrets,
        [split_mount(mount) for mount in c.mounts],
        resources_of(job),
        {"app.kubernetes.io/name": "phalanx", "app.kubernetes.io/instance": name},
        f"kubectl create secret generic {name}{namespace} --from-literal={RUN_SECRET}=$(openssl rand -hex 32)",
        least=job.nodes[0] if ranged(job) else None,
    )


def ranged(job: ClusterJob) -> bool:
    """Whether the job takes a range of nodes."""
    return job.nodes[0] != job.nodes[1]


def command_of(job: ClusterJob) -> list[str]:
    """What a pod runs; a shell first only if there are lines for it, and then in its place, so that signals arrive."""
    words = [*shlex.split(job.cluster.program), "train", *job.words, *only_layout(job)]
    if not job.cluster.setup and not ranged(job):
        return words
    lines = ["set -e", *job.cluster.setup, *(layout_lines(job) if ranged(job) else ['exec "$@"'])]
    return ["/bin/bash", "-c", "\n".join(lines), "bash", *words]


def only_layout(job: ClusterJob) -> tuple[str, ...]:
    """Overrides for the number of ranks that the job has; those of a range are chosen in the pods."""
    return () if ranged(job) else job.layouts.get(job.worlds[0], ())


def layout_lines(job: ClusterJob) -> list[str]:
    """Lines of bash that ask how many pods were admitted, and start the run in the layout for so many."""
    cases = [f"  {ranks}) layout=({shlex.join(overrides)}) ;;" for ranks, overrides in job.layouts.items()]
    return [
        f"{NODES}=$({job.cluster.program} launch-pods {name_of(job)})",
        f"export {NODES}",
        "layout=()",
        *([f"case $(({NODES} * {PER_NODE})) in", *cases, "esac"] if cases else []),
        'exec "$@" "${layout[@]}"',
    ]


def driver_of(job: ClusterJob) -> list[str]:
    """The entry point of a Ray job in pods: of the section `cluster` it needs what nodes are asked for and do. Their
    environment, secrets and volumes are those of the pods."""
    c = job.cluster
    kept = ("gpus_per_node", "ranks_per_node", "cpus_per_node", "memory", "grace_s", "max_restarts", "program", "setup")
    section = json.dumps({name: getattr(c, name) for name in kept})
    words = [word for word in (*job.words, *only_layout(job)) if word != "cluster=null"]
    return [*shlex.split(c.program), "launch-ray", "--nodes", str(job.nodes[0]), *words, f"cluster={section}"]


def unexpanded(text: str) -> str:
    """Kubernetes puts variables for $(NAME) in commands and values; $$ stands for $."""
    return text.replace("$(", "$$(")


def resources_of(job: ClusterJob) -> dict[str, Any]:
    c = job.cluster
    memory = None if c.memory is None else quantity(c.memory)
    devices = {"nvidia.com/gpu": c.gpus_per_node, **c.rdma}
    requests = {"cpu": c.cpus_per_node, "memory": memory}
    limits = {name: str(value) for name, value in {**devices, "memory": memory}.items() if value is not None}
    found: dict[str, Any] = {
        "requests": {name: str(value) for name, value in requests.items() if value is not None},
        "limits": limits,
    }
    if c.nvlink_domain:
        found["claims"] = [{"name": "nvlink"}]
    return {name: value for name, value in found.items() if value}


def quantity(memory: str) -> str | None:
    """`500G` -> `500Gi`; None: not an amount of memory."""
    found = MEMORY.fullmatch(memory)
    return None if found is None else f"{found[1]}{found[2] or 'M'}i"


def split_mount(mount: str) -> tuple[str, str]:
    claim, _, inside = mount.partition(":")
    return claim, inside


def name_of(job: ClusterJob) -> str:
    """Of the run's folder, as DNS takes it."""
    name = re.sub(r"[^a-z0-9-]+", "-", job.name.lower()).strip("-")
    return name if name[:1].isalpha() else f"run-{name}".strip("-")


def block(text: str, width: int) -> str:
    """What a macro wrote, for a line that begins with `width` spaces."""
    return indent(text.strip("\n"), " " * width).lstrip(" ")


def literal(text: str) -> str:
    """A text as a value of YAML, to be indented: as it stands if YAML can hold it so, else in quotes."""
    lines = text.rstrip("\n").split("\n")
    return "\n".join(["|2", *lines]) if all(line.isprintable() for line in lines) else json.dumps(text)


# ---- what cannot work ----------------------------------------------------------------------------


def check(job: ClusterJob, kind: str, config: Path) -> list[Problem]:
    """What Kubernetes would refuse, or what would be lost with a pod."""
    found = check_names(job, kind, config) + check_volumes(job) + check_range(job, kind)
    c = job.cluster
    if c.image is None:
        rule = "must be set, by --image or in the config: pods run in an image that holds phalanx"
        found.append(problem("cluster", c, "image", rule, {}, ("registry.example.org/phalanx:1",)))
    if c.memory is not None and quantity(c.memory) is None:
        rule = "must be an amount on Kubernetes: a number > 0 with K, M, G or T, of powers of 1024"
        found.append(problem("cluster", c, "memory", rule, {}, ("500G",)))
    for name, where in c.secrets.items():
        secret, _, key = where.partition("/")
        if DOMAIN.fullmatch(secret) is None or KEY.fullmatch(key) is None:
            rule = "must be SECRET/KEY on Kubernetes: a Secret of the namespace, and the key of the value in it"
            found.append(Problem(f"cluster.secrets.{name}", where, rule, {}, ("hugging-face/token",)))
    return found


def check_names(job: ClusterJob, kind: str, config: Path) -> list[Problem]:
    c, name = job.cluster, name_of(job)
    found = []
    last = f"{name}-{job.nodes[1] - 1}" if kind == "job" else f"{name}-node-0-{job.nodes[1] - 1}"
    if len(last) > LONGEST_NAME:
        rule = f"must end in a shorter name: host names of pods have at most {LONGEST_NAME} characters"
        found.append(Problem("dir", job.folder.name, rule, {"the last pod's": last}))
    for key, pattern in (("namespace", LABEL), ("queue", DOMAIN), ("topology", NODE_LABEL)):
        value = getattr(c, key)
        if value is not None and pattern.fullmatch(value) is None:
            found.append(problem("cluster", c, key, "must be a name as Kubernetes allows it: a-z, 0-9 and -"))
    if KEY.fullmatch(config.name) is None:
        found.append(Problem("CONFIG", config.name, "must be a file name of letters, digits, -, _ and . alone"))
    return found


def check_range(job: ClusterJob, kind: str) -> list[Problem]:
    """Only Kueue starts a job with fewer pods than it asks for, and of our kinds only an Indexed Job."""
    if not ranged(job):
        return []
    text, found = "-".join(map(str, job.nodes)), []
    if kind != "job":
        rule = "must be one number for this kind: only --kind job may start with fewer pods (Kueue's partial admission)"
        found.append(Problem("--nodes", text, rule, {"--kind": kind}, job.nodes, "command line"))
    elif job.cluster.queue is None:
        rule = (
            "is a range, which needs a queue of Kueue, by --queue or in the config: it admits as many pods as there is"
        )
        found.append(Problem("--nodes", text, f"{rule} room for", {"cluster.queue": None}, job.nodes, "command line"))
    return found


def check_volumes(job: ClusterJob) -> list[Problem]:
    """Volumes that are claims, and a run that is kept in one of them."""
    c = job.cluster
    found, folders = [], []
    for mount in c.mounts:
        claim, inside = split_mount(mount)
        folders.append(Path(inside))
        if DOMAIN.fullmatch(claim) is None or not inside.startswith("/") or ".." in inside or ":" in inside:
            rule = "must be CLAIM:INSIDE on Kubernetes: a PersistentVolumeClaim of the namespace, and where it appears"
            found.append(Problem("cluster.mounts", mount, rule, {}, ("runs:/runs",)))
    if not found and not any(job.folder.is_relative_to(folder) for folder in folders):
        rule = "must lie in a volume of cluster.mounts: what a pod writes elsewhere is lost with it"
        found.append(
            Problem("dir", str(job.folder), rule, {"cluster.mounts": c.mounts}, ("cluster.mounts=[runs:/runs]",))
        )
    return found

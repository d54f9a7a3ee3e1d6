"""SkyPilot: the task of a run on machines of a cloud, and its launch by the program sky. Which cloud has the machines,
and at what price, is SkyPilot's to find out."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import ConfigError, Problem
from phalanx.base.placement import SECRET
from phalanx.config.run import Run
from phalanx.launch.env import PORT
from phalanx.launch.job import ClusterJob
from phalanx.launch.k8s import name_of
from phalanx.launch.programs import NoScheduler, SchedulerRefused
from phalanx.launch.template import template

GPUS_OF_A_MACHINE = 8  # where the section `cluster` does not say it: what clouds' largest machines have
GPUS = re.compile(r"([1-9]\d*)[xX:]([A-Za-z][\w.-]*)")
MEMORY = re.compile(r"([1-9]\d*)([KMGT]?)")
GIB = {"K": 2**-20, "": 2**-10, "M": 2**-10, "G": 1, "T": 2**10}


@dataclass(frozen=True)
class CloudGpus:
    """GPUs in all, their kind as SkyPilot calls it, and how many of them a machine has."""

    count: int
    kind: str
    each: int

    @property
    def nodes(self) -> int:
        return self.count // self.each


def gpus_asked(text: str, each: int | None) -> CloudGpus:
    """Of 64xH100. each: GPUs of a machine, if the section `cluster` says so. ConfigError for another form, or a part of
    a machine."""
    found = GPUS.fullmatch(text)
    if found is None:
        rule = "must be how many GPUs of which kind"
        raise ConfigError([Problem("--gpus", text, rule, {}, ("64xH100",), "command line")])
    count, kind = int(found[1]), found[2]
    per_node = each or min(count, GPUS_OF_A_MACHINE)
    if count % per_node:
        rule, near = "must be whole machines", (f"{max(1, count // per_node) * per_node}x{kind}",)
        because = {"cluster.gpus_per_node": per_node}
        raise ConfigError([Problem("--gpus", text, rule, because, near, "command line")])
    return CloudGpus(count, kind, per_node)


def write(job: ClusterJob, run: Run, gpus: CloudGpus, spot: bool, file: Path) -> str:
    """The task, to be read and kept. ConfigError with all problems."""
    job = replace(job, words=(Path(job.words[0]).as_posix(), *job.words[1:]))
    mounts = [mount.rpartition(":")[::2] for mount in job.cluster.mounts]
    if problems := check(job, run, mounts, spot):
        raise ConfigError(problems)
    return template("sky.yaml").render(
        job=job,
        name=name_of(job),
        spot=spot,
        accelerators=f"{gpus.kind}:{gpus.each}",
        memory=gibibytes(job.cluster.memory),
        buckets=[one for one in mounts if "://" in one[0]],
        volumes=[one for one in mounts if "://" not in one[0]],
        secrets=secrets_of(job),
        command=command_text(job, spot, file),
        port=PORT,
    )


def check(job: ClusterJob, run: Run, mounts: list[tuple[str, str]], spot: bool) -> list[Problem]:
    """What would not be there on the machines, or would be gone with them."""
    found = []
    config = Path(job.words[0])
    if config.is_absolute() or ".." in config.parts:
        rule = "must lie in this folder, which is what machines of a cloud get"
        found.append(Problem("CONFIG", str(config), rule, {}, (config.name,)))
    for given, (source, inside) in zip(job.cluster.mounts, mounts):
        if not source or not inside.startswith("/"):
            rule = "must be SOURCE:INSIDE on clouds: a bucket (s3://...) or a volume of SkyPilot, and where it appears"
            found.append(Problem("cluster.mounts", given, rule, {}, ("s3://my-bucket:/runs",)))
    kept = (run.checkpoint.dir or "").partition("://")[1] or any(
        inside and job.folder.is_relative_to(inside) for _, inside in mounts
    )
    if spot and not kept:
        rule = (
            "must be in object storage with --spot (or `dir` in one of cluster.mounts): other machines go on from the "
            "checkpoints, and what is on a machine is lost with it"
        )
        near = (f"s3://my-bucket/{job.name}",)
        found.append(Problem("checkpoint.dir", run.checkpoint.dir, rule, {"dir": str(job.folder)}, near))
    if job.cluster.memory is not None and gibibytes(job.cluster.memory) is None:
        rule = "must be an amount on clouds: a number > 0 with K, M, G or T"
        found.append(Problem("cluster.memory", job.cluster.memory, rule, {}, ("500G",)))
    return found


def gibibytes(memory: str | None) -> int | None:
    """Of 500G, as SLURM writes it; None: not an amount."""
    found = MEMORY.fullmatch(memory or "")
    return None if found is None else max(1, round(int(found[1]) * GIB[found[2]]))


def secrets_of(job: ClusterJob) -> list[str]:
    """Variables whose values travel with the launch: those of the section, and the run's own among several machines."""
    own = [SECRET] if job.nodes[0] > 1 and SECRET not in job.cluster.secrets else []
    return [*job.cluster.secrets, *own]


def command_of(job: ClusterJob, spot: bool, file: Path) -> list[str]:
    words = ["sky", "jobs", "launch"] if spot else ["sky", "launch", "--down", "--cluster", name_of(job)]
    return [*words, *(word for name in secrets_of(job) for word in ("--secret", name)), str(file)]


def command_text(job: ClusterJob, spot: bool, file: Path) -> str:
    """As a person would type it, with where the secrets come from."""
    values = [f'{name}="$(cat {path})"' for name, path in job.cluster.secrets.items()]
    if SECRET in secrets_of(job) and SECRET not in job.cluster.secrets:
        values.append(f"{SECRET}=$(openssl rand -hex 32)")
    return " ".join([*values, shlex.join(command_of(job, spot, file))])


def look_for_sky(command: str) -> None:
    """NoScheduler where there is no `sky`. command: what the user can type where there is one."""
    if shutil.which("sky") is None:
        raise NoScheduler(
            "SkyPilot is not here: looked for sky in PATH; pip install 'phalanx[sky]' (an environment of its own is "
            f"best), then {command}"
        )


def values_of_secrets(job: ClusterJob) -> dict[str, str]:
    """What is in the files of the section's secrets, and the run's own secret. ConfigError for a file that cannot be
    read."""
    values = {SECRET: os.environ.get(SECRET) or secrets.token_hex(32)}
    for name, path in job.cluster.secrets.items():
        try:
            values[name] = Path(path).expanduser().read_text(encoding="utf-8").strip()
        except OSError as error:
            rule = f"cannot be read ({error.strerror})"
            raise ConfigError([Problem(f"cluster.secrets.{name}", path, rule)]) from None
    return values


def launch(job: ClusterJob, spot: bool, file: Path, values: dict[str, str]) -> None:
    """Hand the task to sky, which shows what it does and asks before it costs money. values: of its secrets."""
    done = subprocess.run(command_of(job, spot, file), env={**os.environ, **values})
    if done.returncode != 0:
        raise SchedulerRefused(f"sky ended with exit status {done.returncode}")

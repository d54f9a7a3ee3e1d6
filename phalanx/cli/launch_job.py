"""What every way of `phalanx launch` begins with, and how a run is submitted once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from phalanx.cli.options import typed

AT = click.option(
    "--at",
    multiple=True,
    metavar="RANKS:a.b=c,...",
    help="Overrides for a number of ranks, for a range of nodes (may be given several times).",
)


def cluster_file_of(config: str, given: str | None) -> str | Path | None:
    """The file of the section `cluster`: the one that is named, or the one beside the config, if there is one."""
    from phalanx.config.cluster import FILE

    beside = Path(config).parent / FILE
    return given or (beside if beside.is_file() else None)


def job_asked(config: str, overrides: tuple[str, ...], cluster_file: str | None, options: Any) -> Any:
    """The job of a config and the options of `launch`, checked on every number of ranks that it may have."""
    from phalanx.base.errors import ConfigError, Problem
    from phalanx.cli.setup import all_problems, fail
    from phalanx.config.cluster_file import has_positions
    from phalanx.config.device_check import Facts
    from phalanx.config.read import read
    from phalanx.launch.job import check_layouts, check_saves, job_of

    cluster = cluster_file_of(config, cluster_file)
    if options.by not in ("slurm", "ssh") and has_positions(cluster):
        rule = "is read by `phalanx plan` and `phalanx launch slurm` alone: name another file with --cluster FILE"
        raise ConfigError([Problem("topology", "(positions of nodes)", rule, where=str(cluster))])
    loaded = read(config, overrides, cluster=cluster)
    if loaded.run is None:
        return fail(loaded.problems, None)
    job = job_of(typed(), words_alone(config, overrides), loaded.run, options)

    def problems(more: tuple[str, ...], world: int) -> Any:
        one = read(config, (*overrides, *more), cluster=cluster)
        return all_problems(one, Facts(world_size=world, local_ranks=job.cluster.ranks, files=False))

    check_layouts(job, problems)
    check_saves(job)
    return job


def words_alone(config: str, overrides: tuple[str, ...]) -> tuple[str, ...]:
    """What ranks are given: config and overrides without those of the section `cluster`. If what the config itself says
    there needs the file beside it, none of it."""
    from phalanx.config.cluster import check_cluster
    from phalanx.config.read import read

    words = (config, *trained_words(overrides))
    alone = read(config, words[1:])
    needs = alone.run is None or check_cluster(alone.run.cluster)
    return (*words, "cluster=null") if needs else words


def trained_words(overrides: tuple[str, ...]) -> list[str]:
    """Overrides without those of the section `cluster`, which is for the launch alone."""
    return [word for word in overrides if not word.startswith(("cluster.", "cluster="))]


def submit_once(job: Any, scheduler: str, server: str, script: Path, send: Callable[[], str]) -> str:
    """Submit a job unless the run has one, or runs already; returns the job's number. send: submits it."""
    from phalanx.base.errors import FolderInUse
    from phalanx.checkpoint.lock import FolderLock
    from phalanx.launch.status import busy
    from phalanx.launch.submitted import Submission, logs_of

    def refuse_second() -> None:
        there = busy(job.folder)
        if there is not None:
            raise FolderInUse(
                f"job {there.job} ({there.state}) already trains {job.folder}: cancel it with `{there.cancel}`, or "
                "choose another `dir`"
            )

    refuse_second()
    with FolderLock(job.folder) as lock:  # of a run that was not submitted, or a second launch at the same moment
        refuse_second()
        logs_of(job.folder).mkdir(parents=True, exist_ok=True)
        number = send()
        now = datetime.now(UTC).isoformat(timespec="seconds")
        Submission(scheduler, number, str(script.absolute()), job.typed, now, server).note(job.folder)
        lock.keep()
    return number


def show(file: Path, then: str) -> None:
    """The file that was written, and after it, on standard error, what came of it. What a scheduler refuses is not
    shown: its reason alone is."""
    click.echo(file.read_text(encoding="utf-8"), nl=False)
    click.echo(then, err=True)


def launch_manifest(config: str, overrides: tuple[str, ...], options: Any, asked: dict[str, Any]) -> None:
    """Write the manifests of a run for Kubernetes, show them, let the server try them, and apply them."""
    from phalanx.launch import k8s, kube_api

    given = tuple(f"cluster.{name}={asked[name]}" for name in ("image", "queue") if asked[name] is not None)
    job = job_asked(config, (*overrides, *given), asked["cluster"], options)
    # what a pod trains: the config lies elsewhere
    job = replace(job, words=(f"{k8s.CONFIGS}/{Path(config).name}", *trained_words(overrides), "cluster=null"))
    manifest = Path(asked["out"] or f"{Path(config).stem}.k8s.yaml")
    manifest.write_text(k8s.write(job, asked["kind"], Path(config)), encoding="utf-8")
    if asked["submit"] or (not asked["dry"] and kube_api.here()):
        server = kube_api.connect(job.cluster.namespace)
        documents = kube_api.documents_of(manifest.read_text(encoding="utf-8"))
        if asked["submit"]:
            server.refuse_second(documents)
        server.check(documents, job.cluster.queue)
        if asked["submit"]:
            name = server.submit(documents)
            show(manifest, f"submitted; `phalanx status {name}` shows it, `phalanx logs {name}` what it says")
            return
    namespace = f"--namespace {job.cluster.namespace} " if job.cluster.namespace else ""
    command = f"kubectl apply --server-side {namespace}-f {manifest}"
    show(manifest, f"wrote {manifest}; `{command}`, or the same command with --submit, starts it")

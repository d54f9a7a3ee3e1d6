"""`phalanx launch ray`: a run as a job of a running Ray cluster, or as a RayJob of Kubernetes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from phalanx.cli.launch_job import AT, cluster_file_of, job_asked, launch_manifest, show, submit_once
from phalanx.cli.options import CONFIG, OVERRIDES

CLUSTER = click.option(
    "--cluster", type=click.Path(dir_okay=False), default=None, help="File of the section `cluster`."
)


@click.command("ray", short_help="A job of a running Ray cluster, or a RayJob of Kubernetes.")
@CONFIG
@OVERRIDES
@click.option(
    "--nodes", default="1", show_default=True, metavar="N|N-M", help="Nodes, or a range: as many as are free."
)
@AT
@click.option(
    "--kind",
    type=click.Choice(["job", "rayjob"]),
    default="job",
    show_default=True,
    help="A job of a cluster that runs; the manifest of a RayJob (KubeRay).",
)
@click.option("--address", default=None, metavar="URL", help="Where the cluster takes jobs (RAY_API_SERVER_ADDRESS).")
@click.option("--image", default=None, help="With --kind rayjob: container image that holds phalanx and ray.")
@click.option("--queue", default=None, help="With --kind rayjob: Kueue queue (cluster.queue).")
@CLUSTER
@click.option("-o", "--out", type=click.Path(dir_okay=False), default=None, help="Script or manifest to write.")
@click.option("--submit", is_flag=True, help="Submit it.")
@click.option("--dry", is_flag=True, help="Write it without asking a server anything, as on a laptop.")
def launch_ray(config: str, overrides: tuple[str, ...], **asked: Any) -> None:
    """Write the job that trains CONFIG on N nodes of a Ray cluster, show it, and submit it with --submit.

    The job takes one bundle on each of N nodes and starts the run's ranks there, again and again until the run is done.
    Nodes need phalanx and this folder at the same paths, or what `cluster.program` and `cluster.setup` name.
    """
    from phalanx.launch import ray_jobs
    from phalanx.launch.job import JobOptions

    if asked["submit"] and asked["dry"]:
        raise click.UsageError("--dry submits nothing: give one of --submit and --dry")
    if asked["kind"] == "rayjob":
        if asked["address"] is not None:
            raise click.UsageError("--address is that of a cluster that runs: a RayJob starts its own")
        launch_manifest(config, overrides, JobOptions(asked["nodes"], at=asked["at"], by="rayjob"), asked)
        return
    if given := [name for name in ("image", "queue") if asked[name] is not None]:
        raise click.UsageError(f"--{given[0]} goes with --kind rayjob")
    job = job_asked(config, overrides, asked["cluster"], JobOptions(asked["nodes"], at=asked["at"], by="ray"))
    script = Path(asked["out"] or f"{Path(config).stem}.ray.sh")
    file = cluster_file_of(config, asked["cluster"])
    section = [] if file is None else ["--cluster", str(Path(file).absolute())]
    at = [word for text in asked["at"] for word in ("--at", text)]
    words = ["launch-ray", "--nodes", asked["nodes"], *at, *section, config, *overrides]
    script.write_text(ray_jobs.write(job, script, words), encoding="utf-8")
    if not asked["submit"]:
        show(script, f"wrote {script}; its first lines, or the same command with --submit, start it")
        return
    server = ray_jobs.server_of(asked["address"])
    number = submit_once(job, "ray", server, script, lambda: ray_jobs.submit(job, script, server))
    shows = f"`phalanx status {job.folder}` shows it, `phalanx logs {job.folder}` what it says"
    show(script, f"submitted job {number}; {shows}")


@click.command("launch-ray", hidden=True)
@CONFIG
@OVERRIDES
@click.option("--nodes", default="1")
@AT
@CLUSTER
def launch_on_ray(
    config: str, overrides: tuple[str, ...], nodes: str, at: tuple[str, ...], cluster: str | None
) -> None:
    """The entry point of the job that `phalanx launch ray` submits: on the cluster."""
    from phalanx.launch.job import JobOptions
    from phalanx.launch.ray_nodes import run_until_done

    job = job_asked(config, overrides, cluster, JobOptions(nodes, at=at, by="ray"))
    run_until_done(replace(job, words=(*job.words, "cluster=null")))

"""`phalanx launch sky`: a run on machines of a cloud, by SkyPilot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from phalanx.cli.launch_job import cluster_file_of, job_asked, show
from phalanx.cli.options import CONFIG, OVERRIDES


@click.command("sky", short_help="A task for SkyPilot: machines of a cloud.")
@CONFIG
@OVERRIDES
@click.option("--gpus", required=True, metavar="NxKIND", help="GPUs in all, and their kind: 64xH100.")
@click.option("--spot", is_flag=True, help="Machines that may be taken away, as a managed job that goes on elsewhere.")
@click.option("--image", default=None, help="Container image that holds phalanx (cluster.image).")
@click.option("--cluster", type=click.Path(dir_okay=False), default=None, help="File of the section `cluster`.")
@click.option("-o", "--out", type=click.Path(dir_okay=False), default=None, help="Task to write.")
@click.option("--submit", is_flag=True, help="Hand the task to sky, which asks before it costs money.")
@click.option("--dry", is_flag=True, help="Write it without asking anybody, as without --submit.")
def launch_sky(config: str, overrides: tuple[str, ...], **asked: Any) -> None:
    """Write the SkyPilot task that trains CONFIG on machines of a cloud, show it, and launch it with --submit.

    Machines get this folder; data and checkpoints are in buckets or volumes (`cluster.mounts`, `checkpoint.dir`).
    """
    from phalanx.config.cluster import ClusterConfig
    from phalanx.config.read import load_run, read
    from phalanx.launch import sky
    from phalanx.launch.job import JobOptions

    if asked["submit"] and asked["dry"]:
        raise click.UsageError("--dry launches nothing: give one of --submit and --dry")
    given = () if asked["image"] is None else (f"cluster.image={asked['image']}",)
    file = cluster_file_of(config, asked["cluster"])
    loaded = read(config, (*overrides, *given), cluster=file)
    cluster = ClusterConfig() if loaded.run is None or loaded.run.cluster is None else loaded.run.cluster
    gpus = sky.gpus_asked(asked["gpus"], cluster.gpus_per_node)
    words = (*overrides, *given, f"cluster.gpus_per_node={gpus.each}")
    job = job_asked(config, words, asked["cluster"], JobOptions(str(gpus.nodes), by="sky"))
    run = loaded.run or load_run(config, overrides)
    task = Path(asked["out"] or f"{Path(config).stem}.sky.yaml")
    task.write_text(sky.write(job, run, gpus, asked["spot"], task), encoding="utf-8")
    command = sky.command_text(job, asked["spot"], task)
    if asked["submit"]:
        sky.look_for_sky(command)
        secrets = sky.values_of_secrets(job)
        show(task, f"wrote {task}; sky asks before it launches it")
        sky.launch(job, asked["spot"], task, secrets)
        return
    show(task, f"wrote {task}; `{command}`, or the same command with --submit, launches it")

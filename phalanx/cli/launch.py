"""`phalanx launch`, `status` and `logs`: a run as a job of a scheduler, and what became of it."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from phalanx.base.placement import SECRET
from phalanx.cli.hosts import read_hosts as host_names
from phalanx.cli.launch_job import AT, cluster_file_of, job_asked, launch_manifest, show, submit_once
from phalanx.cli.launch_ray import launch_ray
from phalanx.cli.launch_sky import launch_sky
from phalanx.cli.options import CONFIG, OVERRIDES
from phalanx.cli.verbs import Verbs
from phalanx.launch.remote import SSH


@click.group(cls=Verbs)
def launch() -> None:
    """Write the job that trains a run on a cluster, and submit it.

    \b
      phalanx launch slurm run.yaml --nodes 16 --time 24h -p gpu            # writes and shows run.sbatch
      phalanx launch slurm run.yaml --nodes 16 --time 24h -p gpu --submit
      phalanx launch ssh run.yaml --hosts hosts.txt
      phalanx launch k8s run.yaml --nodes 16 --kind jobset --image IMAGE --queue team-a
      phalanx launch ray run.yaml --nodes 16
      phalanx launch sky run.yaml --gpus 64xH100 --spot
    """


@launch.command("slurm", short_help="A batch script for SLURM, submitted with --submit.")
@CONFIG
@OVERRIDES
@click.option("--nodes", default="1", show_default=True, metavar="N|N-M", help="Nodes, or a range of them.")
@click.option("--time", default=None, metavar="TIME", help="Longest time of a job: 24h, 90m, 1-12:00:00.")
@click.option("-p", "--partition", default=None, help="SLURM partition.")
@AT
@click.option(
    "--chain",
    type=click.IntRange(min=2),
    default=None,
    metavar="N",
    help="N jobs one after the other, for clusters where a job may not requeue itself.",
)
@click.option(
    "--hosts",
    type=click.Path(dir_okay=False, exists=True),
    default=None,
    metavar="FILE",
    help="The nodes to take, one a line, in the order that ranks are to have.",
)
@click.option("--preflight", is_flag=True, help="Check the nodes before ranks start; a bad one ends the job with 8.")
@click.option(
    "--spares",
    type=click.IntRange(min=1),
    default=None,
    metavar="K",
    help="With --preflight: ask for K nodes more, and start without bad ones.",
)
@click.option(
    "--topology",
    default=None,
    metavar="slurm|FILE",
    help="Order the nodes so that heavy axes stay near: by SLURM's own topology, or by a file (see phalanx plan; "
    "default: the cluster file, if it says where nodes are).",
)
@click.option("--cluster", type=click.Path(dir_okay=False), default=None, help="File of the section `cluster`.")
@click.option("-o", "--out", type=click.Path(dir_okay=False), default=None, help="Script to write.")
@click.option("--submit", is_flag=True, help="Submit the script.")
@click.option("--dry", is_flag=True, help="Write it without asking the scheduler anything, as on a laptop.")
def launch_slurm(config: str, overrides: tuple[str, ...], **asked: Any) -> None:
    """Write the batch script that trains CONFIG under SLURM, show it, and submit it with --submit.

    The job is queued again until the run is done. Partition, account, GPUs of a node and environment come from the
    section `cluster` of CONFIG, or from a file cluster.yaml beside it (`phalanx explain cluster`).
    """
    from phalanx.config.cluster_file import has_positions
    from phalanx.launch import slurm
    from phalanx.launch.job import JobOptions
    from phalanx.launch.programs import here, look_for
    from phalanx.launch.submitted import logs_of

    if asked["submit"] and asked["dry"]:
        raise click.UsageError("--dry submits nothing: give one of --submit and --dry")
    if asked["spares"] and not asked["preflight"]:
        raise click.UsageError("--spares goes with --preflight, which finds the nodes to leave out")
    if asked["hosts"] and (asked["spares"] or asked["topology"]):
        raise click.UsageError("--hosts says which nodes in which order: it takes neither --spares nor --topology")
    options = JobOptions(asked["nodes"], asked["time"], asked["partition"], asked["chain"], asked["at"])
    options = replace(options, preflight=asked["preflight"], spares=asked["spares"] or 0, topology=asked["topology"])
    file = cluster_file_of(config, asked["cluster"])
    if asked["hosts"]:
        options = replace(options, hosts=tuple(host_names(asked["hosts"])))
    elif asked["topology"] is None and asked["nodes"] != "1" and has_positions(file):
        options = replace(options, topology=str(file))
    job = with_switches(job_asked(config, overrides, asked["cluster"], options), not asked["dry"] and here("scontrol"))
    script = Path(asked["out"] or f"{Path(config).stem}.sbatch")
    if asked["submit"]:
        look_for("SLURM", *slurm.PROGRAMS)
    script.write_text(slurm.write(job), encoding="utf-8")
    if not asked["dry"] and here(*slurm.PROGRAMS):
        slurm.check_with_scheduler(job, script)
    if not asked["submit"]:
        start = f"mkdir -p {shlex.quote(str(logs_of(job.folder)))} && sbatch {shlex.quote(str(script))}"
        show(script, f"wrote {script}; the same command with --submit starts it, or `{start}`")
        return
    number = submit_once(job, "slurm", "", script, lambda: slurm.submit(script))
    show(script, f"submitted job {number}; `phalanx status {number}` shows it, `phalanx logs {number}` what it says")


def with_switches(job: Any, ask_now: bool) -> Any:
    """The job with how few switches its nodes need, as a hint for the scheduler, where the topology is known by now.
    ConfigError for a file of topology that cannot be read."""
    from phalanx.config.topology_file import read_topology
    from phalanx.launch import slurm
    from phalanx.launch.job import SLURM
    from phalanx.launch.programs import SchedulerRefused

    if job.topology is None or (job.topology == SLURM and not ask_now):
        return job
    if job.topology != SLURM:
        path = Path(job.topology)
        positions = read_topology(str(path)).positions
        job = replace(job, topology=str(path.absolute()))
    else:
        try:
            positions = slurm.topology_now()
        except (SchedulerRefused, ValueError) as error:
            click.echo(f"warning: no hint about switches: {error}", err=True)
            return job
    return replace(job, switches=slurm.least_switches(positions, job.nodes[1] + job.spares))


@launch.command("ssh", short_help="Hosts without a scheduler, by plain OpenSSH.")
@CONFIG
@OVERRIDES
@click.option(
    "--hosts",
    type=click.Path(dir_okay=False, exists=True),
    required=True,
    metavar="FILE",
    help="The hosts, one a line, in the order of the ranks.",
)
@click.option("--ssh", default=SSH, show_default=True, metavar="COMMAND", help="How a host is reached.")
@click.option("--cluster", type=click.Path(dir_okay=False), default=None, help="File of the section `cluster`.")
@click.option("--dry", is_flag=True, help="Show what would run on each host, and reach none.")
def launch_ssh(config: str, overrides: tuple[str, ...], hosts: str, ssh: str, cluster: str | None, dry: bool) -> None:
    """Train CONFIG on the hosts of a file, and show what the first one says and the errors of all.

    Each host needs the same folder and the same Python at the same paths, or what `cluster.program` and `cluster.setup`
    name. Ctrl-C or SIGTERM saves and exits with 75; the same command goes on from there.
    """
    from phalanx.launch.job import JobOptions

    names = host_names(hosts)
    job = replace(job_asked(config, overrides, cluster, JobOptions(str(len(names)), by="ssh")), hosts=tuple(names))
    from phalanx.launch.ssh import HostLogs, HostsRun, by_ssh, script_of
    from phalanx.launch.submitted import logs_of

    script = script_of(job)
    if dry:
        click.echo(script, nl=False)
        return
    logs = HostLogs(logs_of(job.folder), f"ssh-{datetime.now(UTC):%Y%m%d-%H%M%S}", job.hosts)
    ranks = job.worlds[0]
    click.echo(f"phalanx: {ranks} ranks on {len(names)} hosts ({', '.join(names)}); logs in {logs.folder}", err=True)
    try:
        HostsRun(job, by_ssh(ssh), script, os.environ.get(SECRET, ""), logs).run()
    finally:
        logs.close()


@click.command("launch-node", hidden=True, context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def launch_node(words: tuple[str, ...]) -> None:
    """A host's part, started by `phalanx launch ssh`: orders on standard input."""
    from phalanx.launch.node import take_part

    raise SystemExit(take_part(words))


@click.command("launch-pods", hidden=True)
@click.argument("job")
def launch_pods(job: str) -> None:
    """In a pod of a job with a range of nodes: how many pods there are."""
    from phalanx.launch.kube_pod import pods_of_job

    click.echo(pods_of_job(job, os.environ))


@launch.command("k8s", short_help="Manifests for Kubernetes, applied with --submit.")
@CONFIG
@OVERRIDES
@click.option(
    "--nodes", default="1", show_default=True, metavar="N|N-M", help="Nodes, each with one pod; a range needs Kueue."
)
@AT
@click.option(
    "--kind",
    type=click.Choice(["job", "jobset", "trainjob"]),
    default="job",
    show_default=True,
    help="Indexed Job, which every cluster has; JobSet; TrainJob of Kubeflow.",
)
@click.option("--image", default=None, help="Container image that holds phalanx (cluster.image).")
@click.option("--queue", default=None, help="Kueue queue (cluster.queue).")
@click.option("--cluster", type=click.Path(dir_okay=False), default=None, help="File of the section `cluster`.")
@click.option("-o", "--out", type=click.Path(dir_okay=False), default=None, help="Manifest to write.")
@click.option("--submit", is_flag=True, help="Apply the manifest.")
@click.option("--dry", is_flag=True, help="Write it without asking a server anything, as on a laptop.")
def launch_k8s(config: str, overrides: tuple[str, ...], **asked: Any) -> None:
    """Write the manifests that train CONFIG on Kubernetes, show them, and apply them with --submit.

    Volumes, GPUs of a node and environment come from the section `cluster` of CONFIG, or from a file cluster.yaml
    beside it (`phalanx explain cluster`). The config travels in the manifest; relative paths lie in the first volume.
    """
    from phalanx.launch.job import JobOptions

    if asked["submit"] and asked["dry"]:
        raise click.UsageError("--dry submits nothing: give one of --submit and --dry")
    launch_manifest(config, overrides, JobOptions(asked["nodes"], at=asked["at"], by="k8s"), asked)


launch.add_command(launch_ray)
launch.add_command(launch_sky)


@click.command("status", short_help="Who trains a run, since when, or why it waits.")
@click.argument("what", metavar="JOB|RUN")
def status(what: str) -> None:
    """Show what became of a submitted run: where it runs and since when, its step and the last line of its log, or why
    it waits. JOB is SLURM's number, or [NAMESPACE/]KIND/NAME on Kubernetes (job/first-run), RUN the run's folder."""
    from phalanx.launch.status import status as describe

    click.echo(describe(what))


@click.command("logs", short_help="What a submitted run says.")
@click.argument("what", metavar="JOB|RUN")
@click.option("-n", "--lines", type=click.IntRange(min=1), default=None, metavar="N", help="Only the last N lines.")
@click.option("--rank", type=click.IntRange(min=0), default=None, metavar="R", help="What rank R alone has said.")
def logs(what: str, lines: int | None, rank: int | None) -> None:
    """Print the log of a submitted job, all its starts after each other, or those of all jobs of a run."""
    from phalanx.launch.status import log_text, rank_text

    text = log_text(what) if rank is None else rank_text(what, rank)
    click.echo("\n".join(text.splitlines()[-lines:] if lines else text.splitlines()))

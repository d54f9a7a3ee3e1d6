"""Ray: the script that a running cluster is given as a job, its submission by Ray's job client, and what became of it.
What the script starts there is ray_nodes.py."""

from __future__ import annotations

import os
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from phalanx.launch.job import ClusterJob
from phalanx.launch.programs import NoScheduler, SchedulerRefused
from phalanx.launch.ray_core import WAITS
from phalanx.launch.remote import same_program
from phalanx.launch.submitted import Submission
from phalanx.launch.template import template

SERVER = "http://127.0.0.1:8265"  # where `ray start --head` takes jobs
SERVER_VARIABLE = "RAY_API_SERVER_ADDRESS"
END_S = 30  # beyond the time for the last save, before Ray kills a job that was stopped
OVER = ("STOPPED", "SUCCEEDED", "FAILED")


def write(job: ClusterJob, script: Path, words: list[str]) -> str:
    """The script of the job, to be read and kept. words: what follows the program's name to start ray_nodes.py."""
    from phalanx.launch.ray_nodes import bundles_of

    own = job.cluster.program != "phalanx" or job.cluster.setup
    return template("ray.sh").render(
        job=job,
        bundles=bundles_of(job),
        program=job.cluster.program if own else same_program(),
        words=words,
        script=str(script.absolute()),
        runtime_env=runtime_env(job),
    )


def runtime_env(job: ClusterJob) -> dict[str, Any]:
    """Ray's settings of the job: how long one that is stopped may take for its last save."""
    return {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(job.cluster.grace_s + END_S)}}


def client(server: str) -> Any:
    """Ray's job client. NoScheduler if it is not installed, or nobody takes jobs there."""
    try:
        from ray.job_submission import JobSubmissionClient  # an optional package
    except ImportError:
        raise NoScheduler("Ray's job client is not installed here: pip install 'phalanx[ray]'") from None
    try:
        return JobSubmissionClient(server)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise NoScheduler(
            f"no Ray cluster takes jobs at {server} ({reason}); --address or {SERVER_VARIABLE} names another"
        ) from None


def server_of(address: str | None) -> str:
    return address or os.environ.get(SERVER_VARIABLE, SERVER)


def submit(job: ClusterJob, script: Path, server: str) -> str:
    """Submit the script; returns the job's number there."""
    try:
        return str(
            client(server).submit_job(
                entrypoint=f"bash {shlex.quote(str(script.absolute()))}",
                runtime_env=runtime_env(job),
                metadata={"phalanx": str(job.folder)},
            )
        )
    except RuntimeError as error:
        raise SchedulerRefused(f"Ray: {error}", str(error)) from error


def info_of(submission: Submission) -> Any | None:
    """What the cluster knows of a job; None if it does not know it."""
    there = client(submission.server)
    try:
        return there.get_job_info(submission.job)
    except RuntimeError as error:
        if "404" in str(error) or "does not exist" in str(error):
            return None
        raise SchedulerRefused(f"Ray: {error}", str(error)) from error


def running(submission: Submission) -> str | None:
    """The state of a job that is not over; None if it is, or is not known."""
    info = info_of(submission)
    state = None if info is None else str(info.status.value)
    return None if state in (None, *OVER) else state


def state_lines(submission: Submission) -> list[str]:
    """For `phalanx status`."""
    info = info_of(submission)
    if info is None:
        return [f"job {submission.job}: the cluster at {submission.server} does not know it: it was started anew"]
    state = str(info.status.value).lower()
    since = datetime.fromtimestamp((info.start_time or 0) / 1000, UTC).isoformat(timespec="seconds")
    message = " ".join(str(info.message or "").split())
    waits = waiting(submission) if state == "running" else ""
    return [f"job {submission.job}  {state} since {since}", *(f"      {text}" for text in (message, waits) if text)]


def waiting(submission: Submission) -> str:
    """What a job waits for, if that is the last thing that it has said."""
    try:
        lines = str(client(submission.server).get_job_logs(submission.job)).strip().splitlines()
    except RuntimeError as error:
        raise SchedulerRefused(f"Ray: {error}", str(error)) from error
    last = lines[-1] if lines else ""
    return last.removeprefix("phalanx: ") if last.startswith(f"phalanx: {WAITS}") else ""

"""The state of a submitted run: where it runs, since when, its step and last line, or why it waits."""

from __future__ import annotations

import json
import re
from pathlib import Path

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import PhalanxError
from phalanx.checkpoint.lock import writer_of
from phalanx.launch import kube_status, ray_jobs
from phalanx.launch.kube_status import kube_job
from phalanx.launch.programs import SchedulerRefused, ask, look_for
from phalanx.launch.rank_log import log_of
from phalanx.launch.submitted import logs_of, submission_of

LOGS = ("slurm", "ssh", "ray")  # what the names of logs begin with
TAIL = 64 * 1024  # bytes of a file's end that are searched for its last lines
WORDS = 2  # lines of a failed job: what ended it, and what became of it
OVER = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",
)
FIELDS = {"job": "%i", "state": "%T", "reason": "%r", "nodes": "%N", "since": "%S", "left": "%L", "comment": "%k"}
# squeue(1), JOB REASON CODES: what they mean for somebody who waits
REASONS = {
    "Priority": "others are before it in the queue",
    "Resources": "it is next, and waits for nodes to become free",
    "Dependency": "it waits for another job (of a chain: the link before it)",
    "BeginTime": "it may not start yet; SLURM lets a job that was queued again wait two minutes",
    "JobHeldUser": "it is held: scontrol release JOB",
    "JobHeldAdmin": "an administrator holds it",
    "Reservation": "it waits for its reservation",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition takes no jobs now",
}
NEVER = {
    "PartitionTimeLimit": "it asks for more time than its partition allows",
    "PartitionNodeLimit": "it asks for more nodes than its partition has",
    "BadConstraints": "no nodes have the features that it asks for",
    "InvalidAccount": "its account does not exist",
    "InvalidQOS": "its QOS does not exist",
    "DependencyNeverSatisfied": "the job that it depends on ended in another way",
    "AssocMaxNodePerJobLimit": "its account may not use so many nodes in a job",
    "AssocMaxWallDurationPerJobLimit": "its account may not use so much time in a job",
    "QOSMaxNodePerJobLimit": "its QOS does not allow so many nodes in a job",
    "QOSMaxWallDurationPerJobLimit": "its QOS does not allow so much time in a job",
}


@dataclass(frozen=True)
class SlurmState:
    """A job, or one task of an array, as squeue lists it."""

    job: str
    state: str
    reason: str
    nodes: str
    since: str
    left: str
    comment: str

    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def folder(self) -> Path | None:
        """The run's, by the comment that `phalanx launch` gives its jobs."""
        return Path(self.comment.removeprefix("phalanx ")) if self.comment.startswith("phalanx ") else None

    def why(self) -> str:
        """Why it waits."""
        name = self.reason.partition(",")[0].strip("()")
        if name in NEVER:
            return f"{name}: it will never start: {NEVER[name]}"
        return f"{name}: {REASONS[name]}" if name in REASONS else self.reason


def slurm_states(job: str) -> list[SlurmState]:
    """The tasks of a job that the scheduler still knows, those that are over included."""
    try:
        rows = ask("squeue", "--noheader", "--states=all", f"--jobs={job}", f"--format={'|'.join(FIELDS.values())}")
    except SchedulerRefused as error:
        if "Invalid job id" in error.said:
            return []
        raise
    return [SlurmState(*row.split("|")) for row in rows.splitlines()]


@dataclass(frozen=True)
class BusyJob:
    """A submitted job that is not over. cancel: the command that ends it."""

    job: str
    state: str
    cancel: str


def busy(folder: Path) -> BusyJob | None:
    """The job of the run's last submission that is not over, if its scheduler still knows one."""
    before = submission_of(folder)
    if before is None:
        return None
    if before.scheduler == "ray":
        state = ray_jobs.running(before)
        stop = f"ray job stop --address {before.server} {before.job}"
        return None if state is None else BusyJob(before.job, state.lower(), stop)
    there = next((state for state in slurm_states(before.job) if not state.over), None)
    return None if there is None else BusyJob(there.job, there.state.lower(), f"scancel {there.job}")


def status(what: str) -> str:
    """The state of a job of SLURM, by its number, of one of Kubernetes, by its kind and name, or of the last one of a
    run, by its folder. PhalanxError if there is none."""
    if (kube := kube_job(what)) is not None and not Path(what).exists():
        return "\n".join(kube_status.status_lines(kube))
    folder, job = find(what)
    submitted = None if folder is None else submission_of(folder)
    if folder is not None and submitted is not None and submitted.scheduler == "ray":
        return "\n".join([*ray_jobs.state_lines(submitted), *run_lines(folder)])
    states = [] if job is None else slurm_states(job)
    lines = [line for state in states for line in state_lines(state)]
    if job is not None and not states:
        lines.append(f"job {job}: the scheduler no longer knows it, so it is over")
    folder = folder or next((state.folder for state in states if state.folder is not None), None)
    failed = bool(states) and all(state.over and state.state != "COMPLETED" for state in states)
    if folder is not None and all(state.over for state in states) and (writer := writer_of(folder)) is not None:
        lines.append(f"runs  {writer}")
    return "\n".join([*lines, *([] if folder is None else run_lines(folder, failed))])


def find(what: str) -> tuple[Path | None, str | None]:
    """(folder of the run, number of the job), as far as `what` says them."""
    if re.fullmatch(r"\d+(_\d+)?", what):
        look_for("SLURM", "squeue")
        return None, what
    folder = Path(what)
    if not folder.is_dir():
        raise PhalanxError(
            f"{what} is neither the number of a job nor the folder of a run, nor KIND/NAME on Kubernetes"
        )
    submitted = submission_of(folder)
    if submitted is not None and submitted.scheduler == "slurm":
        look_for("SLURM", "squeue")
    return folder, None if submitted is None else submitted.job


def state_lines(state: SlurmState) -> list[str]:
    if state.state == "PENDING":
        return [f"job {state.job}  waits  {state.why()}"]
    if state.over:
        return [f"job {state.job}  {state.state.lower()}  on {state.nodes or 'no node'} since {state.since}"]
    left = f", {state.left} left" if state.left not in ("UNLIMITED", "NOT_SET", "INVALID") else ""
    return [f"job {state.job}  {state.state.lower()}  on {state.nodes} since {state.since}{left}"]


def run_lines(folder: Path, failed: bool = False) -> list[str]:
    """What the run itself wrote: its step, and the last line of its log. If its job has failed, or the run has no log,
    the last words of the job, which say why."""
    row = "".join(last_lines(folder / "metrics.jsonl", 1))
    lines = [f"run  {folder}"]
    try:
        lines.append(f"step  {json.loads(row)['step']}")
    except (ValueError, KeyError, TypeError):
        lines.append("step  none yet")
    said = [] if failed else last_lines(folder / "log.txt", 1)
    jobs = job_logs(logs_of(folder))
    if not said and jobs:
        said = last_lines(jobs[-1], WORDS if failed else 1)
    return [*lines, *(f"last  {line}" for line in said)]


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a text, without empty ones and those with which srun repeats how its tasks ended."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line.strip() for line in lines if line.strip() and not line.startswith("srun: ")][-count:]


def log_text(what: str) -> str:
    """What a job, or all jobs of a run, have said. PhalanxError if there is nothing."""
    if (kube := kube_job(what)) is not None and not Path(what).exists():
        return kube_status.log_text(kube)
    return "".join(path.read_text(encoding="utf-8", errors="replace") for path in log_files(what))


def log_files(what: str) -> list[Path]:
    """The logs of a job, or of all jobs of a run, the oldest first. PhalanxError if there are none."""
    job, of_run = find(what)[1], Path(what).is_dir()
    there = logs_of(folder_of(what))
    found = job_logs(there)
    exact = [path for path in found if of_run or re.fullmatch(rf"slurm-{job}(_\d+)?\.log", path.name)]
    if not exact:
        raise PhalanxError(f"{there} has no log of {what} yet; phalanx status {what} says why")
    return exact


def job_logs(there: Path) -> list[Path]:
    """The logs of all jobs of a run, the oldest first."""
    every = (path for kind in LOGS for path in there.glob(f"{kind}-*.log"))
    return sorted(every, key=lambda path: path.stat().st_mtime)


def folder_of(what: str) -> Path:
    """Of the run of a job, or that is named itself."""
    folder, job = find(what)
    if folder is None and job is not None:
        folder = next((state.folder for state in slurm_states(job) if state.folder is not None), None)
    if folder is None:
        raise PhalanxError(f"the scheduler does not know the run of job {job}: name the folder of the run instead")
    return folder


def rank_text(what: str, rank: int) -> str:
    """What one rank has said in all starts of its run. PhalanxError if it has said nothing."""
    path = log_of(logs_of(folder_of(what)) / "ranks", rank)
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise PhalanxError(f"rank {rank} has said nothing yet ({path}: {error.strerror})") from None

"""What became of a job on Kubernetes, as its API server says: conditions, pods, why one waits, step and last line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import PhalanxError
from phalanx.launch.kube_api import KubeServer, connect

KINDS = {
    "job": ("batch/v1", "Job"),
    "jobset": ("jobset.x-k8s.io/v1alpha2", "JobSet"),
    "trainjob": ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
    "rayjob": ("ray.io/v1", "RayJob"),
}
NAMED = re.compile(rf"(?:([a-z0-9-]+)/)?({'|'.join(KINDS)})/([a-z0-9][a-z0-9.-]*)")
TAIL = 200  # lines of a pod that are searched for the step
EVENTS = 3  # newest ones that are shown


@dataclass(frozen=True)
class KubeJob:
    """A workload by its name: job/first-run, or research/job/first-run in another namespace than kubectl's."""

    namespace: str | None
    kind: str
    name: str

    @property
    def empty(self) -> dict[str, Any]:
        version, kind = KINDS[self.kind]
        return {"apiVersion": version, "kind": kind, "metadata": {"name": self.name}}


def kube_job(what: str) -> KubeJob | None:
    """The workload that is meant; None if the words are none of that form."""
    found = NAMED.fullmatch(what)
    return None if found is None else KubeJob(found[1], found[2], found[3])


def status_lines(job: KubeJob) -> list[str]:
    """PhalanxError if there is no such workload."""
    server = connect(job.namespace)
    there = server.find(job.empty)
    if there is None:
        raise PhalanxError(
            f"{job.kind} {job.name} is not in namespace {server.namespace}: it was removed, or never made"
        )
    workload = there.to_dict()
    lines = list(state_lines(job, workload))
    pods = server.pods(job.name)
    lines += [line for pod in pods for line in pod_lines(pod)]
    if not pods or any(pod["status"].get("phase") == "Pending" for pod in pods):
        lines += waiting_lines(server, workload)
    first = next((pod for pod in pods if pod["status"].get("phase") != "Pending"), None)
    return [
        *lines,
        *(step_lines(server.log(first["metadata"]["name"], TAIL)) if first and job.kind != "rayjob" else []),
    ]


def state_lines(job: KubeJob, workload: Mapping[str, Any]) -> Iterator[str]:
    """What its controller says: conditions that hold, or the states of a RayJob."""
    status, since = workload.get("status") or {}, workload["metadata"].get("creationTimestamp", "")
    found = [one for one in status.get("conditions") or [] if one.get("status") == "True"]
    states = [status[key] for key in ("jobDeploymentStatus", "jobStatus") if status.get(key)]
    states = states or [one["type"] for one in found] or ["Suspended" if suspended(workload) else "Running"]
    yield f"{job.kind} {job.name}  {', '.join(str(state).lower() for state in states)}, made {since}"
    for said in [status.get("message"), *(one.get("message") for one in found)]:
        if said:
            yield f"      {said}"


def suspended(workload: Mapping[str, Any]) -> bool:
    return bool((workload.get("spec") or {}).get("suspend"))


def pod_lines(pod: Mapping[str, Any]) -> Iterator[str]:
    """Where a pod runs and since when, how it ended, or why it waits."""
    status, node = pod["status"], pod.get("spec", {}).get("nodeName")
    name, phase = pod["metadata"]["name"], status.get("phase", "Unknown").lower()
    since = f" since {status['startTime']}" if status.get("startTime") else ""
    ended = [
        f"exit code {container['state']['terminated']['exitCode']}"
        for container in status.get("containerStatuses") or []
        if (container.get("state") or {}).get("terminated")
    ]
    yield "  ".join([f"pod {name}", phase + (f" on {node}" if node else "") + since, *ended])
    for reason in reasons(status):
        yield f"      {reason}"


def reasons(status: Mapping[str, Any]) -> Iterator[str]:
    """Why a pod does not run: no node takes it, its image cannot be had, or has no such program."""
    for one in status.get("conditions") or []:
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            yield f"{one.get('reason', '')}: {one.get('message', '')}".strip(": ")
    for container in status.get("containerStatuses") or []:
        state = container.get("state") or {}
        said = state.get("waiting") or state.get("terminated") or {}
        if "waiting" in state or said.get("message"):
            yield f"{said.get('reason', '')}: {said.get('message', '')}".strip(": ")


def waiting_lines(server: KubeServer, workload: Mapping[str, Any]) -> list[str]:
    """Why it has not as many pods as it needs: what Kueue waits for, and what its controller said last."""
    lines = []
    for queued in server.queued(workload["metadata"].get("uid", "")):
        for one in (queued.get("status") or {}).get("conditions") or []:
            if one.get("type") == "QuotaReserved" and one.get("status") != "True":
                lines.append(f"      Kueue: {one.get('message') or one.get('reason')}")
    events = sorted(server.events(workload["metadata"]["name"]), key=lambda one: str(one.get("lastTimestamp") or ""))
    return lines + [f"      {one.get('reason')}: {one.get('message')}" for one in events[-EVENTS:]]


def step_lines(text: str) -> list[str]:
    """The step and the last line of a pod's log."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    steps = [found[1] for line in lines if (found := re.search(r"\bstep=(\d+)\b", line))]
    return [f"step  {steps[-1] if steps else 'none yet'}", *([f"last  {lines[-1]}"] if lines else [])]


def log_text(job: KubeJob) -> str:
    """What the first pod says, which has rank 0; and each line of the others behind their names. PhalanxError if no pod
    says anything."""
    if job.kind == "rayjob":
        raise PhalanxError(
            "a RayJob's log is in the folder of its run, logs/: `phalanx logs RUN` where that is mounted"
        )
    server = connect(job.namespace)
    pods = [pod["metadata"]["name"] for pod in server.pods(job.name) if pod["status"].get("phase") != "Pending"]
    if not pods:
        raise PhalanxError(
            f"no pod of {job.kind} {job.name} has started; phalanx status {job.kind}/{job.name} says why"
        )
    first, *others = pods
    said = [
        server.log(first),
        *("".join(f"{pod}: {line}\n" for line in server.log(pod).splitlines()) for pod in others),
    ]
    return "".join(text if text.endswith("\n") or not text else f"{text}\n" for text in said)

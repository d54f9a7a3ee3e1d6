"""In a pod of a job with a range of nodes: how many pods the job has, which Kueue decides when it admits the job. The
pod asks the API server with its service account, which may read that one job and no more."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Mapping
from pathlib import Path

from phalanx.launch.programs import NoScheduler, SchedulerRefused

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where a pod finds its own
PATIENCE_S = 60.0  # for a server that has too much to do, or a network that comes up later than the pod
PAUSE_S = 1.0
ANSWER_S = 10.0
TOO_BUSY = 429


def pods_of_job(name: str, env: Mapping[str, str], account: Path = ACCOUNT) -> int:
    """Pods of the Indexed Job of that name in this pod's namespace. NoScheduler outside a pod, SchedulerRefused if the
    server does not say it."""
    try:
        host, port = env["KUBERNETES_SERVICE_HOST"], int(env["KUBERNETES_SERVICE_PORT"])
        token, namespace = ((account / file).read_text(encoding="utf-8").strip() for file in ("token", "namespace"))
        trusted = ssl.create_default_context(cafile=account / "ca.crt")
    except (KeyError, ValueError, OSError) as error:
        raise NoScheduler(
            f"this is no pod with a service account: looked for KUBERNETES_SERVICE_HOST and {account} ({error})"
        ) from None
    path, until = f"/apis/batch/v1/namespaces/{namespace}/jobs/{name}", time.monotonic() + PATIENCE_S
    while True:
        try:
            status, text = ask(host, port, trusted, path, token)
        except OSError as error:
            status, text = 0, str(error)
        if 0 < status < 500 and status != TOO_BUSY:
            break
        if time.monotonic() > until:
            raise SchedulerRefused(f"the API server of Kubernetes at {host}:{port} does not answer: {text}")
        time.sleep(PAUSE_S)
    try:
        found = json.loads(text)
        if status == http.client.OK:
            return int(found["spec"]["completions"])
        text = found["message"]
    except (ValueError, KeyError, TypeError):
        pass  # the text says what it is
    raise SchedulerRefused(f"the API server of Kubernetes says nothing of Job {name}: {status} {text}")


def ask(host: str, port: int, trusted: ssl.SSLContext, path: str, token: str) -> tuple[int, str]:
    """(status, text) of the server's answer."""
    connection = http.client.HTTPSConnection(host, port, timeout=ANSWER_S, context=trusted)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()

"""Submits a manifest to the API server of Kubernetes, through the official client (extra k8s)."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from phalanx.base.errors import ConfigError, FolderInUse, Problem
from phalanx.config.validate import close_to
from phalanx.launch.k8s import RUN_SECRET
from phalanx.launch.programs import NoScheduler, SchedulerRefused

MANAGER = "phalanx"  # owner of the fields that are applied
WORKLOADS = ("Job", "JobSet", "TrainJob", "RayJob")
KUEUE = "kueue.x-k8s.io"
PATIENCE_S = 30.0  # for one answer
SECRET_BYTES = 32
CONTAINER = "node"  # of our pods


def documents_of(text: str) -> list[dict[str, Any]]:
    """The objects of a manifest."""
    return list(YAML(typ="safe", pure=True).load_all(text))


def here() -> bool:
    """Whether the client is installed and knows a cluster."""
    if importlib.util.find_spec("kubernetes") is None:
        return False
    try:
        connect(None)
    except NoScheduler:
        return False
    return True


def connect(namespace: str | None) -> KubeServer:
    """The server that kubectl would ask, or that of the pod we are in. NoScheduler if there is none."""
    try:
        from kubernetes import client, config  # an optional package
    except ImportError:
        text = "the official client of Kubernetes is not installed here: pip install 'phalanx[k8s]'"
        raise NoScheduler(text) from None
    settings, files = client.Configuration(), kubectl_config()
    settings.retries = False
    try:
        if files is None:
            config.load_incluster_config(client_configuration=settings)
        else:
            config.load_kube_config(config_file=files, client_configuration=settings)
    except config.ConfigException as error:
        raise NoScheduler(
            "Kubernetes is not here: looked for the config of kubectl (KUBECONFIG, ~/.kube/config) and for the "
            f"service account of a pod ({error}); `phalanx launch k8s --dry` needs neither"
        ) from None
    if namespace is None and files is not None:
        _, active = config.list_kube_config_contexts(config_file=files)
        namespace = active["context"].get("namespace")
    return KubeServer(client.ApiClient(settings), namespace or "default")


def kubectl_config() -> str | None:
    """Where kubectl looks for its config, if there is one; KUBECONFIG may name several files."""
    files = os.environ.get("KUBECONFIG", str(Path.home() / ".kube" / "config"))
    return files if any(Path(file).is_file() for file in files.split(os.pathsep)) else None


class KubeServer:
    """An API server and the namespace of a job. Its errors are SchedulerRefused."""

    def __init__(self, api: Any, namespace: str) -> None:
        self._api, self._namespace = api, namespace
        self._known: Any = None

    @property
    def namespace(self) -> str:
        return self._namespace

    def pods(self, name: str) -> list[dict[str, Any]]:
        """The pods of a run, in the order of its nodes as far as their names say it."""
        selector = f"app.kubernetes.io/instance={name}"
        found = self.objects("v1", "Pod", label_selector=selector)
        numbers = {id(pod): [int(n) for n in re.findall(r"\d+", pod["metadata"]["name"])] for pod in found}
        return sorted(found, key=lambda pod: (index_of(pod), numbers[id(pod)]))

    def events(self, name: str) -> list[dict[str, Any]]:
        """What controllers said of an object."""
        return self.objects("v1", "Event", field_selector=f"involvedObject.name={name}")

    def queued(self, owner: str) -> list[dict[str, Any]]:
        """What Kueue keeps of a job; nothing where there is no Kueue."""
        from kubernetes.dynamic.exceptions import ResourceNotFoundError

        try:
            version = self.ask(self._kinds().get, group=KUEUE, kind="Workload").group_version
        except ResourceNotFoundError:
            return []
        found = self.objects(version, "Workload")
        owners = (one["metadata"].get("ownerReferences") or [] for one in found)
        return [one for one, of in zip(found, owners) if any(ref.get("uid") == owner for ref in of)]

    def objects(self, version: str, kind: str, **selectors: Any) -> list[dict[str, Any]]:
        get = self.kind({"apiVersion": version, "kind": kind}).get
        found = self.ask(get, namespace=self._namespace, _request_timeout=PATIENCE_S, **selectors)
        return [item.to_dict() for item in found.items]

    def log(self, pod: str, lines: int | None = None) -> str:
        """What a pod's container has said: all, or its last lines."""
        from kubernetes import client

        read = client.CoreV1Api(self._api).read_namespaced_pod_log
        limit: dict[str, Any] = {} if lines is None else {"tail_lines": lines}
        limit |= {
            "container": CONTAINER,
            "_request_timeout": PATIENCE_S,
            "_preload_content": False,
        }  # bytes, as they are
        return self.ask(read, pod, self._namespace, **limit).data.decode(errors="replace")

    def kind(self, document: dict[str, Any]) -> Any:
        """Where objects of the document's kind are kept. ConfigError if the server has no such kind."""
        from kubernetes.dynamic.exceptions import ResourceNotFoundError

        version, kind = document["apiVersion"], document["kind"]
        try:
            return self.ask(self._kinds().get, api_version=version, kind=kind)
        except ResourceNotFoundError:
            rule = f"is no kind of this cluster: nobody has installed {version} there"
            raise ConfigError([Problem("kind", kind, rule)]) from None

    def _kinds(self) -> Any:
        """What the server has, as it says itself. The client keeps that in a file, which others could change if it were
        where the client puts it."""
        if self._known is None:
            from kubernetes.dynamic import DynamicClient

            with tempfile.TemporaryDirectory() as folder:
                self._known = self.ask(DynamicClient, self._api, str(Path(folder) / "kinds.json"))
        return self._known.resources

    def ask(self, call: Any, *words: Any, unless: int | None = None, **more: Any) -> Any:
        """What the server answers; None if that is the status `unless`. SchedulerRefused for its other complaints."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            return call(*words, **more)
        except ApiException as error:
            if error.status == unless:
                return None
            said = said_in(error.body)
            raise SchedulerRefused(
                f"the API server of Kubernetes: {error.status} {error.reason}: {said}", said
            ) from error
        except HTTPError as error:
            raise SchedulerRefused(f"the API server of Kubernetes does not answer ({error})") from error

    def find(self, document: dict[str, Any]) -> Any | None:
        """The object of that name; None if there is none."""
        name = document["metadata"]["name"]
        return self.ask(
            self.kind(document).get, unless=404, name=name, namespace=self._namespace, _request_timeout=PATIENCE_S
        )

    def apply(self, document: dict[str, Any], dry: bool = False) -> None:
        """Server-side apply. SchedulerRefused with what the server complains of."""
        self.ask(
            self.kind(document).server_side_apply,
            body=document,
            name=document["metadata"]["name"],
            namespace=self._namespace,
            field_manager=MANAGER,
            force_conflicts=True,
            dry_run="All" if dry else None,
            _request_timeout=PATIENCE_S,
        )

    def create(self, document: dict[str, Any]) -> bool:
        """A new object; False if there is one of that name."""
        make = self.kind(document).create
        options = {"namespace": self._namespace, "field_manager": MANAGER, "_request_timeout": PATIENCE_S}
        return self.ask(lambda: make(body=document, **options), unless=409) is not None

    def names(self, version: str, kind: str) -> list[str]:
        get = self.kind({"apiVersion": version, "kind": kind}).get
        found = self.ask(get, namespace=self._namespace, _request_timeout=PATIENCE_S)
        return [item.metadata.name for item in found.items]

    def check(self, documents: Sequence[dict[str, Any]], queue: str | None) -> None:
        """Whether the server would take all of it, by a dry run. ConfigError with all problems at once."""
        problems = self._check_queue(queue) if queue is not None else []
        for document in documents:
            name = f"{document['kind']}/{document['metadata']['name']}"
            try:
                self.apply(document, dry=True)
            except SchedulerRefused as error:
                problems.append(Problem(name, self._namespace, f"is refused by the API server: {error.said}"))
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems)

    def _check_queue(self, queue: str) -> list[Problem]:
        from kubernetes.dynamic.exceptions import ResourceNotFoundError

        try:
            version = self.ask(self._kinds().get, group=KUEUE, kind="LocalQueue").group_version
        except ResourceNotFoundError:
            return [Problem("cluster.queue", queue, "needs Kueue, which is not installed in this cluster", {}, (None,))]
        names = self.names(version, "LocalQueue")
        if queue in names:
            return []
        because = {"namespace": self._namespace}
        near = tuple(close_to(queue, tuple(names)) or names)
        return [Problem("cluster.queue", queue, "is no queue of this namespace", because, near)]

    def refuse_second(self, documents: Sequence[dict[str, Any]]) -> None:
        """FolderInUse if the run's workload is there already. A kind that is not installed is for `check` to say."""
        workload = workload_of(documents)
        with suppress(ConfigError):
            if self.find(workload) is not None:
                raise FolderInUse(self._there(workload))

    def submit(self, documents: Sequence[dict[str, Any]]) -> str:
        """Apply a checked manifest, and the run's secret if there is none; returns what `phalanx status` calls it.
        FolderInUse if somebody else was faster."""
        workload = workload_of(documents)
        name = workload["metadata"]["name"]
        for document in documents:
            if document is not workload:
                self.apply(document)
        self.create(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": name, "labels": workload["metadata"]["labels"]},
                "stringData": {RUN_SECRET: secrets.token_hex(SECRET_BYTES)},
            }
        )
        if not self.create(workload):
            raise FolderInUse(self._there(workload))
        return f"{self._namespace}/{workload['kind'].lower()}/{name}"

    def _there(self, workload: dict[str, Any]) -> str:
        kind, name = workload["kind"], workload["metadata"]["name"]
        gone = f"kubectl delete {kind.lower()} {name} --namespace {self._namespace}"
        return (
            f"{kind} {name} is in namespace {self._namespace} already: remove it with `{gone}`, or choose another `dir`"
        )


def index_of(pod: dict[str, Any]) -> int:
    """The number of a pod's node, which the Job controller puts on it."""
    index = (pod["metadata"].get("labels") or {}).get("batch.kubernetes.io/job-completion-index", "")
    return int(index) if index.isdigit() else 0


def workload_of(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The one object of a manifest that starts pods."""
    [workload] = [document for document in documents if document["kind"] in WORKLOADS]
    return workload


def said_in(body: Any) -> str:
    """The complaint in an answer of the server."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body)
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip() or "no reason given"

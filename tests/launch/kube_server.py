"""A server on loopback that answers as the API server of Kubernetes does, as far as a submission asks: what kinds there
are, server-side apply with and without dryRun, create, get and list. Objects of its own kinds are held against the
published schemas; it starts no pods."""

from __future__ import annotations

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import yaml

QUEUE = "team-a"
VERSION = "1.37"
KINDS = {
    "v1": {
        "ConfigMap": "configmaps",
        "Secret": "secrets",
        "Service": "services",
        "ServiceAccount": "serviceaccounts",
        "Pod": "pods",
        "Event": "events",
    },
    "rbac.authorization.k8s.io/v1": {"Role": "roles", "RoleBinding": "rolebindings"},
    "batch/v1": {"Job": "jobs"},
    "jobset.x-k8s.io/v1alpha2": {"JobSet": "jobsets"},
    "trainer.kubeflow.org/v1alpha1": {"TrainJob": "trainjobs", "TrainingRuntime": "trainingruntimes"},
    "ray.io/v1": {"RayJob": "rayjobs"},
    "kueue.x-k8s.io/v1beta1": {"LocalQueue": "localqueues", "Workload": "workloads"},
}
VERBS = ["create", "get", "list", "patch"]


class KubeServerStub:
    """tls: the server's certificate; None: it speaks HTTP. kept: (namespace, kind, name) -> object; logs: of pods, by
    name; changes: (method, path, whether dry); absent: kinds that are not installed; forbidden: plurals that nobody may
    change."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.kept: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.logs: dict[str, str] = {}
        self.changes: list[tuple[str, str, bool]] = []
        self.absent: set[str] = set()
        self.forbidden: set[str] = set()

    def __enter__(self) -> KubeServerStub:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        if self._tls is not None:
            self._server.socket = self._tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def discovery(self, path: str) -> dict[str, Any] | None:
        if path == "/version":
            return {"major": "1", "minor": "37"}
        if path == "/api":
            return {"kind": "APIVersions", "apiVersion": "v1", "versions": ["v1"]}
        if path == "/apis":
            groups = [version.partition("/")[::2] for version in KINDS if "/" in version]
            rows = [(group, {"groupVersion": f"{group}/{version}", "version": version}) for group, version in groups]
            return {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [{"name": group, "versions": [row], "preferredVersion": row} for group, row in rows],
            }
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if version not in KINDS:
            return None
        kinds = {kind: plural for kind, plural in KINDS[version].items() if kind not in self.absent}
        rows = [
            {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": VERBS}
            for kind, plural in kinds.items()
        ]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": rows}

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, Any]:
        if method == "GET" and (found := self.discovery(path)) is not None:
            return 200, found
        version, _, rest = path.removeprefix("/apis/").removeprefix("/api/").partition("/namespaces/")
        namespace, plural, *names = rest.split("/")
        kind = next((kind for kind, known in KINDS.get(version, {}).items() if known == plural), None)
        if kind is None or kind in self.absent:
            return _status(404, "the server could not find the requested resource")
        if names[1:] == ["log"]:
            wanted = int(query.get("tailLines", ["1000000"])[0])
            return 200, "".join(self.logs[names[0]].splitlines(keepends=True)[-wanted:])
        if method == "GET" and not names and kind != "LocalQueue":
            return 200, {"apiVersion": version, "kind": f"{kind}List", "items": self._selected(namespace, kind, query)}
        if method == "GET":
            return self._get(namespace, kind, names)
        return self._change(method, path, (namespace, kind, plural), query, yaml.safe_load(body))

    def _selected(self, namespace: str, kind: str, query: dict[str, list[str]]) -> list[dict[str, Any]]:
        """Objects of a kind, by one label or by the object that an event is about."""
        label, _, value = query.get("labelSelector", [""])[0].partition("=")
        about = query.get("fieldSelector", ["="])[0].partition("=")[2]
        every = [one for (place, known, _), one in self.kept.items() if (place, known) == (namespace, kind)]
        every = [one for one in every if not label or one["metadata"]["labels"].get(label) == value]
        return [one for one in every if not about or one["involvedObject"]["name"] == about]

    def _get(self, namespace: str, kind: str, names: list[str]) -> tuple[int, dict[str, Any]]:
        if kind == "LocalQueue" and not names:
            queue = {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "LocalQueue", "metadata": {"name": QUEUE}}
            return 200, {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "LocalQueueList", "items": [queue]}
        if names and (namespace, kind, names[0]) in self.kept:
            return 200, self.kept[namespace, kind, names[0]]
        return _status(404, f"{kind} {names} not found")

    def _change(
        self, method: str, path: str, where: tuple[str, str, str], query: dict[str, list[str]], document: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        namespace, kind, plural = where
        dry = query.get("dryRun") == ["All"]
        self.changes.append((method, path, dry))
        if "fieldManager" not in query:
            return _status(400, "fieldManager is required for apply patch")
        if plural in self.forbidden:
            return _status(403, f"{plural} is forbidden")
        try:
            kubernetes_validate.validate(document, VERSION, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            pass  # not a kind of its own
        except kubernetes_validate.ValidationError as error:
            return _status(422, error.message)
        key = namespace, kind, document["metadata"]["name"]
        if method == "POST" and key in self.kept:
            return _status(409, "already exists")
        if not dry:
            self.kept[key] = document
        return 200, document


def _status(code: int, message: str) -> tuple[int, dict[str, Any]]:
    return code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}


def _handler(server: KubeServerStub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Authorization") != "Bearer t0ken":
                code, answer = _status(401, "Unauthorized")
            elif self.command == "PATCH" and self.headers["Content-Type"] != "application/apply-patch+yaml":
                code, answer = _status(415, "only server-side apply is known here")
            else:
                code, answer = server.answer(self.command, url.path, parse_qs(url.query), body)
            text = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/plain" if isinstance(answer, str) else "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_POST = do_PATCH = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: pytest shows what failed."""

    return Handler

"""Replicas of `phalanx serve` on a Ray cluster, balanced by Ray Serve; needs `pip install 'phalanx[ray]'` on its nodes.

    serve run ray_serve:replicas model=/models/first count=3 gpus=2 words="layout.tp=2 --ranks 2"

A replica is a program `phalanx serve` on a node, in whatever layout `words` say, and this file passes requests and
streams on to it. If the program ends (a rank was lost), or its node does, Ray starts another replica elsewhere, and
requests go to the others meanwhile.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import threading
from typing import Any

import aiohttp
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

NOT_PASSED_ON = {"host", "content-length", "transfer-encoding", "connection"}  # they belong to one connection
STOP_S = 90.0


class ServedReplica:
    """One program, on a free port of its node's loopback."""

    def __init__(self, command: list[str]):
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said = ""
        for line in self._process.stdout or ():
            said += line
            if found := re.search(r"served at (http://\S+)", line):
                self._url = found[1]
                break
        else:
            raise RuntimeError(f"{shlex.join(command)} ended with {self._process.wait()}:\n{said}")
        threading.Thread(target=self._pass_log_on, daemon=True).start()
        self._session: aiohttp.ClientSession | None = None

    def _pass_log_on(self) -> None:
        for line in self._process.stdout or ():
            print(line, end="", flush=True)

    def check_health(self) -> None:
        """Called by Ray, which starts another replica after an error."""
        if self._process.poll() is not None:
            raise RuntimeError(f"phalanx serve ended with {self._process.returncode}")

    async def __call__(self, request: Request) -> StreamingResponse:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        headers = {name: value for name, value in request.headers.items() if name not in NOT_PASSED_ON}
        query = f"?{request.url.query}" if request.url.query else ""
        answer = await self._session.request(
            request.method, f"{self._url}{request.url.path}{query}", headers=headers, data=await request.body()
        )

        async def parts() -> Any:
            try:
                async for part in answer.content.iter_any():
                    yield part
            finally:
                answer.close()  # a client that has gone is forgotten there too

        back = {name: value for name, value in answer.headers.items() if name.lower() not in NOT_PASSED_ON}
        return StreamingResponse(parts(), answer.status, back)

    def __del__(self) -> None:
        process = getattr(self, "_process", None)
        if process is not None and process.poll() is None:
            process.terminate()  # running requests may end
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def replicas(given: dict[str, str]) -> Any:
    """The application.

    model: a run, a checkpoint or a Hugging Face folder that every node can read. count: of
    replicas, each on a node of its own. gpus: of each. words: arguments more. command: that starts
    phalanx (default: phalanx)."""
    known = {"model", "count", "gpus", "words", "command"}
    if unknown := given.keys() - known:
        raise ValueError(f"{', '.join(sorted(unknown))}: not known; there are {', '.join(sorted(known))}")
    command = shlex.split(given.get("command", "phalanx"))
    command += ["serve", given["model"], "--host", "127.0.0.1", "--port", "0", *shlex.split(given.get("words", ""))]
    deployment = serve.deployment(
        num_replicas=int(given.get("count", "1")),
        max_replicas_per_node=1,
        max_ongoing_requests=256,
        ray_actor_options={"num_gpus": float(given.get("gpus", "0")), "num_cpus": 0},
        health_check_period_s=2,
        graceful_shutdown_timeout_s=STOP_S,
    )(ServedReplica)
    return deployment.bind(command)

"""Runs the server: one socket, signals, and how it ends."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from phalanx.base.errors import ConfigError, Problem
from phalanx.base.log import Log, describe
from phalanx.server.app import make_app
from phalanx.server.engine_thread import AnyEngine, EngineThread
from phalanx.server.errors import ApiError
from phalanx.server.keys import ApiKeys
from phalanx.server.metrics import Metrics
from phalanx.server.served import ServedModel
from phalanx.server.service import ServerLimits, Service

LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket. ConfigError if the address cannot be had."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        listener = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError([Problem("--host", host, f"must be an address of this machine ({error})")]) from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        field, value = ("--port", port) if error.errno != 99 else ("--host", host)
        rule = (
            f"must be free on {host}: {error.strerror}" if field == "--port" else "must be an address of this machine"
        )
        raise ConfigError(
            [Problem(field, value, rule, valid=("0 (any free one)",) if field == "--port" else ())]
        ) from None
    listener.listen(2048)
    return listener


def is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


class HttpServer:
    """A model behind a socket.

    run() blocks until it is stopped: SIGTERM or Ctrl-C lets running requests end within `limits.drain_seconds`, a
    second one does not wait. If the engine fails, its exception is raised after running requests have got their
    error.
    """

    def __init__(
        self,
        model: ServedModel,
        engine: AnyEngine,
        listener: socket.socket,
        log: Log,
        limits: ServerLimits | None = None,
        keys: ApiKeys | None = None,
    ):
        self.listener, self.log = listener, log
        thread = EngineThread(engine, self._lost)
        self.service = Service(model, thread, Metrics(thread), log, limits or ServerLimits(), keys)
        if keys is None and is_loopback(listener):
            self.service.allowed_hosts = LOCAL_NAMES
        config = uvicorn.Config(
            make_app(self.service),
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            http="h11",
            loop="asyncio",
            timeout_graceful_shutdown=5,
        )
        self._server = QuietServer(config, self.stop)
        self._loop: asyncio.AbstractEventLoop
        self._asked = 0
        self._draining: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        host, port = self.listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self) -> None:
        """Serve until stopped. Raises what ended the engine."""
        asyncio.run(self.serve())
        if self.service.engine.lost is not None:
            raise self.service.engine.lost

    async def serve(self) -> None:
        """`run` on a loop that is running."""
        self._loop = asyncio.get_running_loop()
        self.service.engine.start()
        try:
            await self._server.serve([self.listener])
        finally:
            self.service.engine.close()

    def stop(self) -> None:
        """From a signal handler or another thread."""
        self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._asked += 1
        self.service.draining = True
        if self._asked == 1:
            live = self.service.engine.live
            waits = f"; {live} sequences may end within {self.service.limits.drain_seconds:g} s" if live else ""
            self.log.info(f"stopping: new requests get 503{waits}")
            self._draining = self._loop.create_task(self._drain())
        else:
            self._give_up("the server was told twice to stop")

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self.service.limits.drain_seconds):
                await self.service.engine.quiet()
        except TimeoutError:
            self._give_up("the server is shutting down and did not wait for this request")
            return
        self._server.should_exit = True

    def _give_up(self, why: str) -> None:
        self.service.engine.give_up(ApiError(503, why, code="shutting_down"))
        self._server.should_exit = True

    def _lost(self, error: BaseException) -> None:
        self.log.error(f"the engine failed: {describe(error)}")
        self._server.should_exit = True


class QuietServer(uvicorn.Server):
    """uvicorn's server, with our answer to signals."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]):
        super().__init__(config)
        self._stop = stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._stop()

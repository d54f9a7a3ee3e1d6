"""A server on loopback, in a thread of this process, with an engine that a test can hold."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server needs the extra serve")
pytest.importorskip("openai", reason="the server is tested with OpenAI's client (requirements-dev.txt)")

import openai

from phalanx.base.log import Log
from phalanx.inference.ends import end_tokens
from phalanx.server.engine_thread import AnyEngine
from phalanx.server.listen import HttpServer, open_socket
from phalanx.server.served import ServedModel
from phalanx.text.chat_template import load_chat_template
from phalanx.text.tokenizer_base import Tokenizer
from phalanx.text.tokenizers import load_tokenizer
from tests.harness.chat_model import chat_folder
from tests.harness.stub_engine import StubEngine

KEY = "a-key-that-is-long-enough"


class Heard(io.StringIO):
    """A log that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._more = threading.Condition()

    def write(self, text: str) -> int:
        with self._more:
            written = super().write(text)
            self._more.notify_all()
        return written

    def wait_for(self, word: str, times: int = 1) -> None:
        """Until it has been written so many times."""
        with self._more:
            assert self._more.wait_for(lambda: self.getvalue().count(word) >= times, 30), self.getvalue()


@dataclass
class Serving:
    """A server that runs, and its clients."""

    server: HttpServer
    engine: Any
    thread: threading.Thread
    said: Heard
    ended: list[BaseException]
    address: tuple[str, int]

    @property
    def url(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30, **options)

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, **options)

    def connect(self, buffer: int | None = None) -> socket.socket:
        """A bare connection. buffer: bytes that the system keeps for it."""
        line = socket.socket()
        if buffer:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        line.settimeout(30)
        line.connect(self.address)
        return line


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="session")
def tokenizer(model_folder) -> Tokenizer:
    return load_tokenizer(model_folder)


@contextmanager
def serving(engine: AnyEngine, model: ServedModel, **options: Any) -> Iterator[Serving]:
    said = Heard()
    server = HttpServer(model, engine, open_socket("127.0.0.1", 0), Log(out=said, err=said), **options)
    ended: list[BaseException] = []
    address = server.listener.getsockname()

    def run() -> None:
        try:
            server.run()
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield Serving(server, engine, thread, said, ended, address)
    finally:
        if isinstance(engine, StubEngine):
            engine.gate.set()
        if thread.is_alive():
            stop_twice(server)
        thread.join(30)
        assert not thread.is_alive()


def stop_twice(server: HttpServer) -> None:
    """Now, without waiting for what runs. The loop may be about to end by itself."""
    for _ in range(2):
        try:
            server.stop()
        except RuntimeError:
            return


@pytest.fixture
def start(tokenizer, model_folder) -> Iterator[Callable[..., Serving]]:
    """Starts servers: start(replies=..., positions=..., template=False, tokenizer=False, **options of HttpServer)."""
    with ExitStack() as stack:

        def one(
            replies: dict[str, str] | None = None,
            positions: int = 512,
            template: bool = True,
            text: bool = True,
            engine: Any = None,
            adapters: tuple[str, ...] = (),
            **options: Any,
        ) -> Serving:
            made = engine or StubEngine(tokenizer, positions, replies)
            chat = load_chat_template(model_folder) if template and text else None
            model = ServedModel(
                name="stub",
                positions=made.positions,
                tokenizer=tokenizer if text else None,
                template=chat,
                ends=end_tokens(model_folder, tokenizer, chat),
                vocab_size=tokenizer.vocab_size,
                adapters=adapters,
            )
            return stack.enter_context(serving(made, model, **options))

        yield one

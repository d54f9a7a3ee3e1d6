"""Ten minutes of load on the real engine: 64 clients, of whom some read slowly, go away, or send what is too large or
is no request. Every request that is accepted ends, and no page leaks."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter

import pytest

from phalanx.inference.engine import Engine, EngineOptions
from phalanx.server.serve_rank import RunEngine
from phalanx.server.served import ServedModel
from phalanx.server.service import ServerLimits
from tests.harness.generation import random_model, run_of
from tests.server.conftest import Serving, serving

SECONDS, CLIENTS, VOCAB, POSITIONS = 600, 64, 131, 48
ANSWER_S = 120.0  # within which every answer must be complete, however loaded the machine is

pytestmark = [pytest.mark.soak, pytest.mark.timeout(SECONDS + 4 * ANSWER_S)]


class LoadClient:
    """One of the clients: asks in its own random order until the time is up, and counts what became of it."""

    def __init__(self, server: Serving, number: int, until: float):
        self.server, self.until, self.dice = server, until, random.Random(number)
        self.found: Counter[str] = Counter()

    async def run(self) -> None:
        kinds = [self.whole, self.whole, self.stream, self.slow, self.goes, self.late, self.too_large, self.malformed]
        while time.monotonic() < self.until:
            kind = self.dice.choice(kinds)
            async with asyncio.timeout(ANSWER_S):
                self.found[f"{kind.__name__} {await kind()}"] += 1

    def body(self, **more: object) -> bytes:
        dice = self.dice
        prompt = [[dice.randrange(VOCAB) for _ in range(dice.randint(1, 20))] for _ in range(dice.randint(1, 3))]
        options = {"max_tokens": dice.randint(1, 24), "n": dice.randint(1, 2), "temperature": dice.choice([0, 1])}
        options |= {"seed": dice.randrange(1000), "priority": dice.randint(-1, 1)}
        return json.dumps({"prompt": prompt, **options, **more}).encode()

    async def connect(self, buffer: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        line = socket.socket()
        if buffer:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        line.setblocking(False)
        await asyncio.get_running_loop().sock_connect(line, self.server.address)
        return await asyncio.open_connection(sock=line, limit=2**12)

    async def send(self, writer: asyncio.StreamWriter, body: bytes, length: int | None = None) -> None:
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}connection: close\r\ncontent-length: {length or len(body)}\r\n\r\n".encode() + body)
        await writer.drain()

    async def answer(self, body: bytes, buffer: int | None = None, step: int = 2**16) -> tuple[int, bytes]:
        reader, writer = await self.connect(buffer)
        await self.send(writer, body)
        received = b""
        while part := await reader.read(step):
            received += part
        writer.close()
        return int(received.split(b" ", 2)[1]), received

    async def whole(self) -> int:
        status, _ = await self.answer(self.body())
        assert status in (200, 429), status
        return status

    async def stream(self, buffer: int | None = None, step: int = 2**16) -> int:
        status, received = await self.answer(self.body(stream=True), buffer, step)
        assert status in (200, 429), status
        assert status == 429 or b"data: [DONE]" in received  # accepted: it ends
        return status

    async def slow(self) -> int:
        return await self.stream(buffer=2**11, step=7)

    async def goes(self) -> str:
        """Away, after the first bytes of an answer."""
        reader, writer = await self.connect()
        await self.send(writer, self.body(stream=self.dice.random() < 0.7, max_tokens=24))
        await reader.read(self.dice.choice([1, 100, 400]))
        writer.transport.abort()
        return "gone"

    async def late(self) -> int:
        status, received = await self.answer(self.body(timeout=self.dice.choice([1e-6, 0.05])))
        assert status in (200, 429, 504), received
        return status

    async def too_large(self) -> int:
        reader, writer = await self.connect()
        await self.send(writer, b"{", length=2**30)
        received = await reader.read(2**12)
        writer.transport.abort()
        assert b" 413 " in received[:20], received
        return 413

    async def malformed(self) -> int:
        wrong = (
            b"{",
            b"[]",
            b"\xff\xfe",
            b'{"prompt": 5}',
            b'{"prompt": [131]}',
            b'{"prompt": [1], "max_tokens": "9"}',
        )
        status, received = await self.answer(self.dice.choice(wrong))
        assert status == 400 and b'"error"' in received, received
        return status


@pytest.mark.parametrize("family", ["llama"])
def test_ten_minutes_of_load(family):
    options = EngineOptions(sequences=8, tokens=32, page_size=4, length=POSITIONS, memory_gib=4e-4)
    engine = RunEngine(Engine(random_model(0, 1, run_of(family)), options), "tiny")
    model = ServedModel("tiny", engine.positions, vocab_size=VOCAB)
    with serving(engine, model, limits=ServerLimits(sequences=160)) as server:

        async def everybody() -> list[LoadClient]:
            clients = [LoadClient(server, n, time.monotonic() + SECONDS) for n in range(CLIENTS)]
            await asyncio.gather(*(client.run() for client in clients))
            return clients

        found = sum((client.found for client in asyncio.run(everybody())), Counter())
        quiet = asyncio.run_coroutine_threadsafe(server.server.service.engine.quiet(), server.server._loop)
        quiet.result(ANSWER_S)
        assert server.client().completions.create(model="tiny", prompt=[4], max_tokens=1)
        load = engine.load()
        assert (load.running, load.waiting, load.pages_used) == (0, 0, 0) and engine.idle
    for kind in ("whole 200", "stream 200", "slow 200", "goes gone", "late 504", "too_large 413", "malformed 400"):
        assert found[kind], found
    print(sorted(found.items()))

"""Responses that are cancelled when the client disconnects: whole ones, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phalanx.server.errors import ApiError

T = TypeVar("T")
GONE = 499  # the client closed the connection (nginx's number); for the log alone


WANTED = {
    "application/json": "JSON, not {}: -H 'Content-Type: application/json'",
    "multipart/form-data": "a form with a file, not {}: curl -F file=@a.flac",
}


async def read_body(request: Request, limit: int, seconds: float, wanted: str = "application/json") -> bytes:
    """The body, of a type that is wanted. ApiError 413 beyond `limit` bytes, 415 for another type, 408 if it does not
    come."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != wanted:
        raise ApiError(415, f"the body must be {WANTED[wanted].format(kind or 'without a type')}")
    close = {"connection": "close"}  # of the body there may be more
    too_large = ApiError(413, f"the body is larger than {limit:,} bytes", code="request_too_large", headers=close)
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                data += chunk
                if len(data) > limit:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {seconds:g} s", headers=close) from None
    return bytes(data)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns; None if the client goes first, and `work` is cancelled."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: each value as JSON, then [DONE]. An error in the middle is the last event.

    seconds     a client that takes nothing for so long is given up
    failed      makes the event of an exception that is no ApiError
    """

    media_type = "text/event-stream"

    def __init__(self, values: AsyncIterator[dict[str, Any]], seconds: float, failed: Callable[[Exception], ApiError]):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._values, self._seconds, self._failed = values, seconds, failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        try:
            await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for value in self._values:
                    await self._event(send, json.dumps(value, ensure_ascii=False, separators=(",", ":")))
                await self._event(send, "[DONE]")
            except TimeoutError:
                raise
            except Exception as error:
                known = error if isinstance(error, ApiError) else self._failed(error)
                await self._event(send, json.dumps(known.body()))
            await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            return  # uvicorn closes the connection of a response without an end
        finally:
            await self._values.aclose()  # type: ignore[attr-defined]

    async def _event(self, send: Send, text: str) -> None:
        body = f"data: {text}\n\n".encode()
        await self._send(send, {"type": "http.response.body", "body": body, "more_body": True})
        await asyncio.sleep(0)  # neither a full queue nor a socket need wait: let others have their turn

    async def _send(self, send: Callable[[Any], Awaitable[None]], message: dict[str, Any]) -> None:
        async with asyncio.timeout(self._seconds):
            await send(message)

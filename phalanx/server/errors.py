"""Errors in the format of OpenAI's API: {"error": {"message", "type", "param", "code"}} with an HTTP status."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from phalanx.base.log import describe


class ApiError(Exception):
    """An answer that is an error.

    param     the field of the request that is wrong
    code      a word for programs
    headers   of the response
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": kind(self.status), "param": self.param, "code": self.code}}


def kind(status: int) -> str:
    """OpenAI's word for the sort of error."""
    if status == 429:
        return "rate_limit_error"
    if status == 401:
        return "authentication_error"
    return "invalid_request_error" if status < 500 else "server_error"


def near(name: str, names: Iterable[str]) -> str:
    """` Did you mean NAME?`, or nothing if none is near."""
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def engine_lost(error: BaseException) -> ApiError:
    """What running requests get when the engine has failed: which kind of error it is. The rest, such as addresses of
    other machines, is for whoever runs the server, whose log has it."""
    kind = describe(error).partition(":")[0]
    return ApiError(500, f"the engine failed, and the server ends: {kind} (its log says more)", code="engine_lost")


def not_finished(reason: str, error: str | None) -> ApiError:
    """For a request that the engine gave up."""
    if reason == "deadline":
        return ApiError(504, "the request's time was up before it was finished", code="deadline_exceeded")
    if reason == "cancelled":
        return ApiError(503, "the server is shutting down and did not wait for this request", code="shutting_down")
    return ApiError(500, f"the engine could not finish this request: {error or 'no reason given'}", code="engine_error")

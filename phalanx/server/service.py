"""What all endpoints share: limits, the engine, and the events of a request as text."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import field
from typing import Any

from starlette.requests import Request

from phalanx.base.dataclass import dataclass
from phalanx.base.log import Log
from phalanx.inference.request import (
    Finished,
    NewToken,
    Prompt,
    PromptScored,
    RequestError,
    SamplingOptions,
    TokenScore,
)
from phalanx.server.choices import ChoiceText, Increment
from phalanx.server.engine_thread import Answers, EngineThread, SequenceJob
from phalanx.server.errors import ApiError, engine_lost, not_finished
from phalanx.server.keys import ApiKeys
from phalanx.server.metrics import Metrics, Stopwatch
from phalanx.server.schemas import SamplingBody
from phalanx.server.served import ServedModel

LATEST = 32  # requests whose mean time Retry-After is made from


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """sequences: that run or wait at once, beyond which requests get 429. body: bytes of a request. read_seconds: for
    a body to come. write_seconds: for a client to take what is sent. drain_seconds: for running requests to end when
    the server is to stop."""

    sequences: int = 256
    body: int = 32 * 1024 * 1024
    read_seconds: float = 60.0
    write_seconds: float = 60.0
    drain_seconds: float = 60.0


@dataclass
class Service:
    """One model and its engine. `draining`: nothing new is taken. `allowed_hosts`: names that browsers may call this
    server by; None: any."""

    model: ServedModel
    engine: EngineThread
    metrics: Metrics
    log: Log
    limits: ServerLimits = field(default_factory=ServerLimits)
    keys: ApiKeys | None = None
    allowed_hosts: tuple[str, ...] | None = None
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    latest: list[float] = field(default_factory=list)

    async def start(
        self, jobs: Sequence[SequenceJob], field: str = "n", counted: str = "prompts x the larger of n and best_of"
    ) -> Answers:
        """Hand sequences to the engine. field, counted: of a request, what says how many. ApiError 503 if the server
        stops, 429 if too many are there, 400 for what the engine refuses."""
        self.check_open()
        limit = self.limits.sequences
        if len(jobs) > limit:
            message = f"{len(jobs)} sequences are asked for ({counted}); at most {limit} fit."
            raise ApiError(400, message, param=field, code="too_many_sequences")
        if self.engine.live + len(jobs) > limit:
            message = f"{self.engine.live} sequences run or wait, and {limit} are the most; try again later."
            raise ApiError(429, message, code="queue_full", headers={"retry-after": str(self.retry_after())})
        try:
            return await self.engine.submit(jobs)
        except RequestError as error:
            raise ApiError(400, f"{error.field}: {error.rule}.", param=error.field, code="invalid_value") from None

    def check_open(self) -> None:
        if self.engine.lost is not None:
            raise engine_lost(self.engine.lost)
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"retry-after": "10"})

    def retry_after(self) -> int:
        """Seconds in which a sequence should be over, by the latest ones."""
        mean = sum(self.latest) / len(self.latest) if self.latest else 1.0
        return max(1, min(60, math.ceil(mean / max(1, self.engine.live))))

    def over(self, began: float) -> None:
        """A request is over."""
        self.latest = [*self.latest[1 - LATEST :], time.monotonic() - began]


@dataclass
class TextStep:
    """What an event changes in choice `index`. scores: of its prompt. done: it is over."""

    index: int
    increment: Increment = field(default_factory=Increment)
    scores: tuple[TokenScore | None, ...] | None = None
    done: bool = False


async def steps(answers: Answers, choices: Sequence[ChoiceText], watch: Stopwatch) -> AsyncIterator[TextStep]:
    """Events of sequences as text. Sequences that are not over when the reader leaves are cancelled. ApiError if one
    could not be finished."""
    try:
        async for index, event in answers:
            watch.note(index, event)
            if isinstance(event, NewToken):
                increment = choices[index].add(event.token, event.score)
                if choices[index].stopped:
                    answers.cancel(index)
                    choices[index].end("stop")
                    watch.stopped()
                yield TextStep(index, increment, done=choices[index].stopped)
            elif isinstance(event, PromptScored):
                yield TextStep(index, scores=event.scores)
            elif isinstance(event, Finished):
                if event.reason not in ("stop", "length"):
                    raise not_finished(event.reason, event.error)
                yield TextStep(index, choices[index].end(event.reason), done=True)
    finally:
        answers.cancel()
        watch.end()


def job_of(body: SamplingBody, prompt: tuple[int, ...] | Prompt, options: SamplingOptions) -> SequenceJob:
    """A sequence of a request that has just come. Smaller numbers of `priority` come first, as in vLLM."""
    deadline = None if body.timeout is None else time.monotonic() + body.timeout
    return SequenceJob(prompt, options, -(body.priority or 0), deadline)


def finish_reason(choice: ChoiceText) -> str:
    return "stop" if choice.reason == "stop" else "length"


def usage(watch: Stopwatch) -> dict[str, Any]:
    return {
        "prompt_tokens": watch.prompt_tokens,
        "completion_tokens": watch.made,
        "total_tokens": watch.prompt_tokens + watch.made,
        "prompt_tokens_details": {"cached_tokens": min(watch.cached, watch.prompt_tokens)},
    }


def service_of(request: Request) -> Service:
    return request.app.state.service


def note(request: Request, watch: Stopwatch, user: str | None) -> None:
    """For the request's line in the log."""
    request.state.watch, request.state.user = watch, user

"""An engine that computes embeddings: waiting requests are embedded together, on all ranks of a layout. The server
uses it in the same way as the engine that generates tokens."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.inference.embedder import Embedder
from phalanx.inference.engine import Messages, StepMessage
from phalanx.inference.request import (
    Embedded,
    EngineLoad,
    Event,
    Finished,
    Prompt,
    Request,
    RequestError,
    SamplingOptions,
)

SEQUENCES = 16  # of packed texts that are embedded together, in each replica


class EmbeddingEngine:
    """Made on all ranks together. Rank 0's caller submits, cancels and steps; all other ranks `follow`.

    positions   tokens of the longest text
    """

    def __init__(self, embedder: Embedder, name: str, wait_s: float = 600.0):
        self.embedder, self.model_name, self.positions = embedder, name, embedder.most
        mesh = embedder.model.mesh
        self._messages = Messages(mesh.world, wait_s)
        self._most_tokens = SEQUENCES * embedder.most * mesh.dp.size
        self._vocabulary = embedder.model.plan.run.model.vocab_size
        self._lock = threading.Lock()
        self._waiting: deque[Request] = deque()
        self._gone: list[int] = []  # cancelled since the last step
        self._numbers = self._running = 0

    @property
    def idle(self) -> bool:
        with self._lock:
            return not self._waiting and not self._gone

    def submit(
        self, prompt: Sequence[int] | Prompt, options: SamplingOptions, priority: int = 0, deadline: float | None = None
    ) -> int:
        """The number of the request. RequestError for a text that is empty or too long, for ids that the model does not
        have, and for images. Priorities and options of sampling are those of other engines."""
        if isinstance(prompt, Prompt):
            if prompt.images:
                raise RequestError("images", len(prompt.images), "are not embedded")
            prompt = prompt.tokens
        if not 0 < len(prompt) <= self.positions:
            raise RequestError("input", len(prompt), f"must be texts of 1 to {self.positions} tokens")
        with self._lock:
            self._numbers += 1
            request = Request(number=self._numbers, prompt=tuple(prompt), deadline=deadline)
            request.check_tokens(self._vocabulary)
            self._waiting.append(request)
            return request.number

    def cancel(self, number: int) -> None:
        """Give up a request that waits; one that is over already is none."""
        with self._lock:
            kept = deque(request for request in self._waiting if request.number != number)
            if len(kept) < len(self._waiting):
                self._waiting = kept
                self._gone.append(number)

    def step(self) -> list[Event]:
        """Embed those that have waited longest, as many as fit."""
        now = time.monotonic()
        with self._lock:
            events: list[Event] = [Finished(number, "cancelled") for number in self._gone]
            self._gone.clear()
            some, tokens = list[Request](), 0
            while self._waiting and tokens + len(self._waiting[0].prompt) <= self._most_tokens:
                request = self._waiting.popleft()
                if request.deadline is not None and request.deadline < now:
                    events.append(Finished(request.number, "deadline"))
                    continue
                some.append(request)
                tokens += len(request.prompt)
            self._running = len(some)
        found = self._embed(self._messages.broadcast(StepMessage(now, [(0, request) for request in some])))
        for request, vector in zip(some, found):
            events += [Embedded(request.number, vector), Finished(request.number, "stop")]
        self._running = 0
        return events

    def load(self) -> EngineLoad:
        with self._lock:
            return EngineLoad(self._running, len(self._waiting), 0, 0)

    def follow(self) -> None:
        """On all ranks but the first: until rank 0 closes."""
        while True:
            message = self._messages.broadcast(None)
            if message.stop:
                return
            self._embed(message)

    def close(self) -> None:
        """On rank 0."""
        self._messages.broadcast(StepMessage(stop=True))
        self._messages.settle()

    def _embed(self, message: StepMessage) -> list[NDArray[np.float32]]:
        prompts = [request.prompt for _, request in message.requests]
        if not prompts:
            return []
        return list(self.embedder.embed(len(prompts), prompts.__getitem__).float().cpu().numpy())

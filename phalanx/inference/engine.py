"""The engine: requests in, tokens out, on every rank of a layout.

Rank 0 is asked; all ranks decide alike. Each step begins with one message from rank 0, its new requests and its clock,
after which every replica's scheduler, a pure function of the messages, makes the same step on all of its ranks.

    rank 0: submit, cancel ──▶ inbox ──message──▶ scheduler ──Step──▶ runner ──tokens, one step late──▶ events
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from phalanx.comm.axis import Axis
from phalanx.comm.host import host_axis
from phalanx.inference.load import InferenceModel, check_layout
from phalanx.inference.memory import (
    MemoryLimits,
    give_memory,
    layer_groups,
    pages_that_fit,
    remembering,
    room_for_pages,
    windows_of,
)
from phalanx.inference.pages import GroupSpec
from phalanx.inference.request import (
    Event,
    Finished,
    NewToken,
    PromptScored,
    Request,
    RequestError,
    SamplingOptions,
    TokenScore,
)
from phalanx.inference.runner import Drawn, Runner
from phalanx.inference.scheduler import RequestDoesNotFit, Scheduler, SchedulerSpec, Step
from phalanx.inference.scores import ScoredPrompt
from phalanx.ops.attention.paged import FP8


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What an engine makes room for.

    sequences   generated at once, in each replica
    tokens      computed in one step of a replica
    length      of a sequence at most, prompt and answer; None: the model's positions
    page_size   tokens in a page of memory
    memory_gib  for what is remembered, on each rank; None: all that `sequences` of `length` can use, but at most 90 %
                of what is free on a GPU, and on a CPU a quarter of it for all ranks together
    pages       dtype of what is remembered: that of the model, or FP8
    late        1: the host reads tokens a step late, so that the device never waits for it; 0: at once
    """

    sequences: int = 256
    tokens: int = 8192
    length: int | None = None
    page_size: int = 16
    memory_gib: float | None = None
    pages: str = "model"
    late: int = 1


@dataclass
class StepMessage:
    """What rank 0 tells all ranks before a step. requests: with the number of the replica that is to serve each.
    stop: there is no step any more."""

    now: float = 0.0
    requests: list[tuple[int, Request]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    stop: bool = False

    def text(self) -> str:
        return json.dumps([self.now, [[r, asdict(q)] for r, q in self.requests], self.cancelled, self.stop])

    @staticmethod
    def of(text: str) -> StepMessage:
        now, requests, cancelled, stop = json.loads(text)
        return StepMessage(now, [(r, request_of(q)) for r, q in requests], cancelled, stop)


def request_of(plain: dict[str, Any]) -> Request:
    options = dict(plain["options"])
    options["bias"] = tuple((int(token), float(added)) for token, added in options["bias"])
    options["end_tokens"] = tuple(options["end_tokens"])
    return Request(**{**plain, "prompt": tuple(plain["prompt"]), "options": SamplingOptions(**options)})


SHORT = 2**12  # bytes of a message that go out at once


class Messages:
    """From rank 0 to all ranks, over the hosts."""

    def __init__(self, world: Axis, wait_s: float):
        self._axis = host_axis(world, meet_s=wait_s, wait_s=wait_s)

    def broadcast(self, message: StepMessage | None) -> StepMessage:
        """Rank 0's message; other ranks give None."""
        if self._axis.size == 1:
            return message or StepMessage()
        data = b"" if message is None else message.text().encode()
        first = torch.zeros(SHORT + 8, dtype=torch.uint8)
        if message is not None:
            head = len(data).to_bytes(8, "little") + data[:SHORT]
            first[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._axis.broadcast(first, source=0)
        received = first.numpy().tobytes()
        size = int.from_bytes(received[:8], "little")
        if size <= SHORT:
            return StepMessage.of(received[8 : 8 + size].decode())
        whole = torch.frombuffer(bytearray(data or bytes(size)), dtype=torch.uint8)
        self._axis.broadcast(whole, source=0)
        return StepMessage.of(whole.numpy().tobytes().decode())

    def gather(self, text: str) -> list[str]:
        """Every rank's text."""
        return self._axis.all_gather_text(text)

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return bool(self._axis.all_reduce(torch.tensor([int(flag)])).wait().item())


class Engine:
    """Made on all ranks together. Rank 0's caller submits, cancels and steps, from one thread or several; all other
    ranks `follow`."""

    def __init__(self, model: InferenceModel, options: EngineOptions | None = None, wait_s: float = 600.0):
        options = options or EngineOptions()
        check_layout(model.plan.run)
        self.model, self.options = model, options
        mesh, positions = model.mesh, model.plan.run.model.max_position_embeddings
        length = min(options.length or positions, positions)
        tokens = max(options.tokens, options.sequences)
        self.limits = MemoryLimits(options.sequences, tokens, length, options.page_size)
        self.groups = self._remember(options)
        spec = SchedulerSpec(
            most_sequences=options.sequences,
            most_tokens=tokens,
            longest=length,
            page_size=options.page_size,
            groups=self.groups,
            late=options.late,
        )
        self.scheduler = Scheduler(spec)
        self.runner = Runner(model, self.limits, len(self.groups))
        self._messages = Messages(mesh.world, wait_s)
        self._lock = threading.Lock()
        self._inbox = StepMessage()
        self._numbers = 0
        self._open: dict[int, tuple[int, int]] = {}  # rank 0: of requests that are not over, replica and tokens
        self._load = [0] * mesh.dp.size  # rank 0: tokens of those, by replica
        self._prompts: dict[int, ScoredPrompt] = {}
        self._behind: tuple[Step, Drawn] | None = None
        self._paused = False
        grid = mesh.grid
        self._together = grid.dp > 1 and grid.ep > 1 and bool(model.plan.run.model.routed_experts)

    def _remember(self, options: EngineOptions) -> tuple[GroupSpec, ...]:
        """Give layers their pages: the same number on all ranks."""
        mesh, limits = self.model.mesh, self.limits
        layers = remembering(self.model.blocks)
        dtype = FP8 if options.pages == "fp8" else self.model.dtype
        groups = layer_groups(layers, windows_of(self.model.plan), dtype, limits.page_size)
        gib = options.memory_gib
        free = room_for_pages(mesh.device, mesh.world.size) if gib is None else gib * 2**30
        fit = torch.tensor(pages_that_fit(groups, limits, int(free)), device=mesh.world.device)
        pages = mesh.world.all_reduce(fit, op="min").wait().tolist()
        give_memory(layers, groups, pages, limits.page_size, dtype, mesh.device)
        return tuple(GroupSpec(group.window, count) for group, count in zip(groups, pages))

    # ---- what rank 0 is asked ----

    @property
    def positions(self) -> int:
        """Most tokens of a sequence, its prompt included."""
        return self.scheduler.spec.room

    @property
    def idle(self) -> bool:
        """On rank 0: nothing is asked that is not answered."""
        with self._lock:
            return not self._open

    @property
    def open_requests(self) -> list[int]:
        """On rank 0: numbers of the requests that are not over."""
        with self._lock:
            return list(self._open)

    def submit(
        self,
        prompt: Sequence[int],
        options: SamplingOptions | None = None,
        priority: int = 0,
        deadline: float | None = None,
    ) -> int:
        """Its number. deadline: on time.monotonic()'s clock. RequestError for what cannot be served."""
        options = options or SamplingOptions()
        self.check(prompt, options)
        with self._lock:
            request = Request(
                number=self._numbers, prompt=tuple(prompt), options=options, priority=priority, deadline=deadline
            )
            self._numbers += 1
            replica = min(range(len(self._load)), key=self._load.__getitem__)
            self._load[replica] += len(prompt)
            self._open[request.number] = replica, len(prompt)
            self._inbox.requests.append((replica, request))
        return request.number

    def check(self, prompt: Sequence[int], options: SamplingOptions) -> None:
        """RequestError if it could never be served."""
        request = Request(number=0, prompt=tuple(prompt), options=options)
        request.check_tokens(self.model.plan.run.model.vocab_size)
        try:
            self.scheduler.check(request)
        except RequestDoesNotFit as error:
            raise RequestError("prompt", f"{error.prompt} tokens", str(error)) from error

    def cancel(self, number: int) -> None:
        """A request is no longer wanted; it ends with the next step, unless it is over by then."""
        with self._lock:
            if number in self._open:
                self._inbox.cancelled.append(number)

    # ---- steps ----

    def step(self) -> list[Event]:
        """One step of every replica; collective. The events of all of them on rank 0, elsewhere those of its own."""
        message = self._messages.broadcast(self._outbox())
        if message.stop:
            self._paused = True
            return []
        events = self._take_in(message)
        step = self.scheduler.schedule(message.now)
        events += step.finished
        drawn = None
        if self._messages.any(len(step) > 0) if self._together else len(step):
            drawn = self.runner.run(step, self._prompts)
        behind, self._behind = self._behind, None
        if behind is not None:
            events += self._observe(*behind)
        if drawn is not None and len(step):
            if self.options.late:
                self._behind = step, drawn
            else:
                events += self._observe(step, drawn)
        return self._heard(events)

    def follow(self) -> None:
        """Ranks other than 0: steps until rank 0 pauses."""
        self._paused = False
        while not self._paused:
            self.step()

    def pause(self) -> None:
        """Rank 0: the others need not wait for a further step; they go on when they `follow` again."""
        if self.model.mesh.world.size > 1:
            with self._lock:
                self._inbox.stop = True
            self.step()

    def close(self) -> None:
        """Rank 0: give up what is under way."""
        for number in self.open_requests:
            self.cancel(number)
        while not self.idle:
            self.step()
        self.pause()

    def _outbox(self) -> StepMessage | None:
        if self.model.mesh.rank:
            return None
        with self._lock:
            message, self._inbox = self._inbox, StepMessage()
        return replace(message, now=time.monotonic())

    def _take_in(self, message: StepMessage) -> list[Event]:
        events: list[Event] = []
        for replica, request in message.requests:
            if replica == self.model.mesh.dp.index:
                self.scheduler.add(request)
                if request.options.prompt_logprobs is not None:
                    self._prompts[request.number] = ScoredPrompt(request)
        for number in message.cancelled:
            ended = self.scheduler.cancel(number)
            events += [] if ended is None else [ended]
        return events

    def _observe(self, step: Step, drawn: Drawn) -> list[Event]:
        """What the step made: waits for the device."""
        result = drawn.read()
        events: list[Event] = []
        for number, position, score in result.prompts:
            prompt = self._prompts.get(number)
            if prompt is not None and prompt.add(position, score):
                events.append(PromptScored(number, tuple(prompt.scores)))
                del self._prompts[number]
        events += self._end_broken(step, result.tokens)
        observed = self.scheduler.observe(step, result.tokens)
        for i, kept in enumerate(observed.kept):
            number, scores = int(step.requests[i]), result.scores[i]
            for place, token in enumerate(result.tokens[i, :kept].tolist()):
                events.append(NewToken(number, token, scores[place] if scores else None))
        return events + observed.finished

    def _end_broken(self, step: Step, tokens: np.ndarray) -> list[Event]:
        """End the requests whose logits were not finite, of which no token could be drawn."""
        ended: list[Event] = []
        for i in np.flatnonzero(step.samples & (tokens[:, 0] < 0)).tolist():
            tokens[i, 0] = 0
            over = self.scheduler.cancel(int(step.requests[i]), "error")
            if over is not None:
                ended.append(replace(over, error="the model's logits are not finite"))
        return ended

    def _heard(self, events: list[Event]) -> list[Event]:
        """On rank 0 with those of all replicas, and its own books kept."""
        mesh = self.model.mesh
        if mesh.dp.size > 1:
            leads = mesh.at.tp == mesh.at.pp == mesh.at.cp == 0 and mesh.rank > 0
            received = self._messages.gather(json.dumps([plain_event(e) for e in events] if leads else []))
            if mesh.rank == 0:
                events += [event_of(plain) for text in received[1:] for plain in json.loads(text)]
        if mesh.rank == 0:
            self._keep_books(events)
        for event in events:
            if isinstance(event, Finished):
                self._prompts.pop(event.request, None)
        return events

    def _keep_books(self, events: Sequence[Event]) -> None:
        with self._lock:
            for event in events:
                if isinstance(event, Finished) and event.request in self._open:
                    replica, tokens = self._open.pop(event.request)
                    self._load[replica] -= tokens


EVENTS: dict[str, type] = {"token": NewToken, "scored": PromptScored, "finished": Finished}


def plain_event(event: Event) -> list[Any]:
    """As JSON takes it."""
    kind = next(name for name, made in EVENTS.items() if isinstance(event, made))
    return [kind, asdict(event)]


def event_of(plain: list[Any]) -> Event:
    kind, values = plain
    if kind == "token" and values["score"] is not None:
        values["score"] = score_of(values["score"])
    if kind == "scored":
        values["scores"] = tuple(None if score is None else score_of(score) for score in values["scores"])
    made: Event = EVENTS[kind](**values)
    return made


def score_of(plain: dict[str, Any]) -> TokenScore:
    return TokenScore(plain["token"], plain["logprob"], tuple((int(t), float(p)) for t, p in plain["likeliest"]))

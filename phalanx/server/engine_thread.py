"""A thread that runs an engine step by step, and passes its results to the event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from phalanx.base.dataclass import dataclass
from phalanx.inference.request import EngineLoad, Event, Finished, Prompt, RequestError, SamplingOptions
from phalanx.server.errors import engine_lost

KEEP_ALIVE = 10.0  # seconds after which an idle engine steps: its other ranks wait for one, and a lost rank is noticed


class AnyEngine(Protocol):
    """What the server needs of an engine. One thread at a time calls it.

    positions   tokens of the longest sequence, prompt included
    """

    model_name: str
    positions: int

    def submit(
        self, prompt: Sequence[int] | Prompt, options: SamplingOptions, priority: int = 0, deadline: float | None = None
    ) -> int:
        """The number of the request. RequestError for what cannot be served."""

    def cancel(self, number: int) -> None:
        """Give up a request; one that is over already is none."""

    def step(self) -> list[Event]:
        """One step of the model; nothing if it is idle."""

    def load(self) -> EngineLoad: ...

    @property
    def idle(self) -> bool: ...


@dataclass(frozen=True)
class SequenceJob:
    """One sequence to be made. priority: larger ones first. deadline: on time.monotonic()'s clock."""

    prompt: tuple[int, ...] | Prompt
    options: SamplingOptions
    priority: int = 0
    deadline: float | None = None


class Answers:
    """What becomes of the sequences of one HTTP request: pairs of their index and an event, until all are over.

    Iterating raises what `fail` was given, such as an ApiError if the engine fails.
    """

    def __init__(self, thread: EngineThread, count: int):
        self._thread = thread
        self._events: asyncio.Queue[tuple[int, Event] | BaseException] = asyncio.Queue()
        self.numbers: list[int] = []
        self.open = set(range(count))

    def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        return self._all()

    async def _all(self) -> AsyncIterator[tuple[int, Event]]:
        while self.open:
            arrived = await self._events.get()
            if isinstance(arrived, BaseException):
                self.open.clear()
                raise arrived
            index, event = arrived
            if index not in self.open:
                continue  # it was cancelled meanwhile
            if isinstance(event, Finished):
                self.open.discard(index)
            yield index, event

    def put(self, index: int, event: Event) -> None:
        self._events.put_nowait((index, event))

    def fail(self, error: BaseException) -> None:
        self._events.put_nowait(error)

    def cancel(self, index: int | None = None) -> None:
        """Give up one sequence, or all that are not over."""
        given_up = [index] if index is not None else list(self.open)
        for each in given_up:
            if each in self.open:
                self.open.discard(each)
                self._thread.cancel(self.numbers[each])


@dataclass(frozen=True)
class Submit:
    """Jobs to be started, and who is told that they are."""

    jobs: Sequence[SequenceJob]
    answers: Answers
    done: asyncio.Future[None]


@dataclass(frozen=True)
class Cancel:
    """A request of the engine that nobody waits for any more."""

    number: int


@dataclass(frozen=True)
class GiveUp:
    """Everything is to be given up; who waits gets the error."""

    error: Exception


@dataclass(frozen=True)
class Stop:
    """The thread is to end."""


class EngineThread:
    """Owns an engine. Its methods belong to the event loop that `start` was called on.

    live      sequences that were accepted and are not over
    load      what the engine had to do after its last step
    lost      the error that ended the engine, if one did; on_lost is called on the loop when that happens
    """

    def __init__(
        self,
        engine: AnyEngine,
        on_lost: Callable[[BaseException], None] = lambda error: None,
        keep_alive: float = KEEP_ALIVE,
    ):
        self.engine = engine
        self._keep_alive = keep_alive
        self.live = 0
        self.load = engine.load()
        self.lost: BaseException | None = None
        self._on_lost = on_lost
        self._asked: queue.SimpleQueue[Submit | Cancel | GiveUp | Stop] = queue.SimpleQueue()
        self._owners: dict[int, tuple[Answers, int]] = {}  # of the engine's requests; for its thread alone
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._quiet: asyncio.Event

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._thread.start()

    async def submit(self, jobs: Sequence[SequenceJob]) -> Answers:
        """Start all of them, or none. RequestError of the first that cannot be served; ApiError if the engine is
        lost."""
        if self.lost is not None:
            raise engine_lost(self.lost)
        answers = Answers(self, len(jobs))
        done: asyncio.Future[None] = self._loop.create_future()
        self._count(len(jobs))
        self._asked.put(Submit(jobs, answers, done))
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            done.add_done_callback(lambda over: None if over.exception() else answers.cancel())
            raise
        return answers

    def cancel(self, number: int) -> None:
        self._asked.put(Cancel(number))

    def give_up(self, error: Exception) -> None:
        """Cancel everything; who waits for an answer gets `error`."""
        self._asked.put(GiveUp(error))

    async def quiet(self) -> None:
        """Wait until no sequence is live."""
        await self._quiet.wait()

    def close(self) -> None:
        """End the thread, after the step that it is in."""
        self._asked.put(Stop())
        self._thread.join()

    # ---- on the loop -------------------------------------------------------------------------

    def _count(self, change: int) -> None:
        self.live += change
        if self.live:
            self._quiet.clear()
        else:
            self._quiet.set()

    def _deliver(self, events: list[tuple[Answers, int, Event]]) -> None:
        for answers, index, event in events:
            if isinstance(event, Finished):
                self._count(-1)
            answers.put(index, event)

    def _started(self, asked: Submit, numbers: list[int]) -> None:
        asked.answers.numbers = numbers
        asked.done.set_result(None)

    def _refused(self, asked: Submit, error: Exception) -> None:
        self._count(-len(asked.jobs))
        asked.done.set_exception(error)

    def _fail(self, owners: list[tuple[Answers, int]], error: BaseException) -> None:
        for answers, _ in owners:
            answers.fail(error)
        self._count(-len(owners))

    def _end(self, owners: list[tuple[Answers, int]], error: BaseException) -> None:
        self.lost = error
        while not self._asked.empty():
            asked = self._asked.get()
            if isinstance(asked, Submit):
                self._refused(asked, engine_lost(error))
        self._fail(owners, engine_lost(error))
        self._on_lost(error)

    # ---- on the engine's thread --------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._ask():
                if not self.engine.idle:
                    self._step()
        except Exception as error:
            self._call(self._end, list(self._owners.values()), error)

    def _ask(self) -> bool:
        """Do what was asked for; if there is nothing else to do, wait until something is. False: end."""
        while self.engine.idle or not self._asked.empty():
            try:
                asked = self._asked.get(timeout=self._keep_alive)
            except queue.Empty:
                self._step()
                continue
            if isinstance(asked, Stop):
                return False
            if isinstance(asked, Submit):
                self._submit(asked)
            elif isinstance(asked, Cancel):
                self._cancel(asked.number)
            else:
                owners = list(self._owners.values())
                for number in list(self._owners):
                    self.engine.cancel(number)
                self._owners.clear()
                self._call(self._fail, owners, asked.error)
        return True

    def _submit(self, asked: Submit) -> None:
        numbers: list[int] = []
        try:
            for job in asked.jobs:
                numbers.append(self.engine.submit(job.prompt, job.options, job.priority, job.deadline))
        except RequestError as error:
            for number in numbers:
                self.engine.cancel(number)
            self._call(self._refused, asked, error)
            return
        except Exception as error:
            self._call(self._refused, asked, engine_lost(error))
            raise
        self._owners |= {number: (asked.answers, index) for index, number in enumerate(numbers)}
        self._call(self._started, asked, numbers)

    def _cancel(self, number: int) -> None:
        if self._owners.pop(number, None) is not None:
            self.engine.cancel(number)
            self._call(self._count, -1)

    def _step(self) -> None:
        events = [(event, self._owners.get(event.request)) for event in self.engine.step()]
        for event, _ in events:
            if isinstance(event, Finished):
                self._owners.pop(event.request, None)
        self.load = self.engine.load()
        owned = [(*owner, event) for event, owner in events if owner is not None]
        if owned:
            self._call(self._deliver, owned)

    def _call(self, function: Callable[..., None], *values: object) -> None:
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(function, *values)

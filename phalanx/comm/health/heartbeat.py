"""Heartbeat: each rank regularly tells the others where it is, so that ranks that lose a peer can say which one it was
and where it stopped.

A thread of each rank writes a line of JSON, signed, to the store at which the ranks met (comm/meeting.py). The lines
are read when a collective has failed, and regularly by rank 0's thread, to find a rank for which the others wait. A
line holds the stack of the main thread and, during training, the step and its time. Without a run's secret there is no
signed store, and hanging ranks are found only by time-outs.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from statistics import median
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import PeerLost, Preempted
from phalanx.base.log import describe
from phalanx.comm.health.calls import Calls, CollectiveCall, culprit
from phalanx.comm.health.pace import Pace, Slow, slow_ranks
from phalanx.comm.meeting import SignedStore

T = TypeVar("T")
SHOWN = 8  # ranks in one message
# a pace covers so many steps and beats; so many beats between two looks at all paces
PACE_STEPS, PACE_BEATS, LOOK_BEATS = (
    6,
    20,
    2,
)
NO_STORE = "rank 0, which keeps the ranks' store, does not answer: stopped, dead or cut off"
STILL_S = 2.0  # a beat that is so late means that the process did not run meanwhile
LEAVE_S = 10.0  # how long to wait for ranks that reach the end of a run after the others
LONGEST = 1000  # characters of an error that are passed on to the others
LOOK_S, SETTLED_S = 0.05, 0.5  # between two looks for reports of a failed rank; for reports that come after the first
PATIENCE_S = 1.0  # for an answer of the store, which rank 0 may hold


@dataclass(frozen=True)
class Beat:
    """What a rank says about itself.

    number  of beats so far
    place   of its main thread in the library
    waits   whether it waits for others, in a collective
    failed  whether it has lost a peer itself
    pace    over its last steps, once it has done some
    """

    rank: int
    host: str
    pid: int
    number: int = 0
    step: int = 0
    place: str = ""
    waits: bool = False
    failed: bool = False
    pace: Pace | None = None

    @property
    def who(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.pid})"

    @property
    def where(self) -> str:
        return f"step {self.step} at {self.place or 'no place in phalanx'}"


class Heartbeat:
    """Inside the context the rank beats. A PeerLost that leaves the context has been replaced by one that names the
    culprit.

    rank, world   this rank and the number of ranks; a single rank cannot lose a peer
    timeout_s     of collectives; beats come every twentieth of it, at least every second
    calls         of this rank; published when it waits for long, or has lost a peer
    stage         of the pipeline
    store         where ranks publish; None: nothing is published, and no culprit is named
    slow          on rank 0: receives the ranks for which the others wait, judging by what all say about their steps
    first_word    receives an error that ends the rank before anything else is done about it
    unsigned      on rank 0: receives how many messages in the store are not from this run's ranks, whenever that has
                  doubled
    stood_still   receives the seconds for which not even the thread of this process ran
    """

    def __init__(
        self,
        rank: int,
        world: int,
        timeout_s: float,
        calls: Calls | None = None,
        stage: int = 0,
        store: SignedStore | None = None,
    ):
        self._shared = store if world > 1 else None
        self.calls, self.stage = calls or Calls(), stage
        self.slow: dict[int, tuple[str, Slow]] = {}
        self.first_word: Callable[[BaseException], None] = lambda error: None
        self.unsigned: Callable[[int], None] = lambda count: None
        self._unsigned_said = 0
        self.stood_still: Callable[[float], None] = lambda seconds: None
        self._steps: deque[tuple[float, float]] = deque(maxlen=PACE_STEPS)
        self._places: deque[str] = deque(maxlen=PACE_BEATS)
        self._slow_before: dict[int, Slow] = {}
        self.world, self.step, self.interval = world, 0, min(1.0, max(0.25, timeout_s / 20))
        self._me = Beat(rank, socket.gethostname(), os.getpid())
        self.timeout_s, self._looked = timeout_s, 0.0
        self._heard: dict[
            int, tuple[int, float]
        ] = {}  # by rank: the number of its last beat, and when it was first seen
        self._listener: threading.Thread | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")
        self._main = threading.main_thread().ident

    def __enter__(self) -> Heartbeat:
        if self._shared is not None:
            try:
                self._store = self._shared.clone(PATIENCE_S)
            except (RuntimeError, dist.DistError) as error:
                raise PeerLost(f"{NO_STORE}; {error}") from error
            self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        if error is not None:
            self.first_word(error)
        if self._shared is None:
            return
        if isinstance(error, Exception) and not isinstance(error, (PeerLost, Preempted)):
            self._in_time(
                lambda: self._store.set(
                    f"failed/{self._me.rank}", json.dumps([time.time(), f"ended with {describe(error)[:LONGEST]}"])
                )
            )
        self._thread.join(PATIENCE_S)
        if error is None or isinstance(error, Preempted):
            self._in_time(self._leave_together, min(LEAVE_S, self.timeout_s))
            self._count_unsigned(self._unsigned_said + 1)
        if isinstance(error, PeerLost):
            mine = place_of(frames_of(trace))
            began = time.monotonic()
            blame = self._in_time(lambda: self._blame(mine), 2.5 * self.interval + PATIENCE_S) or NO_STORE
            if (
                self._me.rank == 0
            ):  # the store may be in this rank's process, and the others still look into it for about as long
                time.sleep(min(2 * self.interval, SETTLED_S + time.monotonic() - began))
            raise PeerLost(f"{blame}; {error}") from error

    def _leave_together(self) -> None:
        """Wait until all ranks are here: closing connections may lose what was last sent, and the store ends with its
        rank."""
        here = [f"leaving/{rank}" for rank in range(self.world)]
        self._store.set(here[self._me.rank], "done")
        if self._me.rank == 0:
            while not (self._store.has(here) and len(self._store.read(here)) == self.world):
                time.sleep(0.02)
            self._store.set("left", "all")
        while self._store.get("left") is None:
            time.sleep(0.02)

    def at_step(self, step: int) -> None:
        self.step = step

    def _run(self) -> None:
        number, made = 0, -1
        while True:
            number += 1
            place, waits = place_of(frames_in(sys._current_frames().get(self._main or 0)))
            try:
                self._places.extend([] if waits else [place])
                self._say(
                    Beat(self._me.rank, self._me.host, self._me.pid, number, self.step, place, waits, pace=self._pace())
                )
                if self._me.rank == 0 and number % LOOK_BEATS == 0:
                    self._find_slow()
                if waits and made == self.calls.made:
                    self._say_calls()
                made = self.calls.made
            except (RuntimeError, dist.DistError):
                pass  # the store may have ended with its rank; ranks that lose a collective report what matters
            began = time.monotonic()
            if self._over.wait(self.interval):
                return
            if (late := time.monotonic() - began - self.interval) > STILL_S:
                self.stood_still(late)

    def stepped(self, work_s: float, step_s: float) -> None:
        """A step took `step_s` seconds, of which this rank worked `work_s` and waited for others the rest."""
        self._steps.append((work_s, step_s))

    def _pace(self) -> Pace | None:
        steps, places = list(self._steps), list(self._places)
        if len(steps) < PACE_STEPS // 2:
            return None
        work_s, step_s = (median(values) for values in zip(*steps))
        return Pace(self._me.rank, self.stage, work_s, step_s, max(places, key=places.count) if places else "")

    def _find_slow(self) -> None:
        """Report ranks that were slow in two successive looks."""
        beats = [beat for beat in self._all() if beat.pace]
        found = slow_ranks([beat.pace for beat in beats if beat.pace])
        self._count_unsigned(max(1, 2 * self._unsigned_said))
        self.slow = {
            beat.rank: (beat.who, found[beat.rank])
            for beat in beats
            if beat.rank in found and beat.rank in self._slow_before
        }
        self._slow_before = found

    def _count_unsigned(self, least: int) -> None:
        if self._me.rank == 0 and self._store.refused >= least:
            self._unsigned_said = self._store.refused
            self.unsigned(self._unsigned_said)

    def _say(self, beat: Beat) -> None:
        self._store.set(f"heartbeat/{beat.rank}", json.dumps(asdict(beat)))

    def _say_calls(self) -> None:
        self._store.set(f"calls/{self._me.rank}", json.dumps(self.calls.last()))

    def look(self) -> None:
        """To be called while this rank waits for something that may take long, such as others' writing: PeerLost if a
        rank has been silent for timeout_s."""
        if self._shared is None or time.monotonic() < self._looked + self.interval:
            return
        now = self._looked = time.monotonic()
        self._heard.setdefault(0, (-1, now))  # the store itself may be silent
        if (
            self._listener is None or not self._listener.is_alive()
        ):  # over a slow network an answer takes its time, and is waited for by nobody
            self._listener = threading.Thread(target=self._listen, daemon=True)
            self._listener.start()
        silent = [
            rank for rank, (_, last) in self._heard.items() if now - last > self.timeout_s and rank != self._me.rank
        ]
        if silent:
            raise PeerLost(f"nothing was heard of ranks {', '.join(map(str, silent[:SHOWN]))} for {self.timeout_s:g} s")

    def _listen(self) -> None:
        with suppress(RuntimeError, dist.DistError):
            for beat in self._all():
                if self._heard.get(beat.rank, (-1, 0.0))[0] != beat.number:
                    self._heard[beat.rank] = (beat.number, time.monotonic())

    def _in_time(self, work: Callable[[], T], limit_s: float = PATIENCE_S) -> T | None:
        """The result of a look into the store; None: no answer in time. A store whose rank is stopped does not answer
        at all, whatever its timeout is."""
        found: list[T] = []

        def run() -> None:
            with suppress(RuntimeError, dist.DistError):
                found.append(work())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(limit_s)
        return found[0] if found else None

    def _blame(self, mine: tuple[str, bool]) -> str:
        """Who is to blame, in words. So that ranks that fail at the same time do not blame each other, each first
        publishes that it has failed."""
        self._say(Beat(self._me.rank, self._me.host, self._me.pid, 0, self.step, *mine, failed=True))
        self._say_calls()
        before, until = self._all(), time.monotonic() + 2.5 * self.interval
        while time.monotonic() < until and not self._read("failed"):
            time.sleep(LOOK_S)
        # an earlier failure may be published a little later; without one, ranks are judged by their beats
        time.sleep(min(SETTLED_S, max(0.0, until - time.monotonic())))
        return self._first_failure(before) or verdict(before, self._all(), self._all_calls)

    def _first_failure(self, beats: list[Beat]) -> str:
        """In words, the rank that failed first among those that reported it, or for which a launcher did; empty if none
        did."""
        said = [(*json.loads(text), rank) for rank, text in self._read("failed").items()]
        if not said:
            return ""
        _, why, rank = min(said)
        seen = next((f"; last seen in {beat.where}" for beat in beats if beat.rank == rank), "")
        return f"rank {rank} of {self.world} {why}{seen}"

    def _all_calls(self) -> dict[int, list[CollectiveCall]]:
        return {rank: [CollectiveCall(*c) for c in json.loads(text)] for rank, text in self._read("calls").items()}

    def _all(self) -> list[Beat]:
        said = [json.loads(text) for text in self._read("heartbeat").values()]
        return [Beat(**{**beat, "pace": Pace(**beat["pace"]) if beat["pace"] else None}) for beat in said]

    def _read(self, what: str) -> dict[int, str]:
        """What each rank has published under this key, by rank."""
        keys = [f"{what}/{rank}" for rank in range(self.world)]
        said = self._store.read(keys)
        return {rank: said[key] for rank, key in enumerate(keys) if key in said}


def verdict(before: list[Beat], after: list[Beat], calls: Callable[[], dict[int, list[CollectiveCall]]] = dict) -> str:
    """The culprit, from two looks at all ranks' beats: a silent rank; or one that did not move and waits for nobody; or
    one that called another collective than the others; or else where all of them wait."""
    earlier = {beat.rank: beat for beat in before}
    alive = [b for b in after if not b.failed]
    silent = [b for b in alive if b.rank in earlier and b.number == earlier[b.rank].number]
    parted = went(after, culprit(calls()))
    if silent:
        died = (
            f"{listed(silent)} {'is' if len(silent) == 1 else 'are'} silent: stopped, dead or cut off; "
            f"last seen in {stood(silent)}"
        )
        return f"{parted}; {died}" if parted else died
    busy = [
        b
        for b in alive
        if not b.waits and b.rank in earlier and (b.step, b.place) == (earlier[b.rank].step, earlier[b.rank].place)
    ]
    if busy:
        return (
            f"{listed(busy)} did not come to where the others wait: "
            f"{'it is' if len(busy) == 1 else 'they are'} in {stood(busy)}"
        )
    answer = "every rank answers, so a connection between them failed, or they wait for different things"
    return parted or f"{answer}: {listed(after)} in {stood(after)}"


def went(beats: list[Beat], found: tuple[tuple[int, ...], str] | None) -> str:
    """A description of the ranks that called another collective than the others."""
    if found is None:
        return ""
    who = [b for b in beats if b.rank in found[0]]
    how = "went another way than the others" if len(who) == 1 else "went different ways"
    return f"{listed(who)} {how}: {found[1]}; {'it stands' if len(who) == 1 else 'they stand'} in {stood(who)}"


def listed(beats: list[Beat]) -> str:
    more = f" and {len(beats) - SHOWN} more" if len(beats) > SHOWN else ""
    return ", ".join(b.who for b in beats[:SHOWN]) + more


def stood(beats: list[Beat]) -> str:
    """Where ranks were, mentioned once if all were in the same place."""
    return "; ".join(dict.fromkeys(b.where for b in beats[:SHOWN]))


def frames_in(frame: FrameType | None) -> list[tuple[str, int, str]]:
    """(file, line, function) of a stack, the innermost first."""
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


def frames_of(trace: TracebackType | None) -> list[tuple[str, int, str]]:
    found = []
    while trace is not None:
        found.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno, trace.tb_frame.f_code.co_name))
        trace = trace.tb_next
    return found[::-1]


def place_of(stack: list[tuple[str, int, str]]) -> tuple[str, bool]:
    """The innermost place in the library outside comm/, and whether the thread is communicating there."""
    ours = [
        (file.replace("\\", "/").rsplit("phalanx/", 1)[1], line, name)
        for file, line, name in stack
        if "phalanx/" in file.replace("\\", "/")
    ]
    outside = [at for at in ours if not at[0].startswith("comm/")]
    waits = bool(ours) and ours[0][0].startswith("comm/") and not ours[0][0].startswith("comm/heartbeat")
    return (f"{outside[0][0]}:{outside[0][1]} in {outside[0][2]}" if outside else "", waits)

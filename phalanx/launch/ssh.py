"""SSH: a run on hosts that no scheduler manages. One process on each (node.py) starts the host's ranks; their output
comes back, and requests to stop are passed on. Nothing is restarted automatically.

Every host's output goes to `logs/ssh-START/` in the run's folder on this machine. The terminal and `logs/ssh-START.log`
show what the first host says, and each line that another one says on its standard error once.
"""

from __future__ import annotations

import json
import os
import queue
import re
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import field
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import BadNode, CheckpointError, ConfigError, PeerLost, Preempted, Problem
from phalanx.base.placement import SECRET
from phalanx.launch.early import NOTHING_TO_SAVE
from phalanx.launch.ends import ENDS_AT
from phalanx.launch.env import NODE, NODES
from phalanx.launch.job import FINAL, ClusterJob
from phalanx.launch.local import Stops, forwarded_signals
from phalanx.launch.outcome import RankFailed, signal_name
from phalanx.launch.remote import LOST, RemoteProcess, same_program, start_remote
from phalanx.launch.submitted import logs_of
from phalanx.launch.template import template

COME_S = 60.0  # for all hosts to answer
ALL_NAMED_S = 12.0  # once one cannot be reached: as long as ssh tries (its ConnectTimeout)
LEFT_S = 60.0  # for the others, once one has ended: they notice a lost peer by themselves
END_S = 15.0  # from the request to end at once until the way to a host is cut
KILLED = 128  # what a shell adds to the number of a signal
AT_ONCE = 64  # hosts that are started at the same time
NOT_STARTED = "nothing was started; `phalanx preflight --hosts FILE` looks closer"
LINES_KEPT = 10_000  # of standard error that are shown once


class HostsRefused(BadNode):
    """Hosts on which the run cannot be started; nothing runs."""

    kind = ""

    def __init__(self, text: str, exit_code: int = BadNode.exit_code):
        self.exit_code = exit_code
        super().__init__(text)


def script_of(job: ClusterJob) -> str:
    """What each host runs, for bash. ConfigError if the job asks for what ssh cannot give."""
    if job.cluster.image is not None:
        rule = (
            "is not used over ssh, which starts the ranks on the hosts themselves: unset it, or start a container by "
        )
        raise ConfigError([Problem("cluster.image", job.cluster.image, f"{rule}cluster.program")])
    own = job.cluster.program != "phalanx" or job.cluster.setup
    program = job.cluster.program if own else same_program()
    return template("node.sh").render(job=job, program=program, words=["train", *job.words], logs=logs_of(job.folder))


def places(job: ClusterJob, first: Mapping[str, Any], secret: str) -> Iterator[dict[str, str]]:
    """The variables that tell each host its place. first: what the first host said of itself."""
    given = job.cluster.environment
    shared = {
        NODES: str(len(job.hosts)),
        "MASTER_ADDR": str(given.get("MASTER_ADDR", first["address"])),
        "MASTER_PORT": str(given.get("MASTER_PORT", first["port"])),
        SECRET: secret or secrets.token_hex(32),
    }
    if job.time_s is not None:
        shared[ENDS_AT] = str(int(time.time()) + job.time_s)
    for number in range(len(job.hosts)):
        yield {**shared, NODE: str(number)}


@dataclass
class HostEnd:
    """code: of ssh, which is that of phalanx on the host unless ssh itself failed."""

    number: int
    code: int


@dataclass
class RunHost:
    """A host of the run. introduced: what it said of itself; None: nothing yet."""

    number: int
    name: str
    remote: RemoteProcess
    introduced: dict[str, Any] | None = None
    over: bool = False

    def send(self, order: Mapping[str, Any]) -> None:
        """One that is gone need not know."""
        if self.remote.process.stdin is not None and not self.over:
            with suppress(OSError):  # unbuffered, because a signal may come in the middle
                os.write(self.remote.process.stdin.fileno(), json.dumps(order).encode() + b"\n")


class HostLogs:
    """The files of the hosts' output, and the terminal. A disk that is full costs lines of the files; that is said
    once."""

    def __init__(self, folder: Path, start: str, hosts: tuple[str, ...]):
        """start: names this one, such as ssh-20260702-101500."""
        self.folder = folder / start
        self._lock = threading.Lock()
        self._shown: dict[str, None] = {}
        self._complained = False
        self.begun = False  # before that, what hosts say counts only if they cannot take part
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            names = [re.sub(r"[^\w.-]", "-", host) for host in hosts]
            self._files = [
                open(self.folder / f"node-{number}-{name}.log", "ab", buffering=0) for number, name in enumerate(names)
            ]
            self._shared = open(folder / f"{start}.log", "ab", buffering=0)
        except OSError as error:
            raise CheckpointError(
                f"{error.filename}: {error.strerror}; the hosts' output goes there: choose a `dir` that can be written"
            ) from error

    def out(self, number: int, line: bytes) -> None:
        """A line of standard output."""
        with self._lock:
            self._write(self._files[number], line)
            if number == 0 and self.begun:
                self._show(sys.stdout, line)

    def error(self, number: int, host: str, text: str) -> None:
        """A line of standard error."""
        with self._lock:
            self._write(self._files[number], text.encode() + b"\n")
            if text in self._shown or not self.begun:
                return
            self._shown[text] = None
            if len(self._shown) > LINES_KEPT:
                self._shown.pop(next(iter(self._shown)))
            self._show(sys.stderr, (text if number == 0 else f"{host}: {text}").encode() + b"\n")

    def _show(self, stream: Any, line: bytes) -> None:
        self._write(self._shared, line)
        with suppress(OSError, ValueError):  # the terminal is gone; the run is not
            stream.write(line.decode(errors="replace"))
            stream.flush()

    def _write(self, file: BinaryIO, line: bytes) -> None:
        try:
            file.write(line)
        except OSError as error:
            if not self._complained:
                self._complained = True
                with suppress(OSError, ValueError):
                    what = "lines are missing there from here on; the run goes on"
                    print(f"warning: {self.folder}: {error.strerror}: {what}", file=sys.stderr, flush=True)

    def close(self) -> None:
        for file in (*self._files, self._shared):
            file.close()


Reach = Callable[[int, str, str, Callable[[str], None]], RemoteProcess]
"""Start a command on a host: (number, name, command, what hears its standard error) -> the process there."""


def by_ssh(ssh: str) -> Reach:
    """ssh: the command that leads to a host."""
    return lambda number, name, command, hear: start_remote(name, ssh, command, hear)


@dataclass
class HostsRun:
    """One start of a job on its hosts. secret: of the run; empty: one is made."""

    job: ClusterJob
    reach: Reach
    script: str
    secret: str
    logs: HostLogs
    hosts: list[RunHost] = field(default_factory=list)
    ended: list[HostEnd] = field(default_factory=list)
    stop_asked: bool = False
    _events: queue.SimpleQueue[HostEnd | None] = field(default_factory=queue.SimpleQueue)  # None: look again

    def run(self) -> None:
        """Start it and wait for its end. HostsRefused if a host cannot be reached or does not answer; RankFailed with
        the exit code of the host that failed first."""
        with forwarded_signals(self._pass_on) as stops, self._ending():
            self._start()
            self._meet(stops)
            self._follow(stops)
            failed = stops.ended_at_once() or verdict(self.hosts, self.ended, self.logs.folder)
        if failed is not None:
            raise failed

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Cut the ways that are left. A host whose way is cut asks its ranks to save and stop (node.py)."""
        try:
            yield
        finally:
            for host in self.hosts:
                host.remote.process.kill()
            for host in self.hosts:
                host.remote.process.wait()

    def _start(self) -> None:
        command = f"exec bash -c {shlex.quote(self.script)}"  # the user's own shell may be another

        def start(number: int) -> RunHost:
            name = self.job.hosts[number]
            remote = self.reach(number, name, command, lambda text: self.logs.error(number, name, text))
            return RunHost(number, name, remote)

        with ThreadPoolExecutor(min(AT_ONCE, len(self.job.hosts))) as pool:
            self.hosts += pool.map(start, range(len(self.job.hosts)))
        for host in self.hosts:
            host.send({"name": host.name.rpartition("@")[2]})
            threading.Thread(target=self._read, args=(host,), daemon=True, name="phalanx-host").start()

    def _read(self, host: RunHost) -> None:
        """All that a host prints. Its shell may print something before its program speaks."""
        for line in host.remote.process.stdout or ():
            if host.introduced is None and (introduced := introduction(line)):
                host.introduced = introduced
                self._events.put(None)
            else:
                self.logs.out(host.number, line)
        code = host.remote.process.wait()
        host.remote.listener.join()
        host.over = True
        self._events.put(HostEnd(host.number, code if code >= 0 else 128 - code))

    def _wait(self, until: float | None) -> bool:
        """Wait for the next event; whether there was one in time."""
        try:
            end = self._events.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
        except queue.Empty:
            return False
        if end is not None:
            self.ended.append(end)
        return True

    def _meet(self, stops: Stops) -> None:
        """Wait until all hosts have come, and tell them their places."""
        until = time.monotonic() + COME_S
        while any(host.introduced is None for host in self.hosts) and not self.ended and stops.first is None:
            if not self._wait(until):
                break
        if stops.first is not None:
            raise Preempted(NOTHING_TO_SAVE)
        if self.ended:  # others that are as bad are named too
            until = min(until, time.monotonic() + ALL_NAMED_S)
            while any(host.introduced is None and not host.over for host in self.hosts) and self._wait(until):
                pass
        first = self.hosts[0].introduced
        if first is None or self.ended or any(host.introduced is None for host in self.hosts):
            raise self._refused()
        self.logs.begun = True
        for host, place in zip(self.hosts, places(self.job, first, self.secret)):
            host.send({"environment": place, "grace_s": self.job.cluster.grace_s})

    def _refused(self) -> HostsRefused:
        """One line for each host with which the run cannot be started."""
        ends = {end.number: end.code for end in self.ended}
        bad = [host for host in self.hosts if host.number in ends or (host.introduced is None and not self.ended)]
        lines = [f"{host.name}: {host.remote.why(f'no answer within {COME_S:g} s')}" for host in bad]
        same = {ends.get(host.number) for host in bad}
        code = same.pop() if len(same) == 1 else None
        return HostsRefused("\n".join([*lines, NOT_STARTED]), code if code in FINAL else BadNode.exit_code)

    def _follow(self, stops: Stops) -> None:
        """Wait for the end of all. When one has ended, the others have a while; then they are ended."""
        until: float | None = None
        while len(self.ended) < len(self.hosts):
            if self.ended and until is None:
                until = time.monotonic() + LEFT_S
            if stops.at_once or not self._wait(until):
                self._end([host for host in self.hosts if not host.over])
                return

    def _end(self, late: Sequence[RunHost]) -> None:
        """End the ranks of these hosts at once, and wait for that a little; how they end says nothing."""
        names = ", ".join(host.name for host in late)
        print(f"ending the ranks on {names}, which are still there", file=sys.stderr, flush=True)
        for host in late:
            host.send({"signal": "SIGTERM"})
            host.send({"signal": "SIGINT"})
        until = time.monotonic() + END_S
        with suppress(queue.Empty):
            while not all(host.over for host in late):
                self._events.get(timeout=max(0.0, until - time.monotonic()))

    def _pass_on(self, at_once: bool) -> str:
        """To the ranks of all hosts: a request to save and stop, or to end at once."""
        self.stop_asked = True
        for host in self.hosts:
            host.send({"signal": "SIGINT" if at_once else "SIGTERM"})
        self._events.put(None)
        return "save"


def introduction(line: bytes) -> dict[str, Any] | None:
    """What a host says of itself; None if the line is none of that."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) and {"address", "port"} <= said.keys() else None


def verdict(hosts: Sequence[RunHost], ended: Sequence[HostEnd], logs: Path) -> RankFailed | None:
    """How the run ended, or None if every host succeeded. ended: in order of time; those that are missing did not end
    by themselves.

    As among ranks (outcome.py), the first failure with a cause of its own counts; a lost peer is a consequence.
    """
    failed = [end for end in ended if end.code not in (0, Preempted.exit_code)]
    causes = [end for end in failed if end.code in FINAL]
    others = [end for end in failed if end.code not in (*FINAL, PeerLost.exit_code)]
    for first in (*causes[:1], *others[:1], *failed[:1]):
        host = hosts[first.number]
        if first.code == LOST:
            return RankFailed(f"peer lost: {host.name}: {host.remote.why('ssh ended')}", PeerLost.exit_code)
        who = f"{host.name} (node {first.number} of {len(hosts)})"
        if first.code > KILLED:
            return RankFailed(f"peer lost: {who} was killed by {signal_name(first.code - KILLED)}", PeerLost.exit_code)
        return RankFailed(f"{who} ended with exit code {first.code}; all that the hosts said: {logs}", first.code)
    if len(ended) < len(hosts):
        there = {end.number for end in ended}
        names = ", ".join(host.name for host in hosts if host.number not in there)
        return RankFailed(f"peer lost: {names}: did not end with the others", PeerLost.exit_code)
    stopped = [end for end in ended if end.code == Preempted.exit_code]
    return (
        RankFailed("preempted: the same command goes on from what was saved", Preempted.exit_code) if stopped else None
    )

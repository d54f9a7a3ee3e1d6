"""Starts ranks on this machine, passes signals on to them, ends them when one fails, and reports which one that was."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TextIO
from urllib.parse import parse_qs, urlsplit

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import PeerLost, PhalanxError, Preempted
from phalanx.base.log import describe
from phalanx.base.placement import MEETING, RANKS, SECRET, Placement, Word
from phalanx.comm.reach import reach_myself
from phalanx.launch.environment import allowed_cpus, bind
from phalanx.launch.network import LOOPBACK, stay_inside
from phalanx.launch.outcome import CAUSES, Ended, RankFailed, read_outcomes, signal_name, verdict
from phalanx.observe.failures import Taken, note_end, taken

GRACE_S = 15.0  # for ranks that may be saving when another one has failed, before they are killed
SHORT_GRACE_S = 2.0  # for ranks that have nothing to save
BY_LAUNCHER = (
    -signal.SIGTERM,
    -signal.SIGKILL,
    128 + signal.SIGTERM,
)  # exit statuses of ranks that the launcher told to end
NODE = "node.json"  # what ranks of several machines need to know of their own
OF_NODE = ("refused", "check_nodes", "interface", "address")  # of its placement
SAME_S = 1.0  # signals this close together count as one request


def start(
    target: str,
    arguments: Mapping[str, Any],
    ranks: int,
    logs: str | Path | None = None,
    node: Placement | None = None,
    cpus: tuple[frozenset[int], ...] | None = None,
) -> None:
    """Call `target` (`package.module:function`) as `function(placement, **arguments)` in `ranks` new processes and wait
    for them.

    arguments  plain values (they travel as JSON)
    logs       a folder for each rank's output; None: all write where this process writes
    node       where these ranks are in a world of several machines, of which each starts its own (`starts`)
    cpus       of each rank of such a node; None: all

    Raises RankFailed with the exit code of the rank that failed first. SIGTERM, SIGINT, SIGUSR1 and SIGHUP are passed
    on as SIGTERM, and the ranks are waited for. A second signal kills them: Ctrl-C at once, others only if they come a
    second later, because schedulers repeat signals.
    """
    with tempfile.TemporaryDirectory(prefix="phalanx-") as name:
        folder = Path(name)
        (folder / "arguments.json").write_text(json.dumps(dict(arguments)), encoding="utf-8")
        if node is not None:
            (folder / NODE).write_text(json.dumps({name: getattr(node, name) for name in OF_NODE}), encoding="utf-8")
        world = LocalRanks(0, ranks, ranks)
        if node is not None:
            world = LocalRanks(node.rank, ranks, node.world_size, cpus)
        with forwarded_signals(partial(signal_ranks, folder)) as stops:
            ended = _run(folder, target, world, None if logs is None else Path(logs), node)
        failed = stops.ended_at_once() or verdict(world.size, read_outcomes(folder), ended)
        if failed is not None:
            _note_end(folder, failed)
            raise failed


def _note_end(folder: Path, failed: RankFailed) -> None:
    """Record why the run died in its own folder, if a rank had taken that over."""
    run = folder / "run.json"
    if failed.exit_code != Preempted.exit_code and run.exists():
        began = failed.exit_code <= 128 and any(folder.glob("rank-*.unsaved"))  # above: stopped by the user
        kind = next((e.__name__ for e in (*CAUSES, PeerLost) if e.exit_code == failed.exit_code), "RankFailed")
        note_end(Taken(**json.loads(run.read_text(encoding="utf-8"))), kind, describe(failed), began)


class SingleRank(Word):
    """For a rank without this launcher, the only one or one started by others: what it must do itself when it dies of a
    bus error."""

    def __init__(self) -> None:
        self._run: Taken | None = None
        self._began = False

    def writes(self, folder: Path) -> None:
        self._run = taken(folder)

    def unsaved(self) -> None:
        self._began = True

    def died(self, error: PhalanxError) -> None:
        if self._run is not None:
            note_end(self._run, type(error).__name__, describe(error), self._began)


@dataclass(frozen=True)
class LocalRanks:
    """The ranks that this machine starts: `count` from number `first`, of `size` in the whole world. cpus: of each;
    None: all."""

    first: int
    count: int
    size: int
    cpus: tuple[frozenset[int], ...] | None = None

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)


def _run(folder: Path, target: str, world: LocalRanks, logs: Path | None, node: Placement | None) -> list[Ended]:
    """Start the ranks, serve the store where they meet unless another machine does, and wait for them. Returns how each
    ended, in order of time."""
    listener = _listener(world, node)
    if node is None or world.count == world.size:
        host, port = LOOPBACK, listener.getsockname()[1] if listener else 0
    else:
        parts = urlsplit(node.init_method)
        host, port = parts.hostname or "", parts.port or 0
    words = ["-u", "-m", "phalanx.launch.worker", str(folder), target, f"{MEETING}{host}:{port}/{RANKS}"]
    with Ranks(folder, world, words, logs) as started:
        from phalanx.comm.meeting import say_died, say_died_there, serve  # imports torch, as the ranks do meanwhile

        if listener is None:
            started.died = partial(say_died_there, (host, port), started.secret)
            return started.wait()
        store = serve(listener)
        started.died = partial(say_died, store, started.secret)
        return started.wait()


def _listener(world: LocalRanks, node: Placement | None) -> socket.socket | None:
    """Where the store is to be served: at a free port of loopback for ranks of one machine, at the agreed one of the
    first machine of several, and None on the others. PeerLost if it cannot listen there, ConfigError if the name under
    which the others look for it leads elsewhere."""
    if node is None or world.count == world.size:
        return socket.create_server((LOOPBACK, 0), backlog=1024)
    if world.first:
        return None
    parts = urlsplit(node.init_method)
    address = parse_qs(parts.query)["listen"][0]
    try:
        kind = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, parts.port or 0), family=kind, backlog=1024)
    except OSError as error:
        raise PeerLost(
            f"the first node cannot listen at {address}:{parts.port}, where the others are to meet it: {error}"
        ) from error
    try:
        reach_myself(parts.hostname or "", parts.port or 0)
    except BaseException:
        listener.close()
        raise
    return listener


def rank_environment(before: Mapping[str, str], ranks: int, world: int | None = None) -> dict[str, str]:
    """What ranks inherit: this process's environment, their world, few threads each. world: how many ranks there are on
    all machines.

    Ranks of one machine also get a secret for this run, and loopback as their network.
    """
    threads = str(max(1, len(allowed_cpus()) // ranks))
    # the package is found even where it is not installed and the ranks' folder is another
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), before.get("PYTHONPATH"))))
    env = {
        "OMP_NUM_THREADS": threads,
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # why: comm.mesh.many_queues
        **before,
        "PYTHONPATH": path,
        "WORLD_SIZE": str(world or ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    if world in (None, ranks):
        env[SECRET] = secrets.token_hex(32)
        stay_inside(env)
    return env


class Ranks:
    """The processes of ranks. They run inside the context; those still running at its end are killed.

    logs: a folder for the output of each; None: the same as this process's
    """

    def __init__(self, folder: Path, world: LocalRanks, words: list[str], logs: Path | None):
        self.folder, self._words, self._logs, self._world = folder, words, logs, world
        self._env = rank_environment(os.environ, world.count, world.size)
        # called for each rank that was killed by a signal not sent from here
        self.died: Callable[[int, str], None] = lambda rank, why: None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._over: queue.SimpleQueue[tuple[int, int, float]] = queue.SimpleQueue()
        self._reported: set[int] = set()  # to end, by this launcher, because another one failed
        self._deadlines: dict[int, float] = {}  # of those, until they are killed

    @property
    def secret(self) -> str:
        return self._env.get(SECRET, "")

    def __enter__(self) -> Ranks:
        try:
            for rank in self._world.numbers:
                self._processes[rank] = self._start(rank)
                threading.Thread(target=self._watch, args=(rank,), daemon=True, name=f"rank-{rank}").start()
        except BaseException:
            self._kill_all()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._kill_all()

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        env = {**self._env, "RANK": str(rank), "LOCAL_RANK": str(rank - self._world.first)}
        with contextlib.ExitStack() as opened:
            out, err = (opened.enter_context(file) if file else None for file in self._files(rank))
            # a session of its own: Ctrl-C in the terminal comes to this process alone, which passes it on
            process = subprocess.Popen(
                [sys.executable, *self._words], env=env, stdout=out, stderr=err, start_new_session=True
            )
        bind(process.pid, self._world.cpus, rank - self._world.first)
        return process

    def _files(self, rank: int) -> tuple[TextIO | None, TextIO | None]:
        if self._logs is None:
            return None, None
        folder = self._logs / f"rank-{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        return open(folder / "stdout.log", "a"), open(folder / "stderr.log", "a")

    def _watch(self, rank: int) -> None:
        status = self._processes[rank].wait()
        self._over.put((rank, status, time.time()))

    def wait(self) -> list[Ended]:
        """Wait until all have ended. When one fails, the others are asked to end, and killed if they do not."""
        ended: list[Ended] = []
        while len(ended) < self._world.count:
            left = min(self._deadlines.values(), default=None)
            try:
                rank, status, when = self._over.get(timeout=None if left is None else max(0.0, left - time.monotonic()))
            except queue.Empty:
                self._kill_late()
                continue
            self._deadlines.pop(rank, None)
            ended.append(Ended(rank, status, when, by_launcher=rank in self._reported and status in BY_LAUNCHER))
            if status < 0 and not ended[-1].by_launcher:
                self.died(rank, f"was killed by {signal_name(-status)}")
            stopped_early = (self.folder / f"rank-{rank}.early").exists()  # the others would wait for it
            if (status != 0 or stopped_early) and not self._reported:
                self._end_others({e.rank for e in ended})
        return ended

    def _end_others(self, ended: set[int]) -> None:
        (self.folder / "stop").touch()
        for rank in self._world.numbers:
            if rank in ended:
                continue
            self._reported.add(rank)
            grace = GRACE_S if (self.folder / f"rank-{rank}.unsaved").exists() else SHORT_GRACE_S
            self._deadlines[rank] = time.monotonic() + grace
            with contextlib.suppress(
                ProcessLookupError, FileNotFoundError, ValueError
            ):  # one that is not yet ready to be asked reads `stop`
                os.kill(int((self.folder / f"rank-{rank}.pid").read_text(encoding="utf-8")), signal.SIGTERM)

    def _kill_late(self) -> None:
        now = time.monotonic()
        for rank in [rank for rank, deadline in self._deadlines.items() if deadline <= now]:
            self._deadlines[rank] = now + GRACE_S  # one that the system cannot end at once is waited for
            self._kill(rank)

    def _kill(self, rank: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._processes[rank].pid, signal.SIGKILL)

    def _kill_all(self) -> None:
        for rank, process in self._processes.items():
            if process.poll() is None:
                self._kill(rank)


@dataclass
class Stops:
    """Signals received by the launcher: the time of the first, and the signal that ends the ranks at once (0: none)."""

    first: float | None = None
    at_once: int = 0

    def ended_at_once(self) -> RankFailed | None:
        """How such a run ended; None if no signal ended it at once."""
        if not self.at_once:
            return None
        name = "Ctrl-C" if self.at_once == signal.SIGINT else signal.Signals(self.at_once).name
        return RankFailed(f"stopped at once by a second {name}; the last step is not saved", 128 + self.at_once)


@contextlib.contextmanager
def forwarded_signals(pass_on: Callable[[bool], str]) -> Iterator[Stops]:
    """Pass signals on to the ranks. Yields what was received. pass_on: called with whether the ranks are to end at once
    (a second signal); returns what they are waited for to do."""
    stops = Stops()

    def forward(signum: int, frame: FrameType | None) -> None:
        repeated, now = stops.first is not None, time.monotonic()
        if repeated and signum != signal.SIGINT and now < stops.first + SAME_S:  # type: ignore[operator]
            return
        stops.at_once = signum if repeated else 0
        stops.first = stops.first if repeated else now
        what = pass_on(repeated)
        if not repeated:
            print(
                f"stopping: waiting for the ranks to {what} (Ctrl-C again to stop at once)", file=sys.stderr, flush=True
            )

    if threading.current_thread() is not threading.main_thread():
        yield stops
        return
    before = {s: signal.signal(s, forward) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)}
    try:
        yield stops
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def signal_ranks(folder: Path, at_once: bool) -> str:
    """To the ranks of this machine: SIGTERM, or SIGKILL."""
    (folder / "stop").touch()
    for path in folder.glob("rank-*.pid"):
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(int(path.read_text(encoding="utf-8")), signal.SIGKILL if at_once else signal.SIGTERM)
    return "save" if any(folder.glob("rank-*.unsaved")) else "end"

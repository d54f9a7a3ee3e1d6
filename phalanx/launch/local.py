"""Starting ranks on this machine through torch's elastic agent, passing signals on to them, and saying which one failed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import phalanx
from phalanx.launch.outcome import RankFailed, read_outcomes, verdict

# How long ranks may go on after one of them failed, before they are killed.
GRACE_S = 15
SAME_S = 1.0  # signals this close together are one request


def start(target: str, arguments: Mapping[str, Any], ranks: int, logs: str | Path | None = None, max_restarts: int = 0) -> None:
    """Call `target` (`package.module:function`) as `function(placement, **arguments)` on `ranks` new processes and wait for them.

    arguments  plain values (they travel as JSON)
    logs       a folder for each rank's output; None: all write where this process writes
    Raises RankFailed with the exit code of the rank that began it. SIGTERM, SIGINT, SIGUSR1 and SIGHUP are passed on as SIGTERM,
    and the ranks are waited for; a second signal kills them (Ctrl-C at once, others if they come a second later: schedulers repeat).
    """
    with tempfile.TemporaryDirectory(prefix="phalanx-") as folder, environment(ranks):
        (Path(folder) / "arguments.json").write_text(json.dumps(dict(arguments)), encoding="utf-8")
        with forwarded_signals(Path(folder)) as stops:
            exits = _run_agent(Path(folder), target, ranks, logs, max_restarts)
        if stops.at_once:
            name = "Ctrl-C" if stops.at_once == signal.SIGINT else signal.Signals(stops.at_once).name
            raise RankFailed(f"stopped at once by a second {name}; the last step is not saved", 128 + stops.at_once)
        failed = verdict(ranks, read_outcomes(folder), exits)
    if failed is not None:
        raise failed


def _run_agent(folder: Path, target: str, ranks: int, logs: str | Path | None, max_restarts: int) -> dict[int, int]:
    """Run the ranks; returns the exit status of those that failed."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from phalanx.comm.mesh import MEETING, open_meeting

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its warnings repeat what the verdict says
    output = Std.NONE if logs is None else Std.ALL
    log_folder = folder / "logs" if logs is None else Path(logs)
    log_folder.mkdir(parents=True, exist_ok=True)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=max_restarts,
        monitor_interval=0.1,
        signals_to_handle="SIGQUIT",  # the others are passed on by forwarded_signals, without a limit on the time to save
        logs_specs=DefaultLogsSpecs(log_dir=str(log_folder), redirects=output),
    )
    store, port = open_meeting("localhost")  # elastic's own way frees a port again before rank 0 takes it: another process may be faster
    command = ("-u", "-m", "phalanx.launch.worker", str(folder), target, f"{MEETING}localhost:{port}")
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    finally:
        del store
    return {}


@contextlib.contextmanager
def environment(ranks: int) -> Iterator[None]:
    """What ranks inherit: few threads each, and no store of elastic's (ours is in _run_agent)."""
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    wanted = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE_S),
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "32"),  # why: comm.mesh.many_queues
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
        # the package is found even where it is not installed and the ranks' folder is another
        "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(phalanx.__file__).parents[1]), os.environ.get("PYTHONPATH")))),
    }
    before = {name: os.environ.get(name) for name in (*wanted, "TORCHELASTIC_SIGNALS_TO_HANDLE")}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@dataclass
class Stops:
    """Signals that came to the launcher: when the first did, and the one that ends the ranks at once (0: none)."""

    first: float | None = None
    at_once: int = 0


@contextlib.contextmanager
def forwarded_signals(folder: Path) -> Iterator[Stops]:
    """Pass signals on to the ranks as SIGTERM, a second one as SIGKILL. Yields what came."""
    stops = Stops()

    def forward(signum: int, frame: FrameType | None) -> None:
        again, now = stops.first is not None, time.monotonic()
        if again and signum != signal.SIGINT and now < stops.first + SAME_S:  # type: ignore[operator]
            return
        stops.at_once = signum if again else 0
        stops.first = stops.first if again else now
        (folder / "stop").touch()
        for path in folder.glob("rank-*.pid"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(path.read_text(encoding="utf-8")), signal.SIGKILL if again else signal.SIGTERM)
        if not again:
            print("stopping: waiting for the ranks to save (Ctrl-C again to stop at once)", file=sys.stderr, flush=True)

    if threading.current_thread() is not threading.main_thread():
        yield stops
        return
    before = {s: signal.signal(s, forward) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)}
    try:
        yield stops
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)

"""Says early that rank 0's host cannot be reached. A rank computes for seconds before it tries to meet the others, and
much longer where cores are busy; a thread that imports next to nothing tries from the first moment on."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from phalanx.base.placement import Placement
from phalanx.comm.reach import LONGEST_PAUSE_S, attempt, is_loopback, unreachable
from phalanx.launch.env import read_placement
from phalanx.launch.network import IN_PODS, on_one_host

SAY_S = 15.0  # without an answer from rank 0's host: it may start late
THREAD = "first-host"


def watch_first_host(env: Mapping[str, str]) -> None:
    """For a process that others started on one of several hosts: try rank 0's host in a thread until it answers. After
    SAY_S it says once where and why it does not. A second call changes nothing."""
    placement, _ = read_placement(env)
    where = None if placement is None else first_host_of(placement, env)
    if placement is None or where is None or any(thread.name == THREAD for thread in threading.enumerate()):
        return
    in_pod = any(variable in env for variable in IN_PODS)
    watch = threading.Thread(target=_watch, args=(*where, placement.rank, in_pod), daemon=True, name=THREAD)
    watch.start()


def first_host_of(placement: Placement, env: Mapping[str, str]) -> tuple[str, int] | None:
    """Host and port where rank 0 serves the others; None if all are on this host, or if torchrun serves them."""
    parts = urlsplit(placement.init_method)
    if parts.scheme != "tcp" or placement.starts == placement.world_size:
        return None
    host, port = parts.hostname or "", parts.port or 0
    if is_loopback(host) or (not placement.starts and on_one_host(placement.world_size, host, env)):
        return None
    return host, port


def _watch(host: str, port: int, rank: int, in_pod: bool) -> None:
    began, said = time.monotonic(), False
    while (error := attempt(host, port)) is not None:
        # rank 0 itself listens late, and a pod's name is made while it starts (network.wait_for_name)
        usual = rank == 0 and isinstance(error, ConnectionRefusedError)
        usual = usual or (in_pod and isinstance(error, socket.gaierror))
        if time.monotonic() - began > SAY_S and not usual and not said:
            said = True
            advice = "Is MASTER_ADDR rank 0's host, and is this port open there?"
            text = f"{unreachable(host, port, rank, error)}; it goes on trying for train.timeout_s. {advice}"
            print(f"warning: {text}", file=sys.stderr, flush=True)
        time.sleep(LONGEST_PAUSE_S)

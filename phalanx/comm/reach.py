"""Whether rank 0's host can be reached from here. Imports no torch, so that this is known while ranks still start."""

from __future__ import annotations

import socket
import time

from phalanx.base.errors import ConfigError, PeerLost, Problem

CONNECT_S = 5.0  # for one attempt
PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0  # between two attempts, at first and later


def reach(host: str, port: int, rank: int, patience_s: float) -> None:
    """Wait until something listens at rank 0's host; PeerLost with the reason of the last attempt after `patience_s`.
    Says nothing meanwhile: `launch/first_host.py` does."""
    if is_loopback(host):
        return  # the launcher on this machine listened before its ranks began
    began, pause = time.monotonic(), PAUSE_S
    while (error := attempt(host, port)) is not None:
        if time.monotonic() - began > patience_s:
            raise PeerLost(unreachable(host, port, rank, error))
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def reach_myself(host: str, port: int) -> None:
    """Where the store is served: connect to the name under which the others look for it. ConfigError at once if that
    leads elsewhere, because they would wait in vain."""
    error = attempt(host, port)
    if error is not None:
        rule = (
            f"must be the name or address of rank 0's host, which is {socket.gethostname()}: rank 0 listens, "
            f"and cannot be reached under that name at port {port} ({reason(error)})"
        )
        raise ConfigError([Problem("MASTER_ADDR", host, rule, {}, (), "the environment")])


def attempt(host: str, port: int) -> OSError | None:
    """Why no connection to host:port can be opened now; None: it can."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError as error:
        return error
    return None


def reason(error: OSError) -> str:
    return error.strerror or str(error)


def unreachable(host: str, port: int, rank: int, error: OSError) -> str:
    return f"rank {rank} on host {socket.gethostname()} cannot reach rank 0 at {host}:{port} ({reason(error)})"


def is_loopback(host: str) -> bool:
    return host.startswith("127.") or host in ("localhost", "::1")

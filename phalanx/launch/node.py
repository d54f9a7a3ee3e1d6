"""A host's part of `phalanx launch ssh`: it learns its place on standard input, starts phalanx there, passes on
requests to stop, and ends with its exit code.

  launcher -> host   {"name": ...}                        a line of JSON, as all of them
  host -> launcher   {"address": ..., "port": ...}        where the others can reach the first host
  launcher -> host   {"environment": ..., "grace_s": ...} once all hosts have answered
  launcher -> host   {"signal": "SIGTERM"}                as often as somebody asks the run to stop

What the host prints after its line is phalanx's own output. The end of standard input means that the launcher is
gone: the run is asked to save and stop.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, BinaryIO

from phalanx.base.errors import Preempted
from phalanx.launch.network import own_address

PORTS = range(15000, 30000)  # below those that systems give to connections
TRIES = 100
KILL_S = 5.0  # from the request to end at once


def take_part(words: Sequence[str]) -> int:
    """Run `phalanx WORDS` at the place that the launcher names; returns its exit code. That of a stop if the launcher
    goes, or is stopped, before it has named one."""
    orders = open(0, "rb", buffering=0, closefd=False)
    begin = next_order(orders)
    if begin is None or "name" not in begin:
        return Preempted.exit_code
    address, _ = own_address(str(begin["name"]))
    print(json.dumps({"address": address, "port": free_port(address)}), flush=True)
    place = next_order(orders)
    if place is None or "environment" not in place:
        return Preempted.exit_code
    environment = {str(name): str(value) for name, value in place["environment"].items()}
    process = subprocess.Popen(
        [sys.executable, "-m", "phalanx", *words], env={**os.environ, **environment}, stdin=subprocess.DEVNULL
    )

    def pass_on(number: int, frame: FrameType | None) -> None:
        send(process, signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, pass_on)
    follow = threading.Thread(target=obey, args=(orders, process, float(place["grace_s"])), daemon=True)
    follow.start()
    status = process.wait()
    return status if status >= 0 else 128 - status


def obey(orders: BinaryIO, process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Send the process the signals that are asked for. When nobody is there any more, ask it to save and stop, and end
    it if that takes longer than `grace_s`."""
    while (order := next_order(orders)) is not None:
        send(process, signal.Signals[order["signal"]])
    send(process, signal.SIGTERM)
    for patience_s, number in ((grace_s, signal.SIGINT), (KILL_S, signal.SIGKILL)):
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
            return
        send(process, number)


def send(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(number)


def next_order(orders: BinaryIO) -> dict[str, Any] | None:
    """The next line; None at the end, or if it is no order (its writer was cut off)."""
    try:
        order = json.loads(orders.readline())
    except (OSError, ValueError):
        return None
    return order if isinstance(order, dict) else None


def free_port(address: str) -> int:
    """A port at which something can listen here now. OSError if none of many is free."""
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in random.SystemRandom().sample(PORTS, TRIES - 1):
        with suppress(OSError), socket.create_server((address, port), family=kind):
            return port
    with socket.create_server((address, 0), family=kind) as any_port:
        return int(any_port.getsockname()[1])

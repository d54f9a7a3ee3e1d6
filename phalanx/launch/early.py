"""Requests to stop that arrive before there is anything to save. Imports next to nothing, so that it is ready first."""

from __future__ import annotations

import os
import signal
from types import FrameType

from phalanx.base.errors import Preempted

STOPS = (signal.SIGTERM, signal.SIGUSR1)
NOTHING_TO_SAVE = "asked to stop before training began; start the same command again"


def listen_early() -> None:
    """From here on a request to stop ends this process with 75, whatever it is doing: reading a config, importing,
    preparing token files."""
    for number in STOPS:
        signal.signal(number, stop_early)


def stop_early(signum: int, frame: FrameType | None) -> None:
    """Ends without unwinding: an exception raised in a signal handler appears in the middle of whatever is running, and
    would be taken for its failure."""
    os.write(2, f"preempted: {NOTHING_TO_SAVE}\n".encode())
    os._exit(Preempted.exit_code)


def deaf() -> None:
    """From here on there is nothing left to stop, so requests are ignored."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)

"""Bus errors as messages. If a process reads a mapped file that has been truncated, the system ends it with SIGBUS,
and without this it would say nothing."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

from phalanx.base.errors import CheckpointError, DataError, PhalanxError
from phalanx.base.log import describe

PATIENCE_S = 5  # for the message; then the process ends without it
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)


class BusErrors:
    """Inside the context, a bus error of this process ends it with a message, if the system says which mapped files
    were truncated (Linux does). Other bus errors end it as before. `died` is called with the error first.

    A Python signal handler would not work: Python runs it after the failed instruction, which fails again and again.
    This handler is called by the system, in the thread that failed.
    """

    def __init__(self, died: Callable[[PhalanxError], None] = lambda error: None):
        self._died = died
        self._handler = _Handler(self._handle)
        self._library = ctypes.CDLL(None)
        self._library.signal.restype = ctypes.c_void_p
        self._library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]

    def __enter__(self) -> None:
        self._library.signal(signal.SIGBUS, ctypes.cast(self._handler, ctypes.c_void_p))

    def __exit__(self, *_: object) -> None:
        self._library.signal(signal.SIGBUS, None)

    def _handle(self, number: int) -> None:
        signal.alarm(PATIENCE_S)
        self._library.signal(signal.SIGALRM, None)  # the default action ends the process
        error = cut_short(truncated())
        if error is None:
            os.write(
                2, b"bus error: a mapped file could not be read (a failing disk or network), or shared memory is full\n"
            )
            self._library.signal(signal.SIGBUS, None)  # the instruction is repeated, and ends the process
            return
        os.write(2, f"{describe(error)}\n".encode())
        self._died(error)
        os._exit(error.exit_code)


def cut_short(files: list[tuple[str, int, int]]) -> PhalanxError | None:
    if not files:
        return None
    said = "; ".join(
        f"{path} was cut short while it was in use: it has {now} bytes, at least {before} were there"
        for path, now, before in files
    )
    kind = CheckpointError if files[0][0].endswith(".safetensors") else DataError
    return kind(f"{said}. Restore it and start the same command again")


def truncated() -> list[tuple[str, int, int]]:
    """(path, bytes now, bytes mapped by this process, up to a page less) for each mapped file that has become
    shorter."""
    found: dict[str, tuple[int, int]] = {}
    page = os.sysconf("SC_PAGE_SIZE")
    maps = Path("/proc/self/maps")
    for line in maps.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if maps.exists() else []:
        words = line.split(maxsplit=5)
        if len(words) < 6 or words[1][0] != "r" or not words[5].startswith("/") or words[5].endswith(" (deleted)"):
            continue
        first, _, last = words[0].partition("-")
        end = int(words[2], 16) + int(last, 16) - int(first, 16)
        try:
            size = os.stat(words[5]).st_size
        except OSError:
            continue
        least = end - page + 1
        if size < least:
            found[words[5]] = size, max(least, found.get(words[5], (0, 0))[1])
    return [(path, *sizes) for path, sizes in found.items()]

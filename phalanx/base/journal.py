"""Journal: a file to which lines or records are appended, and which survives a full disk."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

LIMIT = 16 << 20  # bytes that may wait to be written


class Journal:
    """Appends whole entries. `write` never raises OSError: entries that the disk refuses wait in memory and are written
    in order once there is room.

    say     receives one sentence when the disk begins to refuse, and one when everything that waited is written
    limit   bytes that may wait; beyond that the oldest entries are dropped and counted

    The first entry opens the file. A partly written entry is continued, so readers never find half an entry in the
    middle.
    """

    def __init__(self, path: str | Path, say: Callable[[str], None], limit: int = LIMIT):
        self.path, self.limit = Path(path), limit
        self._say = say
        self._file: int | None = None
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._written = 0  # bytes of the first waiting entry that are already in the file
        self._reason = ""  # why the disk refuses; empty while it does not
        self._late = 0
        self._lost = 0
        self._lock = threading.RLock()  # `say` may write an entry

    def write(self, entry: bytes) -> None:
        with self._lock:
            self._waiting.append(entry)
            self._waiting_bytes += len(entry)
            self._drain()

    def flush(self) -> None:
        """Try again to write the waiting entries."""
        with self._lock:
            self._drain()

    def cut(self, size: int, keep: Callable[[bytes], bool]) -> None:
        """Drop everything in the file beyond `size` bytes, and the waiting entries for which `keep` is false."""
        with self._lock:
            if self.path.exists():
                os.truncate(self.path, size)
            self._written = 0
            self._waiting = deque(entry for entry in self._waiting if keep(entry))
            self._waiting_bytes = sum(map(len, self._waiting))

    def close(self) -> None:
        with self._lock:
            self._drain()
            if self._waiting:
                self._say(f"{self.path}: {len(self._waiting) + self._lost} entries were never written ({self._reason})")
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _drain(self) -> None:
        try:
            while self._waiting:
                self._write_first()
        except OSError as error:
            self._refused(error.strerror or str(error))
            return
        if self._reason:
            self._accepted()

    def _write_first(self) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        entry = self._waiting[0]
        while self._written < len(entry):
            self._written += os.write(self._file, entry[self._written :])
        self._waiting.popleft()
        self._waiting_bytes -= len(entry)
        self._written = 0
        self._late += bool(self._reason)

    def _refused(self, reason: str) -> None:
        while self._waiting_bytes > self.limit and len(self._waiting) > 1:
            begun = [self._waiting.popleft()] if self._written else []
            self._waiting_bytes -= len(self._waiting.popleft())
            self._waiting.extendleft(begun)
            self._lost += 1
        if not self._reason:
            self._reason = reason
            self._say(
                f"{self.path} cannot be written ({reason}): the run goes on, and what belongs there waits in "
                "memory until it can be"
            )

    def _accepted(self) -> None:
        lost = f"the {self._lost} oldest of them are lost" if self._lost else "none is lost"
        message = f"{self.path} can be written again: {self._late + self._lost} entries had to wait, {lost}"
        self._reason = ""
        self._late = 0
        self._lost = 0
        self._say(message)

"""The lock of a run's folder: one run writes to it at a time. The kernel drops the lock when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.base.errors import CheckpointError, FolderInUse

NAME = ".lock"


class FolderLock:
    """Held from creation until `release` (or the end of `with`). Raises FolderInUse that names the holder's host and process.

    Unless `keep` was called, the folder is then as it was found: gone, if there was none.

    took_over   the holder before, if it ended without releasing the lock (it was killed); else None
    """

    def __init__(self, folder: str | Path):
        self.path = Path(folder) / NAME
        self._made = absent(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._file, 4096, 0).decode(errors="replace")
            os.close(self._file)
            raise FolderInUse(f"another run writes to {folder}: {_holder(holder)}; wait for it or choose another `dir`") from error
        self._before = os.pread(self._file, 4096, 0)
        self.took_over = _holder(self._before.decode(errors="replace")) if self._before else None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}).encode(), 0)

    def check(self) -> None:
        """CheckpointError if the folder is no longer the one that was locked: another run may have that of its name."""
        try:
            there, mine = os.stat(self.path), os.fstat(self._file)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            what = "was moved or removed" if there is None else "was replaced by another of its name"
            raise CheckpointError(f"the run's folder {self.path.parent} {what} while the run was going on: nothing is written there any more")

    def keep(self) -> None:
        """The run begins: the folder stays, with what is written there."""
        self._made, self._before = [], b""

    def release(self) -> None:
        if self._file >= 0:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, self._before, 0)
            with suppress(OSError):  # somebody put something there, or took it away
                for path in self._made:
                    path.unlink() if path == self.path else path.rmdir()
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()


def absent(path: Path) -> list[Path]:
    """Of a path and the folders that it lies in, those that are not there, the innermost first."""
    found = []
    for part in (path, *path.parents):
        if os.path.lexists(part):
            break
        found.append(part)
    return found


def _holder(text: str) -> str:
    try:
        holder = json.loads(text)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
        return f"process {holder['pid']} on host {holder['host']}, since {since}"
    except (ValueError, KeyError, TypeError):
        return "a process that is just starting"

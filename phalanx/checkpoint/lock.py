"""The lock of a run's folder, so that only one run writes to it at a time. base.file_lock implements it."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.base.errors import CheckpointError, FolderInUse
from phalanx.base.file_lock import PATIENCE_S, FileLock

NAME = ".lock"


class FolderLock:
    """Held from creation until `release` (or the end of `with`). Raises FolderInUse with the holder's host and process.

    Unless `keep` was called, the folder is then left as it was found, or removed if it did not exist.

    took_over   the previous holder, if it ended without releasing the lock (it was killed); otherwise None
    warning     on a file system without locks: that a file which changes every second replaces the lock; otherwise None
    """

    def __init__(self, folder: str | Path):
        self.path = Path(folder) / NAME
        note = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()})
        lock: FileLock | None = None
        self._made = absent(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path, note)
            if not lock.acquire():
                raise FolderInUse(
                    f"another run writes to {folder}: {_holder(lock.holder())}; wait for it or choose another `dir`"
                )
        except FolderInUse:
            _close(lock)
            raise
        except OSError as error:
            _close(lock)
            raise CheckpointError(
                f"{self.path} cannot be locked: {error.strerror or error}; choose a `dir` that can be written to"
            ) from error
        self._lock, self._held = lock, True
        self._before = lock.before
        self.took_over = _holder(lock.before) if lock.before else None
        self.warning = _without_locks(folder, lock.unlocked) if lock.unlocked else None

    def check(self) -> None:
        """CheckpointError if the folder is no longer the one that was locked: another run may own the folder that now
        has this name."""
        if self._lock.is_lost():
            folder = self.path.parent
            raise CheckpointError(
                f"another run took over {folder} while this one stood still: nothing is written there any more"
            )
        try:
            there, mine = os.stat(self.path), os.fstat(self._lock.file)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            what = "was moved or removed" if there is None else "was replaced by another of its name"
            raise CheckpointError(
                f"the run's folder {self.path.parent} {what} while the run was going on: nothing is written "
                "there any more"
            )

    def keep(self) -> None:
        """The run begins: the folder and what is written there stay."""
        self._made, self._before = [], ""

    def release(self) -> None:
        if not self._held:
            return
        self._held = False
        made = [] if self._lock.is_lost() else self._made
        self._lock.leave(self._before)
        with suppress(OSError):  # somebody added something, or removed it
            for path in made:
                path.unlink() if path == self.path else path.rmdir()
        self._lock.close()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()


def writer_of(folder: str | Path) -> str | None:
    """Who writes to a run's folder and since when, as its lock says; None: nobody. The lock itself is not touched. A
    writer that was killed on another host is still named; of this host it is known whether it lives."""
    try:
        text = (Path(folder) / NAME).read_text(encoding="utf-8", errors="replace")
        note = json.loads(text)
        gone = note["host"] == socket.gethostname() and not Path(f"/proc/{note['pid']}").exists()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return f"{_holder(text)}, was killed" if gone else _holder(text)


def absent(path: Path) -> list[Path]:
    """Those of a path and its parent folders that do not exist, the innermost first."""
    found = []
    for part in (path, *path.parents):
        if os.path.lexists(part):
            break
        found.append(part)
    return found


def _close(lock: FileLock | None) -> None:
    if lock is not None:
        lock.close()


def _without_locks(folder: str | Path, why: str) -> str:
    return (
        f"the file system of {folder} has no locks ({why}): the run changes {NAME}.beat every second in "
        "place of one, and a run that finds "
        f"one that was not removed waits {PATIENCE_S:g} s to see whether it changes. Better: a file system "
        "with flock (Lustre: mount with "
        "-o flock; NFS: without nolock)"
    )


def _holder(text: str) -> str:
    try:
        holder = json.loads(text)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
        return f"process {holder['pid']} on host {holder['host']}, since {since}"
    except (ValueError, KeyError, TypeError):
        return "a process that is just starting"

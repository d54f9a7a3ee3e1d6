"""An exclusive lock on a file: the kernel's, or, on a file system without locks, a second file that its holder keeps
changing.

The kernel drops its lock when the holder dies, for whatever reason. Without kernel locks, the holder creates NAME.beat
and writes a new number into it every BEAT_S. The lock counts as free once that file has not changed for PATIENCE_S. A
holder that was stopped for longer than that finds out by `is_lost`. Clocks are not compared, so hosts may disagree
about the time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

BEAT_S = 1.0
PATIENCE_S = 15.0
LOOK_S = 0.25
HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class FileLock:
    """A lock on the file `path`, which is created and holds `note` while it is locked.

    note      who holds it, in the caller's words
    before    what the last holder left in it; "" if that holder released the lock
    unlocked  why the kernel does not lock here, once that is known; None: it does
    """

    def __init__(self, path: str | Path, note: str):
        self.path, self._note = Path(path), note
        self.before = ""
        self.unlocked: str | None = None
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        self._beat: BeatFile | None = None

    def acquire(self) -> bool:
        """Try to lock; returns whether this process now holds the lock, without waiting. OSError if the file system
        fails."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                return False
            if error.errno not in NO_LOCKS:
                raise
            self.unlocked = error.strerror
            self._beat = BeatFile(self.path.with_name(f"{self.path.name}.beat"))
            if not self._beat.take():
                return False
        self.before = self.holder()
        os.ftruncate(self.file, 0)
        with suppress(OSError):  # on a full disk the lock still holds, only the name of its holder is missing
            os.pwrite(self.file, self._note.encode(), 0)
        return True

    def wait(self) -> None:
        while not self.acquire():
            time.sleep(LOOK_S)

    def holder(self) -> str:
        return os.pread(self.file, 4096, 0).decode(errors="replace")

    def is_lost(self) -> bool:
        """Whether another process took the lock over because this one did not run for so long."""
        return self._beat is not None and not self._beat.is_mine()

    def release(self) -> None:
        self.leave()
        self.close()

    def leave(self, note: str = "") -> None:
        """Keep the file, with this note. It stays locked until `close`, unless a beat file serves as the lock."""
        if not self.is_lost():
            os.ftruncate(self.file, 0)
            os.pwrite(self.file, note.encode(), 0)
        if self._beat is not None:
            self._beat.stop()

    def close(self) -> None:
        if self._beat is not None:
            self._beat.stop()
        os.close(self.file)


class BeatFile:
    """The file NAME.beat: created by one process only, and changed as long as that process lives."""

    def __init__(self, path: Path):
        self.path, self._token = path, uuid.uuid4().hex
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="phalanx-lock-beat")

    def take(self) -> bool:
        """Create it, replacing one that no longer changes; False if the present one still changes."""
        while True:
            with suppress(FileExistsError):
                file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                os.write(file, self._text(0))
                os.close(file)
                self._thread.start()
                return True
            seen = _read(self.path)
            if seen is not None and not self._remove_stale(seen):
                return False

    def is_mine(self) -> bool:
        return (_read(self.path) or b"").startswith(self._token.encode())

    def stop(self) -> None:
        if self._thread.is_alive():
            self._over.set()
            self._thread.join()
            if self.is_mine():
                self.path.unlink(missing_ok=True)

    def _remove_stale(self, seen: bytes) -> bool:
        """False if the file changes within PATIENCE_S, because its holder lives."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            time.sleep(LOOK_S)
            if (now := _read(self.path)) != seen:
                return now is None
        aside = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return True
        if _read(aside) != seen:  # another process removed the stale file first, so this one is that process's own
            with suppress(OSError):
                os.link(aside, self.path)
        aside.unlink()
        return True

    def _run(self) -> None:
        number = 0
        while not self._over.wait(BEAT_S):
            number += 1
            with suppress(OSError):  # a later beat may succeed; whoever relies on the lock calls `is_lost`
                if self.is_mine():
                    file = os.open(self.path, os.O_WRONLY)
                    os.write(file, self._text(number))
                    os.close(file)  # closing makes the change visible to other hosts of a network file system

    def _text(self, number: int) -> bytes:
        return f"{self._token} {number:020d}\n".encode()


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None

"""Storage: every change that a checkpoint makes on disk goes through here, so that tests can make any of them fail."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path

from phalanx.base.errors import CheckpointError

Data = bytes | bytearray | memoryview


class Storage:
    """Single operations on the file system. Each either happens or raises OSError; a file lasts only after `sync`."""

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """A new file to write to; one that exists is an error."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, file: int, data: memoryview) -> int:
        return os.write(file, data)

    def sync(self, file: int) -> None:
        os.fsync(file)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder last."""
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def remove_file(self, path: Path) -> None:
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        os.rmdir(path)


@dataclass(frozen=True)
class Receipt:
    """What was written: size in bytes and SHA-256 of a file."""

    size: int
    sha256: str


class Output:
    """A new file, counted and hashed as it is written. `finish` gives its receipt once every byte is on disk."""

    def __init__(self, storage: Storage, path: Path):
        self.storage, self.path = storage, path
        self._hash, self._size = hashlib.sha256(), 0
        self._file = self._try(lambda: storage.create(path))

    def write(self, data: Data) -> None:
        rest = memoryview(data).cast("B")
        self._hash.update(rest)
        self._size += len(rest)
        while len(rest):
            rest = rest[self._try(lambda rest=rest: self.storage.write(self._file, rest)) :]  # type: ignore[misc]

    def finish(self) -> Receipt:
        """A failed fsync is not tried again: the kernel has dropped the pages and would then report success."""
        try:
            self._try(lambda: self.storage.sync(self._file))
        finally:
            self.close()
        return Receipt(self._size, self._hash.hexdigest())

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _try(self, work: Callable[[], int | None]) -> int:
        try:
            return work() or 0
        except OSError as error:
            raise CheckpointError(f"could not write {self.path}: {error.strerror or error}{_room(error, self.path)}") from error


def _room(error: OSError, path: Path) -> str:
    return f" ({shutil.disk_usage(path.parent).free} bytes free there)" if error.errno == ENOSPC else ""


def write_file(storage: Storage, path: Path, parts: Iterable[Data]) -> Receipt:
    """Write a whole small file and make it last."""
    output = Output(storage, path)
    try:
        for part in parts:
            output.write(part)
        return output.finish()
    finally:
        output.close()


def remove_tree(storage: Storage, path: Path) -> None:
    """Remove a folder and what is in it; a link is removed, not followed."""
    for child in sorted(path.iterdir()):
        if child.is_dir() and not child.is_symlink():
            remove_tree(storage, child)
        else:
            storage.remove_file(child)
    storage.remove_folder(path)


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

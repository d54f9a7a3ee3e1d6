"""Storage: every change that a checkpoint makes on disk goes through here, so that tests can make any of them fail.

Reading goes through paths alone: a `Path`, or for object storage a path of the same methods (`place`).
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from errno import ENOSPC
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError

Data = bytes | bytearray | memoryview
# Bytes of a tensor under one checksum: the least that a rank must read to check what it reads. A thread that hashes one
# waits for its turn with the interpreter afterwards, and so does the training beside it: smaller ones cost both.
CHUNK = 16 << 20
EARLIER_CHUNK = 4 << 20  # of receipts that do not say


FOLDERS = ("weights", "state")


def temporary(folder: Path, why: str) -> Path:
    """A name beside `folder` that is never mistaken for a checkpoint, and that the next save removes."""
    return folder.with_name(f"{folder.name}.tmp-{why}-{uuid.uuid4().hex[:8]}")


class Storage:
    """The file system: single operations, and the three events in a checkpoint's life that are built from them.

    Each operation either happens or raises OSError. A file is durable only after `sync`, a name only after
    `sync_folder`.
    """

    def begin(self, final: Path, folders: tuple[str, ...] = FOLDERS) -> Path:
        """An empty folder into which the checkpoint `final` is written, under a name that is not mistaken for one.
        folders: those inside it."""
        if not final.parent.is_dir():
            final.parent.mkdir(parents=True, exist_ok=True)
            self.sync_folder(final.parent.parent)
        folder = temporary(final, "new")
        for made in (folder, *(folder / name for name in folders)):
            self.make_folder(made)
        return folder

    def commit(self, folder: Path, final: Path) -> None:
        """Everything in the folder is on disk before it gets its name, and the name is on disk before anything older is
        removed."""
        for made in (*sorted(path for path in folder.iterdir() if path.is_dir()), folder):
            self.sync_folder(made)
        if final.exists():  # a damaged one: the saver has checked
            self.rename(final, temporary(final, "bad"))
        self.rename(folder, final)
        self.sync_folder(final.parent)

    def retire(self, path: Path) -> None:
        """Remove a checkpoint: first its name, durably, then its files, so that no crash leaves half of it under its
        name."""
        doomed = temporary(path, "old")
        self.rename(path, doomed)
        self.sync_folder(path.parent)
        remove_tree(self, doomed)

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def create(self, path: Path) -> Any:
        """A new file to write to; one that exists is an error."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, file: Any, data: memoryview) -> int:
        return os.write(file, data)

    def sync(self, file: Any) -> None:
        os.fsync(file)

    def close(self, file: Any) -> None:
        """Close the file; what was not synced may be lost."""
        os.close(file)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
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

    def free(self, path: Path) -> int | None:
        """Bytes that can still be written in a folder; None: unknown."""
        return shutil.disk_usage(path).free


@dataclass(frozen=True)
class Receipt:
    """What was written: size in bytes and XXH3-128 of a file.

    parts   for a safetensors file: XXH3-64 of its header (under "") and of every `chunk` bytes of each tensor, by key
    """

    size: int
    xxh3: str
    parts: dict[str, list[str]] = field(default_factory=dict)
    chunk: int = EARLIER_CHUNK


class Output:
    """A new file, counted and hashed while it is written. `finish` returns its receipt once every byte is on disk."""

    def __init__(self, storage: Storage, path: Path):
        self.storage, self.path = storage, path
        self._hash, self._size = xxhash.xxh3_128(), 0
        self._parts: dict[str, list[str]] = {}
        self._file: Any = None
        self._file = self._try(lambda: storage.create(path))

    def write(self, data: Data, part: str | None = None) -> None:
        """`part`: the key to which these bytes belong; all writes of a part but the last are multiples of CHUNK. An
        empty part has one checksum.

        All of it is hashed and then written in one call: see CHUNK.
        """
        whole = memoryview(data).cast("B")
        sums = self._parts.setdefault(part, []) if part is not None else []
        self._hash.update(whole)
        for at in range(0, max(1, len(whole)), CHUNK) if part is not None else ():
            sums.append(chunk_sum(whole[at : at + CHUNK]))
        self._size += len(whole)
        while len(whole):
            whole = whole[self._try(partial(self.storage.write, self._file, whole)) :]

    def finish(self) -> Receipt:
        """A failed fsync is not repeated: the kernel has dropped the pages and would then report success."""
        try:
            self._try(lambda: self.storage.sync(self._file))
        finally:
            self.close()
        return Receipt(self._size, self._hash.hexdigest(), self._parts, CHUNK)

    def close(self) -> None:
        if self._file is not None:
            self.storage.close(self._file)
            self._file = None

    def _try(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except OSError as error:
            raise CheckpointError(
                f"could not write {self.path}: {error.strerror or error}{self._room(error)}"
            ) from error

    def _room(self, error: OSError) -> str:
        if error.errno != ENOSPC:
            return ""
        return (
            f" ({self._size} bytes of it were to be written so far, {self.storage.free(self.path.parent)} "
            "bytes are free there)"
        )


def write_file(storage: Storage, path: Path, parts: Iterable[Data]) -> Receipt:
    """Write a whole small file and make it durable."""
    output = Output(storage, path)
    try:
        for part in parts:
            output.write(part)
        return output.finish()
    finally:
        output.close()


def write_small(storage: Storage, folder: Path, texts: Mapping[str, Data]) -> dict[str, Receipt]:
    """Whole small files of a folder, by their names in it, some of them in folders of their own."""
    made = {(folder / name).parent for name in texts} - {folder}
    for inner in sorted(made):
        storage.make_folder(inner)
    receipts = {name: write_file(storage, folder / name, [text]) for name, text in texts.items()}
    for inner in sorted(made):
        storage.sync_folder(inner)
    return receipts


def remove_tree(storage: Storage, path: Path) -> None:
    """Remove a folder and its contents; a link is removed, not followed."""
    for child in sorted(path.iterdir()):
        if child.is_dir() and not child.is_symlink():
            remove_tree(storage, child)
        else:
            storage.remove_file(child)
    storage.remove_folder(path)


def chunk_sum(data: Data) -> str:
    """XXH3-64. `update` lets other threads run; xxhash's functions of one call do not before its version 4."""
    found = xxhash.xxh3_64()
    found.update(data)
    return found.hexdigest()


def sum_of(path: Path) -> str:
    """XXH3-128 of a file."""
    total = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            total.update(block)
    return total.hexdigest()

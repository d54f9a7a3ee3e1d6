"""The background check of a run: a thread that compares the .bin files of the run, and those beside them, with their
checksums while it trains.

It reads slowly and through a small buffer, so that steps neither wait for it nor lose the file cache to it; at the end
of a run the rest is read at full speed. The caller decides which rank runs it, and what happens if data is damaged.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import Protocol

from phalanx.base.errors import DataError
from phalanx.data.checksums import BLOCK, BinFile, FileRange

RATE = 100e6  # bytes a second at most, while training
# fraction of a core, at most, while training. A lower priority would not do: the thread would hold Python's lock, for
# which training waits, for longer
SHARE = 0.05
MENDING = "restore it from a copy, or prepare the texts again; `phalanx data verify` names all damage"


class CheckedFiles(Protocol):
    """Files with checksums: token files, or a score file."""

    @property
    def checked_files(self) -> tuple[BinFile, ...]: ...


class BackgroundCheck:
    """Compares files from `start` (or from entering the context) on; each damage is found once, and the first one is
    kept.

    corpora  their .bin files without checksums are left out
    first    where to begin, as a fraction of the whole: runs that are started often, and different machines, begin at
             different places
    warn     receives what could not be compared without being known as damaged (a file that was removed, say)
    """

    def __init__(
        self, corpora: Iterable[CheckedFiles], first: float = 0.0, warn: Callable[[str], object] = lambda text: None
    ):
        self._files = list(
            {file.path: file for corpus in corpora for file in corpus.checked_files if file.segments}.values()
        )
        self._stats = {file.path: _identity(file.path) for file in self._files}
        count = sum(len(file.segments or ()) for file in self._files)
        self._begin = int(first * count)
        self._warn, self._warned = warn, set[Path]()
        self._problem: str | None = None
        self._hurry, self._closed = threading.Event(), False
        self._deadline = float("inf")
        self._left = sum(file.size for file in self._files)
        self._block_began = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True, name="phalanx-data-check")

    def start(self) -> BackgroundCheck:
        if self._files:
            self._thread.start()
        return self

    def look(self) -> None:
        """Raise DataError if damage has been found."""
        if self._problem is not None:
            raise DataError(self._problem)

    def finish(self, limit_s: float) -> str | None:
        """Compare the rest at full speed, for at most `limit_s`; returns the damage, if any."""
        self._deadline = time.monotonic() + limit_s
        self._hurry.set()
        if self._files:
            self._thread.join()
        if self._left and self._problem is None and not self._warned:
            self._warn(
                f"{self._left / 1e9:.1f} GB of token files were not compared with their checksums; `phalanx "
                "data verify CONFIG` does it"
            )
        return self._problem

    def close(self) -> None:
        self._closed = True
        self._hurry.set()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> BackgroundCheck:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        buffer = bytearray(BLOCK)
        for place in self._ranges():
            self._block_began = time.monotonic()
            self._compare(place, buffer)
            if self._problem is not None or self._is_over():
                return
            self._left -= place.size

    def _ranges(self) -> Iterator[FileRange]:
        return chain(islice(_all_ranges(self._files), self._begin, None), islice(_all_ranges(self._files), self._begin))

    def _compare(self, place: FileRange, buffer: bytearray) -> None:
        try:
            if _identity(place.path) != self._stats[place.path]:
                self._skip(place.path, "was replaced or removed while the run was going on")
                return
            problem = place.problem(buffer, self._pause)
        except PermissionError:
            self._skip(place.path, "may not be read any more")
        except OSError as error:
            self._problem = f"{place.unreadable(error)}; {MENDING}"
        else:
            self._problem = f"{problem}; {MENDING}" if problem else None

    def _skip(self, path: Path, why: str) -> None:
        if path not in self._warned:
            self._warned.add(path)
            self._warn(f"{path} {why}: it is not compared with its checksums")

    def _pause(self, size: int) -> bool:
        """After a block: rest, unless the run waits for the end. Returns whether to stop."""
        took = time.monotonic() - self._block_began
        self._hurry.wait(max(size / RATE - took, took * (1 - SHARE) / SHARE, 0.0))
        self._block_began = time.monotonic()
        return self._is_over()

    def _is_over(self) -> bool:
        return self._closed or time.monotonic() > self._deadline


def _all_ranges(files: Iterable[BinFile]) -> Iterator[FileRange]:
    return chain.from_iterable(file.ranges() for file in files)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino

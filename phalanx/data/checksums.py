"""Checksums of token files: PREFIX.sums, written with a .bin/.idx pair and compared with it when the pair is read.

The .idx has one XXH3-64 for all its bytes. A .bin has one for each segment of at most SEGMENT bytes, so that damage can
be located and files can be merged without hashing them again; so have files that stand beside a pair, such as classes
of its tokens (PREFIX.classes.npy). Megatron's tools ignore this file; a pair without it can
be read but is not checked. Callers decide what to do about damage.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import xxhash

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.data.files import replacing

SUFFIX = ".sums"
VERSION = 1
SEGMENT = 64 << 20
AT_ONCE = 256  # segments that wait for a thread
BLOCK = 4 << 20  # bytes read and hashed at a time


class Segment(NamedTuple):
    """Some bytes of a .bin, and their XXH3-64."""

    size: int
    xxh3: str


def cut(data: Any) -> list[Segment]:
    """The segments of bytes that are in memory."""
    whole = memoryview(data).cast("B")
    pieces = (whole[at : at + SEGMENT] for at in range(0, len(whole), SEGMENT))
    return [Segment(len(piece), xxhash.xxh3_64_hexdigest(piece)) for piece in pieces]


class SegmentSums:
    """The segments of a file while it is being written, in order."""

    def __init__(self) -> None:
        self._done: list[Segment] = []
        self._hash, self._size = xxhash.xxh3_64(), 0

    def update(self, data: Any) -> None:
        rest = memoryview(data).cast("B")
        while len(rest):
            part = rest[: SEGMENT - self._size]
            self._hash.update(part)
            self._size += len(part)
            rest = rest[len(part) :]
            if self._size == SEGMENT:
                self._close()

    def extend(self, segments: Iterable[Segment]) -> None:
        """Add segments for bytes that come next in the file and were hashed elsewhere."""
        self._close()
        self._done += segments

    def finish(self) -> tuple[Segment, ...]:
        self._close()
        return tuple(self._done)

    def _close(self) -> None:
        if self._size:
            self._done.append(Segment(self._size, self._hash.hexdigest()))
            self._hash.reset()
            self._size = 0


class HashedFile:
    """A file open for writing; `xxh3` is the XXH3-64 of what was written so far."""

    def __init__(self, file: IO[bytes]):
        self._file, self._hash = file, xxhash.xxh3_64()

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return self._file.write(data)

    @property
    def xxh3(self) -> str:
        return self._hash.hexdigest()


@dataclass(frozen=True)
class Checksums:
    """The contents of PREFIX.sums: the XXH3-64 of the .idx, and the segments of each .bin (None: that file is not
    checked) and of each file beside the pair, by what follows PREFIX in its name."""

    idx: str
    bins: tuple[tuple[Segment, ...] | None, ...]
    beside: Mapping[str, tuple[Segment, ...]] = field(default_factory=dict)


def sums_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}{SUFFIX}")


def write_sums(path: Path, sums: Checksums) -> None:
    body: dict[str, Any] = {"version": VERSION, "idx": sums.idx, "bins": [_lines(segments) for segments in sums.bins]}
    if sums.beside:
        body["beside"] = {suffix: _lines(segments) for suffix, segments in sums.beside.items()}
    with replacing(path) as file:
        file.write(json.dumps({**body, "self": _own_sum(body)}, indent=1).encode())


def read_sums(prefix: str | os.PathLike[str]) -> Checksums | None:
    """None where there is no PREFIX.sums. DataError if it is damaged itself."""
    path = sums_path(prefix)
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        own = body.pop("self")
        if body["version"] == VERSION and own == _own_sum(body):
            bins = tuple(_segments(lines) for lines in body["bins"])
            return Checksums(body["idx"], bins, _beside(body.get("beside", {})))
        problem = "damaged" if body["version"] == VERSION else f"version {body['version']}, expected {VERSION}"
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        problem = "damaged"
    raise DataError(
        f"{path}: {problem}; if the token files themselves are good, remove it: they are then read unchecked"
    )


def _own_sum(body: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(body).encode())


def _lines(segments: Sequence[Segment] | None) -> list[str] | None:
    return None if segments is None else [f"{segment.size} {segment.xxh3}" for segment in segments]


def _segments(lines: Sequence[str] | None) -> tuple[Segment, ...] | None:
    return None if lines is None else tuple(Segment(int(line.split()[0]), line.split()[1]) for line in lines)


def _beside(body: dict[str, list[str]]) -> dict[str, tuple[Segment, ...]]:
    """ValueError for a name that would lead to another folder."""
    if not all(re.fullmatch(r"(\.[a-z]+)+", suffix) for suffix in body):
        raise ValueError
    return {suffix: _segments(lines) or () for suffix, lines in body.items()}


# ---- comparing a .bin with its segments


class FileRange(NamedTuple):
    """Bytes start .. start + size - 1 of a file, the hash they must have, and the file that states it."""

    path: Path
    start: int
    size: int
    xxh3: str
    sums: Path

    def problem(self, buffer: bytearray, pause: Callable[[int], bool] = lambda size: False) -> str | None:
        """What is wrong with these bytes, read block by block into `buffer`; None: nothing. OSError if they cannot be
        read.

        `pause` receives the size of each block once it is read; returning True stops the comparison.
        """
        found, left = xxhash.xxh3_64(), self.size
        with open(self.path, "rb", buffering=0) as file:
            _read_once(file)
            file.seek(self.start)
            while left:
                count = file.readinto(memoryview(buffer)[: min(left, len(buffer))])
                if not count:
                    return f"{self.path}: truncated: it ends inside {self.where}"
                found.update(memoryview(buffer)[:count])
                left -= count
                if pause(count):
                    return None
        if found.hexdigest() == self.xxh3:
            return None
        return (
            f"{self.path}: damaged: {self.where} have the checksum {found.hexdigest()}, expected "
            f"{self.xxh3} by {self.sums.name}"
        )

    def unreadable(self, error: OSError) -> str:
        return f"{self.path}: {self.where} cannot be read: {error.strerror or error}"

    @property
    def where(self) -> str:
        return f"bytes {self.start}..{self.start + self.size - 1}"


@dataclass(frozen=True)
class BinFile:
    """A .bin, or a file beside it, with its segments; None: nothing is known about it."""

    path: Path
    size: int
    segments: tuple[Segment, ...] | None
    sums: Path = field(compare=False)

    def ranges(self) -> Iterator[FileRange]:
        start = 0
        for segment in self.segments or ():
            yield FileRange(self.path, start, *segment, self.sums)
            start += segment.size


def compare(files: Iterable[BinFile], workers: int, progress: Callable[[int], object] = lambda done: None) -> list[str]:
    """Everything that is wrong with some .bin files, in order. `progress` receives the number of bytes compared so
    far."""
    buffers = threading.local()

    def look(place: FileRange) -> tuple[int, str | None]:
        if not hasattr(buffers, "own"):
            buffers.own = bytearray(BLOCK)
        try:
            return place.size, place.problem(buffers.own)
        except OSError as error:
            return place.size, place.unreadable(error)

    problems = []
    done = 0
    ranges = chain.from_iterable(file.ranges() for file in files)
    with ThreadPoolExecutor(workers) as pool:
        while some := list(islice(ranges, AT_ONCE)):
            for size, problem in pool.map(look, some):
                done += size
                progress(done)
                problems += [problem] if problem else []
    return problems


def _read_once(file: IO[bytes]) -> None:
    """Read without keeping the data in the file cache, where it would replace what training reads (Linux 6.3 and later
    respect this)."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_NOREUSE)

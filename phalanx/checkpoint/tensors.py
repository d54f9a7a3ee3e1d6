"""Safetensors files: written as a stream of tensors (nothing is held twice), read by box, with every byte checked.
Never pickle."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from math import prod
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError, DamagedCheckpoint
from phalanx.checkpoint.boxes import Item
from phalanx.checkpoint.staging import StagingBuffer, StagingBuffers
from phalanx.checkpoint.storage import CHUNK, Output, Receipt, Storage, chunk_sum, sum_of
from phalanx.checkpoint.threads import in_threads
from phalanx.checkpoint.unreachable import Unreachable
from phalanx.layout.box import Box
from phalanx.layout.transfer import NotCovered, transfers

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
Entry = tuple[str, tuple[int, ...], torch.dtype]
WRITE_BYTES = 4 * CHUNK  # copied to the host and written at a time
PIECE = CHUNK  # read and passed on at a time
OPEN_FILES = 4  # of a reading thread: a tensor and its scales may be in two files


class TensorFile:
    """A safetensors file while it is written. Its tensors (name, shape, dtype) are known in advance and come in that
    order.

    A failed write is kept until `finish`, so that ranks that send to this one are not left waiting.
    """

    def __init__(self, storage: Storage, path: Path, entries: list[Entry]):
        self._failed: CheckpointError | None = None
        self._output: Output | None = None
        self._names = iter([name for name, _, _ in entries])
        try:
            self._output = Output(storage, path)
            self._output.write(header(entries), "")
        except CheckpointError as error:
            self._failed = error

    def add(self, tensor: Tensor) -> None:
        """The next tensor, in any memory layout, on any device."""
        flat, name = tensor.detach().contiguous().reshape(-1).view(torch.uint8), next(self._names)
        if self._output is None or self._failed is not None:
            return
        try:
            for part in flat.split(WRITE_BYTES):
                self._output.write(part.cpu().numpy().data, name)
        except CheckpointError as error:
            self._failed = error

    def finish(self) -> Receipt:
        if self._failed is not None:
            raise self._failed
        return self._output.finish()  # type: ignore[union-attr]

    def close(self) -> None:
        """Close the file, whatever happened to it."""
        if self._output is not None:
            self._output.close()


def write_tensors(storage: Storage, path: Path, entries: list[Entry], tensors: Iterable[Tensor]) -> Receipt:
    """A file of these tensors, on disk. All of `tensors` are consumed even if writing fails, because they may be in
    transit from other ranks."""
    output = TensorFile(storage, path, entries)
    try:
        for tensor in tensors:
            output.add(tensor)
        return output.finish()
    finally:
        output.close()


def header(entries: Iterable[Entry]) -> bytes:
    """Length and JSON table of a safetensors file, padded so that the data is aligned to 8 bytes."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape, dtype in entries:
        size = prod(shape) * dtype.itemsize
        table[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Readable(Protocol):
    """A file from which boxes of tensors are read."""

    def read(self, key: str, where: tuple[slice, ...] = (), /) -> Tensor: ...


@dataclass(frozen=True)
class StoredBox:
    """A stored box of a global tensor: `key` in `file`. Subclasses read other storage formats as plain numbers."""

    file: str
    key: str
    box: Box

    def read(self, files: Open, where: tuple[slice, ...]) -> Tensor:
        """A box of this part."""
        found = files(self.file).read(self.key, where)
        if not found.is_floating_point() or found.dtype.itemsize < 2:
            raise CheckpointError(
                f"{self.key} is stored as {found.dtype} without scales that we know: not plain numbers"
            )
        return found


@dataclass
class Stored:
    """A global tensor in the files of a folder."""

    shape: tuple[int, ...]
    parts: list[StoredBox] = field(default_factory=list)


Index = dict[str, Stored]


@dataclass(frozen=True)
class TensorFolder:
    """Where tensors lie in a folder. receipts: of its files; None: they have none."""

    folder: Path
    index: Index
    receipts: dict[str, Receipt] | None


Open = Callable[[str], "Readable"]  # the name of a file -> the file, which stays open while more is read from it


def fill(
    wanted: Iterable[tuple[Item, Stored]], folder: Path, receipts: Mapping[str, Receipt | None] | None, threads: int
) -> None:
    """Copy each item's box from the files that hold it, reading only that. The dtype may change; a value that is not
    stored is an error.

    receipts    by file name: what is read is compared with them. None, or None for a file: third-party files, which
                have no checksums
    """
    jobs: dict[str, list[Job]] = {}
    for item, stored in wanted:
        for job in _jobs(item, stored, folder):
            jobs.setdefault(job[0].file, []).append(job)

    def opener(name: str) -> CheckedFile | PlainFile:
        return open_tensors(folder / name, receipt_of(receipts, folder, name))

    landings = StagingBuffers(target.device for group in jobs.values() for _, _, target in group)

    @torch.no_grad()
    def worker(tasks: Iterator[list[Job]]) -> None:
        with lately(opener) as files, landings.one() as memory:
            for group in tasks:
                _read_once(group, files, memory)

    in_threads((group for file in sorted(jobs) for group in _runs(jobs[file])), worker, threads)


@contextmanager
def reader(
    folder: Path, receipts: Mapping[str, Receipt | None] | None, device: torch.device
) -> Iterator[Callable[[Item, Stored], None]]:
    """What fills one item at a time, in this thread: as `fill`, for tensors that are not all there at once. Of a file,
    about PIECE bytes are read at a time."""

    def opener(name: str) -> CheckedFile | PlainFile:
        return open_tensors(folder / name, receipt_of(receipts, folder, name))

    with torch.no_grad(), lately(opener) as files, StagingBuffers([device]).one() as memory:

        def read(item: Item, stored: Stored) -> None:
            jobs = _jobs(item, stored, folder)
            for file in sorted({holder.file for holder, _, _ in jobs}):
                for group in _runs([job for job in jobs if job[0].file == file]):
                    for rows in _by_rows(group):
                        _read_once(rows, files, memory)

        yield read


def _by_rows(group: list[Job]) -> Iterator[list[Job]]:
    """The same boxes in slices of rows of about PIECE bytes each. Boxes of checked files stay whole: those are read so
    anyway."""
    if len(group) > 1 or not group[0][1]:
        yield group
        return
    ((part, where, target),) = group
    step = max(1, PIECE // max(1, target[:1].nbytes))
    for a in range(0, len(target), step):
        b = min(a + step, len(target))
        yield [(part, (slice(where[0].start + a, where[0].start + b), *where[1:]), target[a:b])]


def _jobs(item: Item, stored: Stored, folder: Path) -> list[Job]:
    try:
        found = transfers(item.box, [(part, part.box) for part in stored.parts])
    except NotCovered as error:
        raise DamagedCheckpoint(f"{folder}: {item.name}: {error}") from error
    return [(t.holder, t.source, item.view[t.target]) for t in found]


K = TypeVar("K")
F = TypeVar("F", bound="CheckedFile | PlainFile")


@contextmanager
def lately(opener: Callable[[K], F]) -> Iterator[Callable[[K], F]]:
    """Opens files for one thread and keeps the most recently used ones open, because a checkpoint may have more files
    than a process may open."""
    there: dict[K, F] = {}

    def file(which: K) -> F:
        found = there.pop(which) if which in there else opener(which)
        there[which] = found  # now the most recent one
        if len(there) > OPEN_FILES:
            there.pop(next(iter(there))).__exit__(None, None, None)
        return found

    try:
        yield file
    finally:
        for left in there.values():
            left.__exit__(None, None, None)


def check_files(files: Mapping[Path, Receipt], threads: int) -> None:
    """Compare every byte of files of the right size with their receipts. DamagedCheckpoint says what is wrong."""
    for path in (path for path, receipt in files.items() if not receipt.parts and sum_of(path) != receipt.xxh3):
        raise DamagedCheckpoint(f"{path} is damaged: its checksum is wrong")

    def opener(path: Path) -> CheckedFile:
        return CheckedFile(path, files[path])

    def worker(tasks: Iterator[tuple[Path, str]]) -> None:
        memory = StagingBuffer(None)
        with lately(opener) as open_file:
            for path, key in tasks:
                open_file(path).check(key, memory.take)

    in_threads(_tensors_of(files), worker, threads)


def _tensors_of(files: Mapping[Path, Receipt]) -> Iterator[tuple[Path, str]]:
    for path, receipt in files.items():
        if receipt.parts:
            with CheckedFile(path, receipt) as file:
                yield from ((path, key) for key in file.keys())


Job = tuple[StoredBox, tuple[slice, ...], Tensor]  # a stored box, the box in it that is wanted, and the destination


def _runs(jobs: list[Job]) -> list[list[Job]]:
    """Groups of boxes in the same stored tensor whose rows touch or overlap, in order: parts of a flat range that ends
    in the middle of rows."""
    found: list[list[Job]] = []
    for job in sorted(jobs, key=lambda j: (j[0].key, j[1][0].start if j[1] else 0)):
        last = found[-1][-1] if found else None
        together = (
            last is not None
            and last[0].key == job[0].key
            and bool(job[1])
            and job[1][0].start <= max(j[1][0].stop for j in found[-1])
        )
        found[-1].append(job) if together else found.append([job])
    return found


def _read_once(jobs: list[Job], files: Open, memory: StagingBuffer) -> None:
    """Read the rows that hold all of these boxes and distribute them; our own files are read piece by piece."""
    part, where, target = jobs[0]
    file = files(part.file) if type(part) is StoredBox and where else None
    if isinstance(file, CheckedFile):
        for at, rows in file.pieces(part.key, where[0].start, max(w[0].stop for _, w, _ in jobs), memory.take):
            _hand(jobs, at, rows)
            memory.sent()
    elif len(jobs) == 1:
        target.copy_(part.read(files, where))
    else:
        first, stop = where[0].start, max(w[0].stop for _, w, _ in jobs)
        _hand(jobs, first, part.read(files, (slice(first, stop), *(slice(0, n) for n in part.box.shape[1:]))))


def _hand(jobs: list[Job], at: int, rows: Tensor) -> None:
    """Copy from `rows`, which start at number `at` of the stored box, what each job wants of them. Rows go to a device
    as they are stored; the device selects and rearranges."""
    for _, where, target in jobs:
        first, stop = max(where[0].start, at), min(where[0].stop, at + len(rows))
        if first < stop:
            there = rows[first - at : stop - at].to(target.device, non_blocking=True)
            target[first - where[0].start : stop - where[0].start].copy_(there[(slice(None), *where[1:])])


def receipt_of(receipts: Mapping[str, Receipt | None] | None, folder: Path, file: str) -> Receipt | None:
    if receipts is None:
        return None
    if file not in receipts:
        raise DamagedCheckpoint(f"{folder / file} is not in the manifest")
    return receipts[file]


def open_tensors(path: Path, receipt: Receipt | None = None) -> CheckedFile | PlainFile:
    """Open a safetensors file for reading: with its receipt (every byte is compared with it) or without."""
    return PlainFile(path) if receipt is None else CheckedFile(path, receipt)


class CheckedFile:
    """A file in one of our checkpoints. A read fetches whole chunks and compares each with its checksum before anything
    of it is used.

    Nothing is memory-mapped: a file that is truncated while it is read gives an error, not SIGBUS.
    """

    def __init__(self, path: Path, receipt: Receipt):
        self.path, self.receipt = path, receipt
        try:
            self._file = path.open("rb")
        except Unreachable:
            raise
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror or error}") from error
        try:
            self._table, self._data = self._header()
        except BaseException:
            self._file.close()
            raise

    def _header(self) -> tuple[dict[str, Any], int]:
        """The table of tensors, and where their bytes begin."""
        start = bytearray(8)
        self._read_into(memoryview(start), 0)
        size = int.from_bytes(start, "little")
        if 8 + size > self.receipt.size:
            raise DamagedCheckpoint(f"{self.path} is damaged: its header says it is {size} bytes long")
        text = bytearray(8 + size)
        self._read_into(memoryview(text), 0)
        self._check("", 0, text, 0)
        return json.loads(text[8:]), 8 + size

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def keys(self) -> list[str]:
        return [key for key in self._table if key != "__metadata__"]

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._entry(key)["shape"])

    def read(self, key: str, where: tuple[slice, ...] = ()) -> Tensor:
        """A box of a tensor: the whole rows that hold it are read."""
        entry, shape = self._entry(key), self.shape(key)
        dtype, first, rows = DTYPES[entry["dtype"]], 0, shape[0] if shape else 1
        if where and shape:
            first, rows = where[0].start, where[0].stop - where[0].start
        row = prod(shape[1:]) * dtype.itemsize
        start, length = entry["data_offsets"][0], entry["data_offsets"][1] - entry["data_offsets"][0]
        data = self._checked(key, start, length, first * row, (first + rows) * row)
        found = data.view(dtype).view((rows, *shape[1:]) if shape else ())
        return found[(slice(None), *where[1:])] if where and shape else found

    def pieces(self, key: str, first: int, stop: int, memory: Callable[[int], Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Rows first..stop of a tensor, as (number of the first, rows) of about PIECE bytes; each byte of the file is
        read once.

        memory    returns room for so many bytes (uint8); a piece stays valid until room has been requested twice more
        """
        entry, shape = self._entry(key), self.shape(key)
        dtype, (start, end) = DTYPES[entry["dtype"]], entry["data_offsets"]
        row, chunk = prod(shape[1:]) * dtype.itemsize, self.receipt.chunk
        at, stop_at = first * row // chunk * chunk, min(end - start, -(-stop * row // chunk) * chunk)
        # the beginning of a row that ends in the next piece, after the bytes before the first row
        begun = torch.empty(0, dtype=torch.uint8)
        while at < stop_at:
            more = min(max(-(-PIECE // chunk), -(-row // chunk)) * chunk, stop_at - at)
            data = memory(len(begun) + more)[: len(begun) + more]
            data[: len(begun)] = begun
            self._read_checked(key, start, data[len(begun) :], at)
            skip = max(0, first * row - (at - len(begun)))
            count = min((len(data) - skip) // row, stop - first)
            yield first, data[skip : skip + count * row].view(dtype).view(count, *shape[1:])
            begun, at, first = data[skip + count * row :], at + more, first + count

    def check(self, key: str, memory: Callable[[int], Tensor]) -> None:
        """Read a whole tensor and compare it, one chunk at a time.

        memory    returns room for so many bytes (uint8). The same for all: fresh memory costs the page faults of all of
                  it, and the threads of a training beside it those of the whole process
        """
        (start, stop), chunk = self._entry(key)["data_offsets"], self.receipt.chunk
        for at in range(0, max(1, stop - start), chunk):
            size = min(chunk, stop - start - at)
            self._read_checked(key, start, memory(size)[:size], at)

    def _entry(self, key: str) -> dict[str, Any]:
        try:
            return self._table[key]
        except KeyError:
            raise DamagedCheckpoint(f"{self.path} does not hold {key}") from None

    def _checked(self, key: str, start: int, length: int, lo: int, hi: int) -> Tensor:
        """Bytes lo..hi (uint8) of a tensor whose `length` bytes begin at `start`: whole chunks are read and
        compared."""
        chunk = self.receipt.chunk
        first, stop = lo // chunk * chunk, min(length, -(-hi // chunk) * chunk)
        data = torch.empty(stop - first, dtype=torch.uint8)
        self._read_checked(key, start, data, first)
        return data[lo - first : hi - first]

    def _read_checked(self, key: str, start: int, data: Tensor, first: int) -> None:
        """Fill `data` with the bytes from number `first` on, a chunk border, of a tensor that begins at `start`."""
        size = self.receipt.chunk
        for at in range(0, max(1, len(data)), size):
            chunk, where = data[at : at + size].numpy().data, self._data + start + first + at
            self._read_into(chunk, where)
            self._check(key, (first + at) // size, chunk, where)

    def _read_into(self, data: memoryview, at: int) -> None:
        try:
            self._file.seek(at)
            have = 0
            while have < len(data):
                more = self._file.readinto(data[have:])  # type: ignore[attr-defined]
                if not more:
                    raise DamagedCheckpoint(f"{self.path} is damaged: it ends at byte {at + have}")
                have += more
        except Unreachable:
            raise
        except OSError as error:
            raise DamagedCheckpoint(f"{self.path} cannot be read: {error.strerror or error}") from error

    def _check(self, key: str, number: int, data: Any, at: int) -> None:
        sums = self.receipt.parts.get(key, [])
        if number >= len(sums) or chunk_sum(data) != sums[number]:
            what = f"tensor {key}" if key else "header"
            raise DamagedCheckpoint(
                f"{self.path} is damaged: the {what} has a wrong checksum in bytes {at} to {at + len(data)} of the file"
            )


class PlainFile:
    """A third-party file, memory-mapped. A damaged one raises CheckpointError, as far as the format reveals damage."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def __enter__(self) -> PlainFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._try(key, lambda: self._file.get_slice(key).get_shape()))

    def read(self, key: str, where: tuple[slice, ...] = ()) -> Tensor:
        """A box of a tensor."""
        return self._try(key, lambda: self._file.get_slice(key)[where] if where else self._file.get_tensor(key))

    def _try(self, key: str, work: Any) -> Any:
        try:
            return work()
        except SafetensorError as error:
            raise CheckpointError(f"{self.path}: {key} cannot be read: {error}") from error


def natural(name: str) -> list[tuple[int, str]]:
    """Sorting key with numbers in numeric order: layer 2 before layer 10."""
    return [(int(t), "") if t.isdigit() else (-1, t) for t in re.split(r"(\d+)", name)]

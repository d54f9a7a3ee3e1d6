"""Packing: which documents of a corpus share a sequence. Whole documents are put together first-fit, and the rest of a
sequence is padded.

A packing is a list of pieces (consecutive tokens of one document) in bins (sequences). It is a function of the lengths
of the documents alone, so it is the same for every layout and every start. `sources` determines the order in which bins
are seen. A packing is computed when a run starts (`make_packing`), or beforehand and stored beside the index
(`write_packing`, `read_packing`).
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.data.files import replacing
from phalanx.data.index import Corpus

MAGIC = b"PHXPACK\x00"
# magic, version, capacity, first token, stop, pieces, bins, checksums of borders and pieces
HEADER = struct.Struct("<8sQQQQQQII")
VERSION = 1
Pieces = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]
WINDOW = 16384  # neighbouring documents packed together: with more, sequences are hardly fuller and it takes longer


@dataclass(frozen=True)
class Second:
    """A second size of items, such as the patches of their images, and how much of it a bin has room for."""

    sizes: NDArray[np.int64]
    capacity: int


def first_fit(lengths: NDArray[np.int64], capacity: int, second: Second | None = None) -> NDArray[np.int64]:
    """The bin of each item: the first that has room for it, else a new one. Lengths are in 1..capacity; bins are
    numbered from 0.

    At most 1.7 times as many bins as the best packing has (Dosa and Sgall, First Fit bin packing: a tight analysis,
    2013), and of items in descending order 11/9 times and 6/9 (Dosa, The tight bound of first fit decreasing, 2007).
    """
    room, bins, used = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64), 0
    since: dict[tuple[int, int], int] = {}  # no bin before this one has room for such an item; rooms only shrink
    more, others = np.zeros(len(lengths), np.int64) if second is None else second.sizes, np.zeros_like(room)
    for i, (length, size) in enumerate(zip(lengths.tolist(), more.tolist())):
        first = since.get((length, size), 0)
        fits = room[first:used] >= length
        if size:
            fits &= others[first:used] >= size
        at = first + int(fits.argmax()) if fits.any() else used
        if at == used:
            room[used], others[used], used = capacity, 0 if second is None else second.capacity, used + 1
        room[at] -= length
        others[at] -= size
        bins[i] = since[length, size] = at
    return bins


@dataclass(frozen=True)
class Packing:
    """Pieces in order of their bins: bin b has pieces bins[b] .. bins[b + 1].

    starts    (P,) int64  offset in the corpus' stream of the first token of each piece
    lengths   (P,) int32  its tokens; those of a bin add up to at most `capacity`
    goes_on   (P,) uint8  1 if the document is longer than `capacity` and its next piece begins right after this one
    bins      (B + 1,) int64
    """

    capacity: int
    starts: NDArray[np.int64]
    lengths: NDArray[np.int32]
    goes_on: NDArray[np.uint8]
    bins: NDArray[np.int64]

    @property
    def num_bins(self) -> int:
        return len(self.bins) - 1

    @cached_property
    def tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def fill(self) -> float:
        """Fraction of positions that hold tokens; the rest is padding."""
        return self.tokens / (self.num_bins * self.capacity) if self.num_bins else 0.0

    def pieces(self, b: int) -> list[tuple[int, int, bool]]:
        """(first token, tokens, goes on) of each piece of bin b."""
        at = slice(int(self.bins[b]), int(self.bins[b + 1]))
        return [
            (s, n, bool(g))
            for s, n, g in zip(self.starts[at].tolist(), self.lengths[at].tolist(), self.goes_on[at].tolist())
        ]

    @cached_property
    def checksum(self) -> int:
        crc = 0
        for part in (self.starts, self.lengths, self.goes_on, self.bins):
            crc = zlib.crc32(np.ascontiguousarray(part).data, crc)
        return crc

    @property
    def text(self) -> str:
        """A summary for people: fill, documents in a sequence, and the fraction of (query, key) pairs that attention
        inside documents computes."""
        pieces, lengths = np.diff(self.bins), self.lengths.astype(np.float64)
        pairs = float((lengths * (lengths + 1)).sum()) / (self.num_bins * self.capacity * (self.capacity + 1.0))
        cut = int(self.goes_on.sum())
        return (
            f"{self.num_bins:,} sequences of {self.capacity:,}, {self.fill:.1%} filled, {pieces.mean():.1f} "
            f"documents each (most {pieces.max():,}), "
            f"{f'{cut:,} cuts through longer documents' if cut else 'no document cut'}; attention inside "
            f"documents reads {pairs:.1%} of the pairs"
        )


def make_packing(
    corpus: Corpus, start: int, stop: int, capacity: int, decreasing: bool, window: int = WINDOW
) -> Packing:
    """Pack the documents of tokens [start, stop) of a corpus, both of which are document borders, in groups of `window`
    in file order.

    decreasing  the longest of a group first, which fills sequences better; otherwise in file order
    A document longer than `capacity` is cut into pieces of that length and a last one. Empty documents are left out.
    """
    borders = _borders(corpus, start, stop)
    groups = (_cut(borders[at : at + window + 1], capacity) for at in range(0, len(borders) - 1, window))
    return _pack(groups, capacity, decreasing)


def pack_documents(
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    capacity: int,
    window: int = WINDOW,
    second: Second | None = None,
) -> Packing:
    """Pack documents that begin at these tokens of a corpus and have these lengths, at most `capacity`, as
    `make_packing` does. Those of length 0 are left out. second: of each document, at most its capacity."""
    kept = np.flatnonzero(lengths)
    starts, lengths = starts[kept], lengths[kept]
    slices = [slice(at, at + window) for at in range(0, len(starts), window)]
    groups = ((starts[each], lengths[each], np.zeros(len(lengths[each]), np.uint8)) for each in slices)
    seconds = None if second is None else [Second(second.sizes[kept][each], second.capacity) for each in slices]
    return _pack(groups, capacity, decreasing=False, seconds=seconds)


def _pack(
    groups: Iterable[Pieces], capacity: int, decreasing: bool, seconds: Sequence[Second] | None = None
) -> Packing:
    """groups: (starts, lengths, goes_on) of pieces that are packed together; seconds: of each group, in file order."""
    made: list[tuple[NDArray[Any], ...]] = []
    bins = 0
    for number, (starts, lengths, goes_on) in enumerate(groups):
        second = None if seconds is None else seconds[number]
        order = np.argsort(-lengths, kind="stable") if decreasing else np.arange(len(lengths))
        found = np.empty(len(lengths), np.int64)
        found[order] = first_fit(lengths[order], capacity, second)
        by_bin = np.argsort(found, kind="stable")  # inside a bin in file order
        made.append((starts[by_bin], lengths[by_bin].astype(np.int32), goes_on[by_bin], found[by_bin] + bins))
        bins += int(found.max(initial=-1)) + 1
    if not made:
        return Packing(
            capacity, np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.uint8), np.zeros(1, np.int64)
        )
    starts, sizes, goes_on, of = (np.concatenate(parts) for parts in zip(*made))
    return Packing(capacity, starts, sizes, goes_on, np.searchsorted(of, np.arange(bins + 1)))


def _borders(corpus: Corpus, start: int, stop: int) -> NDArray[np.int64]:
    """Where the documents of [start, stop) that have tokens start, and `stop`."""
    return np.append(corpus.document_starts(start, stop), stop) if stop > start else np.empty(0, np.int64)


def _cut(borders: NDArray[np.int64], capacity: int) -> Pieces:
    """(starts, lengths, goes_on) of the pieces of the documents between borders."""
    sizes = np.diff(borders)
    count = -(-sizes // capacity)
    number = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)  # of the piece in its document
    starts = np.repeat(borders[:-1], count) + number * capacity
    lengths = np.minimum(np.repeat(borders[1:], count) - starts, capacity)
    return starts, lengths, (number < np.repeat(count, count) - 1).astype(np.uint8)


# ---- stored beside the index


def packing_path(prefix: str, start: int, stop: int, capacity: int) -> Path:
    """The path of the packing of tokens [start, stop) of PREFIX into sequences of `capacity`."""
    return Path(f"{prefix}.{capacity}.{start}-{stop}.pack")


def write_packing(path: Path, packing: Packing, corpus: Corpus, start: int, stop: int) -> None:
    """Write a packing atomically, with checksums of its contents and of the document borders from which it was
    computed."""
    sizes = (len(packing.starts), packing.num_bins)
    head = HEADER.pack(
        MAGIC, VERSION, packing.capacity, start, stop, *sizes, _checksum(corpus, start, stop), packing.checksum
    )
    with replacing(path) as file:
        for part in (head, packing.starts, packing.bins, packing.lengths, packing.goes_on):
            file.write(part if isinstance(part, bytes) else np.ascontiguousarray(part).data)


def read_packing(corpus: Corpus, start: int, stop: int, capacity: int) -> Packing:
    """A stored packing, memory-mapped. DataError if the file is missing, damaged, of another version, or computed from
    other documents."""
    path = packing_path(corpus.prefix, start, stop, capacity)
    if not path.exists():
        made = [p.name for p in path.parent.glob(f"{Path(corpus.prefix).name}.*.pack")]
        others = f" (there are {', '.join(sorted(made)[:3])})" if made else ""
        raise DataError(
            f"{path}: no such file{others}: `phalanx data pack CONFIG` makes it, or train with data.packing=online"
        )
    with open(path, "rb") as file:
        head = file.read(HEADER.size)
        if len(head) < HEADER.size or head[:8] != MAGIC:
            raise DataError(f"{path}: no packing, or cut short: make it again with `phalanx data pack CONFIG`")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    _, version, stored, first, last, pieces, bins, borders, checksum = HEADER.unpack(head)
    if version != VERSION or (stored, first, last) != (capacity, start, stop):
        expected = f"expected version {VERSION} of {start}..{stop} in {capacity}"
        raise DataError(f"{path}: is version {version} of tokens {first}..{last} in sequences of {stored}, {expected}")
    sizes = {
        "starts": (np.int64, pieces),
        "bins": (np.int64, bins + 1),
        "lengths": (np.int32, pieces),
        "goes_on": (np.uint8, pieces),
    }
    size = HEADER.size + sum(np.dtype(kind).itemsize * count for kind, count in sizes.values())
    if len(data) != size:
        raise DataError(f"{path}: {len(data)} bytes, expected {size}: make it again with `phalanx data pack CONFIG`")
    parts, at = {}, HEADER.size
    for name, (kind, count) in sizes.items():
        parts[name] = np.frombuffer(data, kind, count, at)
        at += parts[name].nbytes
    packing = Packing(capacity, **parts)
    if packing.checksum != checksum:
        raise DataError(f"{path}: damaged: its checksum is {packing.checksum:08x}, expected {checksum:08x}")
    if _checksum(corpus, start, stop) != borders:
        raise DataError(
            f"{path}: was made of other documents than {corpus.idx_path.name} holds now: make it again with "
            "`phalanx data pack CONFIG`"
        )
    return packing


def _checksum(corpus: Corpus, start: int, stop: int) -> int:
    return zlib.crc32(_borders(corpus, start, stop).data)

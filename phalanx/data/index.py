"""Token files: Megatron's .bin/.idx pair, read through memory maps as one stream of tokens and written atomically.

The .bin holds token ids and nothing else. The .idx holds, little-endian: magic (9 bytes), version (u64), dtype code
(u8), number of sequences S (u64), number of document indices D + 1 (u64), then lengths in tokens (i32, S), byte
offsets into the .bin (i64, S), the first sequence of each document closed by S (i64, D + 1), and perhaps one mode
per sequence (i8, S). Merged sets have a .bins instead of the .bin: a list of .bin files that are read as if they
were one. What the tokens mean and in which order they are seen is left to `tokenizers` and `mixture`.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import struct
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from phalanx.base.errors import DataError
from phalanx.data.checksums import (
    SEGMENT,
    BinFile,
    Checksums,
    HashedFile,
    Segment,
    SegmentSums,
    cut,
    read_sums,
    sums_path,
    write_sums,
)
from phalanx.data.files import must_exist, replacing, sync, sync_folder, temporary_name

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
CHUNK = 1 << 20  # entries processed at a time: memory stays flat however many documents there are
MAX_LENGTH = 2**31 - 1  # lengths are int32


def optimal_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype Megatron stores ids of this vocabulary in."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def strip_suffix(prefix: str | os.PathLike[str]) -> str:
    """`x` for each of `x`, `x.bin` and `x.idx`."""
    text = os.fspath(prefix)
    return text[:-4] if text.endswith((".bin", ".idx")) else text


class Corpus:
    """An open pair of files, seen as one stream of `num_tokens` tokens: all sequences in file order.

    Only memory maps are held, so a billion documents cost this process no memory. Opening reads the whole .idx and
    compares it with PREFIX.sums, if that exists. Raises DataError for a file that is missing, truncated, damaged, in
    another format, or does not belong to the other one.

    idx_xxh3    the XXH3-64 of the .idx
    bin_files   the .bin files with the checksums of their segments, if they have any
    beside      the files beside them that PREFIX.sums has checksums of, such as classes of tokens, by their suffix
    """

    def __init__(self, prefix: str | os.PathLike[str]):
        self.prefix = strip_suffix(prefix)
        self.bin_path, self.bins = _find_bins(self.prefix)
        self.idx_path = must_exist(self.prefix + ".idx")
        self.dtype, self.num_sequences, num_indices = _read_header(self.idx_path)
        self.num_documents = num_indices - 1
        lengths_end = HEADER.size + 4 * self.num_sequences
        with open(self.idx_path, "rb") as idx:
            self._index = mmap.mmap(idx.fileno(), 0, access=mmap.ACCESS_READ)
        self._lengths = np.frombuffer(self._index, np.int32, self.num_sequences, HEADER.size)
        self._pointers = np.frombuffer(self._index, np.int64, self.num_sequences, lengths_end)
        self._documents = np.frombuffer(self._index, np.int64, num_indices, lengths_end + 8 * self.num_sequences)
        self.idx_xxh3 = self._hash_index()
        sums = read_sums(self.prefix)
        self.bin_files: tuple[BinFile, ...] = self._check_sums(sums)
        self.beside = {} if sums is None else self._files_beside(sums)
        self._maps = [_map(path, np.uint8, 0, size) for path, size in self.bins]
        self._ends = np.cumsum([size for _, size in self.bins]).tolist()
        self._check_documents()
        self.num_tokens, contiguous = self._check_pointers()
        self._first = int(self._pointers[0]) if self.num_sequences else 0
        self._offsets = None if contiguous else _running_sum(self._lengths)

    @property
    def is_plain(self) -> bool:
        """Whether the sequences fill the .bin one after another, as our own files do."""
        return self._offsets is None and self._first == 0

    @property
    def checked_files(self) -> tuple[BinFile, ...]:
        """The .bin files and those beside them; what has no checksums has none here either."""
        return (*self.bin_files, *self.beside.values())

    @property
    def is_checked(self) -> bool:
        """Whether all its files have checksums."""
        return all(file.segments is not None for file in self.bin_files)

    def __repr__(self) -> str:
        return f"Corpus({self.prefix!r}, {self.num_tokens} tokens, {self.num_documents} documents, {self.dtype})"

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens start..stop-1 of the stream, (stop - start,) in the file's dtype; a read-only view when the file is
        contiguous."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start}..{stop} of {self.bin_path}, which holds {self.num_tokens}")
        if self._offsets is None:
            return self._read(self._first + start * self.dtype.itemsize, stop - start)
        first = int(np.searchsorted(self._offsets, start, side="right")) - 1
        last = int(np.searchsorted(self._offsets, stop, side="left"))
        run = [self.sequence(s) for s in range(first, last)]
        skip = start - int(self._offsets[first])
        return np.concatenate([np.empty(0, self.dtype), *run])[skip : skip + stop - start]

    def sequence(self, s: int) -> NDArray[Any]:
        """Sequence number s, as Megatron's `IndexedDataset[s]`."""
        return self._read(int(self._pointers[s]), int(self._lengths[s]))

    def sequence_lengths(self, d: int) -> NDArray[np.int32]:
        """Tokens of each sequence of document d."""
        return self._lengths[int(self._documents[d]) : int(self._documents[d + 1])]

    def sequence_counts(self, first: int, last: int) -> NDArray[np.int64]:
        """Sequences of each of the documents first .. last - 1."""
        return np.diff(self._documents[first : last + 1]) if last > first else np.empty(0, np.int64)

    def document_start(self, d: int) -> int:
        """Offset in the stream of the first token of document d; num_tokens for d = num_documents."""
        s = int(self._documents[d])
        if s == self.num_sequences:
            return self.num_tokens
        return (
            int(self._offsets[s])
            if self._offsets is not None
            else (int(self._pointers[s]) - self._first) // self.dtype.itemsize
        )

    def document_at(self, offset: int) -> int:
        """Number of the document that token `offset` belongs to."""
        return bisect_right(range(self.num_documents), offset, key=self.document_start) - 1

    def document_starts(self, start: int, stop: int) -> NDArray[np.int64]:
        """Offsets in the stream, ascending, of the documents that start in [start, stop)."""
        documents, stop, reach = range(self.num_documents), min(stop, self.num_tokens), 1
        low = bisect_left(documents, start, key=self.document_start)
        while low + reach < self.num_documents and self.document_start(low + reach) < stop:
            reach *= 2  # a window holds few of many documents: most of a second search is saved
        high = bisect_left(documents, stop, lo=low, hi=min(low + reach, self.num_documents), key=self.document_start)
        sequences = self._documents[low:high]
        if self._offsets is not None:
            starts = self._offsets[sequences]
        else:
            starts = (self._pointers[sequences] - self._first) // self.dtype.itemsize
        return starts[np.diff(starts, prepend=-1) > 0]  # empty documents start where the next one does

    def _read(self, pointer: int, count: int) -> NDArray[Any]:
        """A view, or a copy of what lies in several files."""
        stop = pointer + count * self.dtype.itemsize
        first = bisect_right(self._ends, pointer)
        if count and stop <= self._ends[first]:
            begin = self._ends[first] - len(self._maps[first])
            return np.frombuffer(self._maps[first], dtype=self.dtype, count=count, offset=pointer - begin)
        raw = [np.empty(0, np.uint8)]
        while pointer < stop:
            begin, end = self._ends[first] - len(self._maps[first]), min(stop, self._ends[first])
            raw.append(self._maps[first][pointer - begin : end - begin])
            pointer, first = end, first + 1
        return np.concatenate(raw).view(self.dtype)

    def _release(self) -> None:
        """Drop index pages that were read from this process's memory; the file cache keeps them while there is room."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._index.madvise(mmap.MADV_DONTNEED)

    def _hash_index(self) -> str:
        found, whole = xxhash.xxh3_64(), memoryview(self._index)
        for at in range(0, len(whole), SEGMENT):
            found.update(whole[at : at + SEGMENT])
            self._release()
        return found.hexdigest()

    def _check_sums(self, sums: Checksums | None) -> tuple[BinFile, ...]:
        """The .bin files with their checksums from PREFIX.sums. DataError if the .idx is not the one it was written
        with."""
        path = sums_path(self.prefix)
        known = (None,) * len(self.bins) if sums is None else sums.bins
        if sums is not None and sums.idx != self.idx_xxh3:
            raise DataError(
                f"{self.idx_path}: damaged: its checksum is {self.idx_xxh3}, expected {sums.idx} by "
                f"{path.name}: restore it from a copy, or "
                f"prepare the texts again; if another tool has written {Path(self.prefix).name} since, remove {path}"
            )
        if len(known) != len(self.bins):
            raise DataError(
                f"{path}: of other token files: it has checksums of {len(known)} .bin files, {self.bin_path} "
                f"is {len(self.bins)}"
            )
        found = tuple(BinFile(file, size, segments, path) for (file, size), segments in zip(self.bins, known))
        for file in found:
            if file.segments is not None and (expected := sum(segment.size for segment in file.segments)) != file.size:
                kind = "truncated" if file.size < expected else "too long"
                raise DataError(f"{file.path}: {kind}: {file.size} bytes, expected {expected} by {path.name}")
        return found

    def _files_beside(self, sums: Checksums) -> dict[str, BinFile]:
        """DataError for one that is missing or of another size."""
        found, path = dict[str, BinFile](), sums_path(self.prefix)
        for suffix, segments in sums.beside.items():
            file, expected = must_exist(self.prefix + suffix), sum(segment.size for segment in segments)
            size = file.stat().st_size
            if size != expected:
                kind = "truncated" if size < expected else "too long"
                raise DataError(f"{file}: {kind}: {size} bytes, expected {expected} by {path.name}")
            found[suffix] = BinFile(file, size, segments, path)
        return found

    def _check_documents(self) -> None:
        indices = self._documents
        ends = (int(indices[0]), int(indices[-1]))
        if ends != (0, self.num_sequences):
            raise DataError(
                f"{self.idx_path}: damaged: document indices run from {ends[0]} to {ends[1]}, expected 0 to "
                f"{self.num_sequences}"
            )
        for at in range(0, self.num_documents, CHUNK):
            if np.any(np.diff(indices[at : at + CHUNK + 1]) < 0):
                raise DataError(f"{self.idx_path}: damaged: document indices decrease")
            self._release()

    def _check_pointers(self) -> tuple[int, bool]:
        """(tokens in all sequences, whether they lie in the .bin one after the other in file order)."""
        size, item = self._ends[-1], self.dtype.itemsize
        tokens, end, furthest, contiguous = 0, None, 0, True
        for at in range(0, self.num_sequences, CHUNK):
            lengths = self._lengths[at : at + CHUNK].astype(np.int64)
            starts = self._pointers[at : at + CHUNK]
            stops = starts + lengths * item
            if lengths.min() < 0 or starts.min() < 0:
                raise DataError(
                    f"{self.idx_path}: damaged: a negative length or byte offset in sequences "
                    f"{at}..{at + len(lengths) - 1}"
                )
            contiguous &= (end is None or int(starts[0]) == end) and bool(np.array_equal(starts[1:], stops[:-1]))
            tokens, end, furthest = tokens + int(lengths.sum()), int(stops[-1]), max(furthest, int(stops.max()))
            self._release()
        if size < furthest or (contiguous and size != furthest):
            kind = "truncated" if size < furthest else "too long"
            raise DataError(f"{self.bin_path}: {kind}: {size} bytes, expected {furthest} by {self.idx_path.name}")
        return tokens, contiguous


def check_vocab(corpus: Corpus, vocab_size: int, start: int = 0, stop: int | None = None) -> None:
    """Raise DataError with file, document, offset and id for the first token in [start, stop) outside [0,
    vocab_size)."""
    stop = corpus.num_tokens if stop is None else stop
    for at in range(start, stop, CHUNK):
        part = corpus.tokens(at, min(at + CHUNK, stop))
        bad = np.flatnonzero((part < 0) | (part >= vocab_size))
        if len(bad):
            offset = at + int(bad[0])
            document = corpus.document_at(offset)
            raise DataError(
                f"{corpus.bin_path}: token id {int(part[bad[0]])} is outside the vocabulary of {vocab_size}: "
                f"document {document}, its token {offset - corpus.document_start(document)}, token {offset} of the file"
            )


class CorpusWriter:
    """Writes a .bin/.idx pair, byte for byte like Megatron's builder, and their checksums beside them; a context
    manager.

    Nothing appears under the final names before the block ends without an error, and nothing is left behind otherwise.
    Lengths and document indices are spooled to disk, so memory is bounded by one document. idx_xxh3: of the .idx, once
    it is written.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: DTypeLike):
        self.prefix = strip_suffix(prefix)
        self.dtype = np.dtype(dtype)
        if self.dtype.name not in DTYPES.values() or self.dtype.kind == "f":
            raise ValueError(
                f"token ids cannot be stored as {self.dtype.name}; integer types of {', '.join(DTYPES.values())} can"
            )
        self.num_tokens = self.num_sequences = self.num_documents = 0
        self._bin_path, self._idx_path = Path(self.prefix + ".bin"), Path(self.prefix + ".idx")
        self._bin_path.parent.mkdir(parents=True, exist_ok=True)
        self._bin_temporary, self._idx_temporary = temporary_name(self._bin_path), temporary_name(self._idx_path)
        self._bin_sums = SegmentSums()
        self._beside = dict[str, tuple[Segment, ...]]()
        self.idx_xxh3 = ""

    def __enter__(self) -> CorpusWriter:
        self._bin: IO[bytes] = open(self._bin_temporary, "wb")
        self._lengths = tempfile.TemporaryFile(dir=self._bin_path.parent)
        self._documents = tempfile.TemporaryFile(dir=self._bin_path.parent)
        self._documents.write(np.int64(0).tobytes())
        return self

    def add_document(self, tokens: NDArray[Any] | Sequence[int], lengths: Sequence[int] | None = None) -> None:
        """Append a document of one sequence, or of several whose `lengths` add up to its tokens. DataError if an id
        does not fit."""
        ids = np.asarray(tokens)
        lengths = [len(ids)] if lengths is None else lengths
        if sum(lengths) != len(ids) or max(lengths, default=0) > MAX_LENGTH or min(lengths, default=0) < 0:
            raise DataError(
                f"{self._bin_path}: document {self.num_documents} has {len(ids)} tokens, "
                f"but its sequence lengths add up to {sum(lengths)} (each must be 0..{MAX_LENGTH})"
            )
        limits = np.iinfo(self.dtype)
        if len(ids) and not limits.min <= int(ids.min()) <= int(ids.max()) <= limits.max:
            raise DataError(
                f"{self._bin_path}: document {self.num_documents} has ids {ids.min()}..{ids.max()}, "
                f"{self.dtype} holds {limits.min}..{limits.max}"
            )
        self._write_bin(ids.astype(self.dtype).tobytes())
        self._lengths.write(np.asarray(lengths, dtype=np.int32).tobytes())
        self.num_sequences += len(lengths)
        self.num_tokens += len(ids)
        self.num_documents += 1
        self._documents.write(np.int64(self.num_sequences).tobytes())

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            for file in (self._bin, self._lengths, self._documents):
                file.close()
            self._bin_temporary.unlink(missing_ok=True)
            self._idx_temporary.unlink(missing_ok=True)

    def write_beside(self, suffix: str, data: bytes) -> None:
        """Write PREFIX + suffix, whose checksums are kept with those of the tokens."""
        with replacing(Path(self.prefix + suffix)) as file:
            file.write(data)
        self._beside[suffix] = tuple(cut(data))

    def _write_bin(self, data: Any) -> None:
        self._bin.write(data)
        self._bin_sums.update(data)

    def _publish(self) -> None:
        sync(self._bin)
        with open(self._idx_temporary, "wb") as idx:
            hashed = HashedFile(idx)
            self._write_index(hashed)
            sync(idx)
        self.idx_xxh3 = hashed.xxh3
        # a crash between the renames must not leave an old .idx beside the new .bin
        self._idx_path.unlink(missing_ok=True)
        os.replace(self._bin_temporary, self._bin_path)
        write_sums(sums_path(self.prefix), Checksums(self.idx_xxh3, (self._bin_sums.finish(),), self._beside))
        os.replace(self._idx_temporary, self._idx_path)
        sync_folder(self._bin_path.parent)

    def _write_index(self, idx: HashedFile) -> None:
        code = next(c for c, name in DTYPES.items() if name == self.dtype.name)
        idx.write(HEADER.pack(MAGIC, 1, code, self.num_sequences, self.num_documents + 1))
        self._lengths.seek(0)
        shutil.copyfileobj(self._lengths, idx)
        self._lengths.seek(0)
        pointer = 0
        while piece := self._lengths.read(4 * CHUNK):
            ends = pointer + np.cumsum(np.frombuffer(piece, np.int32), dtype=np.int64) * self.dtype.itemsize
            idx.write(np.concatenate([[pointer], ends[:-1]]).astype(np.int64).tobytes())
            pointer = int(ends[-1])
        self._documents.seek(0)
        shutil.copyfileobj(self._documents, idx)


def _find_bins(prefix: str) -> tuple[Path, list[tuple[Path, int]]]:
    """(PREFIX.bin or PREFIX.bins, the .bin files with their sizes). DataError if one is missing or has changed its
    size."""
    listing = Path(prefix + ".bins")
    if os.path.exists(prefix + ".bin") or not listing.exists():
        path = must_exist(prefix + ".bin")
        return path, [(path, path.stat().st_size)]
    try:
        entries = [
            (str(entry["path"]), int(entry["bytes"])) for entry in json.loads(listing.read_text(encoding="utf-8"))
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{listing}: not a list of .bin files: {error!r}") from None
    bins = []
    for name, size in entries:
        path = listing.parent / name
        if not path.exists():
            raise DataError(
                f"{path}: no such file; {listing} needs it: move merged sets together, or merge them with --copy"
            )
        if path.stat().st_size != size:
            raise DataError(f"{path}: {path.stat().st_size} bytes, expected {size} by {listing.name}")
        bins.append((path, size))
    return listing, bins or [(listing, 0)]


def write_bins(file: Path, place: Path, bins: Sequence[tuple[Path, int]]) -> None:
    """Write a list of .bin files, with their paths relative to the folder `place` in which the list will be."""
    entries = [{"path": os.path.relpath(path, place), "bytes": size} for path, size in bins]
    with replacing(file) as output:
        output.write(json.dumps(entries, indent=2).encode())


def _read_header(path: Path) -> tuple[np.dtype[Any], int, int]:
    """(dtype, number of sequences, number of document indices). DataError unless the size of the file fits them
    exactly."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(HEADER.size)
    if not MAGIC.startswith(head[: len(MAGIC)]):
        raise DataError(f"{path}: not a Megatron index: it starts with {head[:9]!r}, expected {MAGIC!r} ({size} bytes)")
    if len(head) < HEADER.size:
        raise DataError(f"{path}: truncated: {size} bytes, expected at least {HEADER.size}")
    _, version, code, sequences, indices = HEADER.unpack(head)
    if version != 1:
        raise DataError(f"{path}: index version {version}, expected 1")
    if code not in DTYPES or DTYPES[code].startswith("float"):
        raise DataError(f"{path}: dtype code {code} ({DTYPES.get(code, 'unknown')}) cannot hold token ids")
    expected = HEADER.size + 12 * sequences + 8 * indices
    if indices < 1 or size not in (expected, expected + sequences):  # the longer one has a mode per sequence
        kind = "truncated" if size < expected else "damaged"
        raise DataError(
            f"{path}: {kind}: {size} bytes, expected {expected} for {sequences} sequences and {indices} "
            "document indices"
        )
    return np.dtype(DTYPES[code]), sequences, indices


def _map(path: Path, dtype: DTypeLike, offset: int, count: int) -> NDArray[Any]:
    """A read-only map, as a plain array, because numpy's memmap class makes small slices slow."""
    if count == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)).view(np.ndarray)


def _running_sum(lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

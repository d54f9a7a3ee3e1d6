"""Token files from finished pieces: pieces are stored on disk one by one and assembled in order or shuffled; several
prefixes are merged into one.

`readers` and `prepare` determine what a piece contains.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.data.checksums import BinFile, Checksums, Segment, cut, sums_path, write_sums
from phalanx.data.files import replacing
from phalanx.data.index import CHUNK, MAX_LENGTH, Corpus, CorpusWriter, write_bins
from phalanx.data.mixture import make_key, permute

SIZES = struct.Struct("<QQ")  # bytes of the note, number of documents
SHUFFLE = 0x5F  # names this use of the seed


def write_piece(
    path: Path, note: dict[str, Any], lengths: NDArray[np.int64], hashes: bytes | bytearray, tokens: bytes | bytearray
) -> None:
    """A file with a note, where documents begin and end in tokens, an 8-byte hash for each, and the tokens. It appears
    whole or not at all.

    The checksums of the tokens are part of the note. They are of what was in memory, so they also detect later damage
    to the piece.
    """
    text = json.dumps({**note, "segments": cut(tokens)}).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(SIZES.pack(len(text), len(lengths)))
        file.write(text)
        file.write(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64).tobytes())
        file.write(hashes)
        file.write(tokens)


def read_note(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        size, _ = SIZES.unpack(file.read(SIZES.size))
        return json.loads(file.read(size))


class PreparedPiece:
    """An open piece: `offsets` (documents + 1), `hashes` (documents) and `tokens`, memory-mapped; `segments`:
    checksums of the tokens."""

    def __init__(self, path: Path, dtype: DTypeLike):
        raw = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
        size, documents = SIZES.unpack(raw[: SIZES.size].tobytes())
        begin = SIZES.size + size
        self.path = path
        known = json.loads(raw[SIZES.size : begin].tobytes()).get("segments")  # a piece of an older version has none
        self.offsets = raw[begin : begin + 8 * (documents + 1)].view(np.int64)
        begin += 8 * (documents + 1)
        self.hashes = raw[begin : begin + 8 * documents].view(np.uint64)
        self.start = begin + 8 * documents
        self.tokens = raw[self.start :].view(dtype)
        self.segments = cut(raw[self.start :]) if known is None else [Segment(*entry) for entry in known]


@dataclass
class Count:
    """What a set of token files holds. `lengths`: documents by length, under "2**k" those of 2**k to 2**(k+1) - 1
    tokens."""

    documents: int
    tokens: int
    lengths: dict[str, int]


class Assembler(CorpusWriter):
    """A CorpusWriter that takes many documents at a time."""

    def __enter__(self) -> Assembler:
        super().__enter__()
        self._by_bits = np.zeros(32, np.int64)
        return self

    def add_documents(self, lengths: NDArray[Any], sequences: NDArray[Any] | None = None) -> None:
        """Record sequences by their lengths, and at which of them (counted from the first of these, plus one) documents
        end."""
        if len(lengths) and int(lengths.max()) > MAX_LENGTH:
            raise DataError(f"{self.prefix}: a document of {lengths.max()} tokens; the format holds {MAX_LENGTH}")
        ends = np.arange(1, len(lengths) + 1, dtype=np.int64) if sequences is None else sequences
        self._by_bits += np.bincount(np.frexp(lengths)[1], minlength=32)  # frexp: of 2**k..2**(k+1)-1 it is k + 1
        self._lengths.write(lengths.astype(np.int32).tobytes())
        self._documents.write((ends + self.num_sequences).astype(np.int64).tobytes())
        self.num_sequences += len(lengths)
        self.num_documents += len(ends)
        self.num_tokens += int(lengths.sum(dtype=np.int64))

    def copy_tokens(self, path: Path, start: int, segments: Sequence[Segment]) -> None:
        """Copy the segments of a file that begin at byte `start`, in the kernel (which shares blocks if the file system
        can)."""
        self._bin.flush()
        with open(path, "rb") as source:
            copy_bytes(source.fileno(), self._bin.fileno(), start, sum(segment.size for segment in segments))
        self._bin_sums.extend(segments)

    def write_tokens(self, tokens: NDArray[Any]) -> None:
        self._write_bin(tokens.data)

    def count(self) -> Count:
        return Count(
            self.num_documents,
            self.num_tokens,
            {f"2**{bits - 1}": int(n) for bits, n in enumerate(self._by_bits) if n and bits},
        )


def assemble(
    pieces: Sequence[Path],
    prefixes: Sequence[str | os.PathLike[str]],
    dtype: DTypeLike,
    seed: int | None,
    shares: Sequence[float],
) -> list[Count]:
    """PREFIX.bin and PREFIX.idx with the pieces' documents, in order or, with a seed, shuffled. With several prefixes,
    each takes its share.

    Shuffled, document i is number permute(i) of the pieces: nothing is sorted or held in memory, and only memory maps
    are read.
    """
    limits = np.cumsum(shares)[:-1]
    with ExitStack() as stack:
        writers = [stack.enter_context(Assembler(prefix, dtype)) for prefix in prefixes]
        if seed is None:
            _in_order((PreparedPiece(path, dtype) for path in pieces), writers, limits)
        else:
            _shuffled([PreparedPiece(path, dtype) for path in pieces], writers, limits, seed)
    return [writer.count() for writer in writers]


def _in_order(pieces: Iterable[PreparedPiece], writers: Sequence[Assembler], limits: NDArray[Any]) -> None:
    for piece in pieces:
        lengths = np.diff(piece.offsets)
        if len(writers) == 1:
            writers[0].add_documents(lengths)
            writers[0].copy_tokens(piece.path, piece.start, piece.segments)
            continue
        where = _part_of(piece.hashes, limits)
        for n, writer in enumerate(writers):
            writer.add_documents(lengths[where == n])
            writer.write_tokens(piece.tokens[np.repeat(where == n, lengths)])


def _shuffled(pieces: Sequence[PreparedPiece], writers: Sequence[Assembler], limits: NDArray[Any], seed: int) -> None:
    firsts = np.cumsum([0, *(len(piece.offsets) - 1 for piece in pieces)])
    total = int(firsts[-1])
    for at in range(0, total, CHUNK >> 4):
        documents = permute(np.arange(at, min(at + (CHUNK >> 4), total)), total, make_key(seed, SHUFFLE))
        owners = np.searchsorted(firsts, documents, side="right") - 1
        lengths: list[list[int]] = [[] for _ in writers]
        for owner, document in zip(owners.tolist(), (documents - firsts[owners]).tolist()):
            piece = pieces[owner]
            start, stop = piece.offsets[document : document + 2].tolist()
            part = int(_part_of(piece.hashes[document], limits)) if len(writers) > 1 else 0
            writers[part].write_tokens(piece.tokens[start:stop])
            lengths[part].append(stop - start)
        for writer, found in zip(writers, lengths):
            writer.add_documents(np.array(found, np.int64))


def _part_of(hashes: Any, limits: NDArray[Any]) -> Any:
    """The number of the part for each hash, taken as a number from 0 to 1."""
    return np.searchsorted(limits, hashes / 2.0**64, side="right")


def merge(made: Path, place: str, shards: Sequence[str | os.PathLike[str]], copy: bool) -> tuple[int, int]:
    """Merge token files of several prefixes, in the order given: (documents, tokens). DataError unless all store ids in
    the same dtype.

    Writes MADE.idx and MADE.bins, which names the .bin files relative to the folder of `place`. copy: writes MADE.bin,
    in the kernel, which shares blocks if the file system can. In both cases the checksums of the shards are reused.
    """
    corpora = [Corpus(shard) for shard in shards]
    for corpus in corpora[1:]:
        if corpus.dtype != corpora[0].dtype:
            raise DataError(
                f"{corpus.bin_path} holds {corpus.dtype}, {corpora[0].bin_path} {corpora[0].dtype}: made "
                "with different tokenizers"
            )
    with Assembler(made, corpora[0].dtype) as writer:
        for corpus in corpora:
            if not copy and not corpus.is_plain:
                raise DataError(
                    f"{corpus.prefix}: its sequences do not fill its .bin one after another; merge it with --copy"
                )
            writer.add_documents(corpus._lengths, corpus._documents[1:])
            if copy:
                _copy_corpus(corpus, writer)
    if not copy:
        made.with_name(made.name + ".bin").unlink()
        files = [file for corpus in corpora for file in corpus.bin_files]
        write_bins(Path(f"{made}.bins"), Path(place).parent, [(file.path, file.size) for file in files])
        write_sums(sums_path(made), Checksums(writer.idx_xxh3, tuple(file.segments for file in files)))
    return writer.num_documents, writer.num_tokens


def _copy_corpus(corpus: Corpus, writer: Assembler) -> None:
    if corpus.is_plain:
        for file in corpus.bin_files:
            writer.copy_tokens(file.path, 0, segments_now(file) if file.segments is None else file.segments)
        return
    for s in range(corpus.num_sequences):
        writer.write_tokens(corpus.sequence(s))


def segments_now(file: BinFile) -> list[Segment]:
    """The segments of a file without checksums, as it is read now."""
    return cut(np.memmap(file.path, np.uint8, mode="r")) if file.size else []


def copy_bytes(source: int, target: int, start: int, count: int) -> None:
    """Append bytes of one open file to another."""
    while count:
        try:
            done = os.copy_file_range(source, target, count, offset_src=start)
        except (AttributeError, OSError):  # not Linux, or not between these file systems
            done = os.write(target, os.pread(source, min(count, CHUNK), start))
        if not done:
            raise DataError(f"a file became shorter while it was copied: {count} bytes are missing")
        start, count = start + done, count - done

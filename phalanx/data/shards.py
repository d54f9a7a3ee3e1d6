"""Token files from finished pieces: kept on disk one by one, put together in order or shuffled, and prefixes merged into one.

What a piece is made of is left to `readers` and `prepare`.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from phalanx.base.errors import DataError
from phalanx.data.files import replacing
from phalanx.data.index import CHUNK, MAX_LENGTH, Corpus, CorpusWriter
from phalanx.data.mixture import make_key, permute

SIZES = struct.Struct("<QQ")  # bytes of the note, number of documents
SHUFFLE = 0x5F  # names this use of the seed


def write_piece(path: Path, note: dict[str, Any], lengths: Sequence[int], tokens: memoryview | bytes) -> None:
    """A file with a note, where documents begin and end in tokens, and the tokens. It appears whole or not at all."""
    text = json.dumps(note).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(SIZES.pack(len(text), len(lengths)))
        file.write(text)
        file.write(np.cumsum([0, *lengths], dtype=np.int64).tobytes())
        file.write(tokens)


def read_note(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        size, _ = SIZES.unpack(file.read(SIZES.size))
        return json.loads(file.read(size))


class Piece:
    """An open piece: `offsets` (documents + 1) and `tokens`, memory-mapped."""

    def __init__(self, path: Path, dtype: DTypeLike):
        raw = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
        size, documents = SIZES.unpack(raw[: SIZES.size].tobytes())
        begin = SIZES.size + size
        self.offsets = raw[begin : begin + 8 * (documents + 1)].view(np.int64)
        self.start = begin + 8 * (documents + 1)
        self.tokens = raw[self.start :].view(dtype)


class Assembler(CorpusWriter):
    """A CorpusWriter that takes many documents at a time."""

    def __enter__(self) -> Assembler:
        super().__enter__()
        return self

    def add_documents(self, lengths: NDArray[Any], sequences: NDArray[Any] | None = None) -> None:
        """Note sequences by their lengths, and at which of them (counted from the first of these, plus one) documents end."""
        if len(lengths) and int(lengths.max()) > MAX_LENGTH:
            raise DataError(f"{self.prefix}: a document of {lengths.max()} tokens; the format holds {MAX_LENGTH}")
        ends = np.arange(1, len(lengths) + 1, dtype=np.int64) if sequences is None else sequences
        self._lengths.write(lengths.astype(np.int32).tobytes())
        self._documents.write((ends + self.num_sequences).astype(np.int64).tobytes())
        self.num_sequences += len(lengths)
        self.num_documents += len(ends)
        self.num_tokens += int(lengths.sum(dtype=np.int64))

    def copy_tokens(self, path: Path, start: int, count: int) -> None:
        """Bytes start..start+count-1 of a file, by the kernel (which shares them where the file system can)."""
        self._bin.flush()
        with open(path, "rb") as source:
            copy_bytes(source.fileno(), self._bin.fileno(), start, count)

    def write_tokens(self, tokens: NDArray[Any]) -> None:
        self._bin.write(tokens.data)


def assemble(pieces: Sequence[Path], prefix: str | os.PathLike[str], dtype: DTypeLike, seed: int | None) -> tuple[int, int]:
    """PREFIX.bin and PREFIX.idx of the pieces' documents, in order or, with a seed, shuffled: (documents, tokens).

    Shuffled, document i is number permute(i) of the pieces: nothing is sorted or held, and only memory maps are read.
    """
    with Assembler(prefix, dtype) as writer:
        if seed is None:
            for path in pieces:
                piece = Piece(path, dtype)
                writer.add_documents(np.diff(piece.offsets))
                writer.copy_tokens(path, piece.start, piece.tokens.nbytes)
        else:
            _shuffled([Piece(path, dtype) for path in pieces], writer, seed)
    return writer.num_documents, writer.num_tokens


def _shuffled(pieces: Sequence[Piece], writer: Assembler, seed: int) -> None:
    firsts = np.cumsum([0, *(len(piece.offsets) - 1 for piece in pieces)])
    total = int(firsts[-1])
    for at in range(0, total, CHUNK >> 4):
        documents = permute(np.arange(at, min(at + (CHUNK >> 4), total)), total, make_key(seed, SHUFFLE))
        owners = np.searchsorted(firsts, documents, side="right") - 1
        lengths = np.empty(len(documents), np.int64)
        for n, (owner, document) in enumerate(zip(owners.tolist(), (documents - firsts[owners]).tolist())):
            start, stop = pieces[owner].offsets[document : document + 2].tolist()
            writer.write_tokens(pieces[owner].tokens[start:stop])
            lengths[n] = stop - start
        writer.add_documents(lengths)


def merge(prefix: str | os.PathLike[str], shards: Sequence[str | os.PathLike[str]]) -> tuple[int, int]:
    """One .bin/.idx of several, in the order given: (documents, tokens). DataError unless all store ids alike.

    Megatron's index knows one .bin, so tokens are copied, by the kernel; where the file system can share blocks, it does.
    """
    corpora = [Corpus(shard) for shard in shards]
    for corpus in corpora[1:]:
        if corpus.dtype != corpora[0].dtype:
            raise DataError(f"{corpus.bin_path} holds {corpus.dtype}, {corpora[0].bin_path} {corpora[0].dtype}: made with different tokenizers")
    with Assembler(prefix, corpora[0].dtype) as writer:
        for corpus in corpora:
            writer.add_documents(corpus._lengths, corpus._documents[1:])
            if corpus._offsets is None:
                writer.copy_tokens(corpus.bin_path, corpus._first, corpus.num_tokens * corpus.dtype.itemsize)
            else:
                for s in range(corpus.num_sequences):
                    writer.write_tokens(corpus.sequence(s))
    return writer.num_documents, writer.num_tokens


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

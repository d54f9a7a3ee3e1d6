"""Score files: what another model says about the tokens of token files: the log-probability of each token's label, and
the K most likely next ids with theirs. `phalanx data score` writes one; batches carry what it says of their tokens.

One row per token of each corpus, one corpus after the other, little-endian: the label's log-probability (f32, NaN:
never scored), K log-probabilities (f32), K ids (i32). Then a JSON record (facts, corpora, checksums of the rows in
segments), then magic (8 bytes), version, length and XXH3-64 of the record (u64 each). Rows are memory-mapped, and
belong to positions of tokens, so that order and resuming are no concern of the file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.data.checksums import SEGMENT, BinFile, Segment, SegmentSums
from phalanx.data.files import must_exist, sync, sync_folder, temporary_name
from phalanx.data.index import Corpus

MAGIC = b"PHXSCOR\x00"
VERSION = 1
TAIL = struct.Struct("<8sQQQ")


def row_type(top: int) -> np.dtype[Any]:
    return np.dtype([("label", "<f4"), ("log_probs", "<f4", (top,)), ("ids", "<i4", (top,))])


def checksum_of(corpus: Corpus) -> str:
    """Of its .idx and, as far as it is checked, of its tokens: another tokenizer's files have another one."""
    sums = [segment.xxh3 for file in corpus.bin_files for segment in file.segments or ()]
    return xxhash.xxh3_64_hexdigest(repr((corpus.idx_xxh3, sums)).encode())


@dataclass(frozen=True)
class ScoredCorpus:
    """The rows first .. first + tokens - 1 of a file belong to the corpus with this checksum."""

    name: str
    checksum: str
    first: int
    tokens: int


class ScoreFile:
    """An open score file. DataError if it is missing, cut short, damaged in its record, or of another version.

    top         K
    largest     the largest of all ids in it; -1: it has none
    windows     the facts on which a token's context depends, by config key: scores of other windows are others
    teacher     the folder of the model, for people
    """

    def __init__(self, path: str | Path):
        self.path = must_exist(path)
        size = self.path.stat().st_size
        with open(self.path, "rb") as file:
            file.seek(max(0, size - TAIL.size))
            tail = file.read()
            if len(tail) < TAIL.size or tail[:8] != MAGIC:
                raise DataError(f"{self.path}: not a score file, or cut short: phalanx data score CONFIG writes one")
            _, version, length, xxh3 = TAIL.unpack(tail)
            file.seek(max(0, size - TAIL.size - length))
            text = file.read(length)
        if version != VERSION:
            raise DataError(f"{self.path}: version {version}, expected {VERSION}: score again")
        if xxhash.xxh3_64_intdigest(text) != xxh3:
            raise DataError(f"{self.path}: damaged: the checksum of its record differs: restore it, or score again")
        record: dict[str, Any] = json.loads(text)
        self.checksum = f"{xxh3:016x}"  # of the record, which has those of the rows
        self.top, self.largest, self.teacher = int(record["top"]), int(record["largest"]), str(record["teacher"])
        self.windows: dict[str, Any] = record["windows"]
        self.corpora = {each["checksum"]: ScoredCorpus(**each) for each in record["corpora"]}
        self._known = dict[str, ScoredCorpus]()  # by prefix: what was compared once
        rows = sum(each.tokens for each in self.corpora.values())
        bytes_of_rows = rows * row_type(self.top).itemsize
        if size != bytes_of_rows + length + TAIL.size:
            raise DataError(f"{self.path}: {size} bytes, expected {bytes_of_rows + length + TAIL.size}: score again")
        segments = tuple(Segment(int(n), xxh3) for n, xxh3 in record["segments"])
        self.checked_files = (BinFile(self.path, bytes_of_rows, segments, self.path),)
        self._rows = np.memmap(self.path, row_type(self.top), "r", shape=(rows,)) if rows else np.empty(0)

    def check_corpus(self, corpus: Corpus) -> ScoredCorpus:
        """Which rows belong to a corpus. DataError if none do."""
        if corpus.prefix in self._known:
            return self._known[corpus.prefix]
        found = self.corpora.get(checksum_of(corpus))
        if found is None:
            known = ", ".join(f"{each.name} {checksum}" for checksum, each in self.corpora.items())
            raise DataError(
                f"{self.path}: has no scores of {corpus.prefix}, whose checksum is {checksum_of(corpus)}; it was "
                f"written for {known}. Tokens of another tokenizer, or prepared again, need scores of their own: "
                "phalanx data score CONFIG"
            )
        self._known[corpus.prefix] = found
        return found

    def rows(self, corpus: Corpus, first: int, count: int) -> NDArray[Any]:
        """Rows of the tokens first .. first + count - 1 of a corpus."""
        at = self.check_corpus(corpus).first + first
        return self._rows[at : at + count]

    def problems(self, windows: Mapping[str, Any], vocab_size: int) -> list[tuple[str, Any, str]]:
        """(config key, valid value, rule) of what does not fit a run with these windows and this vocabulary."""
        rule = "must be as it was when the scores were written: a token's context depends on it"
        found = [(key, value, rule) for key, value in self.windows.items() if windows.get(key) != value]
        if self.top > vocab_size:
            found.append(("model.vocab_size", self.top, "has fewer ids than the scores have for each token"))
        elif self.largest >= vocab_size:
            found.append(("model.vocab_size", self.largest + 1, "lacks ids that the scores have"))
        return found


class ScoreWriter:
    """Writes a score file; a context manager. Rows may come in any order. Nothing appears under the final name before
    the block ends without an error."""

    def __init__(self, path: str | Path, corpora: Sequence[Corpus], facts: Mapping[str, Any]):
        """facts: top, windows and teacher, as of ScoreFile."""
        self._largest = -1
        self.path, self.facts = Path(path), dict(facts)
        self._temporary = temporary_name(self.path)
        self._corpora, first = dict[str, ScoredCorpus](), 0
        self._first = dict[str, int]()  # row of each corpus, by prefix
        for corpus in corpora:
            checksum = checksum_of(corpus)
            if checksum not in self._corpora:
                name = Path(corpus.prefix).name
                self._corpora[checksum] = ScoredCorpus(name, checksum, first, corpus.num_tokens)
                first += corpus.num_tokens
            self._first[corpus.prefix] = self._corpora[checksum].first
        self._count = first

    def __enter__(self) -> ScoreWriter:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._rows = np.memmap(self._temporary, row_type(self.facts["top"]), "w+", shape=(max(1, self._count),))
        for at in range(0, self._count, 1 << 20):
            self._rows["label"][at : at + (1 << 20)] = np.nan
        return self

    def write(self, corpus: Corpus, first: int, values: NDArray[np.float64]) -> None:
        """Rows from token `first` of a corpus on: (tokens, 1 + 2 K) as Head.log_probs gives them."""
        top, at = self.facts["top"], self._first[corpus.prefix] + first
        rows = self._rows[at : at + len(values)]
        self._largest = max(self._largest, int(values[:, 1 : 1 + top].max(initial=-1)))
        rows["label"], rows["ids"], rows["log_probs"] = values[:, 0], values[:, 1 : 1 + top], values[:, 1 + top :]

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            self._temporary.unlink(missing_ok=True)

    def _publish(self) -> None:
        self._rows.flush()
        size = self._count * row_type(self.facts["top"]).itemsize
        del self._rows
        sums = SegmentSums()
        with open(self._temporary, "r+b") as file:
            for at in range(0, size, SEGMENT):
                sums.update(file.read(min(SEGMENT, size - at)))
            corpora = [vars(each) for each in self._corpora.values()]
            facts = {**self.facts, "largest": self._largest}
            text = json.dumps({**facts, "corpora": corpora, "segments": sums.finish()}).encode()
            file.truncate(size)
            file.seek(size)
            file.write(text + TAIL.pack(MAGIC, VERSION, len(text), xxhash.xxh3_64_intdigest(text)))
            sync(file)
        self._temporary.replace(self.path)
        sync_folder(self.path.parent)

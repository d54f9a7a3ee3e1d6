"""Chats as token files: each document is a chat, or the part of one in which some of its answers are trained. Its
sequences are read and trained in turns, the first of them read (perhaps empty), so the .idx has the mask.

PREFIX.lines.npy says where each document comes from: (documents, 2) int64, the number of a file in the list `files` of
PREFIX.json, and its line (or row). `text.chats` writes all of them. Whole chats are packed into sequences.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.data.index import Corpus
from phalanx.data.packing import Packing, Second, pack_documents

LINES = ".lines.npy"
RECORDS = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")
COMPRESSED = ("", ".gz", ".zst")
NAMED = 3  # chats named in an error
TooLong = Literal["stop", "cut", "drop"]
BadChats = Literal["stop", "skip"]


def is_chat_file(path: str) -> bool:
    """Whether it names files of records (perhaps by a pattern), rather than prepared token files."""
    return glob.has_magic(path) or path.endswith(tuple(end + more for end in RECORDS for more in COMPRESSED))


def chat_files(given: Sequence[str]) -> tuple[str, ...]:
    """Those of data.chats that are not prepared token files."""
    return tuple(path for path in given if is_chat_file(path))


def trained_of(corpus: Corpus, document: int) -> NDArray[np.bool_]:
    """Which tokens of a document are trained."""
    lengths = corpus.sequence_lengths(document)
    return np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)


def read_tokens(corpus: Corpus, pieces: Sequence[tuple[int, int, bool]]) -> NDArray[np.int64]:
    """Positions, in a sequence of these chats, of tokens whose next token is not trained."""
    found, at = [np.empty(0, np.int64)], 0
    for first, count, _ in pieces:
        trained = trained_of(corpus, corpus.document_at(first))[1:count]
        found.append(at + np.flatnonzero(~trained))
        at += count
    return np.concatenate(found)


def origins(corpus: Corpus) -> tuple[list[str], NDArray[np.int64]] | None:
    """(names of files, file and line of each document); None if that was not kept."""
    lines, note = Path(corpus.prefix + LINES), Path(corpus.prefix + ".json")
    if not lines.exists() or not note.exists():
        return None
    try:
        found = np.load(lines, mmap_mode="r", allow_pickle=False)
        names = [str(name) for name in json.loads(note.read_text(encoding="utf-8"))["files"]]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise DataError(f"{lines}: does not say where chats come from: {error}; prepare them again") from None
    if found.shape != (corpus.num_documents, 2):
        raise DataError(f"{lines}: of {found.shape} numbers, expected two for each of {corpus.num_documents} chats")
    return names, found


def origin_text(corpus: Corpus, document: int) -> str:
    """Such as train.jsonl:17."""
    found = origins(corpus)
    if found is None:
        return f"{corpus.prefix} document {document}"
    names, lines = found
    file, line = lines[document].tolist()
    return f"{names[file]}:{line}"


def bad_text(corpus: Corpus) -> str:
    """How many records were left out when a corpus was prepared (data.bad_chats=skip), and why; "" if none were."""
    note = Path(corpus.prefix + ".json")
    try:
        skipped = json.loads(note.read_text(encoding="utf-8")).get("skipped") if note.exists() else None
        reasons = [(str(reason), int(count)) for reason, count in (skipped or {}).items()]
    except (ValueError, AttributeError, TypeError, OSError) as error:
        raise DataError(f"{note}: does not say which chats were left out: {error}; prepare them again") from None
    return left_out_text(dict(reasons))


def left_out_text(skipped: Mapping[str, int]) -> str:
    """skipped: numbers of records by reason."""
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in skipped.items())
    return f"bad chats left out (data.bad_chats=skip): {sum(skipped.values()):,} ({reasons})" if skipped else ""


@dataclass(frozen=True)
class LongChats:
    """How many chats were longer than a sequence, and what became of them."""

    cut: int = 0
    dropped: int = 0
    skipped: int = 0
    """No answer fitted whole (data.bad_chats=skip)."""

    def text(self, seq_length: int) -> str:
        parts = [
            f"{count:,} {what}"
            for count, what in (
                (self.cut, "cut after the last answer that fits"),
                (self.dropped, "dropped"),
                (self.skipped, "skipped, because no answer fits"),
            )
            if count
        ]
        return f"longer than train.seq_length={seq_length:,}: {', '.join(parts)}" if parts else ""


@dataclass(frozen=True)
class ChatRoom:
    """What a sequence has room for: tokens, and, with images or recordings, rows of the stream `name`, of which `rows`
    says how many each document of the corpus has."""

    seq_length: int
    rows: NDArray[np.int64] | None = None
    capacity: int = 0
    name: str = ""

    def second(self, corpus: Corpus, first: int, last: int, kept: NDArray[np.int64]) -> Second | None:
        """Of documents first .. last - 1, of which those with tokens are kept. DataError for one that is too large."""
        if self.rows is None:
            return None
        rows = np.where(kept > 0, self.rows[first:last], 0)
        if (large := np.flatnonzero(rows > self.capacity)).size:
            most, setting = int(rows.max()), f"data.room.{self.name}"
            raise DataError(
                f"{large.size:,} of {last - first:,} chats have more rows of {self.name} than a sequence has room for: "
                f"{origin_text(corpus, first + int(large[0]))} has {rows[large[0]]:,}, and "
                f"{setting}={self.capacity:,}; {setting}={most} has room for all"
            )
        return Second(rows, self.capacity)


def pack_chats(
    corpus: Corpus, start: int, stop: int, room: ChatRoom, too_long: TooLong, bad: BadChats
) -> tuple[Packing, LongChats]:
    """A packing of the chats of tokens [start, stop) of a corpus, both document borders. DataError if it holds no
    chats, or chats longer than a sequence that nothing is to be done about."""
    seq_length = room.seq_length
    first = corpus.document_at(start) if stop > start else 0
    last = corpus.document_at(stop - 1) + 1 if stop > start else 0
    counts = corpus.sequence_counts(first, last)
    if (odd := np.flatnonzero((counts % 2 == 1) | (counts == 0))).size:
        raise DataError(
            f"{corpus.idx_path}: document {first + odd[0]} is no chat: it has {counts[odd[0]]} sequences, expected "
            "read and trained ones in turns, as `data.chats: [FILE.jsonl]` prepares them"
        )
    starts = np.append(corpus.document_starts(start, stop), stop) if stop > start else np.zeros(1, np.int64)
    lengths = np.diff(starts)
    if len(lengths) != last - first:
        raise DataError(f"{corpus.idx_path}: has documents without tokens, which are no chats: prepare them again")
    longer = np.flatnonzero(lengths > seq_length)
    if longer.size and too_long == "stop":
        named = ", ".join(f"{origin_text(corpus, first + d)} ({lengths[d]:,} tokens)" for d in longer[:NAMED].tolist())
        raise DataError(
            f"{longer.size:,} of {len(lengths):,} chats are longer than train.seq_length={seq_length:,}: {named}"
            f"{', ...' if longer.size > NAMED else ''}; the longest has {lengths.max():,} tokens. Raise "
            "train.seq_length, or choose data.too_long=cut (at the end of an answer) or data.too_long=drop"
        )
    shortest = int(lengths.min(initial=seq_length + 1))
    if too_long == "drop":
        lengths[longer] = 0
        _check_left(lengths, seq_length, f"all are longer (the shortest has {shortest:,} tokens)")
        second = room.second(corpus, first, last, lengths)
        return pack_documents(starts[:-1], lengths, seq_length, second=second), LongChats(dropped=longer.size)
    without = list[int]()
    for d in longer.tolist():
        lengths[d] = whole_answers(corpus.sequence_lengths(first + d), seq_length)
        without += [d] if lengths[d] == 0 else []
    if without and bad == "stop":
        named = ", ".join(origin_text(corpus, first + d) for d in without[:NAMED])
        raise DataError(
            f"of {len(without):,} chats no answer fits into train.seq_length={seq_length:,}, so all would be cut off: "
            f"{named}{', ...' if len(without) > NAMED else ''}: raise train.seq_length, or leave them out with "
            "data.bad_chats=skip or data.too_long=drop"
        )
    _check_left(
        lengths, seq_length, f"all are longer (the shortest has {shortest:,} tokens), and no answer ends within it"
    )
    cut = LongChats(cut=longer.size - len(without), skipped=len(without))
    second = room.second(corpus, first, last, lengths)
    return pack_documents(starts[:-1], lengths, seq_length, second=second), cut


def _check_left(lengths: NDArray[np.int64], seq_length: int, why: str) -> None:
    """DataError if chats that are longer than a sequence were all that there is."""
    if lengths.size and not lengths.any():
        raise DataError(
            f"none of {lengths.size:,} chats is left at train.seq_length={seq_length:,}: {why}; raise train.seq_length"
        )


def whole_answers(lengths: NDArray[np.int32], limit: int) -> int:
    """Tokens of a chat up to the end of the last answer that ends within `limit`; 0 if nothing would be trained."""
    ends = np.cumsum(lengths)[1::2]
    fitting = ends[ends <= limit]
    return int(fitting[-1]) if fitting.size and fitting[-1] > 1 else 0

"""Groups of texts as token files, for objectives over embeddings: each document is a group, its sequences are the
query, its positive, and perhaps negatives. So the .idx says where each text is. PREFIX.json says that they are texts.

`text.pairs` writes them from JSONL. Whole groups are packed into sequences, as data.packing=online packs documents.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.base.errors import DataError
from phalanx.data.index import Corpus
from phalanx.data.packing import Packing, make_packing
from phalanx.sequence.sample import IGNORE

RECORDED = "texts"  # in PREFIX.json
MOCK_GROUP = 3  # texts in a group of mock tokens: a query, its positive, and a negative


def holds_texts(corpus: Corpus) -> bool:
    """Whether the documents of a corpus are groups of texts."""
    note = Path(corpus.prefix + ".json")
    try:
        stated = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else {}
    except ValueError as error:
        raise DataError(f"{note}: not the record of prepared token files: {error}") from None
    return isinstance(stated, dict) and stated.get(RECORDED) is True


def check_holds(corpora: Iterable[Corpus], wanted: bool) -> None:
    """DataError for a corpus of groups of texts where pairs of answers are wanted, or the other way round."""
    for corpus in corpora:
        if holds_texts(corpus) != wanted:
            has, needs = ("answers", "texts") if wanted else ("texts", "answers")
            fields = {
                "texts": 'lines with "query", "positive" and perhaps "negatives" (task.name=embed)',
                "answers": 'lines with "prompt", "chosen" and "rejected" (task.name=dpo)',
            }
            raise DataError(f"{corpus.prefix}: prepared from {fields[has]}, and the task needs {fields[needs]}")


def text_ends(corpus: Corpus, pieces: Sequence[tuple[int, int, bool]]) -> NDArray[np.int64]:
    """Where the texts of a window of groups end."""
    lengths = [_lengths(corpus, first) for first, _, _ in pieces]
    return np.cumsum(np.concatenate([np.empty(0, np.int64), *lengths]), dtype=np.int64)


def text_roles(corpus: Corpus, ranges: Sequence[tuple[int, int]], room: int) -> NDArray[np.int64]:
    """(room,) at the first token of each text its number in its group, elsewhere IGNORE."""
    found, at = np.full(room, IGNORE, np.int64), 0
    for first, count in ranges:
        lengths = _lengths(corpus, first)
        found[at + np.cumsum(lengths) - lengths] = np.arange(len(lengths))
        at += count
    return found


def mock_roles(starts: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """The same of mock tokens, whose documents form groups one after another. starts: of all documents but the first
    one and those of padding."""
    found = np.full(room, IGNORE, np.int64)
    firsts = np.concatenate([[0], starts])
    found[firsts] = np.arange(len(firsts)) % MOCK_GROUP
    return found


def pack_texts(corpus: Corpus, start: int, stop: int, seq_length: int) -> Packing:
    """A packing of the groups of tokens [start, stop) of a corpus, both document borders. DataError if one is damaged
    or longer than a sequence."""
    packing = make_packing(corpus, start, stop, seq_length, decreasing=False)
    first = corpus.document_at(start) if stop > start else 0
    last = corpus.document_at(stop - 1) + 1 if stop > start else 0
    for d in range(first, last):
        if len(lengths := corpus.sequence_lengths(d)) < 2 or 0 in lengths:
            raise DataError(
                f"{corpus.idx_path}: document {d} is no group of texts: it has sequences of {lengths.tolist()} tokens, "
                "expected a query, its positive, and perhaps negatives"
            )
    if packing.goes_on.any():
        lengths = np.diff([corpus.document_start(d) for d in range(first, last + 1)])
        at = int(np.argmax(lengths > seq_length))
        raise DataError(
            f"{corpus.bin_path}: {int((lengths > seq_length).sum())} of {len(lengths)} groups are longer than "
            f"train.seq_length={seq_length}: the first is group {first + at} with {lengths[at]} tokens in its "
            f"{len(corpus.sequence_lengths(first + at))} texts, the longest has {lengths.max()}: raise "
            "train.seq_length, or shorten or leave out such lines"
        )
    return packing


def _lengths(corpus: Corpus, first: int) -> NDArray[np.int64]:
    """Of the texts of the group that begins with token `first`."""
    return corpus.sequence_lengths(corpus.document_at(first)).astype(np.int64)

"""Pairs of answers to one prompt, as token files: each document is a pair, its four sequences are the prompt, the
chosen answer, the prompt once more and the rejected answer. So the .idx says where each is, and what has a loss.

`text.pairs` writes them from JSONL. Whole pairs are packed into sequences, as data.packing=online packs documents.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.base.errors import DataError
from phalanx.data.index import Corpus
from phalanx.data.packing import Packing, make_packing

SEQUENCES = 4  # of each document
JSONL = (".jsonl", ".json")


def pair_files(given: tuple[str, ...]) -> tuple[str, ...]:
    """Those of data.pairs that are not prepared token files."""
    return tuple(path for path in given if path.endswith(JSONL))


def pair_starts(corpus: Corpus, pieces: Sequence[tuple[int, int, bool]]) -> NDArray[np.int64]:
    """Where the documents of a window of pairs end: each pair has two, an answer after its prompt."""
    found, at = list[int](), 0
    for first, count, _ in pieces:
        prompt, chosen, *_ = _lengths(corpus, first)
        found += [at + int(prompt + chosen), at + count]
        at += count
    return np.array(found, np.int64)


def prompt_tokens(corpus: Corpus, pieces: Sequence[tuple[int, int, bool]]) -> NDArray[np.int64]:
    """Positions of the tokens of prompts, except the last of each: that one predicts the answer."""
    found, at = [np.empty(0, np.int64)], 0
    for first, _, _ in pieces:
        for prompt, answer in _lengths(corpus, first).reshape(2, 2).tolist():
            found.append(np.arange(at, at + prompt - 1))
            at += prompt + answer
    return np.concatenate(found)


def _lengths(corpus: Corpus, first: int) -> NDArray[np.int32]:
    """Of the four sequences of the pair that begins with token `first`."""
    return corpus.sequence_lengths(corpus.document_at(first))


def pack_pairs(corpus: Corpus, start: int, stop: int, seq_length: int) -> Packing:
    """A packing of the pairs of tokens [start, stop) of a corpus, both document borders. DataError if it holds no
    pairs, or pairs longer than a sequence."""
    packing = make_packing(corpus, start, stop, seq_length, decreasing=False)
    first = corpus.document_at(start) if stop > start else 0
    last = corpus.document_at(stop - 1) + 1 if stop > start else 0
    for d in range(first, last):
        if len(lengths := corpus.sequence_lengths(d)) != SEQUENCES or lengths[0] != lengths[2] or 0 in lengths[1::2]:
            raise DataError(
                f"{corpus.idx_path}: document {d} is no pair: it has sequences of {lengths.tolist()} tokens, expected "
                "prompt, chosen answer, prompt, rejected answer, as `data.pairs: [FILE.jsonl]` prepares them"
            )
    if packing.goes_on.any():
        lengths = np.diff([corpus.document_start(d) for d in range(first, last + 1)])
        at = int(np.argmax(lengths > seq_length))
        raise DataError(
            f"{corpus.bin_path}: {int((lengths > seq_length).sum())} of {len(lengths)} pairs are longer than "
            f"train.seq_length={seq_length}: the first is pair {first + at} with {lengths[at]} tokens in both answers "
            f"and prompts, the longest has {lengths.max()}: raise train.seq_length, or leave such pairs out"
        )
    return packing

"""Documents as training reads them, for people: which tokens are trained, read, and cut off."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.base.dataclass import dataclass
from phalanx.data.chats import origin_text
from phalanx.data.loader import Loader
from phalanx.data.sources import ChatSource
from phalanx.forecast.data_table import row_of
from phalanx.sequence.batch import IGNORE
from phalanx.text.pieces import Pieces
from phalanx.text.tokenizer_base import Tokenizer

TRAINED, READ, CUT = "trained", "read", "cut off"
TEXTS = ("query", "passage", "hard")  # of groups of texts: the query, its positive, and hard negatives
# of every second token in a brighter shade, so that one sees where tokens end
COLOURS = {TRAINED: ("32", "92"), READ: ("2", "0"), CUT: ("31", "91")}
COLOURS |= dict(zip(TEXTS, (("34", "94"), ("32", "92"), ("31", "91"))))
LABEL = 7  # columns of the names above
LINE_END = "↵"
LEAST = 20  # columns of text


@dataclass(frozen=True)
class ShownDocument:
    """A document of a sequence (or the part of one in a window), with what is cut off after it.

    sample, at  the sequence, and the document's first token in it
    kinds       of each token
    """

    source: str
    sample: int
    at: int
    tokens: tuple[int, ...]
    kinds: tuple[str, ...]

    @property
    def title(self) -> str:
        counts = [(self.kinds.count(kind), kind) for kind in (TRAINED, *TEXTS, READ, CUT)]
        parts = ", ".join(f"{count:,} {kind}" for count, kind in counts if count)
        return f"{self.source}, {len(self.tokens):,} tokens ({parts}), in sequence {self.sample:,} from {self.at:,}"


def documents_of(loader: Loader, sample: int) -> Iterator[ShownDocument]:
    """The documents from sequence `sample` on, in the order of training."""
    while True:
        yield from _documents_in(loader, sample)
        sample += 1


def _documents_in(loader: Loader, sample: int) -> Iterator[ShownDocument]:
    [place] = loader.locate([sample])
    batch, row = loader.read([place]), row_of(loader, place)
    tokens, source = batch.tokens.numpy(), loader.sources[place.source]
    labels = batch.labels.numpy()
    trained = np.append(False, labels[:-1] != IGNORE)
    kinds = _texts_of(labels) if loader.of_texts else [TRAINED if each else READ for each in trained.tolist()]
    origin, nothing = source.origin(place.window), tokens[:0]
    if origin is None:
        yield _shown(source.name, sample, 0, tokens[: row.filled], kinds[: row.filled], nothing)
        return
    corpus, _ = origin
    for passage in row.passages:
        here = slice(passage.at, passage.at + passage.count)
        stop = corpus.document_start(passage.document + 1)
        first = corpus.document_start(passage.document) + passage.count
        cut = corpus.tokens(first, stop) if isinstance(source, ChatSource) else nothing
        yield _shown(origin_text(corpus, passage.document), sample, passage.at, tokens[here], kinds[here], cut)


def _shown(
    source: str,
    sample: int,
    at: int,
    tokens: NDArray[np.int64],
    kinds: Sequence[str],
    cut: NDArray[Any],
) -> ShownDocument:
    return ShownDocument(source, sample, at, (*tokens.tolist(), *cut.tolist()), (*kinds, *[CUT] * len(cut)))


def _texts_of(labels: NDArray[np.int64]) -> list[str]:
    """Of which text of its group each token is; `labels` says so at the first one."""
    first = np.maximum.accumulate(np.where(labels != IGNORE, np.arange(len(labels)), 0))
    return [READ if role == IGNORE else TEXTS[min(role, 2)] for role in labels[first].tolist()]


def document_lines(
    document: ShownDocument, tokenizer: Tokenizer | None, width: int, colour: bool, most: int | None = None
) -> list[str]:
    """A title, and the text in lines of `width` columns that begin with what its tokens are. most: lines at most, of
    which the middle ones are left out."""
    lines = list(_lines(document, tokenizer, max(LEAST, width - LABEL - 3), colour))
    if most is not None and len(lines) > most:
        left_out = len(lines) - most + 1
        first = (most - 1) // 2
        lines = [*lines[:first], f"{'...':>{LABEL}} | {left_out} lines more", *lines[first + left_out :]]
    return [*textwrap.wrap(document.title, width, subsequent_indent="  ", break_long_words=False), *lines]


def _lines(document: ShownDocument, tokenizer: Tokenizer | None, width: int, colour: bool) -> Iterator[str]:
    texts = _texts(document.tokens, tokenizer)
    numbered = list(zip(document.kinds, range(len(texts)), texts))
    for kind, group in groupby(numbered, key=lambda each: each[0]):
        label = kind
        for line in _wrapped([(number, text) for _, number, text in group], width):
            shown = "".join(_painted(text, COLOURS[kind][number % 2]) if colour else text for number, text in line)
            yield f"{label:>{LABEL}} | {shown}"
            label = ""


def _painted(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m"


def _wrapped(pieces: Sequence[tuple[int, str]], width: int) -> Iterator[list[tuple[int, str]]]:
    """Lines of at most `width` columns; the end of a line of the text ends one too."""
    line, used = list[tuple[int, str]](), 0
    for number, text in pieces:
        for character in text:
            columns = 2 if unicodedata.east_asian_width(character) in "WF" else 1
            if used + columns > width:
                yield line
                line, used = [], 0
            if line and line[-1][0] == number:
                line[-1] = (number, line[-1][1] + character)
            else:
                line.append((number, character))
            used += columns
            if character == LINE_END:
                yield line
                line, used = [], 0
    if line:
        yield line


def _texts(tokens: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """What each token adds to the text; a character of several tokens is the last one's."""
    if tokenizer is None:
        return [f"{token} " for token in tokens]
    pieces = Pieces(tokenizer, shown=[*tokenizer.special_tokens.values(), -1])
    texts = [pieces.add(token) for token in tokens]
    if texts:
        texts[-1] += pieces.rest()
    return ["".join(map(_visible, text)) for text in texts]


def _visible(character: str) -> str:
    """Control characters, which a terminal would obey, as Python writes them."""
    if character == "\n":
        return LINE_END
    return character if character.isprintable() else repr(character)[1:-1]

"""Where token files of chats say which images or recordings their documents have.

PREFIX.media.jsonl has a line for each document of PREFIX: a list of [name, rows, tokens] of its files, in the order
of the text. PREFIX.media.npy says where lines begin, and how many rows come before each: (documents + 1, 2) int64.
Names are of files below the folder of the chats' file, or `shard.tar/name` in a tar file there. `text.media` writes
them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.base.errors import DataError
from phalanx.data.chats import origins
from phalanx.data.files import replacing
from phalanx.data.index import Corpus

LINES, PLACES = ".media.jsonl", ".media.npy"


class MediaNote(NamedTuple):
    """An image or a recording of a document: its name, its rows, and the tokens that stand for it."""

    name: str
    rows: int
    tokens: int


def write_notes(prefix: Path, documents: Sequence[Sequence[MediaNote]]) -> None:
    """Beside token files with these documents; nothing if no document has an image."""
    if not any(documents):
        return
    places, at, rows = [(0, 0)], 0, 0
    with replacing(prefix.with_name(prefix.name + LINES)) as file:
        for notes in documents:
            line = json.dumps(notes).encode() + b"\n"
            file.write(line)
            at, rows = at + len(line), rows + sum(note.rows for note in notes)
            places.append((at, rows))
    with replacing(prefix.with_name(prefix.name + PLACES)) as file:
        np.save(file, np.array(places, np.int64))


class MediaNotes:
    """The notes of token files; none if they have none."""

    def __init__(self, corpus: Corpus):
        self.corpus = corpus
        lines, places = Path(corpus.prefix + LINES), Path(corpus.prefix + PLACES)
        self.places: NDArray[np.int64] | None = None
        if not places.exists():
            return
        try:
            self.places = np.load(places, mmap_mode="r", allow_pickle=False)
            self._file = open(lines, "rb")  # read at places, by any thread, as long as this object lives
        except (OSError, ValueError) as error:
            raise DataError(f"{places}: cannot be read: {error}; prepare the chats again") from None
        if self.places is None or self.places.shape != (corpus.num_documents + 1, 2):
            raise DataError(f"{places}: not of these {corpus.num_documents} documents; prepare the chats again")

    def rows(self) -> NDArray[np.int64]:
        """(documents,) rows of the files of each."""
        return np.zeros(self.corpus.num_documents, np.int64) if self.places is None else np.diff(self.places[:, 1])

    def of(self, document: int) -> list[MediaNote]:
        if self.places is None:
            return []
        first, stop = self.places[document : document + 2, 0].tolist()
        try:
            found = json.loads(os.pread(self._file.fileno(), stop - first, first))
            return [MediaNote(str(name), int(rows), int(tokens)) for name, rows, tokens in found]
        except (ValueError, TypeError) as error:
            raise DataError(f"{self.corpus.prefix}{LINES}: damaged: {error}; prepare the chats again") from None

    @cached_property
    def folders(self) -> list[Path]:
        """By document: where the file of its chat is."""
        found = origins(self.corpus)
        if found is None:
            raise DataError(f"{self.corpus.prefix}: does not say where its chats come from; prepare them again")
        names, lines = found
        of_file = [Path(name).parent for name in names]
        return [of_file[file] for file in lines[:, 0].tolist()]

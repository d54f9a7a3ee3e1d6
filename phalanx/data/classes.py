"""Classes of tokens beside token files: PREFIX.classes.npy has (tokens,) int32, the number of each token's class or
IGNORE. The class of a whole text stands at its first token. PREFIX.json says which classes these are (`classes`).
`text.classes` writes both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.base.errors import DataError
from phalanx.data.index import Corpus

SUFFIX = ".classes.npy"


def open_classes(corpus: Corpus, names: Sequence[str]) -> NDArray[np.int32]:
    """(tokens,) the class of each token of a corpus, memory-mapped. DataError if there are none, or other classes than
    these."""
    path, note = Path(corpus.prefix + SUFFIX), Path(corpus.prefix + ".json")
    hint = f"phalanx data prepare FILE.jsonl --labels {','.join(names)} -o {corpus.prefix} writes them"
    if not path.is_file() or not note.is_file():
        raise DataError(f"{path}: no such file, so no token of {corpus.prefix} has a class: {hint}")
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
        stated = json.loads(note.read_text(encoding="utf-8")).get("classes")
    except (ValueError, OSError, AttributeError) as error:
        raise DataError(f"{path}: not classes of tokens: {error}: {hint}") from None
    tokens = corpus.document_start(corpus.num_documents)
    if found.shape != (tokens,) or found.dtype != np.int32:
        raise DataError(f"{path}: {found.dtype} {found.shape}, expected int32 for {tokens} tokens: {hint}")
    if stated != list(names):
        raise DataError(f"{note}: its classes are {stated}, and model.labels={list(names)}: name the same, or {hint}")
    return found

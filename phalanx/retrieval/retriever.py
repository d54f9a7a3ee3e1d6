"""Finds passages for a text: embeds it with the embedder of an index, and looks it up there."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import ConfigError, Problem
from phalanx.inference.embedder import EmbedderFolder, embedder_alone, embedder_folder, marks_of
from phalanx.retrieval.documents import TextPassage
from phalanx.retrieval.index import IndexManifest, VectorIndex, faiss_library, read_index_manifest
from phalanx.sequence.sample import Pooling


@dataclass(frozen=True)
class FoundPassage:
    """A passage and its score, an inner product of embeddings."""

    passage: TextPassage
    score: float

    def plain(self) -> dict[str, Any]:
        """As answers and files have it."""
        source = {} if self.passage.source is None else {"source": self.passage.source}
        return {"id": self.passage.id, **source, "score": round(self.score, 6), "text": self.passage.text}


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """How passages are found. index: its folder. neighbours: passages for each text. embedder: the model, if it is not
    where the index says."""

    index: str
    neighbours: int = 4
    embedder: str | None = None


def checked(asked: Lookup) -> tuple[IndexManifest, EmbedderFolder]:
    """The index, and the embedder that it is of; nothing is loaded. ConfigError if the embedder is not there or another
    one, DataError if the index is damaged or faiss is missing."""
    faiss_library()
    manifest = read_index_manifest(asked.index)
    field, path = ("--embedder", asked.embedder) if asked.embedder else ("--index", manifest.model)
    if not Path(path).exists():
        rule = f"is of an embedder that is not at {manifest.model} any more: name it with --embedder RUN"
        missing = Problem("--index", asked.index, rule, {}, (), "command line")
        rule = "must be a run, a checkpoint or a folder: there is none"
        raise ConfigError([missing if asked.embedder is None else Problem(field, path, rule, {}, (), "command line")])
    pooling: Pooling = manifest.pooling  # type: ignore[assignment]
    folder = _folder(path, pooling)
    if folder.fingerprint != manifest.embedder:
        rule = (
            f"is of another embedder (fingerprint {manifest.embedder[:8]}, and the model at {folder.weights} has "
            f"{folder.fingerprint[:8]}): its vectors and this model's have nothing to do with each other. Embed and "
            "index the texts once more, or name the right model with --embedder"
        )
        raise ConfigError([Problem("--index", asked.index, rule, {}, (), "command line")])
    return manifest, folder


def _folder(path: str, pooling: Pooling) -> EmbedderFolder:
    """pooling: of a folder that does not say it."""
    from phalanx.checkpoint.embedder_files import is_embedder
    from phalanx.inference.load import weights_folder

    return embedder_folder(path, None if is_embedder(weights_folder(path)) else pooling)


class Retriever:
    """Used from any thread."""

    def __init__(self, asked: Lookup):
        """Problems as of `checked`."""
        self.manifest, folder = checked(asked)
        self.neighbours = min(asked.neighbours, self.manifest.texts)
        self._index = VectorIndex(asked.index)
        self._embedder = embedder_alone(folder, self.manifest.length)
        self._marks, self._lock = marks_of(folder), threading.Lock()

    def find(self, texts: Sequence[str]) -> list[list[FoundPassage]]:
        """The nearest passages of each text, the nearest first."""
        embedder, prefix = self._embedder, self.manifest.query_prefix
        ids = [self._marks.encode(prefix + text, embedder.most) for text in texts]
        with self._lock:
            made = embedder.embed(len(ids), ids.__getitem__)
            vectors = embedder.narrowed(made, self.manifest.width).float().cpu().numpy()
            scores, numbers = self._index.search(vectors, self.neighbours)
            return [
                [FoundPassage(self._index.texts[n], s) for s, n in zip(*row) if n >= 0]
                for row in zip(scores.tolist(), numbers.tolist())
            ]

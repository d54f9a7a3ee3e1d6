"""A folder of vectors: the embeddings of texts in shards, and the texts themselves.

manifest.json         the embedder, the input, the format
vectors-00000.npy     (texts of the shard, width) fp32, or fp64
texts-00000.jsonl     the same texts, a line for each

A shard exists as a whole or not at all, so an interrupted command continues with the first missing one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.data.files import replacing
from phalanx.retrieval.documents import TextPassage, passage_of

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class VectorsManifest:
    """What a folder of vectors is.

    embedder     fingerprint of the model that made them (inference.embedder); model: its path, for people
    pooling, normalized   how
    width        features of a vector; whole: of the model's embeddings, of which these are the first
    prefix       text that was put before each
    length       tokens of a text that were read at most
    input        SHA-256 of the file of texts; texts: how many; shard: in each shard but the last
    dtype        of the vectors
    """

    embedder: str
    model: str
    pooling: str
    normalized: bool
    width: int
    whole: int
    prefix: str
    length: int
    input: str
    texts: int
    shard: int
    dtype: str = "float32"
    format: int = FORMAT

    @property
    def shards(self) -> int:
        return -(-self.texts // self.shard)

    def part(self, number: int) -> tuple[int, int]:
        """The texts of a shard: first, and one past the last."""
        return number * self.shard, min(self.texts, (number + 1) * self.shard)


class VectorsFolder:
    """Vectors in a folder, being written or complete."""

    def __init__(self, path: str | Path, manifest: VectorsManifest):
        self.path, self.manifest = Path(path), manifest

    @classmethod
    def open(cls, path: str | Path) -> VectorsFolder:
        """DataError if it is none, or not complete."""
        found = cls(path, read_manifest(Path(path)))
        lacking = [number for number in range(found.manifest.shards) if not found.has(number)]
        if lacking:
            raise DataError(
                f"{path}: {len(lacking)} of {found.manifest.shards} shards are not there yet, the first is "
                f"{vectors_name(lacking[0])}: run the same phalanx embed once more, and it goes on"
            )
        return found

    @classmethod
    def begin(cls, path: str | Path, manifest: VectorsManifest) -> VectorsFolder:
        """A new folder, or one that was begun for the same. DataError, with what differs, if it was begun for something
        else."""
        if not check_begin(path, manifest):
            Path(path).mkdir(parents=True, exist_ok=True)
            with replacing(Path(path) / MANIFEST) as file:
                file.write(json.dumps(asdict(manifest), indent=1).encode())
        return cls(path, manifest)

    def has(self, shard: int) -> bool:
        """The texts are written first: where vectors are, all is."""
        return (self.path / vectors_name(shard)).is_file()

    def write(self, shard: int, vectors: NDArray[np.floating], passages: Iterable[TextPassage]) -> None:
        with replacing(self.path / texts_name(shard)) as file:
            for passage in passages:
                file.write((passage.line + "\n").encode())
        with replacing(self.path / vectors_name(shard)) as file:
            np.save(file, vectors.astype(self.manifest.dtype), allow_pickle=False)

    def vectors(self, shard: int) -> NDArray[np.floating]:
        """(texts of the shard, width), memory-mapped. DataError if they are damaged."""
        path, (first, stop) = self.path / vectors_name(shard), self.manifest.part(shard)
        try:
            found = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: not vectors: {error}") from None
        if found.shape != (stop - first, self.manifest.width) or found.dtype != self.manifest.dtype:
            expected = (stop - first, self.manifest.width)
            raise DataError(f"{path}: {found.dtype} {found.shape}, expected {self.manifest.dtype} {expected}")
        return found

    def text_files(self) -> Iterator[Path]:
        """The files of texts, in order."""
        for shard in range(self.manifest.shards):
            yield self.path / texts_name(shard)


def check_begin(path: str | Path, manifest: VectorsManifest) -> bool:
    """Whether a folder was begun for these vectors; False: it is new. DataError as of `VectorsFolder.begin`."""
    folder = Path(path)
    if (folder / MANIFEST).is_file():
        old, new = asdict(read_manifest(folder)), asdict(manifest)
        differing = [f"{k} {old[k]!r} -> {new[k]!r}" for k in new if old[k] != new[k] and k != "model"]
        if differing:
            raise DataError(f"{path}: holds other vectors ({'; '.join(differing)}): choose another folder with -o")
        return True
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise DataError(f"{path}: is there already and holds no vectors: choose another folder with -o")
    return False


def read_manifest(folder: Path) -> VectorsManifest:
    """DataError if a folder holds no vectors."""
    path = folder / MANIFEST
    if not path.is_file():
        hint = f"phalanx embed RUN --input FILE.jsonl -o {folder}"
        raise DataError(f"{folder}: holds no vectors (it has no {MANIFEST}): {hint}")
    return manifest_of(VectorsManifest, path)


def manifest_of(kind: type[Any], path: Path) -> Any:
    """A dataclass from a JSON file of its fields. DataError for anything else."""
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
        found = kind(**stated)
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: is damaged, or of another version of Phalanx: {error}") from None
    if found.format != FORMAT:
        raise DataError(f"{path}: has format {found.format}, and this version of Phalanx reads {FORMAT}")
    return found


def vectors_name(shard: int) -> str:
    return f"vectors-{shard:05d}.npy"


def texts_name(shard: int) -> str:
    return f"texts-{shard:05d}.jsonl"


def line_starts(path: Path) -> NDArray[np.int64]:
    """Where the lines of a file begin, and its end."""
    with path.open("rb") as file:
        lengths = [len(line) for line in file]
    return np.cumsum([0, *lengths], dtype=np.int64)


class PassageTexts:
    """The texts of a folder by number, read where they lie. starts: of the lines of each file."""

    def __init__(self, files: Sequence[Path], shard: int):
        self._files, self._shard = files, shard
        self._starts: dict[int, NDArray[np.int64]] = {}

    def __getitem__(self, number: int) -> TextPassage:
        shard, row = divmod(number, self._shard)
        path = self._files[shard]
        if shard not in self._starts:
            self._starts[shard] = line_starts(path)
        with path.open("rb") as file:
            file.seek(int(self._starts[shard][row]), os.SEEK_SET)
            try:
                return passage_of(file.readline(), number + 1)
            except ValueError as error:
                raise DataError(f"{path}: line {row + 1}: {error}") from None

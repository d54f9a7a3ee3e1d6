"""An index of vectors, by faiss: it compares every vector (exact), or only those of the nearest cells (inverted file).

manifest.json            the embedder, the kind of index, the share of true neighbours that it finds
shard-00000.faiss        exact: the vectors of a shard, mapped into memory
index.faiss, lists.data  inverted file: its cells, and their vectors on disk
texts-00000.jsonl        the texts
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.data.files import extra, replacing
from phalanx.retrieval.vectors import MANIFEST, PassageTexts, VectorsFolder, manifest_of, texts_name

Kind = Literal["exact", "ivf"]
EXACT_UP_TO = 50_000  # vectors, where the kind is chosen
PER_LIST = 256  # vectors of a cell that its centre is computed from, at most
NEIGHBOURS = 10  # of which recall is measured
QUERIES = 1000  # that it is measured with
SEED = 0
FORMAT = 1
IVF, LISTS = "index.faiss", "lists.data"


@dataclass(frozen=True, kw_only=True)
class IndexManifest:
    """What an index is.

    embedder, model, pooling, normalized, width, whole, prefix, length, texts, shard   as in VectorsManifest
    query_prefix   text that is put before each query
    kind           exact or ivf; lists: cells of an inverted file; probes: how many of them are searched
    recall         the share of the 10 exact nearest neighbours that is found, over `queries` of its own vectors
    files          sizes of its files in bytes
    """

    embedder: str
    model: str
    pooling: str
    normalized: bool
    width: int
    whole: int
    prefix: str
    query_prefix: str
    length: int
    texts: int
    shard: int
    kind: Kind
    lists: int = 0
    probes: int = 0
    recall: float = 1.0
    queries: int = 0
    files: dict[str, int] = field(default_factory=dict)
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class IndexOptions:
    """How an index is made. kind None: exact up to EXACT_UP_TO vectors. lists None: 4 x sqrt(vectors). probes None: the
    fewest with which `recall` of the nearest neighbours is found."""

    kind: Kind | None = None
    lists: int | None = None
    probes: int | None = None
    recall: float = 0.95
    query_prefix: str = ""


def faiss_library() -> Any:
    """DataError, with what to type, if it is not installed."""
    return extra("faiss", "indexes of vectors need", "index")


def build_index(
    vectors: VectorsFolder, out: str | Path, options: IndexOptions, say: Callable[[str], object] = print
) -> IndexManifest:
    """Write an index of a folder of vectors. It appears as a whole. DataError if `out` is not new."""
    faiss = faiss_library()
    folder = Path(out)
    if folder.exists() and (folder.is_file() or any(folder.iterdir())):
        raise DataError(f"{out}: is there already: choose another folder with -o")
    making = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    try:
        made = _write(faiss, vectors, making, options, say)
        if folder.is_dir():
            folder.rmdir()
        os.rename(making, folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return made


def _write(
    faiss: Any, vectors: VectorsFolder, folder: Path, options: IndexOptions, say: Callable[[str], object]
) -> IndexManifest:
    given = asdict(vectors.manifest)
    kept = {name: given[name] for name in ("embedder", "model", "pooling", "normalized", "width", "whole", "prefix")}
    sizes = {name: given[name] for name in ("length", "texts", "shard")}
    texts = vectors.manifest.texts
    kind: Kind = options.kind or ("exact" if texts <= EXACT_UP_TO else "ivf")
    manifest = IndexManifest(**kept, **sizes, query_prefix=options.query_prefix, kind=kind)
    for number, path in enumerate(vectors.text_files()):
        shutil.copyfile(path, folder / texts_name(number))
    if kind == "exact":
        _write_exact(faiss, vectors, folder)
    else:
        manifest = _write_ivf(faiss, vectors, folder, manifest, options, say)
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = replace(manifest, files=files)
    with replacing(folder / MANIFEST) as file:
        file.write(json.dumps(asdict(manifest), indent=1).encode())
    return manifest


def _parts(vectors: VectorsFolder) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """(number of the first vector, vectors fp32) of each shard."""
    for shard in range(vectors.manifest.shards):
        yield vectors.manifest.part(shard)[0], np.ascontiguousarray(vectors.vectors(shard), np.float32)


def _write_exact(faiss: Any, vectors: VectorsFolder, folder: Path) -> None:
    for number, (_, values) in enumerate(_parts(vectors)):
        index = faiss.IndexFlatIP(vectors.manifest.width)
        index.add(values)
        faiss.write_index(index, str(folder / shard_name(number)))


def _write_ivf(
    faiss: Any,
    vectors: VectorsFolder,
    folder: Path,
    manifest: IndexManifest,
    options: IndexOptions,
    say: Callable[[str], object],
) -> IndexManifest:
    """Cells from a sample; the vectors of each shard into their cells; all cells merged on disk."""
    from faiss.contrib.ondisk import merge_ondisk  # optional package

    texts, width = manifest.texts, manifest.width
    lists = min(options.lists or max(1, round(4 * math.sqrt(texts))), texts)
    say(f"train {lists} cells")
    sample = _sample(vectors, min(texts, PER_LIST * lists))
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, lists, faiss.METRIC_INNER_PRODUCT)
    index.cp.seed, index.cp.min_points_per_centroid = 1234, 1
    index.train(sample)
    blocks = list[str]()
    for first, values in _parts(vectors):
        index.reset()
        index.add_with_ids(values, np.arange(first, first + len(values), dtype=np.int64))
        blocks.append(str(folder / f"block-{len(blocks):05d}"))
        faiss.write_index(index, blocks[-1])
    index.reset()
    merge_ondisk(index, blocks, str(folder / LISTS))
    for block in blocks:
        os.unlink(block)
    queries, numbers = _queries(vectors)
    truth = exact_neighbours(faiss, vectors, queries, numbers)
    probes, recall = _probes(index, queries, numbers, truth, options)
    index.nprobe = probes
    faiss.write_index(index, str(folder / IVF))
    say(f"{probes} of {lists} cells are searched: recall@{NEIGHBOURS} {recall:.3f} over {len(queries)} queries")
    return replace(manifest, lists=lists, probes=probes, recall=recall, queries=len(queries))


def _sample(vectors: VectorsFolder, count: int) -> NDArray[np.float32]:
    """So many vectors, drawn from all shards."""
    chosen = np.sort(np.random.default_rng(SEED).choice(vectors.manifest.texts, count, replace=False))
    found = [values[chosen[(chosen >= a) & (chosen < a + len(values))] - a] for a, values in _parts(vectors)]
    return np.concatenate(found)


def _queries(vectors: VectorsFolder) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Vectors of the index that are looked up, and their numbers: each is its own nearest, and does not count."""
    count = min(QUERIES, vectors.manifest.texts)
    numbers = np.sort(np.random.default_rng(SEED + 1).choice(vectors.manifest.texts, count, replace=False))
    found = [values[numbers[(numbers >= a) & (numbers < a + len(values))] - a] for a, values in _parts(vectors)]
    return np.concatenate(found), numbers


def exact_neighbours(
    faiss: Any, vectors: VectorsFolder, queries: NDArray[np.float32], numbers: NDArray[np.int64]
) -> NDArray[np.int64]:
    """(queries, NEIGHBOURS) the nearest others of each, -1 where there are fewer; every vector is compared."""
    best = np.full((len(queries), NEIGHBOURS + 1), -np.inf, np.float32)
    where = np.full(best.shape, -1, np.int64)
    for first, values in _parts(vectors):
        index = faiss.IndexFlatIP(vectors.manifest.width)
        index.add(values)
        scores, found = index.search(queries, NEIGHBOURS + 1)
        found = np.where(found < 0, -1, found + first)
        scores, found = np.concatenate((best, scores), 1), np.concatenate((where, found), 1)
        order = np.argsort(-np.where(found < 0, -np.inf, scores), axis=1, kind="stable")[:, : NEIGHBOURS + 1]
        best, where = np.take_along_axis(scores, order, 1), np.take_along_axis(found, order, 1)
    return _others(where, numbers)


def _others(found: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Neighbours without the query itself: NEIGHBOURS of each row."""
    own = found == numbers[:, None]
    own[~own.any(1), -1] = True  # it was not found: the farthest goes
    return found[~own].reshape(len(found), -1)


def _probes(
    index: Any,
    queries: NDArray[np.float32],
    numbers: NDArray[np.int64],
    truth: NDArray[np.int64],
    options: IndexOptions,
) -> tuple[int, float]:
    """How many cells are searched, and the recall that it gives."""
    tried = [2**i for i in range(index.nlist.bit_length()) if 2**i < index.nlist] + [index.nlist]
    for probes in tried if options.probes is None else [min(options.probes, index.nlist)]:
        index.nprobe = probes
        found = _others(index.search(queries, NEIGHBOURS + 1)[1], numbers)
        recall = recall_of(found, truth)
        if recall >= options.recall:
            break
    return probes, recall


def recall_of(found: NDArray[np.int64], truth: NDArray[np.int64]) -> float:
    """The share of true neighbours that was found."""
    hits = sum(len(set(row[row >= 0]) & set(true[true >= 0])) for row, true in zip(found, truth))
    return hits / max(1, int((truth >= 0).sum()))


class VectorIndex:
    """An index that is searched. DataError if it is none, damaged, or faiss is missing."""

    def __init__(self, path: str | Path):
        self.path, self.manifest = Path(path), read_index_manifest(path)
        faiss, m = faiss_library(), self.manifest
        self._parts: list[Any] = []  # the exact index does not keep them alive
        try:
            if m.kind == "ivf":
                # the file of the lists is looked for beside, wherever the index was made
                self._index = faiss.read_index(str(self.path / IVF), faiss.IO_FLAG_ONDISK_SAME_DIR)
                faiss.extract_index_ivf(self._index).nprobe = m.probes
            else:
                self._index = faiss.IndexShards(m.width, True, True)
                for number in range(-(-m.texts // m.shard)):
                    part = faiss.read_index(str(self.path / shard_name(number)), faiss.IO_FLAG_MMAP)
                    self._parts.append(part)
                    self._index.add_shard(part)
        except RuntimeError as error:
            raise DataError(f"{path}: faiss cannot read it: {error}") from None
        if self._index.d != m.width or self._index.ntotal != m.texts:
            there = f"{self._index.ntotal} vectors of {self._index.d} features"
            raise DataError(f"{path}: holds {there}, and its {MANIFEST} says {m.texts} of {m.width}")
        self.texts = PassageTexts([self.path / texts_name(n) for n in range(-(-m.texts // m.shard))], m.shard)

    def search(self, vectors: NDArray[np.floating], count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """vectors (Q, width) -> scores (inner products) and numbers (Q, count), the nearest first; -1: there are
        fewer."""
        return self._index.search(np.ascontiguousarray(vectors, np.float32), count)


def read_index_manifest(path: str | Path) -> IndexManifest:
    """DataError if a folder is no index, or its files are not all there."""
    folder, note = Path(path), Path(path) / MANIFEST
    if not note.is_file():
        raise DataError(f"{path}: is no index (it has no {MANIFEST}): phalanx index VECTORS -o {path}")
    found: IndexManifest = manifest_of(IndexManifest, note)
    for name, size in found.files.items():
        file = folder / name
        if Path(name).name != name or not file.is_file() or file.stat().st_size != size:
            raise DataError(f"{path}: is damaged: {name} is missing or has another size: make the index once more")
    return found


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.faiss"

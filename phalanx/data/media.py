"""Media of chats, such as images and recordings: files that may come from anybody, found below the folder of the chats
that name them, read ahead of need in processes of their own, and given to samples as rows of numbers.

    record ──media_bytes──▶ bytes ──MediaReader.units──▶ rows (sequence.sample.Units) ──MediaSpec.placed──▶ Sample

A kind of media is a MediaReader in one file (base.registry, seam "media"); the name of the kind is also the type of its
parts in messages, {"type": "image", "image": "a.png"}. Which of them a model reads, its family says (sequence.media).
"""

from __future__ import annotations

import os
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.base.registry import find
from phalanx.data.chats import origin_text
from phalanx.data.handover import HandoverPool
from phalanx.data.index import Corpus
from phalanx.data.media_notes import MediaNotes
from phalanx.sequence.balance import assign_shared, assign_whole
from phalanx.sequence.media import MediaSpec
from phalanx.sequence.sample import IGNORE, Sample, SharedUnits, Units, UnitStream
from phalanx.sequence.shard import WHOLE, SequenceShard

SEAM = "media"
TAR = ".tar"
MAX_BYTES = 1 << 28
SHORT = 12  # tokens of documents that hardly have room for an image
FEW = 6  # tokens of a made-up text that has one beside it
Origin = tuple[Corpus, list[tuple[int, int]]]


class BadMedia(DataError):
    """A file that is not read: damaged, hostile, or of a kind that cannot be used."""


class MediaReader(ABC):
    """How files of one kind become rows. Objects are sent to worker processes: they hold plain values.

    article, plural  words for it in messages, such as "an image" and "images"
    """

    article: ClassVar[str]
    plural: ClassVar[str]

    @classmethod
    @abstractmethod
    def made(cls, spec: Any, processor: str | None) -> MediaReader:
        """For what a model reads, as the preprocessor_config.json at a path says; None: as the model's family does.
        DataError if it cannot be read, or would make what the model does not read."""

    def check_packages(self) -> None:
        """DataError if a package that decodes files is missing. Made-up media need none."""
        return

    @abstractmethod
    def sizes(self, data: bytes, name: str) -> tuple[int, int]:
        """The rows that a file becomes, and the tokens of a text that stand for it. It is decoded, so that damage is
        found. BadMedia, which names the file."""

    @abstractmethod
    def units(self, data: bytes, name: str, where: str) -> Units:
        """Its rows: one unit. where: its record, for messages. BadMedia as `sizes`."""

    def blank(self, data: bytes, name: str, where: str) -> Units:
        """The same with zeros for numbers, of a file that another rank computes with: where a header says enough,
        nothing is decoded."""
        return self.units(data, name, where)

    @abstractmethod
    def mock(self, number: int, rng: np.random.Generator) -> Units:
        """A made-up one, of any size. number: which it is of its sample."""


def reader_of(spec: MediaSpec, processor: str | None) -> MediaReader:
    """What reads the media of a model. DataError as MediaReader.made."""
    kind: type[MediaReader] = find(SEAM, spec.kind, MediaReader)
    return kind.made(spec, processor)


# ---- files


def media_path(folder: Path, name: str) -> Path:
    """The file that a record beside `folder` names. BadMedia if it is outside the folder, links followed."""
    asked = Path(name)
    if not name or "\0" in name or asked.is_absolute() or ".." in asked.parts or "://" in name:
        raise BadMedia(f"{name!r} must be a path below {folder}, where the file that names it is")
    found, root = (folder / asked).resolve(), folder.resolve()
    if not found.is_relative_to(root):
        raise BadMedia(f"{name!r} leads out of {folder}: such files lie below the file that names them")
    return found


def read_bytes(path: Path) -> bytes:
    """BadMedia if it is no file, cannot be read, or is far larger than such files are."""
    try:
        if not path.is_file():
            raise BadMedia(f"{path}: no such file")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise BadMedia(f"{path}: has {size:,} bytes; a file may have {MAX_BYTES:,}")
        return path.read_bytes()
    except OSError as error:
        raise BadMedia(f"{path}: cannot be read: {error}") from error


def media_bytes(folder: Path, name: str) -> bytes:
    """What a file below the folder holds, or a member of a tar file there. BadMedia if there is none, or the name leads
    out of the folder."""
    before, found, member = name.partition(f"{TAR}/")
    if not found:
        return read_bytes(media_path(folder, name))
    path = media_path(folder, before + TAR)
    at = _members(str(path), *_stamp(path)).get(member)
    if at is None:
        raise BadMedia(f"{path}: has no file {member!r}")
    if at[1] > MAX_BYTES:
        raise BadMedia(f"{path}: {member!r} has {at[1]:,} bytes; a file may have {MAX_BYTES:,}")
    with open(path, "rb") as file:
        data = os.pread(file.fileno(), at[1], at[0])
    if len(data) != at[1]:
        raise BadMedia(f"{path}: {member!r} is cut short")
    return data


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise BadMedia(f"{path}: cannot be read: {error.strerror}") from error
    return stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=64)
def _members(path: str, changed: int, size: int) -> dict[str, tuple[int, int]]:
    """Where the files of a tar file are: name -> (offset, bytes)."""
    try:
        with tarfile.open(path, "r:") as tar:
            return {member.name: (member.offset_data, member.size) for member in tar if member.isreg()}
    except (OSError, tarfile.TarError, ValueError) as error:
        raise BadMedia(f"{path}: no tar file that can be read: {error}") from error


# ---- rows


@dataclass(frozen=True)
class Task:
    """A file to read: where it is, what reads it, how many rows it must become, the tokens that stand for it, and its
    record, for messages. own: whether this rank computes with it; of others the size is enough."""

    folder: str
    name: str
    rows: int
    tokens: int
    where: str
    reader: MediaReader
    own: bool = True


def read_units(task: Task) -> Units:
    """The rows of a file. BadMedia, which names file and record."""
    read = task.reader.units if task.own else task.reader.blank
    try:
        units = read(media_bytes(Path(task.folder), task.name), task.name, task.where)
    except BadMedia as error:
        raise type(error)(f"{task.where}: {error}") from error
    if len(units.values) != task.rows:
        rule = "the file was changed since the chats were prepared: prepare them again"
        raise BadMedia(f"{task.where}: {task.name} has {len(units.values)} rows, not {task.rows}: {rule}")
    return units


class ChatMedia:
    """Gives samples of chats their media. workers: processes that decode them; 0: the thread that asks does."""

    def __init__(self, spec: MediaSpec, reader: MediaReader, workers: int = 0):
        self.spec, self.reader, self.workers = spec, reader, workers
        self._notes = dict[str, MediaNotes]()
        self._pool: HandoverPool | None = None

    def add(
        self, samples: Sequence[Sample], sources: Sequence[Origin | None], part: SequenceShard = WHOLE
    ) -> list[Sample]:
        """The samples of a micro-batch with the media of the documents that they were made of. Of those that have
        places in the text, the rank with this part decodes what it computes with; all at once."""
        tasks = [[] if origin is None else self._tasks(sample, *origin) for sample, origin in zip(samples, sources)]
        every = [task for each in tasks for task in each]
        if self.spec.token is not None:
            homes = assign_whole([task.rows for task in every], part.everyone)  # as Batch.cut assigns them
            every = [replace(task, own=home == part.here) for task, home in zip(every, homes)]
        made = iter(self._read(every))
        found = []
        for sample, each in zip(samples, tasks):
            units = Units.together([next(made) for _ in each], self.spec.stream)
            found.append(with_media(sample, units, self.spec, self.reader))
        return found

    def share(
        self, samples: Sequence[Sample], sources: Sequence[Origin | None], part: SequenceShard
    ) -> tuple[list[Sample], SharedUnits]:
        """Of images of other replicas, this rank reads those that it computes; of its own replica's, all headers."""
        tasks = [[] if origin is None else self._tasks(sample, *origin) for sample, origin in zip(samples, sources)]
        units = [[UnitSize(task.rows, task.tokens) for task in each] for each in tasks]
        homes = iter(homes_of(units, part))
        mine = own_samples(samples, part)
        wanted, of = list[Task](), list[tuple[int, bool]]()
        for number, each in enumerate(tasks):
            for task in each:
                computed = next(homes) == part.here
                if computed or number in mine:
                    wanted.append(replace(task, own=computed))
                    of.append((number, computed))
        made = list(zip(of, self._read(wanted)))
        found = list[Sample]()
        for number in mine:
            here = [without_values(units) for (at, _), units in made if at == number]
            together = Units.together(here, replace(self.spec.stream, width=0))
            found.append(with_media(samples[number], together, self.spec, self.reader))
        computed_here = [(samples[at].number, units) for (at, computed), units in made if computed]
        return found, shared_units(units, computed_here, self.spec.stream, part)

    def _tasks(self, sample: Sample, corpus: Corpus, ranges: list[tuple[int, int]]) -> list[Task]:
        notes, tasks, at = self.notes_of(corpus), list[Task](), 0
        for first, count in ranges:
            document = corpus.document_at(first)
            token = self.spec.token
            places = 0 if token is None else int((sample.tokens[at : at + count] == token).sum())
            at += count
            named = notes.of(document) if places or token is None else []
            for note in named:
                if places >= note.tokens:
                    where, folder = origin_text(corpus, document), str(notes.folders[document])
                    tasks.append(Task(folder, note.name, note.rows, note.tokens, where, self.reader))
                    places -= note.tokens
            if places:
                raise DataError(
                    f"{origin_text(corpus, document)}: has {places} tokens of {self.reader.plural} that none of its "
                    f"{self.reader.plural} stands for: prepare the chats again, or leave such texts out"
                )
        return tasks

    def notes_of(self, corpus: Corpus) -> MediaNotes:
        if corpus.prefix not in self._notes:
            self._notes[corpus.prefix] = MediaNotes(corpus)
        return self._notes[corpus.prefix]

    def _read(self, tasks: Sequence[Task]) -> list[Units]:
        if self.workers == 0 or not tasks:
            return [read_units(task) for task in tasks]
        if self._pool is None:
            self._pool = HandoverPool(self.workers)
        try:
            return self._pool.map(read_units, tasks)
        except BrokenProcessPool:
            raise DataError(f"a process that decodes {self.reader.plural} died, perhaps for want of memory") from None


class MockMedia:
    """Gives mock samples made-up media. room: rows that a sequence has room for."""

    def __init__(self, spec: MediaSpec, reader: MediaReader, room: int, key: int = 0):
        self.spec, self.reader, self.room, self.key = spec, reader, room, key

    def add(self, samples: Sequence[Sample], sources: Sequence[Any], part: SequenceShard = WHOLE) -> list[Sample]:
        return [self._of(sample, np.random.default_rng([self.key, sample.number])) for sample in samples]

    def share(
        self, samples: Sequence[Sample], sources: Sequence[Any], part: SequenceShard
    ) -> tuple[list[Sample], SharedUnits]:
        made = self.add(samples, sources)
        each = [sample.units[self.spec.stream.name].singly for sample in made]
        units = [[UnitSize(len(one.values), len(one.features)) for one in some] for some in each]
        every = [(sample.number, one) for sample, some in zip(made, each) for one in some]
        own = [pair for pair, home in zip(every, homes_of(units, part)) if home == part.here]
        return [made[i] for i in own_samples(samples, part)], shared_units(units, own, self.spec.stream, part)

    def _of(self, sample: Sample, rng: np.random.Generator) -> Sample:
        token = self.spec.token
        return self._beside(sample, rng) if token is None else self._inside(sample, token, rng)

    def _beside(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """One for each document. Documents are joined until there is room for theirs, and until they have a few tokens
        each. Each begins as texts beside media do."""
        found, room, tokens = list[Units](), self.room, np.array(sample.tokens, np.int64)
        most = min(len(sample.documents), max(1, sample.filled // FEW))
        while len(found) < most:
            units = self.reader.mock(len(found) + 1, rng)
            if len(units.values) > room:
                break
            found.append(units)
            room -= len(units.values)
        count = max(1, len(found))
        firsts = [sample.documents[i * len(sample.documents) // count][0] for i in range(count)]
        if self.spec.begins is not None:
            tokens[firsts] = self.spec.begins
        starts = np.array([*firsts[1:], *sample.starts[sample.starts >= sample.filled]], np.int64)
        made = replace(sample, tokens=tokens, starts=starts)
        return with_media(made, Units.together(found, self.spec.stream), self.spec, self.reader)

    def _inside(self, sample: Sample, token: int, rng: np.random.Generator) -> Sample:
        """None or one at the beginning of each document, where there is room. If all documents are short, one for all
        of them."""
        other = token - 1 if token else 1
        tokens = np.array(sample.tokens, np.int64)
        tokens[tokens == token] = other
        labels = np.where(sample.labels == token, other, sample.labels)
        found, room = list[Units](), self.room
        without = rng.random() < 0.25
        documents = [] if without else [each for each in sample.documents if rng.random() < 0.8]
        whole = [(0, sample.filled)] if documents and max(stop - first for first, stop in documents) < SHORT else []
        for first, stop in whole or documents:
            units = self.reader.mock(len(found) + 1, rng)
            count, rows = len(units.features), len(units.values)
            if count + 2 > stop - first or rows > room:
                continue
            found.append(units)
            tokens[first + 1 : first + 1 + count] = token
            labels[first : first + count] = IGNORE
            room -= rows
        units = Units.together(found, self.spec.stream)
        return with_media(replace(sample, tokens=tokens, labels=labels), units, self.spec, self.reader)


def with_media(sample: Sample, units: Units, spec: MediaSpec, reader: MediaReader) -> Sample:
    """The sample with rows of media. DataError if the text has another number of tokens for them."""
    if spec.token is not None and (places := _places(sample, spec.token)) != len(units.features):
        raise DataError(
            f"sample {sample.number} has {places} tokens of {reader.plural}, and its {reader.plural} "
            f"{len(units.features)} features: {', '.join(units.names) or 'none'}"
        )
    return spec.placed(sample, units)


# ---- what replicas compute together


class UnitSize(NamedTuple):
    """Rows of an image, and what they become."""

    rows: int
    features: int


def own_samples(samples: Sequence[Sample], part: SequenceShard) -> range:
    """Which of the samples of all replicas are this rank's replica's."""
    count = len(samples) // part.replicas
    return range(part.replica * count, (part.replica + 1) * count)


def homes_of(units: Sequence[Sequence[UnitSize]], part: SequenceShard) -> list[int]:
    """The rank that computes each image, whatever its sample. units: of each sample."""
    count = len(units) // part.replicas
    rows = [[unit.rows for each in units[at : at + count] for unit in each] for at in range(0, len(units), count)]
    return assign_shared(rows, part.sharers)


def without_values(units: Units) -> Units:
    return replace(units, values=units.values[:, :0])


def shared_units(
    units: Sequence[Sequence[UnitSize]], own: Sequence[tuple[int, Units]], stream: UnitStream, part: SequenceShard
) -> SharedUnits:
    """units: of each sample; own: the images that this rank computes, each with its sample's number."""
    count = len(units) // part.replicas
    by_replica = [[one for each in units[at : at + count] for one in each] for at in range(0, len(units), count)]
    return SharedUnits(
        rows=tuple(tuple(one.rows for one in each) for each in by_replica),
        features=tuple(tuple(one.features for one in each) for each in by_replica),
        homes=tuple(homes_of(units, part)),
        own=Units.together([each for _, each in own], stream),
        samples=tuple(number for number, _ in own),
    )


def _places(sample: Sample, token: int) -> int:
    tokens: NDArray[np.integer] = sample.tokens[: sample.filled]
    return int((tokens == token).sum())

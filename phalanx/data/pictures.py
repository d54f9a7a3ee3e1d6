"""Images of chats: samples get the patches of images that are named beside token files (data/picture_notes.py)."""

from __future__ import annotations

import multiprocessing
import os
import tarfile
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.base.errors import DataError
from phalanx.data.chats import origin_text
from phalanx.data.images import (
    BadImage,
    ImageSteps,
    Processor,
    image_path,
    open_image,
    processor_of,
    read_bytes,
    read_processor,
    size_of,
)
from phalanx.data.index import Corpus
from phalanx.data.picture_notes import PictureNotes
from phalanx.sequence.balance import assign_whole
from phalanx.sequence.patches import PatchForm, PictureSpec, grid_positions
from phalanx.sequence.sample import IGNORE, Sample, Units
from phalanx.sequence.shard import WHOLE, SequenceShard

TAR = ".tar"


SHORT = 12  # tokens of documents that hardly have room for an image
Origin = tuple[Corpus, list[tuple[int, int]]]


def steps_for(spec: PictureSpec, processor: str | None) -> ImageSteps:
    """How images become numbers for a model: as data.processor says, or else its family. DataError if its images would
    have another size than the model reads, or other patches."""
    found = processor_of(dict(spec.processor)) if processor is None else read_processor(Path(processor))
    return steps_of(spec, found, f"data.processor={processor}")


def steps_of(spec: PictureSpec, found: Processor, where: str) -> ImageSteps:
    """The same of a processor that is read already; where: it comes from, for messages."""
    form = spec.form
    asked = (found.patch, found.frames, found.side)
    if found.patch is not None and asked != (form.size, form.frames, form.side):
        raise DataError(
            f"{where}: patches of {asked[0]} pixels, {asked[1]} frames and {asked[2]} to a side; the model's are of "
            f"{form.size}, {form.frames} and {form.side}"
        )
    if spec.size is not None and (made := found.steps.size_after(480, 640)) != spec.size:
        raise DataError(f"{where}: makes images of {made[0]} x {made[1]} pixels, and the model reads {spec.size}")
    if spec.size is None and found.steps.multiple % form.multiple:
        raise DataError(f"{where}: sides of images must be multiples of {form.multiple} pixels")
    return found.steps


# ---- bytes


def image_bytes(folder: Path, name: str) -> bytes:
    """What a file below the folder holds, or a member of a tar file there. BadImage if there is none, or the name leads
    out of the folder."""
    before, found, member = name.partition(f"{TAR}/")
    if not found:
        return read_bytes(image_path(folder, name))
    path = image_path(folder, before + TAR)
    at = _members(str(path), *_stamp(path)).get(member)
    if at is None:
        raise BadImage(f"{path}: has no file {member!r}")
    with open(path, "rb") as file:
        data = os.pread(file.fileno(), at[1], at[0])
    if len(data) != at[1]:
        raise BadImage(f"{path}: {member!r} is cut short")
    return data


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise BadImage(f"{path}: cannot be read: {error.strerror}") from error
    return stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=64)
def _members(path: str, changed: int, size: int) -> dict[str, tuple[int, int]]:
    """Where the files of a tar file are: name -> (offset, bytes)."""
    try:
        with tarfile.open(path, "r:") as tar:
            return {member.name: (member.offset_data, member.size) for member in tar if member.isreg()}
    except (OSError, tarfile.TarError, ValueError) as error:
        raise BadImage(f"{path}: no tar file that can be read: {error}") from error


# ---- patches


@dataclass(frozen=True)
class Task:
    """An image to read: where it is, how it becomes rows, how many these must be, and its record, for messages. own:
    whether this rank computes with it; of others the size is enough."""

    folder: str
    name: str
    rows: int
    where: str
    steps: ImageSteps
    form: PatchForm
    own: bool = True


def read_units(task: Task) -> Units:
    """The rows of an image; zeros, without decoding it, of one that is another rank's. BadImage, which names file and
    record."""
    try:
        data = image_bytes(Path(task.folder), task.name)
        height, width = size_of(data, task.name)
        name = f"{task.name} ({width} x {height}) of {task.where}"
        if task.own:
            units = task.form.units(task.steps.pixels(open_image(data, task.name)), name)
        else:
            units = task.form.blank(*task.steps.size_after(height, width), name)
            units = replace(units, values=np.zeros((len(units.values), task.form.width), np.float32))
    except BadImage as error:
        raise BadImage(f"{task.where}: {error}") from error
    if len(units.values) != task.rows:
        rule = "the file was changed since the chats were prepared: prepare them again"
        raise BadImage(f"{task.where}: {task.name} has {len(units.values)} patches, not {task.rows}: {rule}")
    return units


def _end_with_parent() -> None:
    """In a worker: end when the process that started it does."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class Pictures:
    """Gives samples of chats their images. workers: processes that decode them; 0: the thread that asks does."""

    def __init__(self, spec: PictureSpec, steps: ImageSteps, workers: int = 0):
        self.spec, self.steps, self.workers = spec, steps, workers
        self._notes = dict[str, PictureNotes]()
        self._pool: ProcessPoolExecutor | None = None

    def add(
        self, samples: Sequence[Sample], sources: Sequence[Origin | None], part: SequenceShard = WHOLE
    ) -> list[Sample]:
        """The samples of a micro-batch with the images of the documents that they were made of. Those that the rank
        with this part computes with are decoded, all at once."""
        tasks = [[] if origin is None else self._tasks(sample, *origin) for sample, origin in zip(samples, sources)]
        every = [task for each in tasks for task in each]
        homes = assign_whole([task.rows for task in every], part.count * part.ranks)  # as Batch.cut assigns them
        here = part.index * part.ranks + part.rank
        made = iter(self._read([replace(task, own=home == here) for task, home in zip(every, homes)]))
        found = []
        for sample, each in zip(samples, tasks):
            units = Units.together([next(made) for _ in each], self.spec.form.stream)
            found.append(with_pictures(sample, units, self.spec))
        return found

    def _tasks(self, sample: Sample, corpus: Corpus, ranges: list[tuple[int, int]]) -> list[Task]:
        notes, tasks, at = self.notes_of(corpus), list[Task](), 0
        for first, count in ranges:
            document = corpus.document_at(first)
            places = int((sample.tokens[at : at + count] == self.spec.token).sum())
            at += count
            for note in notes.of(document) if places else []:
                if places >= note.tokens:
                    where = origin_text(corpus, document)
                    folder = str(notes.folders[document])
                    tasks.append(Task(folder, note.name, note.rows, where, self.steps, self.spec.form))
                    places -= note.tokens
            if places:
                raise DataError(
                    f"{origin_text(corpus, document)}: has {places} tokens of images that none of its images stands "
                    "for: prepare the chats again"
                )
        return tasks

    def notes_of(self, corpus: Corpus) -> PictureNotes:
        if corpus.prefix not in self._notes:
            self._notes[corpus.prefix] = PictureNotes(corpus)
        return self._notes[corpus.prefix]

    def _read(self, tasks: Sequence[Task]) -> list[Units]:
        if self.workers == 0 or not tasks:
            return [read_units(task) for task in tasks]
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.workers, context, _end_with_parent)
        try:
            return list(self._pool.map(read_units, tasks))
        except BrokenProcessPool:
            raise DataError("a process that decodes images died, perhaps for want of memory") from None


class MockPictures:
    """Gives mock samples made-up images: none or one at the beginning of each document, where there is room. If all
    documents are short, one for all of them."""

    def __init__(self, spec: PictureSpec, room: int, key: int = 0):
        self.spec, self.room, self.key = spec, room, key

    def add(self, samples: Sequence[Sample], sources: Sequence[Any], part: SequenceShard = WHOLE) -> list[Sample]:
        return [self._of(sample) for sample in samples]

    def _of(self, sample: Sample) -> Sample:
        spec, rng = self.spec, np.random.default_rng([self.key, sample.number])
        other = spec.token - 1 if spec.token else 1
        tokens = np.array(sample.tokens, np.int64)
        tokens[tokens == spec.token] = other
        labels = np.where(sample.labels == spec.token, other, sample.labels)
        found, room = list[Units](), self.room
        without = rng.random() < 0.25
        documents = [] if without else [each for each in sample.documents if rng.random() < 0.8]
        whole = [(0, sample.filled)] if documents and max(stop - first for first, stop in documents) < SHORT else []
        for first, stop in whole or documents:
            height, width = spec.size or tuple((rng.integers(1, 4, 2) * spec.form.multiple).tolist())
            count, rows = spec.form.tokens(height, width), spec.form.rows(height, width)
            if count + 2 > stop - first or rows > room:
                continue
            pixels = rng.standard_normal((spec.form.channels, height, width)).astype(np.float32)
            found.append(spec.form.units(pixels, f"made-up image {len(found) + 1} of sample {sample.number}"))
            tokens[first + 1 : first + 1 + count] = spec.token
            labels[first : first + count] = IGNORE
            room -= rows
        units = Units.together(found, spec.form.stream)
        return with_pictures(replace(sample, tokens=tokens, labels=labels), units, spec)


def with_pictures(sample: Sample, units: Units, spec: PictureSpec) -> Sample:
    """The sample with rows of images. DataError if the text has another number of tokens for them."""
    places = int((sample.tokens[: sample.filled] == spec.token).sum())
    if places != len(units.features):
        raise DataError(
            f"sample {sample.number} has {places} tokens of images, and its images {len(units.features)} features: "
            f"{', '.join(units.names) or 'none'}"
        )
    made = replace(sample, units={**sample.units, spec.form.stream.name: units})
    if not spec.grid_positions:
        return made
    tokens = np.array(sample.tokens, np.int64)
    return replace(made, coordinates=grid_positions(tokens, sample.documents, units, spec))

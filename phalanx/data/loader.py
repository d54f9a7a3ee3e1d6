"""The loader: from global sample numbers to micro-batches. `sources` and `mixture` define what each sample is; the
caller moves batches to devices."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import islice
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.data.classes import open_classes
from phalanx.data.config import DataConfig
from phalanx.data.mixture import Blend, Weight, parse_split
from phalanx.data.own_source import SourceStart, open_own
from phalanx.data.scores import ScoreFile, row_type
from phalanx.data.sources import Source, SourceUse, check_epochs, open_part, open_whole, use_of_sources
from phalanx.data.text_groups import check_holds, mock_roles, text_roles
from phalanx.sequence.batch import IGNORE, PADDING_RUN, Batch, room_for_documents
from phalanx.sequence.sample import LostText, Sample, SampleTransform, SharedUnits, UnitRoom, Units
from phalanx.sequence.shard import WHOLE, SequenceShard
from phalanx.sequence.units import check_room, shared_unit_batch, unit_batch

LOOKED_UP = (
    4096  # samples whose windows the prefetcher looks up at once: numpy's price per call is then small beside them
)


BY_TOKEN = ("prefix", "segments", "pair_labels", "pair_weights")  # what samples may say of their tokens


Work = Callable[[Sequence[int]], Sequence[int]]
"""The cost of each of these samples, in addition to that of its tokens."""


def micro_batch_samples(
    consumed: int, global_batch: int, micro_batch: int, dp: int, dp_rank: int, work: Work | None = None
) -> list[list[int]]:
    """Sample numbers of each micro-batch of one data-parallel rank, for the step that starts after `consumed` samples.

    The step's samples are consumed .. consumed + global_batch - 1, whatever dp is. They are divided into micro-batches
    of `micro_batch` consecutive samples, and rank r takes the r-th block of consecutive micro-batches, so a binary tree
    over all micro-batches contains the ranks' trees as its lower levels. With `work`, the micro-batches stay the same,
    but are reordered so that blocks have equal work; the order is the same for every dp that is a power of 2.
    ValueError unless micro_batch * dp divides global_batch.
    """
    if global_batch % (micro_batch * dp):
        raise ValueError(f"global_batch {global_batch} is not a multiple of micro_batch {micro_batch} x dp {dp}")
    runs: Sequence[int] = range(consumed, consumed + global_batch, micro_batch)
    if work is not None:
        costs = np.array(work(range(consumed, consumed + global_batch))).reshape(-1, micro_batch).sum(1).tolist()
        runs = [runs[i] for i in spread(costs, dp)]
    each = len(runs) // dp
    return [list(range(first, first + micro_batch)) for first in runs[dp_rank * each : (dp_rank + 1) * each]]


def spread(costs: Sequence[int], blocks: int) -> list[int]:
    """An order of items in which `blocks` consecutive blocks of equal length cost about the same, and so do their
    halves, and the halves of those.

    `blocks` divides the number of items. Items are assigned from the costliest down, one to each part in turn, the
    costlier one to the part with the least.
    """
    odd, rest = list[int](), blocks
    for factor in range(3, blocks + 1, 2):
        while rest % factor == 0:
            odd, rest = [*odd, factor], rest // factor
    twos = (len(costs) & -len(costs)).bit_length() - 1
    parts = [sorted(range(len(costs)), key=lambda i: (-costs[i], i))]
    for factor in [*odd, *[2] * twos]:
        parts = [part for whole in parts for part in _assign(whole, costs, factor)]
    return [i for part in parts for i in sorted(part)]


def _assign(items: list[int], costs: Sequence[int], count: int) -> list[list[int]]:
    """Assign items, the costliest first, to `count` parts of equal length."""
    parts, sums = [list[int]() for _ in range(count)], [0] * count
    for first in range(0, len(items), count):
        for item, part in zip(items[first : first + count], sorted(range(count), key=sums.__getitem__)):
            parts[part].append(item)
            sums[part] += costs[item]
    return parts


class Place(NamedTuple):
    """Where a sample comes from: it is number `number` of source `source`, at its window `window`."""

    sample: int
    source: int
    number: int
    window: int


class SampleMedia(Protocol):
    """What gives samples their images or recordings (data/media.py)."""

    def add(self, samples: Sequence[Sample], sources: Sequence[Any], part: SequenceShard = WHOLE) -> list[Sample]:
        """To the samples of a micro-batch. sources: the corpus and the ranges of its tokens that each sample was made
        of; None: none has them. part: of a rank, which needs the numbers of its own images alone."""
        ...

    def share(
        self, samples: Sequence[Sample], sources: Sequence[Any], part: SequenceShard
    ) -> tuple[list[Sample], SharedUnits]:
        """The same, where ranks of several replicas compute each other's images. samples: of the micro-batches of these
        replicas, one after another. Returned are this rank's replica's, whose images are without numbers, and the
        images that this rank computes."""
        ...


@dataclass(frozen=True)
class Reading:
    """How a task reads the data.

    scores     what batches carry of another model; None: nothing
    transform  what becomes of samples; None: they stay as the data has them
    classes    names of the classes that labels are (data/classes.py); none: labels are the next tokens
    texts      labels are the numbers of texts in their groups (data/text_groups.py)
    units      the streams of units that the model reads, which `media` or the transform makes
    media      gives samples their images or recordings, before they are transformed; None: they have none
    """

    scores: ScoreFile | None = None
    transform: SampleTransform | None = None
    classes: tuple[str, ...] = ()
    texts: bool = False
    units: tuple[UnitRoom, ...] = ()
    media: SampleMedia | None = None

    def length(self, seq_length: int) -> int:
        """Tokens of the data in a sample that has `seq_length` for the model."""
        return seq_length if self.transform is None else self.transform.reads(seq_length)


AS_IT_IS = Reading()


def _joined(rows: Sequence[np.ndarray | None]) -> torch.Tensor | None:
    """One after another, if samples have them."""
    found = [row for row in rows if row is not None]
    return torch.from_numpy(np.concatenate(found)) if found else None


def _documents_of(sample: Sample) -> int:
    """Documents of a sample, those of its padding included."""
    return 1 + len(sample.starts) + max(0, -(-(len(sample.tokens) - sample.filled) // PADDING_RUN) - 1)


class Loader:
    """Micro-batches from a blend of sources. It holds no position, so any sample can be requested at any time, from any
    thread."""

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[Weight],
        *,
        seq_length: int,
        document_attention: bool = False,
        packed: bool = False,
        reading: Reading = AS_IT_IS,
    ):
        """seq_length: of batches; windows of the sources have reading.length of it. packed: sequences may end in
        padding. DataError for invalid weights (wrong number of them, negative, all zero, too small)."""
        if len(weights) != len(sources):
            raise DataError(
                f"data.weights has {len(weights)} entries for {len(sources)} sources: "
                f"{', '.join(s.name for s in sources)}"
            )
        self.sources, self.seq_length, self.document_attention, self.packed = (
            list(sources),
            seq_length,
            document_attention,
            packed,
        )
        self.scores, self.transform, self.window_length = reading.scores, reading.transform, reading.length(seq_length)
        scores = reading.scores
        every = {corpus.prefix: corpus for source in sources for corpus in source.corpora} if reading.classes else {}
        self.classes = {prefix: open_classes(corpus, reading.classes) for prefix, corpus in every.items()}
        self.num_classes = len(reading.classes)
        self.of_texts = reading.texts
        if packed:
            check_holds((corpus for source in sources for corpus in source.corpora), reading.texts)
        self.units, self.media = reading.units, reading.media
        for corpus in [] if scores is None else [corpus for source in sources for corpus in source.corpora]:
            scores.check_corpus(corpus)  # type: ignore[union-attr]
        self._positions: dict[
            int, torch.Tensor
        ] = {}  # of uniform micro-batches, by number of sequences: always the same
        try:
            self.blend = Blend(weights)
        except ValueError as error:
            shown = [weight if isinstance(weight, int) else float(weight) for weight in weights]
            raise DataError(f"data.weights={shown}: {error}") from None

    @property
    def num_samples(self) -> int | None:
        """Samples before any source starts over; None if none ever does."""
        windows = [source.windows for source in self.sources if source.windows is not None]
        return sum(windows) if windows else None

    @property
    def order(self) -> str:
        """A fingerprint of the order of samples: while it is unchanged, a position in the data has the same meaning."""
        shares = [
            (source.windows, share, *(packing.checksum for packing in source.packings))
            for source, share in zip(self.sources, self.blend.shares)
        ]
        return hashlib.sha256(repr([self.window_length, shares]).encode()).hexdigest()[:16]

    def locate(self, samples: Sequence[int]) -> list[Place]:
        """Where these global sample numbers come from; fastest for many ascending numbers at once."""
        found = np.array(self.blend.locate(samples), np.int64).reshape(-1, 2)
        windows = np.empty(len(found), np.int64)
        for i in set(found[:, 0].tolist()):
            mine = found[:, 0] == i
            windows[mine] = self.sources[i].locate(found[mine, 1])
        return [Place(*row) for row in zip(samples, found[:, 0].tolist(), found[:, 1].tolist(), windows.tolist())]

    def filled(self, samples: Sequence[int]) -> int:
        """Tokens of these samples that are not padding."""
        return sum(self.sources[place.source].filled(place.window) for place in self.locate(samples))

    def pairs(self, samples: Sequence[int]) -> list[int]:
        """Number of (query, key) pairs that attention computes in each sample, only inside documents where it stays
        there; padding is not counted."""
        found = []
        for place in self.locate(samples):
            source, length = self.sources[place.source], self.window_length
            filled = source.filled(place.window) if self.packed else length
            starts = source.starts(place.window) if self.document_attention else np.empty(0, np.int64)
            sizes = np.diff(np.concatenate([[0], starts[starts < filled], [filled]]))
            found.append(int((sizes * (sizes + 1) // 2).sum()))
        return found

    def batch(self, samples: Sequence[int], part: SequenceShard = WHOLE) -> Batch:
        """The micro-batch of these global sample numbers, on the CPU (see `sequence.batch.Batch`). With part.replicas
        they are those of as many micro-batches, one after another (see `read`).

        Labels are the next tokens, unless the task transforms samples. With document attention, positions restart at
        each document, `documents` counts documents through the micro-batch, and the last token of a document has no
        loss, because what follows does not continue it. The padding of a packed sequence forms documents of its own
        without loss, short ones, so that attention to them costs nothing; the last token of a packed document never has
        a loss. part: as of `read`.
        """
        return self.read(self.locate(samples), part)

    def read(self, places: Sequence[Place], part: SequenceShard = WHOLE) -> Batch:
        """The micro-batch of samples that `locate` found, whole. part: the shard that will be cut from it; images of
        other ranks are not decoded.

        Where ranks of several replicas compute each other's images, `places` are those of all these replicas'
        micro-batches of one time, one after another. The batch is this rank's replica's, with the images that this rank
        computes, whoever's they are.
        """
        shared: SharedUnits | None = None
        if part.replicas == 1:
            samples = self.samples(places, part)
        else:
            samples, shared = self._share(places, part)
            count = len(samples)
            places = places[part.replica * count : (part.replica + 1) * count]
        batch = self._stream(samples)
        streams = {name: [sample.beside[name] for sample in samples] for name in samples[0].beside}
        beside = {name: self._stream(stream, samples) for name, stream in streams.items()}
        for room in self.units:
            found = self._units(samples, room)
            if shared is None:
                beside[room.stream.name] = unit_batch(found, [sample.number for sample in samples], room)
            else:
                check_room(found, room)
                beside[room.stream.name] = shared_unit_batch(shared, room.stream, part)
        labels = batch.labels.view(len(samples), -1).numpy()
        rows: dict[str, Any] = {name: self._rows_of(samples, name) for name in BY_TOKEN}
        few = 0 if self.transform is None else self.transform.label_rows(labels.size)
        few = 0 if np.count_nonzero(labels != IGNORE) > few else few
        return replace(batch, beside=beside, label_rows=few, **rows, **self._scored(places, labels))

    def _units(self, samples: Sequence[Sample], room: UnitRoom) -> list[Units]:
        """What samples have in a stream of units; those that have none make no rows."""
        none = Units.together((), room.stream)
        return [sample.units.get(room.stream.name, none) for sample in samples]

    def _stream(self, samples: Sequence[Sample], text: Sequence[Sample] | None = None) -> Batch:
        """Samples one after another. `text`: those beside which they are, whose documents number theirs."""
        count, length = len(samples), len(samples[0].tokens)
        tokens, labels = np.empty((count, length), np.int64), np.empty((count, length), np.int64)
        for row, sample in enumerate(samples):
            tokens[row], labels[row] = sample.tokens, sample.labels
        documents, room, longest = None, 0, 0
        if self.document_attention:
            positions, documents = self._cut_into_documents(samples, samples if text is None else text)
            room = room_for_documents(int(documents[-1]) + 1, documents.numel())
            longest = int(positions.max()) + 1
        else:
            positions = self._uniform_positions(count)
        numbers = np.array([sample.number for sample in samples], np.int64)
        return Batch(
            tokens=torch.from_numpy(tokens.reshape(-1)),
            labels=torch.from_numpy(labels.reshape(-1)),
            positions=positions,
            samples=torch.from_numpy(np.repeat(numbers, length)),
            num_sequences=count,
            seq_length=length,
            documents=documents,
            real=self._mark_padding(samples) if self.packed else None,
            most_documents=room,
            longest_document=longest,
            values=_joined([sample.values for sample in samples]),
            coordinates=_joined([sample.coordinates for sample in samples]),
        )

    def lost(self, samples: Sequence[int]) -> LostText | None:
        """The text of these global sample numbers that the task finds no room for. None: it has room for all."""
        if self.transform is None:
            return None
        found = [self.transform.lost(self._untransformed(place)) for place in self.locate(samples)]
        known = [each for each in found if each is not None]
        return reduce(LostText.plus, known) if known else None

    def samples(self, places: Sequence[Place], part: SequenceShard = WHOLE) -> list[Sample]:
        """Samples as the task reads them; part: as of `read`."""
        found = [self._untransformed(place) for place in places]
        if self.media is not None:
            origins = [self.sources[place.source].origin(place.window) for place in places]
            found = self.media.add(found, origins, part)
        return self._transformed(found)

    def _transformed(self, samples: list[Sample]) -> list[Sample]:
        return samples if self.transform is None else [self.transform(sample) for sample in samples]

    def _share(self, places: Sequence[Place], part: SequenceShard) -> tuple[list[Sample], SharedUnits]:
        """This rank's replica's samples, as the task reads them, and the images that this rank computes."""
        if self.media is None:
            raise TypeError("replicas share what the samples of a model that reads images have")
        origins = [self.sources[place.source].origin(place.window) for place in places]
        own, shared = self.media.share([self._untransformed(place) for place in places], origins, part)
        return self._transformed(own), shared

    def sample(self, place: Place) -> Sample:
        """One sample, as the task reads it."""
        return self.samples([place])[0]

    def _untransformed(self, place: Place) -> Sample:
        """One sample, as the data has it, without images."""
        source = self.sources[place.source]
        window = source.window(place.window)
        length = len(window) - 1
        filled = source.filled(place.window) if self.packed else length
        bordered = self.document_attention or self.packed
        starts = source.starts(place.window) if bordered else np.empty(0, np.int64)
        if self.of_texts:
            labels = self._roles_of(place, length, starts[starts < filled])
        elif self.num_classes:
            labels = self._classes_of(place, window[:-1], starts[starts < filled])
        else:
            labels = np.array(window[1:], np.int64)
            labels[source.unlabelled(place.window)] = IGNORE
            labels[filled:] = IGNORE
            labels[starts - 1] = IGNORE
        return Sample(place.sample, window[:-1], labels, starts[starts < length], filled)

    def _classes_of(self, place: Place, tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """The class of each token of a sample. In tokens that are in no file, the class of a document is its first
        token's number, modulo the number of classes."""
        labels = np.full(len(tokens), IGNORE, np.int64)
        origin = self.sources[place.source].origin(place.window)
        if origin is None:
            firsts = np.concatenate([[0], starts])
            labels[firsts] = tokens[firsts] % self.num_classes
            return labels
        (corpus, ranges), at = origin, 0
        for first, count in ranges:
            labels[at : at + count] = self.classes[corpus.prefix][first : first + count]
            at += count
        return labels

    def _roles_of(self, place: Place, length: int, starts: np.ndarray) -> np.ndarray:
        """The number of each text of a sample in its group, at its first token."""
        origin = self.sources[place.source].origin(place.window)
        if origin is None:
            return mock_roles(starts, length)
        corpus, ranges = origin
        return text_roles(corpus, ranges, length)

    def _scored(self, places: Sequence[Place], labels: np.ndarray) -> dict[str, Any]:
        """What the score file says of a micro-batch's tokens: `reference`, `target_ids` and `target_log_probs` of its
        Batch. DataError for a token with a loss that has no score."""
        scores = self.scores
        if scores is None:
            return {}
        rows = np.zeros(labels.shape, row_type(scores.top))
        for row, place in enumerate(places):
            origin = self.sources[place.source].origin(place.window)
            if origin is None:
                raise DataError(f"{scores.path}: has no scores of {self.sources[place.source].name}: no file has them")
            corpus, ranges = origin
            at = 0
            for first, count in ranges:
                rows[row, at : at + count] = scores.rows(corpus, first, count)
                at += count
            lacking = np.flatnonzero(np.isnan(rows[row]["label"]) & (labels[row] != IGNORE))
            if len(lacking):
                raise DataError(
                    f"{scores.path}: has no score of {len(lacking)} tokens of sample {place.sample} from "
                    f"{corpus.prefix}: it was written for other data: phalanx data score CONFIG"
                )
        rows["label"] = np.nan_to_num(rows["label"])
        flat = rows.reshape(-1)
        found = {"reference": torch.from_numpy(flat["label"].copy())}
        if scores.top:
            found["target_ids"] = torch.from_numpy(flat["ids"].astype(np.int64))
            found["target_log_probs"] = torch.from_numpy(flat["log_probs"].copy())
        return found

    def _mark_padding(self, samples: Sequence[Sample]) -> torch.Tensor:
        """Which tokens are real (1) and which are padding (0)."""
        real = np.zeros((len(samples), len(samples[0].tokens)), np.int64)
        for row, sample in enumerate(samples):
            real[row, : sample.filled] = 1
        return torch.from_numpy(real.reshape(-1))

    def _rows_of(self, samples: Sequence[Sample], name: str) -> torch.Tensor | None:
        """What samples say of their tokens; None if the task says nothing of them."""
        found = [row for sample in samples if (row := getattr(sample, name)) is not None]
        return torch.from_numpy(np.concatenate(found)) if found else None

    def _uniform_positions(self, count: int) -> torch.Tensor:
        if count not in self._positions:
            self._positions[count] = torch.arange(self.seq_length).repeat(count)
        return self._positions[count]

    def _cut_into_documents(
        self, samples: Sequence[Sample], numbered: Sequence[Sample]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and document numbers of a micro-batch. `numbered`: the same samples as the text has them. So that
        documents of all streams have the text's numbers, a sample has as many as the stream with most padding needs."""
        length, firsts, numbers, following = len(samples[0].tokens), [], [], 0
        for row, (sample, text) in enumerate(zip(samples, numbered)):
            padding = np.arange(sample.filled + PADDING_RUN, length, PADDING_RUN)
            # a sequence counts as a start
            firsts.append(row * length + np.concatenate([[0], sample.starts, padding]))
            numbers.append(following + np.arange(len(firsts[-1])))
            following += max(map(_documents_of, (text, *text.beside.values())))
        first, size = np.concatenate(firsts), len(samples) * length
        lengths = np.diff(first, append=size)
        positions = np.arange(size) - np.repeat(first, lengths)
        return torch.from_numpy(positions), torch.from_numpy(np.repeat(np.concatenate(numbers), lengths))

    def use(self, samples: int) -> list[SourceUse]:
        """The table of sources for a run of `samples` samples: tokens available and used, epochs."""
        return use_of_sources(self.sources, self.blend, samples, self.window_length)


def train_loader(
    config: DataConfig, *, seq_length: int, seed: int, vocab_size: int, samples: int, reading: Reading = AS_IT_IS
) -> Loader:
    """The loader of a run of `samples` samples of `seq_length` tokens. DataError for files that are missing, damaged or
    too small for it."""
    window = reading.length(seq_length)
    if config.source is not None:
        sources: list[Source] = [open_own(config, SourceStart(window, vocab_size, seed, "train"))]
        weights: list[Weight] = [1.0]
    else:
        sources, weights = open_part(config, 0, seq_length=window, seed=seed, vocab_size=vocab_size, samples=samples)
    loader = _loader(config, sources, weights, seq_length, reading)
    check_epochs(loader.use(samples), config.max_epochs)
    return loader


def valid_loaders(
    config: DataConfig, *, seq_length: int, seed: int, vocab_size: int, reading: Reading = AS_IT_IS
) -> dict[str, Loader]:
    """Validation sets by name, each with samples 0, 1, ... in a fixed order: `valid`, the validation part of the
    training corpora, unless that part of data.split is 0; then the sets of data.valid, used whole."""
    parts: dict[str, tuple[list[Source], list[Weight]]] = {}
    window = reading.length(seq_length)
    if config.source is not None:
        parts["valid"] = [open_own(config, SourceStart(window, vocab_size, seed, "validation"))], [1.0]
    elif config.mock or (
        (config.paths or config.sources or config.pairs or config.chats) and parse_split(config.split)[1] > 0
    ):
        parts["valid"] = open_part(config, 1, seq_length=window, seed=seed, vocab_size=vocab_size)
    own = {name: _loader(config, *part, seq_length, reading) for name, part in parts.items()}
    whole = whole_loaders(config, config.valid, seq_length=seq_length, vocab_size=vocab_size, reading=reading)
    return own | whole


def whole_loaders(
    config: DataConfig,
    sets: Mapping[str, Sequence[str]],
    *,
    seq_length: int,
    vocab_size: int,
    reading: Reading = AS_IT_IS,
) -> dict[str, Loader]:
    """Loaders of whole corpora, in file order: set name -> prefixes (or `0.7 a 0.3 b`)."""
    window = reading.length(seq_length)
    parts = {name: open_whole(config, given, seq_length=window, vocab_size=vocab_size) for name, given in sets.items()}
    return {name: _loader(config, *part, seq_length, reading) for name, part in parts.items()}


def _loader(
    config: DataConfig,
    sources: Sequence[Source],
    weights: Sequence[Weight],
    seq_length: int,
    reading: Reading,
) -> Loader:
    return Loader(
        sources,
        weights,
        seq_length=seq_length,
        document_attention=config.inside_documents,
        packed=config.is_packed,
        reading=reading,
    )


class Prefetcher:
    """Iterates over the batches of some lists of samples, prepared in advance by a thread; a context manager.

    At most `depth` batches wait. An error in the thread is raised here, in its place among the batches. With
    `pin_memory`, batches are in page-locked memory, so that `Batch.to(gpu)` overlaps with computation. `part`: the
    shard of each sequence that this rank receives.
    """

    def __init__(
        self,
        loader: Loader,
        sample_lists: Iterable[Sequence[int]],
        depth: int = 4,
        pin_memory: bool = False,
        part: SequenceShard = WHOLE,
    ):
        self._loader, self._sample_lists, self._pin_memory, self._part = loader, sample_lists, pin_memory, part
        self._ready: SimpleQueue[Batch | BaseException] = SimpleQueue()  # the exception comes last, and stays
        self._room: SimpleQueue[None] = SimpleQueue()  # one entry for each batch that may still be added
        for _ in range(depth):
            self._room.put(None)
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="phalanx-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self._ready.get()
        if self._closed:
            batch = StopIteration()
        if isinstance(batch, BaseException):
            self._ready.put(batch)
            raise batch
        self._room.put(None)
        return batch

    def close(self) -> None:
        """Stop the thread and wait for it; batches prepared in advance are dropped."""
        self._closed = True
        self._room.put(None)
        self._thread.join()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        end: BaseException = StopIteration()
        try:
            for places in self._places():
                batch = self._loader.read(places, self._part).cut(self._part)
                batch = batch.map(torch.Tensor.pin_memory) if self._pin_memory else batch
                self._room.get()
                if self._closed:
                    break
                self._ready.put(batch)
        except BaseException as caught:  # the training thread must learn of it, whatever it is
            end = caught
        finally:
            self._ready.put(end)

    def _places(self) -> Iterator[list[Place]]:
        """The places of each list of samples, looked up for about LOOKED_UP samples at a time."""
        lists = iter(self._sample_lists)
        while some := _take(lists, LOOKED_UP):
            places = iter(self._loader.locate([sample for samples in some for sample in samples]))
            for samples in some:
                yield list(islice(places, len(samples)))


def _take(lists: Iterator[Sequence[int]], wanted: int) -> list[Sequence[int]]:
    """The next lists, until they hold `wanted` numbers together; none at the end."""
    taken: list[Sequence[int]] = []
    for samples in lists:
        taken.append(samples)
        wanted -= len(samples)
        if wanted <= 0:
            break
    return taken

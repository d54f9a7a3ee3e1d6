"""Samples on the host, before they are put into batches, and the SampleTransform protocol: how a task turns the tokens
of the data into inputs and labels.

    window of tokens ──▶ Sample: tokens, next tokens as labels ──SampleTransform──▶ Sample: inputs, labels ──▶ Batch

A transform is a pure function of (seed, sample), so each layout sees the same samples, and so does a run that resumes.
Torch is not imported here, so that a config that names a task can be read without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError

ENCODER = "encoder"  # the name, beside a sample's own tokens, of the text that an encoder reads
SOUND = "sound"  # the same of the recordings that an encoder hears
IGNORE = -100  # label of a token without loss, as in torch's cross entropy
QUERY, POSITIVE = 0, 1  # labels of texts whose embeddings are compared; from 2 on, those of negatives

Pooling = Literal["mean", "first", "last"]
"""How a text's embedding is made of the hidden states of its tokens."""


@dataclass(frozen=True)
class Units:
    """Rows of numbers that a sample has beside its tokens, in units that are never divided: the patches of images.

    values       (n, features) floats
    coordinates  (n, axes) integers: where each row is in its unit, and what else of it is an integer
    sizes        rows of each unit, in the order of the text; each a multiple of `joined`
    features     (m,) ascending rows: those with which what the text reads begins, `joined` rows each
    joined       rows that become one of what the text reads
    names        of the units, for messages, such as "a.png (640 x 480)"
    """

    values: NDArray[np.floating]
    coordinates: NDArray[np.int64]
    sizes: tuple[int, ...]
    features: NDArray[np.int64]
    joined: int = 1
    names: tuple[str, ...] = ()

    @staticmethod
    def together(parts: Sequence[Units], like: UnitStream) -> Units:
        """One after another; none of them make no rows, of a stream like this."""
        firsts = np.cumsum([0, *(len(part.values) for part in parts)])
        return Units(
            np.concatenate([np.empty((0, like.width), np.float32), *(part.values for part in parts)]),
            np.concatenate([np.empty((0, like.axes), np.int64), *(part.coordinates for part in parts)]),
            tuple(size for part in parts for size in part.sizes),
            np.concatenate([np.empty(0, np.int64), *(part.features + at for part, at in zip(parts, firsts))]),
            like.joined,
            tuple(name for part in parts for name in part.names),
        )

    @property
    def singly(self) -> list[Units]:
        """Each alone."""
        borders, found = np.cumsum([0, *self.sizes]), list[Units]()
        for number, (first, stop) in enumerate(zip(borders[:-1].tolist(), borders[1:].tolist())):
            here = self.features[(self.features >= first) & (self.features < stop)] - first
            rows = slice(first, stop)
            names = self.names[number : number + 1]
            found.append(Units(self.values[rows], self.coordinates[rows], (stop - first,), here, self.joined, names))
        return found


@dataclass(frozen=True)
class SharedUnits:
    """The units of the micro-batches of several replicas, which all of their ranks compute together, as one rank knows
    them: where each is computed, and the rows of its own alone.

    rows, features  by replica, of each unit in the order of its text: its rows, and what they become
    homes    of each unit, replica by replica, the number of the rank that computes it (SequenceShard.here)
    own      the units that this rank computes, in that order
    samples  the sample that each of these belongs to
    """

    rows: tuple[tuple[int, ...], ...]
    features: tuple[tuple[int, ...], ...]
    homes: tuple[int, ...]
    own: Units
    samples: tuple[int, ...]


@dataclass(frozen=True)
class UnitStream:
    """A stream of numbers in units (Units) that a model reads: its name, numbers in a row, integers beside each row,
    rows that become one of what the text reads, and rows of the largest unit."""

    name: str
    width: int
    axes: int
    joined: int
    largest: int


@dataclass(frozen=True)
class UnitRoom:
    """A stream of units, rows of it that a sequence has room for, and the config key that says so."""

    stream: UnitStream
    capacity: int
    setting: str


@dataclass(frozen=True)
class Sample:
    """One sample of n tokens.

    number    of the sample in the run; with the run's seed, the key of everything drawn for it
    tokens    (n,) integers
    labels    (n,) int64; from the data: the next token of each; IGNORE where there is no loss
    starts    ascending positions in 1 .. n - 1 at which another document begins, or the padding; none where attention
              does not stay inside documents and sequences are not packed
    filled    tokens that are not padding
    prefix    (n,) int64, 1 for the first tokens of each document that read each other (Batch.prefix); None: none do
    segments  (n,) int64, which text of its document each token belongs to (BERT's token types); None: all to the first
    pair_labels, pair_weights  (n,) int64, at the first token of each document of two texts: its class, else IGNORE, and
              the weight of its loss (Batch.pair_labels); None: documents are single texts
    beside    further streams of tokens (Batch.beside), by name: each a sample of as many documents, without labels
    values    (n, features) floats, what the model reads in place of tokens, where they stand for numbers (frames of
              sound); None: it reads tokens
    coordinates  (n, axes) integers: where each token is, where one position does not say it; None: it does
    units     streams of numbers of which each sample has another number of rows (images), by name
    """

    number: int
    tokens: NDArray[np.integer]
    labels: NDArray[np.int64]
    starts: NDArray[np.int64]
    filled: int
    prefix: NDArray[np.int64] | None = None
    segments: NDArray[np.int64] | None = None
    pair_labels: NDArray[np.int64] | None = None
    pair_weights: NDArray[np.int64] | None = None
    beside: Mapping[str, Sample] = field(default_factory=dict)
    values: NDArray[np.floating] | None = None
    coordinates: NDArray[np.int64] | None = None
    units: Mapping[str, Units] = field(default_factory=dict)

    @property
    def documents(self) -> list[tuple[int, int]]:
        """(first token, one past the last) of each document; padding is none."""
        borders = [0, *(start for start in self.starts.tolist() if start < self.filled), self.filled]
        return list(zip(borders, borders[1:]))


def sample_of(number: int, texts: Sequence[NDArray[np.int64]], room: int, padding: int) -> Sample:
    """Texts one after another, each a document, and padding, in `room` tokens without labels."""
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    filled = int(ends[-1]) if len(ends) else 0
    return Sample(
        number,
        filled_up(texts, room, padding),
        np.full(room, IGNORE, np.int64),
        ends[ends < room],
        filled,
    )


def filled_up(texts: Sequence[NDArray[np.int64]], room: int, value: int) -> NDArray[np.int64]:
    """(room,) texts one after another, and `value` behind them."""
    found = np.full(room, value, np.int64)
    whole = np.concatenate([np.empty(0, np.int64), *texts])
    found[: len(whole)] = whole
    return found


TextPair = tuple[NDArray[np.int64], NDArray[np.int64]]
"""What the encoder reads of a document, and what the decoder says."""


def two_texts(number: int, pairs: Sequence[TextPair], rooms: tuple[int, int], marks: tuple[int, int]) -> Sample:
    """A sample of an encoder and a decoder. pairs: of each document; rooms: tokens of both in a sample; marks: the
    token with which the decoder begins, and padding."""
    start, padding = marks
    read, said = ([pair[side] for pair in pairs] for side in (0, 1))
    inputs = [np.concatenate([[start], text[:-1]]) for text in said]
    made = sample_of(number, inputs, rooms[1], padding)
    beside = {ENCODER: sample_of(number, read, rooms[0], padding)}
    return replace(made, labels=filled_up(said, rooms[1], IGNORE), beside=beside)


class LostText(NamedTuple):
    """What a transform finds no room for, of one sample or of several: documents, those of them that are cut at their
    end or left out, and the tokens of all and of what is lost."""

    documents: int = 0
    cut: int = 0
    left_out: int = 0
    tokens: int = 0
    lost_tokens: int = 0

    def plus(self, other: LostText) -> LostText:
        return LostText(*map(sum, zip(self, other)))


class SampleTransform(ABC):
    """What a task makes of samples. It is called on the host, from any thread, for whole samples, before batches are
    cut for ranks. `sample` may be views of the data: make new arrays, and change none in place."""

    def reads(self, seq_length: int) -> int:
        """Tokens of the data in a sample, if the sample that it becomes is to have `seq_length`."""
        return seq_length

    def lost(self, sample: Sample) -> LostText | None:
        """The text of a sample that it finds no room for. None: it has room for all, whatever the sample."""
        return None

    def label_rows(self, tokens: int) -> int:
        """Of so many tokens of samples, a bound on those with a label that samples hardly ever exceed; 0: any token may
        have one."""
        return 0

    @abstractmethod
    def __call__(self, sample: Sample) -> Sample:
        """The sample with its inputs as tokens, and their labels. It has train.seq_length tokens."""


@dataclass(frozen=True)
class Vocabulary:
    """What a transform needs to know about ids.

    size       of the model's vocabulary: ids are 0 .. size - 1
    text       (ids,) int64, ascending: those that stand for text, neither special nor beyond the tokenizer's
    special    name -> id, such as "[SEP]"
    roles      what special tokens are for, such as "mask", "cls", "sep", "pad" -> id; those that are known
    continues  (size,) whether a piece goes on with the word of the piece before it, if that one `leaves_open`; None:
               the tokenizer's pieces do not say where words begin
    leaves_open  (size,) whether a word may go on after this piece
    source     where it comes from, for messages
    """

    size: int
    text: NDArray[np.int64]
    special: Mapping[str, int] = field(default_factory=dict)
    roles: Mapping[str, int] = field(default_factory=dict)
    continues: NDArray[np.bool_] | None = None
    leaves_open: NDArray[np.bool_] | None = None
    source: str = "data.tokenizer"

    @cached_property
    def sentinels(self) -> tuple[int, ...]:
        """The special tokens that stand for spans of a text: <extra_id_0>, <extra_id_1> and so on, as far as there are
        any. T5 counts them from the top of its vocabulary."""
        found = list[int]()
        while f"<extra_id_{len(found)}>" in self.special:
            found.append(self.special[f"<extra_id_{len(found)}>"])
        return tuple(found)

    @cached_property
    def is_text(self) -> NDArray[np.bool_]:
        """(size,) by id."""
        found = np.zeros(self.size, np.bool_)
        found[self.text] = True
        return found

    def role(self, name: str, needed: str) -> int:
        """The id of the special token for this. DataError if there is none; `needed` says what needs it."""
        if name not in self.roles:
            known = ", ".join(sorted(self.special)) or "none"
            raise DataError(
                f"{self.source} has no {name} token, which {needed} needs (its special tokens: {known}): name it in "
                f'tokenizer_config.json, such as "{name}_token": "[{name.upper()}]", or take another tokenizer'
            )
        return self.roles[name]

    def word_starts(self, tokens: NDArray[np.integer]) -> NDArray[np.int64]:
        """(n,) the position at which the word of each token begins; special tokens are words of their own. DataError if
        the tokenizer does not say."""
        if self.continues is None or self.leaves_open is None:
            raise DataError(f"{self.source}: its pieces do not say where words begin, which whole words need")
        text = self.is_text[tokens]
        goes_on = self.continues[tokens] & text
        goes_on[1:] &= (self.leaves_open[tokens] & text)[:-1]
        goes_on[:1] = False
        return np.maximum.accumulate(np.where(goes_on, 0, np.arange(len(tokens))))


@dataclass(frozen=True)
class SampleFacts:
    """What an objective knows when it makes its transform: the run's seed and sequence length, the vocabulary, which is
    read from the tokenizer when it is asked for (DataError if there is none), and the token with which the texts of the
    model's decoder begin (None: it has no decoder beside an encoder). room: rows of each stream of numbers that a
    sequence has room for (data.room)."""

    seed: int
    seq_length: int
    read_vocabulary: Callable[[], Vocabulary]
    decoder_start: int | None = None
    room: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return self.read_vocabulary()

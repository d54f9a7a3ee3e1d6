"""Span corruption: an encoder reads a text with holes, and a decoder says what was there (Raffel et al., "Exploring the
limits of transfer learning with a unified text-to-text transformer", 2020, section 3.1.4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError, Problem
from phalanx.base.rules import problem, within
from phalanx.nn.objective import TokenObjective, cross_entropy, objective
from phalanx.sequence.sample import ENCODER, LostText, Sample, SampleFacts, SampleTransform, Vocabulary, two_texts

LONGEST = 2**24  # tokens that an encoder may read, as many as train.seq_length may be
LEAST = 2  # tokens of a document that can be corrupted: one stays, one goes
Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SpanConfig:
    noise: float = 0.15
    """span: share of the tokens of each document that the encoder does not see and the decoder says."""
    mean_length: float = 3.0
    """span: mean length of the spans in which they lie."""
    encoder_length: int | None = None
    """span: tokens of each sequence that the encoder reads; those of the decoder are train.seq_length."""


@objective("span")
class SpanCorruption(TokenObjective):
    """Cross entropy of the decoder's tokens: for each span its sentinel and its tokens, and the end of the text."""

    Config: ClassVar[Any] = SpanConfig
    makes_beside = (ENCODER,)
    token_loss = staticmethod(cross_entropy)  # identifies the fused op for the head

    @classmethod
    def check(cls, config: Any) -> list[Problem]:
        found = within("task", config, "noise", "(0, 1)", (0.15, 0.5))
        return found + within("task", config, "mean_length", "[1, inf)", (3.0,)) + check_encoder_length(config)

    @classmethod
    def shrunk(cls, config: Any, seq_length: int) -> Any:
        return replace(config, encoder_length=2 * seq_length)

    @property
    def beside(self) -> Mapping[str, int]:
        return {ENCODER: self.config.encoder_length or 1}

    def rates(self, vocabulary: Vocabulary) -> tuple[SpanRates, ...]:
        """Those between which documents draw. DataError if the tokenizer lacks a token that they need."""
        return (SpanRates(self.config.noise, self.config.mean_length),)

    def transform(self, facts: SampleFacts) -> SampleTransform:
        vocabulary, name = facts.vocabulary, f"task.name={self.config.name}"
        start = facts.decoder_start
        if start is None:
            raise DataError(f"{name} is for models with an encoder and a decoder")
        made = Corruption(
            facts.seed,
            self.rates(vocabulary),
            Rooms(self.config.encoder_length, facts.seq_length),
            Marks(vocabulary.sentinels, vocabulary.role("eos", name), start, vocabulary.roles.get("pad", 0)),
        )
        if len(vocabulary.sentinels) < made.most_spans:
            raise DataError(
                f"{vocabulary.source} has {len(vocabulary.sentinels) or 'no'} sentinels (<extra_id_0>, <extra_id_1>, "
                f"...), and with {name} a document of {made.longest} tokens may have {made.most_spans} spans, each "
                "with one of its own: take a tokenizer that has them, or less to hide (task.noise, task.mean_length, a "
                "smaller task.encoder_length)"
            )
        return made


def check_encoder_length(config: Any) -> list[Problem]:
    found = list[Problem]()
    if config.encoder_length is None or config.encoder_length < 4:
        rule = "is required: tokens that the encoder reads of each sequence, at least 4"
        found.append(problem("task", config, "encoder_length", rule, {}, (512,)))
    elif config.encoder_length > LONGEST:
        found.append(problem("task", config, "encoder_length", f"must be <= {LONGEST}", {}, (LONGEST,)))
    return found


class Counts(NamedTuple):
    """Of one document: tokens that are hidden, and spans in which they lie."""

    hidden: int
    spans: int


@dataclass(frozen=True)
class SpanRates:
    """How much of a document is hidden: a fixed number of tokens and of spans, given its length. One span is at the
    document's end. `mode`: a token with which the encoder's text begins; None: with the document."""

    noise: float
    mean_length: float
    mode: int | None = None

    def of(self, length: int) -> Counts:
        """Of a document of at least LEAST tokens. Something stays, something goes, and each span follows on something
        that stays."""
        hidden = min(max(int(np.round(length * self.noise)), 1), length - 1)
        spans = max(int(np.round(hidden / self.mean_length)), 1)
        return Counts(hidden, min(spans, hidden, length - hidden))

    def sizes(self, length: int) -> tuple[int, int]:
        """Tokens of the encoder's and of the decoder's text: a sentinel for each span, and an end."""
        hidden, spans = self.of(length)
        return length - hidden + spans + 1 + (self.mode is not None), hidden + spans + 1


class Rooms(NamedTuple):
    """Tokens for which there is room in a sample."""

    encoder: int
    decoder: int

    def without(self, sizes: tuple[int, int]) -> Rooms:
        return Rooms(self.encoder - sizes[0], self.decoder - sizes[1])

    def hold(self, sizes: tuple[int, int]) -> bool:
        return sizes[0] <= self.encoder and sizes[1] <= self.decoder


class Marks(NamedTuple):
    """Ids that are no text: of spans in order, of the end and the beginning of texts, of padding."""

    sentinels: tuple[int, ...]
    end: int
    start: int
    padding: int


class Fitted(NamedTuple):
    """A document (n,) without the token that ends it, the number of its first tokens that find room (0: it is left
    out), its rates, and the words drawn for its tokens."""

    tokens: Ids
    kept: int
    rates: SpanRates
    draws: tuple[Ids, ...]


@dataclass(frozen=True)
class Corruption(SampleTransform):
    """Each document of a sample becomes a text of the encoder and one of the decoder with the same number. Which of the
    rates it has, and where spans lie, is drawn by (seed, sample, document)."""

    seed: int
    rates: tuple[SpanRates, ...]
    rooms: Rooms
    marks: Marks

    @cached_property
    def longest(self) -> int:
        """The length of the longest document whose texts both fit, at any rates. DataError if none does."""
        if not all(self.rooms.hold(each.sizes(LEAST)) for each in self.rates):
            raise DataError(f"no document of {LEAST} tokens fits into {self.rooms}: enlarge train.seq_length")
        return min(_longest(each, self.rooms, self.rooms.encoder + self.rooms.decoder) for each in self.rates)

    @property
    def most_spans(self) -> int:
        """Of a document that fits."""
        return max(each.of(self.longest).spans for each in self.rates)

    def reads(self, seq_length: int) -> int:
        return self.longest

    def __call__(self, sample: Sample) -> Sample:
        """Documents that find no room at the end of a sample are cut, or left out."""
        pairs = [self.texts(d.tokens[: d.kept], d.rates, d.draws) for d in self.fitted(sample) if d.kept]
        return two_texts(sample.number, pairs, self.rooms, (self.marks.start, self.marks.padding))

    def lost(self, sample: Sample) -> LostText:
        found = [(len(d.tokens), d.kept) for d in self.fitted(sample)]
        return LostText(
            documents=len(found),
            cut=sum(0 < kept < length for length, kept in found),
            left_out=sum(kept == 0 for _, kept in found),
            tokens=sum(length for length, _ in found),
            lost_tokens=sum(length - kept for length, kept in found),
        )

    def fitted(self, sample: Sample) -> Iterator[Fitted]:
        """The documents of a sample in order, each with what of it finds room behind those before it."""
        rooms = self.rooms
        for number, (first, stop) in enumerate(sample.documents):
            tokens = np.array(sample.tokens[first:stop], np.int64)
            if len(tokens) and tokens[-1] == self.marks.end:
                tokens = tokens[:-1]
            if not len(tokens):
                continue
            draws = self.draws(len(tokens), sample.number, number)
            rates = self.rates[int(draws[2][0]) * len(self.rates) >> 32]
            kept = _longest(rates, rooms, len(tokens))
            yield Fitted(tokens, kept, rates, draws)
            rooms = rooms.without(rates.sizes(kept)) if kept else rooms

    def texts(self, tokens: Ids, rates: SpanRates, draws: tuple[Ids, ...]) -> tuple[Ids, Ids]:
        """What the encoder reads of a document, and what the decoder says."""
        hidden = noise_mask(rates.of(len(tokens)), len(tokens), draws)
        starts = hidden & ~np.concatenate([[False], hidden[:-1]])
        sentinels = np.array(self.marks.sentinels, np.int64)[np.cumsum(starts) - 1]
        seen = np.where(starts, sentinels, tokens)[~hidden | starts]
        said = np.stack((sentinels, tokens), 1)[np.stack((starts, hidden), 1)]
        mode = [] if rates.mode is None else [rates.mode]
        return np.array([*mode, *seen, self.marks.end], np.int64), np.append(said, self.marks.end)

    def draws(self, length: int, sample: int, document: int) -> tuple[Ids, ...]:
        """Four 32-bit words for each token of a document."""
        from phalanx.base.rng import key_of, rounds  # start-up time: it imports torch

        counter = (np.arange(length), *(np.full(1, n, np.int64) for n in (sample & 0xFFFFFFFF, sample >> 32, document)))
        drawn: tuple[Ids, ...] = rounds(counter, key_of(self.seed, "span"))
        return drawn


def _longest(spans: SpanRates, rooms: Rooms, length: int) -> int:
    """The largest number of tokens, up to `length`, whose texts fit into the rooms: sizes never shrink with length. 0
    if not even LEAST do."""
    low, high = LEAST - 1, max(length, LEAST - 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if rooms.hold(spans.sizes(middle)) else (low, middle - 1)
    return low if low >= LEAST else 0


def noise_mask(counts: Counts, length: int, draws: tuple[Ids, ...]) -> NDArray[np.bool_]:
    """(length,) which tokens are hidden: spans of what stays and of what goes take turns, beginning with what stays.
    All ways to cut each of both into spans of at least one token are equally likely."""
    stays = segment_lengths(length - counts.hidden, counts.spans, draws[0])
    goes = segment_lengths(counts.hidden, counts.spans, draws[1])
    return np.repeat(np.tile([False, True], counts.spans), np.stack((stays, goes), 1).reshape(-1))


def segment_lengths(items: int, count: int, draws: Ids) -> Ids:
    """(count,) lengths >= 1 that sum to `items`: of the items - 1 borders, those with the smallest draws."""
    borders = np.sort(np.argsort(draws[: items - 1], kind="stable")[: count - 1]) + 1
    return np.diff(np.concatenate([[0], borders, [items]]))

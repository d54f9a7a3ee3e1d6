"""Pairs of texts for encoders: whether the second follows the first (next sentence; Devlin et al., "BERT", 2018), or
which of two neighbours comes first (sentence order; Lan et al., "ALBERT", 2020). Part of task.name=mlm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.base.dataclass import dataclass
from phalanx.sequence.sample import IGNORE, LostText, Sample, SampleTransform, sample_of

PairKind = Literal["next", "order"]
Ids = NDArray[np.int64]
MARKS = 3  # tokens that a document gains: [CLS] first [SEP] second [SEP]
LEAST = 2  # tokens of a document that is cut in two


class PairMarks(NamedTuple):
    """Special tokens: the first of a pair, the one behind each text, padding; and those that may end a document."""

    first: int
    end: int
    padding: int
    ends: tuple[int, ...]


class Halves(NamedTuple):
    """A document that is cut in two, the words drawn for it, and the number of its tokens before it was cut short."""

    first: Ids
    second: Ids
    draws: tuple[int, ...]
    length: int


@dataclass(frozen=True)
class SentencePairs(SampleTransform):
    """Each document of a sample is cut in two, anywhere between two tokens, and becomes [CLS] first [SEP] second [SEP]
    with a class at its first token. Documents that find no room at the end of a sample are cut or left out.

    next   0: the second text follows the first, 1: it is that of another document. The documents of a sample are paired
           at random, and half of the pairs exchange their second texts; one that is left over has no class
    order  0: the texts stand in their order, 1: they are exchanged, which half of the documents are

    All is drawn by (seed, sample, document).
    """

    seed: int
    kind: PairKind
    marks: PairMarks

    def reads(self, seq_length: int) -> int:
        """A sample of one document has room for its marks."""
        return seq_length - MARKS

    def lost(self, sample: Sample) -> LostText:
        found = list(self.halves(sample))
        kept = [len(half.first) + len(half.second) for half in found]
        return LostText(
            documents=len(found),
            cut=sum(0 < n < half.length for n, half in zip(kept, found)),
            left_out=kept.count(0),
            tokens=sum(half.length for half in found),
            lost_tokens=sum(half.length - n for n, half in zip(kept, found)),
        )

    def __call__(self, sample: Sample) -> Sample:
        found = [half for half in self.halves(sample) if len(half.first)]
        arranged = self.exchanged(found) if self.kind == "next" else [self.ordered(half) for half in found]
        m, texts, segments, labels = self.marks, list[Ids](), list[Ids](), list[int]()
        for first, second, label in arranged:
            texts.append(np.array([m.first, *first, m.end, *second, m.end], np.int64))
            segments.append(np.repeat((0, 1), (len(first) + 2, len(second) + 1)))
            labels.append(label)
        room = len(sample.tokens) + MARKS
        made = sample_of(sample.number, texts, room, m.padding)
        whole = np.zeros(room, np.int64)
        whole[: made.filled] = np.concatenate([*segments, np.empty(0, np.int64)])
        classes = np.full(room, IGNORE, np.int64)
        classes[[first for first, _ in made.documents][: len(labels)]] = labels
        return replace(made, segments=whole, pair_labels=classes)

    def halves(self, sample: Sample) -> Iterator[Halves]:
        """The documents of a sample in order, as far as they find room; both texts are empty of those that do not."""
        left = len(sample.tokens) + MARKS
        for number, (first, stop) in enumerate(sample.documents):
            tokens = self.bare(np.array(sample.tokens[first:stop], np.int64))
            if not len(tokens):
                continue
            draws = self.draws(sample.number, number)
            kept = min(len(tokens), left - MARKS)
            if kept < LEAST:
                yield Halves(tokens[:0], tokens[:0], draws, len(tokens))
                continue
            border = 1 + (draws[0] * (kept - 1) >> 32)
            yield Halves(tokens[:border], tokens[border:kept], draws, len(tokens))
            left -= kept + MARKS

    def bare(self, tokens: Ids) -> Ids:
        """A document without the marks that it has."""
        tokens = tokens[1:] if len(tokens) and tokens[0] == self.marks.first else tokens
        return tokens[:-1] if len(tokens) and tokens[-1] in self.marks.ends else tokens

    def ordered(self, half: Halves) -> tuple[Ids, Ids, int]:
        """(first text, second text, class)."""
        if half.draws[1] < 1 << 31:
            return half.first, half.second, 0
        return half.second, half.first, 1

    def exchanged(self, found: list[Halves]) -> list[tuple[Ids, Ids, int]]:
        """The same of all documents of a sample."""
        made = [(half.first, half.second, 0 if len(found) > 1 else IGNORE) for half in found]
        order = np.argsort([half.draws[2] for half in found], kind="stable").tolist()
        if len(order) % 2 and made:
            last = order.pop()
            made[last] = (*made[last][:2], IGNORE)
        for a, b in zip(order[::2], order[1::2]):
            if found[a].draws[1] >= 1 << 31:
                made[a], made[b] = (found[a].first, found[b].second, 1), (found[b].first, found[a].second, 1)
        return made

    def draws(self, sample: int, document: int) -> tuple[int, ...]:
        """Four 32-bit words of a document."""
        from phalanx.base.rng import key_of, rounds  # start-up time: it imports torch

        counter = tuple(np.full(1, n, np.int64) for n in (document, sample & 0xFFFFFFFF, sample >> 32, 0))
        return tuple(int(word[0]) for word in rounds(counter, key_of(self.seed, "sentence pairs")))


@dataclass(frozen=True)
class PairedMasking(SampleTransform):
    """Pairs of texts, then hidden tokens in them. The class of a pair counts as much as the tokens hidden in it
    (pair_weights), so that losses of both kinds are means over the hidden tokens of the step."""

    pairs: SentencePairs
    masking: SampleTransform

    def reads(self, seq_length: int) -> int:
        return self.pairs.reads(seq_length)

    def lost(self, sample: Sample) -> LostText:
        return self.pairs.lost(sample)

    def label_rows(self, tokens: int) -> int:
        return self.masking.label_rows(tokens)

    def __call__(self, sample: Sample) -> Sample:
        made = self.masking(self.pairs(sample))
        weights, hidden = np.zeros(len(made.tokens), np.int64), made.labels != IGNORE
        for first, stop in made.documents:
            weights[first] = hidden[first:stop].sum()
        return replace(made, pair_weights=weights)

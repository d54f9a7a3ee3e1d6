"""Masked language modelling: some tokens are hidden, and the model, which reads both ways, says what they were (Devlin
et al., "BERT", 2018)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError, Problem
from phalanx.base.rules import within
from phalanx.engine.objectives.sentence_pairs import (
    LEAST,
    MARKS,
    PairedMasking,
    PairKind,
    PairMarks,
    SentencePairs,
)
from phalanx.nn.objective import TokenObjective, cross_entropy, objective
from phalanx.sequence.sample import IGNORE, Sample, SampleFacts, SampleTransform, Vocabulary

NAME = "task.name=mlm"
DEVIATIONS, ROWS, MOST = 12.0, 128, 0.75  # of room_for_hidden


@dataclass(frozen=True, kw_only=True)
class MLMConfig:
    rate: float = 0.15
    """mlm: share of the tokens (with whole_words, of the words) that are to be predicted. ModernBERT took 0.3."""
    replace: Literal["mixed", "mask"] = "mixed"
    """mlm: what stands in their place: mixed (as in BERT: the mask token for 80 %, any token for 10 %, the token
    itself for 10 %), or mask (the mask token for all)."""
    whole_words: bool = False
    """mlm: hide all pieces of a word or none. Words begin where the tokenizer's pieces say so."""
    pairs: PairKind | None = None
    """mlm: cut each document in two texts, [CLS] first [SEP] second [SEP], and let the head say whether the second
    follows the first (next, as in BERT) or whether they stand in their order (order, as in ALBERT); needs
    model.head=pretraining."""


@objective("mlm")
class MLM(TokenObjective):
    """Cross entropy of the hidden tokens, a mean over those of the step. Special tokens and padding are never
    hidden."""

    Config = MLMConfig
    both_ways = True
    token_loss = staticmethod(cross_entropy)  # identifies the fused op for the head

    @classmethod
    def check(cls, config: Any) -> list[Problem]:
        return within("task", config, "rate", "(0, 1]", (0.15, 0.3))

    @property
    def makes_pairs(self) -> bool:
        return self.config.pairs is not None

    def label_rows(self, tokens: int) -> int:
        return room_for_hidden(tokens, self.config.rate)

    @property
    def label_share(self) -> float:
        return float(self.config.rate)

    def transform(self, facts: SampleFacts) -> SampleTransform:
        vocabulary, c = facts.vocabulary, self.config
        mask = vocabulary.role("mask", NAME)
        if c.whole_words:
            vocabulary.word_starts(np.zeros(0, np.int64))  # refused now if pieces do not say where words begin
        masking = Masking(vocabulary, mask, facts.seed, c.rate, c.replace == "mixed", c.whole_words)
        return masking if c.pairs is None else PairedMasking(pairs_of(facts, c.pairs), masking)


def room_for_hidden(tokens: int, rate: float) -> int:
    """Rows for the hidden ones of so many tokens: twelve standard deviations more than there are on average, if each
    were drawn by itself (words are drawn whole: their pieces deviate about twice as far together), in multiples of
    ROWS; 0 where that is most of them."""
    mean = rate * tokens
    rows = ROWS * math.ceil((mean + DEVIATIONS * math.sqrt(mean * (1 - rate))) / ROWS)
    return rows if rows <= MOST * tokens else 0


def pairs_of(facts: SampleFacts, kind: PairKind) -> SentencePairs:
    """DataError if the tokenizer lacks the special tokens of pairs, or sequences are too short for one."""
    roles, name = facts.vocabulary.roles, f"task.pairs={kind}"
    first, end = (facts.vocabulary.role(role, name) for role in ("cls", "sep"))
    if facts.seq_length < MARKS + LEAST:
        raise DataError(f"train.seq_length={facts.seq_length}: {name} adds {MARKS} tokens to a document")
    ends = tuple(roles[role] for role in ("sep", "eos") if role in roles)
    return SentencePairs(facts.seed, kind, PairMarks(first, end, roles.get("pad", 0), ends))


@dataclass(frozen=True)
class Masking(SampleTransform):
    """Which tokens are hidden, and by what: drawn by (seed, sample, position); for whole words, by the position at
    which the word begins.

    some_stay   of the hidden tokens, 10 % become any token of text and 10 % stay
    """

    vocabulary: Vocabulary
    mask: int
    seed: int
    rate: float
    some_stay: bool
    whole_words: bool

    def label_rows(self, tokens: int) -> int:
        return room_for_hidden(tokens, self.rate)

    def __call__(self, sample: Sample) -> Sample:
        tokens = np.array(sample.tokens, np.int64)
        places = np.arange(len(tokens))
        choose, how, which, _ = self._words(sample.number, places)
        by = self._word_starts(sample, tokens) if self.whole_words else places
        hidden = (choose[by] < int(self.rate * 2.0**32)) & self.vocabulary.is_text[tokens] & (places < sample.filled)
        labels = np.where(hidden, tokens, IGNORE)
        masked = hidden & (how < int(0.8 * 2.0**32)) if self.some_stay else hidden
        other = hidden & ~masked & (how < int(0.9 * 2.0**32)) if self.some_stay else np.zeros_like(hidden)
        text = self.vocabulary.text
        tokens = np.where(masked, self.mask, np.where(other, text[which % len(text)], tokens))
        return replace(sample, tokens=tokens, labels=labels)

    def _word_starts(self, sample: Sample, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """A word ends with its document at the latest."""
        spans = sample.documents
        found = [first + self.vocabulary.word_starts(tokens[first:stop]) for first, stop in spans]
        return np.concatenate([*found, np.arange(sample.filled, len(tokens))])

    def _words(self, number: int, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Four 32-bit words for each position of a sample."""
        from phalanx.base.rng import key_of, rounds  # start-up time: it imports torch

        low, high = (np.full(1, word, np.int64) for word in (number & 0xFFFFFFFF, number >> 32))
        found: tuple[NDArray[np.int64], ...] = rounds(
            (places, low, high, np.zeros(1, np.int64)), key_of(self.seed, "mlm")
        )
        return found

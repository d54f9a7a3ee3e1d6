"""Fill-in-the-middle: the middle of a document stands behind its end, so that a model that predicts the next token
learns to fill a gap (Bavarian et al., "Efficient training of language models to fill in the middle", 2022)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError, Problem
from phalanx.base.rules import within
from phalanx.nn.objective import TokenObjective, cross_entropy, objective
from phalanx.sequence.sample import IGNORE, Sample, SampleFacts, SampleTransform

NAME = "task.name=fim"
MARKS = 3  # tokens that a document gains
LEAST = 3  # tokens of a document that is cut in three
Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class FIMConfig:
    rate: float = 0.5
    """fim: share of the documents whose middle is moved; the others stay as they are."""
    spm: float = 0.5
    """fim: of these, the share in the order suffix, prefix, middle (SPM); others have prefix, suffix, middle (PSM)."""


@objective("fim")
class FillInTheMiddle(TokenObjective):
    """Cross entropy of the next token, of documents whose parts, in some of them, stand in another order."""

    Config = FIMConfig
    token_loss = staticmethod(cross_entropy)  # identifies the fused op for the head

    @classmethod
    def check(cls, config: Any) -> list[Problem]:
        return within("task", config, "rate", "(0, 1]", (0.5, 0.9)) + within("task", config, "spm", "[0, 1]", (0.5,))

    def transform(self, facts: SampleFacts) -> SampleTransform:
        roles = facts.vocabulary.role
        marks = GapMarks(*(roles(f"fim_{part}", NAME) for part in ("prefix", "middle", "suffix")))
        if facts.seq_length <= MARKS:
            raise DataError(f"train.seq_length={facts.seq_length}: {NAME} adds {MARKS} tokens to a document")
        end = facts.vocabulary.roles.get("eos")
        return MiddleLast(facts.seed, marks, self.config.rate, self.config.spm, end)


class GapMarks(NamedTuple):
    """The tokens before the parts of a document."""

    prefix: int
    middle: int
    suffix: int


@dataclass(frozen=True)
class MiddleLast(SampleTransform):
    """What becomes of a document is drawn by (seed, sample, document): whether its middle is moved, the order, and both
    borders, each between any two tokens or at an end.

    PSM  <prefix> prefix <suffix> suffix <middle> middle
    SPM  <prefix> <suffix> suffix <middle> prefix middle

    end  the token that ends documents; where one has it, it stays the last. None: the tokenizer has none
    """

    seed: int
    marks: GapMarks
    rate: float
    spm: float
    end: int | None = None

    def reads(self, seq_length: int) -> int:
        """A sample of one document has room for its marks."""
        return seq_length - MARKS

    def __call__(self, sample: Sample) -> Sample:
        """Of several documents the last ones may find no room for their marks: they stay as they are."""
        room, spare = self.length_of(sample), self.length_of(sample) - sample.filled
        texts, labels = list[Ids](), list[Ids]()
        for number, (first, stop) in enumerate(sample.documents):
            tokens, own = np.array(sample.tokens[first:stop], np.int64), np.array(sample.labels[first:stop])
            if spare >= MARKS:
                moved = self.moved(tokens, sample.number, number)
                if moved is not None:
                    spare, tokens = spare - MARKS, moved
                    own = np.append(moved[1:], IGNORE)
            texts.append(tokens)
            labels.append(own)
        ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        filled = int(ends[-1]) if len(ends) else 0
        made = [np.zeros(room, np.int64), np.full(room, IGNORE, np.int64)]
        for found, parts in zip(made, (texts, labels)):
            found[:filled] = np.concatenate([*parts, np.empty(0, np.int64)])
        bordered = len(sample.starts) > 0
        starts = ends[ends < room] if bordered or filled < room else np.empty(0, np.int64)
        return replace(sample, tokens=made[0], labels=made[1], starts=starts, filled=filled)

    def length_of(self, sample: Sample) -> int:
        """Tokens of the sample that it becomes."""
        return len(sample.tokens) + MARKS

    def moved(self, tokens: Ids, sample: int, document: int) -> Ids | None:
        """The document with its middle at its end; None: it stays."""
        from phalanx.base.rng import key_of, rounds  # start-up time: it imports torch

        counter = tuple(np.full(1, n, np.int64) for n in (document, sample & 0xFFFFFFFF, sample >> 32, 0))
        chosen, order, *borders = (int(word[0]) for word in rounds(counter, key_of(self.seed, "fim")))
        if len(tokens) < LEAST or chosen >= int(self.rate * 2.0**32):
            return None
        a, b = sorted(word * (len(tokens) + 1) >> 32 for word in borders)
        prefix, middle, suffix = tokens[:a], tokens[a:b], tokens[b:]
        m, end = self.marks, suffix[:0]
        if len(suffix) and suffix[-1] == self.end:
            suffix, end = suffix[:-1], suffix[-1:]
        if order < int(self.spm * 2.0**32):
            return np.array([m.prefix, m.suffix, *suffix, m.middle, *prefix, *middle, *end], np.int64)
        return np.array([m.prefix, *prefix, m.suffix, *suffix, m.middle, *middle, *end], np.int64)

"""Prefix language modelling: a decoder reads the beginning of a document both ways and predicts the rest (Liu et al.,
2018; Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text transformer", 2020, section
3.2)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from phalanx.base.dataclass import dataclass
from phalanx.nn.objective import TokenObjective, cross_entropy, objective
from phalanx.sequence.sample import IGNORE, Sample, SampleFacts, SampleTransform

LEAST = 2  # tokens of a document that is cut in two


@dataclass(frozen=True, kw_only=True)
class PrefixConfig:
    train_on: Literal["answers", "last_answer"] = "last_answer"
    """prefix: of chats, the tokens with a loss; what comes before the first of them is read both ways."""


@objective("prefix")
class PrefixLM(TokenObjective):
    """Cross entropy of the next token behind each document's prefix, whose tokens read each other in every layer."""

    Config = PrefixConfig
    makes_prefix = True
    token_loss = staticmethod(cross_entropy)  # identifies the fused op for the head

    @property
    def train_on(self) -> Any:
        return self.config.train_on

    def transform(self, facts: SampleFacts) -> SampleTransform:
        return Prefixing(facts.seed)


@dataclass(frozen=True)
class Prefixing(SampleTransform):
    """Which first tokens of each document are its prefix. Of a chat: those before the first token with a loss. Of
    another text of n tokens: 1 to n - 1, equally likely, drawn by (seed, sample, document)."""

    seed: int

    def __call__(self, sample: Sample) -> Sample:
        labels, prefix = np.array(sample.labels), np.zeros(len(sample.tokens), np.int64)
        for number, (first, stop) in enumerate(sample.documents):
            length = self.prefix_of(labels[first:stop], sample.number, number)
            prefix[first : first + length] = 1
            labels[first : first + length - 1] = IGNORE  # the last one predicts the first token of the rest
        return replace(sample, labels=labels, prefix=prefix)

    def prefix_of(self, labels: np.ndarray, sample: int, document: int) -> int:
        """Tokens of a document's prefix, from its labels (n,)."""
        from phalanx.base.rng import key_of, rounds  # start-up time: it imports torch

        trained = np.flatnonzero(labels != IGNORE)
        if not len(trained) or len(labels) < LEAST:
            return 0
        if trained[0] > 0:
            return int(trained[0]) + 1  # of a chat
        counter = tuple(np.full(1, n, np.int64) for n in (document, sample & 0xFFFFFFFF, sample >> 32, 0))
        word = int(rounds(counter, key_of(self.seed, "prefix"))[0][0])
        return 1 + (word * (len(labels) - 1) >> 32)

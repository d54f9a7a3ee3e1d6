"""Sequence to sequence: an encoder reads what a chat has before its last answer, and a decoder says the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError, Problem
from phalanx.engine.objectives.span import check_encoder_length
from phalanx.nn.objective import TokenObjective, cross_entropy, objective
from phalanx.sequence.sample import ENCODER, IGNORE, Sample, SampleFacts, SampleTransform, two_texts

Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig:
    encoder_length: int | None = None
    """seq2seq: tokens of each sequence that the encoder reads; those of the decoder are train.seq_length."""


@objective("seq2seq")
class Seq2Seq(TokenObjective):
    """Cross entropy of the answers, a mean over their tokens in the step."""

    Config = Seq2SeqConfig
    makes_beside = (ENCODER,)
    token_loss = staticmethod(cross_entropy)  # identifies the fused op for the head

    @classmethod
    def check(cls, config: Any) -> list[Problem]:
        return check_encoder_length(config)

    @classmethod
    def shrunk(cls, config: Any, seq_length: int) -> Any:
        return replace(config, encoder_length=2 * seq_length)

    @property
    def beside(self) -> Mapping[str, int]:
        return {ENCODER: self.config.encoder_length or 1}

    @property
    def train_on(self) -> Literal["last_answer"]:
        return "last_answer"

    def transform(self, facts: SampleFacts) -> SampleTransform:
        if facts.decoder_start is None:
            raise DataError("task.name=seq2seq is for models with an encoder and a decoder")
        roles = facts.vocabulary.roles
        marks = facts.decoder_start, roles.get("pad", 0)
        return ReadAndSay((self.config.encoder_length, facts.seq_length), marks, roles.get("eos"))


@dataclass(frozen=True)
class ReadAndSay(SampleTransform):
    """Of each chat the encoder reads what comes before the trained tokens and, if the tokenizer has one, the end of a
    text; the decoder says the trained tokens. rooms, marks: those of sequence.sample.two_texts; end: of a text."""

    rooms: tuple[int, int]
    marks: tuple[int, int]
    end: int | None

    def reads(self, seq_length: int) -> int:
        """However tokens are divided, both texts then fit: an answer has a token, in whose place is the end of what is
        read."""
        return min(self.rooms)

    def __call__(self, sample: Sample) -> Sample:
        pairs = list[tuple[Ids, Ids]]()
        for first, stop in sample.documents:
            labels = np.array(sample.labels[first:stop], np.int64)
            trained = np.flatnonzero(labels != IGNORE)
            if len(trained):
                read = np.array(sample.tokens[first : first + trained[0] + 1], np.int64)
                if self.end is not None and read[-1] != self.end:
                    read = np.append(read, self.end)
                pairs.append((read, labels[trained]))
        return two_texts(sample.number, pairs, self.rooms, self.marks)

"""Transcription: an encoder hears a recording, and a decoder says its text (Radford et al., "Robust speech recognition
via large-scale weak supervision", 2022)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.nn.objective import TokenObjective, cross_entropy, objective
from phalanx.sequence.sample import (
    IGNORE,
    SOUND,
    Sample,
    SampleFacts,
    SampleTransform,
    Units,
    filled_up,
    sample_of,
)


@dataclass(frozen=True, kw_only=True)
class TranscribeConfig:
    """It has no fields of its own: data.room.sound says how much an encoder hears of each sequence."""


@objective("transcribe")
class Transcribe(TokenObjective):
    """Cross entropy of the texts, a mean over their tokens in the step."""

    Config = TranscribeConfig
    makes_beside = (SOUND,)
    token_loss = staticmethod(cross_entropy)  # identifies the fused op for the head

    @property
    def train_on(self) -> Literal["last_answer"]:
        return "last_answer"

    def transform(self, facts: SampleFacts) -> SampleTransform:
        if SOUND not in facts.room:
            raise DataError("task.name=transcribe is for models with an encoder of sound, such as whisper")
        return HearAndSay(facts.seq_length, facts.room[SOUND], facts.vocabulary.roles.get("pad", 0))


@dataclass(frozen=True)
class HearAndSay(SampleTransform):
    """Recording number k of a sample belongs to its document number k. seq_length, rows: tokens and rows of a sequence;
    padding: the token behind the texts."""

    seq_length: int
    rows: int
    padding: int

    def __call__(self, sample: Sample) -> Sample:
        documents, sound = sample.documents, sample.units.get(SOUND)
        count = 0 if sound is None else len(sound.sizes)
        if sound is None or count != len(documents):
            raise DataError(f"sample {sample.number} has {len(documents)} texts and {count} recordings")
        spans = [(first, max(first + 1, stop - 1)) for first, stop in documents]  # the last token has no label
        read = [np.array(sample.tokens[first:stop], np.int64) for first, stop in spans]
        said = [np.array(sample.labels[first:stop], np.int64) for first, stop in spans]
        made = sample_of(sample.number, read, self.seq_length, self.padding)
        labels = filled_up(said, self.seq_length, IGNORE)
        return replace(made, labels=labels, beside={SOUND: self._heard(sample.number, sound)})

    def _heard(self, number: int, sound: Units) -> Sample:
        """The recordings one after another, and rows of zeros."""
        made = sample_of(number, [np.zeros(size, np.int64) for size in sound.sizes], self.rows, 0)
        more = self.rows - len(sound.values)
        return replace(made, values=np.concatenate([sound.values, np.zeros((more, sound.values.shape[1]), np.float32)]))

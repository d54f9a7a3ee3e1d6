"""Made-up documents of 1 to `longest` tokens, equally likely, end to end: a source of data for benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import phalanx as px


@dataclass(frozen=True, kw_only=True)
class DocumentsConfig:
    longest: int = 1023


class Documents(px.DataSource):
    Config = DocumentsConfig

    def sample(self, number: int) -> NDArray[np.int64]:
        return self.draws(number).integers(0, self.start.vocab_size, self.start.seq_length + 1)

    def document_starts(self, number: int) -> list[int]:
        starts = np.cumsum(self.draws(number, 1).integers(1, self.config.longest + 1, self.start.seq_length))
        return [int(start) for start in starts if start <= self.start.seq_length]

    def draws(self, number: int, what: int = 0) -> np.random.Generator:
        return np.random.default_rng((self.start.seed, self.start.part == "train", number, what))

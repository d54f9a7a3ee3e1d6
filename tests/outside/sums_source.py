"""A data source of another package, in one file: additions in digits, made from the sample's number alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import phalanx as px

PLUS, EQUALS = 10, 11


@dataclass(frozen=True, kw_only=True)
class SumsConfig:
    largest: int = 999
    samples: int | None = None


@px.source("sums")
class Sums(px.DataSource):
    Config = SumsConfig

    def __init__(self, start: px.SourceStart, config: SumsConfig):
        super().__init__(start, config)
        self.samples = config.samples

    def sample(self, number: int) -> np.ndarray:
        return np.concatenate(self.additions(number))[: self.start.seq_length + 1]

    def document_starts(self, number: int) -> list[int]:
        ends = np.cumsum([len(addition) for addition in self.additions(number)])
        return [int(end) for end in ends if end <= self.start.seq_length]

    def additions(self, number: int) -> list[np.ndarray]:
        """As many as fill a sample."""
        draw = np.random.default_rng((self.start.seed, self.start.part == "train", number))
        found: list[np.ndarray] = []
        while sum(map(len, found)) <= self.start.seq_length:
            a, b = draw.integers(0, self.config.largest, 2)
            digits = [[int(d) for d in str(n)] for n in (a, b, a + b)]
            found.append(np.array([*digits[0], PLUS, *digits[1], EQUALS, *digits[2]]))
        return found


class Wrong(Sums):
    """Its samples are too short, or have foreign tokens."""

    def sample(self, number: int) -> np.ndarray:
        return super().sample(number)[1:] if self.config.largest < 5000 else super().sample(number) + 5000


class Unfinished(px.DataSource):
    """Has no `sample`."""

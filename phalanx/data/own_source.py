"""DataSource: what a file must define to train on samples of its own, and how the loader reads it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.base.own_fields import NoFields, made_of
from phalanx.base.registry import find, registers
from phalanx.data.config import DataConfig
from phalanx.data.index import Corpus
from phalanx.data.mixture import make_key
from phalanx.data.packing import Packing
from phalanx.data.sources import NO_POSITIONS, locate

SEAM = "source"


@dataclass(frozen=True)
class SourceStart:
    """What a source must supply: samples of seq_length + 1 tokens, each in [0, vocab_size), for training or for
    validation, whose samples must differ. seed: train.seed."""

    seq_length: int
    vocab_size: int
    seed: int
    part: Literal["train", "validation"]


class DataSource(ABC):
    """Samples by number, instead of token files. Subclass it, and refer to it by `@source("name")` or by `module:NAME`.

    Config   a dataclass: its own fields, in data.source_config
    samples  how many there are; training shuffles them for each epoch, validation reads them in order; None: endless,
             in order

    A sample is a function of its number alone: ranks, layouts and resumed runs request the same numbers in any order,
    from a thread beside training. That is why a position in the data is one integer.
    """

    Config: ClassVar[type] = NoFields
    samples: int | None = None

    def __init__(self, start: SourceStart, config: Any):
        self.start, self.config = start, config

    @abstractmethod
    def sample(self, number: int) -> Sequence[int] | NDArray[Any]:
        """(seq_length + 1,) token ids: the last one is only the label of the one before."""

    def document_starts(self, number: int) -> Sequence[int]:
        """Ascending positions in 1..seq_length at which a document starts. With data.document_attention, tokens do not
        see anything before their document."""
        return ()


T = TypeVar("T", bound=type[DataSource])


def source(name: str) -> Callable[[T], T]:
    """Name a DataSource: data.source may be that name wherever its module has been imported."""
    return registers(SEAM, name)


def find_source(name: str) -> type[DataSource]:
    """The source that data.source refers to. NotFound says what is wrong with it."""
    found: type[DataSource] = find(SEAM, name, DataSource)
    return found


@dataclass(frozen=True)
class OwnSource:
    """A DataSource as the loader reads it (data.sources.Source); what it returns is checked."""

    name: str
    own: DataSource
    key: int | None

    @property
    def tokens(self) -> int | None:
        return None if self.windows is None else self.windows * self.own.start.seq_length

    @property
    def windows(self) -> int | None:
        return self.own.samples

    @property
    def packings(self) -> tuple[Packing, ...]:
        return ()

    @property
    def corpora(self) -> tuple[Corpus, ...]:
        return ()

    def locate(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return numbers if self.windows is None else locate(numbers, self.windows, self.key)

    def window(self, w: int) -> NDArray[Any]:
        start, tokens = self.own.start, np.asarray(self.own.sample(w))
        if tokens.shape != (start.seq_length + 1,) or tokens.dtype.kind not in "iu":
            raise DataError(
                f"{self.name}: sample {w} is {tokens.dtype} {tokens.shape}: it must be train.seq_length + 1 = "
                f"{start.seq_length + 1} integers"
            )
        if int(tokens.min()) < 0 or int(tokens.max()) >= start.vocab_size:
            raise DataError(
                f"{self.name}: sample {w} has a token outside the vocabulary (model.vocab_size={start.vocab_size}): "
                f"from {tokens.min()} to {tokens.max()}"
            )
        return tokens

    def starts(self, w: int) -> NDArray[np.int64]:
        length, starts = self.own.start.seq_length, np.asarray(self.own.document_starts(w), np.int64)
        if len(starts) and (starts[0] < 1 or starts[-1] > length or (np.diff(starts) <= 0).any()):
            raise DataError(f"{self.name}: document_starts({w}) must ascend in 1..{length}, got {starts.tolist()}")
        return starts

    def filled(self, w: int) -> int:
        return self.own.start.seq_length

    def unlabelled(self, w: int) -> NDArray[np.int64]:
        return NO_POSITIONS

    def origin(self, w: int) -> tuple[Corpus, list[tuple[int, int]]] | None:
        return None


def open_own(config: DataConfig, start: SourceStart) -> OwnSource:
    """The source that data.source names. DataError if it has no sample."""
    name = config.source or ""
    cls = find_source(name)
    own = cls(start, made_of(cls.Config, "data.source_config", config.source_config))
    if own.samples is not None and own.samples < 1:
        raise DataError(f"{name}: not enough data: it has {own.samples} samples for {start.part}")
    return OwnSource(name, own, make_key(start.seed, 0) if start.part == "train" else None)

"""What a model's family says of files that chats name, such as images or recordings. How their bytes become numbers is
up to a file for each kind (base.registry, seam "media"; data/media.py has the protocol)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.sequence.sample import Sample, Units, UnitStream


class MediaSpec(ABC):
    """The media that a model reads, all of one kind.

    kind       its name in the registry, which is also the type of their parts in messages: "image", "audio"
    processor  a preprocessor_config.json, where the run names none
    token      that stands for a feature in the text; None: they are beside the text, in a stream that an encoder reads
    rewrites   what a chat template writes for one, and what the text has there instead, with the token's name once;
               None: the template writes the token's name once
    begins     the token with which a text begins that has media beside it
    """

    kind: str
    processor: Mapping[str, Any]
    token: int | None
    rewrites: tuple[str, str] | None
    begins: int | None

    @property
    @abstractmethod
    def stream(self) -> UnitStream:
        """The rows that they become."""

    def placed(self, sample: Sample, units: Units) -> Sample:
        """The sample with these rows."""
        return replace(sample, units={**sample.units, self.stream.name: units})


@dataclass(frozen=True)
class MediaBeside(MediaSpec):
    """Media beside texts: one for each text, in `rows`, the stream that an encoder reads."""

    kind: str
    rows: UnitStream
    begins: int
    processor: Mapping[str, Any] = field(default_factory=dict, hash=False)
    token: int | None = None
    rewrites: tuple[str, str] | None = None

    @property
    def stream(self) -> UnitStream:
        return self.rows

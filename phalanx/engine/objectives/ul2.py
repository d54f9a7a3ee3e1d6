"""UL2's mixture of denoisers: each document has short spans, long or dense ones, or its end hidden (Tay et al., "UL2:
Unifying language learning paradigms", 2022, table 1)."""

from __future__ import annotations

import math
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError, Problem
from phalanx.engine.objectives.span import SpanCorruption, SpanRates, check_encoder_length
from phalanx.nn.objective import objective
from phalanx.sequence.sample import Vocabulary

# mode -> share of hidden tokens and mean length of spans; one span is a document's end
DENOISERS = {
    "[R]": ((0.15, 3.0), (0.15, 8.0)),
    "[S]": ((0.25, math.inf),),
    "[X]": ((0.5, 3.0), (0.5, 8.0), (0.15, 64.0), (0.5, 64.0)),
}


@dataclass(frozen=True, kw_only=True)
class UL2Config:
    encoder_length: int | None = None
    """ul2: tokens of each sequence that the encoder reads; those of the decoder are train.seq_length."""
    modes: bool = True
    """ul2: the encoder's text begins with the token of its denoiser, [R], [S] or [X]; false, for tokenizers without
    them: with the document."""


@objective("ul2")
class UL2(SpanCorruption):
    """Span corruption with seven pairs of rates, which are equally likely."""

    Config = UL2Config

    @classmethod
    def check(cls, config: Any) -> list[Problem]:
        return check_encoder_length(config)

    def rates(self, vocabulary: Vocabulary) -> tuple[SpanRates, ...]:
        with_modes, special = self.config.modes, vocabulary.special
        lacking = [mode for mode in DENOISERS if with_modes and mode not in special]
        if lacking:
            raise DataError(
                f"{vocabulary.source} has no {', '.join(lacking)}, with which task.name=ul2 says how a text is hidden: "
                "take a tokenizer that has them as special tokens, or set task.modes=false"
            )
        modes = {mode: special[mode] if with_modes else None for mode in DENOISERS}
        return tuple(SpanRates(*rates, modes[mode]) for mode, every in DENOISERS.items() for rates in every)

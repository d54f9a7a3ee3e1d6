"""Where drafts come from: the model's multi-token prediction modules (inference.predictor), or no model at all, since a
sequence that repeats earlier tokens is likely to continue as it did then.

Prompt lookup (Saxena, "Prompt lookup decoding", 2023). A draft is one token for sure, so `sampler.accept_same` accepts
it exactly, and the text is the one without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phalanx.base.dataclass import dataclass
from phalanx.inference.predictor import MtpSpec
from phalanx.inference.request import SamplingOptions
from phalanx.inference.sampler import has_penalties
from phalanx.inference.scheduler import DRAFTED, LiveSequence, Scheduler


@dataclass(frozen=True)
class NgramSpec:
    """tokens: drafts of a sequence in one step. longest, shortest: tokens at its end that must have come before.
    ValueError for values that make no drafts."""

    tokens: int = 4
    longest: int = 4
    shortest: int = 2

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens={self.tokens}: must be at least 1")
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"shortest={self.shortest}: must be from 1 to longest={self.longest}")


Drafts = NgramSpec | MtpSpec
"""How tokens are drafted."""


def drafts_named(text: str) -> Drafts:
    """What "ngram:N" and "mtp:N" mean: N tokens at once; "mtp": as many as the model has modules. ValueError for
    another text."""
    kind, _, tokens = text.partition(":")
    if text == "mtp":
        return MtpSpec()
    if kind not in ("ngram", "mtp") or not tokens.isdecimal():
        raise ValueError(f"{text!r}: must be ngram:N, mtp or mtp:N, such as ngram:4")
    return NgramSpec(int(tokens)) if kind == "ngram" else MtpSpec(int(tokens))


def ngram_drafts(tokens: Sequence[int], spec: NgramSpec) -> list[int]:
    """What came after the last place where as many of the last tokens stood as possible; nothing if fewer than
    `shortest` did. A copy that reaches the end of the sequence goes on with itself, so a period is continued."""
    ids = np.asarray(tokens, np.int64)
    matches = np.flatnonzero(ids[:-1] == ids[-1])  # places of the last token before
    length = 1
    while length < spec.longest and len(matches):
        inside = matches[matches >= length]
        longer = inside[ids[inside - length] == ids[-1 - length]]
        if not len(longer):
            break
        matches = longer
        length += 1
    if not len(matches) or length < spec.shortest:
        return []
    found = ids[matches[-1] + 1 :].tolist()
    return [found[i % len(found)] for i in range(spec.tokens)]


def takes_drafts(options: SamplingOptions) -> bool:
    """Not with penalties or a grammar: what these do to the token after a draft depends on the draft."""
    return options.grammar is None and not has_penalties(options)


def ngrams_of(scheduler: Scheduler, spec: NgramSpec) -> dict[int, list[int]]:
    """Drafts for `Scheduler.schedule`, by request."""
    found = {sequence.number: ngram_drafts(sequence.tokens, spec) for sequence in drafting(scheduler)}
    return {number: drafts for number, drafts in found.items() if drafts}


def predicted_of(scheduler: Scheduler, width: int) -> dict[int, list[int]]:
    """The same of drafts that the device has made with the last token of each sequence."""
    names = [DRAFTED - place for place in range(width)]
    return {sequence.number: names for sequence in drafting(scheduler)}


def drafting(scheduler: Scheduler) -> list[LiveSequence]:
    """The sequences that may get drafts in the next step."""
    return [sequence for sequence in scheduler.decoding() if takes_drafts(sequence.request.options)]

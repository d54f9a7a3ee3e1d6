"""One answer while it is generated: tokens become text, stop strings end it, log-probabilities stay with their text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import field

from phalanx.base.dataclass import dataclass
from phalanx.inference.request import EndReason, TokenScore
from phalanx.text.pieces import Pieces
from phalanx.text.stops import StopStrings
from phalanx.text.tokenizer_base import Tokenizer


@dataclass(frozen=True)
class PlacedToken:
    """A token that was scored (the first of a prompt is not), and where in the choice's text it begins."""

    token: int
    score: TokenScore | None
    offset: int


@dataclass
class Increment:
    """What an event adds to an answer: text, the tokens that it is made of, and all tokens made."""

    text: str = ""
    tokens: list[PlacedToken] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens or self.ids)


class ChoiceText:
    """Text of one sequence.

    tokenizer   None: there is no text, only ids
    ends        tokens that end an answer; they are not part of its text
    context     tokens before the first, which its text continues
    shown       special tokens whose names are part of the text
    offset      characters before the text
    shows_end   whether the token that ends an answer stands among its tokens, where log-probabilities are wanted
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stops: Sequence[str] = (),
        ends: Collection[int] = (),
        context: Sequence[int] = (),
        shown: Collection[int] = (),
    ):
        self._pieces = Pieces(tokenizer, context, shown) if tokenizer else None
        self._stops = StopStrings(stops)
        self._ends = ends
        self._waiting: list[PlacedToken] = []
        self._decoded = 0  # characters that tokens have become, held back or not
        self._given = 0
        self.offset = 0
        self.shows_end = False
        self.made = 0
        self.logprob = 0.0
        self.reason: EndReason | None = None

    @property
    def stopped(self) -> bool:
        """A stop string came: the engine need not go on."""
        return self._stops.found is not None

    def add(self, token: int, score: TokenScore | None) -> Increment:
        """One token more."""
        self.made += 1
        self.logprob += score.logprob if score else 0.0
        if self._pieces is None:
            return Increment("", [PlacedToken(token, score, 0)], [token])
        if token in self._ends:
            if self.shows_end:  # after those that are held back
                self._waiting.append(PlacedToken(token, score, self.offset + self._decoded))
            return Increment("", [], [token])
        self._waiting.append(PlacedToken(token, score, self.offset + self._decoded))
        text = self._pieces.add(token)
        self._decoded += len(text)
        return self._release(self._stops.add(text), [token])

    def end(self, reason: EndReason) -> Increment:
        """The sequence is over, or was stopped."""
        self.reason = "stop" if self.stopped else reason
        if self._pieces is None or self.stopped:
            return Increment()
        text = self._stops.add(self._pieces.rest())
        if self.stopped:
            return self._release(text, [])
        released = self._release(text + self._stops.rest(), [])
        released.tokens += self._waiting
        self._waiting = []
        return released

    def _release(self, text: str, ids: list[int]) -> Increment:
        self._given += len(text)
        limit = self.offset + self._given
        tokens = [placed for placed in self._waiting if placed.offset < limit]
        self._waiting = [placed for placed in self._waiting if placed.offset >= limit]
        return Increment(text, tokens, ids)

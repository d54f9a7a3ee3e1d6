"""Asks an engine many questions at once: log-likelihoods of continuations, and generated texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import NumericalStop
from phalanx.inference.engine import Engine
from phalanx.inference.request import Event, Finished, NewToken, PromptScored, SamplingOptions
from phalanx.text.pieces import Pieces
from phalanx.text.stops import StopStrings
from phalanx.text.tokenizers import Tokenizer

WAITING = 1024  # questions that the engine is given beyond those that it computes at once


@dataclass(frozen=True)
class Continuation:
    """Tokens of which the last `scored` follow a context."""

    tokens: tuple[int, ...]
    scored: int

    @property
    def options(self) -> SamplingOptions:
        """Nothing is made; the likeliest token at each place is wanted too."""
        return SamplingOptions(tokens=0, prompt_logprobs=1, scored_from=len(self.tokens) - self.scored)


@dataclass(frozen=True)
class ContinuationScore:
    """logprob: of the continuation, in nats. greedy: whether each of its tokens is the likeliest."""

    logprob: float
    greedy: bool


@dataclass(frozen=True)
class TextQuestion:
    """stop: texts after one of which nothing is wanted."""

    prompt: tuple[int, ...]
    options: SamplingOptions
    stop: tuple[str, ...] = ()


@dataclass
class OpenText:
    """The tokens of one answer as they are made."""

    pieces: Pieces
    stop: StopStrings
    ends: frozenset[int]
    tokens: list[int] = field(default_factory=list)

    def add(self, token: int) -> bool:
        """Whether a stop string has come with it."""
        if self.stop.found is not None or token in self.ends:
            return False
        self.tokens.append(token)
        self.stop.add(self.pieces.add(token))
        return self.stop.found is not None


def scores(engine: Engine, asked: Sequence[Continuation]) -> Iterator[tuple[int, ContinuationScore]]:
    """On rank 0: the number of each continuation with its score, as they are ready. RequestError before anything is
    computed, if one of them could never be; NumericalStop if the model's logits are not numbers.

    Those of one context stand beside each other, so that it is computed once.
    """
    for each in asked:
        engine.check(each.tokens, each.options)
    order = sorted(range(len(asked)), key=lambda i: asked[i].tokens)
    running: dict[int, int] = {}
    for event in answered(engine, running, [(i, asked[i].tokens, asked[i].options) for i in order]):
        if isinstance(event, PromptScored):
            place = running[event.request]
            found = [score for score in event.scores if score is not None][-asked[place].scored :]
            logprob = sum(score.logprob for score in found)
            if logprob != logprob:
                raise NumericalStop("the model's logits are not finite: there are no scores")
            yield place, ContinuationScore(logprob, all(s.token == s.likeliest[0][0] for s in found))


def texts(engine: Engine, tokenizer: Tokenizer, asked: Sequence[TextQuestion]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """On rank 0: the number of each question with the tokens of its answer, up to the one that completed a stop
    string. Errors as of `scores`."""
    for each in asked:
        engine.check(each.prompt, each.options)
    order = sorted(range(len(asked)), key=lambda i: asked[i].prompt)
    open_texts = [
        OpenText(Pieces(tokenizer, each.prompt), StopStrings(each.stop), frozenset(each.options.end_tokens))
        for each in asked
    ]
    running: dict[int, int] = {}
    for event in answered(engine, running, [(i, asked[i].prompt, asked[i].options) for i in order]):
        if isinstance(event, NewToken) and open_texts[running[event.request]].add(event.token):
            engine.cancel(event.request)
        elif isinstance(event, Finished):
            if event.error is not None:
                raise NumericalStop(f"an answer broke off: {event.error}")
            place = running[event.request]
            yield place, tuple(open_texts[place].tokens)


def answered(
    engine: Engine, running: dict[int, int], asked: Sequence[tuple[int, Sequence[int], SamplingOptions]]
) -> Iterator[Event]:
    """The engine's events until all is answered. running: filled with the place of each request that was submitted.
    The engine is given so many at a time that a message between ranks stays small."""
    coming = iter(asked)
    together = engine.options.sequences * engine.model.mesh.dp.size + WAITING
    left = len(asked)
    while left:
        for _ in range(together - len(engine.open_requests)):
            each = next(coming, None)
            if each is None:
                break
            place, prompt, options = each
            running[engine.submit(prompt, options)] = place
        for event in engine.step():
            left -= isinstance(event, Finished)
            yield event

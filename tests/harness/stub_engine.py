"""An engine whose model is a formula: the server's tests have every kind of answer without weights.

What it makes is a function of the last tokens, the seed, the sample and the position; a prompt that has a key of
`replies` in it is answered with that text. Tests hold it (`gate`), or each sequence after so many tokens
(`pause_after`; `paused` is set when one is), let it fail (`failure`) and see what it was asked.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from phalanx.inference.request import (
    EngineLoad,
    Event,
    Finished,
    NewToken,
    PromptScored,
    RequestError,
    SamplingOptions,
    TokenScore,
)
from phalanx.text.tokenizer_base import Tokenizer

MEMORY = 3  # tokens that the next one depends on
PAUSE = 0.001  # seconds of a step in which every sequence is held


class StubEngine:
    """at_once: sequences that run together; others wait."""

    model_name = "stub"

    def __init__(
        self, tokenizer: Tokenizer, positions: int = 512, replies: Mapping[str, str] | None = None, at_once: int = 8
    ):
        self.positions = positions
        self.gate = threading.Event()
        self.gate.set()
        self.pause_after: int | None = None
        self.paused = threading.Event()
        self.failure: Exception | None = None
        self.cancelled: list[int] = []
        self.was_cancelled = threading.Event()
        self.most_at_once = 0
        self.seen: list[tuple[tuple[int, ...], SamplingOptions]] = []
        self.when: list[tuple[int, float | None]] = []  # priorities and deadlines
        self._tokenizer, self._at_once = tokenizer, at_once
        self._replies = dict(replies or {})
        self._waiting: list[StubSequence] = []
        self._running: list[StubSequence] = []
        self._number = 0
        printable = [
            bool(tokenizer.decode([i]).isprintable() and tokenizer.decode([i])) for i in range(tokenizer.vocab_size)
        ]
        hidden = set(tokenizer.special_tokens.values())
        self._allowed = np.array([good and i not in hidden for i, good in enumerate(printable)])

    @property
    def idle(self) -> bool:
        return not self._running and not self._waiting

    def load(self) -> EngineLoad:
        return EngineLoad(len(self._running), len(self._waiting), sum(len(s.ids) for s in self._running), 4096)

    def submit(
        self, prompt: Sequence[int], options: SamplingOptions, priority: int = 0, deadline: float | None = None
    ) -> int:
        if len(prompt) >= self.positions + 1:
            raise RequestError("prompt", len(prompt), f"must have at most {self.positions} tokens")
        if options.temperature == 1.5:
            raise RequestError("temperature", 1.5, "is what this engine never takes")
        self.seen.append((tuple(prompt), options))
        self.when.append((priority, deadline))
        self._number += 1
        self._waiting.append(StubSequence(self._number, list(prompt), options, self._script(prompt)))
        return self._number

    def cancel(self, number: int) -> None:
        for queue in (self._waiting, self._running):
            for sequence in [s for s in queue if s.number == number]:
                queue.remove(sequence)
                self.cancelled.append(number)
                self.was_cancelled.set()

    def step(self) -> list[Event]:
        assert self.gate.wait(60), "the test left the gate closed"
        if self.failure is not None:
            raise self.failure
        while self._waiting and len(self._running) < self._at_once:
            self._running.append(self._waiting.pop(0))
        self.most_at_once = max(self.most_at_once, len(self._running))
        events: list[Event] = []
        for sequence in list(self._running):
            if self.pause_after is None or sequence.made < self.pause_after:
                events += self._advance(sequence)
        if not events:
            self.paused.set()
            self.was_cancelled.wait(PAUSE)
        return events

    def _script(self, prompt: Sequence[int]) -> list[int] | None:
        text = self._tokenizer.decode(list(prompt))
        for key, reply in self._replies.items():
            if key in text:
                return [*self._tokenizer.encode_with_special(reply), self._tokenizer.eod or 0]
        return None

    def _advance(self, sequence: StubSequence) -> list[Event]:
        number, options = sequence.number, sequence.options
        events: list[Event] = []
        if not sequence.begun:
            sequence.begun = True
            if options.prompt_logprobs is not None:
                scores = [
                    self._score(sequence.ids[:at], token, options.prompt_logprobs)
                    for at, token in enumerate(sequence.ids)
                ]
                events.append(PromptScored(number, (None, *scores[1:])))
        room = self.positions - len(sequence.ids)
        limit = options.tokens if options.tokens is not None else room + sequence.made
        if sequence.made < limit and room > 0:
            token = self._next(sequence)
            score = None if options.logprobs is None else self._score(sequence.ids, token, options.logprobs)
            events.append(NewToken(number, token, score))
            sequence.ids.append(token)
            sequence.made += 1
            if token in options.end_tokens:
                self._running.remove(sequence)
                return [*events, Finished(number, "stop")]
        if sequence.made >= limit or len(sequence.ids) >= self.positions:
            self._running.remove(sequence)
            events.append(Finished(number, "length"))
        return events

    def _next(self, sequence: StubSequence) -> int:
        options = sequence.options
        if sequence.script:
            return sequence.script.pop(0)
        logits = self.logits(sequence.ids)
        for token, bias in options.bias:
            logits[token] += bias
        if options.temperature == 0:
            return int(logits.argmax())
        chances = np.exp(logits / options.temperature)
        dice = np.random.default_rng([options.seed, options.sample, len(sequence.ids)])
        return int(dice.choice(len(chances), p=chances / chances.sum()))

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """(vocab_size,) of the token after `ids`."""
        seed = zlib.crc32(np.array(ids[-MEMORY:], np.int64).tobytes())
        logits = np.random.default_rng(seed).normal(size=self._tokenizer.vocab_size) * 2
        logits[~self._allowed] = -30
        return logits

    def _score(self, ids: Sequence[int], token: int, likeliest: int) -> TokenScore:
        logits = self.logits(ids)
        logprobs = logits - np.log(np.exp(logits).sum())
        best = np.argsort(-logprobs)[:likeliest]
        return TokenScore(token, float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in best))


class StubSequence:
    """A sequence that waits or runs."""

    def __init__(self, number: int, ids: list[int], options: SamplingOptions, script: list[int] | None):
        self.number, self.ids, self.options, self.script = number, ids, options, script
        self.made = 0
        self.begun = False

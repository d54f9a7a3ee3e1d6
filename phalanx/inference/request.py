"""Requests to the engine and its answers, as plain values without a device, a clock or text."""

from __future__ import annotations

import math
from dataclasses import field, replace
from numbers import Integral
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import PhalanxError, shortened

EndReason = Literal["stop", "length", "cancelled", "deadline", "error"]
"""An end token came; there is no room for more; somebody cancelled it; its time was up; the engine failed."""


class RequestError(PhalanxError):
    """A request that cannot be served: which field, its value, and the rule that it breaks."""

    exit_code = 2

    def __init__(self, field: str, value: Any, rule: str):
        self.field, self.value, self.rule = field, value, rule
        super().__init__(f"{field}={shortened(repr(value))}: {rule}")


GrammarKind = Literal["json_schema", "json_object", "regex", "lark"]


@dataclass(frozen=True)
class Grammar:
    """What the text of an answer keeps to: a JSON schema, any JSON object (without a text), a regular expression or a
    Lark grammar, as llguidance reads them. RequestError for another kind."""

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        kinds = get_args(GrammarKind)
        if self.kind not in kinds:
            raise RequestError("grammar", self.kind, f"must be one of {', '.join(kinds)}")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are drawn. The defaults draw from the model's own distribution. RequestError for values without a
    meaning.

    tokens              at most so many are made; None: as many as positions and memory allow
    temperature         logits are divided by it; 0: always the likeliest token
    top_k               of so many likeliest tokens; 0: of all
    top_p               of the likeliest tokens that together have this probability (Holtzman et al., 2020)
    min_p               of tokens with at least this part of the likeliest one's probability
    repetition_penalty  logits of tokens that are in the prompt or were made are divided by it if positive, else
                        multiplied (Keskar et al., "CTRL", 2019)
    presence_penalty    subtracted from the logits of tokens that were made
    frequency_penalty   subtracted from them as often as they were made
    bias                (token, what is added to its logit)
    end_tokens          generation ends after one of these
    least_tokens        of end tokens none is drawn before so many are made
    not_first           tokens of which none is the first that is made
    seed, sample        random numbers are a function of (seed, sample, position) alone: `sample` numbers the answers to
                        one prompt
    logprobs            how many of the likeliest tokens are returned with their log-probabilities beside each that was
                        made; None: none, nor that of the one made. They are those of the model, before temperature,
                        penalties and bias
    prompt_logprobs     the same of the tokens of the prompt
    scored_from         of prompt_logprobs: the position of the first token that is scored. What lies before it may be
                        remembered from another request. If no token is made either, the prompt's last one need not be
                        computed, and a prompt may be longer by it
    grammar             only tokens are drawn that its text can go on with; end tokens where it may end
    adapter             name of the engine's adapter that is added to the model's weights; None: the model alone
    """

    tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    end_tokens: tuple[int, ...] = ()
    least_tokens: int = 0
    not_first: tuple[int, ...] = ()
    seed: int = 0
    sample: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    scored_from: int = 1
    grammar: Grammar | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "top_k", "least_tokens", "seed", "sample", "logprobs", "prompt_logprobs", "scored_from"):
            self._must(name, isinstance(getattr(self, name), Integral | None), "must be a whole number")
        for name in ("temperature", "top_k", "least_tokens"):
            self._must(name, 0 <= getattr(self, name) < math.inf, "must be finite and at least 0")
        for name in ("tokens", "logprobs", "prompt_logprobs"):
            self._must(name, getattr(self, name) is None or getattr(self, name) >= 0, "must be at least 0")
        for name in ("presence_penalty", "frequency_penalty"):
            self._must(name, math.isfinite(getattr(self, name)), "must be finite")
        self._must("scored_from", self.scored_from >= 1, "must be at least 1: nothing precedes the first token")
        given = self.prompt_logprobs is not None or self.scored_from == 1
        self._must("scored_from", given, "does nothing without prompt_logprobs")
        self._must("top_p", 0 < self.top_p <= 1, "must be > 0 and <= 1")
        self._must("min_p", 0 <= self.min_p <= 1, "must be from 0 to 1")
        self._must("repetition_penalty", 0 < self.repetition_penalty < math.inf, "must be finite and > 0")
        self._must("sample", 0 <= self.sample < 2**32, "must be at least 0 and < 2**32")
        self._must("bias", all(value < math.inf for _, value in self.bias), "must be numbers below infinity")

    def _must(self, name: str, kept: bool, rule: str) -> None:
        if not kept:
            raise RequestError(name, getattr(self, name), rule)


@dataclass(frozen=True)
class PromptImage:
    """An image in a prompt.

    data    the file as it came: JPEG, PNG, ...
    name    for messages
    digest  of the pixels that the model reads of it, in hexadecimal
    size    height and width of these
    tokens  of the text that stand for it, one after another
    """

    data: bytes = field(repr=False)
    name: str
    digest: str
    size: tuple[int, int]
    tokens: int


@dataclass(frozen=True)
class PromptSound:
    """A recording that an encoder hears.

    data    the file as it came: WAV, FLAC, ...
    name    for messages
    digest  of what the model hears of it, in hexadecimal
    rows    that it becomes
    """

    data: bytes = field(repr=False)
    name: str
    digest: str
    rows: int


@dataclass(frozen=True)
class Prompt:
    """Tokens, and the images for which some of them stand, in order; or with a recording that an encoder hears, the
    tokens with which the text that is said begins."""

    tokens: tuple[int, ...]
    images: tuple[PromptImage, ...] = ()
    sound: PromptSound | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """number: the engine's, in order of arrival. priority: larger ones first. deadline: by the engine's clock, in
    seconds. source: tokens of the text that an encoder reads, before the decoder's prompt; of other models none. sound:
    the recording that it hears instead. images: with the position of each one's first token in the prompt."""

    number: int
    prompt: tuple[int, ...]
    options: SamplingOptions = field(default_factory=SamplingOptions)
    priority: int = 0
    deadline: float | None = None
    source: tuple[int, ...] = ()
    images: tuple[tuple[int, PromptImage], ...] = ()
    sound: PromptSound | None = None

    @property
    def source_length(self) -> int:
        """Tokens or rows that an encoder reads."""
        return len(self.source) if self.sound is None else self.sound.rows

    @property
    def source_key(self) -> bytes:
        """What tells sources apart; of no source nothing."""
        if self.sound is not None:
            return bytes.fromhex(self.sound.digest)
        return np.array(self.source, np.int64).tobytes()

    @property
    def computed(self) -> tuple[int, ...]:
        """What the model reads of the prompt: all, unless the last token is only scored. An image is read whole."""
        options, images = self.options, self.images
        only_scored = options.prompt_logprobs is not None and options.tokens == 0 and len(self.prompt) > 1
        only_scored &= not images or images[-1][0] + images[-1][1].tokens < len(self.prompt)
        return self.prompt[:-1] if only_scored else self.prompt

    def check_tokens(self, vocabulary: int) -> None:
        """RequestError if the prompt or an option has a token that the model does not, or no token of the prompt is
        scored that should be."""
        options = self.options
        if options.scored_from >= max(2, len(self.prompt)):
            rule = f"must be < {len(self.prompt)}, the number of tokens of the prompt"
            raise RequestError("scored_from", options.scored_from, rule)
        given = {"prompt": (*self.source, *self.prompt)}
        given |= {"bias": tuple(t for t, _ in options.bias), "end_tokens": options.end_tokens}
        given["not_first"] = options.not_first
        for name, tokens in given.items():
            wrong = next((t for t in tokens if not (isinstance(t, Integral) and 0 <= t < vocabulary)), None)
            if wrong is not None:
                rule = f"token ids must be whole numbers >= 0 and < {vocabulary}, the size of the vocabulary"
                raise RequestError(name, wrong, rule)


@dataclass(frozen=True)
class TokenScore:
    """A token with its log-probability, and the likeliest tokens at its place with theirs, best first."""

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()

    def among(self, count: int) -> TokenScore:
        """With the `count` likeliest tokens: others of a batch may have asked for more."""
        return self if len(self.likeliest) <= count else replace(self, likeliest=self.likeliest[:count])


@dataclass(frozen=True)
class NewToken:
    """A request has one more token."""

    request: int
    token: int
    score: TokenScore | None = None


@dataclass(frozen=True)
class PromptScored:
    """Log-probabilities of a prompt's tokens, of the first None."""

    request: int
    scores: tuple[TokenScore | None, ...]


@dataclass(frozen=True)
class Finished:
    """A request is over. `cached`: tokens of its prompt that needed no computing. `drafted`, `accepted`: tokens that
    were guessed before the model was asked, and how many of them it drew too."""

    request: int
    reason: EndReason
    cached: int = 0
    error: str | None = None
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class EngineLoad:
    """What an engine has to do, in all of its replicas: sequences that run and that wait, pages in use and in all. Of
    sequences that are over: drafted tokens, and how many of them were accepted."""

    running: int
    waiting: int
    pages_used: int
    pages: int
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Embedded:
    """The embedding of a request's text, of an engine that makes these instead of tokens; Finished follows."""

    request: int
    vector: NDArray[np.float32]


Event = NewToken | PromptScored | Embedded | Finished

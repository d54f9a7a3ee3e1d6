"""Text from a checkpoint: prompts in, answers out, on one process or on all ranks of a layout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from phalanx.base.errors import CheckpointError, ConfigError, Problem
from phalanx.checkpoint.hf import model_config_from_hf
from phalanx.data.files import TOKENIZER_FILES
from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.load import InferenceModel, load_alone, weights_folder
from phalanx.inference.request import EndReason, Event, Finished, NewToken, SamplingOptions, TokenScore
from phalanx.text.pieces import Pieces
from phalanx.text.stops import StopStrings
from phalanx.text.tokenizers import Tokenizer, load_tokenizer

SHOWN = 60  # characters of a prompt in a message
ALONE = EngineOptions(sequences=1, tokens=512)
"""Of one text at a time."""


@dataclass(frozen=True)
class TextAnswer:
    """prompt: its place among those given. sample: which of its answers. tokens: without those of a stop string."""

    prompt: int
    sample: int
    text: str
    tokens: tuple[int, ...]
    reason: EndReason
    scores: tuple[TokenScore, ...] = ()
    error: str | None = None


class TextSampler:
    """Makes text with a model:

        with TextSampler("runs/first") as s:
            for answer in s.generate(["Once upon a time"], SamplingOptions(tokens=64, temperature=0.8)):
                print(answer.text)

    On several ranks all of them make the same calls, and answers come on rank 0.
    """

    def __init__(self, path: str, options: EngineOptions | None = None, model: InferenceModel | None = None):
        """path: a run, a checkpoint or a Hugging Face folder; model: its weights on the ranks of a layout; None: they
        are loaded here, on this process alone."""
        self.folder = weights_folder(path)
        self.tokenizer = tokenizer_of(self.folder)
        self.ends = end_tokens(self.folder, self.tokenizer)
        self.engine = Engine(model or load_alone(self.folder), options)

    def __enter__(self) -> TextSampler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Whatever was still being made is given up. After an error the engine may be amid a step: it is left."""
        if error is None or isinstance(error, GeneratorExit):
            self.engine.close()

    def ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Of a text; ids stay as they are. An empty text begins a document."""
        return (self.tokenizer.encode(prompt) or [self.tokenizer.eod or 0]) if isinstance(prompt, str) else list(prompt)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        options: SamplingOptions | None = None,
        samples: int = 1,
        stop: Sequence[str] = (),
    ) -> Iterator[TextAnswer]:
        """Answers as they are ready. samples: of each prompt. stop: a text ends before one of these. RequestError
        before anything is made, if one of the prompts cannot be served."""
        if self.engine.model.mesh.rank:
            self.engine.follow()
            return
        options = replace(
            options or SamplingOptions(), end_tokens=(*(options or SamplingOptions()).end_tokens, *self.ends)
        )
        ids = [self.ids(prompt) for prompt in prompts]
        for each in ids:
            self.engine.check(each, options)
        texts: dict[int, LiveText] = {}
        for place, each in enumerate(ids):
            for n in range(samples):
                number = self.engine.submit(each, replace(options, sample=options.sample + n))
                texts[number] = LiveText(
                    place, n, Pieces(self.tokenizer, each), StopStrings(stop), frozenset(options.end_tokens)
                )
        while not self.engine.idle:
            for event in self.engine.step():
                answer = self._heard(texts[event.request], event)
                if answer is not None:
                    del texts[event.request]
                    yield answer
        self.engine.pause()

    def _heard(self, live: LiveText, event: Event) -> TextAnswer | None:
        if isinstance(event, NewToken):
            if live.add(event):
                self.engine.cancel(event.request)
            return None
        return live.answer(event) if isinstance(event, Finished) else None


@dataclass
class LiveText:
    """The text of one request as it is made."""

    prompt: int
    sample: int
    pieces: Pieces
    stop: StopStrings
    ends: frozenset[int]
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)

    def add(self, event: NewToken) -> bool:
        """One more token; whether a stop string has come with it, after which nothing is heard."""
        if self.stop.found is not None or event.token in self.ends:
            return False
        self.tokens.append(event.token)
        if event.score is not None:
            self.scores.append(event.score)
        self.text += self.stop.add(self.pieces.add(event.token))
        return self.stop.found is not None

    def answer(self, event: Finished) -> TextAnswer:
        if self.stop.found is None:
            self.text += self.stop.add(self.pieces.rest())
            self.text += self.stop.rest()
        reason: EndReason = "stop" if self.stop.found is not None else event.reason
        return TextAnswer(
            self.prompt, self.sample, self.text, tuple(self.tokens), reason, tuple(self.scores), event.error
        )


def tokenizer_of(folder: Path) -> Tokenizer:
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"{folder} holds no tokenizer, so text cannot be made with it (data.tokenizer was not set in its run)"
        )
    return load_tokenizer(str(folder))


def end_tokens(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """After which a text is over: the tokenizer's end of a document, and those that the folder's generation_config.json
    names (a chat model ends its turn with another)."""
    found = [] if tokenizer.eod is None else [tokenizer.eod]
    path = folder / "generation_config.json"
    if path.is_file():
        named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        found += named if isinstance(named, list) else [] if named is None else [named]
    return tuple(dict.fromkeys(found))


def generate(path: str, prompt: str, tokens: int = 128, temperature: float = 0.8, seed: int = 0) -> str:
    """`prompt` continued by up to `tokens` tokens, ended early by the end-of-document token. temperature 0: the
    likeliest token."""
    return prompt + "".join(TextStream(path, prompt, tokens, temperature, seed))


class TextStream:
    """The continuation of a prompt, piece by piece as its tokens are made. ConfigError for a prompt that leaves no
    position for a token.

    notice   when it is over: why it ended before `tokens`, if that needs a word; else None
    """

    def __init__(self, path: str, prompt: str, tokens: int = 128, temperature: float = 0.8, seed: int = 0):
        folder = weights_folder(path)
        tokenizer = tokenizer_of(folder)
        self.positions = model_config_from_hf(folder).max_position_embeddings
        self.ids = tokenizer.encode(prompt) or [tokenizer.eod or 0]
        self._first, self._tokens = len(self.ids), tokens
        if self._first >= self.positions:
            raise ConfigError([too_long(prompt, self._first, self.positions)])
        made = min(tokens, self.positions - self._first)
        self._sampler = TextSampler(path, replace(ALONE, length=self._first + made))
        self._options = SamplingOptions(tokens=made, temperature=temperature, seed=seed, end_tokens=self._sampler.ends)
        self.notice: str | None = None

    def __iter__(self) -> Iterator[str]:
        engine, pieces = self._sampler.engine, Pieces(self._sampler.tokenizer, self.ids)
        engine.submit(self.ids, self._options)
        count, reason = 0, ""
        with self._sampler:
            while not engine.idle:
                for event in engine.step():
                    if isinstance(event, NewToken):
                        self.ids.append(event.token)
                        count += 1
                        if event.token not in self._options.end_tokens:
                            yield pieces.add(event.token)
                    elif isinstance(event, Finished):
                        reason = event.reason
                        if event.error is not None:
                            self.notice = f"stopped after {count} of {self._tokens} tokens: {event.error}"
        if reason == "length" and count < self._tokens:
            room = (
                f"the model has {self.positions} positions (max_position_embeddings), and the prompt "
                f"takes {self._first} of them"
            )
            self.notice = f"stopped after {count} of {self._tokens} tokens: {room}"
        yield pieces.rest()


def too_long(prompt: str, tokens: int, positions: int) -> Problem:
    shown = prompt if len(prompt) <= SHOWN else f"{prompt[:SHOWN]}..."
    rule = "must leave a position for the next token; give a shorter one"
    return Problem(
        "--prompt",
        shown,
        rule,
        {"tokens of the prompt": tokens, "model.max_position_embeddings": positions},
        (),
        "command line",
    )

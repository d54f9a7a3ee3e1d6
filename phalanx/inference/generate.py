"""Text from a checkpoint: prompts in, answers out, on one process or on all ranks of a layout."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from phalanx.base.errors import CheckpointError, ConfigError, DataError, Problem
from phalanx.base.placement import Placement
from phalanx.checkpoint.hf import model_config_from_hf
from phalanx.comm.mesh import leave_world
from phalanx.config.run import Run
from phalanx.data.files import TOKENIZER_FILES
from phalanx.engine.meeting import device_of, identity, join
from phalanx.forecast.decide import make_plan
from phalanx.inference.adapters import with_adapter
from phalanx.inference.drafter import Drafts
from phalanx.inference.ends import end_tokens
from phalanx.inference.engine import DraftCounts, Engine, EngineOptions
from phalanx.inference.load import InferenceModel, forward_only, load_alone, load_model, weights_folder
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


class TextEngine:
    """Texts in, texts out, over an engine. ends: tokens that end an answer."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, ends: Sequence[int]):
        self.engine, self.tokenizer, self.ends = engine, tokenizer, tuple(ends)

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


class TextSampler(TextEngine):
    """Makes text with a model:

        with TextSampler("runs/first") as s:
            for answer in s.generate(["Once upon a time"], SamplingOptions(tokens=64, temperature=0.8)):
                print(answer.text)

    On several ranks all of them make the same calls, and answers come on rank 0.
    """

    def __init__(
        self,
        path: str,
        options: EngineOptions | None = None,
        model: InferenceModel | None = None,
        adapter: str | None = None,
    ):
        """path: a run, a checkpoint or a Hugging Face folder; model: its weights on the ranks of a layout; None: they
        are loaded here, on this process alone, with a LoRA `adapter` if its folder is given."""
        self.folder = weights_folder(path)
        tokenizer = tokenizer_of(self.folder)
        ends = end_tokens(self.folder, tokenizer)
        engine = Engine(model or load_alone(self.folder, adapter), options, tokenizer=tokenizer)
        super().__init__(engine, tokenizer, ends)

    def __enter__(self) -> TextSampler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Whatever was still being made is given up. After an error the engine may be amid a step: it is left."""
        if error is None or isinstance(error, GeneratorExit):
            self.engine.close()


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


def generate(path: str, prompt: str, options: SamplingOptions | None = None) -> str:
    """`prompt` with its continuation, ended early by the end-of-document token."""
    return prompt + "".join(TextStream(path, prompt, options or SamplingOptions(tokens=128, temperature=0.8)))


class TextStream:
    """The continuation of a prompt, piece by piece as its tokens are made. ConfigError for a prompt that leaves no
    position for a token.

    stop     the text ends before one of these
    drafts   of tokens, which the model checks several at a time; they change nothing of the text
    adapter  folder of a LoRA adapter, which is added to the model's weights
    notice   when it is over: why it ended before `options.tokens`, if that needs a word; else None
    """

    def __init__(
        self,
        path: str,
        prompt: str,
        options: SamplingOptions,
        stop: Sequence[str] = (),
        drafts: Drafts | None = None,
        adapter: str | None = None,
    ):
        folder = weights_folder(path)
        tokenizer = tokenizer_of(folder)
        self.positions = model_config_from_hf(folder).max_position_embeddings
        self.ids = tokenizer.encode(prompt) or [tokenizer.eod or 0]
        self._first, self._tokens = len(self.ids), options.tokens
        if self._first >= self.positions:
            raise ConfigError([too_long(prompt, self._first, self.positions)])
        room = self.positions - self._first
        made = room if options.tokens is None else min(options.tokens, room)
        self._sampler = TextSampler(path, replace(ALONE, length=self._first + made, drafts=drafts), adapter=adapter)
        ends = (*options.end_tokens, *self._sampler.ends)
        self._options, self._stop = replace(options, tokens=made, end_tokens=ends), stop
        self._sampler.engine.check(self.ids, self._options)
        self.notice: str | None = None

    def __iter__(self) -> Iterator[str]:
        engine, given = self._sampler.engine, 0
        live = LiveText(
            0,
            0,
            Pieces(self._sampler.tokenizer, self.ids),
            StopStrings(self._stop),
            frozenset(self._options.end_tokens),
        )
        engine.submit(self.ids, self._options)
        ended: Finished | None = None
        with self._sampler:
            while not engine.idle:
                for event in engine.step():
                    if isinstance(event, Finished):
                        ended = event
                    elif isinstance(event, NewToken):
                        self.ids.append(event.token)
                        if live.add(event):
                            engine.cancel(event.request)
                        yield live.text[given:]
                        given = len(live.text)
        if ended is not None:
            yield live.answer(ended).text[given:]
            self.notice = self._notice(ended, len(self.ids) - self._first)

    @property
    def draft_counts(self) -> DraftCounts:
        return self._sampler.engine.draft_counts

    def _notice(self, ended: Finished, made: int) -> str | None:
        if ended.error is not None:
            return f"stopped after {made} of {self._tokens} tokens: {ended.error}"
        if ended.reason != "length" or self._tokens is None or made == self._tokens:
            return None
        room = (
            f"the model has {self.positions} positions (max_position_embeddings), and the prompt "
            f"takes {self._first} of them"
        )
        return f"stopped after {made} of {self._tokens} tokens: {room}"


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


# ---- on ranks ----


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What is to be made. path: of the model. prompts: texts or token ids. samples: of each. out: a JSONL file; None:
    texts are printed. drafts: of tokens, which the model checks several at a time. adapter: folder of a LoRA
    adapter. shown: what answers say of each prompt: its `prompt`, and what else there is; None: the prompt itself."""

    path: str
    prompts: tuple[str | tuple[int, ...], ...]
    options: SamplingOptions
    samples: int = 1
    stop: tuple[str, ...] = ()
    out: str | None = None
    drafts: Drafts | None = None
    adapter: str | None = None
    shown: tuple[dict[str, Any], ...] | None = None


@contextmanager
def sampler_on_ranks(
    path: str, run: Run, placement: Placement, options: EngineOptions | None = None, adapter: str | None = None
) -> Iterator[TextSampler]:
    """A model on the ranks of a layout, of which this process is one. run: as weights_alone has it. Collective."""
    with ExitStack() as after:
        after.callback(leave_world)
        mesh, _ = join(run, placement, identity(run, device_of(run, placement)))
        after.callback(mesh.close)
        run, adapters = with_adapter(run, adapter)
        model = load_model(weights_folder(path), make_plan(forward_only(run), mesh.grid.world), mesh, adapters)
        yield after.enter_context(TextSampler(path, options, model))


def generate_rank(run: Run, placement: Placement, what: Generation) -> None:
    """One rank's part; rank 0 writes the answers, in the order of the prompts."""
    many = min(256, len(what.prompts) * what.samples)
    room = EngineOptions(sequences=max(1, many), drafts=what.drafts)
    with ExitStack() as after:
        sampler = after.enter_context(sampler_on_ranks(what.path, run, placement, room, what.adapter))
        answers = sampler.generate(what.prompts, what.options, what.samples, what.stop)
        out = after.enter_context(open(what.out, "w", encoding="utf-8")) if what.out and not placement.rank else None
        for answer in in_order(answers, what.samples):
            about = {"prompt": what.prompts[answer.prompt]} if what.shown is None else what.shown[answer.prompt]
            if out is None:
                prompt = about["prompt"]
                print(f"{prompt if isinstance(prompt, str) else ''}{answer.text}", flush=True)
            else:
                out.write(json.dumps({**about, **plain_answer(answer)}, ensure_ascii=False) + "\n")
                out.flush()
        if what.drafts is not None and not placement.rank:
            print(sampler.engine.draft_counts, file=sys.stderr)


def in_order(answers: Iterable[TextAnswer], samples: int) -> Iterator[TextAnswer]:
    """By prompt, then by sample, each as soon as those before it are there."""
    waiting: dict[int, TextAnswer] = {}
    turn = 0
    for answer in answers:
        waiting[answer.prompt * samples + answer.sample] = answer
        while turn in waiting:
            yield waiting.pop(turn)
            turn += 1


def plain_answer(answer: TextAnswer) -> dict[str, Any]:
    """As a line of a file has it."""
    more = {} if answer.error is None else {"error": answer.error}
    return {
        "sample": answer.sample,
        "text": answer.text,
        "tokens": len(answer.tokens),
        "reason": answer.reason,
        **more,
    }


def read_prompts(path: str) -> tuple[str | tuple[int, ...], ...]:
    """Of a JSONL file: {"prompt": text or token ids} in each line. DataError names the line that is otherwise."""
    found: list[str | tuple[int, ...]] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            prompt = None
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            found.append(tuple(prompt))
        elif isinstance(prompt, str):
            found.append(prompt)
        else:
            wanted = '{"prompt": "..."} or {"prompt": [token ids]}'
            raise DataError(f"{path}, line {number} is not {wanted}: {line[:SHOWN]}")
    if not found:
        raise DataError(f"{path} holds no prompts")
    return tuple(found)

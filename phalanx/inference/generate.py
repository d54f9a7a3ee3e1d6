"""Text from a checkpoint: prompts in, answers out, on one process or on all ranks of a layout."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError, ConfigError, DataError, Problem
from phalanx.base.placement import Placement
from phalanx.checkpoint.hf import model_config_from_hf
from phalanx.config.run import Run
from phalanx.data.files import TOKENIZER_FILES
from phalanx.engine.meeting import device_of, identity, joined_mesh
from phalanx.forecast.decide import make_plan
from phalanx.inference.adapters import with_adapter
from phalanx.inference.chat_prompts import ChatPrompts, ImageFile, chat_prompts, encoder_text
from phalanx.inference.drafter import Drafts
from phalanx.inference.ends import end_tokens
from phalanx.inference.engine import DraftCounts, Engine, EngineOptions
from phalanx.inference.load import (
    InferenceModel,
    forward_only,
    load_alone,
    load_model,
    refuse_sound,
    weights_folder,
)
from phalanx.inference.request import (
    EndReason,
    Event,
    Finished,
    NewToken,
    Prompt,
    RequestError,
    SamplingOptions,
    TokenScore,
)
from phalanx.text.chat_records import AskedChat, BadChat, asked_chat
from phalanx.text.pieces import Pieces
from phalanx.text.stops import StopStrings
from phalanx.text.tokenizers import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from phalanx.inference.recordings import SpeechPrompts

SHOWN = 60  # characters of a prompt in a message
ALONE = EngineOptions(sequences=1, tokens=512)
"""Of one text at a time."""


@dataclass(frozen=True)
class TextAnswer:
    """prompt: its place among those given. sample: which of its answers. tokens: with those of a stop string, without
    the one that ends an answer."""

    prompt: int
    sample: int
    text: str
    tokens: tuple[int, ...]
    reason: EndReason
    scores: tuple[TokenScore, ...] = ()
    error: str | None = None


class TextEngine:
    """Texts in, texts out, over an engine. ends: tokens that end an answer. never, not_first: tokens that the model's
    folder says are not made, or not at first."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        ends: Sequence[int],
        never: Sequence[int] = (),
        not_first: Sequence[int] = (),
    ):
        self.engine, self.tokenizer, self.ends = engine, tokenizer, tuple(ends)
        self._never = tuple((token, -math.inf) for token in never)
        self._not_first = tuple(not_first)

    def ready(self, prompt: str | Sequence[int] | Prompt) -> Prompt:
        """A text as the model reads it: an encoder with the tokens that its tokenizer puts around texts. Ids stay as
        they are. An empty text begins a document."""
        if isinstance(prompt, Prompt):
            return prompt
        if not isinstance(prompt, str):
            return Prompt(tuple(prompt))
        if self.engine.encodes:
            return Prompt(encoder_text(self.tokenizer, prompt) or (0,))
        return Prompt(tuple(self.tokenizer.encode(prompt) or [self.tokenizer.eod or 0]))

    def generate(
        self,
        prompts: Sequence[str | Sequence[int] | Prompt],
        options: SamplingOptions | None = None,
        samples: int = 1,
        stop: Sequence[str] = (),
    ) -> Iterator[TextAnswer]:
        """Answers as they are ready. samples: of each prompt. stop: a text ends before one of these. RequestError
        before anything is made, if one of the prompts cannot be served."""
        if self.engine.model.mesh.rank:
            self.engine.follow()
            return
        options = options or SamplingOptions()
        options = replace(
            options,
            end_tokens=(*options.end_tokens, *self.ends),
            bias=(*options.bias, *self._never),
            not_first=(*options.not_first, *self._not_first),
        )
        ready = [self.ready(prompt) for prompt in prompts]
        before = [self.engine.check(each, options).prompt for each in ready]
        texts: dict[int, LiveText] = {}
        for place, (each, context) in enumerate(zip(ready, before)):
            for n in range(samples):
                number = self.engine.submit(each, replace(options, sample=options.sample + n))
                texts[number] = LiveText(
                    place, n, Pieces(self.tokenizer, context), StopStrings(stop), frozenset(options.end_tokens)
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
        never: tuple[int, ...] = ()
        not_first: tuple[int, ...] = ()
        if engine.model.sound is not None:
            from phalanx.inference.recordings import SpeechRules  # jinja2: start-up time of other models

            rules = SpeechRules.of(self.folder)
            never, not_first = rules.never, rules.not_first
        super().__init__(engine, tokenizer, ends, never, not_first)

    @cached_property
    def speech(self) -> SpeechPrompts | None:
        """Makes prompts of recordings; None: the model hears none."""
        if self.engine.model.sound is None:
            return None
        from phalanx.inference.recordings import SpeechPrompts  # jinja2: start-up time of other models

        return SpeechPrompts.of(self.folder, self.tokenizer, self.engine.model.sound)

    @cached_property
    def chats(self) -> ChatPrompts:
        """Writes chats as prompts. CheckpointError for a model without a chat template, ConfigError for one that hears
        recordings."""
        refuse_sound(self.engine.model.plan.run.model, "a chat")
        return chat_prompts(self.folder, self.tokenizer, self.engine.model.pictures, self.engine.encodes)

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
    """`prompt` with its continuation, ended early by the end-of-document token; of a model whose encoder reads the
    prompt, the answer alone."""
    stream = TextStream(path, prompt, options or SamplingOptions(tokens=128, temperature=0.8))
    return stream.shown + "".join(stream)


class TextStream:
    """The continuation of a prompt, piece by piece as its tokens are made. ConfigError for a prompt that leaves no
    position for a token.

    stop     the text ends before one of these
    drafts   of tokens, which the model checks several at a time; they change nothing of the text
    adapter  folder of a LoRA adapter, which is added to the model's weights
    shown    what the continuation goes on from: the prompt; nothing, if an encoder reads that
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
        tokenizer, model = tokenizer_of(folder), model_config_from_hf(folder)
        encodes = model.decoder_start is not None
        self.positions, self.shown = model.max_position_embeddings, "" if encodes else prompt
        ids = encoder_text(tokenizer, prompt) if encodes else tokenizer.encode(prompt)
        self.ids = list(ids) or [tokenizer.eod or 0]
        self._prompt, self._tokens = tuple(self.ids), options.tokens
        self._first = 1 if encodes else len(self.ids)  # of what the decoder goes on from
        if len(self.ids) >= self.positions + encodes:
            raise ConfigError([too_long(prompt, len(self.ids), self.positions)])
        room = self.positions - self._first
        made = room if options.tokens is None else min(options.tokens, room)
        length = max(self._first + made, len(self.ids))
        self._sampler = TextSampler(path, replace(ALONE, length=length, drafts=drafts), adapter=adapter)
        ends = (*options.end_tokens, *self._sampler.ends)
        self._options, self._stop = replace(options, tokens=made, end_tokens=ends), stop
        self._context = self._sampler.engine.check(self._prompt, self._options).prompt
        self.notice: str | None = None

    def __iter__(self) -> Iterator[str]:
        engine, given = self._sampler.engine, 0
        live = LiveText(
            0,
            0,
            Pieces(self._sampler.tokenizer, self._context),
            StopStrings(self._stop),
            frozenset(self._options.end_tokens),
        )
        engine.submit(self._prompt, self._options)
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
            self.notice = self._notice(ended, len(self.ids) - len(self._prompt))

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


@dataclass(frozen=True)
class ChatLine:
    """A chat of a file, whose answer is to be made. folder: of the file, below which its images are; where: its line,
    for messages."""

    chat: AskedChat
    folder: str
    where: str

    def files(self) -> list[ImageFile]:
        """Its images, or its recording. BadMedia for one that cannot be read, or is not below the folder."""
        if not self.chat.files:
            return []
        from phalanx.data.media import media_bytes  # start-up time of prompts without images

        return [(name, media_bytes(Path(self.folder), name)) for name in self.chat.files]

    def prompt(self, sampler: TextSampler) -> Prompt:
        """DataError, which names the line, for one that cannot be asked."""
        given, speech = self.chat, sampler.speech
        try:
            if given.kind == "audio" and speech is None:
                raise RequestError("audio", given.files, "is not heard by this model")
            asked = given.messages, given.tools, self.files()
            if speech is not None:
                return speech.prompt(*asked, **given.variables)
            return sampler.chats.prompt(*asked, **given.variables)[1]
        except (DataError, RequestError) as error:
            raise DataError(f"{self.where}: {error}") from error


GivenPrompt = str | tuple[int, ...] | ChatLine


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What is to be made. path: of the model. prompts: texts, token ids or chats. samples: of each. out: a JSONL file;
    None: texts are printed. drafts: of tokens, which the model checks several at a time. adapter: folder of a LoRA
    adapter. shown: what answers say of each prompt: its `prompt`, and what else there is; None: the prompt itself."""

    path: str
    prompts: tuple[GivenPrompt, ...]
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
        mesh, _ = after.enter_context(joined_mesh(run, placement, identity(run, device_of(run, placement))))
        run, adapters = with_adapter(run, adapter)
        model = load_model(weights_folder(path), make_plan(forward_only(run), mesh.grid.world), mesh, adapters)
        yield after.enter_context(TextSampler(path, options, model))


def generate_rank(run: Run, placement: Placement, what: Generation) -> None:
    """One rank's part; rank 0 writes the answers, in the order of the prompts."""
    many = min(256, len(what.prompts) * what.samples)
    room = EngineOptions(sequences=max(1, many), drafts=what.drafts)
    with ExitStack() as after:
        sampler = after.enter_context(sampler_on_ranks(what.path, run, placement, room, what.adapter))
        first = not placement.rank  # alone asks: its prompts go to the others
        prompts = [each.prompt(sampler) if isinstance(each, ChatLine) and first else each for each in what.prompts]
        asked = [each for each in prompts if not isinstance(each, ChatLine)]
        answers = sampler.generate(asked, what.options, what.samples, what.stop)
        out = after.enter_context(open(what.out, "w", encoding="utf-8")) if what.out and not placement.rank else None
        for answer in in_order(answers, what.samples):
            given = what.prompts[answer.prompt]
            about = shown_prompt(given) if what.shown is None else what.shown[answer.prompt]
            if out is None:
                goes_on = isinstance(about.get("prompt"), str) and not sampler.engine.encodes
                print(f"{about['prompt'] if goes_on else ''}{answer.text}", flush=True)
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


def shown_prompt(given: GivenPrompt) -> dict[str, Any]:
    """What an answer's line says of its prompt."""
    if not isinstance(given, ChatLine):
        return {"prompt": given}
    if given.chat.kind == "audio" and len(given.chat.messages) == 1:
        return {"audio": given.chat.files[0]}
    plain = [{name: value for name, value in message.items() if name != "parts"} for message in given.chat.messages]
    return {"messages": plain, **({f"{given.chat.kind}s": list(given.chat.files)} if given.chat.files else {})}


def read_prompts(path: str) -> tuple[GivenPrompt, ...]:
    """Of a JSONL file: {"prompt": text or token ids}, {"messages": [...]} or {"audio": file} in each line. DataError
    names the line that is otherwise."""
    found: list[GivenPrompt] = []
    for number, data in enumerate(
        Path(path).read_bytes().split(b"\n"), 1
    ):  # texts may have other ends of lines in them
        line = data.decode(errors="replace")
        if not line.strip():
            continue
        try:
            record = json.loads(data.decode())
        except (ValueError, RecursionError):  # no UTF-8, no JSON, or JSON that is nested too deeply
            record = None
        prompt = record.get("prompt") if isinstance(record, dict) else None
        if isinstance(record, dict) and ("messages" in record or "audio" in record):
            where = f"{path}, line {number}"
            try:
                found.append(ChatLine(asked_chat(record), str(Path(path).parent), where))
            except BadChat as error:
                raise DataError(f"{where}: {error}") from error
        elif isinstance(record, dict) and prompt is not None and len(record) > 1:
            beside = ", ".join(sorted(record.keys() - {"prompt"}))
            raise DataError(f"{path}, line {number}: beside a prompt nothing is read: leave out {beside}")
        elif isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            found.append(tuple(prompt))
        elif isinstance(prompt, str):
            found.append(prompt)
        else:
            wanted = '{"prompt": "..."}, {"prompt": [token ids]}, {"messages": [...]} or {"audio": "a.flac"}'
            raise DataError(f"{path}, line {number} is not {wanted}: {line[:SHOWN]}")
    if not found:
        raise DataError(f"{path} holds no prompts")
    return tuple(found)

"""Recordings in prompts: decoded once when they are asked for, and again where an encoder hears them; and the tokens
with which the text begins that is said of them.

    bytes ──recording──▶ PromptSound: rows, digest ──request, to all ranks──▶ scheduler ──step──▶ rows of this rank
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.data.sound import Recordings
from phalanx.inference.pictures import DIGEST
from phalanx.inference.processor_files import check_found, processor_file
from phalanx.inference.request import Prompt, PromptSound, RequestError
from phalanx.models.model_config import ModelConfig
from phalanx.sequence.batch import IGNORE, PADDING_RUN, Batch, room_for_documents
from phalanx.sequence.media import MediaBeside
from phalanx.text.chat_template import ANSWER, ChatTemplate, load_chat_template
from phalanx.text.tokenizer_base import Tokenizer
from phalanx.text.tokenizer_files import read_json

FILES = ("generation_config.json", "config.json")


@dataclass(frozen=True)
class SoundReader:
    """How a model hears recordings."""

    spec: MediaBeside
    recordings: Recordings

    @staticmethod
    def of(model: ModelConfig, weights: Path | None = None, processor: str | None = None) -> SoundReader | None:
        """None for a model that hears none. processor: data.processor of the run that trained it; else what is beside
        the weights says how recordings become numbers, or the family. DataError for what does not fit the model."""
        spec = model.media
        if not isinstance(spec, MediaBeside):
            return None
        found = processor_file(weights, processor)
        if found is None:
            check_found(weights, processor)
        return SoundReader(spec, Recordings.made(spec, found))

    @property
    def rows(self) -> int:
        """Of each recording."""
        return self.spec.stream.largest

    def recording(self, data: bytes, name: str) -> PromptSound:
        """A file. BadSound for one that is not read; DataError if the package that decodes it is missing."""
        self.recordings.check_packages()
        heard = self.values(data, name)
        digest = hashlib.blake2b(heard.tobytes(), digest_size=DIGEST).hexdigest()
        return PromptSound(data, name, digest, len(heard))

    def values(self, data: bytes, name: str) -> np.ndarray:
        """Its rows."""
        return np.asarray(self.recordings.units(data, name, "the prompt").values, np.float32)

    def batch(self, sounds: Sequence[PromptSound], multiple: int, decodes: bool) -> Batch:
        """The stream of these recordings, one after another, each a document, and padding up to a multiple. Without any
        it is padding alone. decodes: whether this rank hears them; else there are no values."""
        sizes = [sound.rows for sound in sounds]
        filled = sum(sizes)
        rows = multiple * max(1, -(-filled // multiple))
        every = [*sizes, *(min(PADDING_RUN, rows - first) for first in range(filled, rows, PADDING_RUN))]
        documents = np.repeat(np.arange(len(every)), every)
        starts = np.cumsum([0, *every])[:-1]
        values: torch.Tensor | None = None
        if decodes:
            found = [self.values(sound.data, sound.name) for sound in sounds]
            padding = np.zeros((rows - filled, self.spec.stream.width), np.float32)
            values = torch.from_numpy(np.concatenate([*found, padding]))
        return Batch(
            tokens=torch.zeros(rows, dtype=torch.int64),
            labels=torch.full((rows,), IGNORE, dtype=torch.int64),
            positions=torch.from_numpy(np.arange(rows) - starts[documents]),
            samples=torch.zeros(rows, dtype=torch.int64),
            num_sequences=1,
            seq_length=rows,
            documents=torch.from_numpy(documents),
            real=torch.from_numpy((np.arange(rows) < filled).astype(np.int64)),
            most_documents=room_for_documents(len(every), rows),
            longest_document=max(every),
            values=values,
            idle=not sounds,
        )


# ---- the text that is said


@dataclass(frozen=True)
class SpeechRules:
    """What generation_config.json (and config.json) says of texts, as transformers' `generate` follows it.

    languages, tasks  their tokens, such as "<|en|>" and "transcribe"; none of a model of one language
    language, task    that are meant where none is named
    forced            tokens that follow the first, in order, where neither is named (forced_decoder_ids)
    no_timestamps     the token after which no times are written
    never, not_first  tokens that are not made, and those that are not the first that is (suppress_tokens,
                      begin_suppress_tokens)
    """

    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    language: str | None
    task: str | None
    forced: tuple[int, ...]
    no_timestamps: int | None
    never: tuple[int, ...]
    not_first: tuple[int, ...]

    @staticmethod
    def of(folder: Path) -> SpeechRules:
        """DataError for one that cannot be followed."""
        found: dict[str, Any] = {}
        for name in reversed(FILES):
            found |= {key: value for key, value in read_json(folder / name).items() if value is not None}
        forced = list[int]()
        for number, pair in enumerate(found.get("forced_decoder_ids", ()), 1):
            if not isinstance(pair, list) or len(pair) != 2 or pair[0] != number:
                raise DataError(f"{folder}: forced_decoder_ids={found['forced_decoder_ids']} must be [[1, id], ...]")
            forced += [] if pair[1] is None else [pair[1]]
        return SpeechRules(
            languages=found.get("lang_to_id", {}),
            tasks=found.get("task_to_id", {}),
            language=found.get("language"),
            task=found.get("task"),
            forced=tuple(forced),
            no_timestamps=found.get("no_timestamps_token_id"),
            never=tuple(found.get("suppress_tokens", ())),
            not_first=tuple(found.get("begin_suppress_tokens", ())),
        )

    def begins(self, start: int, language: str | None = None, task: str | None = None) -> tuple[int, ...]:
        """The tokens with which a text begins. DataError for a language or task that the model has no token for, or for
        none where it needs one."""
        language, task = language or self.language, task or self.task
        found = [start]
        if language is None and task is None and self.forced:
            found += self.forced
        elif self.languages:
            found.append(self._named(language))
            if task is not None or self.tasks:
                found.append(self._of_task(task or "transcribe"))
        elif language is not None or task is not None:
            raise DataError("the model has no tokens for languages and tasks (lang_to_id in generation_config.json)")
        if self.no_timestamps is not None and found[-1] != self.no_timestamps:
            found.append(self.no_timestamps)
        return tuple(found)

    def _named(self, language: str | None) -> int:
        known = ", ".join(sorted(name.strip("<|>") for name in self.languages))
        if language is None:
            raise DataError(f'a recording needs its language: "chat_template_kwargs": {{"language": ...}} ({known})')
        for name in (language, f"<|{language}|>"):
            if name in self.languages:
                return self.languages[name]
        raise DataError(f"language {language!r} is none that the model says: {known}")

    def _of_task(self, task: str) -> int:
        if task not in self.tasks:
            raise DataError(f"task {task!r} is none that the model has: {', '.join(sorted(self.tasks)) or 'none'}")
        return self.tasks[task]


@dataclass(frozen=True)
class SpeechPrompts:
    """Chats with a recording as prompts. template: writes how texts begin, as in training (what stands before its
    answer); None: `rules` say."""

    reader: SoundReader
    tokenizer: Tokenizer
    template: ChatTemplate | None
    rules: SpeechRules

    @staticmethod
    def of(folder: Path, tokenizer: Tokenizer, reader: SoundReader) -> SpeechPrompts:
        return SpeechPrompts(reader, tokenizer, load_chat_template(folder), SpeechRules.of(folder))

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        files: Sequence[tuple[str, bytes]] = (),
        **variables: Any,
    ) -> Prompt:
        """files: the recording. DataError for one that cannot be read, or a text that cannot begin; RequestError if
        there is not one recording."""
        if len(files) != 1:
            raise RequestError("audio", [name for name, _ in files], "must be one: an encoder hears a recording")
        [(name, data)] = files
        start = self.reader.spec.begins
        if self.template is None:
            said = {key: value for key, value in variables.items() if key in ("language", "task")}
            if more := sorted(set(variables) - set(said)):
                raise DataError(f"chat_template_kwargs has {', '.join(more)}, and the model has no chat template")
            begins = self.rules.begins(start, **said)
        else:
            ids = self._written(self.template, messages, tools, variables)
            begins = ids if ids[:1] == (start,) else (start, *ids)
        return Prompt(begins, sound=self.reader.recording(data, name))

    def _written(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
    ) -> tuple[int, ...]:
        """What a template writes before an answer."""
        if not template.marks_answers(tools):
            return template.prompt(self.tokenizer, messages, tools, **variables).ids
        answered = [*messages, {"role": "assistant", "content": ""}]
        try:
            text = template.render(answered, tools, {"add_generation_prompt": False, **variables})
        except Exception as error:  # a template is a program, and this is whatever it raises
            raise DataError(f"the model's chat template refuses these messages: {error}") from None
        return tuple(self.tokenizer.encode_with_special(text.partition(ANSWER)[0]))

"""Chats as the text and tokens that a model was trained on, by the Jinja template in its folder. The template is a
stranger's: it runs in a sandbox, and what people wrote cannot become special tokens."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.data.files import must_exist
from phalanx.text.tokenizer_base import Tokenizer
from phalanx.text.tokenizer_files import read_json, token_text

FILE = "chat_template.jinja"
FOLDER = "additional_chat_templates"
TOOL_USE = "tool_use"  # the name of a folder's second template, which is for chats with tools
# characters for private use, which are taken out of what people wrote
BREAK = "\U000f0000"  # set inside special tokens' names that people wrote
ANSWER, ANSWER_END = "\U000f0001", "\U000f0002"  # around what a template marks as an answer
PRIVATE = re.compile(f"[{BREAK}{ANSWER}{ANSWER_END}]")
MARK = re.compile(r"{%[-+]?\s*generation\b")


class ChatTemplate:
    """The templates of a folder.

    source     the text of the one for chats without tools
    variables  special tokens by name, such as bos_token
    moment     the time that templates may ask for; None: now
    """

    def __init__(
        self, templates: Mapping[str, str], variables: Mapping[str, str], where: str, moment: datetime | None = None
    ):
        self.moment = moment
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
        )
        environment.filters["tojson"] = as_json
        environment.globals.update(raise_exception=refuse, strftime_now=self._time)
        self.source, self._where = templates["default"], where
        self._texts, self.variables = dict(templates), dict(variables)
        try:
            self._compiled = {name: environment.from_string(text) for name, text in templates.items()}
        except TemplateSyntaxError as error:
            raise DataError(f"{where}: not a chat template: line {error.lineno}: {error.message}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self._texts, self.variables, self._where, self.moment)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of templates and variables."""
        return hashlib.sha256(json.dumps([self._texts, self.variables], sort_keys=True).encode()).hexdigest()

    def marks_answers(self, tools: Sequence[Any] | None) -> bool:
        """Whether the template has `{% generation %}`."""
        return MARK.search(self._text_for(tools)) is not None

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, **variables: Any) -> str:
        """The chat, and the beginning of the answer. variables: others that the template asks for. DataError if it
        refuses the messages."""
        words = {"add_generation_prompt": True, **variables}
        try:
            text = self.render(messages, tools, words)
        except Exception as error:  # a template is a program, and this is whatever it raises
            raise DataError(f"the model's chat template refuses these messages: {error}") from None
        return text.replace(ANSWER, "").replace(ANSWER_END, "")

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, variables: Mapping[str, Any]
    ) -> str:
        """What the template writes, with ANSWER and ANSWER_END around what it marks. Raises whatever it raises."""
        template = self._compiled[self._name_for(tools)]
        words = {"documents": None, **self.variables, **variables}
        return template.render(messages=messages, tools=tools, **words)

    def prompt(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        media: WrittenMedia | None = None,
        **variables: Any,
    ) -> ChatPrompt:
        """`text` and its tokens. Names of special tokens in messages, tools and variables stay text. media: how
        they stand in it, which messages have among their `parts` (chat_records)."""
        special = special_names(tokenizer)
        asked: Sequence[Mapping[str, Any]] = broken(messages, special)
        if media is not None:
            asked = with_media(asked, self, media)
        text = self.text(asked, broken(tools, special), **broken(variables, special))
        text = text if media is None else media.rewritten(text)
        ids: list[int] = []
        for part in text.split(BREAK):
            ids += tokenizer.encode_with_special(part) if part else []
        return ChatPrompt(text.replace(BREAK, ""), tuple(ids))

    def reads(self, variable: str) -> bool:
        """Whether the template mentions a variable."""
        return re.search(rf"\b{re.escape(variable)}\b", self.source) is not None

    def _name_for(self, tools: Sequence[Any] | None) -> str:
        return TOOL_USE if tools and TOOL_USE in self._compiled else "default"

    def _text_for(self, tools: Sequence[Any] | None) -> str:
        return self._texts[self._name_for(tools)]

    def _time(self, form: str) -> str:
        return (self.moment or datetime.now()).strftime(form)


class WrittenMedia(Protocol):
    """How media stand in texts (text/media.py)."""

    @property
    def kind(self) -> str: ...

    @property
    def written(self) -> str: ...

    def rewritten(self, text: str) -> str: ...


def with_media(
    messages: Sequence[Mapping[str, Any]], template: ChatTemplate, media: WrittenMedia | None
) -> list[dict[str, Any]]:
    """Messages whose `parts` became what templates take: a list of parts, or, for a template that knows none, a
    text with a placeholder for each."""
    found = list[dict[str, Any]]()
    for message in messages:
        parts = message.get("parts")
        plain = {name: value for name, value in message.items() if name != "parts"}
        if parts is not None and media is not None:
            texts = (media.written if part.get("type") != "text" else part["text"] for part in parts)
            plain["content"] = parts if template.reads(media.kind) else "\n".join(texts)
        found.append(plain)
    return found


@dataclass(frozen=True)
class ChatPrompt:
    """A chat as its template writes it, up to where the answer begins."""

    text: str
    ids: tuple[int, ...]


class GenerationTag(Extension):
    """`{% generation %}`: marks answers for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        around = [nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (ANSWER, ANSWER_END)]
        return nodes.Scope([around[0], *body, around[1]], lineno=line)


def as_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: Any = False):
    """Jinja's own filter writes HTML's escapes, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(message: str) -> None:
    raise TemplateError(message)


def special_names(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Finds the names of special tokens in a text, the longest first."""
    names = sorted(tokenizer.special_tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names))) if names else re.compile(r"(?!)")


def broken(value: Any, special: re.Pattern[str]) -> Any:
    """`value` with BREAK inside the special tokens' names in its strings."""
    if isinstance(value, str):
        return special.sub(lambda found: found[0][:1] + BREAK + found[0][1:], PRIVATE.sub("", value))
    if isinstance(value, Mapping):
        return {key: broken(inner, special) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [broken(inner, special) for inner in value]
    return value


def load_chat_template(folder: str | Path) -> ChatTemplate | None:
    """The template of a Hugging Face folder: chat_template.jinja, chat_template.json, or that of
    tokenizer_config.json; None if it has none. DataError if it cannot be read."""
    folder = Path(folder)
    config = read_json(folder / "tokenizer_config.json")
    templates, where = named_templates(config.get("chat_template")), "tokenizer_config.json"
    if (beside := read_json(folder / "chat_template.json").get("chat_template")) is not None:
        templates, where = named_templates(beside), "chat_template.json"
    if (folder / FILE).exists():
        templates, where = {"default": (folder / FILE).read_text(encoding="utf-8")}, FILE
        for path in sorted((folder / FOLDER).glob("*.jinja")):
            templates[path.stem] = path.read_text(encoding="utf-8")
    if not templates:
        return None
    if "default" not in templates:
        raise DataError(f"{folder / where}: has chat templates named {', '.join(templates)}, but none named default")
    return ChatTemplate(templates, token_variables(folder), str(folder / where))


def token_variables(folder: Path) -> dict[str, str]:
    """Special tokens that templates may ask for, such as bos_token, of a tokenizer's folder."""
    tokens = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
    variables = {name: token_text(value) for name, value in tokens.items() if name.endswith("_token")}
    return {name: text for name, text in variables.items() if text}


def template_for(tokenizer: Tokenizer, given: str, file: str | None) -> ChatTemplate | None:
    """The template of chats to train on: that of a Jinja file, or else the one beside the tokenizer, which was loaded
    from `given`; None if there is none. DataError if it cannot be read.

    Special tokens are those of the tokenizer's folder. A tokenizer without a folder has its end of a document alone.
    """
    folder = Path(given) if os.path.isdir(given) else Path(given).parent if os.path.isfile(given) else None
    if file is None:
        return None if folder is None else load_chat_template(folder)
    ends = {} if tokenizer.eod_token is None else dict.fromkeys(("bos_token", "eos_token"), tokenizer.eod_token)
    try:
        text = must_exist(file).read_text(encoding="utf-8")
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise DataError(f"{file}: not a chat template: {error}") from None
    return ChatTemplate({"default": text}, ends if folder is None else token_variables(folder), file)


def named_templates(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    return {each["name"]: each["template"] for each in value or ()}

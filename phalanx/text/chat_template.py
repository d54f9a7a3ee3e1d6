"""Chats as the text and tokens that a model was trained on, by the Jinja template in its folder. The template is a
stranger's: it runs in a sandbox, and what people wrote cannot become special tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from phalanx.base.errors import DataError
from phalanx.text.tokenizer_base import Tokenizer
from phalanx.text.tokenizer_files import read_json, token_text

FILE = "chat_template.jinja"
FOLDER = "additional_chat_templates"
TOOL_USE = "tool_use"  # the name of a folder's second template, which is for chats with tools
BREAK = "\U000f0000"  # set inside special tokens' names that people wrote (for private use: no text has it)


class ChatTemplate:
    """The templates of a folder.

    source    the text of the one for chats without tools
    """

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, str], where: str):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
        )
        environment.filters["tojson"] = as_json
        environment.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form))
        self.source = templates["default"]
        self._variables = dict(variables)
        try:
            self._compiled = {name: environment.from_string(text) for name, text in templates.items()}
        except TemplateSyntaxError as error:
            raise DataError(f"{where}: not a chat template: line {error.lineno}: {error.message}") from None

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, **variables: Any) -> str:
        """The chat, and the beginning of the answer. variables: others that the template asks for. DataError if it
        refuses the messages."""
        template = self._compiled.get(TOOL_USE) if tools else None
        template = template or self._compiled["default"]
        words = {"add_generation_prompt": True, "documents": None, **self._variables, **variables}
        try:
            return template.render(messages=messages, tools=tools, **words)
        except Exception as error:  # a template is a program, and this is whatever it raises
            raise DataError(f"the model's chat template refuses these messages: {error}") from None

    def prompt(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        **variables: Any,
    ) -> ChatPrompt:
        """`text` and its tokens. Names of special tokens in messages, tools and variables stay text."""
        names = sorted(tokenizer.special_tokens, key=len, reverse=True)
        special = re.compile("|".join(map(re.escape, names))) if names else re.compile(r"(?!)")
        text = self.text(broken(messages, special), broken(tools, special), **broken(variables, special))
        ids: list[int] = []
        for part in text.split(BREAK):
            ids += tokenizer.encode_with_special(part) if part else []
        return ChatPrompt(text.replace(BREAK, ""), tuple(ids))

    def reads(self, variable: str) -> bool:
        """Whether the template mentions a variable."""
        return re.search(rf"\b{re.escape(variable)}\b", self.source) is not None


@dataclass(frozen=True)
class ChatPrompt:
    """A chat as its template writes it, up to where the answer begins."""

    text: str
    ids: tuple[int, ...]


class GenerationTag(Extension):
    """`{% generation %}`: marks answers for training; for a text it means nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def as_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: Any = False):
    """Jinja's own filter writes HTML's escapes, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(message: str) -> None:
    raise TemplateError(message)


def broken(value: Any, special: re.Pattern[str]) -> Any:
    """`value` with BREAK inside the special tokens' names in its strings."""
    if isinstance(value, str):
        return special.sub(lambda found: found[0][:1] + BREAK + found[0][1:], value.replace(BREAK, ""))
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
    tokens = {**read_json(folder / "special_tokens_map.json"), **config}
    variables = {name: token_text(value) for name, value in tokens.items() if name.endswith("_token")}
    return ChatTemplate(templates, {name: text for name, text in variables.items() if text}, str(folder / where))


def named_templates(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    return {each["name"]: each["template"] for each in value or ()}

"""Prompts with passages: a Jinja template puts the passages, with their sources, before the question."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import TemplateError, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from phalanx.base.errors import DataError
from phalanx.retrieval.retriever import FoundPassage, Lookup, Retriever

DEFAULT = """\
{% for p in passages %}
[{{ p.number }}]{% if p.source %} ({{ p.source }}){% endif %} {{ p.text }}

{% endfor %}
{{ prompt }}"""
"""`passages` have number (from 1), id, source (perhaps none), text and score; `prompt` is what was asked."""


class PassageTemplate:
    """How a prompt and its passages become one text."""

    def __init__(self, path: str | Path | None = None):
        """path: of a Jinja file; None: DEFAULT. DataError for what is no such template."""
        where = "the default template" if path is None else str(path)
        try:
            source = DEFAULT if path is None else Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{where}: cannot be read: {error}") from None
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        try:
            read = meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise DataError(f"{where}: not a template: line {error.lineno}: {error.message}") from None
        lacking = [name for name in ("passages", "prompt") if name not in read]
        if lacking or read - {"passages", "prompt"}:
            odd = ", ".join(sorted(read - {"passages", "prompt"}))
            rule = f"does not read {' and '.join(lacking)}" if lacking else f"reads {odd}, which there is not"
            raise DataError(f"{where}: {rule}: it is given `passages` and `prompt`")
        self._where = where

    def render(self, prompt: str, passages: Sequence[FoundPassage]) -> str:
        shown = [
            {"number": n, "id": p.passage.id, "source": p.passage.source, "text": p.passage.text, "score": p.score}
            for n, p in enumerate(passages, 1)
        ]
        try:
            return self._template.render(prompt=prompt, passages=shown)
        except TemplateError as error:
            raise DataError(f"{self._where}: {error}") from None


class PassageAdder:
    """Finds passages for prompts and puts them there. Used from any thread."""

    def __init__(self, asked: Lookup, template: str | Path | None = None):
        """Problems as of retriever.checked and of PassageTemplate."""
        self._template, self._retriever = PassageTemplate(template), Retriever(asked)

    def add(self, prompts: Sequence[str]) -> tuple[list[str], list[list[FoundPassage]]]:
        """Prompts with their passages, and these."""
        found = self._retriever.find(prompts)
        return [self._template.render(prompt, each) for prompt, each in zip(prompts, found)], found

    def one(self, prompt: str) -> tuple[str, list[FoundPassage]]:
        [text], [found] = self.add([prompt])
        return text, found

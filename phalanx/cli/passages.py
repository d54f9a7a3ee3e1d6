"""`--index` of `generate`, `chat` and `serve`: passages found for what is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from phalanx.retrieval.retriever import FoundPassage, Lookup

NEIGHBOURS = 4
NAMES = ("neighbours", "embedder", "passage_template")


def takes_passages(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a verb whose prompts may get passages."""
    options = (
        click.option(
            "--index",
            type=click.Path(file_okay=False),
            default=None,
            metavar="FOLDER",
            help="Put passages of this index (phalanx index) before each prompt (needs phalanx[index]).",
        ),
        click.option(
            "--neighbours",
            type=click.IntRange(min=1),
            default=None,
            help=f"Passages for each prompt (default: {NEIGHBOURS}).",
        ),
        click.option("--embedder", default=None, metavar="RUN", help="The model that made the index, if it has moved."),
        click.option(
            "--passage-template",
            type=click.Path(dir_okay=False, exists=True),
            default=None,
            metavar="FILE.jinja",
            help="How `passages` and `prompt` become one text (default: numbered passages, then the prompt).",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def lookup_of(asked: dict[str, Any]) -> tuple[Lookup, str | None] | None:
    """What is to be looked up, and the file of the template; None: nothing. Takes these options out of `asked`. An
    index of another embedder is refused here, before anything is loaded."""
    from phalanx.retrieval.prompting import PassageTemplate
    from phalanx.retrieval.retriever import Lookup, checked

    index, (neighbours, embedder, template) = asked.pop("index"), (asked.pop(name) for name in NAMES)
    if index is None:
        for name, value in zip(NAMES, (neighbours, embedder, template)):
            if value is not None:
                raise click.UsageError(f"--{name.replace('_', '-')} does nothing without --index")
        return None
    found = Lookup(index=index, neighbours=neighbours or NEIGHBOURS, embedder=embedder)
    checked(found)
    PassageTemplate(template)
    return found, template


def with_passages(
    asked: tuple[Lookup, str | None], prompts: Sequence[str]
) -> tuple[list[str], list[list[FoundPassage]]]:
    """Prompts with their passages, and these."""
    from phalanx.retrieval.prompting import PassageAdder

    return PassageAdder(*asked).add(prompts)


def say_sources(passages: Sequence[FoundPassage]) -> None:
    """A line for each, beside the text."""
    for number, found in enumerate(passages, 1):
        source = f" ({found.passage.source})" if found.passage.source else ""
        click.echo(f"[{number}] {found.passage.id}{source} score={found.score:.3f}", err=True)

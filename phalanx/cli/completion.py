"""Completion in shells: verbs by click, config keys and their values here.

eval "$(_PHALANX_COMPLETE=bash_source phalanx)"
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

if typing.TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def use_bash() -> None:
    """Let click use `Bash`."""
    from click.shell_completion import add_completion_class  # start-up time: only completion needs it

    from phalanx.cli.bash import Bash

    add_completion_class(Bash)


def configs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Files, and so the folders of runs, which the shell completes."""
    from click.shell_completion import CompletionItem  # start-up time

    return [CompletionItem(incomplete, type="file")]


def keys(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """For `explain`: keys and sections."""
    from phalanx.base import tree
    from phalanx.config.run import Run

    names = dict.fromkeys(k.path for k in tree.keys(Run))
    return _next_steps(incomplete, list(names))


def overrides(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """`key=`, and after it the values that the key accepts.

    bash splits words at `=`: a completed part then ends in a key or in `=`, and only the value is asked for. Other
    shells ask for the whole word.
    """
    before: Sequence[str] = ctx.params.get("overrides") or ()
    key, equals, start = incomplete.partition("=")
    if equals:
        return [f"{key}={value}" for value in values_of(key) if value.startswith(start)]
    whole = [word for word in before if word != "="]
    if before and (before[-1] == "=" or (incomplete == "" and whole and "=" not in whole[-1] and values_of(whole[-1]))):
        return [value for value in values_of(whole[-1]) if value.startswith(incomplete)]
    dashes = "--" if incomplete.startswith("--") else ""
    return _next_steps(incomplete, [f"{dashes}{key}=" for key in _leaves()])


def _next_steps(incomplete: str, names: Sequence[str]) -> list[str]:
    """Names with this prefix; if there are many, only up to their next dot."""
    fitting = [name for name in names if name.startswith(incomplete)]
    dots = incomplete.count(".")
    sections = dict.fromkeys(
        ".".join(name.split(".")[: dots + 1]) + "." if name.count(".") > dots else name for name in fitting
    )
    return list(sections if len(sections) > 1 else fitting)


def _leaves() -> list[str]:
    from phalanx.base import tree
    from phalanx.config.run import Run

    return list(dict.fromkeys(k.path for k in tree.leaves(Run)))


def values_of(key: str) -> list[str]:
    """The values that a key accepts, if they can be listed: words, yes or no, names of files in this folder."""
    from phalanx.base import registry, tree
    from phalanx.config.read import NAMED
    from phalanx.config.run import Run

    key, found = key.removeprefix("--"), list[str]()
    for k in (k for k in tree.leaves(Run, only=key.partition(".")[0]) if k.path == key):
        for hint in tree.members(k.hint):
            found += _listed(hint)
        if type(None) in typing.get_args(k.hint):
            found.append("null")
    if key in NAMED:
        found += registry.names(NAMED[key])
    if key in ("init_from", "checkpoint.load", "data.tokenizer", "dir"):
        found += sorted(str(p) for p in Path().iterdir() if not p.name.startswith("."))
    return list(dict.fromkeys(found))


def _listed(hint: Any) -> list[str]:
    if typing.get_origin(hint) is typing.Literal:
        return [str(value) for value in typing.get_args(hint)]
    return ["true", "false"] if hint is bool else []

"""The click groups and commands used by `phalanx` and its verbs."""

from __future__ import annotations

import difflib
import re
from typing import Any

import click

DOTTED = re.compile(r"--([A-Za-z_]\w*(?:\.[^=\s.]+)+)(?:=(.*))?", re.DOTALL)


class ConfigVerb(click.Command):
    """A verb that accepts overrides of a config: `--a.b=c` and `--a.b c`, as in other programs, mean `a.b=c`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        takes = any(p.name == "overrides" for p in self.params)
        return super().parse_args(ctx, as_overrides(args) if takes else args)


def as_overrides(args: list[str]) -> list[str]:
    """The arguments, with options whose name contains a dot as overrides (none of our options has one). A usage error
    if the value is missing."""
    made: list[str] = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        found = DOTTED.fullmatch(word) if word != "--" else None
        if word == "--":
            return [*made, word, *rest]
        if found is None:
            made.append(word)
        elif found[2] is not None:
            made.append(f"{found[1]}={found[2]}")
        elif rest and not rest[0].startswith("--"):
            made.append(f"{found[1]}={rest.pop(0)}")
        else:
            raise click.UsageError(f"{word} needs a value: {found[1]}=VALUE (`phalanx explain {found[1]}` says which)")
    return made


class Verbs(click.Group):
    """A group that lists its verbs in order of use with complete help lines, and suggests verbs for a mistyped one."""

    command_class = ConfigVerb

    def list_commands(self, ctx: click.Context) -> list[str]:
        order = (
            "doctor",
            "data",
            "plan",
            "preflight",
            "train",
            "verify",
            "bench",
            "eval",
            "generate",
            "chat",
            "serve",
            "embed",
            "index",
            "checkpoint",
            "export",
            "import",
            "import-config",
            "launch",
            "status",
            "logs",
            "explain",
        )
        return sorted(self.commands, key=lambda name: (order.index(name) if name in order else len(order), name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click does, but nothing is truncated."""
        rows = [
            (name, one_line(command))
            for name in self.list_commands(ctx)
            if (command := self.get_command(ctx, name)) and not command.hidden
        ]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            close = difflib.get_close_matches(name, self.list_commands(ctx), n=3, cutoff=0.5)
            hint = (
                f" Did you mean {' or '.join(close)}?"
                if close
                else f" There are: {', '.join(self.list_commands(ctx))}."
            )
            ctx.fail(f"No such verb: {name}.{hint}")
        return super().resolve_command(ctx, args)


def one_line(command: Any) -> str:
    """The short help of a verb, else the first sentence of its help."""
    text = " ".join((command.short_help or (command.help or "").split("\n\n")[0]).split())
    return text if command.short_help else text.split(". ")[0].removesuffix(".") + "."

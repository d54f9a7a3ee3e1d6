"""The click groups and commands used by `phalanx` and its verbs."""

from __future__ import annotations

import difflib
import re
from importlib import import_module
from typing import Any

import click

from phalanx.base.dataclass import dataclass

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


@dataclass(frozen=True)
class VerbElsewhere:
    """A verb in a file that is imported when the verb is used. where: `module:NAME`; help: its line in the group's."""

    where: str
    help: str
    hidden: bool = False

    def load(self) -> click.Command:
        module, _, name = self.where.partition(":")
        verb: click.Command = getattr(import_module(module), name)
        return verb


class Verbs(click.Group):
    """A group that lists its verbs in order of use with complete help lines, and suggests verbs for a mistyped one.

    elsewhere   verbs by name that are not imported yet: the group's help needs only their lines
    """

    command_class = ConfigVerb

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.elsewhere: dict[str, VerbElsewhere] = {}

    def add_elsewhere(self, name: str, where: str, help: str, hidden: bool = False) -> None:
        self.elsewhere[name] = VerbElsewhere(where, help, hidden)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.elsewhere:
            self.add_command(self.elsewhere.pop(cmd_name).load(), cmd_name)
        return super().get_command(ctx, cmd_name)

    def every(self) -> dict[str, click.Command]:
        """All verbs by name, each imported."""
        context = click.Context(self)
        found = {name: self.get_command(context, name) for name in self.list_commands(context)}
        return {name: verb for name, verb in found.items() if verb is not None}

    def line_of(self, ctx: click.Context, name: str) -> str | None:
        """A verb's line in the help; None if it is hidden."""
        if name in self.elsewhere:
            return None if self.elsewhere[name].hidden else self.elsewhere[name].help
        verb = self.get_command(ctx, name)
        return None if verb is None or verb.hidden else one_line(verb)

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
        names = {*self.commands, *self.elsewhere}
        return sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click does, but nothing is truncated."""
        rows = [(name, line) for name in self.list_commands(ctx) if (line := self.line_of(ctx, name))]
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

"""The kind of group that `phalanx` and its verbs are."""

from __future__ import annotations

import difflib

import click


class Verbs(click.Group):
    """A group that lists its verbs in the order of use, and says what a mistyped one may have meant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        order = ("doctor", "data", "plan", "train", "verify", "bench", "eval", "generate", "checkpoint", "export", "import", "explain")
        return sorted(self.commands, key=lambda name: (order.index(name) if name in order else len(order), name))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            close = difflib.get_close_matches(name, self.list_commands(ctx), n=3, cutoff=0.5)
            hint = f" Did you mean {' or '.join(close)}?" if close else f" There are: {', '.join(self.list_commands(ctx))}."
            ctx.fail(f"No such verb: {name}.{hint}")
        return super().resolve_command(ctx, args)

"""Arguments and options that several verbs share."""

from __future__ import annotations

import click

from phalanx.cli import completion

CONFIG = click.argument("config", metavar="CONFIG", shell_complete=completion.configs)
OVERRIDES = click.argument("overrides", nargs=-1, metavar="[a.b=c]...", shell_complete=completion.overrides)
RANKS = click.option(
    "--ranks",
    type=int,
    default=None,
    metavar="N",
    help="Number of ranks (default: all GPUs; on a CPU what the layout needs).",
)
JSON = click.option("--json", "out", type=click.Path(dir_okay=False), default=None, help="Write the figures here too.")

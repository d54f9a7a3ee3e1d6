"""Arguments and options that several verbs share."""

from __future__ import annotations

import click

CONFIG = click.argument("config", metavar="CONFIG")
OVERRIDES = click.argument("overrides", nargs=-1, metavar="[a.b=c]...")
RANKS = click.option("--ranks", type=int, default=None, metavar="N", help="Number of ranks (default: all GPUs; on a CPU what the layout needs).")
JSON = click.option("--json", "out", type=click.Path(dir_okay=False), default=None, help="Write the figures here too.")

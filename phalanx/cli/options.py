"""Arguments and options that several verbs share."""

from __future__ import annotations

import shlex
import sys

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
FORWARD_RANKS = click.option(
    "--ranks", type=int, default=None, metavar="N", help="Number of ranks (default: what the layout needs)."
)
JSON = click.option("--json", "out", type=click.Path(dir_okay=False), default=None, help="Write the figures here too.")
OVERWRITE = click.option("--overwrite", is_flag=True, help="Replace other token files of this name.")


def speculation(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """A text that says how tokens are drafted, checked."""
    if value is not None:
        from phalanx.inference.drafter import drafts_named  # torch: not for --help

        try:
            drafts_named(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
    return value


def typed() -> str:
    """What a person typed to start this program, with its name as they know it, on one line."""
    return " ".join(shlex.join(["phalanx", *sys.argv[1:]]).split())


ADAPTER = click.option(
    "--adapter",
    default=None,
    metavar="FOLDER|RUN",
    help="Add a LoRA adapter to the model's weights: a PEFT folder, or a run that trained one.",
)


def named_adapters(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Of NAME=FOLDER, each name once."""
    found: dict[str, str] = {}
    for value in values:
        name, _, folder = value.partition("=")
        if not name or not folder:
            raise click.BadParameter(f"{value!r}: must be NAME=FOLDER; clients ask for the model NAME")
        if name in found:
            raise click.BadParameter(f"{name!r} is given twice")
        found[name] = folder
    return found


ADAPTERS = click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="NAME=FOLDER|RUN",
    callback=named_adapters,
    help="Serve a LoRA adapter over the model too, as the model NAME (may be given several times).",
)
PAGES = click.option(
    "--pages",
    type=click.Choice(["model", "fp8"]),
    default=None,
    help="Store keys and values in the model's dtype (default), or in FP8: half of the memory of bf16, and logits that "
    "are slightly off.",
)
SPECULATE = click.option(
    "--speculate",
    default=None,
    metavar="ngram:N|mtp[:N]",
    callback=speculation,
    help="Draft up to N tokens from what the text repeats, or by the model's multi-token prediction modules, and check "
    "them at once; the text stays the same.",
)

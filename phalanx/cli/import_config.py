"""`phalanx import-config`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from phalanx.base.errors import Problem
from phalanx.cli.options import RANKS


def named_values(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Of NAME=VALUE, each name once."""
    found: dict[str, str] = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not name or name in found:
            raise click.BadParameter(f"{value!r}: must be NAME=VALUE, each name once")
        found[name] = text
    return found


FOR_RULES = {"model.vocab_size": 32768, "train.steps": 1_000_000}
"""Values with which the rules of all other keys can be checked while these are still to be set by hand."""


def is_about(problem: Problem, key: str) -> bool:
    """Whether a problem is one of a key, or of a section that it is in."""
    return key in problem.because or problem.field == key or key.startswith(f"{problem.field}.")


@click.command("import-config", short_help="Turn another framework's config into a config.")
@click.argument("file", metavar="FILE")
@click.option("-o", "--out", required=True, metavar="RUN.yaml", help="The config to write.")
@click.option("--from", "framework", default=None, metavar="NAME", help="megatron, torchtitan or deepspeed.")
@click.option(
    "--var",
    "variables",
    multiple=True,
    metavar="NAME=VALUE",
    callback=named_values,
    help="Value of a variable of the script, or of its argument 1, 2, ... (several times).",
)
@RANKS
def import_config(file: str, out: str, framework: str | None, variables: dict[str, str], ranks: int | None) -> None:
    """Turn a Megatron-LM script, line of arguments or MODEL_ARGS, a torchtitan TOML or a DeepSpeed JSON into a config.

    Nothing in FILE is executed. What becomes of each key is printed, and is written in the config as comments.
    """
    from phalanx.base.errors import ConfigError
    from phalanx.cli.setup import all_problems
    from phalanx.config.device_check import Facts
    from phalanx.config.importing import SECRET, read_foreign, report, write, yaml_text
    from phalanx.config.importing import import_config as translate
    from phalanx.config.read import read

    imported = translate(read_foreign(file, ranks, variables), framework)
    path = Path(out)
    words = list(sys.argv[1:])
    for at, word in enumerate(words):  # the value of a secret is not written into a file
        name, given, _ = word.partition("=")
        words[at] = f"{name}=..." if given and SECRET.search(name) else word
    write(yaml_text(imported, shlex.join(["phalanx", *words]), file), path)
    click.echo(report(imported, out))
    for_rules = [f"{key}={value}" for key, value in FOR_RULES.items() if key in imported.by_hand]
    loaded = read(path, for_rules)
    world = ranks or imported.ranks
    if loaded.run is not None and ranks is None:
        least = loaded.run.layout.least_ranks
        world = world if world and world % least == 0 else least
    found = all_problems(loaded, Facts(world_size=world or 1, local_ranks=world or 1, files=False))
    left = [p for p in found if not any(is_about(p, key) for key in imported.by_hand)]
    if left:
        raise ConfigError(left)

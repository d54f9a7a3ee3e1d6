"""`phalanx generate`: from a checkpoint, prompts and options to ranks that make text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.checkpoints import say_ignored
from phalanx.cli.completion import configs
from phalanx.cli.options import ADAPTER, FORWARD_RANKS, OVERRIDES, SPECULATE
from phalanx.cli.passages import lookup_of, say_sources, takes_passages, with_passages
from phalanx.cli.verbs import ConfigVerb
from phalanx.inference.overrides import refuse_others

if TYPE_CHECKING:
    from phalanx.config.run import Run
    from phalanx.inference.request import SamplingOptions
    from phalanx.retrieval.retriever import Lookup

SAMPLING = ("tokens", "temperature", "top_k", "top_p", "min_p", "seed")


@click.command("generate", cls=ConfigVerb, short_help="Make text with a checkpoint.")
@click.argument("checkpoint", shell_complete=configs)
@OVERRIDES
@click.option("--prompt", default=None, help="The text to continue.")
@click.option(
    "--prompts",
    type=click.Path(dir_okay=False, exists=True),
    default=None,
    metavar="FILE.jsonl",
    help='Many prompts: lines of {"prompt": "..."}, a text or token ids, or of {"messages": [...]}, a chat.',
)
@click.option("-o", "--out", type=click.Path(dir_okay=False), default=None, help="Write answers to a JSONL file.")
@click.option("--samples", type=click.IntRange(min=1), default=1, show_default=True, help="Answers to each prompt.")
@click.option("--tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens to make.")
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=0.8, show_default=True, help="0: always the likeliest token."
)
@click.option("--top-k", type=click.IntRange(min=0), default=0, show_default=True, help="Of so many tokens; 0: of all.")
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=1.0,
    show_default=True,
    help="Of the likeliest tokens that together have this probability.",
)
@click.option(
    "--min-p",
    type=click.FloatRange(min=0, max=1),
    default=0.0,
    show_default=True,
    help="Of tokens with this part of the likeliest one's probability.",
)
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text (may be given several times).")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Another seed, another text.")
@click.option(
    "--json-schema",
    type=click.Path(dir_okay=False, exists=True),
    default=None,
    metavar="FILE.json",
    help="Answers are JSON that keeps to this schema (needs phalanx[serve]).",
)
@takes_passages
@SPECULATE
@ADAPTER
@FORWARD_RANKS
def generate(checkpoint: str, overrides: tuple[str, ...], **asked: Any) -> None:
    """Continue prompts with the model in CHECKPOINT: a run folder (its newest), a checkpoint of any layout, or a
    Hugging Face folder.

    One text appears as it is made; Ctrl-C ends it (exit code 130). It ends early with the document, or where the
    model has no more positions.

    \b
      phalanx generate runs/first --prompt "Once upon a time"
      phalanx generate runs/first --prompts p.jsonl -o out.jsonl --samples 4 layout.tp=2 --ranks 2
      phalanx generate runs/first --prompt "How are paths joined?" --index index --neighbours 4
    """
    from phalanx.cli.ranks import run_ranks
    from phalanx.cli.setup import arguments, prepare_loaded
    from phalanx.config.read import read
    from phalanx.config.write import to_dict
    from phalanx.inference.adapters import with_adapter
    from phalanx.inference.load import (
        check_generates,
        refuse_sound,
        run_of_folder,
        weights_folder,
        without_data,
    )
    from phalanx.training.machine import describe_machine

    if (asked["prompt"] is None) == (asked["prompts"] is None):
        raise click.UsageError('give one of --prompt "TEXT" and --prompts FILE.jsonl')
    refuse_others(overrides)
    say_ignored(checkpoint)
    lookup = lookup_of(asked)
    one = asked["prompt"] is not None and asked["samples"] == 1 and asked["out"] is None
    if one and not overrides and asked["ranks"] in (None, 1):
        stream(checkpoint, asked, lookup)
        return
    folder = weights_folder(checkpoint)
    run = run_of_folder(folder, describe_machine("auto").device == "cuda")
    check_generates(run.model)
    if asked["prompt"] is not None:
        refuse_sound(run.model, "--prompt")
    base = to_dict(without_data(run))
    loaded = read(None, overrides, base, f"the model of {checkpoint}")
    if loaded.run is not None:
        with_adapter(loaded.run, asked["adapter"])  # what is wrong with it is said before ranks start
    ready = prepare_loaded(loaded, asked.pop("ranks"), forward=True)
    check_speculation(ready.run, ready.ranks, asked["speculate"])
    asked["passages"] = None if lookup is None else found_for(asked, lookup)
    if asked["out"] is not None:
        Path(asked["out"]).parent.mkdir(parents=True, exist_ok=True)
    run_ranks("phalanx.cli.jobs:generate", ready, {**arguments(ready.run), "path": checkpoint, "asked": asked}, None)


def found_for(asked: dict[str, Any], lookup: tuple[Lookup, str | None]) -> list[dict[str, Any]]:
    """Of each prompt: the text with its passages, the prompt as it was given, and the passages."""
    from phalanx.base.errors import DataError
    from phalanx.inference.generate import read_prompts

    given = (asked["prompt"],) if asked["prompts"] is None else read_prompts(asked["prompts"])
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    if len(texts) < len(given):
        raise DataError(f"{asked['prompts']}: passages are found for texts (--index), and some prompts are none")
    made, found = with_passages(lookup, texts)
    rows = zip(made, texts, found)
    return [{"text": text, "prompt": prompt, "passages": [f.plain() for f in each]} for text, prompt, each in rows]


def stream(checkpoint: str, asked: dict[str, Any], lookup: tuple[Lookup, str | None] | None) -> None:
    """One text on this process, as it is made."""
    from phalanx.inference.drafter import drafts_named
    from phalanx.inference.generate import TextStream
    from phalanx.inference.load import check_generates, refuse_sound, run_of_folder, weights_folder

    run = run_of_folder(weights_folder(checkpoint), gpu=False)
    check_generates(run.model)
    refuse_sound(run.model, "--prompt")
    check_speculation(run, 1, asked["speculate"])
    drafts = drafts_named(asked["speculate"]) if asked["speculate"] else None
    prompt = asked["prompt"]
    if lookup is not None:
        [prompt], [passages] = with_passages(lookup, [prompt])
        say_sources(passages)
    text = TextStream(checkpoint, prompt, options_of(asked), asked["stop"], drafts, asked["adapter"])
    click.echo(asked["prompt"] if text.shown else "", nl=False)
    try:
        for piece in text:
            click.echo(piece, nl=False)
    finally:
        click.echo()
    if drafts is not None:
        click.echo(text.draft_counts, err=True)
    if text.notice is not None:
        click.echo(text.notice, err=True)


def check_length(option: str, length: int | None, positions: int) -> None:
    """ConfigError for sequences that are longer than the model has positions."""
    from phalanx.base.errors import ConfigError, Problem

    if length is not None and length > positions:
        rule = "must not be more than the model has positions"
        because = {"model.max_position_embeddings": positions}
        raise ConfigError([Problem(option, length, rule, because, (positions,), "command line")])


def check_speculation(run: Run, world: int, speculate: str | None) -> None:
    """ConfigError for drafts that the model does not make in its layout, before anything is loaded."""
    from phalanx.forecast.decide import make_plan
    from phalanx.inference.drafter import drafts_named
    from phalanx.inference.load import without_training
    from phalanx.inference.predictor import MtpSpec, check_modules, check_takes_drafts

    drafts = drafts_named(speculate) if speculate else None
    if speculate:
        check_takes_drafts(run.model, speculate, "--speculate")
    if isinstance(drafts, MtpSpec):
        check_modules(make_plan(without_training(run, world), world), drafts, "--speculate")


def options_of(asked: dict[str, Any]) -> SamplingOptions:
    from phalanx.base.errors import DataError
    from phalanx.inference.request import Grammar, SamplingOptions

    schema = asked["json_schema"]
    try:
        grammar = None if schema is None else Grammar("json_schema", Path(schema).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{schema}: cannot be read: {error}") from None
    return SamplingOptions(**{name: asked[name] for name in SAMPLING}, grammar=grammar)

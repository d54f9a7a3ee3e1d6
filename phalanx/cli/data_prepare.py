"""`phalanx data prepare`: text to token files, here or on many machines."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.options import OVERWRITE, typed

if TYPE_CHECKING:  # start-up time
    from phalanx.text.prepare import Summary

TOKENIZER_HELP = (
    "A tokenizer.json, GPT-2's two files, SentencePiece .model, .tiktoken file, a folder that "
    "holds one; `bytes`; `null:N`."
)


@click.command("prepare", short_help="Turn text into token files.")
@click.argument("inputs", nargs=-1, required=True)
@click.option("-o", "--out", required=True, help="Prefix of the .bin and .idx files to write.")
@click.option("--tokenizer", required=True, help=TOKENIZER_HELP)
@click.option(
    "--json-keys",
    "--key",
    "keys",
    default="text",
    show_default=True,
    help="Fields of a line (a.b: inside a), or columns; a,b: both.",
)
@click.option(
    "--errors",
    type=click.Choice(["strict", "replace", "skip"]),
    default="strict",
    show_default=True,
    help="Documents that are not text.",
)
@click.option("--append-eod/--no-append-eod", default=True, show_default=True, help="End each document with its token.")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=None,
    help="Processes (default: all cores); any number gives the same files.",
)
@click.option("--shuffle", type=int, default=None, metavar="SEED", help="Shuffle documents by this seed.")
@click.option("--split", default="", metavar="NAME=SHARE,...", help="Write OUT-NAME for each: train=0.98,valid=0.02.")
@click.option(
    "--shard",
    default="0/1",
    show_default=True,
    metavar="I/N",
    help="Do the I-th of N parts (from 0); data merge joins them.",
)
@click.option(
    "--labels",
    default="",
    metavar="NAME,NAME,...",
    help="Classes of INPUTS, .jsonl files of texts (`text`, `label`) or of words (`tokens`, `labels`).",
)
@click.option(
    "--on",
    type=click.Choice(["ray", "slurm"]),
    default=None,
    help="Over many machines with one file system: tasks of a running Ray cluster, or a job array of SLURM.",
)
@click.option("--shards", type=click.IntRange(min=1), default=None, metavar="N", help="With --on: how many parts.")
@click.option("--cluster", type=click.Path(dir_okay=False), default=None, help="With --on slurm: file of `cluster`.")
@click.option("--dry", is_flag=True, help="With --on slurm: write the script, and submit nothing.")
@OVERWRITE
def data_prepare(inputs: tuple[str, ...], out: str, tokenizer: str, **asked: Any) -> None:
    """Turn text files, .jsonl or .parquet files (.gz, .zst), Hugging Face datasets, folders or globs of them into
    token files.

    With --on, machines with one file system share the work: shards in OUT.shards, then their merge as OUT.
    """
    from phalanx.cli.progress import progress
    from phalanx.text.prepare import PrepareOptions, prepare
    from phalanx.text.tokenizers import load_tokenizer

    if asked["labels"]:
        label_texts(inputs, out, tokenizer, asked)
        return
    i, _, n = asked["shard"].partition("/")
    if not (i.isdigit() and n.isdigit()):
        raise click.BadParameter(f"{asked['shard']!r} is not I/N, such as 0/4", param_hint="--shard")
    refuse_unread(asked)
    if asked["on"] is not None:
        prepare_elsewhere(inputs, out, tokenizer, asked)
        return
    started, worked = time.monotonic(), False

    def work(done: int, total: int) -> None:
        nonlocal worked
        worked = True
        show(done, total)

    with progress("prepare") as show:
        summary = prepare(
            inputs,
            out,
            load_tokenizer(tokenizer),
            PrepareOptions(
                key=asked["keys"].split(","),
                errors=asked["errors"],
                append_eod=asked["append_eod"],
                workers=asked["workers"] or _cores(),
                shuffle=asked["shuffle"],
                split=_shares(asked["split"]),
                shard=(int(i), int(n)),
                overwrite=asked["overwrite"],
            ),
            progress=work,
        )
    say(summary, out, time.monotonic() - started if worked else None)


def say(summary: Summary, out: str, seconds: float | None) -> None:
    from phalanx.cli.show import prepared_text

    for line in prepared_text(summary, out, seconds):
        click.echo(line)


# ---- over many machines --------------------------------------------------------------------------


def refuse_unread(asked: dict[str, Any]) -> None:
    """Options that the chosen way has no place for."""
    if asked["on"] is None:
        given = [name for name in ("shards", "cluster", "dry") if asked[name]]
        if given:
            raise click.UsageError(f"--{given[0]} goes with --on, which shares the work among machines")
        return
    if asked["shuffle"] is not None:
        raise click.UsageError(
            "--shuffle is for one process: shards would be shuffled each by itself; training shuffles its samples"
        )
    if asked["shard"] != "0/1":
        raise click.UsageError("--shard is one part done here; with --on all parts are done elsewhere (--shards N)")
    if asked["on"] == "ray" and (given := [name for name in ("cluster", "dry") if asked[name]]):
        raise click.UsageError(f"--{given[0]} goes with --on slurm: a Ray cluster runs already (RAY_ADDRESS names it)")


def prepare_elsewhere(inputs: tuple[str, ...], out: str, tokenizer: str, asked: dict[str, Any]) -> None:
    from phalanx.launch.shards import ShardedTexts, sharded

    texts, size = sharded(
        ShardedTexts(
            inputs,
            out,
            tokenizer,
            tuple(asked["keys"].split(",")),
            asked["errors"],
            asked["append_eod"],
            _shares(asked["split"]),
            asked["overwrite"],
            workers=asked["workers"] or 1,
        ),
        asked["shards"],
    )
    if asked["on"] == "slurm":
        submit_shards(texts, out, asked["cluster"], asked["dry"])
        return
    from phalanx.cli.progress import progress
    from phalanx.launch.ray_shards import prepare_on_ray

    started = time.monotonic()
    with progress("prepare") as show:
        summary = prepare_on_ray(texts, lambda done: show(size * done // texts.count, size))
    say(summary, out, time.monotonic() - started)


def submit_shards(texts: Any, out: str, cluster_file: str | None, dry: bool) -> None:
    """Write the script of both jobs, show it, and submit it."""
    from phalanx.config.cluster import FILE
    from phalanx.config.cluster_file import read_cluster
    from phalanx.launch import slurm_shards
    from phalanx.launch.programs import look_for

    cluster = read_cluster(cluster_file or (FILE if Path(FILE).is_file() else None))
    script = Path(f"{out}.sbatch")
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(slurm_shards.write(texts, cluster, typed(), script), encoding="utf-8")
    click.echo(script.read_text(encoding="utf-8"), nl=False)
    if dry:
        click.echo(f"wrote {script}; its first lines say how it is submitted", err=True)
        return
    look_for("SLURM", "sbatch", "squeue", "scontrol")
    shards, merge = slurm_shards.submit(texts, script)
    click.echo(
        f"submitted {texts.count} shards as job {shards}, their merge as job {merge}; `phalanx status {merge}` says "
        f"why it waits; logs in {texts.prefix}.shards",
        err=True,
    )


# ---- texts with classes --------------------------------------------------------------------------


def label_texts(inputs: tuple[str, ...], out: str, tokenizer: str, asked: dict[str, Any]) -> None:
    """Texts with classes, as token files."""
    from phalanx.text.classes import prepare_classes

    context = click.get_current_context()
    typed_here = click.core.ParameterSource.COMMANDLINE
    if any(context.get_parameter_source(name) == typed_here for name in asked.keys() - {"labels", "overwrite"}):
        raise click.UsageError("--labels takes -o, --tokenizer and --overwrite alone")
    if Path(f"{out}.idx").exists() and not asked["overwrite"]:
        raise click.UsageError(f"{out}.idx is there already: --overwrite replaces it")
    count = prepare_classes([Path(name) for name in inputs], Path(out), tokenizer, asked["labels"].split(","))
    click.echo(f"wrote {out}.bin, .idx and .classes.npy: {count:,} texts")


def _cores() -> int:
    """Cores that this process may use; not every system can tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _shares(split: str) -> dict[str, float]:
    """{"train": 0.98, "valid": 0.02} of train=0.98,valid=0.02"""
    shares: dict[str, float] = {}
    for item in filter(None, split.split(",")):
        name, _, share = item.partition("=")
        try:
            if name in shares:
                raise ValueError
            shares[name.strip()] = float(share)
        except ValueError:
            expected = "different names with their shares, such as train=0.98,valid=0.02"
            raise click.BadParameter(f"{item!r}: expected {expected}", param_hint="--split") from None
    return shares

"""`phalanx checkpoint ...`, `phalanx export` and `phalanx import`."""

from __future__ import annotations

from pathlib import Path

import click

from phalanx.cli.verbs import Verbs

OUT = click.option("-o", "--out", required=True, metavar="FOLDER", help="A new (or empty) folder to write to.")


def say_ignored(*paths: str) -> None:
    """Report which folders of a run are not used as its checkpoints, and why."""
    from phalanx.checkpoint.keep import ignored

    for path in paths:
        for line in ignored(path):
            click.echo(f"warning: {line}", err=True)


@click.group(cls=Verbs)
def checkpoint() -> None:
    """Inspect, compare and convert checkpoints.

    PATH is a checkpoint, or a run (its newest), or where it makes sense a Hugging Face folder; also s3://bucket/prefix.
    """


@checkpoint.command("list")
@click.argument("run")
def list_(run: str) -> None:
    """List the checkpoints of the folder RUN."""
    from phalanx.cli.show import checkpoints_text

    click.echo(checkpoints_text(run))


@checkpoint.command(short_help="Compare every byte with the manifest.")
@click.argument("path")
def verify(path: str) -> None:
    """Read every byte of a checkpoint (or of the newest of the run PATH), and of the base that its adapters belong to,
    and compare it with its manifest."""
    from phalanx.base.errors import CheckpointError
    from phalanx.checkpoint.base import base_problems
    from phalanx.checkpoint.keep import candidates
    from phalanx.checkpoint.manifest import verify as problems_of

    say_ignored(path)
    found = candidates(path)[0]
    problems = problems_of(found) or base_problems(found)
    if problems:
        raise CheckpointError("\n".join([f"{found} is damaged:", *problems]))
    click.echo(f"{found} good")


@checkpoint.command(short_help="Print every difference between two checkpoints.")
@click.argument("a")
@click.argument("b")
def diff(a: str, b: str) -> None:
    """Print every difference between the checkpoints A and B: config, counters, tensors. Exits with 1 if there is
    one."""
    from phalanx.checkpoint.tools import diff as differences

    say_ignored(a, b)
    found = False
    for line in differences(a, b):
        found = True
        click.echo(line)
    if found:
        raise SystemExit(1)
    click.echo("equal")


@checkpoint.command(short_help="Write the mean of the weights of several checkpoints.")
@click.argument("paths", nargs=-1, required=True)
@OUT
def average(paths: tuple[str, ...], out: str) -> None:
    """Write the mean of the weights of the checkpoints PATHS as a Hugging Face folder."""
    from phalanx.checkpoint.tools import average as mean

    say_ignored(*paths)
    click.echo(f"{mean(list(paths), out)} is the mean of {len(paths)}")


@checkpoint.command(short_help="Write a checkpoint in another number of files.")
@click.argument("path")
@OUT
@click.option("--files", type=click.IntRange(min=1), required=True, help="Number of state files.")
@click.option(
    "--file-mb", type=click.IntRange(min=1), default=4096, show_default=True, help="Largest weight file in MiB."
)
def reshard(path: str, out: str, files: int, file_mb: int) -> None:
    """Rewrite the checkpoint PATH, as FOLDER/step-..., in another number of files. (Loading never needs it.)"""
    from phalanx.checkpoint.tools import reshard as write_anew

    say_ignored(path)
    click.echo(str(write_anew(path, out, files, file_mb << 20)))


@checkpoint.command(short_help="Keep a checkpoint whatever `keep_last` says.")
@click.argument("path")
@click.option("--remove", is_flag=True, help="Let retention remove it again.")
def pin(path: str, remove: bool) -> None:
    """Keep the checkpoint PATH whatever `checkpoint.keep_last` says."""
    from phalanx.checkpoint.keep import find, pin_of

    say_ignored(path)
    found = find(path)
    if remove:
        pin_of(found).unlink(missing_ok=True)
    else:
        pin_of(found).write_bytes(b"")
    click.echo(f"{found} {'is pinned no more' if remove else 'is pinned'}")


@click.command(short_help="Write a checkpoint's weights for others.")
@click.argument("path")
@OUT
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16", "fp64"]),
    default=None,
    help="Of the weights (default: that of the run).",
)
@click.option("--merge", is_flag=True, help="Merge adapters (of a run with `lora`) into the weights.")
@click.option(
    "--base",
    metavar="FOLDER",
    default=None,
    help="With --merge, of a folder of PEFT: the weights that it belongs to (default: the folder that it names).",
)
@click.option(
    "--to",
    type=click.Choice(["hf", "peft"]),
    default="hf",
    show_default=True,
    help="hf: a Hugging Face folder of weights; peft: the adapters alone, as a folder of PEFT.",
)
def export(path: str, out: str, dtype: str | None, merge: bool, base: str | None, to: str) -> None:
    """Write the weights of a checkpoint as a Hugging Face folder, rounded once from the masters, with a report of
    what was compared.

    \b
      phalanx export runs/sft --merge -o merged       # base and adapters, as one model
      phalanx export runs/sft --to peft -o adapter    # the adapters alone
      phalanx export adapter --merge --base Llama-3.1-8B -o merged
    """
    from phalanx.checkpoint.convert import REPORT
    from phalanx.checkpoint.convert import export as write

    if base is not None and not (merge and is_adapter(path)):
        raise click.UsageError("--base belongs to --merge of a folder of PEFT; a run knows its base")
    if is_adapter(path) and not merge:
        raise click.UsageError(f"{path} is a folder of PEFT: --merge makes one model of base and adapters")
    if not is_adapter(path):
        say_ignored(path)
    if to == "peft":
        for option in ("--merge",) * merge + ("--dtype",) * (dtype is not None):
            raise click.UsageError(
                f"{option} has no effect with --to peft, which writes the adapters as they were saved"
            )
        click.echo(f"{adapter_alone(path, out)} holds the adapters, for PEFT")
    elif merge:
        folder = merged_folder(path, base, out, dtype) if is_adapter(path) else merged(path, out, dtype)
        click.echo(f"{folder} compared with base and adapters: {REPORT}")
    else:
        click.echo(f"{write(path, out, dtype)} compared with the masters: {REPORT}")


def is_adapter(path: str) -> bool:
    """Whether it is a folder of PEFT."""
    from phalanx.checkpoint.adapters import CONFIG

    return (Path(path) / CONFIG).is_file()


def merged_folder(path: str, base: str | None, out: str, dtype: str | None) -> Path:
    """Merge a folder of PEFT into the weights that it belongs to."""
    from phalanx.checkpoint.hf import model_config_from_hf
    from phalanx.checkpoint.merge import merge_folder
    from phalanx.inference.load import weights_folder
    from phalanx.planning.merging import merging_of, section_of_folder

    section, named = section_of_folder(path)
    given = base or named
    if given is None or not Path(given).is_dir():
        raise click.UsageError(
            f"{path} belongs to {given or 'a base that it does not name'}: give its folder as --base"
        )
    weights = weights_folder(given)
    return merge_folder(path, str(weights), out, merging_of(model_config_from_hf(weights), section), dtype)


def adapter_alone(path: str, out: str) -> Path:
    """Write the adapters of a checkpoint as a folder of PEFT."""
    from phalanx.base.errors import CheckpointError
    from phalanx.checkpoint.manifest import parse
    from phalanx.checkpoint.merge import export_adapter
    from phalanx.inference.load import run_of_folder, weights_folder
    from phalanx.planning.adapters import peft_config, unknown_to_peft
    from phalanx.planning.blocks import exported_shapes

    weights = weights_folder(path)
    run = run_of_folder(weights, gpu=False)
    if run.lora is None:
        raise CheckpointError(f"{path} holds no adapters that a run trained")
    if (unknown := unknown_to_peft(run)) is not None:
        raise CheckpointError(f"{path} {unknown}")
    base = parse(weights.parent).base
    config = peft_config(run, str(weights) if base is None else base.folder)
    return export_adapter(path, out, run.lora, config, exported_shapes(run.model))


def merged(path: str, out: str, dtype: str | None) -> Path:
    """Write the weights of a checkpoint with its adapters merged into them."""
    from phalanx.base.errors import CheckpointError
    from phalanx.checkpoint.hf import model_config_from_hf
    from phalanx.checkpoint.merge import merge
    from phalanx.engine.adapter_start import initial_tensors
    from phalanx.inference.load import adapters_of, drawn_base, weights_folder
    from phalanx.planning.merging import merging_of

    weights = weights_folder(path)
    lora = adapters_of(weights)
    if lora is None:
        raise CheckpointError(f"{path} holds no adapters that a run trained: there is nothing to merge")
    model, drawn = model_config_from_hf(weights), drawn_base(weights)
    own = None if drawn is None else initial_tensors(drawn.run_of(model), drawn.dtype)
    return merge(path, out, merging_of(model, lora), dtype, own)


@checkpoint.command(short_help="Name another place of the base of adapters.")
@click.argument("path")
@click.argument("base")
def rebase(path: str, base: str) -> None:
    """Write into the checkpoint PATH of a run with adapters that their base is now in the folder BASE. The checksums of
    its files must be those that the adapters were saved with."""
    from phalanx.checkpoint.base import rebase as name_anew
    from phalanx.checkpoint.keep import find

    say_ignored(path)
    found = find(path)
    click.echo(f"{found} names {name_anew(found, base)} as its base")


@click.command("import", short_help="Make a Hugging Face folder of third-party weights.")
@click.argument("path")
@OUT
@click.option(
    "--config", required=True, metavar="FOLDER", help="A folder with config.json (and the tokenizer) of the model."
)
@click.option("--prefix", default="", help="What the names in PATH begin with and the model's do not.")
def import_(path: str, out: str, config: str, prefix: str) -> None:
    """Turn safetensors files, or a checkpoint of torch.distributed.checkpoint (Megatron-Core's torch_dist too), into
    a folder that `init_from` (and everybody else) reads."""
    from phalanx.checkpoint.convert import REPORT, import_weights
    from phalanx.checkpoint.hf import model_config_from_hf
    from phalanx.planning.blocks import exported_shapes

    wanted = exported_shapes(model_config_from_hf(config))
    click.echo(f"{import_weights(path, out, config, wanted, prefix)} compared with {path}: {REPORT}")

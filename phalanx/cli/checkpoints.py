"""`phalanx checkpoint ...`, `phalanx export` and `phalanx import`."""

from __future__ import annotations

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
    """Read every byte of a checkpoint (or of the newest of the run PATH) and compare it with its manifest."""
    from phalanx.base.errors import CheckpointError
    from phalanx.checkpoint.keep import candidates
    from phalanx.checkpoint.manifest import verify as problems_of

    say_ignored(path)
    found = candidates(path)[0]
    problems = problems_of(found)
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
def export(path: str, out: str, dtype: str | None) -> None:
    """Write the weights of a checkpoint as a Hugging Face folder, rounded once from the masters, with a report of
    what was compared."""
    from phalanx.checkpoint.convert import REPORT
    from phalanx.checkpoint.convert import export as write

    say_ignored(path)
    click.echo(f"{write(path, out, dtype)} compared with the masters: {REPORT}")


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

"""`phalanx eval`: from a checkpoint and its options to ranks that evaluate it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.completion import configs
from phalanx.cli.options import JSON, OVERRIDES, RANKS
from phalanx.cli.verbs import ConfigVerb

if TYPE_CHECKING:
    from phalanx.config.run import Run


@click.command("eval", cls=ConfigVerb, short_help="Measure loss and perplexity of a checkpoint.")
@click.argument("checkpoint", metavar="CHECKPOINT|RUN", shell_complete=configs)
@OVERRIDES
@click.option(
    "--data",
    "data",
    multiple=True,
    metavar="[NAME=]PREFIX|TEXT",
    help="Token files or text (default: the run's own validation sets).",
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=None,
    metavar="N",
    help="Sequences of each set (default: all of --data).",
)
@RANKS
@JSON
def evaluate(
    checkpoint: str,
    overrides: tuple[str, ...],
    data: tuple[str, ...],
    samples: int | None,
    ranks: int | None,
    out: str | None,
) -> None:
    """Evaluate CHECKPOINT: a run folder (its newest), a checkpoint, or a Hugging Face folder, on any prepared set
    and at any layout.

    \b
      phalanx eval runs/first                           the run's own validation sets once more
      phalanx eval runs/first --data data/wiki          token files data/wiki.bin and .idx
      phalanx eval runs/first --data notes.txt layout.tp=2 --ranks 2
    """
    from phalanx.cli.ranks import prepare_text, run_ranks
    from phalanx.cli.setup import arguments, prepare_loaded
    from phalanx.config.read import read
    from phalanx.evaluation.perplexity import (
        Evaluation,
        base_config,
        check_folder,
        check_sets,
        need_sets,
        tokenizer_of,
    )
    from phalanx.inference.load import weights_alone, weights_folder
    from phalanx.launch.env import describe_machine

    weights = weights_folder(checkpoint)
    check_folder(weights)
    need_sets(weights, dict.fromkeys(data, ()))
    base = base_config(weights, describe_machine("auto").device == "cuda")
    loaded = read(None, overrides, base, f"the config of {checkpoint}")
    if loaded.run is not None:
        world = ranks or _started() or max(1, loaded.run.layout.tp * loaded.run.layout.cp * loaded.run.layout.pp)
        run = weights_alone(loaded.run, world)
        folder = checkpoint if (Path(checkpoint) / "checkpoints").is_dir() else run.dir
        loaded = replace(loaded, run=replace(run, data=_without_training(run, bool(data)), dir=folder))
    ready = prepare_loaded(loaded, ranks)
    with prepared(data, ready.run, weights) as sets:
        if not data:
            prepare_text(ready)
        what = Evaluation(str(weights), sets, samples, out)
        check_sets(what, tokenizer_of(weights))
        values = {
            "weights": what.weights,
            "sets": {name: list(given) for name, given in sets.items()},
            "samples": samples,
            "out": out,
        }
        run_ranks("phalanx.cli.jobs:evaluate", ready, {**arguments(ready.run), **values}, None)


def _started() -> int | None:
    """The number of ranks in a world that others have started."""
    from phalanx.launch.env import read_placement

    placement, _ = read_placement(os.environ)
    return None if placement is None else placement.world_size


def _without_training(run: Run, named: bool) -> Any:
    """The data section for an evaluation on named sets: the training data may no longer exist."""
    from phalanx.data.config import DataConfig

    kept: Any = {"document_attention": run.data.document_attention, "packing": run.data.packing}
    if kept["packing"] == "offline":
        kept["packing"] = "online"
    return DataConfig(mock=True, **kept) if named else run.data


@contextmanager
def prepared(data: Sequence[str], run: Run, weights: Path) -> Iterator[dict[str, tuple[str, ...]]]:
    """Sets by name, as prefixes of token files. Text is prepared into such files, which exist inside the context."""
    sets: dict[str, tuple[str, ...]] = {}
    with tempfile.TemporaryDirectory(prefix="phalanx-eval-") as cache:
        for text in data:
            name, given = _named(text)
            if name in sets:
                raise click.BadParameter(
                    f"two sets are called {name}: give them names, --data first={given}", param_hint="--data"
                )
            sets[name] = (
                (given,)
                if Path(f"{given}.idx").exists() or not Path(given).exists()
                else _from_text(given, run, weights, cache)
            )
        yield sets


def _named(text: str) -> tuple[str, str]:
    """`name=path`, or a path, whose last part is the name."""
    name, equals, given = text.partition("=")
    if equals and "/" not in name:
        return name, _stem(given)
    return Path(_stem(text)).name, _stem(text)


def _stem(path: str) -> str:
    """Token files may also be given by either of their two file names."""
    return path.removesuffix(".idx").removesuffix(".bin") if path.endswith((".idx", ".bin")) else path


def _from_text(given: str, run: Run, weights: Path, cache: str) -> tuple[str, ...]:
    from phalanx.base.errors import DataError
    from phalanx.cli.progress import progress
    from phalanx.data.config import DataConfig
    from phalanx.evaluation.perplexity import tokenizer_of
    from phalanx.text.cache import use_text

    tokenizer = tokenizer_of(weights)
    if tokenizer is None:
        raise DataError(
            f"{given} is text, and {weights} holds no tokenizer to read it with: prepare it first (phalanx "
            "data prepare)"
        )
    with progress("prepare") as show:
        config = DataConfig(text=(given,), tokenizer=tokenizer, cache=cache)
        made = use_text(config, cache, run.model.vocab_size, say=lambda line: None, progress=show)
    return next(iter(made.sources.values())).paths

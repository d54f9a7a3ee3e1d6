"""`phalanx eval`: from a checkpoint and its options to ranks that evaluate it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.completion import configs
from phalanx.cli.options import ADAPTER, FORWARD_RANKS, OVERRIDES
from phalanx.cli.verbs import ConfigVerb

if TYPE_CHECKING:
    from phalanx.config.run import Run


TASK_OPTIONS = ("limit", "few_shot", "chat_template", "length", "answers", "adapter")
"""Options that only `--tasks` reads."""


@click.command("eval", cls=ConfigVerb, short_help="Score a checkpoint: perplexity, tasks.")
@click.argument("checkpoint", metavar="CHECKPOINT|RUN", shell_complete=configs)
@OVERRIDES
@click.option(
    "--data",
    "data",
    multiple=True,
    metavar="[NAME=]PREFIX|TEXT|FOLDER",
    help="Token files or text (default: the run's own validation sets). With --tasks: a folder of data sets (default: "
    "the Hub's cache).",
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=None,
    metavar="N",
    help="Sequences of each set (default: all of --data).",
)
@click.option(
    "--tasks",
    default=None,
    metavar="A,B,./MINE.yaml",
    help="Tasks of lm-evaluation-harness, by name or in a file (needs the extra eval).",
)
@click.option("--limit", type=click.IntRange(min=1), default=None, metavar="N", help="Questions of each task at most.")
@click.option(
    "--few-shot",
    type=click.IntRange(min=0),
    default=None,
    metavar="K",
    help="Examples before each question (default: as the task says).",
)
@click.option("--chat-template", is_flag=True, help="Ask questions as chats, by the model's template.")
@click.option(
    "--length",
    type=click.IntRange(min=2),
    default=None,
    metavar="N",
    help="Tokens of a question and its answer at most (default: the model's positions).",
)
@click.option(
    "--answers",
    type=click.Path(dir_okay=False),
    default=None,
    metavar="FILE.jsonl",
    help="Keep answers here; what it has is not computed again (default: beside the file of -o).",
)
@ADAPTER
@FORWARD_RANKS
@click.option(
    "-o", "--json", "out", type=click.Path(dir_okay=False), default=None, help="Write the figures to this file too."
)
def evaluate(checkpoint: str, overrides: tuple[str, ...], **asked: Any) -> None:
    """Evaluate CHECKPOINT: a run folder (its newest), a checkpoint, or a Hugging Face folder, on any prepared set or on
    tasks of lm-evaluation-harness, and at any layout.

    \b
      phalanx eval runs/first                           the run's own validation sets once more
      phalanx eval runs/first --data data/wiki          token files data/wiki.bin and .idx
      phalanx eval runs/first --data notes.txt layout.tp=2 --ranks 2
      phalanx eval runs/first --tasks arc_easy,gsm8k,./mine.yaml -o out.json
      phalanx eval runs/first --tasks mmlu --few-shot 5 --data DATASETS layout.pp=2 --ranks 2
    """
    refuse_without_effect(asked)
    if asked["tasks"] is None:
        evaluate_sets(checkpoint, overrides, asked)
    else:
        evaluate_tasks(checkpoint, overrides, asked)


def refuse_without_effect(asked: dict[str, Any]) -> None:
    """UsageError for options that would do nothing."""
    given = [name for name, value in asked.items() if value not in (None, False, ())]
    wrong = [name for name in given if name in (("samples",) if "tasks" in given else TASK_OPTIONS)]
    if wrong:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        why = "is for token files; of --tasks, --limit says how much" if "tasks" in given else "needs --tasks"
        raise click.UsageError(f"{options} {why}")


def evaluate_tasks(checkpoint: str, overrides: tuple[str, ...], asked: dict[str, Any]) -> None:
    """On tasks of lm-evaluation-harness."""
    from phalanx.base.errors import ConfigError, Problem
    from phalanx.cli.generate import check_length
    from phalanx.cli.ranks import run_ranks
    from phalanx.cli.setup import arguments, prepare_loaded
    from phalanx.config.read import read
    from phalanx.config.write import to_dict
    from phalanx.data.files import extra
    from phalanx.evaluation.perplexity import check_folder
    from phalanx.inference.adapters import with_adapter
    from phalanx.inference.load import check_generates, run_of_folder, weights_folder, without_data
    from phalanx.inference.overrides import refuse_others
    from phalanx.training.machine import describe_machine

    extra("lm_eval", "phalanx eval --tasks needs", "eval")
    names, data = names_of(asked["tasks"]), data_folder(asked["data"])
    refuse_others(overrides)
    weights = weights_folder(checkpoint)
    check_folder(weights)
    run = run_of_folder(weights, describe_machine("auto").device == "cuda")
    check_generates(run.model)
    if run.model.decoder_start is not None:
        rule = "has an encoder, whose texts tasks of lm-evaluation-harness are not divided into here: phalanx generate "
        rule += "makes its answers"
        raise ConfigError([Problem("model.family", run.model.family, rule)])
    base = to_dict(without_data(run))
    loaded = read(None, overrides, base, f"the model of {checkpoint}")
    if loaded.run is not None:
        with_adapter(loaded.run, asked["adapter"])  # what is wrong with it is said before ranks start
    ready = prepare_loaded(loaded, asked["ranks"], forward=True)
    check_length("--length", asked["length"], ready.run.model.max_position_embeddings)
    what = {
        "weights": str(weights),
        "tasks": names,
        "data": data,
        "limit": asked["limit"],
        "few_shot": asked["few_shot"],
        "chat": asked["chat_template"],
        "length": asked["length"],
        "answers": asked["answers"] or (asked["out"] and str(Path(asked["out"]).with_suffix(".answers.jsonl"))),
        "out": asked["out"],
        "adapter": asked["adapter"],
    }
    if asked["out"] is not None:
        Path(asked["out"]).parent.mkdir(parents=True, exist_ok=True)
    if not sys.stderr.isatty():
        os.environ.update(TQDM_DISABLE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
    run_ranks("phalanx.cli.jobs:evaluate_tasks", ready, {**arguments(ready.run), "what": what}, None)


def names_of(tasks: str) -> tuple[str, ...]:
    """Of a list with commas."""
    names = tuple(name.strip() for name in tasks.split(",") if name.strip())
    if not names:
        raise click.UsageError("--tasks names no task: --tasks arc_easy,./mine.yaml")
    return names


def data_folder(data: tuple[str, ...]) -> str | None:
    """The one folder of data sets, if it is given."""
    if not data:
        return None
    if len(data) > 1 or not Path(data[0]).is_dir():
        raise click.UsageError(f"--data {' --data '.join(data)}: with --tasks it is one folder of data sets")
    return data[0]


def evaluate_sets(checkpoint: str, overrides: tuple[str, ...], asked: dict[str, Any]) -> None:
    """Loss and perplexity on prepared sets."""
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
    from phalanx.inference.load import weights_folder
    from phalanx.inference.overrides import refuse_training
    from phalanx.training.machine import describe_machine

    refuse_training(overrides)
    data, samples, ranks, out = asked["data"], asked["samples"], asked["ranks"], asked["out"]
    weights = weights_folder(checkpoint)
    check_folder(weights)
    need_sets(weights, dict.fromkeys(data, ()))
    base = base_config(weights, describe_machine("auto").device == "cuda")
    loaded = read(None, overrides, base, f"the config of {checkpoint}")
    if loaded.run is not None:
        run = loaded.run
        folder = checkpoint if (Path(checkpoint) / "checkpoints").is_dir() else run.dir
        loaded = replace(loaded, run=replace(run, data=_without_training(run, bool(data)), dir=folder))
    ready = prepare_loaded(loaded, ranks, forward=True)
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

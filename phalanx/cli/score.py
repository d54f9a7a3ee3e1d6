"""`phalanx data score`: from a config and a teacher's folder to ranks that write a score file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from phalanx.cli.completion import configs
from phalanx.cli.options import FORWARD_RANKS, OVERRIDES
from phalanx.cli.verbs import ConfigVerb


@click.command("score", cls=ConfigVerb, short_help="Write a teacher's log-probabilities.")
@click.argument("config", shell_complete=configs)
@OVERRIDES
@click.option("--teacher", required=True, metavar="FOLDER", help="A run, a checkpoint or a Hugging Face folder.")
@click.option(
    "--top",
    type=click.IntRange(min=0),
    default=64,
    show_default=True,
    help="Likeliest ids kept for each token; 0: the label's log-probability alone (the reference of task.name=dpo).",
)
@click.option("-o", "--out", required=True, type=click.Path(dir_okay=False), help="The score file.")
@FORWARD_RANKS
def data_score(config: str, overrides: tuple[str, ...], teacher: str, top: int, out: str, ranks: int | None) -> None:
    """Score the tokens that CONFIG trains and evaluates on by another model, for task.name=distil (task.teacher=FILE)
    and task.name=dpo (task.reference=FILE).

    \b
      phalanx data score distil.yaml --teacher Llama-3.1-8B --top 64 -o teacher.scores
      phalanx data score dpo.yaml --teacher runs/sft --top 0 -o reference.scores layout.tp=2 --ranks 2

    The layout is CONFIG's; it changes no score. Sequences are cut as CONFIG cuts them, so the file serves configs with
    the same train.seq_length, data.packing, data.document_attention and data.split. Chats (data.chats) are prepared as
    CONFIG's task does.
    """
    from phalanx.base.errors import Problem
    from phalanx.cli.ranks import prepare_text, run_ranks
    from phalanx.cli.setup import arguments, prepare_loaded
    from phalanx.config.read import read
    from phalanx.evaluation.perplexity import check_folder
    from phalanx.evaluation.scoring import scoring_task
    from phalanx.forecast.check import raise_problems
    from phalanx.inference.load import refuse_further_streams, run_of_folder, weights_folder

    weights = weights_folder(teacher)
    check_folder(weights)
    loaded = read(config, overrides)
    if loaded.run is not None:
        scorer, run = run_of_folder(weights, False), loaded.run
        refuse_further_streams(scorer.model, "phalanx data score")
        if run.data.mock or run.data.source is not None:
            rule, name = "has no tokens in files, to which scores could belong", "mock" if run.data.mock else "source"
            raise_problems([Problem(f"data.{name}", getattr(run.data, name), rule)])
        if top > scorer.model.vocab_size:
            because = {"ids of the teacher": scorer.model.vocab_size}
            rule = "must not be more than the teacher's ids"
            raise_problems([Problem("--top", top, rule, because, (scorer.model.vocab_size,), "command line")])
        train = replace(run.train, freeze=[], fp8=None)
        run = replace(run, model=scorer.model, lora=scorer.lora, task=scoring_task(run), train=train)
        loaded = replace(loaded, run=run)
    ready = prepare_loaded(loaded, ranks, forward=True)
    prepare_text(ready)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    what: dict[str, Any] = {"weights": str(weights), "top": top, "out": out}
    run_ranks("phalanx.cli.jobs:score", ready, {**arguments(ready.run), "what": what}, None)

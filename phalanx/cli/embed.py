"""`phalanx embed`: from a checkpoint and a file of texts to ranks that write vectors."""

from __future__ import annotations

from typing import Any

import click

from phalanx.cli.completion import configs
from phalanx.cli.options import FORWARD_RANKS, OVERRIDES
from phalanx.cli.verbs import ConfigVerb
from phalanx.inference.overrides import refuse_others

POSITIVE = click.IntRange(min=1)


@click.command("embed", cls=ConfigVerb, short_help="Embeddings of texts, as a folder of vectors.")
@click.argument("checkpoint", metavar="CHECKPOINT|RUN", shell_complete=configs)
@OVERRIDES
@click.option(
    "--input",
    "texts",
    required=True,
    type=click.Path(dir_okay=False, exists=True),
    metavar="FILE.jsonl",
    help='Lines of {"text": "..."}, with an "id" and a "source" if there are any.',
)
@click.option("-o", "--out", required=True, type=click.Path(file_okay=False), help="Folder for the vectors.")
@click.option("--prefix", default="", metavar="TEXT", help='Text put before each, such as "passage: ".')
@click.option("--dimensions", type=POSITIVE, default=None, help="The first features alone (Matryoshka).")
@click.option(
    "--length",
    type=click.IntRange(min=2),
    default=None,
    help="Tokens of a text that are read (default: those of training).",
)
@click.option(
    "--pooling",
    type=click.Choice(["mean", "first", "last"]),
    default=None,
    help="How embeddings are made of hidden states, if the folder does not say.",
)
@click.option("--shard", type=POSITIVE, default=8192, show_default=True, help="Texts in each file of vectors.")
@FORWARD_RANKS
def embed(checkpoint: str, overrides: tuple[str, ...], ranks: int | None, length: int | None, **asked: Any) -> None:
    """Embed the texts of a file with the model in CHECKPOINT: a run of task.name=embed (its newest checkpoint), a
    checkpoint, or a Hugging Face folder. What was interrupted goes on where it stopped.

    \b
      phalanx embed runs/retriever --input docs.jsonl -o vectors
      phalanx embed runs/retriever --input docs.jsonl -o vectors layout.tp=2 --ranks 4
      phalanx embed bert-base-uncased --pooling mean --input docs.jsonl -o vectors
    """
    from phalanx.base.errors import Problem
    from phalanx.cli.ranks import run_ranks
    from phalanx.cli.setup import arguments, prepare_loaded
    from phalanx.config.read import read
    from phalanx.config.write import to_dict
    from phalanx.evaluation.perplexity import check_folder
    from phalanx.forecast.check import raise_problems
    from phalanx.inference.embedder import embedder_folder, marks_of
    from phalanx.retrieval.documents import PassageFile
    from phalanx.retrieval.embedding import EmbedRequest, manifest_for
    from phalanx.retrieval.vectors import check_begin
    from phalanx.training.machine import describe_machine

    refuse_others(overrides)
    folder = embedder_folder(checkpoint, asked["pooling"])
    check_folder(folder.weights)
    marks_of(folder)
    run = folder.run(describe_machine("auto").device == "cuda")
    width, positions = run.model.hidden_size, run.model.max_position_embeddings
    found = []
    if asked["dimensions"] is not None and asked["dimensions"] > width:
        rule, because = "must be <= the width of the model's embeddings", {"model.hidden_size": width}
        found.append(Problem("--dimensions", asked["dimensions"], rule, because, (width,), "command line"))
    if length is not None and length > positions:
        rule, because = "must not be more than the model has positions", {"model.max_position_embeddings": positions}
        found.append(Problem("--length", length, rule, because, (positions,), "command line"))
    raise_problems(found)
    run = folder.run(describe_machine("auto").device == "cuda", length)
    loaded = read(None, overrides, to_dict(run), f"the model of {checkpoint}")
    ready = prepare_loaded(loaded, ranks, forward=True)
    what = {"path": checkpoint, "input": asked.pop("texts"), **asked}
    texts = PassageFile(what["input"])
    check_begin(what["out"], manifest_for(ready.run, EmbedRequest(**what), texts))
    run_ranks("phalanx.cli.jobs:embed", ready, {**arguments(ready.run), "what": what}, None)

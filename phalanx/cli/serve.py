"""`phalanx serve`: from a checkpoint and its options to ranks that serve it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.completion import configs
from phalanx.cli.generate import check_length, check_speculation
from phalanx.cli.options import ADAPTERS, FORWARD_RANKS, OVERRIDES, PAGES, SPECULATE
from phalanx.cli.passages import lookup_of, takes_passages
from phalanx.cli.verbs import ConfigVerb
from phalanx.inference.overrides import refuse_others

if TYPE_CHECKING:
    from phalanx.cli.setup import PreparedRun

NEEDED = ("starlette", "uvicorn", "prometheus_client")
POSITIVE = click.IntRange(min=1)


@click.command("serve", cls=ConfigVerb, short_help="Serve a checkpoint: OpenAI's API and a chat page.")
@click.argument("checkpoint", metavar="CHECKPOINT|RUN", shell_complete=configs)
@OVERRIDES
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at; 0.0.0.0: every one.")
@click.option(
    "--api-keys",
    type=click.Path(dir_okay=False),
    default=None,
    help="File with a key on each line, for its owner alone (chmod 600).",
)
@click.option("--model-name", "name", default=None, help="What clients call the model (default: the folder's name).")
@click.option("--sequences", type=POSITIVE, default=64, show_default=True, help="Sequences generated at once.")
@click.option("--queue", type=POSITIVE, default=256, show_default=True, help="Sequences that may run or wait at once.")
@click.option(
    "--length", type=POSITIVE, default=None, help="Tokens of a sequence at most (default: the model's positions)."
)
@click.option(
    "--memory-gib",
    type=click.FloatRange(min=0, min_open=True),
    default=None,
    help="For keys and values, on each rank (default: as much as the sequences can use, or is free).",
)
@PAGES
@click.option(
    "--prefix-states",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="States of prompts' beginnings that layers with a scan or linear attention keep, so that prompts which begin "
    "alike share them; each takes the memory of a sequence.",
)
@click.option(
    "--drain-seconds",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="Time for running requests to end when the server is stopped.",
)
@click.option(
    "--pooling",
    type=click.Choice(["mean", "first", "last"]),
    default=None,
    help="Serve embeddings of a model whose folder does not say how they are made.",
)
@takes_passages
@SPECULATE
@ADAPTERS
@FORWARD_RANKS
def serve(checkpoint: str, overrides: tuple[str, ...], ranks: int | None, name: str | None, **options: Any) -> None:
    """Serve CHECKPOINT to OpenAI's clients and to browsers: a run folder (its newest), a checkpoint, or a Hugging Face
    folder. SIGTERM or Ctrl-C lets running requests end.

    \b
      phalanx serve runs/first                          http://127.0.0.1:8000 has a chat page
      phalanx serve runs/first layout.tp=2 --ranks 2
      phalanx serve runs/first --host 0.0.0.0 --api-keys keys.txt
      phalanx serve Llama-3.1-8B --adapter sql=runs/sql --adapter support=lora/support
      phalanx serve runs/retriever                      a run of task.name=embed: /v1/embeddings
      phalanx serve runs/first --index index --neighbours 4
    """
    from phalanx.cli.ranks import run_ranks
    from phalanx.cli.setup import arguments, prepare_loaded
    from phalanx.config.read import read
    from phalanx.config.write import to_dict
    from phalanx.data.files import extra
    from phalanx.evaluation.perplexity import check_folder
    from phalanx.inference.adapters import with_adapters
    from phalanx.inference.embedder import embedder_folder
    from phalanx.inference.engine import check_pages, check_prefix_states
    from phalanx.inference.load import (
        check_generates,
        run_of_folder,
        weights_folder,
        without_data,
    )
    from phalanx.training.machine import describe_machine

    for module in NEEDED:
        extra(module, "phalanx serve needs", "serve")
    from phalanx.server.keys import read_keys
    from phalanx.server.listen import open_socket

    refuse_others(overrides)
    lookup = lookup_of(options)
    weights = weights_folder(checkpoint)
    check_folder(weights)
    gpu = describe_machine("auto").device == "cuda"
    run = run_of_folder(weights, gpu)
    embeds = run.model.headless or options["pooling"] is not None
    if embeds:
        refuse_without_tokens({**options, "index": lookup})
        run = embedder_folder(checkpoint, options["pooling"]).run(gpu, options["length"])
    else:
        check_generates(run.model)
        if run.model.numbers_beside:
            refuse_with_recordings({**options, "index": lookup})
    base = to_dict(run if embeds else without_data(run))
    loaded = read(None, overrides, base, f"the model of {checkpoint}")
    if loaded.run is not None:
        with_adapters(loaded.run, options["adapters"])  # what is wrong with them is said before ranks start
    ready = prepare_loaded(loaded, ranks, forward=True)
    check_length("--length", options["length"], ready.run.model.max_position_embeddings)
    check_speculation(ready.run, ready.ranks, options["speculate"])
    check_prefix_states(ready.run.model, options["prefix_states"], "--prefix-states")
    check_pages(ready.run, options["pages"] or "model", "--pages")
    if not embeds:  # an embedder remembers nothing
        check_memory(ready, options)
    if options["api_keys"] is not None:
        read_keys(options["api_keys"])
    if ready.placement is None:
        open_socket(options["host"], options["port"]).close()  # said now, not when the weights are there
    name = name or Path(checkpoint).resolve().name
    if name in options["adapters"]:
        raise click.UsageError(f"--adapter {name}=...: the model itself has that name; give it another (--model-name)")
    found = None if lookup is None else {"lookup": asdict(lookup[0]), "template": lookup[1]}
    values = {"weights": str(weights), "name": name, "passages": found, **options}
    run_ranks("phalanx.cli.jobs:serve", ready, {**arguments(ready.run), "options": values}, None)


def check_memory(ready: PreparedRun, options: dict[str, Any]) -> None:
    """ConfigError if --memory-gib, or what is free on GPUs here, holds no sequence, before ranks start."""
    from phalanx.forecast.decide import make_plan
    from phalanx.inference.drafter import drafts_named
    from phalanx.inference.engine import EngineOptions
    from phalanx.inference.load import without_training
    from phalanx.inference.predictor import MtpSpec
    from phalanx.inference.serving_plan import ServingPlan, check_held, limits_of
    from phalanx.ops.attention.paged import FP8
    from phalanx.training.machine import memory_here

    free = memory_here(ready.run, ready.ranks, ready.placement).gpus if options["memory_gib"] is None else ()
    if options["memory_gib"] is None and not free:
        return  # on a CPU, where an engine takes what it finds
    run, drafts = without_training(ready.run, ready.ranks), None
    if options["speculate"] is not None:
        drafts = drafts_named(options["speculate"])
    names = ("sequences", "length", "memory_gib", "prefix_states")
    asked = EngineOptions(**{name: options[name] for name in names}, drafts=drafts)
    predicted = drafts if isinstance(drafts, MtpSpec) else None  # n-grams take no memory
    dtype = FP8 if options["pages"] == "fp8" else None
    serving = ServingPlan.of(make_plan(run, ready.ranks), limits_of(run, asked), dtype, predicted)
    check_held(serving, asked, min(free, default=None))


def refuse_with_recordings(options: dict[str, Any]) -> None:
    """UsageError for what is not built for a model that writes the text of recordings, and ConfigError if the package
    that decodes them is missing."""
    from phalanx.data.files import extra

    extra("soundfile", "recordings need", "sound")
    for name in ("speculate", "index"):
        if options[name]:
            raise click.UsageError(f"--{name} does nothing for a model that writes the text of recordings")


def refuse_without_tokens(options: dict[str, Any]) -> None:
    """UsageError for options that do nothing where no tokens are made."""
    for name in ("speculate", "adapters", "memory_gib", "pages", "prefix_states", "index"):
        if options[name]:
            option = {"adapters": "adapter"}.get(name, name).replace("_", "-")
            raise click.UsageError(f"--{option} does nothing for a model that makes embeddings")

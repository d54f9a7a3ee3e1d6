"""What ranks do: functions that the launcher calls by name, each a few lines that call `training/`."""

from __future__ import annotations

from typing import Any

from phalanx.base.garbage import seldom_collected
from phalanx.base.placement import Placement
from phalanx.config.read import load_run


def train(placement: Placement, config: dict[str, Any], command: str = "") -> None:
    with seldom_collected():
        from phalanx.training.main import train_rank

    train_rank(load_run(base=config), placement, command)


def verify(placement: Placement, config: dict[str, Any], steps: int) -> None:
    from phalanx.verifying.compare import verify_rank

    verify_rank(load_run(base=config), placement, steps)


def evaluate(
    placement: Placement,
    config: dict[str, Any],
    weights: str,
    sets: dict[str, list[str]],
    samples: int | None,
    out: str | None,
) -> None:
    from phalanx.evaluation.perplexity import Evaluation, evaluate_rank

    evaluate_rank(load_run(base=config), placement, Evaluation(weights, sets, samples, out))


def score(placement: Placement, config: dict[str, Any], what: dict[str, Any]) -> None:
    from phalanx.evaluation.scoring import TokenScoring, score_rank

    score_rank(load_run(base=config), placement, TokenScoring(**what))


def evaluate_tasks(placement: Placement, config: dict[str, Any], what: dict[str, Any]) -> None:
    from phalanx.evaluation.harness_run import TaskEvaluation, evaluate_tasks_rank

    evaluate_tasks_rank(load_run(base=config), placement, TaskEvaluation(**{**what, "tasks": tuple(what["tasks"])}))


def generate(placement: Placement, config: dict[str, Any], path: str, asked: dict[str, Any]) -> None:
    from phalanx.cli.generate import options_of
    from phalanx.inference.drafter import drafts_named
    from phalanx.inference.generate import Generation, generate_rank, read_prompts

    found = asked["passages"]
    if found is not None:
        prompts: tuple[Any, ...] = tuple(row["text"] for row in found)
    else:
        prompts = (asked["prompt"],) if asked["prompts"] is None else read_prompts(asked["prompts"])
    what = Generation(
        path=path,
        prompts=prompts,
        options=options_of(asked),
        samples=asked["samples"],
        stop=tuple(asked["stop"]),
        out=asked["out"],
        drafts=drafts_named(asked["speculate"]) if asked["speculate"] else None,
        adapter=asked["adapter"],
        shown=None if found is None else tuple({k: row[k] for k in ("prompt", "passages")} for row in found),
    )
    generate_rank(load_run(base=config), placement, what)


def embed(placement: Placement, config: dict[str, Any], what: dict[str, Any]) -> None:
    from phalanx.retrieval.embedding import EmbedRequest, embed_rank

    embed_rank(load_run(base=config), placement, EmbedRequest(**what))


def serve(placement: Placement, config: dict[str, Any], options: dict[str, Any]) -> None:
    from phalanx.inference.drafter import drafts_named
    from phalanx.retrieval.retriever import Lookup
    from phalanx.server.serve_rank import ServeOptions, serve_rank

    speculate, passages = options.pop("speculate"), options.pop("passages")
    lookup = None if passages is None else (Lookup(**passages["lookup"]), passages["template"])
    drafts = drafts_named(speculate) if speculate else None
    pages = options.pop("pages") or "model"
    serve_rank(load_run(base=config), placement, ServeOptions(**options, pages=pages, drafts=drafts, passages=lookup))

"""`phalanx eval --tasks`: tasks of lm-evaluation-harness on each rank of a layout. Rank 0 asks, all ranks compute."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from lm_eval import __version__ as HARNESS
from lm_eval.evaluator import evaluate

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import ConfigError, Problem
from phalanx.base.placement import Placement
from phalanx.checkpoint.lora_folder import read_lora_folder
from phalanx.checkpoint.manifest import NAME
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.engine.meeting import checkpoint, device_of, folder, identity, joined_mesh
from phalanx.evaluation.answers import AnswerFile
from phalanx.evaluation.harness import AnswerSource, HarnessModel
from phalanx.evaluation.model_text import model_text
from phalanx.evaluation.task_report import results_of, text_of
from phalanx.evaluation.tasks import drawn_in_this_process, harness_seeds, load_tasks, set_few_shot
from phalanx.forecast.decide import make_plan
from phalanx.inference.adapters import with_adapter
from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.load import load_model, without_training

SEQUENCES = 256  # computed at once
PATIENCE_S = 3600.0  # that ranks wait for rank 0 while it reads data, tokenizes and draws standard errors
DRAWS = 1000  # for standard errors that have no formula
SCORED = 2**28  # logits of a step at most
MOST_TOKENS, FEWEST_TOKENS = 8192, 256  # of a step


@dataclass(frozen=True, kw_only=True)
class TaskEvaluation:
    """What to evaluate.

    weights   a Hugging Face folder or a checkpoint's
    tasks     names in the harness's package, or YAML files
    data      a folder of data sets; None: the user's Hub cache
    limit     questions of each task at most; None: all
    few_shot  examples before each question; None: as the task says
    chat      questions as chats by the model's template
    length    tokens of a sequence at most; None: the model's positions
    answers   a file of answers that are kept; None: none is
    out       a file for the results as JSON
    adapter   folder of a LoRA adapter, which is added to the weights
    """

    weights: str
    tasks: tuple[str, ...]
    data: str | None = None
    limit: int | None = None
    few_shot: int | None = None
    chat: bool = False
    length: int | None = None
    answers: str | None = None
    out: str | None = None
    adapter: str | None = None


def evaluate_tasks_rank(run: Run, placement: Placement, what: TaskEvaluation) -> None:
    """One rank's share; rank 0 prints the table and writes the file."""
    with ExitStack() as after:
        first = placement.rank == 0
        loaded = load_tasks(what.tasks, what.data) if first else {}  # what is wrong is said before the ranks meet
        text = model_text(Path(what.weights)) if first else None
        answers = after.enter_context(AnswerFile(what.answers if first else None))
        if text is not None and what.chat:
            check_template(text.template is not None, what.weights)
        mesh, _ = after.enter_context(joined_mesh(run, placement, identity(run, device_of(run, placement))))
        engine = load_engine(run, mesh, what)
        if text is None:
            engine.follow()
            return
        known = AnswerSource(
            weights_identity(Path(what.weights), what.adapter), run.train.precision, text.tokenizer.fingerprint
        )
        found = evaluated(HarnessModel(engine, text, known, answers), loaded, what)
        results = results_of(found, loaded["tasks"])
        engine.close()
        print(
            f"{what.weights}: {run.model.family} on {mesh.grid.text}, {run.train.precision}, lm-evaluation-harness "
            f"{HARNESS}"
        )
        print(text_of(results), flush=True)
        if what.out is not None:
            record = {
                "weights": what.weights,
                "precision": run.train.precision,
                "layout": mesh.grid.text,
                "lm_eval": HARNESS,
                "limit": what.limit,
                "chat_template": what.chat,
            }
            Path(what.out).write_text(json.dumps({**record, **results.plain()}, indent=1), encoding="utf-8")


def load_engine(run: Run, mesh: Mesh, what: TaskEvaluation) -> Engine:
    """Collective."""
    run, adapters = with_adapter(run, what.adapter)
    plan = make_plan(without_training(run, mesh.world.size), mesh.world.size)
    model = load_model(Path(what.weights), plan, mesh, adapters)
    return Engine(model, engine_options(run, what.length), max(PATIENCE_S, run.train.timeout_s))


def engine_options(run: Run, length: int | None = None) -> EngineOptions:
    """Steps whose logits fit into memory."""
    tokens = max(FEWEST_TOKENS, min(MOST_TOKENS, SCORED // run.model.vocab_size))
    return EngineOptions(sequences=SEQUENCES, tokens=tokens, length=length)


def evaluated(
    model: HarnessModel, loaded: Mapping[str, Any], what: TaskEvaluation, draws: int = DRAWS
) -> dict[str, Any]:
    """What the harness finds, on rank 0, while the other ranks follow the engine. loaded: the tasks. draws: for
    standard errors that have no formula; 0: there are none of these."""
    set_few_shot(loaded["tasks"], what.few_shot)
    with harness_seeds(), drawn_in_this_process(), redirect_stdout(StringIO()):  # it prints what it draws
        found = evaluate(
            lm=model,
            task_dict=dict(loaded),
            limit=what.limit,
            bootstrap_iters=draws,
            apply_chat_template=what.chat,
            fewshot_as_multiturn=what.chat,
        )
    return dict(found)


def check_template(has: bool, weights: str) -> None:
    """ConfigError if chats are wanted of a model that has no template for them."""
    if not has:
        rule = f"needs a chat template, and {weights} has none (chat_template.jinja, or in tokenizer_config.json)"
        raise ConfigError([Problem("--chat-template", True, rule, {}, (False,), "command line")])


def weights_identity(weights: Path, adapter: str | None = None) -> str:
    """Of a checkpoint its manifest, which has the checksum of every file; of a Hugging Face folder, or an adapter's,
    names, sizes and (of large files some of) the bytes."""
    if adapter is not None:
        return f"{weights_identity(weights)} {folder(read_lora_folder(adapter).path)}"
    if weights.name == "weights" and (weights.parent / NAME).is_file():
        return checkpoint(str(weights.parent))
    return folder(weights)

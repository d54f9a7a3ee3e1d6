"""Tasks of lm-evaluation-harness in YAML files with JSONL beside them, one of each output type, and their evaluation on
ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.planning.plan import grid_of

WORDS = "the quick brown fox jumps over the lazy dog, and the weather in Paris is fine. "
TASKS = {
    "choices": """
output_type: multiple_choice
fewshot_split: train
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
""",
    "continuations": """
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: " {{choices[0]}}"
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "pages": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{page}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
""",
    "texts": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[1]}}"
generation_kwargs: {until: ["\\n", "an"], max_gen_toks: 12, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
}


def docs() -> list[dict[str, Any]]:
    """Questions short and long, one longer than the model's positions; choices of unequal number and length, with a
    space at the end of the context and a choice of one token."""
    found = []
    for i in range(7):
        question = (WORDS * 8)[i : i + (9 + 23 * i) * (4 if i == 6 else 1)] + " " * (i % 2)
        choices = ["the lazy dog", " a", "Paris is fine\nand", "stop"][: 3 + i % 2]
        page = (WORDS * 9)[i : i + 3 + 77 * i]
        found.append({"question": question, "choices": choices, "answer": i % 3, "page": page})
    return found


def write_tasks(folder: Path) -> dict[str, str]:
    """Name -> the task's file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs()))
    files = {}
    for name, text in TASKS.items():
        head = f"task: local_{name}\ndataset_path: json\ntest_split: test\nmetadata: {{version: 1.0}}\n"
        data = "dataset_kwargs: {data_files: {test: docs.jsonl, train: docs.jsonl}}\n"
        (folder / f"{name}.yaml").write_text(head + data + text)
        files[name] = str(folder / f"{name}.yaml")
    return files


def found_on_ranks(
    rank: int, world: int, run: Run, weights: str, tasks: tuple[str, ...], options: dict[str, Any]
) -> dict[str, Any] | None:
    """What the harness finds with our model on the ranks of a layout; None on ranks other than 0. options: of
    TaskEvaluation."""
    from phalanx.evaluation.answers import AnswerFile
    from phalanx.evaluation.harness import AnswerSource, HarnessModel
    from phalanx.evaluation.harness_run import TaskEvaluation, evaluated, load_engine
    from phalanx.evaluation.model_text import model_text
    from phalanx.evaluation.tasks import load_tasks

    what = TaskEvaluation(weights=weights, tasks=tasks, **options)
    engine = load_engine(run, Mesh(grid_of(run, world), rank), what)
    if rank:
        engine.follow()
        return None
    with AnswerFile(what.answers) as answers:
        model = HarnessModel(engine, model_text(Path(weights)), AnswerSource("w", run.train.precision, "t"), answers)
        found = evaluated(model, load_tasks(tasks, what.data), what)
    engine.close()
    return plain(found)


def plain(found: dict[str, Any]) -> dict[str, Any]:
    """Scores, and what the model answered to each question."""
    samples = {
        name: [(sample["arguments"], sample["resps"]) for sample in each] for name, each in found["samples"].items()
    }
    return {"results": found["results"], "samples": json.loads(json.dumps(samples))}

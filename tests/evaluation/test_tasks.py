"""`phalanx eval --tasks`: lm-evaluation-harness finds with our model what it finds with its own `hf` model on the same
weights, in any layout and through our server."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="tasks need the extra eval")
pytest.importorskip("transformers", reason="the harness's own model is the truth here")

from lm_eval.evaluator import evaluate

from phalanx.base.errors import ConfigError, DataError
from phalanx.checkpoint.keep import find
from phalanx.config.run import Run
from phalanx.evaluation.tasks import harness_seeds, load_tasks, set_few_shot, unknown_task
from phalanx.inference.ends import end_tokens
from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.load import load_alone, run_of_folder, weights_alone
from phalanx.server.serve_rank import RunEngine
from phalanx.server.served import ServedModel
from phalanx.text.tokenizers import load_tokenizer
from tests.harness.chat_model import chat_folder
from tests.harness.eval_tasks import found_on_ranks, plain, write_tasks

ROOT = Path(__file__).parents[2]
POSITIONS = 96
FEW_SHOT = {"few_shot": 2}
CHAT = {"chat": True}


@pytest.fixture(scope="module")
def run_folder(warm, tmp_path_factory) -> Path:
    """A run of a tiny model with a tokenizer of words and a chat template. Its learning rate is high: answers of a
    model that has learned nothing differ by less than they should."""
    folder = tmp_path_factory.mktemp("run")
    words = [
        f"dir={folder / 'run'}",
        f"data.tokenizer={chat_folder(folder)}",
        f"model.max_position_embeddings={POSITIONS}",
        "model.initializer_range=0.2",
        "train.seq_length=64",
        "train.steps=1",
        "train.device=cpu",
        "optim.warmup_steps=0",
    ]
    done = warm.phalanx("train", "recipes/tiny_llama.yaml", *words, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def weights(run_folder) -> Path:
    return find(run_folder) / "weights"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> dict[str, str]:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def truth(weights, tasks):
    """A function: what the harness finds with its own `hf` model."""
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(weights), dtype="float32", device="cpu", batch_size=1)

    def found(names: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
        loaded = load_tasks([tasks[name] for name in names])
        set_few_shot(loaded["tasks"], options.get("few_shot"))
        chat = options.get("chat", False)
        with harness_seeds():
            made = evaluate(model, loaded, bootstrap_iters=0, apply_chat_template=chat, fewshot_as_multiturn=chat)
        return plain(made)

    return found


def layout_of(weights: Path, world: int, **layout: int) -> Run:
    run = run_of_folder(weights, gpu=False)
    run = replace(run, layout=replace(run.layout, **layout), train=replace(run.train, device="cpu"))
    return weights_alone(run, world)


def check_same(found: dict[str, Any], true: dict[str, Any], within: float = 1e-5) -> None:
    """Log-likelihoods within 1e-5, whether they are greedy and texts equal, scores equal."""
    assert found["samples"].keys() == true["samples"].keys()
    for name, samples in true["samples"].items():
        for (asked, answers), (wanted, answers_there) in zip(found["samples"][name], samples, strict=True):
            assert asked == wanted
            for [answer], [there] in zip(answers, answers_there, strict=True):
                if isinstance(there, list):
                    assert answer[1] == there[1] and answer[0] == pytest.approx(there[0], abs=within, rel=1e-6)
                else:
                    assert answer == (there if isinstance(there, str) else pytest.approx(there, abs=within, rel=1e-6))
    for name, metrics in true["results"].items():
        for key, value in metrics.items():
            if isinstance(value, float) and "stderr" not in key:
                assert found["results"][name][key] == pytest.approx(value, rel=1e-5), (name, key)


@pytest.mark.parametrize(
    "names, options",
    [
        (("choices", "continuations", "pages", "texts"), {}),
        (("choices", "texts"), {**FEW_SHOT, **CHAT}),
    ],
    ids=["each type", "few-shot chat"],
)
def test_one_process_finds_what_the_harness_finds(weights, tasks, truth, names, options):
    files = tuple(tasks[name] for name in names)
    found = found_on_ranks(0, 1, layout_of(weights, 1), str(weights), files, options)
    assert found is not None
    true = truth(names, options)
    check_same(found, true)
    answers = [answer for samples in true["samples"].values() for _, each in samples for [answer] in each]
    if not options:  # the truth is none that anything would find
        assert len({json.dumps(answer) for answer in answers}) > 30


def test_a_layout_changes_nothing(ranks, weights, tasks, truth):
    names = ("choices", "continuations", "pages", "texts")
    files = tuple(tasks[name] for name in names)
    run = layout_of(weights, 4, tp=2, pp=2)
    found = ranks.run("tests.harness.eval_tasks:found_on_ranks", 4, run, str(weights), files, {})
    check_same(found[0], truth(names, {}))
    assert found[1:] == [None] * 3


def test_replicas_share_the_questions(ranks, weights, tasks, truth):
    files = (tasks["choices"],)
    run = layout_of(weights, 2)
    found = ranks.run("tests.harness.eval_tasks:found_on_ranks", 2, run, str(weights), files, {})
    check_same(found[0], truth(("choices",), {}))


def test_the_server_answers_as_the_harness_finds(weights, tasks, truth):
    """lm-evaluation-harness's `local-completions` on our server: all questions but the one that is longer than the
    model's positions, which that client cuts one token sooner."""
    pytest.importorskip("tenacity", reason="what the harness's clients need")
    pytest.importorskip("starlette", reason="the server needs the extra serve")
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from tests.server.conftest import serving

    names, first = ("choices", "continuations", "texts"), 6
    tokenizer = load_tokenizer(weights)
    engine = Engine(load_alone(weights), EngineOptions(sequences=8))
    served = ServedModel("tiny", engine.positions, tokenizer, ends=end_tokens(weights, tokenizer), vocab_size=512)
    with serving(RunEngine(engine, "tiny"), served) as server:
        model = LocalCompletionsAPI(
            model="tiny", base_url=f"{server.url}/v1/completions", tokenizer=str(weights), max_length=POSITIONS
        )
        loaded = load_tasks([tasks[name] for name in names])
        set_few_shot(loaded["tasks"], None)
        with harness_seeds():
            found = plain(evaluate(model, loaded, limit=first, bootstrap_iters=0))
    true = {name: samples[:first] for name, samples in truth(names, {})["samples"].items()}
    check_same(found, {"samples": true, "results": {}})


def test_an_evaluation_that_was_ended_goes_on(weights, tasks, tmp_path, monkeypatch):
    """Half of the answers, the last of them not written to its end, are there: the others are computed, and no more."""
    from phalanx.evaluation import harness

    file, run = tmp_path / "a.jsonl", layout_of(weights, 1)
    files, options = tuple(tasks.values()), {"answers": str(file)}
    whole = found_on_ranks(0, 1, run, str(weights), files, options)
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) > 30 and whole is not None
    kept = len(lines) // 2
    file.write_text("".join(lines[:kept]) + lines[kept][: len(lines[kept]) // 2])
    computed = []
    for name in ("scores", "texts"):
        ask = getattr(harness, name)

        def counted(*given, ask=ask):
            computed.extend(given[-1])
            return ask(*given)

        monkeypatch.setattr(harness, name, counted)
    again = found_on_ranks(0, 1, run, str(weights), files, options)
    check_same(again, whole)
    assert len(computed) == len(lines) - kept
    written = file.read_text().splitlines(keepends=True)
    assert written[:kept] == lines[:kept]
    assert sorted(json.loads(line)["key"] for line in written) == sorted(json.loads(line)["key"] for line in lines)
    computed.clear()
    assert found_on_ranks(0, 1, run, str(weights), files, options) == again and not computed
    other = replace(run, train=replace(run.train, precision="fp64"))
    found_on_ranks(0, 1, other, str(weights), files[:1], options)
    assert computed


def test_the_program(warm, run_folder, tasks, truth, tmp_path):
    """Ranks that it starts; a table of 80 columns; figures with standard errors and calibration; limits."""
    files = ",".join([tasks["choices"], tasks["texts"]])
    out = tmp_path / "new" / "out.json"
    words = ("--limit", "6", "layout.tp=2", "train.device=cpu", "-o", str(out))
    done = warm.phalanx("eval", str(run_folder), "--tasks", files, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines()[1:])) <= 80
    record = json.loads(out.read_text())
    found = {(score["task"], score["metric"]): score for score in record["scores"]}
    first = found["local_choices", "acc"]
    assert first["samples"] == 6 and first["higher_is_better"]
    samples = truth(("choices",), {})["samples"]["local_choices"][:6]
    right = [max(range(len(a)), key=lambda i: a[i][0][0]) == i % 3 for i, (_, a) in enumerate(samples)]
    assert first["value"] == pytest.approx(sum(right) / 6)
    assert first["stderr"] == pytest.approx(math.sqrt(first["value"] * (1 - first["value"]) / 5))
    shown = record["calibration"]["local_choices"]
    assert shown["questions"] == 6 and f"{shown['ece']:.4f}" in done.stdout and f"{first['value']:.4f}" in done.stdout
    assert (tmp_path / "new" / "out.answers.jsonl").exists()


@pytest.mark.parametrize(
    "words, code, text",
    [
        (("--tasks", "gone.yaml"), 3, "gone.yaml: a task's file that cannot be read"),
        (("--tasks", ","), 2, "--tasks names no task"),
        (("--limit", "3"), 2, "--limit needs --tasks"),
        (("--tasks", "TASK", "--samples", "3"), 2, "--samples is for token files"),
        (("--tasks", "TASK", "train.lr=1"), 2, "does nothing to generation"),
        (("--tasks", "TASK", "--length", "99999"), 2, "--length=99999: must not be more than the model has positions"),
        (("--tasks", "TASK", "--data", "gone"), 2, "one folder of data sets"),
    ],
)
def test_what_cannot_be_asked(warm, run_folder, tasks, tmp_path, words, code, text):
    given = [tasks["choices"] if word == "TASK" else word for word in words]
    done = warm.phalanx("eval", str(run_folder), *given, cwd=tmp_path)
    assert done.returncode == code and text in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_names_that_are_near():
    problem = unknown_task("arc_esay", ["arc_easy", "arc_challenge", "hellaswag"])
    assert problem.valid[0] == "arc_easy" and "is no task" in problem.rule


def task_file(folder: Path, **fields: Any) -> str:
    """A task of the user's: JSON is YAML."""
    given = {
        "task": "mine",
        "dataset_path": "someone/pairs",
        "output_type": "loglikelihood",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        **fields,
    }
    (folder / "mine.yaml").write_text(json.dumps(given))
    return str(folder / "mine.yaml")


def test_data_of_a_folder(tmp_path):
    """A data set under its name on the Hub, as `hf download --local-dir` leaves it."""
    there = tmp_path / "sets" / "someone" / "pairs"
    there.mkdir(parents=True)
    (there / "test.jsonl").write_text('{"question": "one", "answer": "two"}\n')
    loaded = load_tasks([task_file(tmp_path)], str(tmp_path / "sets"))
    assert [doc["answer"] for doc in loaded["tasks"]["mine"].test_docs()] == ["two"]


@pytest.mark.parametrize(
    "data, text",
    [
        ("sets", r"mine: there is no folder .*/sets/someone/pairs; .*hf download someone/pairs --repo-type dataset"),
        (None, r"mine: its data set someone/pairs cannot be used: .*hf download someone/pairs .*then --data FOLDER"),
    ],
)
def test_data_that_is_not_here_is_named(tmp_path, data, text):
    with pytest.raises(DataError, match=text):
        load_tasks([task_file(tmp_path)], data and str(tmp_path / data))


def test_files_that_are_no_tasks(tmp_path):
    gone = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "gone.jsonl"}}}
    with pytest.raises(DataError, match="its data file gone.jsonl is neither here nor beside it"):
        load_tasks([task_file(tmp_path, **gone)])
    (tmp_path / "docs.jsonl").write_text('{"question": "one", "answer": "two"}\n')
    here = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "docs.jsonl"}}}
    with pytest.raises(DataError, match="mine: .*cannot be used: .*invalid output_type"):
        load_tasks([task_file(tmp_path, **here, output_type="poem")])
    with pytest.raises(ConfigError, match="runs code that the model wrote"):
        load_tasks([task_file(tmp_path, **here, unsafe_code=True)])

"""train.eval_tasks: scores during training, in the log, the metrics and the report; training's bits stay."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("lm_eval", reason="tasks need the extra eval")

from phalanx.base.errors import DataError
from phalanx.base.placement import Placement
from phalanx.checkpoint.keep import find
from phalanx.config.run import LogConfig, Run
from phalanx.config.write import save_run
from phalanx.inference.load import run_of_folder, weights_alone
from phalanx.optim.config import OptimConfig
from phalanx.training.main import train
from tests.harness.eval_tasks import found_on_ranks, write_tasks
from tests.training.test_loop import make_run, rows_of

NUMBERS = ("step", "loss", "grad_norm", "tokens")


def run_with(folder, tasks: list[str], **options) -> Run:
    given = {"steps": 3, "precision": "fp64", "eval_interval": 2}
    run = make_run(folder, **{**given, "eval_tasks": tasks, **options})
    model = replace(run.model, vocab_size=300, max_position_embeddings=192)
    optim = OptimConfig(lr=0.1, schedule="constant")  # so that a step changes what is likely
    return replace(run, model=model, optim=optim, data=replace(run.data, tokenizer="bytes"), log=LogConfig())


def scores_of(run: Run) -> dict[int, dict[str, float]]:
    rows = rows_of(run)
    found = {row["step"]: {k: v for k, v in row.items() if k.startswith("tasks/")} for row in rows}
    return {step: scores for step, scores in found.items() if scores}


def test_scores_while_a_run_trains(tmp_path, warm):
    """After step 2 and the last: the scores of the checkpoint, and on two ranks with ZeRO-3 those of one; the losses'
    bits are those without tasks."""
    files = write_tasks(tmp_path / "tasks")
    tasks = [files[name] for name in ("choices", "continuations", "pages")]
    alone = run_with(tmp_path / "alone", tasks)
    train(alone, Placement())
    scores = scores_of(alone)
    assert list(scores) == [2, 3] and scores[2].keys() == scores[3].keys() and scores[2] != scores[3]
    without = run_with(tmp_path / "without", [])
    train(without, Placement())
    numbers = [[[row[k] for k in NUMBERS] for row in rows_of(run) if "grad_norm" in row] for run in (alone, without)]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 3
    log, page = ((tmp_path / "alone" / name).read_text() for name in ("log.txt", "report.html"))
    assert log.count("tasks step=") == 2 and "local_choices/acc=" in log and "Task local_pages" in page
    weights = find(tmp_path / "alone") / "weights"
    again = run_of_folder(weights, gpu=False)
    again = weights_alone(replace(again, train=replace(again.train, device="cpu")), 1)
    found = found_on_ranks(0, 1, again, str(weights), tuple(tasks), {})  # in float32
    assert found is not None
    for task, metrics in found["results"].items():
        for key, value in metrics.items():
            metric = key.removesuffix(",none")
            if key.endswith(",none") and "stderr" not in key:
                assert scores[3][f"tasks/{task}/{metric}"] == pytest.approx(value, rel=1e-4), key
    assert 0 <= scores[3]["tasks/local_choices/ece"] <= 1
    split = run_with(tmp_path / "split", tasks)
    save_run(split, tmp_path / "run.yaml")
    done = warm.phalanx("train", str(tmp_path / "run.yaml"), "layout.sharding=3", "--ranks", "2")
    assert done.returncode == 0, done.stderr
    there = scores_of(split)
    assert there.keys() == scores.keys()
    for step, each in scores.items():
        assert there[step] == pytest.approx(each, rel=1e-8)


def test_a_task_that_cannot_be_asked_is_said_and_the_run_goes_on(tmp_path):
    """Answers longer than the model has positions."""
    files = write_tasks(tmp_path / "tasks")
    run = run_with(tmp_path / "run", [files["texts"]], steps=1)
    run = replace(run, model=replace(run.model, max_position_embeddings=12), train=replace(run.train, seq_length=8))
    train(run, Placement())
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "no scores of train.eval_tasks: a task asks for 12 tokens" in log and not scores_of(run)


def test_tasks_that_are_not_there_end_a_run_before_it_starts(tmp_path):
    (tmp_path / "mine.yaml").write_text(json.dumps({"task": "mine", "dataset_path": "nobody/nothing"}))
    run = run_with(tmp_path / "run", [str(tmp_path / "mine.yaml")])
    with pytest.raises(DataError, match="mine: its data set nobody/nothing cannot be used"):
        train(run, Placement())
    assert not (tmp_path / "run/metrics.jsonl").exists()

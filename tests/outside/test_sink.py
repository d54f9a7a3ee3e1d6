"""A sink from outside the package, in one file that no file of ours names: it gets every record of a run, and what is
wrong with it ends nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.base.placement import Placement
from phalanx.base.records import Record
from phalanx.config.device_check import Facts
from phalanx.config.read import load_run, read
from phalanx.config.run import LogConfig
from phalanx.evaluation.perplexity import base_config
from phalanx.forecast.check import check
from phalanx.training.main import train
from tests.harness.tracker_files import rows_of
from tests.training.test_loop import make_run

ROOT = Path(__file__).parents[2]
TABLE = "tests.outside.table_sink:Table"
SMALL = ["train.steps=4", "train.global_batch=4", "train.micro_batch=1", "train.seq_length=32", "train.eval_interval=2"]


def table_of(path: Path) -> list[tuple[int, str, float, str]]:
    cells = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    return [(int(step), name, float(number), unit) for step, name, number, unit in cells]


def numbers_of(folder: Path) -> dict[tuple[int, str], float]:
    """Of metrics.jsonl, without anything of ours: groups by hand."""
    found = {}
    for row in rows_of(folder):
        for name, value in row.items():
            if name == "experts":
                layers = ((f"experts/{k}/layer-{i}", v) for k, of in value.items() for i, v in enumerate(of))
                found |= {(row["step"], key): v for key, v in layers if v is not None}
            elif name != "step" and isinstance(value, (int, float)):
                found[row["step"], name] = value
    return found


def test_it_gets_every_record_of_two_ranks(warm, tmp_path):
    """Tables and evaluations too, once each, and numbers that come from both ranks."""
    words = ["train", "recipes/tiny_mixtral.yaml", *SMALL, "--ranks", "2"]
    words += ["train.device=cpu", "data.mock=true", "data.text=[]", "data.tokenizer=null", f"dir={tmp_path}/run"]
    words += ["layout.ep=2", f"log.sinks.{TABLE}={{file: mine.tsv}}"]
    done = warm.phalanx(*words, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = table_of(tmp_path / "run/mine.tsv")
    wanted = numbers_of(tmp_path / "run")
    assert {(step, name): number for step, name, number, _ in lines} == wanted and len(lines) == len(wanted)
    assert {"loss", "valid/valid", "experts/entropy/layer-1"} < {name for _, name, _, _ in lines}
    units = {name: unit for _, name, _, unit in lines}
    assert [units[name] for name in ("loss", "tokens_per_s", "memory_gib")] == ["nats per token", "tokens/s", "GiB"]
    assert f"{TABLE}:" in (tmp_path / "run/config.yaml").read_text(encoding="utf-8")


def test_one_that_fails_is_named_once_and_another_start_goes_on(tmp_path, capsys):
    run = make_run(tmp_path / "run", steps=4)
    train(replace(run, log=LogConfig(report=False, sinks={TABLE: {"fail_at": 2}})), Placement())
    said = capsys.readouterr()
    assert said.err.count(f"{TABLE} failed and gets nothing more of this run, which goes on") == 1
    assert "done step=4" in said.out and [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2, 3, 4]
    assert {step for step, *_ in table_of(tmp_path / "run/table.tsv")} == {1}


def problems(*overrides: str) -> dict[str, str]:
    base = ["model.family=llama", "model.vocab_size=64", "model.hidden_size=16", "model.intermediate_size=32"]
    base += ["model.num_hidden_layers=1", "model.num_attention_heads=2", "train.steps=1", "train.global_batch=1"]
    run = load_run(None, [*base, "train.micro_batch=1", "train.seq_length=8", "data.mock=true", *overrides])
    return {p.field: p.rule for p in check(run, Facts(files=False))}


def test_what_is_wrong_with_it_is_said_before_the_run():
    assert problems(f"log.sinks.{TABLE}={{}}") == {}
    field = f"log.sinks.{TABLE}"
    wrong = problems(f"{field}={{fil: a, fail_at: soon}}")
    assert "which has file, fail_at" in wrong[f"{field}.fil"] and "must be int" in wrong[f"{field}.fail_at"]
    [(field, rule)] = problems("log.sinks.tests.outside.table_snk:Table={}").items()
    assert "there is no module tests.outside.table_snk" in rule and TABLE in rule
    [rule] = problems("log.sinks.tests.outside.table_sink:Unfinished={}").values()
    assert "has no write(self, row: Row) -> None" in rule
    assert problems("log.sinks.wandb={}") == {"log.sinks.wandb": "is a sink of ours: type log.wandb=PROJECT"}
    assert load_run(None, ["log.sinks.table={}"], base=make_run(Path("x"), steps=1)).log.sinks == {TABLE: {}}


def test_what_a_checkpoint_names_is_not_imported():
    """Somebody else's config names a sink: nothing is imported until the user names it too."""
    config = {"log": {"sinks": {"somewhere.else:Table": {}}}}
    [found] = read(None, [], config, "the config of a checkpoint").problems
    assert found.field == "log.sinks.somewhere.else:Table" and "type log.sinks.somewhere.else:Table={}" in found.rule


def test_an_evaluation_writes_to_no_sink(tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    train(replace(run, log=LogConfig(report=False, sinks={TABLE: {}})), Placement())
    [weights] = (tmp_path / "run").glob("checkpoints/*/weights")
    assert "sinks" not in base_config(weights, False)["log"]
    assert TABLE in json.loads((weights.parent / "manifest.json").read_text())["config"]["log"]["sinks"]


@pytest.mark.parametrize(
    ("reduction", "one"), [("last", 2.0), ("mean", 3.0), ("median", 3.0), ("sum", 9.0), ("max", 4.0)]
)
def test_reductions(reduction, one):
    assert Record("a", reduction=reduction).reduce([3.0, 4.0, 2.0]) == one

"""A learning-rate schedule from outside the package, in one file that no file of ours names: its rates in the log and
in the weights, by `module:NAME`; and what is refused."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.base.placement import Placement
from phalanx.config.read import load_run, read
from phalanx.forecast.check import Facts, check
from phalanx.optim.config import OptimConfig
from phalanx.optim.optimizer import completed
from phalanx.optim.schedules import learning_rate
from phalanx.training.main import train
from tests.training.test_loop import make_run

OUTSIDE = Path(__file__).parent
if str(OUTSIDE) not in sys.path:
    sys.path.append(str(OUTSIDE))
RATES = "sqrt_rates.rates:one_minus_sqrt"


def test_a_run_has_its_rates(tmp_path):
    """Truth: the formula. Warm-up is that of every schedule. The resolved config finds it in another process."""
    run = make_run(tmp_path / "run", steps=6)
    run = replace(run, optim=OptimConfig(schedule=RATES, lr=1e-2, min_lr=1e-3, warmup_steps=2, decay_steps=5))
    train(run, Placement())
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rates = [row["lr"] for row in rows if "lr" in row]
    expected = [5e-3, 1e-2] + [1e-2 - 9e-3 * math.sqrt(done) for done in (1 / 3, 2 / 3, 1, 1)]
    assert rates == pytest.approx(expected, rel=1e-9)
    assert load_run(run.dir + "/config.yaml", [f"optim.schedule={RATES}"]).optim == run.optim


def test_a_name_becomes_a_path():
    """Another process, in which nothing is registered, must find it."""
    assert learning_rate(OptimConfig(schedule=RATES), 1, 4) > 0
    assert completed(OptimConfig(schedule="one_minus_sqrt")).schedule == RATES
    assert completed(OptimConfig(schedule="wsd")).schedule == "wsd"


SMALL = ["model.family=llama", "model.vocab_size=64", "model.hidden_size=16", "model.intermediate_size=32"]
SMALL += ["model.num_hidden_layers=1", "model.num_attention_heads=2", "train.steps=8", "train.global_batch=1"]
SMALL += ["train.micro_batch=1", "train.seq_length=8", "data.mock=true"]


@pytest.mark.parametrize(
    "overrides, field, rule, valid",
    [
        ("optim.schedule=cosin", "optim.schedule", 'must be one of "constant", "linear", "cosine"', "cosine"),
        ("optim.schedule=sqrt_rates.rates:one_minus", "optim.schedule", "leads nowhere", RATES),
        ("optim.schedule=sqrt_rates.rates:plain", "optim.schedule", "put @px.lr_schedule(NAME) above", None),
        ("optim.schedule=sqrt_rates.rates:below_zero", "optim.schedule", "a number >= 0, at every step", None),
        ("optim.schedule=sqrt_rates.rates:broken", "optim.schedule", "a number >= 0, at every step", None),
        (f"optim.schedule={RATES} optim.wsd_decay_steps=3", "optim.wsd_decay_steps", "has no effect without", None),
        ("optim.schedule=sqrt_rates.rates:broken optim.min_lr=1e-5", "optim.min_lr", "has no effect without", 0.0),
        (f"optim.schedule={RATES} optim.warmup_steps=4 optim.decay_steps=4", "optim.decay_steps", "> warmup_steps", 5),
        ("optim.schedule=3", "optim.schedule", "must be str, got int", None),
    ],
)
def test_a_wrong_schedule_is_refused(overrides, field, rule, valid):
    loaded = read(None, [*SMALL, *overrides.split()])
    found = {p.field: p for p in loaded.problems or check(loaded.run, Facts(1))}
    assert list(found) == [field]
    assert rule in found[field].rule and (valid is None or valid in found[field].valid)


def test_code_named_by_a_checkpoint_is_not_imported():
    found = read(None, SMALL, {"optim": {"schedule": "evil.module:NAME"}}, base_from="a checkpoint").problems
    assert [p.field for p in found] == ["optim.schedule"] and "imported only if you name it" in found[0].rule

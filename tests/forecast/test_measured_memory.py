"""The memory that `plan` promises against what runs took on GPUs: benchmarks/results/runs.csv."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from phalanx.bench.step import long_enough
from phalanx.config.read import load_run
from phalanx.forecast.capacity import FORECAST_ERROR
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import rank_uses

ROOT = Path(__file__).parents[2]


def measured() -> dict[tuple[str, str, int], float]:
    """The newest peak in GiB of each config, overrides and number of ranks."""
    with open(ROOT / "benchmarks/results/runs.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["config"].endswith(".yaml") and row["peak_gib"]]
    return {(row["config"], row["overrides"], int(row["ranks"])): float(row["peak_gib"]) for row in rows}


@pytest.mark.parametrize("config, overrides, ranks", list(measured()))
def test_the_forecast_holds_what_was_measured(config, overrides, ranks):
    key = config, overrides, ranks
    assert measured()[key] == pytest.approx(forecast_of(*key), FORECAST_ERROR)


def forecast_of(config: str, overrides: str, ranks: int) -> float:
    """GiB of the tensors of the fullest rank, without what CUDA and NCCL take."""
    words = [*overrides.split(), "train.device=cuda"]
    run = load_run(ROOT / "benchmarks/configs" / config, words, base={"data": {"mock": True}})
    plan = make_plan(long_enough(run, 20), ranks)
    uses, _ = rank_uses(plan, plan.num_micro_batches(run.train.global_batch))
    return max(use.total for use in uses) / 2**30

"""Every measured run, a row each, in results/runs.csv: forecasts are compared with it.

phalanx bench step benchmarks/configs/w1.yaml layout.tp=2 --ranks 2 --json step.json
python benchmarks/runs.py step.json --config w1.yaml --overrides layout.tp=2 --commit abc1234
"""

from __future__ import annotations

import argparse
import csv
import json
from datetime import date
from pathlib import Path
from typing import Any

RUNS = Path(__file__).parent / "results/runs.csv"
COLUMNS = (
    "date",
    "commit",
    "device",
    "torch",
    "ranks",
    "config",  # of benchmarks/configs
    "overrides",
    "step_ms",  # median; min_ms and max_ms: of the timed steps
    "min_ms",
    "max_ms",
    "peak_gib",  # of the fullest rank
    "budget",  # JSON: the rows of the step budget
)


def row_of(result: dict[str, Any], config: str, overrides: str, commit: str, day: str) -> dict[str, Any]:
    """A row from what `phalanx bench step --json` wrote."""
    step, peak, budget = result["step"], result["peak_bytes"], result["budget"]
    return {
        "date": day,
        "commit": commit,
        "device": result["device"],
        "torch": result["torch"],
        "ranks": result["ranks"],
        "config": config,
        "overrides": overrides,
        "step_ms": f"{1e3 * step['median']:.1f}",
        "min_ms": f"{1e3 * step['low']:.1f}",
        "max_ms": f"{1e3 * step['high']:.1f}",
        "peak_gib": "" if peak is None else f"{peak / 2**30:.2f}",
        "budget": "" if budget is None else json.dumps(rows_of(budget), separators=(",", ":")),
    }


def append(rows: list[dict[str, Any]], path: Path = RUNS) -> None:
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def rows_of(budget: dict[str, Any]) -> dict[str, Any]:
    """Its rows, without the lists of kernels behind them."""
    return {name: value for name, value in budget.items() if not isinstance(value, dict)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--config", required=True)
    parser.add_argument("--overrides", default="")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--date", default=date.today().isoformat())
    options = parser.parse_args()
    read = [json.loads(path.read_text(encoding="utf-8")) for path in options.results]
    append([row_of(r, options.config, options.overrides, options.commit, options.date) for r in read])


if __name__ == "__main__":
    main()

"""What Muon's update costs: the step of a config with AdamW and with Muon, and with one technique left out at a time.

python benchmarks/muon.py benchmarks/configs/w1.yaml --out muon.json [--only NAME ...] [a.b=c ...]
torchrun --nproc-per-node 2 benchmarks/muon.py benchmarks/configs/w1.yaml layout.sharding=1

Each row builds the model anew: `--warmup` steps, then `--steps` timed ones, then three in which the update is timed by
itself, between two moments at which the device is idle. Its share is of the step's median; what runs beside backward or
the next forward is in the step, and not in the update. `homes` and the exchanges matter with several ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from phalanx.base.placement import Placement
from phalanx.bench.step import LR, batches_of, joined, long_enough, peak_bytes, timed_steps, wait
from phalanx.config.read import load_run
from phalanx.data_parallel.homes import MatrixHome
from phalanx.engine.build import State
from phalanx.engine.step import accumulate, train_step, update
from phalanx.launch.env import read_placement
from phalanx.ops.optimizer import orthogonal
from phalanx.optim.muon import Muon
from phalanx.optim.optimizer import MatrixOptimizer, Optimizer
from phalanx.sequence.batch import Batch


@contextmanager
def as_it_is() -> Iterator[None]:
    yield


@contextmanager
def in_direct_form() -> Iterator[None]:
    with patch.object(orthogonal, "TOGETHER", 1):
        yield


@contextmanager
def homes_by_elements() -> Iterator[None]:
    with patch.object(Muon, "cost", Optimizer.cost):
        yield


@contextmanager
def weights_at_the_end() -> Iterator[None]:
    """Homes send all weights when all are updated."""
    send = MatrixHome.send_weights

    def last_of_all(home: MatrixHome, bucket: int) -> None:
        for each in home.order if bucket == home.order[-1] else ():
            send(home, each)

    with patch.object(MatrixHome, "send_weights", last_of_all):
        yield


def gradients_at_the_update(state: State, batches: list[Batch], lr: float) -> None:
    update(state, accumulate(state, batches), lr)


MUON = ["optim.name=muon"]
Step = Callable[[State, list[Batch], float], Any]
ROWS: dict[str, tuple[list[str], Any, Step]] = {  # overrides, what is changed, how a step is made
    "AdamW": (["optim.name=adamw"], as_it_is, train_step),
    "Muon": (MUON, as_it_is, train_step),
    "without symmetric products": ([*MUON, "train.plain_ops=[symmetric]"], as_it_is, train_step),
    "without the Gram form": (MUON, in_direct_form, train_step),
    "without both": ([*MUON, "train.plain_ops=[symmetric]"], in_direct_form, train_step),
    "homes by elements": (MUON, homes_by_elements, train_step),
    "gradients sent at the update": (MUON, as_it_is, gradients_at_the_update),
    "weights sent at the end": (MUON, weights_at_the_end, train_step),
    "without any overlap": (MUON, weights_at_the_end, gradients_at_the_update),
    "with QK-clip": ([*MUON, "optim.qk_clip=100"], as_it_is, train_step),
    "Muon, again": (MUON, as_it_is, train_step),
}


def measure(name: str, placement: Placement, options: argparse.Namespace) -> dict[str, Any]:
    overrides, changed, make_step = ROWS[name]
    run = load_run(options.config, ["data.mock=true", *options.overrides, *overrides])
    run = long_enough(run, options.warmup + options.steps + 3)
    with changed(), joined(run, placement) as state, batches_of(run, state) as next_batches:

        def step() -> None:
            make_step(state, next_batches(), LR)

        for _ in range(options.warmup):
            step()
        times, updates = timed_steps(state, step, options.steps), list[float]()
        real = state.optimizer.update

        def timed(*given: Any) -> None:
            wait(state)
            began = time.perf_counter()
            real(*given)
            state.buffers.gather()
            wait(state)
            updates.append(time.perf_counter() - began)

        with patch.object(state.optimizer, "update", timed):
            for _ in range(3):
                step()
        slowest = torch.tensor(median(updates), dtype=torch.float64, device=state.mesh.device)
        seconds = state.mesh.world.all_reduce(slowest, "max").wait().item()
        found = {"name": name, "step": times.as_dict(), "update_s": seconds, "share": seconds / times.median}
        found["peak_gib"] = (peak_bytes(state) or 0) / 2**30
        found["tflop"] = sum(
            rule.optimizer.flops(slot.spec) / 1e12
            for rule in state.optimizer.rules
            if isinstance(rule.optimizer, MatrixOptimizer)
            for home in rule.homes
            for slot in home.shard.bucket.slots
        )
        return found


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| | step ms | update ms | share | TFLOP of this rank | peak GiB |", "|---|---|---|---|---|---|"]
    for r in rows:
        if "error" in r:
            lines.append(f"| {r['name']} | failed: {r['error'][:160]} | | | | |")
            continue
        step, update_ms = 1e3 * r["step"]["median"], 1e3 * r["update_s"]
        made = f"{step:.1f} | {update_ms:.1f} | {r['share']:.1%} | {r['tflop']:.1f} | {r['peak_gib']:.1f}"
        lines.append(f"| {r['name']} | {made} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", help="a.b=c for every row")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", action="append", choices=list(ROWS), help="a row; may be given several times")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=4)
    options = parser.parse_args()
    placement = read_placement(os.environ)[0] or Placement()
    rows = []
    for name in options.only or ROWS:
        try:
            rows.append(measure(name, placement, options))
        except (RuntimeError, torch.OutOfMemoryError) as error:  # a row that fails is a row of the table
            if placement.world_size > 1:
                raise  # the other ranks are not where this one is
            rows.append({"name": name, "error": f"{type(error).__name__}: {error}"[:2000]})
        if placement.rank == 0 and options.out:
            options.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    if placement.rank == 0:
        print(table(rows))


if __name__ == "__main__":
    main()

"""What each technique brings: the training step of a config with all of them, then with one left out at a time.

python benchmarks/ablation.py benchmarks/configs/w1.yaml --out ablation.json [--only NAME ...] [--deadline 560]
[a.b=c ...]

Every row is a process of its own, forked from this one before CUDA is touched, so that it starts in seconds and
leaves nothing behind: 10 steps of warm-up, 10 timed, fresh made-up tokens in every micro-batch, the host's clock
with an idle device at both ends. The table comes last; rows that the deadline left out are named.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from phalanx.base.placement import Placement
from phalanx.bench.step import LR, batches_of, joined, long_enough, timed_steps
from phalanx.comm.mesh import many_queues
from phalanx.config.read import load_run
from phalanx.config.write import to_dict
from phalanx.engine.build import choices
from phalanx.engine.step import train_step
from phalanx.forecast.flops import step_flops
from phalanx.nn.head import Head

TRITON = ["train.kernels=triton"]
ROWS: dict[str, list[str]] = {  # name -> overrides; the first is what the others are compared with
    "torch and triton": TRITON,
    "optional kernels: attention and mlp": ["train.kernels=optional"],
    "optional kernels: attention alone": ["train.kernels=optional", "train.plain_ops=[mlp]"],
    "optional kernels: mlp alone": ["train.kernels=optional", "train.plain_ops=[attention]"],
    "without norm": [*TRITON, "train.plain_ops=[norm]"],
    "without gradients of the head in forward": TRITON,
    "without CUDA graphs": [*TRITON, "train.cuda_graphs=off"],
    "without loss": [*TRITON, "train.plain_ops=[loss]"],
    "without swiglu": [*TRITON, "train.plain_ops=[swiglu]"],
    "without rope": [*TRITON, "train.plain_ops=[rope]"],
    "without adamw": [*TRITON, "train.plain_ops=[adamw]"],
    "without any kernel of ours": ["train.kernels=plain"],
    "torch and triton, again": TRITON,
}


def measure(config: str, overrides: list[str], name: str, warmup: int, steps: int) -> dict[str, Any]:
    began = time.perf_counter()
    many_queues()
    run = long_enough(load_run(config, [*overrides, *ROWS[name]]), warmup + steps)
    with joined(run, Placement()) as state, batches_of(run, state) as next_batches:
        if "head in forward" in name:
            for module in state.model.modules():
                if isinstance(module, Head):
                    module.eval()  # as in evaluation: logits become gradients in backward, made a second time
        device = state.mesh.device
        started = time.perf_counter() - began
        for _ in range(warmup):
            result = train_step(state, next_batches(), LR)
        times = timed_steps(state, lambda: train_step(state, next_batches(), LR), steps)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        tokens = run.train.global_batch * run.train.seq_length
        return {
            "name": name,
            "overrides": ROWS[name],
            "step": times.as_dict(),
            "tokens_per_s": tokens / times.median,
            "flops": step_flops(run) / times.median,
            "peak_gib": peak / 2**30,
            "loss": result.loss.item(),
            "chosen": choices(state),
            "start_s": started,
            "config": to_dict(run),
        }


def in_child(pipe: Any, *args: Any) -> None:
    try:
        pipe.send(measure(*args))
    except BaseException as error:  # a row that fails is a row of the table
        pipe.send(
            {
                "name": args[2],
                "error": f"{type(error).__name__}: {error}"[:2000],
                "trace": traceback.format_exc()[-3000:],
            }
        )


def row(config: str, overrides: list[str], name: str, warmup: int, steps: int, limit_s: float) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    child = context.Process(target=in_child, args=(theirs, config, overrides, name, warmup, steps))
    child.start()
    theirs.close()
    try:
        return mine.recv() if mine.poll(limit_s) else {"name": name, "error": f"no end after {limit_s:.0f} s"}
    except EOFError:
        return {"name": name, "error": "died"}
    finally:
        child.join(5)
        if child.is_alive():
            child.kill()
            child.join()


def table(rows: list[dict[str, Any]], left_out: list[str]) -> str:
    lines = [
        "| | step ms (least-most) | against the first | tokens/s | TFLOP/s | peak GiB | loss |",
        "|---|---|---|---|---|---|---|",
    ]
    base = next((r["step"]["median"] for r in rows if "step" in r), None)
    for r in rows:
        if "error" in r:
            lines.append(f"| {r['name']} | failed: {r['error'][:160]} | | | | | |")
            continue
        s = {key: 1e3 * r["step"][key] for key in ("median", "low", "high")}
        spread = f"{s['median']:.1f} ({s['low']:.1f}-{s['high']:.1f}) | {s['median'] - 1e3 * base:+.1f}"
        lines.append(
            f"| {r['name']} | {spread} | {r['tokens_per_s']:,.0f} | {r['flops'] / 1e12:.1f} | {r['peak_gib']:.1f} "
            f"| {r['loss']:.4f} |"
        )
    return "\n".join([*lines, *([f"no time was left for: {', '.join(left_out)}"] if left_out else [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", help="a.b=c for every row")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", action="append", choices=list(ROWS), help="a row; may be given several times")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--deadline", type=float, default=3600, help="seconds after which no row is begun or goes on")
    options = parser.parse_args()
    began, rows, left_out = time.monotonic(), [], []
    longest = 30.0
    for name in options.only or ROWS:
        left = options.deadline - (time.monotonic() - began)
        if left < longest and rows:
            left_out.append(name)
            continue
        started = time.monotonic()
        rows.append(
            row(options.config, [*options.overrides, "data.mock=true"], name, options.warmup, options.steps, left)
        )
        longest = time.monotonic() - started
        shown = {k: v for k, v in rows[-1].items() if k not in ("config", "trace")}
        print(f"{longest:.1f} s: {shown}", flush=True)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(table(rows, left_out))
    sys.exit(0 if all("step" in r for r in rows) else 1)


if __name__ == "__main__":
    main()

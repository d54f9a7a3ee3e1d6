"""One config on 1, 2 and 4 GPUs in several layouts: are the loss curves the same, and how fast is each?

python benchmarks/layouts.py --out benchmarks/results/layouts [--steps 200]

Runs `phalanx train` once per layout on the same real text and writes OUT.md (the table), OUT.json (rows and curves)
and OUT.svg.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from phalanx.text.prepare import demo_data

LAYOUTS = {  # name -> (ranks, overrides)
    "1 GPU": (1, []),
    "tp2 x pp2": (4, ["layout.tp=2", "layout.pp=2"]),
    "dp4": (4, []),
    "tp4": (4, ["layout.tp=4"]),
    "pp4": (4, ["layout.pp=4"]),
    "dp2": (2, []),
    "tp2": (2, ["layout.tp=2"]),
}
MODEL = {
    "family": "llama",
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
WARM = 20  # steps left out of the medians


def write_config(folder: Path, steps: int, gpu: bool) -> Path:
    prefix, tokenizer = demo_data(folder / "data", vocab_size=8192)
    model = (
        MODEL
        if gpu
        else {
            **MODEL,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "head_dim": 16,
        }
    )
    length, batch = (1024, 16) if gpu else (32, 8)
    train = {
        "steps": steps,
        "global_batch": batch,
        "micro_batch": batch // 4,
        "seq_length": length,
        "precision": "bf16" if gpu else "fp32",
        "device": "cuda" if gpu else "cpu",
    }
    config = {
        "model": model,
        "train": train,
        "optim": {"lr": 6e-4, "warmup_steps": steps // 10},
        "data": {"paths": [prefix], "split": "1,0,0", "tokenizer": tokenizer},
        "log": {"interval": 50},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    return path


def run_layout(config: Path, folder: Path, name: str, ranks: int, overrides: list[str]) -> dict[str, Any]:
    run = folder / name.replace(" ", "")
    command = [
        sys.executable,
        "-m",
        "phalanx",
        "train",
        str(config),
        f"dir={run}",
        "log.report=false",
        "log.budget=false",
        *overrides,
    ]
    command += ["--ranks", str(ranks)]
    began = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    except subprocess.TimeoutExpired as late:
        return {"layout": name, "ranks": ranks, "error": f"no end after {late.timeout} s"}
    wall = time.perf_counter() - began
    if done.returncode:
        return {"layout": name, "ranks": ranks, "error": (done.stdout + done.stderr)[-3000:]}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [r for r in rows if "loss" in r]
    timed = sorted(rows[min(WARM, len(rows) // 2) :], key=lambda r: r["step_s"])
    middle = timed[len(timed) // 2]
    return {
        "layout": name,
        "ranks": ranks,
        "step_ms": middle["step_s"] * 1e3,
        "min_ms": timed[0]["step_s"] * 1e3,
        "max_ms": timed[-1]["step_s"] * 1e3,
        "tokens_per_s_per_gpu": middle["tokens_per_s_per_gpu"],
        "tflops": middle["tflops_per_gpu"],
        "mfu": middle["mfu"],
        "memory_gib": rows[-1]["memory_gib"],
        "losses": [r["loss"] for r in rows],
        "wall_s": wall,
        "overrides": overrides,
    }


def smoothed(losses: list[float], width: int = 10) -> list[float]:
    return [sum(losses[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(losses))]


def compare(rows: list[dict[str, Any]]) -> None:
    """The largest difference of each loss curve from the first layout's, step by step and over a moving mean of 10
    steps."""
    base = rows[0]["losses"]
    for row in rows:
        row["worst_step"] = max(abs(a - b) / b for a, b in zip(row["losses"], base))
        row["worst_mean"] = max(abs(a - b) / b for a, b in zip(smoothed(row["losses"]), smoothed(base)))


def table(rows: list[dict[str, Any]], facts: str, command: str) -> str:
    lines = [
        f"{facts}",
        "",
        f"Command: `{command}`",
        "",
        "| layout | GPUs | step ms (min-max) | tok/s/GPU | TFLOP/s/GPU | MFU | peak GiB | final loss | largest "
        "loss difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        if "error" in r:
            lines.append(f"| {r['layout']} | {r['ranks']} | failed | | | | | | |")
            continue
        mfu = "n/a" if r["mfu"] is None else f"{100 * r['mfu']:.1f}%"
        lines.append(
            f"| {r['layout']} | {r['ranks']} | {r['step_ms']:.1f} ({r['min_ms']:.1f}-{r['max_ms']:.1f}) | "
            f"{r['tokens_per_s_per_gpu']:,.0f} "
            f"| {r['tflops']:.1f} | {mfu} | {r['memory_gib']:.2f} | {r['losses'][-1]:.4f} | "
            f"{100 * r['worst_step']:.3f}% |"
        )
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for r in rows:
        axes.plot(r["losses"], label=r["layout"], linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/bench-layouts"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument(
        "--only",
        nargs="*",
        choices=list(LAYOUTS),
        default=list(LAYOUTS),
        help="the first one is what the others are compared with",
    )
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    options.work.mkdir(parents=True, exist_ok=True)
    config = write_config(options.work, options.steps, gpus > 0)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name in options.only:
        ranks, overrides = LAYOUTS[name]
        if gpus and ranks > gpus:
            continue
        rows.append(run_layout(config, options.work, name, ranks, overrides))
        print({k: v for k, v in rows[-1].items() if k != "losses"}, flush=True)
        options.out.with_suffix(".json").write_text(json.dumps(rows), encoding="utf-8")
    good = [r for r in rows if "losses" in r]
    compare(good)
    device = torch.cuda.get_device_name(0) if gpus else "CPU"
    facts = (
        f"{time.strftime('%Y-%m-%d')}, {gpus} x {device}, torch {torch.__version__}, commit {options.commit}, "
        f"{options.steps} steps"
    )
    text = table(rows, facts, " ".join(["python", *sys.argv]))
    options.out.with_suffix(".md").write_text(text, encoding="utf-8")
    draw(good, options.out.with_suffix(".svg"))
    print(text)


if __name__ == "__main__":
    main()

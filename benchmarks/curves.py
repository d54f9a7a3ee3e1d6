"""bf16 against fp32 on real text: the same seed, data and config, trained by `phalanx train` in both; how far apart
are the curves?

python benchmarks/curves.py --out benchmarks/results/curves [--steps 500]

The text is source code that every machine with Phalanx has: the packages installed beside it (or --text PATH ...).
Writes OUT.json (both curves, config, the gap) and OUT.svg. On a GPU a Llama of 6 layers of 640 with 55,296 ids,
100.6 M parameters, 65,536 tokens a step: few layers and many ids, because fp32 without TF32 runs at 50 to 60 TFLOP/s
on an H200 and 500 steps shall take five minutes. Without a GPU: a tiny one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from phalanx.text.prepare import demo_data

GPU_MODEL = {
    "hidden_size": 640,
    "intermediate_size": 1728,
    "num_hidden_layers": 6,
    "num_attention_heads": 10,
    "vocab_size": 55296,
}
CPU_MODEL = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 1024,
}
GPU_TRAIN = {"global_batch": 128, "micro_batch": 32, "seq_length": 512, "device": "cuda"}
CPU_TRAIN = {"global_batch": 8, "micro_batch": 4, "seq_length": 64, "device": "cpu"}
LAST = 50  # steps over which the final loss is averaged, and the width of the drawn mean


def package_sources(max_bytes: int) -> list[Path]:
    """Python files of the installed packages, in an order that has nothing to do with their names, `max_bytes` at
    most."""
    root = Path(sysconfig.get_paths()["purelib"])
    named = [
        (hashlib.sha256(f.relative_to(root).as_posix().encode()).digest(), f) for f in root.rglob("*.py") if f.is_file()
    ]
    chosen, total = [], 0
    for _, file in sorted(named):
        total += file.stat().st_size
        if total > max_bytes:
            break
        chosen.append(file)
    return chosen


def write_config(folder: Path, options: argparse.Namespace, gpu: bool, **widths: int) -> Path:
    size = options.megabytes * 10**6
    model, train = (GPU_MODEL, GPU_TRAIN) if gpu else (CPU_MODEL, CPU_TRAIN)
    files = options.text or package_sources(size)
    prefix, tokenizer = demo_data(folder / "data", files, vocab_size=model["vocab_size"])
    values = {
        "model": {"family": "llama", **model, **widths},
        "train": {**train, "steps": options.steps, "seed": options.seed},
        "optim": {
            "lr": options.lr,
            "min_lr": options.lr / 10,
            "warmup_steps": options.warmup or max(1, options.steps // 10),
        },
        "data": {"paths": [str(prefix)], "split": "1,0,0", "tokenizer": str(tokenizer)},
        "log": {"interval": 50, "report": False},
    }
    path = folder / "curves.yaml"
    path.write_text(json.dumps(values), encoding="utf-8")  # JSON is YAML
    return path


def add_rate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, help="steps; default: a tenth of all")


def trained(
    config: Path,
    folder: Path,
    precision: str,
    limit_s: float,
    name: str = "",
    more: Sequence[str] = (),
    gpu: int | None = None,
) -> dict[str, Any]:
    """Losses by step of one run, and what it took. What a killed run has written counts too. name: of its folder;
    more: overrides;
    gpu: the only one that the run sees."""
    run = folder / (name or precision)
    shutil.rmtree(run, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "phalanx",
        "train",
        str(config),
        f"dir={run}",
        f"train.precision={precision}",
        *more,
    ]
    began, code, env = time.perf_counter(), None, {**os.environ}
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = str(gpu)
    try:
        code = subprocess.run(command, timeout=limit_s, env=env).returncode
    except subprocess.TimeoutExpired:
        pass
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [r for r in rows if "loss" in r]
    middle = sorted(r["step_s"] for r in rows)[len(rows) // 2]
    return {
        "name": name or precision,
        "precision": precision,
        "exit_code": code,
        "wall_s": time.perf_counter() - began,
        "step_ms": 1e3 * middle,
        "tflops": rows[-1]["tflops_per_gpu"],
        "losses": [r["loss"] for r in rows],
        "chosen": chosen(run),
    }


def chosen(run: Path) -> str:
    """The line in which the run said which kernels it took."""
    lines = (run / "log.txt").read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if "CUDA graphs" in line), "")


def smoothed(losses: list[float]) -> list[float]:
    """The mean over the last steps, at each step."""
    return [sum(losses[max(0, i - LAST + 1) : i + 1]) / min(i + 1, LAST) for i in range(len(losses))]


def gaps(low: list[float], high: list[float]) -> dict[str, float]:
    """How far the low-precision curve is from the other, relative: of the smoothed loss at the last step that both
    have, and at the worst step."""
    steps = min(len(low), len(high))
    low, high = smoothed(low[:steps]), smoothed(high[:steps])
    apart = [(a - b) / b for a, b in zip(low, high)]
    return {
        "steps": steps,
        "final": apart[-1],
        "worst": max(apart, key=abs),
        "final_low": low[-1],
        "final_high": high[-1],
    }


def draw(runs: list[dict[str, Any]], gap: dict[str, float], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for r in runs:
        [line] = upper.plot(smoothed(r["losses"]), label=f"{r['precision']}, mean of {LAST} steps", linewidth=1.2)
        upper.plot(r["losses"], color=line.get_color(), alpha=0.25, linewidth=0.6)
    upper.set_title(f"{title}; final gap {100 * gap['final']:+.3f} %", fontsize=9)
    upper.set_ylabel("loss")
    upper.legend(frameon=False)
    low, high = (smoothed(r["losses"][: int(gap["steps"])]) for r in runs)
    lower.plot([100 * (a - b) / b for a, b in zip(low, high)], linewidth=1)
    lower.axhline(0, color="black", linewidth=0.5)
    lower.set_ylabel("gap, %")
    lower.set_xlabel("step")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/curves"))
    parser.add_argument("--text", nargs="*", help="files or folders; default: the installed packages' sources")
    parser.add_argument("--megabytes", type=int, default=160, help="most of those sources that are read")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1234)
    add_rate(parser)
    parser.add_argument("--limit", type=float, default=400, help="seconds that one run may take")
    parser.add_argument("--precisions", nargs=2, default=["bf16", "fp32"], help="the second one is the truth")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    config = write_config(options.work, options, gpu)
    text = json.loads((options.work / "data" / "text.json").read_text(encoding="utf-8"))
    text = {key: text[key] for key in ("files", "text_bytes", "documents", "tokens", "vocab_size", "inputs_hash")}
    print(f"text ready in {time.perf_counter() - began:.0f} s: {text}", flush=True)
    runs = [trained(config, options.work, precision, options.limit) for precision in options.precisions]
    gap = gaps(runs[0]["losses"], runs[1]["losses"])
    device = torch.cuda.get_device_name(0) if gpu else "CPU"
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "torch": torch.__version__,
        "commit": options.commit,
        "fp32_matmul": torch.get_float32_matmul_precision(),
        "command": " ".join(["python", *sys.argv]),
        "config": json.loads(config.read_text(encoding="utf-8").replace(f"{options.work}/", "")),
        "text": text,
    }
    options.out.with_suffix(".json").write_text(
        json.dumps({**facts, "gap": gap, "runs": runs}, indent=1), encoding="utf-8"
    )
    title = " against ".join(options.precisions) + f", {device}"
    draw(runs, gap, title, options.out.with_suffix(".svg"))
    for r in runs:
        print(
            f"{r['precision']}: {len(r['losses'])} steps, {r['step_ms']:.1f} ms a step, {r['tflops']:.1f} TFLOP/s, "
            f"{r['wall_s']:.0f} s"
        )
        print(f"  {r['chosen']}")
    tf32 = "without TF32" if facts["fp32_matmul"] == "highest" else f"matmul precision {facts['fp32_matmul']}"
    print(
        f"fp32 {tf32}; final loss (mean of {LAST}) {gap['final_low']:.4f} and {gap['final_high']:.4f}: gap "
        f"{100 * gap['final']:+.3f} %, "
        f"worst {100 * gap['worst']:+.3f} %"
    )


if __name__ == "__main__":
    main()

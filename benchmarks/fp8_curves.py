"""Does low precision hold the loss? One run in bf16 and one per recipe of train.fp8, same data, same seed; their
gaps and shadow cosines.

python benchmarks/fp8_curves.py --out FILE [--recipes tensorwise delayed "nvfp4, end_layers: 1" ...] [--steps 500]
[--limit SECONDS] [--gpus 2]

What follows a recipe's name are further settings of train.fp8.

The data and the model are those of benchmarks/curves.py (real text; on a GPU above 100M parameters and 64K tokens a
batch). Every run with a recipe compares its gradients with those in bf16 at its first, middle and last step
(train.fp8.shadow_interval). Writes FILE.json and FILE.svg, and rewrites both after each run, so that a session which
ends early keeps what it has. With --gpus N as many runs go side by side.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from curves import LAST, add_rate, gaps, smoothed, trained, write_config  # type: ignore[import-not-found]

GPU_WIDTHS = {"intermediate_size": 1792}  # of 128, as blockwise wants; 101.3 M parameters
CPU_WIDTHS = {"hidden_size": 128, "intermediate_size": 256}
AGAIN = (
    "bf16-again"  # bf16 whose norms add up in another order: how far apart two runs are that differ in rounding alone
)
RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4")


def run_recipe(config: Path, folder: Path, recipe: str, steps: int, limit_s: float, gpu: int | None) -> dict[str, Any]:
    """A run of one recipe; bf16 is the truth."""
    if recipe == AGAIN:
        more = ["train.plain_ops=[norm]"]
    else:
        more = [] if recipe == "bf16" else [f"train.fp8={{shadow_interval: {max(1, steps // 2)}, recipe: {recipe}}}"]
    return trained(config, folder, "bf16", limit_s, name=folder_of(recipe), more=more, gpu=gpu) | {"name": recipe}


def folder_of(recipe: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in recipe)


def shadows(run: Path) -> dict[int, dict[str, float]]:
    """By step, the least and the mean cosine over linears, and whose the least is."""
    found = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "fp8_shadow" in row:
            cosines = {name: cosine for name, (cosine, _) in row["fp8_shadow"].items()}
            least = min(cosines, key=lambda name: cosines[name])
            found[row["step"]] = {"least": cosines[least], "whose": least, "mean": sum(cosines.values()) / len(cosines)}
    return found


def draw(runs: list[dict[str, Any]], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    truth = smoothed(runs[0]["losses"])
    upper.plot(truth, label=f"bf16, mean of {LAST} steps", color="black", linewidth=1.2)
    for r in (r for r in runs[1:] if r["losses"]):
        curve = smoothed(r["losses"])
        [line] = upper.plot(curve, label=f"{r['name']}, final gap {100 * r['gap']['final']:+.3f} %", linewidth=1)
        lower.plot([100 * (a - b) / b for a, b in zip(curve, truth)], color=line.get_color(), linewidth=1)
    upper.set_title(title, fontsize=9)
    upper.set_ylabel("loss")
    upper.legend(frameon=False)
    lower.axhline(0, color="black", linewidth=0.5)
    lower.set_ylabel("gap to bf16, %")
    lower.set_ylim(-2.5, 2.5)
    lower.set_xlabel("step")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/fp8-curves"))
    parser.add_argument("--text", nargs="*", help="files or folders; default: the installed packages' sources")
    parser.add_argument("--megabytes", type=int, default=160)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1234)
    add_rate(parser)
    parser.add_argument("--limit", type=float, default=300, help="seconds that one run may take")
    parser.add_argument("--recipes", nargs="*", default=[AGAIN, *RECIPES])
    parser.add_argument("--gpus", type=int, default=1, help="runs at once, each on a GPU of its own")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    config = write_config(options.work, options, gpu, **(GPU_WIDTHS if gpu else CPU_WIDTHS))
    text = json.loads((options.work / "data" / "text.json").read_text(encoding="utf-8"))
    device = torch.cuda.get_device_name(0) if gpu else "CPU"
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "torch": torch.__version__,
        "commit": options.commit,
        "config": json.loads(
            config.read_text(encoding="utf-8").replace(f"{options.work}/", "")
        ),  # no paths of this machine
        "text": {key: text[key] for key in ("files", "text_bytes", "documents", "tokens", "vocab_size", "inputs_hash")},
    }
    runs: list[dict[str, Any]] = []
    free: Queue[int] = Queue()
    for index in range(options.gpus):
        free.put(index)

    def run(recipe: str) -> dict[str, Any]:
        index = free.get()
        try:
            return run_recipe(
                config, options.work, recipe, options.steps, options.limit, index if options.gpus > 1 else None
            )
        except (OSError, IndexError) as error:  # it ended before its first step; the others go on
            return {"name": recipe, "exit_code": f"no step was done: {error}", "step_ms": 0.0, "losses": []}
        finally:
            free.put(index)

    with ThreadPoolExecutor(options.gpus) as pool:
        for recipe, r in zip(("bf16", *options.recipes), pool.map(run, ("bf16", *options.recipes))):
            if runs and r["losses"]:
                r |= {"gap": gaps(r["losses"], runs[0]["losses"]), "shadow": shadows(options.work / folder_of(recipe))}
            runs.append(r)
            options.out.with_suffix(".json").write_text(json.dumps({**facts, "runs": runs}, indent=1), encoding="utf-8")
            draw(runs, f"recipes of train.fp8 against bf16, {device}", options.out.with_suffix(".svg"))
            print(*told(r), sep="\n", flush=True)


def told(r: dict[str, Any]) -> list[str]:
    gap = r.get("gap")
    last = [math.nan, *smoothed(r["losses"])][-1]
    said = f"final gap {100 * gap['final']:+.3f} %, worst {100 * gap['worst']:+.3f} %" if gap else f"loss {last:.4f}"
    width = max(11, len(r["name"]))
    lines = [
        f"{r['name']:{width}} {len(r['losses'])} steps, {r['step_ms']:.1f} ms a step, exit {r['exit_code']}: {said}"
    ]
    for step, s in r.get("shadow", {}).items():
        lines.append(
            f"{'':{width}} shadow at step {step}: least cosine {s['least']:.5f} ({s['whose']}), mean {s['mean']:.5f}"
        )
    return lines


if __name__ == "__main__":
    main()

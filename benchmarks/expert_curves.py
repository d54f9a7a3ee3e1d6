"""A small mixture of experts on real text: is the loss the same wherever the experts are, and is the load even by
each method?

python benchmarks/expert_curves.py --out benchmarks/results/experts [--steps 200] [--ranks 2] [--lr 1e-3] [--only ep1
all-gather ...]

Trains through `phalanx train` in bf16: alone (ep1), alone with norms that add up in another order (how far apart are
two runs that differ in nothing but rounding?), with the experts spread over all ranks (ep N, both exchanges), and
then, spread, with each way of balancing the load. The text is that of curves.py: source code of the installed
packages. Writes OUT.json and OUT.svg.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from curves import LAST, package_sources, smoothed

from phalanx.text.prepare import demo_data

GPU_MODEL = {
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "intermediate_size": 512,
    "vocab_size": 16384,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
}
CPU_MODEL = {
    **GPU_MODEL,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 512,
}
LATENT = {
    "family": "deepseek_v3",
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
NO_LOSS = "model.router_aux_loss_coef=0"


def variants(ranks: int) -> dict[str, tuple[int, list[str]]]:
    """name -> (ranks, overrides)."""
    spread = f"layout.ep={ranks}"
    return {
        "ep1, loss by micro-batch": (1, []),
        "ep1, sums in another order": (1, ["train.plain_ops=[norm]"]),
        f"ep{ranks}, all-gather": (ranks, [spread, "layout.dispatch=allgather"]),
        f"ep{ranks}, all-to-all": (ranks, [spread, "layout.dispatch=alltoall"]),
        f"ep{ranks}, loss by sequence": (ranks, [spread, "model.router_aux_loss_scope=sequence"]),
        f"ep{ranks}, loss by global batch": (ranks, [spread, "model.router_aux_loss_scope=global_batch"]),
        f"ep{ranks}, no balancing": (ranks, [spread, NO_LOSS]),
    }


def latent_model(model: dict[str, Any]) -> dict[str, Any]:
    """A DeepSeek-V3 of the same size: balanced by the bias of choice alone."""
    kept = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "num_experts_per_tok")
    return {
        **{k: model[k] for k in kept},
        **LATENT,
        "intermediate_size": 4 * model["hidden_size"],
        "moe_intermediate_size": model["intermediate_size"],
        "router_aux_loss_coef": 0.0,
    }


def trained(config: Path, folder: Path, name: str, ranks: int, overrides: list[str], limit_s: float) -> dict[str, Any]:
    run = folder / "".join(c if c.isalnum() else "-" for c in name)
    shutil.rmtree(run, ignore_errors=True)
    command = [sys.executable, "-m", "phalanx", "train", str(config), "--ranks", str(ranks), f"dir={run}", *overrides]
    code = subprocess.run(command, timeout=limit_s, stdout=subprocess.DEVNULL).returncode
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [r for r in rows if "loss" in r]
    fullest = [max(v for v in r["experts"]["load_max"] if v is not None) for r in rows]
    middle = sorted(r["tokens_per_s_per_gpu"] for r in rows)[len(rows) // 2]
    return {
        "name": name,
        "ranks": ranks,
        "overrides": overrides,
        "exit_code": code,
        "losses": [r["loss"] for r in rows],
        "fullest": fullest,
        "tokens_per_s_per_gpu": middle,
    }


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    for r in runs:
        upper.plot(smoothed(r["losses"]), label=r["name"], linewidth=1)
        lower.plot(smoothed(r["fullest"]), linewidth=1)
    upper.set_ylabel(f"loss, mean of {LAST} steps")
    upper.legend(frameon=False, fontsize=8)
    lower.set_ylabel("fullest expert / mean, worst layer")
    lower.set_xlabel("step")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/experts"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--limit", type=float, default=120, help="seconds that one run may take")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; of more than one, no speed means anything")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--only", nargs="*", default=[""], help="runs whose names contain one of these; the first is run in any case"
    )
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    model = GPU_MODEL if gpu else CPU_MODEL
    prefix, tokenizer = demo_data(
        options.work / "data", package_sources(options.megabytes * 10**6), vocab_size=model["vocab_size"]
    )
    train = (
        {"global_batch": 64, "micro_batch": 16, "seq_length": 512}
        if gpu
        else {"global_batch": 8, "micro_batch": 2, "seq_length": 64}
    )
    shared = {
        "train": {**train, "steps": options.steps, "precision": "bf16", "device": "cuda" if gpu else "cpu"},
        "optim": {"lr": options.lr, "min_lr": options.lr / 10, "warmup_steps": options.steps // 10},
        "data": {"paths": [str(prefix)], "split": "1,0,0", "tokenizer": str(tokenizer)},
        "log": {"interval": 50, "report": False},
    }
    configs = {}
    for name, values in (
        ("mixtral", {"family": "mixtral", "router_aux_loss_coef": 0.01, **model}),
        ("deepseek_v3", latent_model(model)),
    ):
        configs[name] = options.work / f"{name}.yaml"
        configs[name].write_text(json.dumps({"model": values, **shared}), encoding="utf-8")
    bias = (options.ranks, [f"layout.ep={options.ranks}", "model.router_bias_update_rate=0.01"])
    wanted = [(configs["mixtral"], name, *how) for name, how in variants(options.ranks).items()]
    wanted.append((configs["deepseek_v3"], f"DeepSeek-V3, ep{options.ranks}, bias alone", *bias))
    wanted = [w for w in wanted if w is wanted[0] or any(part in w[1] for part in options.only)]
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(0) if gpu else "CPU",
        "torch": torch.__version__,
        "commit": options.commit,
        "at_once": options.jobs,
        "lr": options.lr,
        "model": model,
        **shared["train"],
    }
    runs: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for run in pool.map(lambda w: trained(w[0], options.work, *w[1:], options.limit), wanted):
            runs.append(run)  # written after each: who is cut off keeps what there is
            options.out.with_suffix(".json").write_text(json.dumps({**facts, "runs": runs}, indent=1), encoding="utf-8")
            print(line(run, runs[0]), flush=True)
    draw(runs, options.out.with_suffix(".svg"))


def line(run: dict[str, Any], first: dict[str, Any]) -> str:
    alone, last, fullest = (smoothed(values)[-1] for values in (first["losses"], run["losses"], run["fullest"]))
    against = f"final loss {last:.4f} ({100 * (last / alone - 1):+.3f} % of ep1)"
    return (
        f"{run['name']:36s} {against}, fullest expert {fullest:.2f} x mean, {run['tokens_per_s_per_gpu']:,.0f} "
        "tokens/s/GPU"
    )


if __name__ == "__main__":
    main()

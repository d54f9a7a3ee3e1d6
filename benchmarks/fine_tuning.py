"""Fine-tuning Llama-3-8B on one GPU, ours and the usual tools in the same call: LoRA and QLoRA of rank 16 on all
linears, all weights, and QLoRA of the 70B. Random weights, made-up tokens, one sequence a step.

python benchmarks/fine_tuning.py [--rows lora-8192,peer-lora-8192] [--seconds 500] [--out rows.jsonl]
python benchmarks/fine_tuning.py --small        models of two layers, on a CPU too: whether it runs

Peers (benchmarks/peers/tune.py) need peft, liger-kernel and bitsandbytes, for all weights torchtune; a row whose
packages are missing says so.
Each row is a process of its own, those with tp2 or dp2 two on two GPUs (tokens/s are those of one; dp2 has a sequence
on each). Rows that --seconds leave no time for are named.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
QLORA_8B, QLORA_70B = HERE.parent / "recipes/llama3_8b_qlora.py", HERE.parent / "recipes/llama3_70b_qlora.py"
FULL_8B = HERE.parent / "recipes/llama3_8b_full_one_gpu.py"
ONE = ("train.global_batch=1", "train.micro_batch=1", "model.rope_scaling=null", "model.max_position_embeddings=8192")
BF16, KEEP, AGAIN = "lora.base=bf16", "train.recompute=none", "train.recompute=full"
OURS: dict[str, tuple[Path, tuple[str, ...]]] = {
    "lora-8192": (QLORA_8B, (*ONE, BF16, KEEP, "train.seq_length=8192")),
    "qlora-8192": (QLORA_8B, (*ONE, KEEP, "train.seq_length=8192")),
    "lora-fp8-8192": (QLORA_8B, (*ONE, BF16, KEEP, "train.seq_length=8192", "train.fp8.recipe=delayed")),
    "qlora-2048": (QLORA_8B, (*ONE, AGAIN, "train.seq_length=2048")),
    "lora-2048": (QLORA_8B, (*ONE, BF16, AGAIN, "train.seq_length=2048")),
    "qlora-70b-8192": (QLORA_70B, ("train.global_batch=1", "train.seq_length=8192")),
    "all-8192": (FULL_8B, ("train.seq_length=8192",)),
    "lora-8192-tp2": (QLORA_8B, (*ONE, BF16, KEEP, "train.seq_length=8192", "layout.tp=2")),
    "lora-8192-tp2-nccl": (
        QLORA_8B,
        (*ONE, BF16, KEEP, "train.seq_length=8192", "layout.tp=2", "layout.tp_overlap=off"),
    ),
    "lora-8192-dp2": (QLORA_8B, (*ONE, BF16, KEEP, "train.seq_length=8192", "train.global_batch=2")),
}
ON_TWO = tuple(row for row in OURS if "-tp2" in row or "-dp2" in row)
PEERS: dict[str, tuple[str, ...]] = {
    "peer-lora-8192": ("lora-8192", "--keep"),
    "peer-qlora-8192": ("qlora-8192", "--keep"),
    "peer-qlora-2048": ("qlora-2048",),
    "peer-lora-2048": ("lora-2048",),
    "peer-lora-8192-recomputed": ("lora-8192",),
    "peer-all-8192": ("all-8192",),
    "peer-all-8192-compiled": ("all-8192", "--compile"),
}
SMALL = ("model.hidden_size=64", "model.intermediate_size=128", "model.num_hidden_layers=2", "model.vocab_size=512")
SMALL = (*SMALL, "model.num_attention_heads=4", "model.num_key_value_heads=2", "train.seq_length=64")


def ours(row: str, small: bool, seconds: float, steps: tuple[int, int]) -> dict[str, Any]:
    config, words = OURS[row]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "step.json"
        many = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if row in ON_TWO else []
        command = [sys.executable, *many, "-m", "phalanx", "bench", "step", str(config), *words]
        command += SMALL if small else ()
        command += ["--warmup", str(steps[0]), "--steps", str(steps[1]), "--json", str(out)]
        said = call(command, seconds)
        if said or not out.exists():
            return {"row": row, "by": "phalanx", "failed": said or "no figures"}
        found = json.loads(out.read_text(encoding="utf-8"))
    peak = found["peak_bytes"]
    return {
        "row": row,
        "by": "phalanx",
        "tokens_per_s": found["tokens_per_s_per_gpu"],
        "step_ms": 1e3 * found["step"]["median"],
        "peak_gib": None if peak is None else peak / 2**30,
        "budget": found["budget"],
        "device": found["device"],
        "overrides": " ".join(words),
    }


def peer(row: str, small: bool, seconds: float, steps: tuple[int, int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        command = [sys.executable, str(HERE / "peers/tune.py"), *PEERS[row], *(["--small"] if small else [])]
        command += ["--warmup", str(steps[0]), "--steps", str(steps[1]), "--out", str(out)]
        said = call(command, seconds)
        if said or not out.exists():
            return {"row": row, "by": "peer", "failed": said or "no figures"}
        found = json.loads(out.read_text(encoding="utf-8"))
    return {"by": found.pop("peer"), **found, "row": row}


def call(command: Sequence[str], seconds: float) -> str:
    """What went wrong; "": nothing did."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"not done after {seconds:.0f} s"
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return "" if done.returncode == 0 else " | ".join(lines[-4:])[-600:]


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--rows", default=",".join((*OURS, *PEERS)))
    reader.add_argument("--seconds", type=float, default=1800.0, help="for all rows together")
    reader.add_argument("--warmup", type=int, default=3)
    reader.add_argument("--steps", type=int, default=8)
    reader.add_argument("--small", action="store_true")
    reader.add_argument("--out", help="append the results to this file, a line of JSON each")
    asked = reader.parse_args()
    until, steps, found = time.monotonic() + asked.seconds, (asked.warmup, asked.steps), list[dict[str, Any]]()
    for row in asked.rows.split(","):
        left = until - time.monotonic()
        if left < 10:
            found.append({"row": row, "by": "", "failed": "no time left"})
            continue
        found.append((ours if row in OURS else peer)(row, asked.small, left, steps))
        print(json.dumps({k: v for k, v in found[-1].items() if k != "budget"}), flush=True)
        if asked.out:
            with open(asked.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(found[-1]) + "\n")
    print(f"{'row':26} {'tokens/s':>9} {'ms':>9} {'peak GiB':>9}")
    for each in found:
        if "failed" in each:
            print(f"{each['row']:26} {each['failed'][:60]}")
        else:
            peak = "n/a" if each["peak_gib"] is None else f"{each['peak_gib']:.2f}"
            print(f"{each['row']:26} {each['tokens_per_s']:9,.0f} {each['step_ms']:9.1f} {peak:>9}")


if __name__ == "__main__":
    main()

"""State-space models, hybrids and Muon on one to four GPUs, beside what people use for them, in one call; a table last.

python benchmarks/state_space.py [--rows scan,conv,layers] [--seconds 580] [--out rows.jsonl]
python benchmarks/state_space.py --small       small models on a CPU, in a minute: whether it runs

scan, scan1   Mamba-2's scan, 32,768 tokens, 80 heads x 64, state 128, 8 groups or 1; beside it mamba-ssm
delta         the gated delta rule, 32,768 tokens, 16 key and 32 value heads x 128; beside it flash-linear-attention
conv          the convolution with its activation, 5,376 channels; beside it flash-linear-attention
norm          the gated norm, 8,192 features in 8 groups; beside it mamba-ssm
step          one token of 256 sequences: convolution and scan of all layers of Nemotron-H-8B, states in place; both
decode        the same of the whole model, as generation runs it
muon-ops      orthogonalisation of a layer's matrices, in each form; beside it torch.optim.Muon's
w1            W1 with AdamW (benchmarks/configs/w1.yaml)
layers        the first 8 layers of Nemotron-H-8B, 8,192 tokens; peer-layers: the same in PyTorch with peers' kernels
long1, long2  the same 8 layers, one sequence of 262,144 tokens, recomputed whole, on one GPU and with cp on two
muon          W1 with Muon; muon-direct: without its Gram form; muon-full: without halves of symmetric products
muon-8b       Llama-3-8B with Muon on two GPUs, sharding 1, 64 sequences of 2,048; adamw-8b: with AdamW

Peers come as archives in .whl/, or the folder that PEERS names (benchmarks/peers/README.md). Each row is a process of
its own, on GPUs of its own; rows run beside each other if there are several GPUs. First, kernels of ours and of peers
are compiled by processes beside each other, which time nothing. Differences are the largest relative ones of outputs and
gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
W1, LAYERS, W2 = (HERE / "configs" / f"{name}.yaml" for name in ("w1", "nemotron8", "w2"))
OPS = ("scan", "scan1", "delta", "conv", "norm", "step", "muon-ops")
LONG = 262144
MUON = ("optim.name=muon",)
EIGHT_B = ("train.seq_length=2048", "train.global_batch=64", "train.micro_batch=4", "layout.sharding=1")
SMALL_LAYERS = ["linear_attention", "mlp", "full_attention"]
SMALL = {  # overrides that make a model small
    LAYERS: (
        "model.vocab_size=512",
        "model.hidden_size=64",
        "model.intermediate_size=128",
        "model.num_hidden_layers=3",
        f"model.layers_block_type=[{','.join(SMALL_LAYERS)}]",
        "model.num_attention_heads=4",
        "model.num_key_value_heads=2",
        "model.head_dim=16",
        "model.mamba_num_heads=4",
        "model.mamba_head_dim=16",
        "model.ssm_state_size=16",
        "model.n_groups=2",
        "train.precision=fp32",
        "train.seq_length=128",
        "train.global_batch=2",
    ),
    W1: (
        "model.vocab_size=512",
        "model.hidden_size=64",
        "model.intermediate_size=128",
        "model.num_hidden_layers=2",
        "model.num_attention_heads=4",
        "model.num_key_value_heads=2",
        "train.precision=fp32",
        "train.seq_length=64",
        "train.global_batch=4",
        "train.micro_batch=1",
    ),
}
SMALL[W2] = SMALL[W1]


@dataclass(frozen=True)
class Row:
    """gpus: that it needs; compiles: its kernels are compiled before it is timed; steps: of warm-up, and timed."""

    name: str
    config: Path | None = None
    words: tuple[str, ...] = ()
    gpus: int = 1
    compiles: bool = False
    steps: tuple[int, int] = (4, 6)
    without: str = ""  # what Muon does without

    def command(self, asked: argparse.Namespace, out: Path) -> list[str]:
        python = [sys.executable]
        if self.config is None:
            script = {"peer-layers": "peers/state_space.py", "decode": "state_space_decode.py"}
            file = script.get(self.name, "state_space_ops.py")
            words = [self.name] if file == "state_space_ops.py" else ["--small"] if asked.small else []
            repeats = ["--repeats", "2"] if asked.small and file == "state_space_ops.py" else []
            return [*python, str(HERE / file), *words, *repeats, "--out", str(out)]
        warmup, steps = (1, 2) if asked.small else self.steps
        words = [*self.words, *(SMALL[self.config] if asked.small else ())]
        step = ["bench", "step", str(self.config), *words, "--ranks", str(self.gpus), "--json", str(out)]
        start = [str(HERE / "muon_without.py"), self.without] if self.without else ["-m", "phalanx"]
        return [*python, *start, *step, "--warmup", str(warmup), "--steps", str(steps)]


def rows_of(length: int) -> dict[str, Row]:
    """All of them, in the order in which they are begun: what takes two GPUs first."""
    long = (f"train.seq_length={length}", "train.global_batch=1", "train.recompute=full")
    found = [
        Row("muon-8b", W2, (*EIGHT_B, *MUON), gpus=2, steps=(2, 4)),
        Row("w1", W1),
        Row("layers", LAYERS),
        Row("adamw-8b", W2, EIGHT_B, gpus=2, steps=(2, 4)),
        Row("long1", LAYERS, long, steps=(1, 3)),
        Row("long2", LAYERS, (*long, "layout.cp=2"), gpus=2, steps=(1, 3)),
        Row("muon", W1, MUON),
        Row("peer-layers", compiles=True),
        *(Row(name, compiles=True) for name in OPS),
        Row("decode"),
        Row("muon-direct", W1, MUON, without="gram"),
        Row("muon-full", W1, (*MUON, "train.plain_ops=[symmetric]")),
    ]
    return {row.name: row for row in found}


# ---- processes


@dataclass
class Job:
    """A process, the GPUs that it has, and when it is to be stopped."""

    row: Row
    process: subprocess.Popen[bytes]
    gpus: list[int]
    out: Path
    log: Path
    until: float
    began: float = field(default_factory=time.monotonic)


def start(command: list[str], gpus: Sequence[int], log: Path) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join(path for path in (str(HERE.parent), os.environ.get("PYTHONPATH")) if path)
    env = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=env, start_new_session=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """It, and the ranks that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def compile_first(rows: Sequence[Row], gpus: Sequence[int], folder: Path, until: float) -> None:
    """Fill Triton's cache: kernels are compiled for hundreds of tunings, each process one at a time."""
    names = [row.name for row in rows if row.compiles and row.name in OPS and row.name != "muon-ops"]
    jobs = []
    for number, name in enumerate(names):
        command = [sys.executable, str(HERE / "state_space_ops.py"), name, "--only-compile"]
        log = folder / f"compile-{name}.log"
        jobs.append((name, start(command, [gpus[number % len(gpus)]], log), log))
    began = time.monotonic()
    for name, process, log in jobs:
        try:
            code = process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            stop(process)
            code = -1
        if code:
            print(f"compiling {name} ended with {code}: {last_lines(log)}", flush=True)
    print(f"kernels compiled in {time.monotonic() - began:.0f} s", flush=True)


def run_all(rows: list[Row], asked: argparse.Namespace, gpus: list[int], folder: Path) -> list[dict[str, Any]]:
    """The rows' results, each as soon as it has them to the file that was asked for."""
    until, found = time.monotonic() + asked.seconds, list[dict[str, Any]]()
    waiting, jobs, free = list(rows), list[Job](), list(gpus)

    def keep(made: list[dict[str, Any]]) -> None:
        found.extend(made)
        for each in made:
            print(json.dumps({k: v for k, v in each.items() if k != "budget"}), flush=True)
            if asked.out:
                with open(asked.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(each) + "\n")

    if gpus and not asked.small:
        compile_first(rows, gpus, folder, time.monotonic() + min(240.0, asked.seconds / 2))
    while waiting or jobs:
        for row in [row for row in waiting if row.gpus > len(gpus) and gpus]:
            waiting.remove(row)
            keep([{"row": row.name, "by": "phalanx", "failed": f"it needs {row.gpus} GPUs, here are {len(gpus)}"}])
        for row in list(waiting):
            if until - time.monotonic() < 15:
                waiting.remove(row)
                keep([{"row": row.name, "by": "", "failed": "no time left"}])
            elif len(free) >= row.gpus if gpus else not jobs:
                own, free = free[: row.gpus], free[row.gpus :]
                out, log = folder / f"{row.name}.json", folder / f"{row.name}.log"
                process = start(row.command(asked, out), own, log)
                jobs.append(Job(row, process, own, out, log, min(until, time.monotonic() + asked.each)))
                waiting.remove(row)
        for job in list(jobs):
            late = time.monotonic() > job.until
            if late:
                stop(job.process)
            if late or job.process.poll() is not None:
                jobs.remove(job)
                free += job.gpus
                keep(results(job, late))
        time.sleep(0.2)
    return found


def results(job: Job, late: bool) -> list[dict[str, Any]]:
    """What a process wrote, and that it failed if it did."""
    row, took = job.row, time.monotonic() - job.began
    text = job.out.read_text(encoding="utf-8") if job.out.exists() else ""
    if row.config is None:
        made = [{"row": row.name, **json.loads(line), "took_s": took} for line in text.splitlines()]
    else:
        made = [{**of_step(row, json.loads(text)), "took_s": took}] if text else []
    if late or job.process.returncode or not made:
        why = f"stopped after {took:.0f} s" if late else last_lines(job.log)
        made.append({"row": row.name, "by": "", "failed": why, "took_s": took})
    return made


def last_lines(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-4:])[-500:] or "no output"


def of_step(row: Row, found: dict[str, Any]) -> dict[str, Any]:
    """A row from what `bench step --json` wrote."""
    budget, peak = found["budget"] or {}, found["peak_bytes"]
    exposed = {k.removesuffix("_s"): 1e3 * s for k, s in budget.items() if "(exposed)" in k}
    return {
        "row": row.name,
        "by": "phalanx",
        "device": found["device"],
        "step_ms": 1e3 * found["step"]["median"],
        "tokens_per_s": found["tokens_per_s_per_gpu"] * found["ranks"],
        "tflops": found["flops"] / 1e12,
        "peak_gib": None if peak is None else peak / 2**30,
        "optimizer_share": budget["optimizer_s"] / budget["step_s"] if budget else None,
        "exposed_ms": exposed,
        "loss": found["loss"],
        "budget": budget,
    }


# ---- tables


def table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)


def all_figures(found: list[dict[str, Any]]) -> str:
    """A line for each result: kernels, then steps."""
    kernels = [("row", "by", "forward ms", "with backward", "floor ms", "of floor", "difference")]
    steps = [("row", "by", "ms", "tokens/s", "TFLOP/s", "peak GiB", "optimizer", "exposed ms")]
    bad = []
    for each in found:
        if "failed" in each or "missing" in each:
            bad.append(f"{each['row']}: {'peer missing: ' if 'missing' in each else ''}{_why(each)}")
        elif "forward_ms" in each:
            both = f"{each['both_ms']:.3f}" if "both_ms" in each else "-"
            ours = f"{each['forward_ms']:.3f}", both, each["floor"], f"{100 * each['share']:.0f} %"
            kernels.append((each["row"], each["by"], *ours, f"{each.get('difference', 0.0):.1e}"))
        else:
            share = each.get("optimizer_share")
            cells = [f"{each['step_ms']:.1f}", f"{each['tokens_per_s']:,.0f}"]
            cells += [f"{each[k]:.1f}" if each.get(k) is not None else "-" for k in ("tflops", "peak_gib")]
            cells += ["-" if share is None else f"{100 * share:.1f} %"]
            exposed = ", ".join(f"{k.split()[1]} {ms:.1f}" for k, ms in each.get("exposed_ms", {}).items() if ms > 0.05)
            steps.append((each["row"], each["by"], *cells, exposed or "-"))
    return "\n\n".join(
        [*(table(rows) for rows in (kernels, steps) if len(rows) > 1), *(["\n".join(bad)] if bad else [])]
    )


def _why(each: dict[str, Any]) -> str:
    return str(each.get("failed") or each["missing"])[:300]


@dataclass(frozen=True)
class Figures:
    """Results by row: ours (the implementation that is chosen, not the reference) and those of peers."""

    found: list[dict[str, Any]]

    def ours(self, row: str) -> dict[str, Any] | None:
        own = [e for e in self._of(row) if e["by"].startswith("phalanx") and "reference" not in e["by"]]
        return own[0] if own else None

    def peer(self, row: str, key: str) -> float | None:
        """The least of the peers' times."""
        times = [e[key] for e in self._of(row) if not e["by"].startswith("phalanx") and key in e]
        return min(times, default=None)

    def _of(self, row: str) -> list[dict[str, Any]]:
        return [e for e in self.found if e["row"] == row and "failed" not in e and "missing" not in e]

    def faster(self, row: str, key: str) -> float | None:
        """Times faster than the best peer."""
        ours, theirs = self.ours(row), self.peer(row, key)
        return None if ours is None or theirs is None else theirs / ours[key]

    def value(self, row: str, key: str) -> float | None:
        ours = self.ours(row)
        return None if ours is None else ours.get(key)

    def ratio(self, above: tuple[str, str], below: tuple[str, str]) -> float | None:
        one, two = self.value(*above), self.value(*below)
        return None if not one or not two else one / two


def goals(f: Figures) -> list[tuple[str, float | None, str, str, Callable[[float], str]]]:
    """(row, figure, the least, the goal, verdict) of issue 24's table."""

    def at_least(least: float, goal: float) -> Callable[[float], str]:
        return lambda x: "goal" if x >= goal else "least" if x >= least else "below"

    def at_most(least: float, goal: float) -> Callable[[float], str]:
        return lambda x: "goal" if x <= goal else "least" if x <= least else "above"

    theirs = next((e["tokens_per_s"] for e in f.found if e["row"] == "peer-layers" and "tokens_per_s" in e), None)
    own = f.value("layers", "tokens_per_s")
    exposed = f.ours("muon-8b")
    waited = None if exposed is None else sum(exposed["exposed_ms"].values())
    rows = [
        ("scan / mamba-ssm, forward and backward", f.faster("scan", "both_ms"), "1.00", "1.30", at_least(1, 1.3)),
        ("scan, 1 group / mamba-ssm", f.faster("scan1", "both_ms"), "1.00", "1.30", at_least(1, 1.3)),
        ("scan, of its floor", f.value("scan", "share"), "", "0.60", at_least(0, 0.6)),
        ("delta / fla, forward and backward", f.faster("delta", "both_ms"), "1.00", "1.20", at_least(1, 1.2)),
        ("conv1d / fla, forward and backward", f.faster("conv", "both_ms"), "1.00", "", at_least(1, 1)),
        ("conv1d, of copy bandwidth", f.value("conv", "share"), "", "0.80", at_least(0, 0.8)),
        ("one-token step / peers' kernels", f.faster("step", "forward_ms"), "1.30", "", at_least(1.3, 1.3)),
        ("one-token step, of bandwidth floor", f.value("step", "share"), "", "0.80", at_least(0, 0.8)),
        ("8 layers / peers' kernels", own / theirs if own and theirs else None, "1.00", "1.15", at_least(1, 1.15)),
        ("8 layers, of W1's TFLOP/s", f.ratio(("layers", "tflops"), ("w1", "tflops")), "", "0.85", at_least(0, 0.85)),
        (
            "long sequence, two GPUs / one",
            f.ratio(("long2", "tokens_per_s"), ("long1", "tokens_per_s")),
            "1.85",
            "1.95",
            at_least(1.85, 1.95),
        ),
        ("Muon on W1, share of the step", f.value("muon", "optimizer_share"), "0.12", "0.07", at_most(0.12, 0.07)),
        ("  without the Gram form", f.value("muon-direct", "optimizer_share"), "", "", lambda x: ""),
        ("  without symmetric halves", f.value("muon-full", "optimizer_share"), "", "", lambda x: ""),
        ("  AdamW instead", f.value("w1", "optimizer_share"), "", "", lambda x: ""),
        (
            "Muon on the 8B, share of the step",
            f.value("muon-8b", "optimizer_share"),
            "0.06",
            "0.04",
            at_most(0.06, 0.04),
        ),
        ("  AdamW instead", f.value("adamw-8b", "optimizer_share"), "", "", lambda x: ""),
        ("Muon on the 8B, exposed ms of all exchanges", waited, "", "0", lambda x: "goal" if x < 1 else ""),
    ]
    return [row for row in rows if row[1] is not None]


def verdicts(found: list[dict[str, Any]]) -> str:
    lines = [("row", "measured", "the least", "goal", "reached")]
    lines += [(what, f"{x:.3f}", least, goal, says(x)) for what, x, least, goal, says in goals(Figures(found))]
    return table(lines)


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--rows", help="of those above; default: all")
    reader.add_argument("--seconds", type=float, default=1800.0, help="for all rows together")
    reader.add_argument("--each", type=float, default=400.0, help="seconds for one row at most")
    reader.add_argument("--tokens", type=int, default=LONG, help="of long1 and long2")
    reader.add_argument("--small", action="store_true", help="small models, on a CPU too")
    reader.add_argument("--out", help="append the results to this file, a line of JSON each")
    asked = reader.parse_args()
    known = rows_of(128 if asked.small else asked.tokens)
    wanted = asked.rows.split(",") if asked.rows else list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        reader.error(f"no row {', '.join(unknown)}; there are {', '.join(known)}")
    rows = [row for name, row in known.items() if name in wanted]
    gpus = visible_gpus()
    with tempfile.TemporaryDirectory(prefix="state-space-") as folder:
        found = run_all(rows, asked, gpus, Path(folder))
    print(f"\n{all_figures(found)}\n\n{verdicts(found)}")


def visible_gpus() -> list[int]:
    """Numbers of the GPUs here; none: rows run on the CPU, one after another."""
    import torch  # takes seconds, and not for --help

    return list(range(torch.cuda.device_count()))


if __name__ == "__main__":
    main()

"""State-space models, hybrids and Muon on one to four GPUs, beside what people use for them, in one call; a table last.

python benchmarks/state_space.py [--rows scan,conv,layers] [--seconds 580] [--out rows.jsonl]
python benchmarks/state_space.py --small       small models on a CPU, in a minute: whether it runs

scan, scan1   Mamba-2's scan, 32,768 tokens, 80 heads x 64, state 128, 8 groups or 1; beside it mamba-ssm
delta         the gated delta rule, 32,768 tokens, 16 key and 32 value heads x 128; beside it flash-linear-attention
conv          the convolution with its activation, 5,376 channels; beside it flash-linear-attention
norm          the gated norm, 8,192 features in 8 groups; beside it mamba-ssm
step          one token of 256 sequences: convolution and scan of all layers of Nemotron-H-8B, states in place; both
decode        the same of the whole model, as generation runs it
muon-ops      orthogonalisation of a layer's matrices, in each form; beside it torch.optim.Muon's, and its whole step
w1            W1 with AdamW (benchmarks/configs/w1.yaml)
layers        the first 8 layers of Nemotron-H-8B, 8,192 tokens; peer-layers: the same in PyTorch with peers' kernels
long1, long2  the same 8 layers, one sequence of 131,072 tokens (--tokens), recomputed whole, on one GPU and with cp on
              two; long2x: 262,144 tokens on two, compared by FLOP (with one GPU of as many: benchmarks/holds/two.yaml)
muon          W1 with Muon; muon-direct: without its Gram form; muon-full: without halves of symmetric products;
              muon-clip: with QK-clip, whose scores are measured in forward
muon-8b       Llama-3-8B with Muon on two GPUs, sharding 1, 64 sequences of 2,048; adamw-8b: with AdamW; muon-8b-turn:
              with homes in turn instead of by cost; muon-8b-late: without exchanges in backward and between updates

Peers come as archives in .whl/, or the folder that PEERS names (benchmarks/peers/README.md). Each row is a process of
its own, on GPUs of its own; rows run beside each other if there are several GPUs. Kernels of ours and of peers are
compiled first, on one GPU, by processes beside each other, which time nothing. Differences are the largest relative
ones of outputs and gradients. "Optimizer" is what a step does after its backward: norm, clip, updates.
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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
W1, LAYERS, W2 = (HERE / "configs" / f"{name}.yaml" for name in ("w1", "nemotron8", "w2"))
OPS = ("scan", "scan1", "delta", "conv", "norm", "step", "muon-ops")
LONG = 131072
COMPILING_S = 240.0  # at most
MUON = ("optim.name=muon",)
EIGHT_B = ("train.seq_length=2048", "train.global_batch=64", "train.micro_batch=2", "layout.sharding=1")
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
            script = {"peer-layers": "peers/hybrid.py", "decode": "state_space_decode.py"}
            file = script.get(self.name, "state_space_ops.py")
            words = [self.name] if file == "state_space_ops.py" else ["--small"] if asked.small else []
            repeats = ["--repeats", "2"] if asked.small and file == "state_space_ops.py" else []
            return [*python, str(HERE / file), *words, *repeats, "--out", str(out)]
        warmup, steps = (1, 2) if asked.small else self.steps
        words = [*self.words, *(SMALL[self.config] if asked.small else ())]
        step = ["bench", "step", str(self.config), *words, "--ranks", str(self.gpus), "--json", str(out)]
        start = [str(HERE / "muon_without.py"), self.without] if self.without else ["-m", "phalanx"]
        if self.without and self.gpus > 1:  # what is left out is left out on each rank
            python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.gpus)]
        return [*python, *start, *step, "--warmup", str(warmup), "--steps", str(steps)]


def rows_of(length: int) -> dict[str, Row]:
    """All of them, in the order in which they are begun: what takes two GPUs first."""
    long = (f"train.seq_length={length}", "train.global_batch=1", "train.recompute=full")
    twice = (f"train.seq_length={2 * length}", *long[1:], "layout.cp=2")
    found = [
        Row("muon-8b", W2, (*EIGHT_B, *MUON), gpus=2, steps=(2, 4)),
        Row("w1", W1),
        Row("layers", LAYERS),
        Row("adamw-8b", W2, EIGHT_B, gpus=2, steps=(2, 4)),
        Row("long1", LAYERS, long, steps=(1, 3)),
        Row("long2", LAYERS, (*long, "layout.cp=2"), gpus=2, steps=(1, 3)),
        Row("long2x", LAYERS, twice, gpus=2, steps=(1, 3)),
        Row("muon", W1, MUON),
        Row("peer-layers", compiles=True),
        *(Row(name, compiles=True) for name in OPS),
        Row("decode"),
        Row("muon-direct", W1, MUON, without="gram"),
        Row("muon-full", W1, (*MUON, "train.plain_ops=[symmetric]")),
        Row("muon-clip", W1, (*MUON, "optim.qk_clip=100")),
        Row("muon-8b-turn", W2, (*EIGHT_B, *MUON), gpus=2, steps=(2, 4), without="homes"),
        Row("muon-8b-late", W2, (*EIGHT_B, *MUON), gpus=2, steps=(2, 4), without="overlap"),
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
    # GPUs are counted among those that this process sees, which need not begin with the machine's first.
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [seen[gpu] if gpu < len(seen) and seen[gpu] else str(gpu) for gpu in gpus]
    env = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ",".join(names)}
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=env, start_new_session=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Asks it, which ends the ranks that it has started, then kills what is left."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Compiling:
    """Processes that fill Triton's cache, all on one GPU: kernels are compiled for hundreds of tunings, by each process
    one at a time."""

    def __init__(self, rows: Sequence[Row], gpu: int, folder: Path):
        self.began, self.jobs = time.monotonic(), list[tuple[str, subprocess.Popen[bytes], Path]]()
        for row in rows:
            if row.name in OPS:
                command = [sys.executable, str(HERE / "state_space_ops.py"), row.name, "--only-compile"]
                log = folder / f"compile-{row.name}.log"
                self.jobs.append((row.name, start(command, [gpu], log), log))

    def done(self) -> bool:
        """Whether all have ended; those that take too long are stopped."""
        late = time.monotonic() - self.began > COMPILING_S
        for name, process, log in list(self.jobs):
            if process.poll() is None and not late:
                continue
            self.jobs.remove((name, process, log))
            if late:
                stop(process)
            if process.returncode:
                print(f"compiling {name} ended with {process.returncode}: {last_lines(log)}", flush=True)
            else:
                print(f"{name} compiled in {time.monotonic() - self.began:.0f} s", flush=True)
        return not self.jobs


class Runner:
    """Starts rows when there are GPUs for them, and keeps their results."""

    def __init__(self, asked: argparse.Namespace, gpus: list[int], folder: Path):
        self.asked, self.gpus, self.folder = asked, gpus, folder
        self.until = time.monotonic() + asked.seconds
        self.found, self.jobs, self.free = list[dict[str, Any]](), list[Job](), list(gpus)

    def run(self, waiting: list[Row]) -> list[dict[str, Any]]:
        for row in [row for row in waiting if self.gpus and row.gpus > len(self.gpus)]:
            waiting.remove(row)
            why = f"it needs {row.gpus} GPUs, here are {len(self.gpus)}"
            self.keep([{"row": row.name, "by": "phalanx", "failed": why}])
        compiling = None
        if self.gpus and any(row.compiles for row in waiting):
            compiling = Compiling(waiting, self.free[0], self.folder)
            self.free = self.free[1:]
        while waiting or self.jobs:
            if compiling is not None and compiling.done():
                compiling = None
                self.free.insert(0, self.gpus[0])
            for row in list(waiting):
                if self.until - time.monotonic() < 15:
                    waiting.remove(row)
                    self.keep([{"row": row.name, "by": "", "failed": "no time left"}])
                elif row.compiles and compiling is not None:
                    continue
                elif self.has_room(row):
                    waiting.remove(row)
                    self.begin(row)
                elif row.gpus > 1 and compiling is None:
                    break  # rows after it would take each GPU that becomes free
            self.collect()
            time.sleep(0.2)
        return self.found

    def has_room(self, row: Row) -> bool:
        """On a CPU rows run one after another."""
        return len(self.free) >= row.gpus if self.gpus else not self.jobs

    def begin(self, row: Row) -> None:
        own, self.free = self.free[: row.gpus], self.free[row.gpus :]
        out, log = self.folder / f"{row.name}.json", self.folder / f"{row.name}.log"
        process = start(row.command(self.asked, out), own, log)
        self.jobs.append(Job(row, process, own, out, log, min(self.until, time.monotonic() + self.asked.each)))

    def collect(self) -> None:
        for job in list(self.jobs):
            late = time.monotonic() > job.until
            if late:
                stop(job.process)
            if late or job.process.poll() is not None:
                self.jobs.remove(job)
                self.free += job.gpus
                self.keep(results(job, late))

    def keep(self, made: list[dict[str, Any]]) -> None:
        self.found += made
        for each in made:
            print(json.dumps({k: v for k, v in each.items() if k != "budget"}), flush=True)
            if self.asked.out:
                with open(self.asked.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(each) + "\n")


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
    kernels = [("row", "by", "forward ms", "with backward", "in a graph", "floor ms", "of floor", "difference")]
    steps = [("row", "by", "ms", "tokens/s", "TFLOP/s", "peak GiB", "optimizer", "exposed ms")]
    bad = []
    for each in found:
        if "failed" in each or "missing" in each:
            bad.append(f"{each['row']}: {'peer missing: ' if 'missing' in each else ''}{_why(each)}")
        elif "forward_ms" in each:
            both, graph = (f"{each[name]:.3f}" if name in each else "-" for name in ("both_ms", "both_graph_ms"))
            ours = f"{each['forward_ms']:.3f}", both, graph, each["floor"], f"{100 * each['share']:.0f} %"
            kernels.append((each["row"], each["by"], *ours, f"{each.get('difference', 0.0):.1e}"))
        else:
            share = each.get("optimizer_share")
            cells = [f"{each['step_ms']:.1f}", f"{each['tokens_per_s']:,.0f}"]
            cells += [f"{each[k]:.1f}" if each.get(k) is not None else "-" for k in ("tflops", "peak_gib")]
            cells += ["-" if share is None else f"{100 * share:.1f} %, {share * each['step_ms']:.1f} ms"]
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


@dataclass(frozen=True)
class Goal:
    """A row of issue 24's table. less: a smaller figure is better; None: there is no such bound."""

    what: str
    figure: float | None
    least: float | None = None
    goal: float | None = None
    less: bool = False

    @property
    def reached(self) -> str:
        if self.figure is None or (self.least is None and self.goal is None):
            return ""
        for word, bound in (("goal", self.goal), ("least", self.least)):
            if bound is not None and (self.figure <= bound if self.less else self.figure >= bound):
                return word
        return "no" if self.least is not None else "not the goal"

    def cells(self) -> tuple[str, ...]:
        bounds = ["" if bound is None else f"{bound:g}" for bound in (self.least, self.goal)]
        return self.what, f"{self.figure:.3f}", *bounds, self.reached


def goals(f: Figures) -> list[Goal]:
    theirs = next((e["tokens_per_s"] for e in f.found if e["row"] == "peer-layers" and "tokens_per_s" in e), None)
    own, eight = f.value("layers", "tokens_per_s"), f.ours("muon-8b")
    apart = f.ratio(("long2x", "tflops"), ("long1", "tflops"))  # of each GPU
    together = f.ratio(("long2", "tokens_per_s"), ("long1", "tokens_per_s"))
    return [
        Goal("scan: times as fast as mamba-ssm", f.faster("scan", "both_ms"), 1, 1.3),
        Goal("scan with 1 group: times as fast as mamba-ssm", f.faster("scan1", "both_ms"), 1, 1.3),
        Goal("scan: share of its floor", f.value("scan", "share"), None, 0.6),
        Goal("delta: times as fast as fla", f.faster("delta", "both_ms"), 1, 1.2),
        Goal("conv1d: times as fast as fla", f.faster("conv", "both_ms"), 1),
        Goal("conv1d: share of copy bandwidth", f.value("conv", "share"), None, 0.8),
        Goal("gated norm: times as fast as mamba-ssm", f.faster("norm", "both_ms")),
        Goal("one-token step: times as fast as peers", f.faster("step", "forward_ms"), 1.3),
        Goal("one-token step: share of the bandwidth floor", f.value("step", "share"), None, 0.8),
        Goal("one-token step of the whole model: the same", f.value("decode", "share")),
        Goal("8 layers: times as fast as peers' kernels", own / theirs if own and theirs else None, 1, 1.15),
        Goal("8 layers: share of W1's TFLOP/s", f.ratio(("layers", "tflops"), ("w1", "tflops")), None, 0.85),
        Goal("long sequence on two GPUs: times one GPU", together, 1.85, 1.95),
        Goal("twice as long on two: FLOP/s, times one GPU", None if apart is None else 2 * apart, 1.85, 1.95),
        Goal("orthogonalisation: times as fast as torch", f.faster("muon-ops", "forward_ms")),
        Goal("Muon on W1: optimizer's share of the step", f.value("muon", "optimizer_share"), 0.12, 0.07, True),
        Goal("  without the Gram form", f.value("muon-direct", "optimizer_share")),
        Goal("  without symmetric halves", f.value("muon-full", "optimizer_share")),
        Goal("  AdamW instead", f.value("w1", "optimizer_share")),
        Goal(
            "Muon on W1 with QK-clip: tokens/s, times without",
            f.ratio(("muon-clip", "tokens_per_s"), ("muon", "tokens_per_s")),
        ),
        Goal("Muon on the 8B: optimizer's share of the step", f.value("muon-8b", "optimizer_share"), 0.06, 0.04, True),
        Goal("  homes in turn", f.value("muon-8b-turn", "optimizer_share")),
        Goal("  exchanges at the end", f.value("muon-8b-late", "optimizer_share")),
        Goal("  AdamW instead", f.value("adamw-8b", "optimizer_share")),
        Goal("Muon on the 8B: exposed ms of all exchanges", eight and sum(eight["exposed_ms"].values()), None, 0, True),
    ]


def verdicts(found: list[dict[str, Any]]) -> str:
    made = [goal.cells() for goal in goals(Figures(found)) if goal.figure is not None]
    return table([("issue 24", "measured", "the least", "goal", "reached"), *made])


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
    print(f"{len(gpus)} GPUs: {gpu_names()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="state-space-") as folder:
        found = Runner(asked, gpus, Path(folder)).run(rows)
    print(f"\n{all_figures(found)}")
    if not asked.small:
        print(f"\n{verdicts(found)}")


def visible_gpus() -> list[int]:
    """Numbers of the GPUs here; none: rows run on the CPU, one after another."""
    import torch  # takes seconds, and not for --help

    return list(range(torch.cuda.device_count()))


def gpu_names() -> str:
    import torch

    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    return f"{', '.join(sorted(names)) or 'CPU'}, torch {torch.__version__}"


if __name__ == "__main__":
    main()

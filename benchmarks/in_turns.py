"""Two versions of Phalanx on the same GPUs: both keep their model in memory and step in turns, so that clocks, heat and
neighbours are the same for both. Prints the ratio new / old of each pair's medians, and old / old as the spread.

git archive 6ff7580 phalanx | tar x -C ../old
python benchmarks/in_turns.py ../old . --ranks 1 --pairs 5 --steps 4 -- benchmarks/configs/w1.yaml
python benchmarks/in_turns.py ../old . --ranks 2 -- benchmarks/configs/w4.yaml train.global_batch=16 layout.ep=2

Both models must fit beside each other. The old one is a folder with the package `phalanx` of 6ff7580 or later. With
`--apart` the versions run one after another, a process for each turn: slower, and clocks may drift between turns.
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
from pathlib import Path
from statistics import median
from typing import Any

PATIENCE_S = 300  # for the other's turn
PORT = 29611  # and the next one: of the two meetings


def in_turns(who: str, folder: Path, pairs: int, steps: int, words: list[str]) -> None:
    """One rank of one version: `bench step`, whose timed steps wait for their turn."""
    import phalanx.bench.step as bench
    from phalanx.cli.main import main

    plain, writes = bench.timed_steps, int(os.environ.get("RANK", "0")) == 0
    other = "new" if who == "old" else "old"

    def timed_steps(state: Any, step: Any, _: int) -> Any:
        bench.wait(state)
        if writes:
            (folder / f"ready-{who}").touch()
        until(folder / f"ready-{other}")
        found = []
        for pair in range(pairs + 1):  # the first is left out: the device comes out of a pause
            turn = 2 * pair + (who == "new")
            if turn:
                until(folder / f"done-{turn - 1}")
            step()
            found.append(plain(state, step, steps))
            found = found[1:] if pair == 1 else found
            peak = bench.peak_bytes(state)
            if writes:
                made = {"ms": [1e3 * times.median for times in found], "peak": peak}
                (folder / f"{who}.json").write_text(json.dumps(made), encoding="utf-8")
                (folder / f"done-{turn}").touch()
        return found[-1]

    if who == "new" and any(word.startswith("layout.pp=") for word in words):
        until(folder / "ready-old")  # warm-up too: two pipelines at once would wait for each other's time slices
    bench.timed_steps = timed_steps
    total = str((pairs + 1) * (steps + 1))  # long enough for the schedule
    main(["bench", "step", *words, "--warmup", "5", "--steps", total, *(["--force"] if who == "new" else [])])


def until(path: Path) -> None:
    began = time.monotonic()
    while not path.exists():
        time.sleep(0.02)
        if time.monotonic() - began > PATIENCE_S:
            raise SystemExit(f"waited {PATIENCE_S} s for {path.name}")


def start(who: str, package: Path, folder: Path, asked: argparse.Namespace) -> subprocess.Popen:
    program = [str(Path(__file__).resolve()), "--turns", who, str(folder), str(asked.pairs), str(asked.steps)]
    port = str(PORT + (who == "new"))
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(asked.ranks), "--master-port", port]
    command = [sys.executable, *(launcher if asked.ranks > 1 else []), *program, *asked.words]
    path = os.pathsep.join([str(package.resolve()), os.environ.get("PYTHONPATH", "")])
    log = (folder / f"{who}.log").open("w")
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=log, stderr=log)


def one_after_another(folder: Path, asked: argparse.Namespace) -> bool:
    """Each turn a run of its own of `bench step`; whether all ended well."""
    found: dict[str, dict[str, Any]] = {who: {"ms": [], "peak": None} for who in ("old", "new")}
    began = time.monotonic()
    for pair in range(asked.pairs):
        spent = time.monotonic() - began
        if pair and spent * (pair + 1) / pair > asked.seconds:
            print(f"{pair} of {asked.pairs} pairs in {spent:.0f} s; no time for another", file=sys.stderr)
            break
        for who, package in (("old", asked.old), ("new", asked.new)):
            out = folder / "step.json"
            launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(asked.ranks)]
            command = [sys.executable, *(launcher if asked.ranks > 1 else []), "-m", "phalanx", "bench", "step"]
            command += [*asked.words, "--warmup", "3", "--steps", str(asked.steps), "--json", str(out)]
            path = os.pathsep.join([str(package.resolve()), os.environ.get("PYTHONPATH", "")])
            done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
            if done.returncode:
                print(f"{who} failed:\n{(done.stdout + done.stderr)[-2000:]}", file=sys.stderr)
                return False
            step = json.loads(out.read_text(encoding="utf-8"))
            found[who]["ms"].append(1e3 * step["step"]["median"])
            found[who]["peak"] = step["peak_bytes"]
    for who, figures in found.items():
        (folder / f"{who}.json").write_text(json.dumps(figures), encoding="utf-8")
    return True


def report(folder: Path) -> str:
    old, new = (json.loads((folder / f"{who}.json").read_text(encoding="utf-8")) for who in ("old", "new"))
    ratios = [b / a for a, b in zip(old["ms"], new["ms"])]
    spread = [b / a for a, b in zip(old["ms"], old["ms"][1:])] or [1.0]
    peaks = " and ".join("n/a" if p is None else f"{p / 2**30:.2f}" for p in (old["peak"], new["peak"]))
    return (
        f"old {median(old['ms']):.1f} ms, new {median(new['ms']):.1f} ms, new / old {median(ratios):.4f} "
        f"({min(ratios):.4f}-{max(ratios):.4f}); old / old before {min(spread):.4f}-{max(spread):.4f}; "
        f"peak GiB {peaks}"
    )


def run() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--apart", action="store_true", help="one after another, not both in memory")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="with --apart: begin no pair that takes longer"
    )
    parser.add_argument("words", nargs="+", help="CONFIG and overrides, after --")
    asked = parser.parse_args()
    asked.words = [str(Path(asked.words[0]).resolve()), *asked.words[1:], "--ranks", str(asked.ranks)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if asked.apart:
            well = one_after_another(folder, asked)
            if well:
                print(report(folder))
            return not well
        both = {who: start(who, package, folder, asked) for who, package in (("old", asked.old), ("new", asked.new))}
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped before both were done"))
        try:
            failed = [who for who, process in both.items() if process.wait()]
        except (KeyboardInterrupt, SystemExit):
            for who, process in both.items():
                process.terminate()
                print(f"{who}:\n{(folder / f'{who}.log').read_text(encoding='utf-8')[-1000:]}", file=sys.stderr)
            raise
        for who in failed:
            print(f"{who} failed:\n{(folder / f'{who}.log').read_text(encoding='utf-8')[-2000:]}", file=sys.stderr)
        if not failed:
            print(report(folder))
        return bool(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--turns"]:
        in_turns(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), sys.argv[6:])
    else:
        sys.exit(run())

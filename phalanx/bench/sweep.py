"""`bench sweep`: `bench step` for every combination of values, each in separate processes; a table sorted by
tokens/s."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from phalanx.base.text_table import table

Row = dict[str, Any]


def split_values(override: str) -> list[str]:
    """`a.b=1,2` -> [`a.b=1`, `a.b=2`]. Commas inside brackets or quotes belong to a value."""
    key, equals, text = override.partition("=")
    values, depth, quote, start = [], 0, "", 0
    for i, c in enumerate(text):
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c in "[{(":
            depth += 1
        elif c in "]})":
            depth -= 1
        elif c == "," and depth == 0:
            values.append(text[start:i])
            start = i + 1
    values.append(text[start:])
    return [f"{key}{equals}{value}" for value in values]


def combinations(overrides: Sequence[str]) -> list[tuple[str, ...]]:
    return list(itertools.product(*(split_values(o) for o in overrides)))


def sweep(
    config: str, overrides: Sequence[str], options: Sequence[str], timeout_s: float, say: Callable[[str], None]
) -> list[Row]:
    """A row for each combination. One that runs out of memory, is invalid, or takes too long is a row that says so."""
    varied = {o.partition("=")[0] for o in overrides if len(split_values(o)) > 1}
    rows = []
    for chosen in combinations(overrides):
        name = " ".join(o for o in chosen if o.partition("=")[0] in varied) or "as it is"
        row = {"name": name, "overrides": list(chosen), **run_one(config, chosen, options, timeout_s)}
        rows.append(row)
        say(f"{name}: {row.get('problem') or f'''{row['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU'''}")
    return sorted(rows, key=lambda r: -(r.get("tokens_per_s_per_gpu", 0.0) * r.get("ranks", 1)))


def run_one(config: str, overrides: Sequence[str], options: Sequence[str], timeout_s: float) -> Row:
    """What `bench step` measured, or {"problem": ...}."""
    with tempfile.TemporaryDirectory(prefix="phalanx-") as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "phalanx", "bench", "step", config, *overrides, "--json", str(out), *options]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return {"problem": f"no end after {timeout_s:g} s"}
        if done.returncode or not out.exists():
            return {"problem": problem_of(done.stdout + done.stderr, done.returncode)}
        return json.loads(out.read_text(encoding="utf-8"))


def problem_of(said: str, code: int) -> str:
    """The error in a few words: the first line that names one, or else the last line of output."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    out_of_memory = next((line for line in lines if "out of memory" in line.lower()), None)
    if out_of_memory:
        return "out of memory"
    if does_not_fit := next((line for line in lines if line.startswith("does not fit: ")), None):
        return does_not_fit[:120]
    named = next((line for line in lines if " error: " in f" {line}" or line.startswith("rank ")), None)
    return f"exit {code}: {(named or (lines[-1] if lines else 'nothing said'))[:120]}"


def sweep_table(rows: Sequence[Row]) -> str:
    lines = [
        (
            "configuration",
            "ranks",
            "step ms",
            "min-max",
            "tok/s",
            "tok/s/GPU",
            "TFLOP/s/GPU",
            "MFU",
            "peak GiB",
            "problem",
        )
    ]
    for r in rows:
        if "problem" in r:
            lines.append((r["name"], *[""] * 8, r["problem"]))
            continue
        s = r["step"]
        mfu = "n/a" if r["mfu"] is None else f"{100 * r['mfu']:.1f}%"
        peak = "n/a" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 2**30:.2f}"
        rate = r["tokens_per_s_per_gpu"]
        lines.append(
            (
                r["name"],
                str(r["ranks"]),
                f"{1e3 * s['median']:.2f}",
                f"{1e3 * s['low']:.2f}-{1e3 * s['high']:.2f}",
                f"{rate * r['ranks']:,.0f}",
                f"{rate:,.0f}",
                f"{r['flops'] / 1e12:.4g}",
                mfu,
                peak,
                "",
            )
        )
    return table(lines, left=(0, 9))

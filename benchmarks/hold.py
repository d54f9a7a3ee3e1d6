"""Many commands in one hold of a machine with GPUs: in the order of a file, beside each other on GPUs of their own.

python benchmarks/hold.py benchmarks/holds/four.yaml [--only w2,w2-tp4] [--seconds 560] [--out results.jsonl]
python benchmarks/hold.py FILE --gpus 2 --dry      what would run, with the longest time that each may take

A row of the file is {gpus, limit: seconds, run: a command line, needs: [...]}; the command runs in bash at the root of
the repository, with CUDA_VISIBLE_DEVICES set to the row's GPUs. `{json}` stands for a file for its figures, an object
or lines of them. `needs` names rows that must have ended well before. A row begins when it is the next one, its GPUs
are free and its limit ends before --seconds; what does not fit is left out by name, and the next one is tried.

Every row adds a line of JSON to --out: name, seconds, exit code, its figures, the end of what it printed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from runs import rows_of

ROOT = Path(__file__).parent.parent
TAIL = 3000  # characters of what a row printed
MARK = "PHALANX_HELD"


@dataclass(frozen=True)
class Row:
    name: str
    run: str
    gpus: int = 1
    limit: float = 120.0
    needs: tuple[str, ...] = ()


@dataclass
class Running:
    row: Row
    gpus: list[int]
    process: subprocess.Popen[bytes]
    folder: Path
    mark: str
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def kill(self) -> None:
        """With all that it started, in sessions of their own too: they know the row by a variable of their
        environment."""
        while pids := named(f"{MARK}={self.mark}"):  # one that is killed may have started another meanwhile
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()


def rows_in(path: Path, only: str | None) -> list[Row]:
    """All, or those named, in the order named."""
    read = yaml.safe_load(path.read_text(encoding="utf-8"))
    rows = {name: Row(name, **{**row, "needs": tuple(row.get("needs", ()))}) for name, row in read.items()}
    names = only.split(",") if only else list(rows)
    unknown = [name for name in names if name not in rows]
    if unknown:
        raise SystemExit(f"{path} has no row {', '.join(unknown)}; it has {', '.join(rows)}")
    return [rows[name] for name in names]


def named(variable: str) -> list[int]:
    """The processes that were started with NAME=VALUE in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            if variable.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def begin(row: Row, gpus: list[int], folder: Path) -> Running:
    mark = f"{os.getpid()}-{row.name}"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "PYTHONUNBUFFERED": "1", MARK: mark}
    command = row.run.replace("{json}", str(folder / f"{row.name}.json"))
    with open(folder / f"{row.name}.log", "wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    return Running(row, gpus, process, folder, mark)


def figures_in(path: Path) -> Any:
    """One object of JSON, or a list of those of its lines; None: nothing, or not written to the end."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    try:
        return json.loads(text)
    except json.JSONDecodeError:  # killed while it wrote, or a line for each of several rows
        pass
    found = list[Any]()
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found or None


def result_of(done: Running, killed: bool) -> dict[str, Any]:
    log = (done.folder / f"{done.row.name}.log").read_text(encoding="utf-8", errors="replace")
    figures = figures_in(done.folder / f"{done.row.name}.json")
    for each in figures if isinstance(figures, list) else [figures]:
        if isinstance(each, dict) and isinstance(each.get("budget"), dict):
            each["budget"] = rows_of(each["budget"])
    state = "stopped at its limit" if killed else f"exit {done.process.returncode}" if done.process.returncode else "ok"
    row = {"row": done.row.name, "gpus": done.row.gpus, "command": done.row.run, "state": state}
    return {**row, "seconds": round(done.seconds, 1), "figures": figures, "tail": log[-TAIL:]}


def shown(result: dict[str, Any]) -> str:
    """A line of the table."""
    said = f"{result['row']:18} {result['gpus']:4} {result['seconds']:8.1f}  {result['state']:20}"
    figures = result["figures"]
    if isinstance(figures, dict) and isinstance(figures.get("step"), dict):
        step, peak = figures["step"], figures.get("peak_bytes")
        said += f" {1e3 * step['median']:9.1f} ms ({1e3 * step['low']:.1f}-{1e3 * step['high']:.1f})"
        said += "" if peak is None else f" {peak / 2**30:7.2f} GiB"
    return said.rstrip()


def hold(rows: list[Row], gpus: int, seconds: float, out: Path | None) -> list[dict[str, Any]]:
    until, free = time.monotonic() + seconds, list(range(gpus))
    waiting, running, found = list(rows), list[Running](), list[dict[str, Any]]()

    def add(result: dict[str, Any]) -> None:
        found.append(result)
        print(shown(result), flush=True)
        if out is not None:
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")

    def leave_out(row: Row, why: str) -> None:
        add({"row": row.name, "gpus": row.gpus, "command": row.run, "state": why, "seconds": 0.0, "figures": None})

    with tempfile.TemporaryDirectory() as temporary:
        while waiting or running:
            for one in [r for r in running if r.process.poll() is not None or r.seconds > r.row.limit]:
                late = one.process.poll() is None
                one.kill()
                running.remove(one)
                free = sorted([*free, *one.gpus])
                add(result_of(one, late))
            ended = {each["row"]: each["state"] for each in found}
            while waiting and not any(name in {r.row.name for r in running} for name in waiting[0].needs):
                row = waiting[0]
                unmet = [name for name in row.needs if ended.get(name) != "ok"]
                if unmet or row.gpus > gpus or time.monotonic() + row.limit > until:
                    leave_out(row, f"needs {unmet[0]}" if unmet else "no GPUs" if row.gpus > gpus else "no time left")
                elif row.gpus <= len(free):
                    taken, free = free[: row.gpus], free[row.gpus :]
                    running.append(begin(row, taken, Path(temporary)))
                else:
                    break
                waiting.pop(0)
            if running:
                try:
                    running[0].process.wait(0.5)
                except subprocess.TimeoutExpired:
                    pass
    return found


def count_gpus() -> int:
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("file", type=Path)
    reader.add_argument("--only", help="these rows, separated by commas, in this order")
    reader.add_argument("--seconds", type=float, default=560.0, help="for all rows together")
    reader.add_argument("--gpus", type=int, help="default: those of the machine")
    reader.add_argument("--out", type=Path, help="append the results to this file, a line of JSON each")
    reader.add_argument("--dry", action="store_true")
    asked = reader.parse_args()
    rows = rows_in(asked.file, asked.only)
    if asked.dry:
        for row in rows:
            print(f"{row.name:18} {row.gpus:4} {row.limit:8.0f} s at most  {row.run.strip()}")
        return
    print(f"{'row':18} {'GPUs':>4} {'seconds':>8}  {'state':20} {'step':>9}")
    found = hold(rows, asked.gpus or count_gpus(), asked.seconds, asked.out)
    for each in found:
        if each["state"] != "ok" and each.get("tail"):
            print(f"---- {each['row']}: {each['state']}\n{each['tail'][-1000:]}")
    print("----")
    for each in found:
        print(shown(each))


if __name__ == "__main__":
    main()

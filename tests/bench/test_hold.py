"""Many commands in one hold of a machine (benchmarks/hold.py): real processes, made-up GPUs."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks/hold.py"
FIGURES = {"step": {"median": 0.1, "low": 0.1, "high": 0.2}, "peak_bytes": 2**30, "budget": {"gemm": 1, "kernels": {}}}


def held(tmp_path: Path, rows: dict, *words: str, gpus: int = 2, seconds: float = 200) -> tuple[str, dict[str, dict]]:
    """What it printed, and its results by row."""
    (tmp_path / "rows.yaml").write_text(yaml.safe_dump(rows, sort_keys=False))
    command = [sys.executable, SCRIPT, tmp_path / "rows.yaml", "--gpus", gpus, "--seconds", seconds, *words]
    done = subprocess.run([*map(str, command), "--out", str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "out").read_text().splitlines()
    return done.stdout, {each["row"]: each for each in map(json.loads, lines)}


def test_rows_have_gpus_of_their_own_and_meet(tmp_path):
    """Two rows wait for each other, so they pass only side by side; the third needs both GPUs."""
    pipes = f"mkfifo {tmp_path}/a {tmp_path}/b 2>/dev/null;"
    rows = {
        "one": {"run": f"{pipes} echo $CUDA_VISIBLE_DEVICES > {tmp_path}/a; cat {tmp_path}/b"},
        "other": {"run": f"{pipes} cat {tmp_path}/a; echo $CUDA_VISIBLE_DEVICES > {tmp_path}/b"},
        "both": {"gpus": 2, "run": f"echo $CUDA_VISIBLE_DEVICES; echo '{json.dumps(FIGURES)}' > {{json}}"},
    }
    printed, found = held(tmp_path, rows)
    assert {name: each["state"] for name, each in found.items()} == dict.fromkeys(rows, "ok")
    assert [found[name]["tail"].split() for name in rows] == [["1"], ["0"], ["0,1"]]
    assert found["both"]["figures"] == {**FIGURES, "budget": {"gemm": 1}}
    assert "100.0 ms (100.0-200.0)    1.00 GiB" in printed


def test_figures_of_several_rows_are_lines(tmp_path):
    """Up to the one that was not written to the end."""
    line = json.dumps(FIGURES)
    run = f"printf '%s\\n%s\\n%s' '{line}' '{line}' '{line[:9]}' > {{json}}"
    _, found = held(tmp_path, {"two": {"run": run}, "none": {"run": "true"}})
    assert found["two"]["figures"] == [{**FIGURES, "budget": {"gemm": 1}}] * 2
    assert found["none"]["figures"] is None


def test_what_cannot_run_is_left_out_by_name(tmp_path):
    rows = {
        "fails": {"run": "echo gone wrong; false"},
        "after": {"run": "true", "needs": ["fails"]},
        "large": {"gpus": 3, "run": "true"},
        "long": {"limit": 1000, "run": "true"},
        "last": {"run": "true"},
    }
    printed, found = held(tmp_path, rows)
    states = ["exit 1", "needs fails", "no GPUs", "no time left", "ok"]
    assert [found[name]["state"] for name in rows] == states
    assert "gone wrong" in printed
    (tmp_path / "out").unlink()
    assert list(held(tmp_path, rows, "--only", "last,fails", gpus=1)[1]) == ["last", "fails"]


@pytest.mark.parametrize("child", ["", "& wait", "setsid"])
def test_a_row_ends_at_its_limit_with_all_that_it_started(tmp_path, child):
    """What it started holds a pipe open while it lives."""
    os.mkfifo(tmp_path / "pipe")
    held_open = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    run = (
        f"sleep 1000 > {tmp_path}/pipe {child}" if child != "setsid" else f"setsid sleep 1000 > {tmp_path}/pipe & wait"
    )
    _, found = held(tmp_path, {"slow": {"limit": 1, "run": run}, "next": {"gpus": 2, "run": "true"}})
    assert [found[name]["state"] for name in ("slow", "next")] == ["stopped at its limit", "ok"]
    assert found["slow"]["seconds"] < 100
    assert select.select([held_open], [], [], 20)[0] and os.read(held_open, 1) == b""
    os.close(held_open)


def test_an_unknown_row_is_refused(tmp_path):
    (tmp_path / "rows.yaml").write_text("a: {run: 'true'}\n")
    command = [sys.executable, str(SCRIPT), str(tmp_path / "rows.yaml"), "--only", "b", "--dry"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "has no row b; it has a" in done.stderr


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks/holds").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_files_of_rows_can_be_read(file):
    done = subprocess.run([sys.executable, str(SCRIPT), str(file), "--dry"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        for word in line.split():
            if word.startswith(("benchmarks/", "tests/")):
                assert (ROOT / word).exists(), word

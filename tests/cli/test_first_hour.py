"""The first hour, docs/first_hour.sh, on less text: each step works, the run goes on where it stopped, the page says
what the script does."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT, PAGE = ROOT / "docs" / "first_hour.sh", ROOT / "docs" / "first-hour.md"


def hour(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "FIRST_HOUR_SCALE": "small", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(["bash", str(SCRIPT), str(folder)], env=env, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def done(warm, tmp_path_factory) -> tuple[Path, Path, str]:
    """The folder of the hour, a copy of the page that it wrote its table into, and what it printed."""
    folder = tmp_path_factory.mktemp("hour")
    page = folder / "page.md"
    shutil.copy(PAGE, page)
    ran = hour(folder / "work", FIRST_HOUR_PYTHON=warm.python, FIRST_HOUR_PAGE=str(page))
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-3000:]
    assert "Traceback" not in ran.stdout + ran.stderr
    return folder / "work", page, ran.stdout


@pytest.mark.soak  # docs/quickstart.md has the same verbs: tests/doors/test_docs.py
def test_every_step_has_its_time(done):
    """The table in the page has the steps that were shown, in order, with times that add up."""
    _, page, said = done
    steps = re.findall(r"^== (.*)$", said, re.MULTILINE)
    rows = re.findall(r"^\| (.+?) \| (\d+\.\d) \| (\d+) min (\d+) s \|$", page.read_text(), re.MULTILINE)
    assert len(steps) >= 14 and [row[0] for row in rows] == steps
    total = int(rows[-1][2]) * 60 + int(rows[-1][3])
    assert sum(float(row[1]) for row in rows) == pytest.approx(total, abs=0.1 * total + 2)


@pytest.mark.soak
def test_the_stopped_run_went_on_where_it_stopped(done):
    """SIGTERM ended it with 75 in the middle; on one rank instead of two it took up the next step, each step once."""
    folder, _, said = done
    assert "exit code 75: saved and stopped" in said
    saved = int(re.findall(r"continue from runs/first/checkpoints/step-(\d+)", said)[0])
    metrics = [json.loads(line) for line in (folder / "runs" / "first" / "metrics.jsonl").read_text().splitlines()]
    steps = [m["step"] for m in metrics if "loss" in m]
    assert 12 <= saved < 40 and steps == list(range(1, 41))
    lines = (folder / "runs" / "first" / "log.txt").read_text()
    assert "world=2" in lines and "world=1" in lines


@pytest.mark.soak
def test_the_result_is_a_hugging_face_folder(done):
    """transformers read it and continued the prompt."""
    assert re.search(r"^transformers: 'def .+'$", done[2], re.MULTILINE)


def test_it_stops_at_the_first_step_that_fails(tmp_path):
    """An interpreter without the packages: the step and its exit code are named, nothing after it runs."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *phalanx*) exit 9;; esac\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    ran = hour(tmp_path / "work", FIRST_HOUR_PYTHON=str(python))
    assert ran.returncode == 9
    assert 'first hour: "what this machine can do" ended with exit code 9' in ran.stderr
    assert "train the demo" not in ran.stdout


def test_the_page_shows_what_the_script_runs():
    """Each command in the page's table is one of the script's."""
    script = SCRIPT.read_text()
    commands = re.findall(r"^\| [^|]+ \| `(phalanx [^`]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert len(commands) >= 9
    assert not [c for c in commands if c not in script]

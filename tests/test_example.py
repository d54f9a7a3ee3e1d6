"""The library example, as a user starts it: losses fall, and are the same for tp=2 and dp=2."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.pool import free_port

ROOT = Path(__file__).parents[1]
SCRIPT = str(ROOT / "examples/own_loop.py")


def rank_environment(rank: int, port: int) -> dict[str, str]:
    """As torchrun tells a process who it is."""
    return {
        "WORLD_SIZE": "2",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def rank_script(rank: int, world: int, *options: str) -> str:
    """What the script prints, run inside a rank of the pool (whose world it joins)."""
    printed = io.StringIO()
    with mock.patch.dict(os.environ, rank_environment(rank, 0)), mock.patch.object(sys, "argv", [SCRIPT, *options]):
        with contextlib.redirect_stdout(printed):
            runpy.run_path(SCRIPT, run_name="__main__")
    return printed.getvalue()


def losses(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"^step=\d+ loss=([\d.]+)$", text, re.MULTILINE)]


@pytest.mark.parametrize("optimizer", ["ours", "torch"])
def test_own_loop(ranks, optimizer):
    tensor, data = (
        losses(ranks.run("tests.test_example:rank_script", 2, "--tp", tp, "--optimizer", optimizer)[0])
        for tp in ("2", "1")
    )
    assert len(tensor) == 20
    assert tensor[-1] < tensor[0] - 0.2 and 5.4 < tensor[0] < 5.7  # ln 256 = 5.545
    assert tensor == pytest.approx(data, abs=5e-5)


def test_started_by_the_environment_alone():
    port = free_port()
    base = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            [sys.executable, SCRIPT],
            cwd="/",
            env={**base, **rank_environment(rank, port)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0] and len(losses(outputs[0])) == 20 and not outputs[1]


def test_example_is_short():
    lines = Path(SCRIPT).read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.strip()]) < 60

"""The library examples, as a user starts them: alone, on two ranks that torchrun would start, and again.

One has an interpreter of its own; the others are processes of tests/harness/warm.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.pool import free_port
from tests.harness.warm import Warm

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPT = EXAMPLES / "own_loop.py"


def rank_environment(rank: int, port: int) -> dict[str, str]:
    """As torchrun tells a process who it is."""
    return {
        "WORLD_SIZE": "2",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def started(python: str, script: Path, *words: str, ranks: int = 1) -> list[str]:
    """What each rank's process printed."""
    base = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    port = free_port()
    processes = [
        subprocess.Popen(
            [python, str(script), *words],
            cwd="/",
            env={**base, **(rank_environment(rank, port) if ranks > 1 else {})},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, outputs
    return outputs


def losses(folder: Path, name: str = "loss") -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


@pytest.fixture(scope="module")
def alone(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the example's run on one process."""
    folder = tmp_path_factory.mktemp("own-loop") / "alone"
    [said] = started(warm.python, SCRIPT, f"dir={folder}")
    found = losses(folder)
    assert len(found) == 20 and found[-1] < found[0] - 0.2 and 5.4 < found[0] < 5.7  # ln 256 = 5.545
    assert "step=15" in said and "note=mine" in said and "done step=20" in said
    return folder


@pytest.mark.parametrize("layout", ["tp", pytest.param("pp", marks=pytest.mark.soak)])
def test_own_loop(warm, alone, tmp_path, layout):
    """Losses fall, and are those of one process; another layout continues what one process began."""
    first, other = started(warm.python, SCRIPT, f"dir={tmp_path}/two", f"layout.{layout}=2", ranks=2)
    assert losses(tmp_path / "two") == pytest.approx(losses(alone), abs=5e-5)
    assert "done step=20" in first and not other
    shutil.copytree(alone, tmp_path / "more")
    started(warm.python, SCRIPT, f"dir={tmp_path}/more", f"layout.{layout}=2", "train.steps=22", ranks=2)
    assert len(losses(tmp_path / "more")) == 22


def test_custom_loss(warm, tmp_path):
    """The z-loss is in the loss, which falls, and is that of one process."""
    script = EXAMPLES / "custom_loss.py"
    [said] = started(warm.python, script, f"dir={tmp_path}/alone")
    alone, nll, log_z = (losses(tmp_path / "alone", name) for name in ("loss", "task/nll", "task/log_z"))
    assert len(alone) == 20 and alone[-1] < alone[0] - 0.2 and "done step=20" in said and "log_z=" in said
    assert alone == pytest.approx([n + 0.01 * z * z for n, z in zip(nll, log_z)], abs=0.02)  # the square of the mean
    started(warm.python, script, f"dir={tmp_path}/two", "layout.tp=2", ranks=2)
    assert losses(tmp_path / "two") == pytest.approx(alone, abs=5e-5)
    assert "name: __main__:ZLoss" in (tmp_path / "alone/config.yaml").read_text()


def test_example_is_short():
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.strip()]) < 40


def test_a_data_source_of_ones_own(warm, tmp_path):
    """The loss falls, and a run that two processes continue in another layout goes on with the same samples; the config
    that is kept names the class by a path."""
    half, whole = ("train.steps=8", "optim.decay_steps=16"), ("train.steps=16", "optim.decay_steps=16")
    [said] = started(warm.python, EXAMPLES / "data_source.py", f"dir={tmp_path}/alone", *whole)
    alone = losses(tmp_path / "alone")
    assert "done step=16" in said and len(alone) == 16 and alone[0] > 5 and alone[-1] < 3
    assert "source: __main__:Sums" in (tmp_path / "alone/config.yaml").read_text()
    started(warm.python, EXAMPLES / "data_source.py", f"dir={tmp_path}/cut", *half)
    started(warm.python, EXAMPLES / "data_source.py", f"dir={tmp_path}/cut", *whole, "layout.tp=2", ranks=2)
    assert losses(tmp_path / "cut") == pytest.approx(alone, abs=5e-3)


def test_a_callback(tmp_path):
    [said] = started(sys.executable, EXAMPLES / "callback.py", f"dir={tmp_path}/run")
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    valid = {row["step"]: row["valid/valid"] for row in rows if "valid/valid" in row}
    best = min(valid, key=valid.get)
    slowest = max(row["step_s"] for row in rows if "step_s" in row)
    assert len(valid) == 4 and f"best step={best} loss={valid[best]:.4f} saves=4 slowest={slowest:.2f} s" in said

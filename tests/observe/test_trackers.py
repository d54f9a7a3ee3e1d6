"""Trackers: TensorBoard and Weights & Biases read back from their files, what they do when a run goes back, and when
they fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.base.log import Log
from phalanx.base.placement import Placement
from phalanx.base.records import Row, SinkStart
from phalanx.config.run import LogConfig
from phalanx.observe.run_records import LOSS
from phalanx.observe.sinks import Sinks
from phalanx.training.main import train
from tests.harness import tracker_files
from tests.harness.tracker_files import board_numbers, numbers_by_step, wandb_numbers, wandb_rows, wandb_runs
from tests.training.test_loop import make_run, rows_of

KEY = "0123456789abcdef" * 2 + "01234567"  # an API key as W&B has them
MINORS = 8
FIRST_FOR_NUMPY_2 = [
    2,
    17,
]  # of TensorBoard's own readers; what runs with older ones write is read with the version here


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", KEY)


@pytest.mark.trust(
    20, "phalanx train run.yaml log.wandb=PROJECT", "every number, of experts and FP8 too, is in the file of wandb 0.31"
)
def test_wandb_has_every_number_under_one_id(tmp_path, offline):
    """Also after the run was continued from an earlier step than it had reached. The key of the account is in no
    file."""
    pytest.importorskip("wandb")
    tracker_files.train_twice("wandb", tmp_path)
    assert tracker_files.compare("wandb", tmp_path) > 300
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


@pytest.mark.trust(
    20,
    "log.tensorboard=true with experts or FP8",
    "their tables reach TensorBoard number by number, not metrics.jsonl alone",
)
def test_tensorboard_has_every_number(tmp_path):
    tracker_files.train_twice("tensorboard", tmp_path)
    assert tracker_files.compare("tensorboard", tmp_path) > 300


def test_a_rollback_is_taken_back(tmp_path, offline):
    """metrics.jsonl and TensorBoard forget the steps; W&B, which cannot, gets them again."""
    pytest.importorskip("wandb")
    sinks = Sinks(LogConfig(tensorboard=True, wandb="p"), SinkStart(tmp_path, 0, {}, Log()))
    for step in (1, 2, 3, 4):
        sinks.write(Row(step, {LOSS: 10.0 * step}))
    sinks.rewind(2)
    for step in (3, 4, 5):
        sinks.write(Row(step, {LOSS: 1.0 * step}))
    sinks.close()
    wanted = {("loss", 1): 10.0, ("loss", 2): 20.0, ("loss", 3): 3.0, ("loss", 4): 4.0, ("loss", 5): 5.0}
    assert numbers_by_step(tracker_files.rows_of(tmp_path)) == board_numbers(tmp_path / "tb") == wanted
    [records] = wandb_runs(tmp_path)
    rows = wandb_rows(records)
    assert wandb_numbers(rows) == wanted
    assert [row["rollbacks"] for row in rows] == [0, 0, 0, 0, 1, 1, 1]
    axes = {r.metric.glob_name or r.metric.name: r.metric.step_metric for r in records if r.HasField("metric")}
    assert axes["*"] == "step"


@pytest.mark.trust(
    20, "a tracker raises: at import, at its start, at a row, at the end", "one warning, and the run goes on"
)
@pytest.mark.parametrize("moment", ["import", "start", "row", "end"])
def test_a_tracker_that_fails_ends_nothing(tmp_path, monkeypatch, capsys, offline, moment):
    wandb = pytest.importorskip("wandb")

    def fail(*_args, **_options):
        raise ValueError("the tracker is broken")

    monkeypatch.setitem(sys.modules, "phalanx.observe.wandb_run", None) if moment == "import" else None
    monkeypatch.setattr(wandb, "init", fail) if moment == "start" else None
    monkeypatch.setattr(wandb.Run, "log", fail) if moment == "row" else None
    if moment == "end":
        monkeypatch.setattr("phalanx.observe.wandb_run.WandbRun.close", fail)
    run = make_run(tmp_path / "run", steps=3)
    train(replace(run, log=LogConfig(report=False, wandb="p", tensorboard=True)), Placement())
    said = capsys.readouterr()
    assert said.err.count("Weights & Biases failed") == 1 and "Traceback" not in said.err
    assert "done step=3" in said.out
    assert [step for name, step in board_numbers(tmp_path / "run/tb") if name == "loss"] == [1, 2, 3]


def test_without_a_login_the_run_is_recorded_offline(tmp_path):
    """Nothing is asked, though there may be a terminal."""
    pytest.importorskip("wandb")
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    env |= {"HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    code = (
        "from pathlib import Path; from phalanx.base.log import Log; from phalanx.config.run import LogConfig; "
        "from phalanx.base.records import Record, Row, SinkStart; from phalanx.observe.sinks import Sinks; "
        f"sinks = Sinks(LogConfig(wandb='p'), SinkStart(Path({str(tmp_path)!r}), 0, {{}}, Log())); "
        "sinks.write(Row(1, {Record('loss'): 0.5})); sinks.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "recorded offline" in done.stderr and "wandb sync" in done.stdout
    [records] = wandb_runs(tmp_path)
    assert wandb_numbers(wandb_rows(records)) == {("loss", 1): 0.5}


def test_the_id_of_a_run_is_kept_and_an_older_one_too(tmp_path, offline):
    pytest.importorskip("wandb")
    from phalanx.observe.wandb_run import run_id

    made = run_id(tmp_path / "wandb-id.txt", Log())
    assert run_id(tmp_path / "wandb-id.txt", Log()) == made and len(made) == 12
    (tmp_path / "old.txt").write_text("3qx8zk1v")
    assert run_id(tmp_path / "old.txt", Log()) == "3qx8zk1v"


def test_a_folder_that_tensorboard_cannot_have(tmp_path, capsys):
    run = make_run(tmp_path / "run", steps=2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/tb").write_text("a file")
    train(replace(run, log=LogConfig(report=False, tensorboard=True)), Placement())
    said = capsys.readouterr()
    assert "cannot be written" in said.err and "done step=2" in said.out and len(rows_of(run)) == 2


# ---- other versions ------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("back", range(MINORS))
@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_the_newest_minor_versions(tmp_path, package, back):
    """An environment of its own for the newest version but `back`, with this one's packages behind it; offline;
    every number is read back."""
    version = minor_versions(package)[back]
    python = tmp_path / "env/bin/python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True, timeout=300)
    pip = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-compile",
        f"{package}=={version}",
    ]
    subprocess.run(pip, check=True, timeout=600)
    where = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    (Path(where.stdout.strip()) / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "WANDB_MODE": "offline"}
    called = [str(python), "-c", f"import {package}; assert {package}.__version__ == {version!r}"]
    subprocess.run(called, env=env, check=True, timeout=60)
    code = (
        "import sys; from pathlib import Path; from tests.harness.tracker_files import *; "
        f"train_twice({package!r}, Path({str(tmp_path / 'run')!r})); "
    )
    own_reader = package == "wandb" or [int(n) for n in version.split(".")[:2]] >= FIRST_FOR_NUMPY_2
    code += f"print(compare({package!r}, Path({str(tmp_path / 'run')!r})))" if own_reader else ""
    done = subprocess.run([str(python), "-c", code], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{package} {version}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    print(f"{package} {version}: {tracker_files.compare(package, tmp_path / 'run')} numbers equal")


def minor_versions(package: str) -> list[str]:
    """The newest version of each minor one that the registry has, the newest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--disable-pip-version-check", package]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    found = re.search(r"Available versions: (.*)", text)[1].split(", ")
    newest: dict[tuple[str, ...], str] = {}
    for version in found:
        newest.setdefault(tuple(version.split(".")[:2]), version)
    return list(newest.values())[:MINORS]

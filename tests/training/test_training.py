"""Whole runs through the command line: killed, stopped and continued runs end as undisturbed ones do.

The one that is killed has interpreters of its own; the others are processes of tests/harness/warm.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.warm import Warm

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "model": {
        "family": "llama",
        "vocab_size": 131,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "train": {
        "steps": 24,
        "global_batch": 4,
        "micro_batch": 1,
        "seq_length": 32,
        "device": "cpu",
        "eval_interval": 12,
        "eval_samples": 6,
    },
    "layout": {"tp": 2, "pp": 2},
    "optim": {"lr": 3e-3, "warmup_steps": 3},
    "data": {"mock": True},
    "checkpoint": {"interval": 5},
    "log": {"report": False},
}


SECRET = "canary-5d1c7e"  # in the environment of every run


def command(config: Path, folder: Path, *more: str, python: str = sys.executable) -> list[str]:
    return [python, "-m", "phalanx", "train", str(config), f"dir={folder}", *more]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_TOKEN": SECRET}


def run(config: Path, folder: Path, *more: str, python: str = sys.executable) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(config, folder, *more, python=python), env=environment(), capture_output=True, text=True, timeout=240
    )


def start(config: Path, folder: Path, *more: str, python: str = sys.executable) -> subprocess.Popen:
    words = command(config, folder, *more, python=python)
    return subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def steps(folder: Path) -> dict[int, tuple[float, float]]:
    """step -> (loss, gradient norm), exactly as written."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in rows if "loss" in r}


def valid(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: r["valid/valid"] for r in rows if "valid/valid" in r}


def wait_for_step(folder: Path, process: subprocess.Popen, step: int) -> None:
    """Until the run's own log shows that it got there."""
    path, deadline = folder / "metrics.jsonl", time.monotonic() + 120
    while not (path.exists() and path.read_text().count("\n") >= step):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)  # a poll, not a wait for luck


def ranks_of(launcher: int) -> list[int]:
    """Process numbers of the ranks that a launcher started."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, ValueError):
                continue
    found, seen = [launcher], {launcher}
    for pid in found:
        children = [p for p, parent in parents.items() if parent == pid and p not in seen]
        seen.update(children)
        found += children
    return [p for p in found if b"phalanx.launch.worker" in words_of(p)]


def warm_ranks(warm: Warm) -> list[int]:
    """Process numbers of the ranks that asked this server; they pass signals on."""
    running = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return sorted(p for p in running if {warm.python.encode(), b"phalanx.launch.worker"} <= words_of(p))


def words_of(process: int) -> set[bytes]:
    """Of its command line; none of a process that is gone."""
    try:
        return set(Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0"))
    except OSError:
        return set()


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("config") / "run.yaml"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def undisturbed(warm, config, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    done = run(config, folder, python=warm.python)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_step_lines_and_files(undisturbed):
    """The contract of a run's folder and of the step line."""
    assert {p.name for p in undisturbed.iterdir()} >= {"checkpoints", "config.yaml", "log.txt", "metrics.jsonl"}
    log = (undisturbed / "log.txt").read_text()
    line = next(x for x in log.splitlines() if " step=24 loss=" in x)
    keys = [
        part.split("=")[0] for part in line.split()[2:] if not part.startswith("slow=")
    ]  # a busy machine may slow a rank
    assert keys == "step loss grad_norm lr tok/s mem tokens eta".split()
    assert len(steps(undisturbed)) == 24
    first, last = steps(undisturbed)[1][0], steps(undisturbed)[24][0]
    assert abs(first - 4.875) < 0.1 and last < first - 0.3  # ln 131 at the start, then it learns


def test_secrets_of_the_environment_are_nowhere(undisturbed):
    files = [path for path in undisturbed.rglob("*") if path.is_file()]
    assert len(files) > 5 and not [path for path in files if SECRET.encode() in path.read_bytes()]


@pytest.mark.soak  # tests/faults/test_faults.py has a sample of kills
def test_kill_9_of_a_rank_changes_nothing(warm, config, undisturbed, tmp_path):
    folder = tmp_path / "run"
    process = start(config, folder)
    wait_for_step(folder, process, 8)
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 6, out
    assert "Traceback" not in out
    done = run(config, folder, python=warm.python)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "continue from" in done.stdout
    assert steps(folder) == steps(undisturbed)
    assert valid(folder) == valid(undisturbed)


def test_sigterm_saves_and_the_run_goes_on(warm, config, undisturbed, tmp_path):
    folder = tmp_path / "run"
    process = start(config, folder, python=warm.python)
    wait_for_step(folder, process, 7)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 75, out
    done = run(config, folder, python=warm.python)
    assert done.returncode == 0, done.stdout + done.stderr
    assert steps(folder) == steps(undisturbed)


def test_one_rank_or_a_limit_of_time_is_enough(warm, config, undisturbed, tmp_path):
    """SIGUSR1 to one rank alone: all save the same step. Then a limit that is over at once: one step more each time.
    Nothing is lost."""
    folder = tmp_path / "run"
    process = start(config, folder, python=warm.python)
    wait_for_step(folder, process, 4)
    os.kill(warm_ranks(warm)[1], signal.SIGUSR1)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 75, out
    before = max(steps(folder))
    done = run(config, folder, "train.time_limit_s=0.001", python=warm.python)
    assert done.returncode == 75 and before < max(steps(folder)) < before + 4, done.stdout + done.stderr
    done = run(config, folder, python=warm.python)
    assert done.returncode == 0, done.stdout + done.stderr
    assert steps(folder) == steps(undisturbed)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(("layout.tp=1", "layout.pp=1", "--ranks", "2"), marks=pytest.mark.soak),
        ("layout.tp=1", "layout.sharding=3", "layout.bucket_mb=1", "--ranks", "4"),
    ],
    ids=["dp2", "pp2 dp2, level 3"],
)
def test_another_layout_continues_the_same_run(warm, config, undisturbed, tmp_path, layout):
    """Stopped at step 10 on tp2 x pp2, continued, evaluated and saved on data-parallel ranks: the same losses up to
    rounding."""
    folder = tmp_path / "run"
    process = start(config, folder, python=warm.python)
    wait_for_step(folder, process, 7)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    done = run(config, folder, *layout, python=warm.python)
    assert done.returncode == 0, done.stdout + done.stderr
    for step, (loss, norm) in steps(undisturbed).items():
        assert steps(folder)[step] == pytest.approx((loss, norm), rel=2e-4), step
    assert valid(folder)[24] == pytest.approx(valid(undisturbed)[24], rel=1e-4)


def test_the_saved_config_runs_again(warm, config, undisturbed, tmp_path):
    """The resolved config of a run is a config."""
    done = run(
        undisturbed / "config.yaml", tmp_path / "again", "train.steps=4", "optim.decay_steps=24", python=warm.python
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first = {k: v for k, v in steps(undisturbed).items() if k <= 4}
    assert steps(tmp_path / "again") == first


def test_a_checkpoint_that_is_not_there_is_an_error(warm, config, undisturbed, tmp_path):
    """Never a silent fresh start."""
    wrong = str(undisturbed).replace("run", "rnu")
    done = run(config, tmp_path / "new", f"checkpoint.load={wrong}", python=warm.python)
    assert done.returncode == 4 and "rnu" in done.stderr and "Traceback" not in done.stderr
    done = run(config, undisturbed, "checkpoint.resume=never", python=warm.python)
    assert done.returncode == 4 and "resume=never" in done.stdout + done.stderr


def test_a_bad_config_writes_nothing(warm, config, tmp_path):
    folder = tmp_path / "run"
    done = run(config, folder, "layout.tp=3", "optim.lr=-1", "train.learning_rte=2", python=warm.python)
    assert done.returncode == 2
    for text in ("layout.tp=3", "optim.lr=-1", "learning_rte"):
        assert text in done.stderr
    assert "Traceback" not in done.stderr and not folder.exists()

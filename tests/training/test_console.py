"""What a person sees of a run, and what stays of it on a disk without room."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.base.journal import Journal
from phalanx.base.log import Log
from phalanx.base.placement import Placement
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.config.run import LogConfig, Run
from phalanx.config.write import save_run
from phalanx.observe.metrics import Counters, Reporter, Speed
from phalanx.observe.step_line import FIRST_S, LATER_S, SOON_S, ConsolePace, short, step_line
from phalanx.training import loop
from phalanx.training.main import train
from tests.harness.tracker_files import board_numbers
from tests.training.test_loop import make_run, rows_of

ROOT = Path(__file__).resolve().parents[2]
LAST = {
    "step": 1_234_567,
    "loss": 12.3456,
    "grad_norm": 123.456,
    "lr": 1.064e-3,
    "tokens_per_s": 1_931_900.0,
    "tokens_per_s_per_gpu": 19_659.0,
    "tflops_per_gpu": 812.3,
    "mfu": 0.451,
    "memory_gib": 137.25,
    "tokens": 15_000_000_000_000,
    "eta_s": 912_345.0,
    "skipped": 0,
}
MORE = {
    "skipped": 12,
    "mtp_loss": 3.25,
    "fp8_lost": 0.000244,
    "fp8_worst": "weights of model.layers.31.self_attn.q_proj+k_proj+v_proj",
    "experts": {"load_max": [None, 1.5], "entropy": [None, 2.0], "dropped": [None, 7], "missing": [None, 3]},
    "slow": {5: 2.5, 77: 3.5},
}
STEPS = 40  # of runs on small disks: their files outgrow the pages that they have


# ---- the step line -------------------------------------------------------------------------------


def keys(line: str) -> list[str]:
    return [part.split("=")[0] for part in line.split()]


@pytest.mark.trust(
    25,
    "the step line of a CPU run had 143 columns with mfu=n/a and tok/s/gpu",
    "at most 120 columns, and only what the machine has",
)
def test_the_step_line_shows_what_there_is():
    assert keys(step_line(LAST, gpu=False, ranks=1)) == "step loss grad_norm lr tok/s mem tokens eta".split()
    assert keys(step_line(LAST, gpu=False, ranks=4)) == "step loss grad_norm lr tok/s mem tokens eta".split()
    assert "mfu" in keys(step_line(LAST, gpu=True, ranks=1)) and "tok/s/gpu" not in keys(
        step_line(LAST, gpu=True, ranks=1)
    )
    assert (
        keys(step_line(LAST, gpu=True, ranks=8, width=200))
        == "step loss grad_norm lr tok/s tok/s/gpu mfu mem tokens eta".split()
    )
    unknown = keys(step_line({**LAST, "mfu": None}, gpu=True, ranks=1, width=200))
    assert "tflops/gpu" in unknown and "mfu" not in unknown
    assert "skipped=3" in step_line({**LAST, "skipped": 3}, gpu=False, ranks=1)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_step_line_fits(width):
    for gpu, ranks, values in [(g, r, v) for g in (True, False) for r in (1, 8) for v in (LAST, {**LAST, **MORE})]:
        line = step_line(values, gpu, ranks, width)
        assert len(line) <= width and {"step", "loss", "grad_norm"} <= set(keys(line)), line


def test_short_numbers():
    shown = [short(n) for n in (0, 8308, 9999, 19319, 999_949, 999_951, 1_931_900, 15e12, 2e15)]
    assert shown == ["0", "8308", "9999", "19.3k", "999.9k", "1.0M", "1.9M", "15.0T", "2000.0T"]


def test_the_pace_of_lines():
    now = 100.0
    pace = ConsolePace(lambda: now)
    assert pace.due() and not pace.due()
    now += SOON_S
    assert pace.due()
    now += FIRST_S
    assert pace.due()
    now += SOON_S
    assert not pace.due()
    now += LATER_S
    assert pace.due()


@pytest.mark.trust(
    25,
    "a terminal got a line for every step below a progress bar",
    "lines at a readable pace and no bar; files get each step",
)
def test_a_terminal_gets_few_lines_and_files_all(tmp_path):
    """40 steps on a terminal of 80 columns take a moment: the first and the last are shown; none of them is broken
    by the terminal's width."""
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    run = make_run(tmp_path, steps=40)
    with os.fdopen(terminal, "w") as out, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        train(replace(run, checkpoint=CheckpointConfig(interval=10, keep_last=2)), Placement())
    shown = b""
    os.set_blocking(master, False)
    try:
        while piece := os.read(master, 65536):
            shown += piece
    except OSError as error:
        assert error.errno in (errno.EIO, errno.EAGAIN)
    os.close(master)
    lines = [line for line in shown.decode().splitlines() if line.startswith("step=")]
    assert (
        {"step=1", "step=40"} <= {line.split()[0] for line in lines} and len(lines) < 20 and max(map(len, lines)) <= 80
    )
    assert "removed step-00000010" in shown.decode() and "\x1b" not in shown.decode()
    log = (tmp_path / "log.txt").read_text()
    assert [int(n) for n in re.findall(r" step=(\d+) loss", log)] == list(range(1, 41))


def test_an_interval_thins_all_lines(tmp_path, capsys):
    train(replace(make_run(tmp_path, steps=10), log=LogConfig(report=False, interval=4)), Placement())
    shown, log = capsys.readouterr().out, (tmp_path / "log.txt").read_text()
    assert re.findall(r"step=(\d+) loss", shown) == re.findall(r"step=(\d+) loss", log) == ["4", "8", "10"]


def test_the_time_left_is_that_of_usual_steps(tmp_path):
    """One step of an hour among quick ones does not make the run look endless."""
    reporter = Reporter(Log(), None, Speed(1.0, 1, None, 16, 100), Counters(), torch.device("cpu"))
    reporter.remaining = lambda: 50
    assert [reporter._left_s(s, 2) for s in (4.0, 4.0, 3600.0, 4.0)] == [100.0] * 4


# ---- no room -------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True
        ).returncode
    ):
        pytest.skip("a small disk needs a mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    with open(folder / "filler", "ab", buffering=0) as file:
        try:
            while file.write(bytes(1 << 12)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC


def on_a_disk(folder: Path) -> Run:
    run = make_run(folder / "run", steps=STEPS)
    return replace(
        run, checkpoint=CheckpointConfig(interval=15, on_error="continue"), log=LogConfig(report=True, tensorboard=True)
    )


@pytest.mark.trust(
    12,
    "a disk with 0 bytes left in mid-run, checkpoint.on_error=continue",
    "one warning per file; every line comes later",
)
def test_what_a_full_disk_refuses_is_written_later(small_disk, monkeypatch, capsys):
    real, run = loop.train_step, on_a_disk(small_disk)
    calls = []

    def step(*values):
        calls.append(1)
        if 4 <= len(calls) < 36:  # a save that fails gives back what it took
            fill(small_disk)
        if len(calls) == 36:
            (small_disk / "filler").unlink()
        return real(*values)

    monkeypatch.setattr(loop, "train_step", step)
    train(run, Placement())
    said = capsys.readouterr()
    assert [row["step"] for row in rows_of(run)] == list(range(1, STEPS + 1))
    log = (small_disk / "run/log.txt").read_text()
    assert (
        re.findall(r" step=(\d+) loss", log)
        == re.findall(r"step=(\d+) loss", said.out)
        == [str(n) for n in range(1, STEPS + 1)]
    )
    assert [step for name, step in board_numbers(small_disk / "run/tb") if name == "loss"] == list(range(1, STEPS + 1))
    for name in ("metrics.jsonl", "log.txt", "tfevents"):
        assert len(re.findall(rf"{name}\S* cannot be written \(No space left on device\)", said.err)) == 1, said.err
        assert (
            len(re.findall(rf"{name}\S* can be written again: \d+ entries had to wait, none is lost", said.err)) == 1
        ), said.err
    assert "a checkpoint was not saved, and training goes on" in said.err and "Traceback" not in said.err


@pytest.mark.trust(12, "phalanx train on a disk with 0 bytes left", "exit 4 and what to do; on_error=continue trains")
@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_disk_that_is_full_from_the_start(warm, small_disk, tmp_path, on_error):
    run = on_a_disk(small_disk)
    save_run(replace(run, checkpoint=replace(run.checkpoint, on_error=on_error)), tmp_path / "run.yaml")
    fill(small_disk)
    done = warm.phalanx("train", str(tmp_path / "run.yaml"))
    assert done.returncode == 4 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert "No space left on device" in done.stderr
    steps = re.findall(r"step=(\d+) loss", done.stdout)
    assert steps == ([str(n) for n in range(1, STEPS + 1)] if on_error == "continue" else [])
    assert on_error == "stop" or "entries were never written" in done.stderr


def test_a_journal_is_bounded_and_counts(small_disk):
    """Filled up in the middle of an entry: the file has whole entries alone, in order; the oldest of those that
    waited are lost, and counted."""
    said: list[str] = []
    journal = Journal(small_disk / "journal", said.append, limit=1000)
    entries = [b"%05d\n" % n + b"x" * 94 for n in range(40)]
    journal.write(entries[0])
    fill(small_disk)
    (small_disk / "filler").touch()
    written = 0
    while not said:  # the page that the first entry began has room for more
        written += 1
        journal.write(entries[0])
    for entry in entries[1:]:
        journal.write(entry)
    (small_disk / "filler").unlink()
    journal.write(b"last\n")
    journal.close()
    data = (small_disk / "journal").read_bytes()
    body = data.removesuffix(b"last\n").replace(b"x" * 94, b"").split()
    assert len(data) % 100 == 5 and body[-9:] == [e[:5] for e in entries[-9:]], body
    assert len(said) == 2 and "oldest of them are lost" in said[1], said


def test_a_console_that_is_gone_ends_nothing(warm, tmp_path):
    """`phalanx train | head -1`."""
    run = make_run(tmp_path / "run", steps=5)
    save_run(run, tmp_path / "run.yaml")
    code = f"{warm.python} -m phalanx train {tmp_path}/run.yaml | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr
    assert len(rows_of(run)) == 5 and "done step=5" in (tmp_path / "run/log.txt").read_text()

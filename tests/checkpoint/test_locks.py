"""Locks where the file system has none: one run at a time all the same, no false "another run", and a word about
what to do."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from pathlib import Path

import pytest

from phalanx.base import file_lock
from phalanx.base.errors import CheckpointError, FolderInUse
from phalanx.base.file_lock import FileLock
from phalanx.base.placement import Placement
from phalanx.checkpoint.lock import FolderLock
from phalanx.cli.main import main
from phalanx.text.prepare import prepare
from phalanx.text.tokenizers import byte_tokenizer
from phalanx.training.main import train
from tests.harness.no_flock import forked, status
from tests.training.test_loop import make_run


@pytest.fixture
def impatient(monkeypatch):
    """Beats and patience of tests; a beat may come late on a machine with few cores."""
    monkeypatch.setattr(file_lock, "BEAT_S", 0.05)
    monkeypatch.setattr(file_lock, "PATIENCE_S", 3.0)
    monkeypatch.setattr(file_lock, "LOOK_S", 0.02)


def holds(folder: Path, until_killed: bool = True) -> int:
    """A process without flock that has the folder's lock."""
    reader, writer = os.pipe()

    def hold() -> None:
        lock = FolderLock(folder)
        os.write(writer, b"x")
        threading.Event().wait(120 if until_killed else 0)
        lock.release()

    child = forked(hold)
    os.close(writer)
    assert os.read(reader, 1) == b"x"
    os.close(reader)
    return child


@pytest.mark.trust(
    15,
    "phalanx train on a file system without flock",
    "it trains, and warns of what stands in for the lock and what is better",
)
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL])
def test_a_run_without_flock(tmp_path, capfd, number):
    run = make_run(tmp_path / "run", steps=2)
    assert status(forked(lambda: train(run, Placement()), number)) == 0
    said = capfd.readouterr()
    assert (
        said.err.count("warning: the file system of ") == 1
        and f"has no locks ({os.strerror(number)})" in said.err
        and "-o flock" in said.err
    )
    assert "done step=2" in said.out and "another run" not in said.err + said.out
    assert not list((tmp_path / "run").glob(".lock.beat*")) and (tmp_path / "run/.lock").read_text() == ""


@pytest.mark.trust(
    15, "two runs in one folder without flock", "the second is refused (exit 7) while the first lives, then takes over"
)
def test_one_run_at_a_time_without_flock(tmp_path, impatient):
    child = holds(tmp_path)

    def refused() -> None:
        with pytest.raises(FolderInUse, match=f"another run writes to .*: process {child} on host"):
            FolderLock(tmp_path)

    assert status(forked(refused)) == 0
    os.kill(child, signal.SIGKILL)
    status(child)

    def takes_over() -> None:
        lock = FolderLock(tmp_path)
        assert lock.took_over is not None and lock.took_over.startswith(f"process {child} ")
        lock.check()
        lock.keep()
        lock.release()
        recomputed = FolderLock(tmp_path)  # at once, for the last one let go of it itself
        assert recomputed.took_over is None
        recomputed.release()

    assert status(forked(takes_over)) == 0


def test_a_holder_that_stood_still_writes_nothing_more(tmp_path, impatient):
    """Stopped for longer than others are patient, it finds its place taken: the next commit is refused."""
    told, tell = os.pipe()

    def stands_still() -> None:
        lock = FolderLock(tmp_path)
        os.write(tell, b"x")
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(CheckpointError, match="another run took over .* while this one stood still"):
            lock.check()
        lock.release()

    child = forked(stands_still)
    assert os.read(told, 1) == b"x"
    os.waitpid(child, os.WUNTRACED)
    second = holds(tmp_path)
    os.kill(child, signal.SIGCONT)
    assert status(child) == 0
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == second, "what it released was no longer its own"
    os.kill(second, signal.SIGKILL)
    status(second)


def test_many_at_once_take_a_stale_lock_and_one_has_it(tmp_path, impatient):
    child = holds(tmp_path)
    os.kill(child, signal.SIGKILL)
    status(child)
    told, tell = os.pipe()
    others_left, leave = os.pipe()

    def compete() -> None:
        os.close(leave)
        try:
            lock = FolderLock(tmp_path)
        except FolderInUse:
            os.write(tell, b"0")
            return
        os.write(tell, b"1")
        os.read(others_left, 1)
        lock.check()
        lock.release()

    children = [forked(compete) for _ in range(4)]
    assert sorted(os.read(told, 1) for _ in children) == [b"0", b"0", b"0", b"1"]
    os.close(leave)
    assert [status(child) for child in children] == [0] * 4


def test_other_errors_of_a_lock_are_told_as_they_are(tmp_path, capfd):
    def broken() -> None:
        with pytest.raises(
            CheckpointError, match=r"\.lock cannot be locked: Input/output error; choose a `dir` that can be written to"
        ):
            FolderLock(tmp_path)

    assert status(forked(broken, errno.EIO)) == 0


def test_a_lock_of_a_file_is_waited_for(tmp_path):
    first = FileLock(tmp_path / "lock", "first")
    assert first.acquire() and first.unlocked is None
    second = FileLock(tmp_path / "lock", "second")
    assert not second.acquire() and second.holder() == "first"
    waits = threading.Thread(target=second.wait)
    waits.start()
    first.release()
    waits.join()
    assert second.holder() == "second" and not second.is_lost()
    second.release()


def test_preparing_data_without_flock(tmp_path):
    (tmp_path / "a.txt").write_text("arma virumque cano")
    assert status(forked(lambda: prepare([tmp_path / "a.txt"], tmp_path / "out", byte_tokenizer()))) == 0
    assert (tmp_path / "out.idx").exists() and not list(tmp_path.glob(".out*"))


def test_the_program_prepares_and_trains_without_flock(tmp_path, capfd):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("arma virumque cano " * 50)
    model = {
        "family": "gpt2",
        "vocab_size": 257,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
    }
    steps = {"steps": 1, "global_batch": 2, "micro_batch": 1, "seq_length": 16, "device": "cpu"}
    data = {"text": str(tmp_path / "in"), "tokenizer": "bytes", "split": "100,0,0"}
    config = {"model": model, "train": steps, "data": data, "dir": str(tmp_path / "run"), "log": {"report": False}}
    (tmp_path / "run.yaml").write_text(json.dumps(config))

    def program() -> None:
        with pytest.raises(SystemExit) as ended:
            main(["train", str(tmp_path / "run.yaml")])
        assert ended.value.code == 0

    assert status(forked(program)) == 0
    said = capfd.readouterr()
    assert "done step=1" in said.out and "has no locks" in said.err and "Traceback" not in said.err

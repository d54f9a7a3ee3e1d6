"""Faults at a step that is known beforehand: a rank pauses, the run's folder goes away, the same step goes wrong
once or every time."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import phalanx.engine.step as step
import phalanx.training.loop as loop
from phalanx.config.run import Run
from tests.faults.runs import begin, end, finish, rows_of, said, wait_for

PAUSE_S = 3.0


def at_step(number: int, deed: Callable[[], None]) -> None:
    """In a rank: done when the step of this number of the whole run begins."""
    rate = loop.learning_rate

    def learning_rate(optim: Any, now: int, steps: int) -> float:
        if now == number:
            deed()
        return rate(optim, now, steps)

    loop.learning_rate = learning_rate


def pauses(run: Run, world: int, pick: random.Random, seconds: float) -> int:
    """One rank is stopped for some seconds (SIGSTOP, SIGCONT), or comes late to where ranks meet: the others wait,
    and the rank says so."""
    victim, number = pick.randrange(world), pick.randrange(3, run.train.steps - 2)
    stop = partial(at_step, number, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    pids = begin(run, world, stop, victim, tcp=True)
    _, status = os.waitpid(pids[victim], os.WUNTRACED)
    assert os.WIFSTOPPED(status), f"it did not come to step {number}\n{said(run)}"
    time.sleep(PAUSE_S)  # the fault
    os.kill(pids[victim], signal.SIGCONT)
    codes = end(pids)
    assert codes == [0] * world, f"{codes}\n{said(run)}"
    own = (Path(run.dir).parent / f"output-{victim}.txt").read_text()
    assert "warning: this process stood still for " in own, said(run)
    return 1


def comes_late(run: Run, world: int, pick: random.Random, seconds: float) -> int:
    codes = end(begin(run, world, lambda: time.sleep(PAUSE_S), pick.randrange(world), tcp=True))
    assert codes == [0] * world, f"{codes}\n{said(run)}"
    return 1


def pauses_or_comes_late(run: Run, world: int, pick: random.Random, seconds: float) -> int:
    return pick.choice([pauses, comes_late])(run, world, pick, seconds)


# ---- the folder ----------------------------------------------------------------------------------


def folder_moved(run: Run, world: int, pick: random.Random, seconds: float) -> int:
    """The run's folder gets another name, and perhaps an empty one its own: all end with 4 at the next save and name
    it, and nothing is written there. Put back, the run goes on."""
    folder, replaced = Path(run.dir), pick.random() < 0.5
    away = folder.with_name("away")

    def move() -> None:
        folder.rename(away)
        if replaced:
            folder.mkdir()
            (folder / ".lock").touch()  # of another run

    codes = end(begin(run, world, partial(at_step, pick.randrange(3, run.train.steps), move), 0))
    assert codes == [4] * world, f"{codes}\n{said(run)}"
    told = "was replaced by another of its name" if replaced else "was moved or removed"
    assert f"the run's folder {folder} {told}" in said(run) or re.search(
        f"checkpoint error: .*{folder}/checkpoints/", said(run)
    ), said(run)
    left = [p.name for p in folder.rglob("*")] if folder.exists() else []
    assert set(left) <= {".lock"}, left
    if replaced:
        (folder / ".lock").unlink()
        folder.rmdir()
    away.rename(folder)
    return 1


def checkpoints_removed(run: Run, world: int, pick: random.Random, seconds: float) -> int:
    """The folder of checkpoints is gone: they are saved anew into one of its name, or the run ends with 4 if one was
    being saved."""
    folder = Path(run.dir) / "checkpoints"

    def move() -> None:
        with suppress(FileNotFoundError):
            folder.rename(Path(run.dir).parent / "away")

    codes = end(begin(run, world, partial(at_step, pick.randrange(4, run.train.steps), move), 0))
    assert set(codes) in ({0}, {4}) and (codes[0] == 0 or str(folder) in said(run)), f"{codes}\n{said(run)}"
    return 1


def read_only(run: Run, world: int, pick: random.Random, seconds: float) -> int:
    """The folder of checkpoints may no longer be written to: the run ends with 4, or trains on to its end, as
    checkpoint.on_error says."""
    folder, policy = Path(run.dir) / "checkpoints", pick.choice(["stop", "continue"])
    folder.mkdir(parents=True)
    check_mounts(folder)
    deed = partial(at_step, pick.randrange(3, run.train.steps), lambda: protect(folder))
    try:
        asked = replace(run, checkpoint=replace(run.checkpoint, on_error=policy))
        codes = end(begin(asked, world, deed, 0))
    finally:
        unprotect(folder)
    assert codes == [4] * world and "Read-only file system" in said(run), f"{codes}\n{said(run)}"
    assert policy == "stop" or len(rows_of(run)) == run.train.steps, "it trained to the end"
    return 1


def check_mounts(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("a folder is made read-only by a mount, which needs root")
    protect(folder)
    unprotect(folder)


def protect(folder: Path) -> None:
    subprocess.run(["mount", "--bind", folder, folder], check=True, timeout=20)
    busy = ["mount", "-o", "remount,bind,ro", folder]  # as long as a file of a save is open
    wait_for(lambda: subprocess.run(busy, capture_output=True, timeout=20).returncode == 0)


def unprotect(folder: Path) -> None:
    subprocess.run(["umount", folder], check=os.path.ismount(folder), capture_output=True, timeout=20)


def folder_goes(run: Run, world: int, pick: random.Random, seconds: float) -> int:
    return pick.choice([folder_moved, checkpoints_removed, read_only])(run, world, pick, seconds)


# ---- a step that goes wrong ----------------------------------------------------------------------


def wrong_result(number: int) -> None:
    """In a rank: one gradient of this step becomes infinite, as a flipped bit makes it."""
    now, accumulate = [False], step.accumulate

    def add_up(state: Any, batches: Any) -> Any:
        tokens = accumulate(state, batches)
        if now[0]:
            counted = [view for flat in state.buffers.flat for view in flat.counted() if len(view)]
            counted[0][0] = float("inf")
        now[0] = False
        return tokens

    at_step(number, lambda: now.__setitem__(0, True))
    step.accumulate = add_up


def raises(number: int) -> None:
    def deed() -> None:
        raise ValueError("the program is wrong")

    at_step(number, deed)


def wrong_step(run: Run, world: int, pick: random.Random, seconds: float) -> int:
    """A step stops the run: once, and the next start says that it did not repeat; or three times, and it says that
    it does."""
    number, victim, times = pick.randrange(4, run.train.steps), pick.randrange(world), pick.choice([1, 3])
    how, own, others = pick.choice([(wrong_result, 5, 5), (raises, 1, 6)])
    stops = replace(run, train=replace(run.train, guard=replace(run.train.guard, policy="stop")))
    for time_ in range(1, times + 1):
        codes = end(begin(stops, world, partial(how, number), victim, tcp=True))
        assert codes == [own if rank == victim else others for rank in range(world)], f"{codes}\n{said(run)}"
        recomputed = (
            f"the run was stopped {time_} times in a row at step {number} by the same kind of error: it repeats"
        )
        assert (recomputed in said(run)) == (time_ > 1) and ("times in a row" in said(run)) == (time_ > 1), said(run)
        assert how is raises or f"step {number} is bad: the loss or the gradient norm is not finite" in said(run), said(
            run
        )
    finish(run, world)
    assert f"step {number}, where the run was stopped before, went well this time" in said(run), said(run)
    finish(run, world)
    assert "went well this time" not in said(run), said(run)
    return times

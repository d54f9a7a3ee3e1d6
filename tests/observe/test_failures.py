"""What a run's folder knows of the steps that stopped it, by hand; whole runs are in tests/faults/places.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.base.errors import NumericalStop, PeerLost, PhalanxError, Preempted
from phalanx.base.log import Log
from phalanx.observe.failures import Failures


def start(folder: Path, capsys, steps: range, error: BaseException | None = None, rank: int = 0) -> str:
    """What is said of a run that begins these steps, and then ends or fails."""
    try:
        with Failures(folder, Log(rank)) as failures:
            for step in steps:
                failures.began(step)
            if error is not None:
                raise error
    except (PhalanxError, ValueError, KeyboardInterrupt):
        pass
    told = capsys.readouterr()
    return told.out + told.err


def test_what_stops_a_run_again_is_told_and_what_does_not(tmp_path, capsys):
    bad = NumericalStop("step 7 is bad", step=7)
    assert start(tmp_path, capsys, range(1, 9), bad) == ""
    assert "2 times in a row at step 7" in start(tmp_path, capsys, range(5, 9), bad)
    assert "3 times in a row at step 7" in start(tmp_path, capsys, range(5, 9), bad)
    assert start(tmp_path, capsys, range(5, 8), PeerLost("rank 1")) == ""  # the same step in another way
    assert start(tmp_path, capsys, range(5, 9), bad) == ""  # no longer in a row
    assert start(tmp_path, capsys, range(5, 9), ValueError()) == ""  # another step
    good = start(tmp_path, capsys, range(5, 13))
    assert good.startswith(
        "step 8, where the run was stopped before, went well this time: what stopped it did not repeat (ValueError"
    )
    assert start(tmp_path, capsys, range(10, 20)) == ""


@pytest.mark.parametrize("last, said", [(6, False), (7, True)])
def test_the_last_step_of_a_run_can_be_what_went_well(tmp_path, capsys, last, said):
    start(tmp_path, capsys, range(1, 8), ValueError("no"))
    assert ("step 7, " in start(tmp_path, capsys, range(5, last + 1))) == said


def test_what_is_no_failure_of_a_step_is_not_written(tmp_path, capsys):
    """A request to stop, a key that interrupts, an error before the first step, what other ranks see; and a line
    that was cut short."""
    for steps, error, rank in (
        (range(1, 4), Preempted("asked"), 0),
        (range(1, 4), KeyboardInterrupt(), 0),
        (range(0), ValueError("early"), 0),
        (range(1, 4), ValueError("mine"), 1),
    ):
        start(tmp_path, capsys, steps, error, rank)
    assert not (tmp_path / "failures.jsonl").exists()
    (tmp_path / "failures.jsonl").write_text('{"step": 3, "ki')
    assert start(tmp_path, capsys, range(1, 6)) == ""


def test_a_folder_that_is_gone_hides_no_error(tmp_path, capsys):
    assert start(tmp_path / "gone", capsys, range(1, 4), ValueError("no")) == ""

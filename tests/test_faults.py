"""Nothing is lost: a sample of tests/faults.py here, all of it with `make soak`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from phalanx.comm.heartbeat import Beat, verdict
from tests.faults import CASES
from tests.pool import warm_imports


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("which", ["sample", pytest.param("all", marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_nothing_is_lost(tmp_path, name, which):
    warm_imports()
    _, sample, whole = CASES[name]
    tally = (sample if which == "sample" else whole)(tmp_path)
    assert tally.faults > 0 and tally.runs > 0 and tally.differing == 0, tally


def test_the_table_has_every_case():
    rows = (Path(__file__).resolve().parent.parent / "docs/faults.md").read_text().splitlines()
    shown = {row.split(" | ")[0].removeprefix("| "): row.split(" | ")[2:5] for row in rows if row.startswith("| ") and " --- " not in row}
    assert set(shown) - {"case"} == set(CASES)
    assert all(int(faults) > 0 and int(differing) == 0 for name, (faults, _, differing) in shown.items() if name != "case")


def beat(rank: int, number: int, step: int = 7, place: str = "train/step.py:60 in update", waits: bool = False, failed: bool = False) -> Beat:
    return Beat(rank, f"node{rank}", 100 + rank, number, step, place, waits, failed)


@pytest.mark.parametrize("before, after, words", [
    ([beat(1, 5, waits=True), beat(2, 5)], [beat(1, 7, waits=True), beat(2, 5)],
     r"^rank 2 \(host node2, process 102\) is silent: .*last seen in step 7"),
    ([beat(0, 0, failed=True), beat(1, 5, place="data/loader.py:8 in next")], [beat(0, 0, failed=True), beat(1, 7, place="data/loader.py:8 in next")],
     r"^rank 1 .* did not come to where the others wait: it is in step 7 at data/loader\.py:8 in next"),
    ([beat(0, 5, waits=True), beat(1, 5, step=7)], [beat(0, 7, waits=True), beat(1, 7, step=8)], "^every rank answers"),
    ([beat(r, 5) for r in range(12)], [beat(r, 5) for r in range(12)], r"^rank 0 .*rank 7 \(host node7, process 107\) and 4 more are silent"),
])  # fmt: skip
def test_who_is_to_blame(before, after, words):
    """The silent one before the one that stands still; nobody who has moved, waits, or has lost a peer itself."""
    assert re.search(words, verdict(before, after))

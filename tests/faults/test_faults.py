"""Nothing is lost: a sample of each section of tests/faults/matrix.py here, all of it with `make soak`."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from phalanx.comm.health.heartbeat import Beat, verdict
from tests.faults import cases as fault_cases
from tests.faults.matrix import SECTIONS, Result, joined, main, missing, parts_of, table
from tests.harness.pool import warm_imports

# Of faults that another part of `make test` has too, or that take long: with `make soak`, like all.
LATER = ("a rank is slow", "a rank pauses for 3 s, or comes late by as much", "damaged checkpoint: seed 1")
LATER += ("the process dies in every storage operation: sample of four threads", "no room on the disk: seed 0")
LATER += ("SIGTERM or SIGUSR1 to one rank: seed 0",)
SAMPLE = {f"{section}: {name}": part for section, name, part in parts_of(SECTIONS, True)}
PARTS = [pytest.param(part, id=name) for name, part in SAMPLE.items() if not name.startswith(LATER)]
SOAK = [pytest.mark.soak, pytest.mark.timeout(900)]
PARTS += [pytest.param(part, id=f"all, {s}: {name}", marks=SOAK) for s, name, part in parts_of(SECTIONS, False)]


@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_lost(tmp_path, part):
    warm_imports()
    tally = part(tmp_path)
    assert tally.faults > 0 and tally.runs > 0 and tally.differing == 0, tally


def test_the_table_has_every_section_without_a_failure():
    text = (Path(__file__).resolve().parents[2] / "docs/faults.md").read_text()
    rows = text.split("\n## ")[0].splitlines()
    shown = {
        row.split(" | ")[0].removeprefix("| "): row.split(" | ")
        for row in rows
        if row.startswith("| ") and " --- " not in row
    }
    assert set(shown) - {"case"} == {s.name for s in SECTIONS}
    for name, (_, _, _, faults, _, differing, failed, _) in shown.items():
        assert name == "case" or (int(faults) > 0 and int(differing) == 0 and int(failed) == 0), name


def test_every_fault_names_what_shows_it():
    tests, names = Path(__file__).resolve().parents[1], {s.name for s in SECTIONS}
    for case in fault_cases.CASES:
        assert case.by or case.lacks, case
        for by in case.by:
            file, _, name = by.partition("::")
            if by not in names:
                [path] = tests.rglob(f"test_{file}.py")
                assert f"\ndef test_{name}(" in path.read_text(), (case.id, by)
    assert fault_cases.table() in (tests.parent / "docs/faults.md").read_text()


def test_parts_of_several_machines_are_joined(tmp_path):
    """The later file's result of a part counts; an error is a failure of the table, and what nobody did is told."""
    first = [
        Result("kill -9 at any time", "seed 0", 5, 1, 2, 1.0, "", "here"),
        Result("kill -9 at any time", "seed 1", 4, 1, 0, 1.0, "", "here"),
    ]
    second = [
        Result("kill -9 at any time", "seed 0", 6, 1, 0, 2.0, "", "there"),
        Result("damaged checkpoint", "seed 7", 0, 0, 0, 1.0, "no", "there"),
    ]
    for name, results in (("a", first), ("b", second)):
        (tmp_path / name).write_text(json.dumps([asdict(r) for r in results]))
    results = joined([str(tmp_path / "a"), str(tmp_path / "b")])
    text = table(results)
    assert "| seeds 0 to 1 | 10 | 2 | 0 | 0 | 3 |" in text and "| seeds 7 | 0 | 0 | 0 | 1 | 1 |" in text
    assert "- here\n- there\n" in text and "kill -9 at any time: seed 2" in missing(results)
    assert main([str(tmp_path / "out.md"), "--join", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert (tmp_path / "out.md").read_text() == text


def beat(
    rank: int,
    number: int,
    step: int = 7,
    place: str = "engine/step.py:60 in update",
    waits: bool = False,
    failed: bool = False,
) -> Beat:
    return Beat(rank, f"node{rank}", 100 + rank, number, step, place, waits, failed)


@pytest.mark.parametrize(
    "before, after, words",
    [
        (
            [beat(1, 5, waits=True), beat(2, 5)],
            [beat(1, 7, waits=True), beat(2, 5)],
            r"^rank 2 \(host node2, process 102\) is silent: .*last seen in step 7",
        ),
        (
            [beat(0, 0, failed=True), beat(1, 5, place="data/loader.py:8 in next")],
            [beat(0, 0, failed=True), beat(1, 7, place="data/loader.py:8 in next")],
            r"^rank 1 .* did not come to where the others wait: it is in step 7 at data/loader\.py:8 in next",
        ),
        (
            [beat(0, 5, waits=True), beat(1, 5, step=7)],
            [beat(0, 7, waits=True), beat(1, 7, step=8)],
            "^every rank answers",
        ),
        (
            [beat(r, 5) for r in range(12)],
            [beat(r, 5) for r in range(12)],
            r"^rank 0 .*rank 7 \(host node7, process 107\) and 4 more are silent",
        ),
    ],
)
def test_who_is_to_blame(before, after, words):
    """The silent one before the one that stands still; nobody who has moved, waits, or has lost a peer itself."""
    assert re.search(words, verdict(before, after))

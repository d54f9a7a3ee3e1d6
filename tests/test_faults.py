"""Nothing is lost: a sample of tests/faults.py here, all of it with `make soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

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

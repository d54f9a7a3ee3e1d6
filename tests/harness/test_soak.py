"""The table of a run of tests says of each function how its tests ended, and names what failed and why others were
skipped."""

from __future__ import annotations

from types import SimpleNamespace

from tests.harness.soak import table


def report(test: str, seconds: float, why: object = "") -> SimpleNamespace:
    return SimpleNamespace(nodeid=f"tests/{test}", duration=seconds, longrepr=why)


def test_every_test_is_counted_once():
    """A test's setup, call and teardown are three reports; a setup that raises is a failure; sections of the fault
    matrix have rows."""
    fault = "test_faults.py::test_nothing_is_lost[all, no room on the disk: seed 3]"
    text = table(
        {
            "passed": [report("test_a.py::test_x[1]", 2.0), report("test_a.py::test_x[2]", 5.0), report(fault, 30.0)],
            "": [report("test_a.py::test_x[1]", 1.0)],
            "failed": [report("test_b.py::test_y", 3.0)],
            "error": [report("test_b.py::test_z", 0.5)],
            "skipped": [report("test_b.py::test_w", 0.0, ("file", 3, "Skipped: no moto"))],
        },
        4,
    )
    rows = {
        row.split(" | ")[0]: row.removesuffix(" |").split(" | ")[1:]
        for row in text.splitlines()
        if row.startswith("| `") or "| all" in row
    }
    assert rows == {
        "| `test_faults.py::test_nothing_is_lost no room on the disk`": ["1", "1", "0", "0", "30", "30"],
        "| `test_a.py::test_x`": ["2", "2", "0", "0", "8", "5"],
        "| `test_b.py::test_y`": ["1", "0", "1", "0", "3", "3"],
        "| `test_b.py::test_z`": ["1", "0", "1", "0", "0", "0"],
        "| `test_b.py::test_w`": ["1", "0", "0", "1", "0", "0"],
        "| all": ["6", "3", "2", "1", "42", "30"],
    }
    assert "- tests/test_b.py::test_y\n- tests/test_b.py::test_z\n" in text
    assert "- 1: Skipped: no moto\n" in text and "over 4 workers" in text

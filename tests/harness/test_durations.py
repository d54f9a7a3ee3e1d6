"""What `--record-durations` writes: the seconds of files, by which `make test` orders them."""

from __future__ import annotations

import json
from types import SimpleNamespace

from tests.conftest import DURATIONS, TESTS, recorded


def test_files_that_were_run_are_recorded_and_others_stay():
    known = {"doors/test_docs.py": 50, "nn/test_moe.py": 20, "nn/test_gone.py": 90}
    ran = [("tests/nn/test_moe.py::test_a", 4.0), ("tests/nn/test_moe.py::test_b[1]", 3.4), ("nn/test_fp8.py::c", 80)]
    found = recorded(known, [SimpleNamespace(nodeid=name, duration=s) for name, s in ran])
    assert list(found.items()) == [("nn/test_fp8.py", 80), ("doors/test_docs.py", 50), ("nn/test_moe.py", 7)]
    assert "nn/test_moe.py" not in recorded(known, [SimpleNamespace(nodeid="tests/nn/test_moe.py::a", duration=1.0)])


def test_what_is_recorded_names_files_that_are_there():
    assert not [name for name in json.loads(DURATIONS.read_text(encoding="utf-8")) if not (TESTS / name).is_file()]

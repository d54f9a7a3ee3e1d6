"""docs/architecture.md shows the path from `main` to `backward` as it is, and it is short."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.harness.main_to_backward import MARK, ROOT, code_lines

PAGE = ROOT / "docs/architecture.md"


def test_the_page_shows_the_path_from_main_to_backward(tmp_path):
    copy = tmp_path / "architecture.md"
    copy.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    command = [sys.executable, "-m", "tests.harness.main_to_backward", str(copy)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)  # a process of its own: the run takes its signals
    page = copy.read_text(encoding="utf-8")
    assert page == PAGE.read_text(encoding="utf-8"), (
        "run: python -m tests.harness.main_to_backward docs/architecture.md"
    )
    (section,) = MARK.findall(page)
    assert section.index("`main`") < section.index("`Loop.train_step`") < section.index("`backward_from`")
    (total,) = re.findall(r"^(\d+) lines of code", section, re.MULTILINE)
    assert int(total) < 200


def test_lines_of_code_are_counted_without_comments():
    source = """@decorated(
    1)
def f(x):
    \"\"\"What it does,
    at length.\"\"\"
    # why
    y = x

    return g(lambda: y)
"""
    assert code_lines(source, 1) == {3, 7, 9}
    assert code_lines(source, 9) == {9}

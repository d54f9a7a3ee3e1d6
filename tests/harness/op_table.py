"""The table of ops in the docs.

    python -m tests.harness.op_table docs/ops-and-modules.md

writes it; tests/ops/test_kernels.py compares.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from phalanx.base.registry import BUILT_IN
from phalanx.ops.op import rows

MARK = re.compile(r"<!-- table: ops -->\n.*?<!-- end -->", re.DOTALL)


def with_table(page: str) -> str:
    """The page with the table of our ops as they are."""
    head, *ours = rows()
    lines = [head, ("---",) * 4, *(row for row in ours if row[0] in BUILT_IN["op"])]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return MARK.sub(lambda _: f"<!-- table: ops -->\n{table}\n<!-- end -->", page)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")

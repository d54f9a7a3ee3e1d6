"""The table of docs/faults.md that says what was found when Phalanx was tried as a user, an operator and an attacker
would.

    python -m tests.harness.trust docs/faults.md

Each row is a `trust` marker of a test: the number of the point, what was done that went wrong before, and what
happens now. The rows are read from the source of the tests, so the table can be written, and compared with the page,
without running them.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

BEGIN = "<!-- trust: written by `python -m tests.harness.trust docs/faults.md` -->"
END = "<!-- trust: end -->"
TEXT = """## Tried as a user, an operator and an attacker would

Phalanx was handed to people who had never seen it, to operators and to an attacker. Each row is something that went wrong then, and what
happens now; the test in the last column fails without the change.
"""  # noqa: E501


@dataclass(frozen=True, order=True)
class Row:
    number: int
    file: str
    line: int
    before: str
    now: str
    test: str

    @property
    def text(self) -> str:
        where = f"`{self.file}` {self.test.removeprefix('test_').replace('_', ' ')}"
        return f"| {self.number} | {self.before} | {self.now} | {where} |"


def rows(folder: str | Path = Path(__file__).parents[1]) -> list[Row]:
    """Every marker below the folder, by number. ValueError where a marker is not three literals."""
    found = []
    for path in sorted(Path(folder).rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                found += [_row(path, node, call) for call in node.decorator_list if _is_marker(call)]
    return sorted(found)


def _is_marker(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.trust"


def _row(path: Path, test: ast.FunctionDef, call: ast.expr) -> Row:
    values = [ast.literal_eval(value) for value in call.args] if isinstance(call, ast.Call) else []
    if len(values) != 3:
        raise ValueError(
            f"{path.name}:{test.lineno}: trust takes a number, what went wrong before and what happens now"
        )
    number, before, now = values
    return Row(number, path.name, test.lineno, before.replace("|", "\\|"), now.replace("|", "\\|"), test.name)


def section() -> str:
    return f"{TEXT}\n{table()}\n"


def table() -> str:
    head = ["| no. | what was done | what happens now | shown by |", "| --- | --- | --- | --- |"]
    return "\n".join([BEGIN, "", *head, *(row.text for row in rows()), "", END])


def with_table(page: str) -> str:
    """The page with the table as the tests give it today."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{table()}{after}"


def main(page: str) -> None:
    path = Path(page)
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])

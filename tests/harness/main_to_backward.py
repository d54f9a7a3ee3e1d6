"""The section of docs/architecture.md from `main` to `backward`: the calls that lead to the first backward of a real
run, one process on a CPU, as Python's stack shows them.

    python -m tests.harness.main_to_backward docs/architecture.md

writes it. A function counts with its lines of code: without decorators, docstrings, comments and blank lines.
tests/schedule/test_main_to_backward.py compares.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "phalanx"
MARK = re.compile(r"<!-- main to backward -->\n.*?<!-- end -->", re.DOTALL)
RUN = (
    "model.family=llama",
    *("model.vocab_size=64", "model.hidden_size=32", "model.intermediate_size=42"),
    *("model.num_hidden_layers=2", "model.num_attention_heads=4"),
    *("data.mock=true", "train.steps=1", "train.global_batch=2", "train.micro_batch=1", "train.seq_length=16"),
    *("train.device=cpu", "train.precision=fp32"),
)


class Reached(BaseException):
    """The first backward has begun: the run has shown what it is for."""


@dataclass(frozen=True)
class Call:
    """A function of the package that is under way when backward begins."""

    file: str
    function: str
    lines: frozenset[int]


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The functions of the package that are under way, the innermost first."""
    while frame is not None:
        if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            yield frame
        frame = frame.f_back


def stack_at_backward() -> list[tuple[str, str, int]]:
    """File, qualified name and line of the functions between phalanx.cli.main.main and the first backward, in order."""
    import torch

    from phalanx.cli.main import main

    found: list[tuple[str, str, int]] = []

    def backward(*_: object, **__: object) -> None:
        for frame in frames(sys._getframe()):
            code = frame.f_code
            found.append((str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname, code.co_firstlineno))
        raise Reached

    with TemporaryDirectory() as folder, mock.patch.object(torch.Tensor, "backward", backward):
        config = Path(folder, "run.yaml")
        config.write_text("")
        try:
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                main(["train", str(config), f"dir={folder}/run", *RUN])
        except Reached:
            return found[::-1]
    raise RuntimeError("the run ended before its first backward")


def calls() -> list[Call]:
    made: list[Call] = []
    for file, function, first in stack_at_backward():
        path = ROOT / file
        source = path.read_text(encoding="utf-8")
        made.append(Call(file, function, code_lines(source, first)))
    return made


def code_lines(source: str, first: int) -> frozenset[int]:
    """The lines with code of the function that begins at this line, its decorators included."""
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.Lambda)]
    node = next(n for n in nodes if begins(n) == first)
    inside = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
        inside -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    text = source.splitlines()
    return frozenset(n for n in inside if text[n - 1].strip() and not text[n - 1].strip().startswith("#"))


def begins(node: ast.FunctionDef | ast.Lambda) -> int:
    decorators = [d.lineno for d in node.decorator_list] if isinstance(node, ast.FunctionDef) else []
    return min([node.lineno, *decorators])


def table(found: list[Call]) -> str:
    """Each call with its lines; what lies inside a function that has been counted adds none."""
    counted: set[tuple[str, int]] = set()
    rows = ["| file | function | lines |", "| --- | --- | --- |"]
    for call in found:
        new = {(call.file, line) for line in call.lines} - counted
        counted |= new
        rows.append(f"| `{call.file.removeprefix('phalanx/')}` | `{call.function}` | {len(new)} |")
    files = len({call.file for call in found})
    return "\n".join((*rows, "", f"{lines_of(found)} lines of code in {len(found)} functions of {files} files."))


def with_section(page: str, found: list[Call]) -> str:
    section = f"<!-- main to backward -->\n{table(found)}\n<!-- end -->"
    return MARK.sub(lambda _: section, page)


def lines_of(found: list[Call]) -> int:
    return len({(call.file, line) for call in found for line in call.lines})


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(with_section(target.read_text(encoding="utf-8"), calls()), encoding="utf-8")
